"""The transfer verdict on a mix of simulated learning-rate grids.

    python benchmarks/statistics/transfer_mix.py --json benchmarks/results/transfer_mix.json

It measures the share of false *holds* by reach (target width over largest width). It also measures
how many undecided grids are decided by one round of next runs, which are the runs that an undecided
verdict asks for. The script prints a summary and writes it with all rows. It takes about 10 minutes
of one core, and `--num 100` a fifth of that.

The grids. All grids come from one distribution (`draw_grid`), which was fixed before the method: 2
to 5 widths, 5 to 8 rates in steps of half an octave to two octaves, 1 to 3 seeds, eleven shapes of
loss basin (the fit has only some of them), no drift or a small or a large one, noise, scatter,
single spiked runs, and optima off the grid's center. Targets are log-uniform from 1 to 4 times the
largest width. In one grid in ten the optimum begins to drift at the largest width, by half an
octave per doubling, which no run can show. A *holds* is false if the true regret at the target
exceeds the margin. A *drifts* is false if it does not.

The split. The scale of the walk beyond the runs
(`forerun._transfer.regret.extrapolation.WALK_OCTAVES`) is learned from public grids (`walk.py`),
none of which appears here. The settings of the method were chosen on grids with odd numbers
(`--part odd`). The reported results are from grids with even numbers, which were judged once.

The next runs. Every grid whose verdict is *cannot tell* gets the runs that the verdict asks for,
once, and is judged again. The results give the share that this decides, its cost as a multiple of
the cost of all earlier runs, and the wrong verdicts after it. Intervals are 90 % bootstrap
intervals over grids.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "support" / "transfer"))

from planted_basins import (
    compute_lopsided_quartic,
    compute_parabola,
    compute_straight_cliff,
    compute_two_parabolas,
    make_linex,
    make_power,
)
from verdicts import compute_cliff, compute_hyperbola, compute_wall

from forerun._transfer.design.next_runs import Suggestion
from forerun._transfer.question import Point, Question
from forerun._transfer.verdict.verdict import Verdict, judge

Basin = Callable[[float, float], float]
BASINS: tuple[Basin, ...] = (
    make_linex(0.3),
    make_linex(-0.3),
    make_linex(0.6),
    compute_parabola,
    compute_two_parabolas,
    make_power(2.5),
    compute_hyperbola,
    compute_wall,
    compute_cliff,
    compute_straight_cliff,
    compute_lopsided_quartic,
)
LATE_SHARE, LATE_DRIFT_OCTAVES = 0.1, 0.5
"""Share of grids whose optimum begins to drift at the largest width, and its drift per doubling."""
RATIOS = ((1.0, 1.5), (1.5, 2.0), (2.0, 3.0), (3.0, 4.0))
"""Bins of the target over the largest width."""
MARGIN_NATS = Question(target_size=2, base_size=1).margin_nats
CHANCES = ((0.0, 0.1), (0.1, 0.4), (0.4, 0.7), (0.7, 1.01))
"""Bins of the stated probability that a round decides; below 0.1 none is stated."""
NUM_GRIDS = 500
NUM_BOOTSTRAP = 2000


@dataclass(frozen=True)
class MixGrid:
    """One planted grid of learning rates over width, with the truth at its target."""

    number: int
    sizes: tuple[int, ...]
    rates: tuple[float, ...]
    num_seeds: int
    noise_nats: float
    basin: Basin
    curvature: float
    curvature_trend: float
    """Change of the log curvature per doubling."""
    optima: tuple[float, ...]
    """Optimum of each size, log2."""
    target_size: int
    target_optimum: float
    late: bool
    """True if a drift begins at the largest size."""
    late_octaves: float
    """Shift of the target's optimum by this drift, in octaves."""
    spike: tuple[int, float, int, float] | None
    """Size, rate, seed and nats of one run's spike."""

    @property
    def ratio(self) -> float:
        """Target size over the largest size."""
        return self.target_size / self.sizes[-1]

    @property
    def question(self) -> Question:
        """Question whether the optimum of the smallest size transfers to the target."""
        return Question(target_size=self.target_size, base_size=self.sizes[0])

    @property
    def points(self) -> list[Point]:
        """All runs of the first design."""
        return [
            self.run(size, rate, seed)
            for size in self.sizes
            for rate in self.rates
            for seed in range(self.num_seeds)
        ]

    def run(self, size: int, rate: float, seed: int) -> Point:
        """Return one run; its loss depends on the arguments only, so that runs can be added."""
        # A seed of random numbers must be a whole number of at least 0
        rate_number = round((rate + 100) * 1000)
        offset = np.random.default_rng([self.number, size, seed]).normal(0, 0.02)
        noise_rng = np.random.default_rng([self.number, size, seed, rate_number])
        noise = noise_rng.normal(0, self.noise_nats)
        loss = 3 - 0.1 * math.log2(size) + offset + noise + self.regret(size, rate)
        if self.spike is not None and self.spike[:3] == (size, rate, seed):
            loss += self.spike[3]
        return Point(size=size, log2_value=float(rate), loss_nats=float(loss), seed=seed)

    def regret(self, size: int, rate: float) -> float:
        """Return the true regret of a rate at any size up to the target, in nats."""
        log2_sizes = np.log2([*self.sizes, self.target_size])
        optimum = float(np.interp(math.log2(size), log2_sizes, [*self.optima, self.target_optimum]))
        curvature = self.curvature * math.exp(
            self.curvature_trend * math.log2(size / self.sizes[0])
        )
        return float(self.basin(rate - optimum, curvature))


def draw_grid(number: int) -> MixGrid:
    """Draw one grid; its number is its seed.

    The order of the calls of `rng` decides the grid of each number.
    """
    rng = np.random.default_rng([45, number])
    num_sizes = int(rng.choice([2, 3, 4, 5], p=[0.1, 0.4, 0.35, 0.15]))
    factor = 2 if rng.random() < 0.75 else 4
    sizes = tuple(64 * factor**k for k in range(num_sizes))
    step = float(rng.choice([0.5, 1.0, 2.0], p=[0.2, 0.65, 0.15]))
    num_rates = int(rng.integers(5, 9))
    kind = rng.random()
    drift = 0.0 if kind < 0.5 else float(rng.uniform(-0.1, 0.1))
    if kind > 0.75:
        drift = float(rng.choice([-1, 1]) * rng.uniform(0.3, 1.0))
    scatter = 0.0 if rng.random() < 0.5 else float(rng.uniform(0.03, 0.1))
    target = round(sizes[-1] * 4.0 ** rng.random())
    late = bool(rng.random() < LATE_SHARE)
    at_base = float(rng.uniform(-8, -5))
    doublings = np.log2([*sizes, target]) - math.log2(sizes[0])
    optima = at_base + drift * doublings + scatter * rng.standard_normal(num_sizes + 1)
    late_octaves = (
        float(rng.choice([-1, 1]) * LATE_DRIFT_OCTAVES * math.log2(target / sizes[-1]))
        if late
        else 0.0
    )
    optima[-1] += late_octaves
    # A user centers the grid near the optimum that is known, and one in five is off by two steps
    # more.
    center = at_base + drift * doublings[:-1].mean() + rng.uniform(-1, 1) * step
    center += 2 * step * rng.choice([-1, 1]) if rng.random() < 0.2 else 0.0
    low = step * round((center - step * (num_rates - 1) / 2) / step)
    rates = tuple(low + step * k for k in range(num_rates))
    num_seeds = int(rng.choice([1, 2, 3], p=[0.35, 0.35, 0.3]))
    spike = None
    if rng.random() < 0.1:
        spike = (
            int(rng.choice(sizes)),
            float(rng.choice(rates)),
            int(rng.integers(num_seeds)),
            float(rng.uniform(0.1, 0.5)),
        )
    return MixGrid(
        number=number,
        sizes=sizes,
        rates=rates,
        num_seeds=num_seeds,
        noise_nats=float(np.exp(rng.uniform(math.log(0.002), math.log(0.025)))),
        basin=BASINS[int(rng.integers(len(BASINS)))],
        curvature=float(np.exp(rng.uniform(math.log(0.03), math.log(0.15)))),
        curvature_trend=float(rng.normal(0, 0.1)),
        optima=tuple(optima[:-1].tolist()),
        target_size=target,
        target_optimum=float(optima[-1]),
        late=late,
        late_octaves=late_octaves,
        spike=spike,
    )


@dataclass(frozen=True)
class Row:
    """One grid's verdict and truth, before and after one round of next runs."""

    number: int
    ratio: float
    late: bool
    kind: str
    """Difficulty of the grid: `spike`, `edge` (an optimum outside the grid or within half a step of
    its end), or `plain`."""
    outcome: str
    false: bool
    covered: bool | None
    """True if the regret's interval contains the true one; None without an interval."""
    statuses: tuple[str, ...]
    upper_nats: float | None
    largest_ratio: float | None
    asked_runs: int = 0
    probability: float | None = None
    """Probability that the round decides, as stated by the first verdict."""
    cost: float | None = None
    """Cost of the round as a multiple of the cost of all earlier runs; None without a round."""
    expected_false: float | None = None
    """Probability that this *holds* is false (`expect_false_hold`); None for other verdicts."""
    outcome_after: str | None = None
    false_after: bool | None = None
    true_nats: float | None = None
    """True regret at the target, of the value that the last verdict would transfer; None without
    one."""

    @property
    def cause(self) -> str:
        """Reason why the first verdict is *cannot tell*: the first of several that applies."""
        if any(status != "ok" for status in self.statuses):
            return "a size without an optimum"
        if self.true_nats is not None and MARGIN_NATS / 2 < self.true_nats < 2 * MARGIN_NATS:
            return "true regret within a factor of 2 of the margin"
        return (
            "target beyond twice the largest width" if self.ratio > 2 else "noise or coarse rates"
        )


def find_falsehood(grid: MixGrid, verdict: Verdict) -> tuple[bool, float | None]:
    """Return whether a verdict is false, and the true regret."""
    if verdict.transferred_log2 is None:
        return False, None
    true_nats = grid.regret(grid.target_size, verdict.transferred_log2)
    exceeds_margin = true_nats > grid.question.margin_nats
    return (verdict.outcome == "holds" and exceeds_margin) or (
        verdict.outcome == "drifts" and not exceeds_margin
    ), true_nats


def expect_false_hold(grid: MixGrid, log2_value: float) -> float:
    """Return the probability that a *holds* is false.

    The probability is over whether a drift begins late, and over its direction. Neither the runs
    nor the verdict depend on these. So this probability, unlike the share of false *holds*, does
    not depend on which grids happen to drift late.
    """
    optimum_without_late = grid.target_optimum - grid.late_octaves
    late_octaves = LATE_DRIFT_OCTAVES * math.log2(grid.ratio)
    # Without a late drift, and with one in each direction
    are_false = []
    for octaves in (0.0, -late_octaves, late_octaves):
        moved_grid = replace(grid, target_optimum=optimum_without_late + octaves)
        are_false.append(moved_grid.regret(grid.target_size, log2_value) > MARGIN_NATS)
    return (1 - LATE_SHARE) * are_false[0] + LATE_SHARE * (are_false[1] + are_false[2]) / 2


def add_runs(
    grid: MixGrid, points: Sequence[Point], suggestions: Sequence[Suggestion]
) -> list[Point]:
    """Return the points with every suggested run, by seeds that are new at their size and rate."""
    cells: dict[tuple[int, float], int] = {}
    for point in points:
        key = point.size, round(point.log2_value, 6)
        cells[key] = max(cells.get(key, 0), point.seed + 1)
    added = list(points)
    for suggestion in suggestions:
        key = suggestion.size, round(suggestion.log2_value, 6)
        for _ in range(suggestion.num_seeds):
            seed = cells.get(key, 0)
            cells[key] = seed + 1
            added.append(grid.run(suggestion.size, suggestion.log2_value, seed))
    return added


def judge_grid(grid: MixGrid, draws: int, with_round: bool) -> Row:
    """Judge one grid, and where it cannot tell, judge it again after one round of next runs."""
    points = grid.points
    verdict = judge(points, grid.question, draws=draws)
    false, true_nats = find_falsehood(grid, verdict)
    step = (grid.rates[-1] - grid.rates[0]) / (len(grid.rates) - 1)
    near_end = (
        min(min(optimum - grid.rates[0], grid.rates[-1] - optimum) for optimum in grid.optima)
        < 0.5 * step
    )
    regret = verdict.regret_nats
    row: dict[str, Any] = {
        "number": grid.number,
        "ratio": grid.ratio,
        "late": grid.late,
        "kind": "spike" if grid.spike else "edge" if near_end else "plain",
        "outcome": verdict.outcome,
        "false": false,
        "covered": None
        if regret is None or true_nats is None
        else regret.low - 1e-12 <= min(true_nats, verdict.most_nats) <= regret.high,
        "statuses": tuple(optimum.status for optimum in verdict.optima),
        "upper_nats": regret.high if regret else None,
        "largest_ratio": verdict.largest_ratio,
        "true_nats": true_nats,
    }
    if verdict.outcome == "holds" and verdict.transferred_log2 is not None:
        row["expected_false"] = expect_false_hold(grid, verdict.transferred_log2)
    if with_round and verdict.outcome == "cannot_tell" and verdict.what_to_run:
        earlier_cost = sum((point.size / grid.sizes[0]) ** 2 for point in points)
        verdict_after = judge(
            add_runs(grid, points, verdict.what_to_run), grid.question, draws=draws
        )
        false_after, true_nats_after = find_falsehood(grid, verdict_after)
        row |= {
            "true_nats": true_nats if true_nats_after is None else true_nats_after,
            "asked_runs": sum(suggestion.num_seeds for suggestion in verdict.what_to_run),
            "cost": sum(suggestion.relative_cost for suggestion in verdict.what_to_run)
            / earlier_cost,
            "probability": read_stated_probability(verdict),
            "outcome_after": verdict_after.outcome,
            "false_after": false_after,
        }
    return Row(**row)


def read_stated_probability(verdict: Verdict) -> float | None:
    """Return the probability of deciding that the verdict states for its next runs."""
    matches = [re.search(r"probability of about (\d\.\d+)", reason) for reason in verdict.reasons]
    return next((float(match[1]) for match in matches if match), None)


def compute_share(flags: Sequence[bool]) -> dict[str, Any]:
    """Return a share with its 90 % bootstrap interval over grids."""
    if not flags:
        return {"value": None, "interval": None, "num": 0}
    rng = np.random.default_rng(0)
    means = rng.binomial(len(flags), np.mean(flags), NUM_BOOTSTRAP) / len(flags)
    low, high = np.quantile(means, [0.05, 0.95]).tolist()
    return {
        "value": float(np.mean(flags)),
        "interval": [low, high],
        "num": len(flags),
        "count": int(np.sum(flags)),
    }


def compute_mean(values: Sequence[float]) -> dict[str, Any]:
    """Return a mean with its 90 % bootstrap interval over grids."""
    drawn = np.random.default_rng(0).choice(np.array(values), size=(NUM_BOOTSTRAP, len(values)))
    low, high = np.quantile(drawn.mean(axis=1), [0.05, 0.95]).tolist()
    return {"value": statistics.fmean(values), "interval": [low, high], "num": len(values)}


def compute_median(values: Sequence[float]) -> dict[str, Any]:
    """Return a median with its 90 % bootstrap interval over grids."""
    if not values:
        return {"value": None, "interval": None, "num": 0}
    drawn = np.random.default_rng(0).choice(np.array(values), size=(NUM_BOOTSTRAP, len(values)))
    low, high = np.quantile(np.median(drawn, axis=1), [0.05, 0.95]).tolist()
    return {"value": statistics.median(values), "interval": [low, high], "num": len(values)}


def summarize(rows: Sequence[Row]) -> dict[str, Any]:
    """Return all figures of the result."""
    holds = [row for row in rows if row.outcome == "holds"]
    without_late = [row for row in rows if not row.late]
    near = [row for row in without_late if row.ratio <= 2]
    open_rows = [row for row in rows if row.outcome == "cannot_tell"]
    bins = {
        f"{low:g} to {high:g}": [r for r in rows if low <= r.ratio <= high] for low, high in RATIOS
    }
    return {
        "num_grids": len(rows),
        "false_holds": compute_share([row.false for row in holds]),
        "expected_false_holds": compute_mean([row.expected_false or 0.0 for row in holds]),
        "num_late": sum(row.late for row in rows),
        "by_ratio": {
            name: {
                "false_holds": compute_share(
                    [row.false for row in group if row.outcome == "holds"]
                ),
                "expected_false_holds": compute_mean(
                    [row.expected_false or 0.0 for row in group if row.outcome == "holds"] or [0.0]
                ),
                "cannot_tell": compute_share([row.outcome == "cannot_tell" for row in group]),
                "covered": compute_share([row.covered for row in group if row.covered is not None]),
            }
            for name, group in bins.items()
        },
        "false_verdicts_elsewhere": compute_share([row.false for row in without_late]),
        "cannot_tell_up_to_2x": compute_share([row.outcome == "cannot_tell" for row in near]),
        "covered_elsewhere": compute_share(
            [row.covered for row in without_late if row.covered is not None]
        ),
        "next_runs": summarize_next_runs(open_rows),
    }


def summarize_next_runs(open_rows: Sequence[Row]) -> dict[str, Any]:
    """Return the figures of one round of next runs, over the grids that were undecided."""
    return {
        "decided": compute_share([row.outcome_after in ("holds", "drifts") for row in open_rows]),
        "cost": compute_median([row.cost for row in open_rows if row.cost is not None]),
        "over_100_runs": sum(row.asked_runs > 100 for row in open_rows),
        "false_after": compute_share([bool(r.false_after) for r in open_rows if r.outcome_after]),
        "decided_by_kind": {
            kind: compute_decided_share([row for row in open_rows if row.kind == kind])
            for kind in ("plain", "edge", "spike")
        },
        "decided_by_cause": {
            cause: compute_decided_share([row for row in open_rows if row.cause == cause])
            for cause in sorted({row.cause for row in open_rows})
        },
        "decided_by_chance": {
            f"{low:g} to {min(high, 1):g}": compute_decided_share(
                [
                    row
                    for row in open_rows
                    if row.cost is not None and low <= (row.probability or 0) < high
                ]
            )
            for low, high in CHANCES
        },
    }


def compute_decided_share(rows: Sequence[Row]) -> dict[str, Any]:
    """Return the share that one round decides, with the mean of the probability that was stated."""
    stated = [row.probability or 0.0 for row in rows]
    decided = compute_share([row.outcome_after in ("holds", "drifts") for row in rows])
    return {**decided, "stated": statistics.fmean(stated) if stated else None}


def main() -> None:
    """Judge the grids, print the summary and write the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="JSON file to write.")
    parser.add_argument("--num", type=int, default=NUM_GRIDS, help="Number of grids.")
    parser.add_argument(
        "--part", choices=("odd", "even"), default="even", help="Even: the reported half."
    )
    parser.add_argument(
        "--draws", type=int, default=1000, help="Draws of the posterior per verdict."
    )
    parser.add_argument("--no-rounds", action="store_true", help="Leave out the next runs.")
    options = parser.parse_args()
    began, rows = time.process_time(), []
    for index in range(options.num):
        grid = draw_grid(2 * index + (options.part == "odd"))
        rows.append(judge_grid(grid, options.draws, not options.no_rounds))
    summary = summarize(rows)
    print(json.dumps(summary, indent=1))
    if options.json:
        result = {
            "command": (
                "python benchmarks/statistics/transfer_mix.py"
                f" --num {options.num} --part {options.part}"
            ),
            "cpu_seconds": round(time.process_time() - began),
            "summary": summary,
            "rows": [asdict(row) for row in rows],
        }
        options.json.write_text(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
