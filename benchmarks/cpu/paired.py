"""Gain from common random numbers: two settings compared with the same or with different seeds.

    python benchmarks/cpu/paired.py CORPUS --json benchmarks/results/paired.json

A seed decides the initial weights and the order of the data. The demo's model at base width 32 is
trained at seven learning rates with twelve seeds each. For every two rates the result has the
variance, over seeds, of the difference between their final losses with the same seed, divided by
that with different seeds. The inverse of this ratio is the factor of runs that an unpaired
comparison needs for the same certainty. Intervals come from 2,000 bootstraps over seeds.

CORPUS is a folder written by `forerun tokenize`. It takes about 3 minutes of one core; `--quick`
uses four seeds.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pruning import trained

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from process_tree import machine

Floats = NDArray[np.float64]
OCTAVES = (-7.5, -6.5, -6.0, -5.5, -5.0, -4.5, -3.5)
WARMUP, CLIP = 0.25, 1.0
NUM_SEEDS, NUM_BOOTSTRAPS = 12, 2000
SPANS = {
    "neighbours, half an octave": (0.5, 0.5),
    "1 to 1.5 octaves": (1.0, 1.5),
    "2 to 4 octaves": (2.0, 4.0),
}
"""Two rates' distance."""


def ratio(losses_RS: Floats, pairs: list[tuple[int, int]]) -> float:
    """Variance of paired differences over that of unpaired ones, both summed over pairs of rates
    [rate][seed].
    """
    paired = sum(np.var(losses_RS[a] - losses_RS[b], ddof=1) for a, b in pairs)
    unpaired = sum(np.var(losses_RS[a], ddof=1) + np.var(losses_RS[b], ddof=1) for a, b in pairs)
    return float(paired / unpaired)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("corpus", type=Path)
    parser.add_argument("--json", type=Path, help="Where the numbers go.")
    parser.add_argument("--quick", action="store_true", help="Four seeds.")
    options = parser.parse_args()
    began, seeds = time.monotonic(), range(4 if options.quick else NUM_SEEDS)
    points = [(2.0**octaves, WARMUP, CLIP) for octaves in OCTAVES]
    losses_RS = np.array([trained(options.corpus, "cosine", seed, points)[1] for seed in seeds]).T
    rows: list[dict[str, Any]] = []
    for name, (least, most) in SPANS.items():
        pairs = [
            (a, b)
            for a, b in itertools.combinations(range(len(OCTAVES)), 2)
            if _within(a, b, least, most)
        ]
        rng = np.random.default_rng(0)
        draws = [
            ratio(losses_RS[:, rng.integers(len(seeds), size=len(seeds))], pairs)
            for _ in range(NUM_BOOTSTRAPS)
        ]
        found = ratio(losses_RS, pairs)
        low, high = (float(q) for q in np.nanquantile(draws, (0.05, 0.95)))
        paired = np.mean([np.std(losses_RS[a] - losses_RS[b], ddof=1) for a, b in pairs])
        rows.append(
            {
                "distance": name,
                "num_pairs": len(pairs),
                "ratio": found,
                "interval_90": [low, high],
                "paired_std_nats": float(paired),
                "unpaired_std_nats": float(paired / found**0.5),
                "runs_an_unpaired_one_needs": 1 / found,
            }
        )
        print(
            f"{name:28} variance {found:.2f} of unpaired ({low:.2f} to {high:.2f}): as sure with "
            f"1/{1 / found:.1f} of "
            f"the runs; standard deviation {paired:.4f} nats"
        )
    body = {
        "pairs": rows,
        "octaves": OCTAVES,
        "losses_nats": losses_RS.tolist(),
        "std_over_seeds_nats": losses_RS.std(axis=1, ddof=1).tolist(),
        "mean_nats": losses_RS.mean(axis=1).tolist(),
        "num_seeds": len(seeds),
        "machine": machine(),
        "seconds": time.monotonic() - began,
    }
    print(
        "over seeds a rate's final loss has standard deviations "
        f"{np.round(body['std_over_seeds_nats'], 4)} nats"
    )
    print(f"{body['seconds']:.0f} s", file=sys.stderr)
    if options.json:
        options.json.write_text(json.dumps(body, indent=1, sort_keys=True) + "\n")


def _within(a: int, b: int, least: float, most: float) -> bool:
    return least <= OCTAVES[b] - OCTAVES[a] <= most


if __name__ == "__main__":
    main()
