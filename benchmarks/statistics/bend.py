"""The optimum over duration: a straight line, and one that may bend, on planted truths and on
public grids.

    python benchmarks/statistics/bend.py --json benchmarks/results/bend.json

Planted: runs of known optima at two to four durations are judged for targets 4 and 16 times as long
as the longest, once with the line held straight, once with both averaged by evidence
(`transfer.regret.drift`). Told are the shares of 90 % intervals that hold the target's optimum,
their width, how often the verdict is that the measured exponent holds, what the value it launches
costs in truth, and the mean probability of a bend.

Public: optima at durations of one model and batch in StepLaw's grid and in Misfitting's (`make
data`), where they are, and in a grid of the demo's proxy, 50 to 3,200 steps
(`grids/durations.safetensors`; `--train CORPUS` trains it again, 15 minutes of one core). Two or
three durations, of 16 times at most, predict every longer one; a prediction covers if its distance
to the held-out optimum, which has noise of its own, may be 0. Then what values cost there, in nats:
of the published exponents from the longest duration on, of two from the shortest on, and of both
lines. Means are over families first, so that one of many durations counts once. Porian's grid,
Gadre's, Gemstones', Datablations' and MultiPowerLaw's tell nothing here: they have one rate a run,
or two.

It takes some 5 minutes of one core; `--quick` a fifth of the worlds and of the cases, `--only
planted` one half.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from downloads import FOLDER, is_here, source
from safetensors.numpy import load_file, save_file

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "transfer"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from planted_valleys import World
from process_tree import machine

from transfer.basin.optimum import find_optima
from transfer.basin.shapes import Floats, rise
from transfer.question import Point, Question
from transfer.regret import drift
from transfer.regret.drift import LINES, Prior, extend_line
from transfer.verdict.verdict import examine

GRID = Path(__file__).parents[1] / "grids" / "durations.safetensors"
MODELS: dict[str, Prior] = {"straight": Prior(0.0, 0.2, 4.0), "averaged": LINES["duration"]}
PATHS: dict[str, Callable[[float], float]] = {
    "constant": lambda d: 0.0,
    "straight, -0.3": lambda d: -0.3 * d,
    "falls, then stays": lambda d: -0.5 * (1 - math.exp(-d)),
    "rises, then falls": lambda d: 0.2 * d - 0.1 * min(d, 2.5) ** 2 - 0.5 * max(d - 2.5, 0.0),
    "falls at -0.3 as far as was run, then stays": lambda d: -0.3 * min(d, 2.0),
}
"""Octaves from the base's optimum, by doublings from the base."""
DURATIONS = ((100, 400), (100, 200, 400), (50, 100, 200, 400))
TIMES = (4, 16)
"""Targets, in durations of the longest run."""
NUM_WORLDS, NUM_DRAWS = 40, 600

EXPONENTS = {
    "no rule; Porian": 0.0,  # 2406.19146: of the model's size alone (recalled, not read)
    "DeepSeek": -0.125,  # 2401.02954, of compute: at one size, of duration
    "-0.3 (Marin)": -0.3,
    "-0.32 (Bjorck, HyperP)": -0.32,  # 2409.19913, 2603.28743
    "-0.5 (Complete(d)P)": -0.5,  # 2512.22382
    "Step Law": 0.307,  # 2503.04715, the mean of the bootstraps in its repository
}
REACHES = {"2 to 4 times": (1.0, 2.0), "4 to 16 times": (2.0, 4.0)}
MOST_TESTED, LEAST_STEP = 4.0, 0.6
"""Doublings from the shortest to the longest duration that predicts, and between two of them."""
PARABOLA_SD = 0.15
"""Octaves by which the lowest point of a parabola through three rates, an octave apart, is off: set
by hand."""


@dataclass(frozen=True)
class BentWorld(World):
    """Runs over duration, whose optimum takes a path."""

    path: Callable[[float], float] = PATHS["constant"]

    def optimum(self, size: int, base: float) -> float:
        """On the path, from the smallest duration."""
        return base + self.path(math.log2(size / self.sizes[0]))


def planted_row(path: str, durations: tuple[int, ...], times: int, num: int) -> dict[str, Any]:
    """Both models on the same worlds."""
    world = BentWorld(
        durations, tuple(range(-9, -3)), 3, 0.005, times * durations[-1], path=PATHS[path]
    )
    found: dict[str, list[tuple[float, ...]]] = {name: [] for name in MODELS}
    for seed in range(num):
        points, _, optima = world.draw_all(np.random.default_rng(seed))
        question = Question(
            target_size=world.target_size, base_size=durations[0], axis="duration", power=None
        )
        for name, prior in MODELS.items():
            with mock.patch.dict(LINES, {"duration": prior}):
                judged = examine(points, question, seed=seed, draws=NUM_DRAWS)
            there, value = judged.at_target, judged.verdict.transferred_log2
            if there is None or value is None:
                continue
            low, high = np.quantile(there.line.at_target[1:], [0.05, 0.95])
            optimum = optima[world.target_size]
            cost = world.valley(value - optimum, world.curvature)  # type: ignore[operator]
            found[name].append(
                (
                    low <= optimum <= high,
                    high - low,
                    judged.verdict.outcome == "holds",
                    judged.verdict.outcome == "drifts",
                    cost,
                    there.line.bends,
                )
            )
    names = ("covered", "width_octaves", "holds", "drifts", "regret_nats", "bends")
    told = {
        model: dict(zip(names, np.mean(rows, axis=0).tolist(), strict=True))
        for model, rows in found.items()
    }
    return {"path": path, "durations": list(durations), "times": times, "num": num, **told}


def planted_table(num: int) -> list[dict[str, Any]]:
    """Every path, number of durations and target."""
    rows = []
    for path, durations, times in itertools.product(PATHS, DURATIONS, TIMES):
        rows.append(row := planted_row(path, durations, times, num))
        said = "  ".join(
            f"{model}: covered {row[model]['covered']:.2f}, {row[model]['width_octaves']:.2f} "
            "octaves, holds "
            f"{row[model]['holds']:.2f}, {1e3 * row[model]['regret_nats']:.1f} mnats, bends "
            f"{row[model]['bends']:.2f}"
            for model in MODELS
        )
        print(f"{path}, {len(durations)} durations, {times} times: {said}", flush=True)
    return rows


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """Optima at durations of one model and batch."""

    name: str
    group: str
    log2_size: Floats
    optimum: Floats
    """(D, W) row 0 the estimate."""
    cost: Callable[[int, float], float]
    """Nats lost at a duration, by octaves from its optimum."""


def of_points(name: str, group: str, points: Sequence[Point]) -> Family | None:
    """By the verdict's own basins; None with fewer than three optima inside their rates."""
    found = find_optima(points, level=0.9, draws=1500, rng=np.random.default_rng(0))
    usable = [o for o in found.optima if o.status == "ok"]
    if found.basins is None or len(usable) < 3:
        return None
    columns = [found.fitted.index(o.size) for o in usable]
    curvature, shape = found.basins.curvature[0, columns], found.basins.shape[:1]
    return Family(
        name=name,
        group=group,
        log2_size=np.log2([o.size for o in usable]),
        optimum=found.basins.optimum[:, columns],
        cost=lambda index, off: float(
            rise(np.array([off]), curvature[index : index + 1], shape)[0]
        ),
    )


def _records(name: str) -> list[dict[str, str]]:
    origin = source(name)
    if not is_here(origin):
        print(f"{name} is not here: `make data` fetches it", file=sys.stderr)
        return []
    with origin.list_files(FOLDER)[0][1].open(encoding="utf-8-sig", newline="") as file:
        return list(csv.DictReader(file))


def steplaw() -> Iterator[Family]:
    """StepLaw's dense models: each size and batch, at up to four durations and twelve rates."""
    cells: dict[tuple[str, str], dict[tuple[int, float], float]] = {}
    for one in _records("steplaw"):
        runs = cells.setdefault((one["N"], one["bs"]), {})
        at = int(float(one["D"])), round(math.log2(float(one["lr"])), 3)
        runs[at] = min(runs.get(at, math.inf), float(one["smooth loss"]))
    for (params, batch), runs in sorted(cells.items()):
        points = [
            Point(size=size, log2_value=x, loss_nats=loss)
            for (size, x), loss in sorted(runs.items())
        ]
        if (
            family := of_points(f"{float(params) / 1e6:.0f}M, batch {batch}", "StepLaw", points)
        ) is not None:
            yield family


def misfitting() -> Iterator[Family]:
    """Misfitting's models: three rates at most durations, so a parabola through the best and its
    neighbours.
    """
    cells: dict[str, dict[float, dict[float, float]]] = {}
    for one in _records("misfitting"):
        if float(one["portion_steps_elapsed"]) > 0.999:
            rates = cells.setdefault(one["model"], {}).setdefault(float(one["D"]), {})
            rate = math.log2(float(one["peak_lr"]))
            rates[rate] = min(rates.get(rate, math.inf), float(one["loss"]))
    rng = np.random.default_rng(0)
    for model, sizes in sorted(cells.items()):
        found = [
            (math.log2(size), *lowest)
            for size, rates in sorted(sizes.items())
            if (lowest := _parabola(rates))
        ]
        if len(found) < 4:
            continue
        log2_size, optimum, curvature = np.array(found).T
        rows = optimum + PARABOLA_SD * rng.standard_normal((1501, len(optimum)))
        rows[0] = optimum
        yield Family(
            name=model,
            group="Misfitting",
            log2_size=log2_size,
            optimum=rows,
            cost=lambda index, off, bend=curvature: float(0.5 * bend[index] * off**2),
        )  # type: ignore[misc]


def _parabola(rates: Mapping[float, float]) -> tuple[float, float] | None:
    """Place and curvature of the minimum, or None where there is none among three rates or near
    them.
    """
    x = sorted(rates)
    if len(x) < 3:
        return None
    middle = min(max(x.index(min(x, key=lambda rate: rates[rate])), 1), len(x) - 2)
    near = x[middle - 1 : middle + 2]
    square, slope, _ = np.polyfit(near, [rates[rate] for rate in near], 2)
    if square <= 0 or not near[0] - 0.3 < -slope / (2 * square) < near[2] + 0.3:
        return None
    return float(-slope / (2 * square)), float(2 * square)


def ours() -> Iterator[Family]:
    """The demo's proxy of width 32 in muP."""
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
    if (family := of_points("width 32", "ours", points)) is not None:
        yield family


COLUMNS = ("num_steps", "log2_rate", "seed", "loss_nats")


def cases(family: Family) -> Iterator[tuple[list[int], int]]:
    """Two or three durations, and a longer one."""
    u = family.log2_size
    for number in (2, 3):
        for known in itertools.combinations(range(len(u) - 1), number):
            steps = np.diff(u[list(known)])
            if steps.min() >= LEAST_STEP and steps.sum() <= MOST_TESTED:
                yield from ((list(known), held) for held in range(known[-1] + 1, len(u)))


def predicted(family: Family, known: list[int], held: int) -> dict[str, Any]:
    """How both lines and all exponents do at one held-out duration."""
    u, truth = family.log2_size, family.optimum[:, held]
    last, beyond = family.optimum[0, known[-1]], float(u[held] - u[known[-1]])
    whole = float(u[held] - u[known[0]])
    values = {name: float(last + power * beyond) for name, power in EXPONENTS.items()}
    values |= {
        f"{power:g} from the shortest": float(family.optimum[0, known[0]] + power * whole)
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
        with mock.patch.dict(LINES, {"duration": prior}):
            line = extend_line(
                family.optimum[:, known],
                u[known],
                u[held],
                u[known[0]],
                "duration",
                np.random.default_rng(0),
            )
        low, high = np.quantile(line.at_target[1:] - noise, [0.05, 0.95])
        row[model] = {
            "covered": bool(low <= 0 <= high),
            "width_octaves": float(high - low),
            "bends": line.bends,
        }
        values[f"{model} line"] = float(line.at_target[0])
    row["cost"] = {
        name: family.cost(held, value - float(truth[0])) for name, value in values.items()
    }
    row["off"] = {name: abs(value - float(truth[0])) for name, value in values.items()}
    return row


def public_table(every: int) -> dict[str, Any]:
    """Coverage and costs by source, number of durations and reach."""
    families = [*steplaw(), *misfitting(), *ours()]
    rows = [
        predicted(family, *case) for family in families for case in list(cases(family))[::every]
    ]
    covered, costs = [], []
    for group, (reach, (low, high)) in itertools.product(
        dict.fromkeys(family.group for family in families), REACHES.items()
    ):
        near = [row for row in rows if row["group"] == group and low <= row["doublings"] <= high]
        for num in (2, 3):
            if some := [row for row in near if row["num"] == num]:
                told = {
                    m: {key: _mean(some, m, key) for key in ("covered", "width_octaves", "bends")}
                    for m in MODELS
                }
                size = {
                    "num_cases": len(some),
                    "num_families": len({row["family"] for row in some}),
                }
                covered.append({"group": group, "reach": reach, "durations": num, **size, **told})
                print(covered[-1], flush=True)
        if near:
            names = near[0]["cost"]
            told = {
                name: {
                    "cost_nats": _mean(near, "cost", name),
                    "off_octaves": _mean(near, "off", name),
                }
                for name in names
            }
            costs.append({"group": group, "reach": reach, "num_cases": len(near), "rules": told})
            print(
                f"{group}, {reach}: "
                + ", ".join(f"{name} {1e3 * of['cost_nats']:.1f}" for name, of in told.items())
                + " mnats",
                flush=True,
            )
    optima = {
        f"{f.group}, {f.name}": [f.log2_size.tolist(), f.optimum[0].tolist()] for f in families
    }
    return {"coverage": covered, "costs": costs, "optima": optima}


def _mean(rows: Sequence[Mapping[str, Any]], *keys: str) -> float:
    """Over families first."""
    by_family: dict[str, list[float]] = {}
    for row in rows:
        by_family.setdefault(row["family"], []).append(float(row[keys[0]][keys[1]]))
    return float(np.mean([np.mean(values) for values in by_family.values()]))


def train(corpus: Path) -> None:
    """The grid of the demo's proxy: cosine with a tenth of warmup, seven durations, six rates, two
    seeds.
    """
    from proxies.core.hyperparameters import Hparams
    from proxies.core.rules import named
    from proxies.core.schedule import Schedule
    from proxies.core.shape import Shape
    from proxies.core.spec import Numerics, RunSpec
    from proxies.data.tokens import TokenStore
    from proxies.training.bank import Bank

    store, numerics, rows = TokenStore(corpus), Numerics(num_slots=8), []
    shape = Shape(
        num_layers=2,
        width=32,
        num_heads=2,
        num_kv_heads=2,
        ffn_width=64,
        seq_len=64,
        vocab_size=store.manifest.vocab_size,
        family="llama",
        tied=False,
        qk_norm=False,
    )
    for num_steps in (50, 100, 200, 400, 800, 1600, 3200):
        schedule = Schedule(
            kind="cosine", num_steps=num_steps, warmup_steps=num_steps // 10, decay_steps=0
        )
        bank, todo = (
            Bank(shape, 1024, numerics, store, optimizer="adamw"),
            list(itertools.product((0, 1), range(-8, -2))),
        )
        slots: dict[int, tuple[int, int]] = {}
        while todo or slots:
            for slot in bank.free_slots[: len(todo)]:
                slots[slot] = seed, rate = todo.pop(0)
                bank.admit(
                    slot,
                    RunSpec(
                        optimizer="adamw",
                        shape=shape,
                        base_shape=shape,
                        parametrization=named("mup"),
                        batch_tokens=1024,
                        seed=seed,
                        hparams=Hparams(learning_rate=2.0**rate, clip_norm=1.0),
                        data_id=store.manifest.data_id,
                        numerics=numerics,
                        schedule=schedule,
                    ),
                )
            for slot, result, _ in bank.advance(num_steps):
                seed, rate = slots.pop(slot)
                rows.append(
                    (
                        num_steps,
                        rate,
                        seed,
                        math.nan if result.loss_nats is None else result.loss_nats,
                    )
                )
        print(f"{num_steps} steps trained", file=sys.stderr, flush=True)
    columns = np.array(rows, dtype=np.float64).T
    save_file(
        {name: np.ascontiguousarray(of) for name, of in zip(COLUMNS, columns, strict=True)}, GRID
    )


def main() -> None:
    """Print both halves and write them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="JSON file to write.")
    parser.add_argument("--only", choices=("planted", "public"))
    parser.add_argument(
        "--quick", action="store_true", help="A fifth of the worlds and of the cases."
    )
    parser.add_argument(
        "--train", type=Path, metavar="CORPUS", help="Train the grid on this corpus first."
    )
    options = parser.parse_args()
    began = time.monotonic()
    if options.train:
        train(options.train)
    num, every = (NUM_WORLDS // 5, 5) if options.quick else (NUM_WORLDS, 1)
    body = {
        "command": "python benchmarks/statistics/bend.py --json benchmarks/results/bend.json",
        "planted": planted_table(num) if options.only != "public" else None,
        "public": public_table(every) if options.only != "planted" else None,
        "prior": {
            "bends": LINES["duration"].bends,
            "slope_octaves": LINES["duration"].slope_octaves,
            "bend_doublings": drift.BEND_DOUBLINGS,
        },
        "machine": machine(),
        "seconds": round(time.monotonic() - began),
    }
    if options.json:
        options.json.write_text(json.dumps(body, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
