"""Accuracy of optima predicted for longer runs, by a straight line and by one that may bend.

    python benchmarks/statistics/bend.py --json benchmarks/results/bend.json

The optimum of the learning rate moves with the duration of a run. forerun extends it to a longer
duration in two ways: by a straight line in log2 of both, and by a bent line, whose slope becomes
zero beyond the runs. It averages the two by their evidence
(`forerun._transfer.regret.extrapolation`). This script compares that average with the straight line
alone.

`planted`: runs with known optima at two to four durations are judged for targets 4 and 16 times as
long as the longest. The table has the share of 90 % intervals that contain the target's optimum,
their width, how often the verdict is that the optimum holds, the regret of the transferred value,
and the mean probability of a bend.

`public`: optima over duration for one model and batch, in StepLaw's grid and in Misfitting's (from
`make data`; a missing grid is named and left out), and in a grid of the demo's proxy with 50 to
3,200 steps (`grids/durations.safetensors`; `--train CORPUS` trains it again in 15 minutes of one
core). Two or three durations that span a factor of at most 16 predict each longer one. A prediction
covers if its distance to the held-out optimum, which has noise of its own, may be 0. The table also
has the regret there of published exponents, counted from the longest or the shortest duration, and
of both lines. Means are taken over families first, so that a family of many durations counts once.
The grids of Porian, Gadre, Gemstones, Datablations and MultiPowerLaw do not serve, because they
have one or two rates per run.

The script prints a line for each row and writes both tables. It takes about 5 minutes of one core;
`--quick` takes a fifth of the worlds and cases, and `--only planted` runs one table.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from downloads import FOLDER, find_source, is_here
from safetensors.numpy import load_file, save_file

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "support" / "transfer"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from demo_runs import make_demo_shape, train_runs
from planted_basins import World
from result_files import describe_machine, write_result

from forerun._transfer.basin.optimum import find_optima
from forerun._transfer.basin.shapes import Floats, compute_rise
from forerun._transfer.question import Point, Question
from forerun._transfer.regret import extrapolation
from forerun._transfer.regret.extrapolation import LINE_PRIORS, LinePrior, extend_line_to_target
from forerun._transfer.verdict.verdict import judge

GRID = Path(__file__).parents[1] / "grids" / "durations.safetensors"
MODELS: dict[str, LinePrior] = {
    "straight": LinePrior(bend_probability=0.0, slope_octaves=0.2, lasting_octaves=4.0),
    "averaged": LINE_PRIORS["duration"],
}
"""Priors of the line: one that never bends, and forerun's."""
PATHS: dict[str, Callable[[float], float]] = {
    "constant": lambda d: 0.0,
    "straight, -0.3": lambda d: -0.3 * d,
    "falls, then stays": lambda d: -0.5 * (1 - math.exp(-d)),
    "rises, then falls": lambda d: 0.2 * d - 0.1 * min(d, 2.5) ** 2 - 0.5 * max(d - 2.5, 0.0),
    "falls at -0.3 as far as was run, then stays": lambda d: -0.3 * min(d, 2.0),
}
"""Octaves of the optimum from that of the base, as functions of the doublings from the base."""
DURATIONS = ((100, 400), (100, 200, 400), (50, 100, 200, 400))
TIMES = (4, 16)
"""Targets, as multiples of the longest duration."""
NUM_WORLDS, NUM_DRAWS = 40, 600
"""Planted worlds of each row, and draws of the posterior for each verdict."""
EXPONENTS = {
    "no rule; Porian": 0.0,  # 2406.19146: of the model's size alone (recalled, not read)
    "DeepSeek": -0.125,  # 2401.02954, of compute: at one size, of duration
    "-0.3 (Marin)": -0.3,
    "-0.32 (Bjorck, HyperP)": -0.32,  # 2409.19913, 2603.28743
    "-0.5 (Complete(d)P)": -0.5,  # 2512.22382
    "Step Law": 0.307,  # 2503.04715, the mean of the bootstraps in its repository
}
"""Published exponents of the optimum over duration, with the arXiv id of the source."""
REACHES = {"2 to 4 times": (1.0, 2.0), "4 to 16 times": (2.0, 4.0)}
"""Minimum and maximum doublings of the target over the longest duration."""
MAX_SPAN_DOUBLINGS, MIN_STEP_DOUBLINGS = 4.0, 0.6
"""Maximum doublings from the shortest to the longest duration that predicts, and minimum doublings
between two of them.
"""
NUM_PUBLIC_DRAWS = 1500
"""Draws of the optima of a public family."""
MAX_BEYOND_OCTAVES = 0.3
"""Octaves beyond the outermost of three rates up to which a parabola's minimum counts."""
PARABOLA_SD = 0.15
"""Error in octaves of the lowest point of a parabola through three rates an octave apart; set by
hand.
"""


@dataclass(frozen=True)
class BentWorld(World):
    """Planted runs over duration, whose optimum follows a path."""

    path: Callable[[float], float] = PATHS["constant"]

    def optimum(self, size: int, base: float) -> float:
        """Return the optimum of a size on the path, which begins at the smallest duration."""
        return base + self.path(math.log2(size / self.sizes[0]))


def compare_on_worlds(
    path: str, durations: tuple[int, ...], times: int, num: int
) -> dict[str, Any]:
    """Judge the same worlds with both lines and return the row."""
    world = BentWorld(
        sizes=durations,
        rates=tuple(range(-9, -3)),
        num_seeds=3,
        noise_nats=0.005,
        target_size=times * durations[-1],
        path=PATHS[path],
    )
    scores_by_model: dict[str, list[tuple[float, ...]]] = {name: [] for name in MODELS}
    for seed in range(num):
        points, _, optima = world.draw_all(np.random.default_rng(seed))
        question = Question(
            target_size=world.target_size, base_size=durations[0], axis="duration", power=None
        )
        for name, prior in MODELS.items():
            with mock.patch.dict(LINE_PRIORS, {"duration": prior}):
                verdict = judge(points, question, seed=seed, draws=NUM_DRAWS)
            at_target, value = verdict.at_target, verdict.transferred_log2
            if at_target is None or value is None:
                continue
            low, high = np.quantile(at_target.line.at_target[1:], [0.05, 0.95])
            optimum = optima[world.target_size]
            regret_nats = world.compute_rise(value - optimum, world.curvature)  # type: ignore[operator]
            scores_by_model[name].append(
                (
                    low <= optimum <= high,
                    high - low,
                    verdict.outcome == "holds",
                    verdict.outcome == "drifts",
                    regret_nats,
                    at_target.line.bend_probability,
                )
            )
    names = ("covered", "width_octaves", "holds", "drifts", "regret_nats", "bends")
    means = {
        model: dict(zip(names, np.mean(rows, axis=0).tolist(), strict=True))
        for model, rows in scores_by_model.items()
    }
    return {"path": path, "durations": list(durations), "times": times, "num": num, **means}


def compare_planted(num: int) -> list[dict[str, Any]]:
    """Return a row for each path, number of durations and target."""
    rows = []
    for path, durations, times in itertools.product(PATHS, DURATIONS, TIMES):
        rows.append(row := compare_on_worlds(path, durations, times, num))
        text = "  ".join(
            f"{model}: covered {row[model]['covered']:.2f}, {row[model]['width_octaves']:.2f} "
            "octaves, holds "
            f"{row[model]['holds']:.2f}, {1e3 * row[model]['regret_nats']:.1f} mnats, bends "
            f"{row[model]['bends']:.2f}"
            for model in MODELS
        )
        print(f"{path}, {len(durations)} durations, {times} times: {text}", flush=True)
    return rows


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """Optima of one model and batch, by duration."""

    name: str
    group: str
    log2_size: Floats
    optimum: Floats
    """Optima in log2 of the rate, [draws, durations]; row 0 is the estimate."""
    cost: Callable[[int, float], float]
    """Function of a duration's index and the octaves from its optimum that returns the regret in
    nats.
    """


def fit_family(name: str, group: str, points: Sequence[Point]) -> Family | None:
    """Return the optima as the verdict fits them; None if fewer than three are inside the grid."""
    fitted = find_optima(points, level=0.9, draws=NUM_PUBLIC_DRAWS, rng=np.random.default_rng(0))
    usable = [optimum for optimum in fitted.optima if optimum.status == "ok"]
    if fitted.basins is None or len(usable) < 3:
        return None
    columns = [fitted.fitted.index(optimum.size) for optimum in usable]
    curvature, shape = fitted.basins.curvature[0, columns], fitted.basins.shape[:1]
    return Family(
        name=name,
        group=group,
        log2_size=np.log2([optimum.size for optimum in usable]),
        optimum=fitted.basins.optimum[:, columns],
        cost=lambda index, off: float(
            compute_rise(np.array([off]), curvature[index : index + 1], shape)[0]
        ),
    )


def _read_records(name: str) -> list[dict[str, str]]:
    """Return the rows of a fetched table; none, with a message, if it is missing."""
    origin = find_source(name)
    if not is_here(origin):
        print(f"{name} is missing; run `make data` to fetch it", file=sys.stderr)
        return []
    with origin.list_files(FOLDER)[0][1].open(encoding="utf-8-sig", newline="") as file:
        return list(csv.DictReader(file))


def read_steplaw() -> Iterator[Family]:
    """Yield StepLaw's dense models: each size and batch at up to four durations and 12 rates."""
    cells: dict[tuple[str, str], dict[tuple[int, float], float]] = {}
    for record in _read_records("steplaw"):
        runs = cells.setdefault((record["N"], record["bs"]), {})
        cell = int(float(record["D"])), round(math.log2(float(record["lr"])), 3)
        runs[cell] = min(runs.get(cell, math.inf), float(record["smooth loss"]))
    for (params, batch), runs in sorted(cells.items()):
        points = [
            Point(size=size, log2_value=x, loss_nats=loss)
            for (size, x), loss in sorted(runs.items())
        ]
        if (
            family := fit_family(f"{float(params) / 1e6:.0f}M, batch {batch}", "StepLaw", points)
        ) is not None:
            yield family


def read_misfitting() -> Iterator[Family]:
    """Yield Misfitting's models.

    Most durations have three rates, so each optimum is from a parabola through the best rate and
    its neighbors.
    """
    cells: dict[str, dict[float, dict[float, float]]] = {}
    for record in _read_records("misfitting"):
        if float(record["portion_steps_elapsed"]) > 0.999:
            rates = cells.setdefault(record["model"], {}).setdefault(float(record["D"]), {})
            rate = math.log2(float(record["peak_lr"]))
            rates[rate] = min(rates.get(rate, math.inf), float(record["loss"]))
    rng = np.random.default_rng(0)
    for model, sizes in sorted(cells.items()):
        minima = [
            (math.log2(size), *lowest)
            for size, rates in sorted(sizes.items())
            if (lowest := _fit_parabola(rates))
        ]
        if len(minima) < 4:
            continue
        log2_size, optimum, curvature = np.array(minima).T
        # Row 0 is the estimate, and every other row is one draw
        rows = optimum + PARABOLA_SD * rng.standard_normal((NUM_PUBLIC_DRAWS + 1, len(optimum)))
        rows[0] = optimum
        yield Family(
            name=model,
            group="Misfitting",
            log2_size=log2_size,
            optimum=rows,
            cost=lambda index, off, curvatures=curvature: float(0.5 * curvatures[index] * off**2),
        )  # type: ignore[misc]


def _fit_parabola(rates: Mapping[float, float]) -> tuple[float, float] | None:
    """Return the place and the curvature of the minimum; None if it is not near the three rates."""
    x = sorted(rates)
    if len(x) < 3:
        return None
    middle = min(max(x.index(min(x, key=lambda rate: rates[rate])), 1), len(x) - 2)
    near = x[middle - 1 : middle + 2]
    square, slope, _ = np.polyfit(near, [rates[rate] for rate in near], 2)
    minimum = -slope / (2 * square)
    low, high = near[0] - MAX_BEYOND_OCTAVES, near[2] + MAX_BEYOND_OCTAVES
    if square <= 0 or not low < minimum < high:
        return None
    return float(minimum), float(2 * square)


def read_demo_grid() -> Iterator[Family]:
    """Yield the demo's proxy of width 32 in muP, if its grid is recorded."""
    if not GRID.exists():
        return
    grid = load_file(GRID)
    points = [
        Point(
            size=1024 * int(steps),
            log2_value=float(rate),
            seed=int(seed),
            loss_nats=float(loss) if math.isfinite(loss) else None,
        )
        for steps, rate, seed, loss in zip(*(grid[name] for name in COLUMNS), strict=True)
    ]
    if (family := fit_family("width 32", "ours", points)) is not None:
        yield family


COLUMNS = ("num_steps", "log2_rate", "seed", "loss_nats")
"""Arrays of the grid's file, each with one element per run. `read_demo_grid` and `train_grid` rely
on this order."""


def list_cases(family: Family) -> Iterator[tuple[list[int], int]]:
    """Yield two or three durations by index, and the index of a longer one."""
    num_durations = len(family.log2_size)
    for num_known in (2, 3):
        for known in itertools.combinations(range(num_durations - 1), num_known):
            doublings = np.diff(family.log2_size[list(known)])
            if doublings.min() >= MIN_STEP_DOUBLINGS and doublings.sum() <= MAX_SPAN_DOUBLINGS:
                for held_out in range(known[-1] + 1, num_durations):
                    yield list(known), held_out


def predict_held_out(family: Family, known: list[int], held_out: int) -> dict[str, Any]:
    """Return how well both lines and all exponents predict one held-out duration."""
    log2_size, truth = family.log2_size, family.optimum[:, held_out]
    last, beyond = family.optimum[0, known[-1]], float(log2_size[held_out] - log2_size[known[-1]])
    span = float(log2_size[held_out] - log2_size[known[0]])
    values = {name: float(last + power * beyond) for name, power in EXPONENTS.items()}
    values |= {
        f"{power:g} from the shortest": float(family.optimum[0, known[0]] + power * span)
        for power in (0.0, -0.3)
    }
    row: dict[str, Any] = {
        "group": family.group,
        "family": family.name,
        "num": len(known),
        "doublings": beyond,
    }
    noise = np.random.default_rng(1).permutation(truth[1:])
    for model, prior in MODELS.items():
        with mock.patch.dict(LINE_PRIORS, {"duration": prior}):
            line = extend_line_to_target(
                family.optimum[:, known],
                log2_size[known],
                log2_size[held_out],
                log2_size[known[0]],
                "duration",
                np.random.default_rng(0),
            )
        low, high = np.quantile(line.at_target[1:] - noise, [0.05, 0.95])
        row[model] = {
            "covered": bool(low <= 0 <= high),
            "width_octaves": float(high - low),
            "bends": line.bend_probability,
        }
        values[f"{model} line"] = float(line.at_target[0])
    row["cost"] = {
        name: family.cost(held_out, value - float(truth[0])) for name, value in values.items()
    }
    row["off"] = {name: abs(value - float(truth[0])) for name, value in values.items()}
    return row


def compare_public(case_stride: int) -> dict[str, Any]:
    """Return coverage and regrets by source, number of durations and reach."""
    families = [*read_steplaw(), *read_misfitting(), *read_demo_grid()]
    rows = [
        predict_held_out(family, *case)
        for family in families
        for case in list(list_cases(family))[::case_stride]
    ]
    covered, costs = [], []
    for group, (reach, (low, high)) in itertools.product(
        dict.fromkeys(family.group for family in families), REACHES.items()
    ):
        near = [row for row in rows if row["group"] == group and low <= row["doublings"] <= high]
        for num in (2, 3):
            if rows_of_num := [row for row in near if row["num"] == num]:
                means = {
                    model: {
                        key: _average_by_family(rows_of_num, model, key)
                        for key in ("covered", "width_octaves", "bends")
                    }
                    for model in MODELS
                }
                size = {
                    "num_cases": len(rows_of_num),
                    "num_families": len({row["family"] for row in rows_of_num}),
                }
                covered.append({"group": group, "reach": reach, "durations": num, **size, **means})
                print(covered[-1], flush=True)
        if near:
            names = near[0]["cost"]
            rules = {
                name: {
                    "cost_nats": _average_by_family(near, "cost", name),
                    "off_octaves": _average_by_family(near, "off", name),
                }
                for name in names
            }
            costs.append({"group": group, "reach": reach, "num_cases": len(near), "rules": rules})
            print(
                f"{group}, {reach}: "
                + ", ".join(f"{name} {1e3 * rule['cost_nats']:.1f}" for name, rule in rules.items())
                + " mnats",
                flush=True,
            )
    optima = {
        f"{family.group}, {family.name}": [family.log2_size.tolist(), family.optimum[0].tolist()]
        for family in families
    }
    return {"coverage": covered, "costs": costs, "optima": optima}


def _average_by_family(rows: Sequence[Mapping[str, Any]], *keys: str) -> float:
    """Return the mean over families of the mean over their rows."""
    by_family: dict[str, list[float]] = {}
    for row in rows:
        by_family.setdefault(row["family"], []).append(float(row[keys[0]][keys[1]]))
    return float(np.mean([np.mean(values) for values in by_family.values()]))


def train_grid(corpus: Path) -> None:
    """Train the grid of the demo's proxy: seven durations, six rates and two seeds.

    The schedule is a cosine, and a tenth of the steps is warmup.
    """
    from forerun._proxies.core.hyperparameters import Hparams
    from forerun._proxies.core.rules import get_parametrization
    from forerun._proxies.core.schedule import Schedule
    from forerun._proxies.core.spec import Numerics, RunSpec
    from forerun._proxies.data.tokens import TokenStore

    store, numerics, rows = TokenStore(corpus), Numerics(num_slots=8), []
    shape = make_demo_shape(store.manifest.vocab_size)
    for num_steps in (50, 100, 200, 400, 800, 1600, 3200):
        schedule = Schedule(
            kind="cosine", num_steps=num_steps, warmup_steps=num_steps // 10, decay_steps=0
        )
        specs = [
            RunSpec(
                optimizer="adamw",
                shape=shape,
                base_shape=shape,
                parametrization=get_parametrization("mup"),
                batch_tokens=1024,
                seed=seed,
                hparams=Hparams(learning_rate=2.0**log2_rate, clip_norm=1.0),
                data_id=store.manifest.data_id,
                numerics=numerics,
                schedule=schedule,
            )
            for seed, log2_rate in itertools.product((0, 1), range(-8, -2))
        ]
        for spec, (result, _) in zip(specs, train_runs(specs, store), strict=True):
            loss_nats = math.nan if result.loss_nats is None else result.loss_nats
            log2_rate = round(math.log2(spec.hparams.learning_rate))
            rows.append((num_steps, log2_rate, spec.seed, loss_nats))
        print(f"{num_steps} steps trained", file=sys.stderr, flush=True)
    columns = np.array(rows, dtype=np.float64).T
    save_file(
        {name: np.ascontiguousarray(column) for name, column in zip(COLUMNS, columns, strict=True)},
        GRID,
    )


def main() -> None:
    """Compare on planted and public optima, print and write the result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="JSON file to write.")
    parser.add_argument("--only", choices=("planted", "public"), help="Run one table.")
    parser.add_argument(
        "--quick", action="store_true", help="Take a fifth of the worlds and cases."
    )
    parser.add_argument(
        "--train", type=Path, metavar="CORPUS", help="Train the grid on this corpus first."
    )
    options = parser.parse_args()
    began = time.monotonic()
    if options.train:
        train_grid(options.train)
    num, case_stride = (NUM_WORLDS // 5, 5) if options.quick else (NUM_WORLDS, 1)
    result = {
        "command": "python benchmarks/statistics/bend.py --json benchmarks/results/bend.json",
        "planted": compare_planted(num) if options.only != "public" else None,
        "public": compare_public(case_stride) if options.only != "planted" else None,
        "prior": {
            "bends": LINE_PRIORS["duration"].bend_probability,
            "slope_octaves": LINE_PRIORS["duration"].slope_octaves,
            "bend_doublings": extrapolation.BEND_DOUBLINGS,
        },
        "machine": describe_machine(),
        "seconds": round(time.monotonic() - began),
    }
    write_result(options.json, result)


if __name__ == "__main__":
    main()
