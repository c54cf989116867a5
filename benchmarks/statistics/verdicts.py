"""Accuracy of the transfer verdict and of its intervals on simulated loss basins.

    python benchmarks/statistics/verdicts.py --json benchmarks/results/verdicts.json

Runs are drawn from loss basins with a known optimum per size, drift and regret at the target
(tests/transfer/planted_valleys.py), and judged. Each world is judged twice: the base optimum has no
regret at the target, or three times the margin. The first table varies noise and number of runs.
The second varies the truth at one design, including shapes that the fit does not have.

The tables have the shares of right, wrong and open verdicts, and the shares of 90 % intervals that
cover the optimum of each size, the drift and the regret. They also have the width of the intervals
of optimum and drift relative to an oracle's: least squares that knows the basin's shape with its
asymmetry, the noise, and the scatter of optima about their line, and uses every run. It takes about
18 minutes of one core; `--quick` draws a tenth as many worlds.
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

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "transfer"))

from planted_valleys import (
    WIDE,
    World,
    linex_of,
    lopsided_quartic,
    parabola,
    power_of,
    straight_cliff,
    tally,
    two_parabolas,
)

from transfer.question import Question


def cliff(octaves: float, curvature: float) -> float:
    """A parabola with a second, much steeper one from 1.5 octaves above its minimum on: no family
    of ours has one.
    """
    return 0.5 * curvature * (octaves**2 + 10 * max(octaves - 1.5, 0.0) ** 2)


def wall(octaves: float, curvature: float) -> float:
    """A parabola and an exponential, of a steepness between those of our shapes."""
    return (
        0.5
        * curvature
        * (octaves**2 + math.exp(2.5 * (octaves - 2)) - math.exp(-5) * (1 + 2.5 * octaves))
    )


def hyperbola(octaves: float, curvature: float) -> float:
    """A parabola at its floor, straight far out: no family of ours has one either."""
    return 2 * curvature * (math.sqrt(1 + 0.5 * octaves**2) - 1)


MARGIN_NATS = Question(target_size=2, base_size=1).margin_nats
NOISES_NATS = (0.002, 0.005, 0.01, 0.02)
# sizes, rates an octave apart, seeds
DESIGNS = ((3, 5, 1), (4, 7, 1), (3, 5, 2), (4, 5, 3), (4, 7, 3), (5, 9, 4))
TRUTHS: dict[str, dict[str, Any]] = {
    "linex 0.3 (the promise)": {},
    "linex -0.3": {"valley": linex_of(-0.3)},
    "parabola": {"valley": parabola},
    "linex 0.6": {"valley": linex_of(0.6)},
    "two half-parabolas": {"valley": two_parabolas},
    "|x|^1.6": {"valley": power_of(1.6)},
    "|x|^2.5": {"valley": power_of(2.5)},
    "hyperbola (no family's)": {"valley": hyperbola},
    "wall (between families')": {"valley": wall},
    "cliff with a kink (no family's)": {"valley": cliff},
    "straight cliff (no family's)": {"valley": straight_cliff},
    "|x|^4": {"valley": power_of(4)},
    "lopsided quartic": {"valley": lopsided_quartic},
    "cliff, noise 0.002": {"valley": cliff, "noise_nats": 0.002},
    "hyperbola, noise 0.002": {"valley": hyperbola, "noise_nats": 0.002},
    "noise grows with the loss": {"noise_growth": 10.0},
    "optima scatter by 0.05": {"scatter": 0.05},
    "optima scatter by 0.1": {"scatter": 0.1},
    "curvature grows 15 % a doubling": {"curvature_trend": 0.15},
    "curvature scatters by 20 %": {"curvature_scatter": 0.2},
    "4 rates": {"rates": (-8, -7, -6, -5)},
    "9 rates, half octaves": {"rates": tuple(x / 2 for x in range(-16, -7))},
    "2 sizes, target 2x": {"sizes": (32, 64), "target_size": 128},
    "2 seeds, two half-parabolas": {"num_seeds": 2, "valley": two_parabolas},
    "5 sizes, target 8x": {"sizes": (32, 64, 128, 256, 512), "target_size": 4096},
    "100-800 to 7,000": {"sizes": (100, 200, 400, 800), "target_size": 7000},
}


def design(num_sizes: int, num_rates: int, num_seeds: int) -> World:
    """The promise's world with other numbers of runs; the target is four times the largest size."""
    sizes = tuple(32 << k for k in range(num_sizes))
    low = -6 - num_rates // 2
    rates = tuple(range(low, low + num_rates))
    return dataclasses.replace(
        WIDE, sizes=sizes, rates=rates, num_seeds=num_seeds, target_size=4 * sizes[-1]
    )


def measure(world: World, num: int) -> dict[str, Any]:
    """Both regrets of one world, as JSON."""
    found = {}
    for name, regret_nats in (("no regret", 0.0), ("3x margin", 3 * MARGIN_NATS)):
        planted = dataclasses.replace(world, regret_nats=regret_nats)
        tallied = tally(planted, num)
        found[name] = {
            **{
                key: value
                for key, value in dataclasses.asdict(tallied).items()
                if key != "outcomes"
            },
            "right": tallied.right(planted),
            "wrong": tallied.wrong(planted),
            "cannot_tell": tallied.outcomes["cannot_tell"],
        }
    return found


def row(name: str, found: dict[str, Any]) -> str:
    """One line of a table: at no regret / at three times the margin."""

    def both(key: str, form: str) -> str:
        return "/".join(format(found[regret][key], form) for regret in ("no regret", "3x margin"))

    shares = "  ".join(f"{both(key, '.2f'):>9}" for key in ("right", "wrong", "cannot_tell"))
    covered = "  ".join(
        f"{both(f'{key}_covered', '.2f'):>9}" for key in ("optimum", "drift", "regret")
    )
    ratios = "  ".join(f"{both(f'{key}_ratio', '.1f'):>9}" for key in ("optimum", "drift"))
    return f"{name:<34}{shares}  {covered}  {ratios}"


def header(title: str) -> str:
    """What the columns are."""
    names = ("right", "wrong", "open", "optimum", "drift", "regret", "x optimum", "x drift")
    return f"{title:<34}" + "  ".join(f"{name:>9}" for name in names)


def main() -> None:
    """Measure, print the tables, write the JSON."""
    parser = argparse.ArgumentParser(
        description="Calibration of the transfer verdict on planted learning-rate curves."
    )
    parser.add_argument("--json", type=Path, help="JSON file to write.")
    parser.add_argument("--num", type=int, default=60, help="Worlds drawn for each number.")
    parser.add_argument("--quick", action="store_true", help="A tenth of them.")
    options = parser.parse_args()
    num, started = max(options.num // 10, 2) if options.quick else options.num, time.perf_counter()
    print(f"at no regret / at a regret of three times the margin; {num} worlds each\n")
    print(header("noise, sizes x rates x seeds"))
    by_noise, by_truth = [], []
    for noise_nats in NOISES_NATS:
        for numbers in DESIGNS:
            found = measure(dataclasses.replace(design(*numbers), noise_nats=noise_nats), num)
            num_runs = int(np.prod(numbers))
            by_noise.append(
                {"noise_nats": noise_nats, "design": list(numbers), "num_runs": num_runs, **found}
            )
            name = f"{noise_nats:<6} {' x '.join(map(str, numbers))} = {num_runs}"
            print(row(name, found), flush=True)
    print("\n" + header("4 x 7 x 3, noise 0.005, and"))
    for name, changes in TRUTHS.items():
        found = measure(dataclasses.replace(WIDE, **changes), num)
        by_truth.append({"truth": name, **found})
        print(row(name, found), flush=True)
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
            "seconds": round(time.perf_counter() - started),
            "margin_nats": MARGIN_NATS,
            "by_noise_and_runs": by_noise,
            "by_truth": by_truth,
        }
        options.json.write_text(json.dumps(result, indent=1) + "\n")
        print(f"\nwrote {options.json}", file=sys.stderr)


if __name__ == "__main__":
    main()
