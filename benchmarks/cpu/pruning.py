"""Training steps that pruning saves and loss that it costs, by replay of recorded grids of runs.

    python benchmarks/cpu/pruning.py --json benchmarks/results/pruning.json

The grids in benchmarks/grids have the demo's model at base width 32 with every point trained for
all of its 200 steps: 13 learning rates by warmup by clipping, under a cosine, a wsd and a constant
schedule. All trials of a grid have the same initial weights and batches, as in a search. `--train
CORPUS` trains the grids again first, on a folder written by `forerun tokenize` (15 minutes of one
core).

A simulated search goes through a grid in random order, or as TPE suggests (losses are interpolated
between the grid's points), with 8 trials in flight. The pruning rule judges a trial at a few of its
steps, which are called rungs. It sees what the driver would show it. `regret` is the loss of the
best finished trial minus that of the same search without pruning. It is taken over the same number
of trials, and over the same number of training steps, where the search with pruning has more
trials.

The script prints a line for each row and writes four tables: `correlations` of a loss during a run
with its final loss, `cost` of one pruning decision in CPU time, `regret` by grid and threshold, and
a comparison of the losses that may be reported to the sampler for a pruned trial.

It takes about 20 minutes of one core; `--quick` runs a fifth of the searches. Figures of asha,
hyperband and median in the result file are those of Optuna's pruners, which forerun no longer has;
commit aa04857 has the code that measured them.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
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

from demo_runs import make_demo_shape, train_runs
from result_files import describe_machine, make_parser, write_result

from forerun._proxies.core.schedule import ScheduleKind, compute_warmup_steps
from forerun._sweeps.search import pruning
from forerun._sweeps.search.pruning import EarlierTrial
from forerun._sweeps.search.source import Search
from forerun._sweeps.search.space import Params, SearchSpace, build_search_space

GRIDS = Path(__file__).parents[1] / "grids"
NUM_STEPS, PARALLELISM, NUM_STARTUP = 200, 8, 12
MAX_TRIALS_RATIO = 3
"""Maximum trials of a search with pruning, as a multiple of those of a search without."""
RATES = tuple(2.0 ** (-9 + i / 2) for i in range(13))
"""Learning rates of every grid, half an octave apart."""
AXES = {
    "learning_rate": (2.0**-9, 2.0**-3),
    "warmup_fraction": (0.02, 0.5),
    "clip_norm": (0.25, 4.0),
}
SPACE = build_search_space(ranges=AXES)
FULL_GRID, SMALL_GRID = ((0.02, 0.1, 0.25, 0.5), (0.25, 1.0, 4.0)), ((0.02, 0.25), (0.25, 4.0))
"""Warmup fractions and clip norms of a grid."""
GRIDS_BY_NAME = {
    "cosine-0": FULL_GRID,
    "cosine-1": SMALL_GRID,
    "wsd-0": SMALL_GRID,
    "constant-0": SMALL_GRID,
}
"""Warmups and clips of each grid, by schedule and seed."""
NEAR_NATS = 0.1
"""Nats above the best trial up to which a trial counts as near the best; a search chooses among
those.
"""
NUM_RANDOM, NUM_TPE, NUM_REPORTS = 100, 20, 20
"""Searches per row: in random order, by TPE, and for `compare_reports`. Thresholds other than
forerun's have half.
"""

Change = dict[str, Any]
LEVELS: list[tuple[str, str, Change]] = [
    ("curve", "chance under 0.2 %", {"MIN_PROBABILITY": 0.002}),
    ("curve", "under 1 % (ours)", {}),
    ("curve", "under 5 %", {"MIN_PROBABILITY": 0.05}),
    ("curve", "under 20 %", {"MIN_PROBABILITY": 0.2}),
]
"""Rule, name of its threshold, and constants of `forerun._sweeps.search.pruning` to replace."""


def train_points(
    corpus: Path, kind: ScheduleKind, seed: int, points: Sequence[tuple[float, ...]]
) -> tuple[Any, Any]:
    """Train all steps at each point.

    Args:
        corpus: Folder of the tokens.
        kind: Learning rate schedule.
        seed: Seed of the weights and of the batches.
        points: Learning rate, warmup fraction and clip norm of each run.

    Returns:
        Losses in nats, [point][step], NaN after divergence; and final losses, [point].
    """
    from forerun._proxies.core.hyperparameters import Hparams
    from forerun._proxies.core.rules import get_parametrization
    from forerun._proxies.core.schedule import Schedule
    from forerun._proxies.core.spec import Numerics, RunSpec
    from forerun._proxies.data.tokens import TokenStore

    store, numerics = TokenStore(corpus), Numerics(num_slots=8)
    shape = make_demo_shape(store.manifest.vocab_size)
    decay = NUM_STEPS // 5 if kind == "wsd" else 0

    def make_spec(point: tuple[float, ...]) -> RunSpec:
        rate, warmup, clip = point
        steps = compute_warmup_steps(warmup, NUM_STEPS, decay)
        return RunSpec(
            optimizer="adamw",
            shape=shape,
            base_shape=shape,
            parametrization=get_parametrization("mup"),
            batch_tokens=1024,
            seed=seed,
            hparams=Hparams(learning_rate=rate, clip_norm=clip),
            data_id=store.manifest.data_id,
            numerics=numerics,
            schedule=Schedule(
                kind=kind, num_steps=NUM_STEPS, warmup_steps=steps, decay_steps=decay
            ),
        )

    curves = np.full((len(points), NUM_STEPS), np.nan, np.float32)
    final = np.full(len(points), np.nan)
    for row, (result, curve) in enumerate(
        train_runs([make_spec(point) for point in points], store)
    ):
        curves[row, : len(curve.steps)] = curve.train_loss_nats
        final[row] = np.nan if result.loss_nats is None else result.loss_nats
    return curves, final


def load_grid(name: str) -> list[EarlierTrial]:
    """Return the trials of a grid as the pruning rule sees finished trials."""
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


def make_reversed_grid(seed: int) -> list[EarlierTrial]:
    """Return a planted grid in which better trials are behind until the last tenth of the steps.

    Until then, a trial is behind by as much as it will be ahead at the end.
    """
    rng, trials = np.random.default_rng(seed), []
    for point in itertools.product(RATES, *FULL_GRID):
        named = dict(zip(AXES, point, strict=True))
        loss = (
            2
            + 0.02 * (np.log2(point[0]) + 5.5) ** 2
            + 0.1 * (point[1] - 0.3) ** 2
            + float(rng.normal(0, 0.003))
        )
        early = 5 - loss + 2 * np.exp(-np.arange(NUM_STEPS) / 40)
        early[-NUM_STEPS // 10 :] = loss
        # Noise of the batches, which all trials share
        noise = np.random.default_rng(seed).normal(0, 0.05, NUM_STEPS)
        trials.append(
            EarlierTrial(
                point=named, status="finished", losses_nats=tuple(early + noise), loss_nats=loss
            )
        )
    return trials


def measure_correlations(names: Sequence[str], resamples: int) -> list[dict[str, Any]]:
    """Return Spearman's rank correlation of the training loss at a step with the final loss.

    Each row has it for all trials, and for the trials near the best.
    """
    rows, rng = [], np.random.default_rng(0)
    for name in names:
        trials = [trial for trial in load_grid(name) if trial.loss_nats is not None]
        final = np.array([trial.loss_nats for trial in trials], dtype=float)
        near = np.flatnonzero(final < final.min() + NEAR_NATS)
        curves = np.array([trial.losses_nats for trial in trials])
        for share, window in itertools.product((0.1, 0.25, 0.5, 0.75), (0.0, 0.1, 0.5)):
            step = int(share * NUM_STEPS)
            losses_at_step = curves[:, step - max(1, round(window * step)) : step].mean(axis=1)
            ranks = np.argsort(np.argsort(losses_at_step))
            row: dict[str, Any] = {
                "grid": name,
                "share_of_steps": share,
                "window_share": window,
                "num": len(trials),
            }
            for subset_name, subset in (("all", np.arange(len(final))), ("near_best", near)):
                draws = [rng.choice(subset, len(subset)) for _ in range(resamples)]
                correlations = [
                    spearmanr(losses_at_step[draw], final[draw]).statistic for draw in draws
                ]
                row[subset_name] = spearmanr(losses_at_step[subset], final[subset]).statistic
                row[subset_name + "_interval_90"] = [
                    float(q) for q in np.quantile(correlations, (0.05, 0.95))
                ]
            row["place_of_final_best"] = int(ranks[final.argmin()]) + 1
            row["place_of_final_ten"] = sorted(int(p) + 1 for p in ranks[np.argsort(final)[:10]])
            row["leader"] = trials[int(losses_at_step.argmin())].point
            row["leader_loses_nats"] = float(final[losses_at_step.argmin()] - final.min())
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
def replace_constants(change: Change) -> Iterator[None]:
    """Replace constants of the pruning rule for the duration of the block."""
    with contextlib.ExitStack() as stack:
        for name, value in change.items():
            stack.enter_context(mock.patch.object(pruning, name, value))
        yield


ReportedLoss = Callable[[str, EarlierTrial, Sequence[EarlierTrial]], float | None]
"""Function that returns the loss to report to the sampler for a pruned trial."""
Order = Callable[[int, dict[int, float | None]], EarlierTrial | None]
"""Function that returns the trial of an index, given the losses reported so far; None at the end.
"""


def order_randomly(grid: Sequence[EarlierTrial], seed: int) -> Order:
    """Return the trials of the grid in random order."""
    order = random.Random(seed).sample(list(grid), len(grid))
    return lambda index, losses: order[index] if index < len(order) else None


def order_by_sampler(grid: Sequence[EarlierTrial], seed: int, sampler: str = "tpe") -> Order:
    """Return trials that a sampler suggests, with losses interpolated between the grid's points."""
    search = Search(make_space(grid), seed, PARALLELISM, sampler=sampler, num_startup=NUM_STARTUP)
    interpolator = interpolate_losses(grid)

    def order(index: int, losses: dict[int, float | None]) -> EarlierTrial:
        search.add_point(search.suggest(losses))
        point = search.points[-1]
        *curve_losses, final = map(float, np.ravel(interpolator(to_coordinates(point))))
        return EarlierTrial(
            point=point, status="finished", losses_nats=tuple(curve_losses), loss_nats=final
        )

    return order


def make_space(grid: Sequence[EarlierTrial]) -> SearchSpace:
    """Return the search space between a grid's outermost points.

    A small grid spans less than `AXES`.
    """
    points = [trial.point for trial in grid]
    return build_search_space(
        ranges={name: (min(p[name] for p in points), max(p[name] for p in points)) for name in AXES}
    )


def interpolate_losses(grid: Sequence[EarlierTrial]) -> RegularGridInterpolator:
    """Return a function that interpolates the losses of all steps and the final loss.

    It is linear between the grid's points, over the coordinates of `to_coordinates`.
    """
    axes = [np.unique([to_coordinates(trial.point)[i] for trial in grid]) for i in range(len(AXES))]
    rows = np.array([[*trial.losses_nats, trial.loss_nats] for trial in grid], dtype=float)
    return RegularGridInterpolator(axes, rows.reshape(*map(len, axes), -1))


def to_coordinates(point: Params) -> tuple[float, ...]:
    """Return log2 of the rate, the warmup, and log2 of the clip norm."""
    return tuple(
        value if name == "warmup_fraction" else float(np.log2(value))
        for name, value in point.items()
    )


def report_sampler_loss(rule: str, trial: EarlierTrial, past: Sequence[EarlierTrial]) -> float:
    """Return the loss that forerun reports."""
    return pruning.compute_sampler_loss(SPACE, trial.point, trial.losses_nats, past)


def report_loss_at_rung(rule: str, trial: EarlierTrial, past: Sequence[EarlierTrial]) -> float:
    """Return the training loss at the step where the trial was pruned."""
    return pruning.smooth_loss(trial.losses_nats, len(trial.losses_nats))


def report_as_diverged(rule: str, trial: EarlierTrial, past: Sequence[EarlierTrial]) -> None:
    """Return no loss, so that the trial ranks behind the worst finished one."""


def report_as_optuna_pruned(rule: str, trial: EarlierTrial, past: Sequence[EarlierTrial]) -> float:
    """Return a loss that ranks the trial as Optuna's TPE ranks PRUNED trials.

    They come after all finished trials: first those that were pruned later, and among equals those
    with the lower loss.
    """
    return (
        # 100 is above every final loss, and a thousandth of a loss below one step
        100.0 + NUM_STEPS - len(trial.losses_nats) + report_loss_at_rung(rule, trial, past) / 1000
    )


def run_search(
    rule: str,
    order: Order,
    seed: int,
    num_trials: int,
    report_loss: ReportedLoss = report_sampler_loss,
) -> dict[str, float]:
    """Run one search and return its figures at two ends.

    The first end is after `num_trials` trials, and the second is after as many steps as those
    trials take without pruning.
    """
    trials: list[EarlierTrial] = []
    losses: dict[int, float | None] = {}
    steps_spent, full_steps, best_full_loss, figures = 0, 0, np.inf, dict[str, float]()
    while steps_spent < num_trials * NUM_STEPS and len(trials) < MAX_TRIALS_RATIO * num_trials:
        index, past = len(trials), trials[: max(0, len(trials) - PARALLELISM + 1)]
        trial = order(index, losses)
        if trial is None:
            break
        best_full_loss = min(best_full_loss, np.inf if trial.loss_nats is None else trial.loss_nats)
        ended = _apply_rule(rule, trial, past)
        trials.append(ended)
        losses[index] = (
            report_loss(rule, ended, trials[:-1]) if ended.status == "pruned" else ended.loss_nats
        )
        steps_spent, full_steps = (
            steps_spent + len(ended.losses_nats),
            full_steps + len(trial.losses_nats),
        )
        if len(trials) == num_trials:
            best = _find_best_loss(trials)
            figures = {
                "best_nats": best,
                "saved": 1 - steps_spent / full_steps,
                "best_was_pruned": float(best > best_full_loss),
            }
    return figures | {"best_for_steps_nats": _find_best_loss(trials), "num_for_steps": len(trials)}


def _find_best_loss(trials: Sequence[EarlierTrial]) -> float:
    """Return the lowest final loss; infinity if no trial finished."""
    return min((trial.loss_nats for trial in trials if trial.loss_nats is not None), default=np.inf)


def _apply_rule(rule: str, trial: EarlierTrial, past: Sequence[EarlierTrial]) -> EarlierTrial:
    """Return the trial as it ends under a rule: pruned at a rung, or unchanged."""
    for rung in pruning.list_rungs(NUM_STEPS) if rule != "none" else ():
        losses = trial.losses_nats[:rung]
        if rung < len(trial.losses_nats) and pruning.judge_trial(
            space=SPACE,
            point=trial.point,
            num_steps=NUM_STEPS,
            losses_nats=losses,
            earlier_trials=past,
            num_startup=NUM_STARTUP,
        ):
            return EarlierTrial(
                point=trial.point, status="pruned", losses_nats=losses, loss_nats=None
            )
    return trial


def compare_rule(
    label: dict[str, Any],
    run: Callable[[str, int], dict[str, float]],
    rule: str,
    unpruned_searches: Sequence[dict[str, float]],
    best_nats: float,
) -> dict[str, Any]:
    """Compare searches under a rule with the same searches without it, seed by seed.

    The row of the table is printed and returned.
    """
    searches = [run(rule, seed) for seed in range(len(unpruned_searches))]
    regrets = np.array(
        [
            search["best_nats"] - unpruned_search["best_nats"]
            for search, unpruned_search in zip(searches, unpruned_searches, strict=True)
        ]
    )
    gains = np.array(
        [
            unpruned_search["best_nats"] - search["best_for_steps_nats"]
            for search, unpruned_search in zip(searches, unpruned_searches, strict=True)
        ]
    )
    row = {
        **label,
        "rule": rule,
        "num_searches": len(unpruned_searches),
        "mean_regret_nats": float(regrets.mean()),
        "regret_error_nats": float(regrets.std(ddof=1) / len(regrets) ** 0.5),
        "p95_regret_nats": float(np.quantile(regrets, 0.95)),
        "worst_regret_nats": float(regrets.max()),
        "best_was_pruned": statistics.mean(search["best_was_pruned"] for search in searches),
        "steps_saved": statistics.mean(search["saved"] for search in searches),
        "trials_for_same_steps": statistics.mean(search["num_for_steps"] for search in searches),
        "gain_for_same_steps_nats": float(gains.mean()),
        "gain_error_nats": float(gains.std(ddof=1) / len(gains) ** 0.5),
        "plain_to_grid_best_nats": statistics.mean(
            search["best_nats"] for search in unpruned_searches
        )
        - best_nats,
    }
    label_text = " ".join(str(value) for value in label.values())
    print(
        f"{label_text:52} {rule:9} regret {row['mean_regret_nats']:7.4f} +- "
        f"{row['regret_error_nats']:.4f} (95 %: "
        f"{row['p95_regret_nats']:.4f}), best pruned {row['best_was_pruned']:4.0%}, saved "
        f"{row['steps_saved']:4.0%}, "
        f"same steps: gains {row['gain_for_same_steps_nats']:7.4f} +- {row['gain_error_nats']:.4f}",
        flush=True,
    )
    return row


def measure_regrets(share: float) -> list[dict[str, Any]]:
    """Return a row for each rule on each grid, in random order and by TPE."""
    rows = []
    grids = {name: load_grid(name) for name in GRIDS_BY_NAME} | {
        "reversed (planted)": make_reversed_grid(0)
    }
    orders = {"random": (order_randomly, NUM_RANDOM), "tpe": (order_by_sampler, NUM_TPE)}
    for (name, grid), (strategy, (order_trials, number)) in itertools.product(
        grids.items(), orders.items()
    ):
        # A small grid has 52 points: 48 trials in random order would be nearly all of them
        num_trials = 24 if strategy == "random" and len(grid) < 100 else 48
        if strategy == "tpe" and name == "cosine-1":  # another seed of cosine-0, on a smaller grid
            continue

        def run(
            rule: str,
            seed: int,
            order_trials: Any = order_trials,
            grid: Any = grid,
            num: int = num_trials,
        ) -> Any:
            return run_search(rule, order_trials(grid, seed), seed, num)

        unpruned = [run("none", seed) for seed in range(max(4, round(share * number)))]
        for rule, level, change in LEVELS:
            if change and name != "cosine-0":
                continue
            label = {"grid": name, "strategy": strategy, "num_trials": num_trials, "level": level}
            with replace_constants(change):
                rows.append(
                    compare_rule(
                        label,
                        run,
                        rule,
                        unpruned[: len(unpruned) // (2 if change else 1)],
                        _find_best_loss(grid),
                    )
                )
    return rows


def compare_reports(share: float) -> list[dict[str, Any]]:
    """Return a row for each loss that may be reported to the sampler for a pruned trial.

    The searches of a row are compared at equal steps.
    """
    rows, grid = [], load_grid("cosine-0")
    reports: dict[str, ReportedLoss] = {
        "foretold": report_sampler_loss,
        "loss at the rung": report_loss_at_rung,
        "as diverged": report_as_diverged,
        "as Optuna's PRUNED": report_as_optuna_pruned,
    }
    cases: list[tuple[str, str, int, int]] = [
        ("tpe", "curve", NUM_REPORTS, 48),
        ("gp", "curve", NUM_REPORTS // 5, 40),
    ]
    for sampler, rule, number, num_trials in cases:
        seeds = range(max(3, round(share * number)))

        def run(
            rule: str,
            seed: int,
            report_loss: ReportedLoss,
            sampler: str = sampler,
            num: int = num_trials,
        ) -> dict[str, float]:
            return run_search(rule, order_by_sampler(grid, seed, sampler), seed, num, report_loss)

        unpruned = [run("none", seed, report_sampler_loss) for seed in seeds]
        for name, report_loss in reports.items():
            if sampler == "gp" and report_loss is report_as_optuna_pruned:
                continue  # these losses are ranks, and a GP uses their values
            label = {"sampler": sampler, "told": name, "num_trials": num_trials}
            rows.append(
                compare_rule(
                    label,
                    functools.partial(run, report_loss=report_loss),
                    rule,
                    unpruned,
                    _find_best_loss(grid),
                )
            )
    return rows


def measure_decision_cost() -> list[dict[str, Any]]:
    """Return the CPU milliseconds of one pruning decision, by number of earlier trials.

    The decision is that at the last rung.
    """
    grid, rows = load_grid("cosine-0"), []
    for rule in ("curve",):
        row: dict[str, Any] = {"rule": rule}
        for number in (100, 1000, 10_000):
            past = [grid[i % len(grid)] for i in range(number)]
            trial, rung = grid[77], pruning.list_rungs(NUM_STEPS)[-1]  # any trial of the grid
            began, repeats = time.process_time(), 20
            for _ in range(repeats):
                pruning.judge_trial(
                    space=SPACE,
                    point=trial.point,
                    num_steps=NUM_STEPS,
                    losses_nats=trial.losses_nats[:rung],
                    earlier_trials=past,
                    num_startup=NUM_STARTUP,
                )
            row[f"cpu_ms_after_{number}"] = 1000 * (time.process_time() - began) / repeats
        rows.append(row)
        print(row)
    return rows


def main() -> None:
    """Measure the four tables, print them, and write the result."""
    parser = make_parser(__doc__, quick="Run a fifth of the searches.")
    parser.add_argument(
        "--train", type=Path, metavar="CORPUS", help="Train the grids on this corpus first."
    )
    options = parser.parse_args()
    share, began = 0.2 if options.quick else 1.0, time.monotonic()
    if options.train:
        GRIDS.mkdir(parents=True, exist_ok=True)
        for name, axes in GRIDS_BY_NAME.items():
            kind, _, seed = name.partition("-")
            points = list(itertools.product(RATES, *axes))
            curves, final = train_points(
                options.train,
                kind,  # type: ignore[arg-type]
                int(seed),
                points,
            )
            grid = {"points": np.array(points), "curves": curves, "final": final}
            save_file(grid, GRIDS / f"{name}.safetensors")
    result = {
        "correlations": measure_correlations(tuple(GRIDS_BY_NAME), round(1000 * share)),
        "cost": measure_decision_cost(),
        "regret": measure_regrets(share),
        "told": compare_reports(share),
        "num_steps": NUM_STEPS,
        "parallelism": PARALLELISM,
        "num_startup": NUM_STARTUP,
        "machine": describe_machine() | {"numpy": np.__version__, "optuna": optuna.__version__},
        "seconds": time.monotonic() - began,
    }
    print(f"{result['seconds']:.0f} s", file=sys.stderr)
    write_result(options.json, result)


if __name__ == "__main__":
    main()
