"""What pruning saves and what it loses: a rule compared with full grids of finished runs, by
replay.

    python benchmarks/cpu/pruning.py --json benchmarks/results/pruning.json

The grids (benchmarks/grids) are the demo's model at base width 32, 200 steps, every point trained
to its end: 13 learning rates by warmup by clipping, under a cosine, a wsd and a constant schedule,
all trials of a grid from the same initial weights on the same batches, as in a search. `--train
CORPUS` trains them again (15 minutes of one core).

A search goes through a grid in random order, or as TPE suggests (between points, losses are
interpolated), 8 in flight; a rule sees what the driver would show it. `regret` is what the best
finished trial loses to that of the same search without pruning: over as many trials, and over as
many training steps, which pruning spends on more trials.

It takes some 20 minutes of one core; `--quick` takes a fifth of the searches. Figures of asha,
hyperband and median in the results are Optuna's pruners', which searches no longer have; commit
aa04857 has what measured them.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import optuna
from safetensors.numpy import load_file, save_file
from scipy.interpolate import RegularGridInterpolator
from scipy.stats import spearmanr

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from process_tree import machine

from proxies.core.schedule import ScheduleKind, whole_warmup
from sweeps.search import pruning
from sweeps.search.pruning import EarlierTrial
from sweeps.search.source import Search
from sweeps.search.space import Params, SearchSpace, search_space

GRIDS = Path(__file__).parents[1] / "grids"
NUM_STEPS, PARALLELISM, NUM_STARTUP, MOST_TIMES = 200, 8, 12, 3
RATES = tuple(2.0 ** (-9 + i / 2) for i in range(13))
AXES = {
    "learning_rate": (2.0**-9, 2.0**-3),
    "warmup_fraction": (0.02, 0.5),
    "clip_norm": (0.25, 4.0),
}
SPACE = search_space(ranges=AXES)
FULL, SMALL = ((0.02, 0.1, 0.25, 0.5), (0.25, 1.0, 4.0)), ((0.02, 0.25), (0.25, 4.0))
"""Warmups and clippings of a grid."""
WANTED = {"cosine-0": FULL, "cosine-1": SMALL, "wsd-0": SMALL, "constant-0": SMALL}
"""Grids: schedule and seed."""
NEAR_NATS = 0.1
"""Trials this near to the best are those among which a search chooses."""
NUM_RANDOM, NUM_TPE, NUM_TOLD = 100, 20, 20
"""Searches of every row; other levels than ours have half."""

Change = dict[str, Any]
LEVELS: list[tuple[str, str, Change]] = [
    ("curve", "chance under 0.2 %", {"LEAST_CHANCE": 0.002}),
    ("curve", "under 1 % (ours)", {}),
    ("curve", "under 5 %", {"LEAST_CHANCE": 0.05}),
    ("curve", "under 20 %", {"LEAST_CHANCE": 0.2}),
]


def trained(
    corpus: Path, kind: ScheduleKind, seed: int, points: Sequence[tuple[float, ...]]
) -> tuple[Any, Any]:
    """(rate, warmup, clip) trained to the end: losses [point][step] and final [point] in nats, NaN
    once diverged.
    """
    from proxies.core.hyperparameters import Hparams
    from proxies.core.rules import named
    from proxies.core.schedule import Schedule
    from proxies.core.shape import Shape
    from proxies.core.spec import Numerics, RunSpec
    from proxies.data.tokens import TokenStore
    from proxies.training.bank import Bank

    store, numerics = TokenStore(corpus), Numerics(num_slots=8)
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
    decay = NUM_STEPS // 5 if kind == "wsd" else 0

    def spec(point: tuple[float, ...]) -> RunSpec:
        rate, warmup, clip = point
        steps = whole_warmup(warmup, NUM_STEPS, decay)
        return RunSpec(
            optimizer="adamw",
            shape=shape,
            base_shape=shape,
            parametrization=named("mup"),
            batch_tokens=1024,
            seed=seed,
            hparams=Hparams(learning_rate=rate, clip_norm=clip),
            data_id=store.manifest.data_id,
            numerics=numerics,
            schedule=Schedule(
                kind=kind, num_steps=NUM_STEPS, warmup_steps=steps, decay_steps=decay
            ),
        )

    curves, final = (
        np.full((len(points), NUM_STEPS), np.nan, np.float32),
        np.full(len(points), np.nan),
    )
    bank, todo, slots = (
        Bank(shape, 1024, numerics, store, optimizer="adamw"),
        list(enumerate(points)),
        dict[int, int](),
    )
    while todo or slots:
        for slot in bank.free_slots[: len(todo)]:
            slots[slot], point = todo.pop(0)
            bank.admit(slot, spec(point))
        for slot, result, curve in bank.advance(NUM_STEPS):
            row = slots.pop(slot)
            curves[row, : len(curve.steps)] = curve.train_loss_nats
            final[row] = np.nan if result.loss_nats is None else result.loss_nats
    return curves, final


def loaded(name: str) -> list[EarlierTrial]:
    """A grid's trials, as they would be seen at their end."""
    grid = load_file(GRIDS / f"{name}.safetensors")
    trials = []
    for point, curve, final in zip(grid["points"], grid["curves"], grid["final"], strict=True):
        finished = bool(np.isfinite(final))
        trials.append(
            EarlierTrial(
                point=dict(zip(AXES, map(float, point), strict=True)),
                status="finished" if finished else "diverged",
                losses_nats=tuple(float(loss) for loss in curve[np.isfinite(curve)]),
                loss_nats=float(final) if finished else None,
            )
        )
    return trials


def reversed_grid(seed: int) -> list[EarlierTrial]:
    """Planted: until the last tenth of the steps, who will be better is behind, as far as it will
    be ahead.
    """
    rng, trials = np.random.default_rng(seed), []
    for point in itertools.product(RATES, *FULL):
        named = dict(zip(AXES, point, strict=True))
        loss = (
            2
            + 0.02 * (np.log2(point[0]) + 5.5) ** 2
            + 0.1 * (point[1] - 0.3) ** 2
            + float(rng.normal(0, 0.003))
        )
        early = 5 - loss + 2 * np.exp(-np.arange(NUM_STEPS) / 40)
        early[-NUM_STEPS // 10 :] = loss
        # the batches', which all trials share
        noise = np.random.default_rng(seed).normal(0, 0.05, NUM_STEPS)
        trials.append(
            EarlierTrial(
                point=named, status="finished", losses_nats=tuple(early + noise), loss_nats=loss
            )
        )
    return trials


def correlation_table(names: Sequence[str], resamples: int) -> list[dict[str, Any]]:
    """Spearman's rank correlation of the training loss at a step with the final loss: of all, and
    of the near best.
    """
    rows, rng = [], np.random.default_rng(0)
    for name in names:
        trials = [trial for trial in loaded(name) if trial.loss_nats is not None]
        final = np.array([trial.loss_nats for trial in trials], dtype=float)
        near = np.flatnonzero(final < final.min() + NEAR_NATS)
        curves = np.array([trial.losses_nats for trial in trials])
        for share, window in itertools.product((0.1, 0.25, 0.5, 0.75), (0.0, 0.1, 0.5)):
            step = int(share * NUM_STEPS)
            here = curves[:, step - max(1, round(window * step)) : step].mean(axis=1)
            place = np.argsort(np.argsort(here))
            row: dict[str, Any] = {
                "grid": name,
                "share_of_steps": share,
                "window_share": window,
                "num": len(trials),
            }
            for which, some in (("all", np.arange(len(final))), ("near_best", near)):
                draws = [rng.choice(some, len(some)) for _ in range(resamples)]
                found = [spearmanr(here[draw], final[draw]).statistic for draw in draws]
                row[which] = spearmanr(here[some], final[some]).statistic
                row[which + "_interval_90"] = [float(q) for q in np.quantile(found, (0.05, 0.95))]
            row["place_of_final_best"] = int(place[final.argmin()]) + 1
            row["place_of_final_ten"] = sorted(int(p) + 1 for p in place[np.argsort(final)[:10]])
            row["leader"] = trials[int(here.argmin())].point
            row["leader_loses_nats"] = float(final[here.argmin()] - final.min())
            rows.append(row)
            if window == 0.1:
                print(
                    f"{name:10} at {share:4.0%}: all {row['all']:5.2f}, near the best "
                    f"{row['near_best']:5.2f} "
                    f"{np.round(row['near_best_interval_90'], 2)}; the final best is "
                    f"{row['place_of_final_best']} "
                    f"of {len(trials)}, the leader ends {row['leader_loses_nats']:.3f} worse"
                )
    return rows


@contextlib.contextmanager
def changed(change: Change) -> Iterator[None]:
    """Constants of the rule as a level has them."""
    with contextlib.ExitStack() as stack:
        for name, value in change.items():
            stack.enter_context(mock.patch.object(pruning, name, value))
        yield


Told = Callable[[str, EarlierTrial, Sequence[EarlierTrial]], float | None]
Order = Callable[[int, dict[int, float | None]], EarlierTrial | None]


def in_random_order(grid: Sequence[EarlierTrial], seed: int) -> Order:
    """The grid, shuffled, to its end."""
    order = random.Random(seed).sample(list(grid), len(grid))
    return lambda index, told: order[index] if index < len(order) else None


def as_suggested(grid: Sequence[EarlierTrial], seed: int, sampler: str = "tpe") -> Order:
    """What a sampler suggests; its curve and its final loss lie between those of the grid's points
    around it.
    """
    search = Search(space_of(grid), seed, PARALLELISM, sampler=sampler, num_startup=NUM_STARTUP)
    between = interpolated(grid)

    def order(index: int, told: dict[int, float | None]) -> EarlierTrial:
        search.add(search.suggest(told))
        point = search.points[-1]
        *losses, final = map(float, np.ravel(between(coordinates(point))))
        return EarlierTrial(
            point=point, status="finished", losses_nats=tuple(losses), loss_nats=final
        )

    return order


def space_of(grid: Sequence[EarlierTrial]) -> SearchSpace:
    """Between a grid's outermost points: a small one ends before `AXES` do."""
    points = [trial.point for trial in grid]
    return search_space(
        ranges={name: (min(p[name] for p in points), max(p[name] for p in points)) for name in AXES}
    )


def interpolated(grid: Sequence[EarlierTrial]) -> RegularGridInterpolator:
    """Losses of every step and the final one over (log2 rate, warmup, log2 clip), linear between
    points.
    """
    axes = [np.unique([coordinates(trial.point)[i] for trial in grid]) for i in range(len(AXES))]
    rows = np.array([[*trial.losses_nats, trial.loss_nats] for trial in grid], dtype=float)
    return RegularGridInterpolator(axes, rows.reshape(*map(len, axes), -1))


def coordinates(point: Params) -> tuple[float, ...]:
    """Where a point lies on the axes that losses are interpolated over."""
    return tuple(
        value if name == "warmup_fraction" else float(np.log2(value))
        for name, value in point.items()
    )


def foretold(rule: str, trial: EarlierTrial, past: Sequence[EarlierTrial]) -> float:
    """What we tell."""
    return pruning.told_nats(SPACE, trial.point, trial.losses_nats, past)


def at_rung(rule: str, trial: EarlierTrial, past: Sequence[EarlierTrial]) -> float:
    """The training loss where the trial was given up."""
    return pruning.smoothed(trial.losses_nats, len(trial.losses_nats))


def as_diverged(rule: str, trial: EarlierTrial, past: Sequence[EarlierTrial]) -> None:
    """Worse than the worst finished."""


def as_optuna(rule: str, trial: EarlierTrial, past: Sequence[EarlierTrial]) -> float:
    """Ranked as Optuna's TPE ranks PRUNED trials: behind the finished; the later given up, then the
    lower, first.
    """
    return 100.0 + NUM_STEPS - len(trial.losses_nats) + at_rung(rule, trial, past) / 1000


def searched(
    rule: str, order: Order, seed: int, num_trials: int, tell: Told = foretold
) -> dict[str, float]:
    """One search: after `num_trials`, and after as many steps as those would take without
    pruning.
    """
    seen: list[EarlierTrial] = []
    told: dict[int, float | None] = {}
    spent, whole, best_tried, found = 0, 0, np.inf, dict[str, float]()
    while spent < num_trials * NUM_STEPS and len(seen) < MOST_TIMES * num_trials:
        index, past = len(seen), seen[: max(0, len(seen) - PARALLELISM + 1)]
        trial = order(index, told)
        if trial is None:
            break
        best_tried = min(best_tried, np.inf if trial.loss_nats is None else trial.loss_nats)
        ended = _pruned(rule, trial, past)
        seen.append(ended)
        told[index] = tell(rule, ended, seen[:-1]) if ended.status == "pruned" else ended.loss_nats
        spent, whole = spent + len(ended.losses_nats), whole + len(trial.losses_nats)
        if len(seen) == num_trials:
            best = _best(seen)
            found = {
                "best_nats": best,
                "saved": 1 - spent / whole,
                "best_was_pruned": float(best > best_tried),
            }
    return found | {"best_for_steps_nats": _best(seen), "num_for_steps": len(seen)}


def _best(seen: Sequence[EarlierTrial]) -> float:
    return min((trial.loss_nats for trial in seen if trial.loss_nats is not None), default=np.inf)


def _pruned(rule: str, trial: EarlierTrial, past: Sequence[EarlierTrial]) -> EarlierTrial:
    """The trial as it ends under a rule."""
    for rung in pruning.rungs(NUM_STEPS) if rule != "none" else ():
        losses = trial.losses_nats[:rung]
        if rung < len(trial.losses_nats) and pruning.verdict(
            space=SPACE,
            point=trial.point,
            num_steps=NUM_STEPS,
            losses_nats=losses,
            seen=past,
            num_startup=NUM_STARTUP,
        ):
            return EarlierTrial(
                point=trial.point, status="pruned", losses_nats=losses, loss_nats=None
            )
    return trial


def compared(
    label: dict[str, Any],
    run: Callable[[str, int], dict[str, float]],
    rule: str,
    plain: Sequence[dict[str, float]],
    best_nats: float,
) -> dict[str, Any]:
    """A row: searches with a rule against the same without, seed by seed."""
    found = [run(rule, seed) for seed in range(len(plain))]
    lost = np.array(
        [one["best_nats"] - other["best_nats"] for one, other in zip(found, plain, strict=True)]
    )
    gained = np.array(
        [o["best_nats"] - one["best_for_steps_nats"] for one, o in zip(found, plain, strict=True)]
    )
    row = {
        **label,
        "rule": rule,
        "num_searches": len(plain),
        "mean_regret_nats": float(lost.mean()),
        "regret_error_nats": float(lost.std(ddof=1) / len(lost) ** 0.5),
        "p95_regret_nats": float(np.quantile(lost, 0.95)),
        "worst_regret_nats": float(lost.max()),
        "best_was_pruned": statistics.mean(one["best_was_pruned"] for one in found),
        "steps_saved": statistics.mean(one["saved"] for one in found),
        "trials_for_same_steps": statistics.mean(one["num_for_steps"] for one in found),
        "gain_for_same_steps_nats": float(gained.mean()),
        "gain_error_nats": float(gained.std(ddof=1) / len(gained) ** 0.5),
        "plain_to_grid_best_nats": statistics.mean(one["best_nats"] for one in plain) - best_nats,
    }
    what = " ".join(str(value) for value in label.values())
    print(
        f"{what:52} {rule:9} regret {row['mean_regret_nats']:7.4f} +- "
        f"{row['regret_error_nats']:.4f} (95 %: "
        f"{row['p95_regret_nats']:.4f}), best pruned {row['best_was_pruned']:4.0%}, saved "
        f"{row['steps_saved']:4.0%}, "
        f"same steps: gains {row['gain_for_same_steps_nats']:7.4f} +- {row['gain_error_nats']:.4f}",
        flush=True,
    )
    return row


def regret_table(share: float) -> list[dict[str, Any]]:
    """Every rule on every grid, by chance and by TPE."""
    rows = []
    grids = {name: loaded(name) for name in WANTED} | {"reversed (planted)": reversed_grid(0)}
    makers = {"random": (in_random_order, NUM_RANDOM), "tpe": (as_suggested, NUM_TPE)}
    for (name, grid), (strategy, (maker, number)) in itertools.product(
        grids.items(), makers.items()
    ):
        num_trials = 24 if strategy == "random" and len(grid) < 100 else 48
        if strategy == "tpe" and name == "cosine-1":
            continue

        def run(
            rule: str, seed: int, maker: Any = maker, grid: Any = grid, num: int = num_trials
        ) -> Any:
            return searched(rule, maker(grid, seed), seed, num)

        plain = [run("none", seed) for seed in range(max(4, round(share * number)))]
        for rule, level, change in LEVELS:
            if change and name != "cosine-0":
                continue
            label = {"grid": name, "strategy": strategy, "num_trials": num_trials, "level": level}
            with changed(change):
                rows.append(
                    compared(
                        label, run, rule, plain[: len(plain) // (2 if change else 1)], _best(grid)
                    )
                )
    return rows


def told_table(share: float) -> list[dict[str, Any]]:
    """What a sampler is told of a pruned trial; at equal steps."""
    rows, grid = [], loaded("cosine-0")
    ways: dict[str, Told] = {
        "foretold": foretold,
        "loss at the rung": at_rung,
        "as diverged": as_diverged,
        "as Optuna's PRUNED": as_optuna,
    }
    cases: list[tuple[str, str, int, int]] = [
        ("tpe", "curve", NUM_TOLD, 48),
        ("gp", "curve", NUM_TOLD // 5, 40),
    ]
    for sampler, rule, number, num_trials in cases:
        seeds = range(max(3, round(share * number)))

        def run(
            rule: str, seed: int, way: Told, by: str = sampler, num: int = num_trials
        ) -> dict[str, float]:
            return searched(rule, as_suggested(grid, seed, by), seed, num, way)

        plain = [run("none", seed, foretold) for seed in seeds]
        for name, way in ways.items():
            if sampler == "gp" and way is as_optuna:
                continue  # those numbers are ranks, and a GP reads values
            label = {"sampler": sampler, "told": name, "num_trials": num_trials}
            rows.append(compared(label, functools.partial(run, way=way), rule, plain, _best(grid)))
    return rows


def cost_table() -> list[dict[str, Any]]:
    """CPU milliseconds of one verdict, at the first rung, after so many trials."""
    grid, rows = loaded("cosine-0"), []
    for rule in ("curve",):
        row: dict[str, Any] = {"rule": rule}
        for number in (100, 1000, 10_000):
            past = [grid[i % len(grid)] for i in range(number)]
            trial, rung = grid[77], pruning.rungs(NUM_STEPS)[-1]
            began, repeats = time.process_time(), 20
            for _ in range(repeats):
                pruning.verdict(
                    space=SPACE,
                    point=trial.point,
                    num_steps=NUM_STEPS,
                    losses_nats=trial.losses_nats[:rung],
                    seen=past,
                    num_startup=NUM_STARTUP,
                )
            row[f"cpu_ms_after_{number}"] = 1000 * (time.process_time() - began) / repeats
        rows.append(row)
        print(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="Where the numbers go.")
    parser.add_argument("--quick", action="store_true", help="A fifth of the searches.")
    parser.add_argument(
        "--train", type=Path, metavar="CORPUS", help="Train the grids on this corpus first."
    )
    options = parser.parse_args()
    share, began = 0.2 if options.quick else 1.0, time.monotonic()
    if options.train:
        GRIDS.mkdir(parents=True, exist_ok=True)
        for name, some in WANTED.items():
            kind, _, seed = name.partition("-")
            points = list(itertools.product(RATES, *some))
            curves, final = trained(options.train, kind, int(seed), points)  # type: ignore[arg-type]
            grid = {"points": np.array(points), "curves": curves, "final": final}
            save_file(grid, GRIDS / f"{name}.safetensors")
    body = {
        "correlations": correlation_table(tuple(WANTED), round(1000 * share)),
        "cost": cost_table(),
        "regret": regret_table(share),
        "told": told_table(share),
        "num_steps": NUM_STEPS,
        "parallelism": PARALLELISM,
        "num_startup": NUM_STARTUP,
        "machine": machine() | {"numpy": np.__version__, "optuna": optuna.__version__},
        "seconds": time.monotonic() - began,
    }
    print(f"{body['seconds']:.0f} s", file=sys.stderr)
    if options.json:
        options.json.write_text(json.dumps(body, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
