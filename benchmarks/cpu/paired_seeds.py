"""Gain from common random numbers: two settings compared with the same or with different seeds.

    python benchmarks/cpu/paired_seeds.py CORPUS --json benchmarks/results/paired_seeds.json

A seed decides the initial weights and the order of the data. The demo's model at base width 32 is
trained at seven learning rates with twelve seeds each. For every two rates the result has the
variance, over seeds, of the difference between their final losses with the same seed, divided by
that with different seeds. The inverse of this ratio is the factor of runs that an unpaired
comparison needs for the same certainty. Intervals come from 2,000 bootstraps over seeds.

The script prints a line for each distance between two rates, and writes the ratios and the losses.
CORPUS is a folder written by `forerun tokenize`. It takes about 3 minutes of one core; `--quick`
uses four seeds.
"""

from __future__ import annotations

import itertools
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pruning import train_points

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from result_files import describe_machine, make_parser, write_result

Floats = NDArray[np.float64]
OCTAVES = (-7.5, -6.5, -6.0, -5.5, -5.0, -4.5, -3.5)
"""Log2 of the learning rates that are compared."""
WARMUP, CLIP = 0.25, 1.0
"""Warmup as a share of the steps, and clip norm, of all runs."""
NUM_SEEDS, NUM_BOOTSTRAPS = 12, 2000
SPANS = {
    "neighbours, half an octave": (0.5, 0.5),
    "1 to 1.5 octaves": (1.0, 1.5),
    "2 to 4 octaves": (2.0, 4.0),
}
"""Minimum and maximum distance of two rates, in octaves."""


def compute_variance_ratio(losses_RS: Floats, pairs: list[tuple[int, int]]) -> float:
    """Return the variance of paired differences over that of unpaired ones.

    Args:
        losses_RS: Final losses in nats, by rate and seed.
        pairs: Pairs of rates to compare; variances are summed over them.
    """
    paired = sum(np.var(losses_RS[a] - losses_RS[b], ddof=1) for a, b in pairs)
    unpaired = sum(np.var(losses_RS[a], ddof=1) + np.var(losses_RS[b], ddof=1) for a, b in pairs)
    return float(paired / unpaired)


def compare_pairs(
    name: str, min_octaves: float, max_octaves: float, losses_RS: Floats
) -> dict[str, Any]:
    """Print and return the variance ratio over pairs of rates in a range of distances.

    Args:
        name: Name of the range of distances.
        min_octaves: Minimum distance of two rates.
        max_octaves: Maximum distance of two rates.
        losses_RS: Final losses in nats, by rate and seed.
    """
    num_seeds = losses_RS.shape[1]
    pairs = [
        (a, b)
        for a, b in itertools.combinations(range(len(OCTAVES)), 2)
        if min_octaves <= OCTAVES[b] - OCTAVES[a] <= max_octaves
    ]
    rng = np.random.default_rng(0)
    bootstrap_ratios = [
        compute_variance_ratio(losses_RS[:, rng.integers(num_seeds, size=num_seeds)], pairs)
        for _ in range(NUM_BOOTSTRAPS)
    ]
    ratio = compute_variance_ratio(losses_RS, pairs)
    low, high = (float(q) for q in np.nanquantile(bootstrap_ratios, (0.05, 0.95)))
    paired = np.mean([np.std(losses_RS[a] - losses_RS[b], ddof=1) for a, b in pairs])
    row = {
        "distance": name,
        "num_pairs": len(pairs),
        "ratio": ratio,
        "interval_90": [low, high],
        "paired_std_nats": float(paired),
        "unpaired_std_nats": float(paired / ratio**0.5),
        "runs_an_unpaired_one_needs": 1 / ratio,
    }
    print(
        f"{name:28} variance {ratio:.2f} ({low:.2f} to {high:.2f}) of that of different seeds: "
        f"1/{1 / ratio:.1f} of the runs give the same certainty; standard deviation "
        f"{paired:.4f} nats"
    )
    return row


def main() -> None:
    """Train all rates and seeds, print the ratios, and write the result."""
    parser = make_parser(__doc__, quick="Use four seeds.")
    parser.add_argument("corpus", type=Path, help="Folder written by `forerun tokenize`.")
    options = parser.parse_args()
    began, seeds = time.monotonic(), range(4 if options.quick else NUM_SEEDS)
    points = [(2.0**octaves, WARMUP, CLIP) for octaves in OCTAVES]
    losses_RS = np.array(
        [train_points(options.corpus, "cosine", seed, points)[1] for seed in seeds]
    ).T
    rows: list[dict[str, Any]] = []
    for name, (min_octaves, max_octaves) in SPANS.items():
        rows.append(compare_pairs(name, min_octaves, max_octaves, losses_RS))
    result = {
        "pairs": rows,
        "octaves": OCTAVES,
        "losses_nats": losses_RS.tolist(),
        "std_over_seeds_nats": losses_RS.std(axis=1, ddof=1).tolist(),
        "mean_nats": losses_RS.mean(axis=1).tolist(),
        "num_seeds": len(seeds),
        "machine": describe_machine(),
        "seconds": time.monotonic() - began,
    }
    print(
        "standard deviations of each rate's final loss over seeds: "
        f"{np.round(result['std_over_seeds_nats'], 4)} nats"
    )
    print(f"{result['seconds']:.0f} s", file=sys.stderr)
    write_result(options.json, result)


if __name__ == "__main__":
    main()
