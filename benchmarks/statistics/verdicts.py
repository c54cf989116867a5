"""Accuracy of the transfer verdict and of its intervals on simulated loss basins.

    python benchmarks/statistics/verdicts.py --json benchmarks/results/verdicts.json

Runs are drawn from loss basins with a known optimum per size, drift and regret at the target
(tests/support/transfer/planted_basins.py), and judged. Each world is judged twice: at the target,
the optimum of the base has no regret (loss above the target's optimum), or three times the regret
that is allowed, which is the margin. The first table varies noise and number of runs. The second
varies the truth at one design, including shapes that the fit does not have.

The tables have the shares of right, wrong and undecided verdicts, and the shares of 90 % intervals
that cover the optimum of each size, the drift and the regret. They also have the width of the
intervals of optimum and drift relative to an oracle's: least squares that knows the basin's shape
with its asymmetry, the noise, and the scatter of optima about their line, and uses every run. The
script prints both tables and writes them. It takes about 18 minutes of one core; `--quick` draws a
tenth as many worlds.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "support" / "transfer"))

from planted_basins import (
    WIDE,
    World,
    compute_lopsided_quartic,
    compute_parabola,
    compute_straight_cliff,
    compute_two_parabolas,
    make_linex,
    make_power,
    tally_verdicts,
)

from forerun._transfer.question import Question


def compute_cliff(octaves: float, curvature: float) -> float:
    """Return the rise of a parabola with a cliff: a second, much steeper parabola from 1.5 octaves
    above the minimum.

    No family of the fit has this shape.
    """
    return 0.5 * curvature * (octaves**2 + 10 * max(octaves - 1.5, 0.0) ** 2)


def compute_wall(octaves: float, curvature: float) -> float:
    """Return the rise of a parabola plus an exponential, whose steepness is between those of the
    shapes that the fit has. The last term makes the rise and its slope 0 at the minimum.
    """
    return (
        0.5
        * curvature
        * (octaves**2 + math.exp(2.5 * (octaves - 2)) - math.exp(-5) * (1 + 2.5 * octaves))
    )


def compute_hyperbola(octaves: float, curvature: float) -> float:
    """Return a rise that is a parabola near its minimum and straight far from it.

    No family of the fit has this shape.
    """
    return 2 * curvature * (math.sqrt(1 + 0.5 * octaves**2) - 1)


MARGIN_NATS = Question(target_size=2, base_size=1).margin_nats
NOISES_NATS = (0.002, 0.005, 0.01, 0.02)
DESIGNS = ((3, 5, 1), (4, 7, 1), (3, 5, 2), (4, 5, 3), (4, 7, 3), (5, 9, 4))
"""Sizes, rates an octave apart, and seeds."""
TRUTHS: dict[str, dict[str, Any]] = {
    "linex 0.3 (the promise)": {},
    "linex -0.3": {"compute_rise": make_linex(-0.3)},
    "parabola": {"compute_rise": compute_parabola},
    "linex 0.6": {"compute_rise": make_linex(0.6)},
    "two half-parabolas": {"compute_rise": compute_two_parabolas},
    "|x|^1.6": {"compute_rise": make_power(1.6)},
    "|x|^2.5": {"compute_rise": make_power(2.5)},
    "hyperbola (no family's)": {"compute_rise": compute_hyperbola},
    "wall (between families')": {"compute_rise": compute_wall},
    "cliff with a kink (no family's)": {"compute_rise": compute_cliff},
    "straight cliff (no family's)": {"compute_rise": compute_straight_cliff},
    "|x|^4": {"compute_rise": make_power(4)},
    "lopsided quartic": {"compute_rise": compute_lopsided_quartic},
    "cliff, noise 0.002": {"compute_rise": compute_cliff, "noise_nats": 0.002},
    "hyperbola, noise 0.002": {"compute_rise": compute_hyperbola, "noise_nats": 0.002},
    "noise grows with the loss": {"noise_growth": 10.0},
    "optima scatter by 0.05": {"scatter": 0.05},
    "optima scatter by 0.1": {"scatter": 0.1},
    "curvature grows 15 % a doubling": {"curvature_trend": 0.15},
    "curvature scatters by 20 %": {"curvature_scatter": 0.2},
    "4 rates": {"rates": (-8, -7, -6, -5)},
    "9 rates, half octaves": {"rates": tuple(x / 2 for x in range(-16, -7))},
    "2 sizes, target 2x": {"sizes": (32, 64), "target_size": 128},
    "2 seeds, two half-parabolas": {"num_seeds": 2, "compute_rise": compute_two_parabolas},
    "5 sizes, target 8x": {"sizes": (32, 64, 128, 256, 512), "target_size": 4096},
    "100-800 to 7,000": {"sizes": (100, 200, 400, 800), "target_size": 7000},
}
"""Changes to the world of the first truth, by name."""


def make_world(num_sizes: int, num_rates: int, num_seeds: int) -> World:
    """Return the world of the first truth with other numbers of runs.

    The target is four times the largest size.
    """
    sizes = tuple(32 << k for k in range(num_sizes))
    low = -6 - num_rates // 2
    rates = tuple(range(low, low + num_rates))
    return dataclasses.replace(
        WIDE, sizes=sizes, rates=rates, num_seeds=num_seeds, target_size=4 * sizes[-1]
    )


def measure_world(world: World, num: int) -> dict[str, Any]:
    """Judge one world with both regrets and return the figures."""
    results = {}
    for name, regret_nats in (("no regret", 0.0), ("3x margin", 3 * MARGIN_NATS)):
        planted_world = dataclasses.replace(world, regret_nats=regret_nats)
        counts = tally_verdicts(planted_world, num)
        results[name] = {
            **{
                key: value for key, value in dataclasses.asdict(counts).items() if key != "outcomes"
            },
            "right": counts.compute_share_right(planted_world),
            "wrong": counts.compute_share_wrong(planted_world),
            "cannot_tell": counts.outcomes["cannot_tell"],
        }
    return results


def format_row(name: str, results: dict[str, Any]) -> str:
    """Return a line of a table: each figure without regret / with three times the margin."""

    def format_both(key: str, format_spec: str) -> str:
        return "/".join(
            format(results[regret][key], format_spec) for regret in ("no regret", "3x margin")
        )

    shares = "  ".join(f"{format_both(key, '.2f'):>9}" for key in ("right", "wrong", "cannot_tell"))
    covered = "  ".join(
        f"{format_both(f'{key}_covered', '.2f'):>9}" for key in ("optimum", "drift", "regret")
    )
    ratios = "  ".join(f"{format_both(f'{key}_ratio', '.1f'):>9}" for key in ("optimum", "drift"))
    return f"{name:<34}{shares}  {covered}  {ratios}"


def format_header(title: str) -> str:
    """Return the line with the names of the columns."""
    names = ("right", "wrong", "open", "optimum", "drift", "regret", "x optimum", "x drift")
    return f"{title:<34}" + "  ".join(f"{name:>9}" for name in names)


def main() -> None:
    """Measure both tables, print them, and write the result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="Result file.")
    parser.add_argument("--num", type=int, default=60, help="Worlds drawn for each row.")
    parser.add_argument("--quick", action="store_true", help="Draw a tenth as many worlds.")
    options = parser.parse_args()
    num, began = max(options.num // 10, 2) if options.quick else options.num, time.perf_counter()
    print(
        f"each figure without regret / with a regret of three times the margin; {num} worlds each\n"
    )
    print(format_header("noise, sizes x rates x seeds"))
    by_noise, by_truth = [], []
    for noise_nats in NOISES_NATS:
        for numbers in DESIGNS:
            results = measure_world(
                dataclasses.replace(make_world(*numbers), noise_nats=noise_nats), num
            )
            num_runs = int(np.prod(numbers))
            by_noise.append(
                {"noise_nats": noise_nats, "design": list(numbers), "num_runs": num_runs, **results}
            )
            name = f"{noise_nats:<6} {' x '.join(map(str, numbers))} = {num_runs}"
            print(format_row(name, results), flush=True)
    print("\n" + format_header("4 x 7 x 3, noise 0.005, and"))
    for name, changes in TRUTHS.items():
        results = measure_world(dataclasses.replace(WIDE, **changes), num)
        by_truth.append({"truth": name, **results})
        print(format_row(name, results), flush=True)
    if options.json:
        result = {
            "command": f"python benchmarks/statistics/verdicts.py --num {num}",
            "machine": {
                "system": platform.system(),
                "processor": platform.machine(),
                "cores": os.cpu_count(),
            },
            "versions": {"python": platform.python_version(), "numpy": np.__version__},
            "num_worlds": num,
            "seconds": round(time.perf_counter() - began),
            "margin_nats": MARGIN_NATS,
            "by_noise_and_runs": by_noise,
            "by_truth": by_truth,
        }
        options.json.write_text(json.dumps(result, indent=1) + "\n")
        print(f"\nwrote {options.json}", file=sys.stderr)


if __name__ == "__main__":
    main()
