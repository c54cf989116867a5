"""Accuracy of forecasts of larger runs on public scaling studies, by kind of ladder and by reach.

    make data                                                        # once: the public families
    python benchmarks/statistics/forecasts.py --json benchmarks/results/forecasts.json

A task takes a ladder of one family, fits the runs of up to 1/r of its largest budget (r = 3, 10,
30, 100), and predicts the good runs of that budget: those within 2 % of its best loss. Ladders are
the families as published, and, of grids and isoFLOP families, the runs along one ratio of tokens to
parameters and the runs of one duration.

**The split.** forerun's forecasts use a prior of the parameters of laws, which it calls a
population. The population `forecast.population.PUBLIC` has round numbers that were chosen by hand
with these studies in view (results `stated`). So each study is also predicted by the population
that does best on all other studies (results `left_out`). The candidates are nine: three spreads of
the irreducible share, which matters most, times three errors beyond the runs.

Averages are over tasks of a ladder, ladders of a study, and studies, which count alike; their 90 %
intervals are from a bootstrap over studies. For comparison the results include Chinchilla's law by
Huber loss, the same law by least squares over a grid of exponents (variable projection), and a
power law in compute through the best runs.

The script prints a summary and writes all averages. It takes about 4 minutes of one core.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from datasets import Family, load_families

from forerun._scaling_fits.forecast.path import find_path
from forerun._scaling_fits.forecast.population import PUBLIC
from forerun._scaling_fits.forecast.posterior import LawPosterior, fit_posterior
from forerun._scaling_fits.laws import law
from forerun._scaling_fits.laws.solver import Floats
from forerun._scaling_fits.laws.table import RunTable

Kind = Literal["grid", "isoflop", "fixed ratio", "fixed duration", "along a schedule"]
KINDS: tuple[Kind, ...] = ("grid", "isoflop", "fixed ratio", "fixed duration", "along a schedule")
RATIOS = (3, 10, 30, 100)
LEVELS = (0.5, 0.8, 0.9)
SAME_BUDGET, GOOD_RUN = 1.25, 1.02
"""Ratio of FLOPs up to which runs have the largest budget, and ratio of a good run's loss to the
best loss.
"""
MIN_RUNS, MIN_SIZES, MAX_RUNS = 4, 3, 250
"""Limits of the runs and sizes that a task fits."""
SHARES = (0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95)
"""Quantiles of a forecast that are scored: the median, and the ends of an interval per level."""
NUM_DRAWS = 200
CANDIDATES = tuple(
    dataclasses.replace(PUBLIC, sd=(sd, *PUBLIC.sd[1:]), error_sd=error_sd)
    for sd in (0.3, 0.5, 0.8)
    for error_sd in (0.001, 0.002, 0.004)
)
"""Populations among which the other studies choose; PUBLIC is one."""
NUM_RESAMPLES = 1000
METHODS = ("forerun", "chinchilla", "variable_projection", "power_in_compute")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Task:
    """Runs to fit and runs to predict."""

    ladder: str
    study: str
    kind: Kind
    ratio: int
    table: RunTable
    held_out: RunTable


def find_kind(family: Family) -> Kind:
    """Return the kind of ladder that a family is."""
    table = family.table
    # `datasets.py` writes these words into the note of each family of this kind.
    if "points along" in family.note:
        return "along a schedule"
    path = find_path(table)
    if path is not None:
        return "fixed duration" if path.direction[1] < 0.1 else "fixed ratio"
    order = np.sort(np.log(table.flops if table.budget is None else table.budget))
    # Runs within 0.3 of each other in log FLOPs have one budget. In an isoFLOP family most runs
    # share their budget with at least three others.
    groups = np.split(order, np.flatnonzero(np.diff(order) > 0.3) + 1)
    return (
        "isoflop" if np.mean([len(group) >= 4 for group in groups for _ in group]) > 0.7 else "grid"
    )


def list_ladders(family: Family) -> Iterator[tuple[str, Kind, RunTable]]:
    """Yield the ladders of a family.

    These are the family as published, its runs along one ratio of tokens to parameters, and its
    runs of one duration. The last two must have at least five sizes.
    """
    table, kind = family.table, find_kind(family)
    yield family.name, kind, table
    if kind not in ("grid", "isoflop"):
        return
    log_ratio, log_tokens = np.log(table.tokens / table.params), np.log(table.tokens)
    order = np.argsort(table.flops, kind="stable")
    is_best = np.minimum.accumulate(table.loss[order]) >= table.loss[order]
    # One ratio: within 35 % of the median ratio of the runs that are best up to their FLOPs
    is_near = np.abs(log_ratio - np.median(log_ratio[order][is_best])) < np.log(1.35)
    if len(np.unique(table.params[is_near])) >= 5:
        yield f"{family.name}/ratio", "fixed ratio", table.select_runs(is_near)
    # One duration: within 6 %
    durations = [np.abs(log_tokens - length) < 0.06 for length in np.unique(log_tokens.round(2))]
    longest = max(durations, key=lambda rows: len(np.unique(table.params[rows])))
    if len(np.unique(table.params[longest])) >= 5:
        yield f"{family.name}/duration", "fixed duration", table.select_runs(longest)


def list_tasks(public_families: list[Family]) -> list[Task]:
    """Return the tasks of all families."""
    tasks = []
    for family in public_families:
        for ladder, kind, table in list_ladders(family):
            largest = float(table.flops.max())
            top = table.flops > largest / SAME_BUDGET
            good = top & (table.loss <= GOOD_RUN * table.loss[top].min())
            sizes = set[int]()
            for ratio in RATIOS:
                below = table.flops <= largest / ratio * 1.0001
                num_runs = int(below.sum())
                if num_runs in sizes or not MIN_RUNS <= num_runs <= MAX_RUNS:
                    continue
                if len(np.unique(table.params[below])) < MIN_SIZES or law.list_forecast_obstacles(
                    table.select_runs(below)
                ):
                    continue
                sizes.add(num_runs)
                tasks.append(
                    Task(
                        ladder=ladder,
                        study=family.group,
                        kind=kind,
                        ratio=ratio,
                        table=table.select_runs(below),
                        held_out=table.select_runs(good),
                    )
                )
    return tasks


def average(tasks: list[Task], values: list[float]) -> float:
    """Return the mean over studies of the mean over ladders of the mean over tasks."""
    studies: dict[str, dict[str, list[float]]] = {}
    for task, value in zip(tasks, values, strict=True):
        studies.setdefault(task.study, {}).setdefault(task.ladder, []).append(value)
    return float(
        np.mean(
            [np.mean([np.mean(ladder) for ladder in study.values()]) for study in studies.values()]
        )
    )


def run_task(task: Task) -> list[dict[str, float]]:
    """Fit and predict one task, and return its scores for each of `CANDIDATES`.

    The scores include the errors of the usual methods.
    """
    log_loss = np.log(task.held_out.loss)
    usual = {}
    for method in METHODS[1:]:
        predicted = predict_usual(method, task)
        usual[method] = (
            float("nan")
            if predicted is None
            else float(np.median(np.abs(100 * np.expm1(predicted - log_loss))))
        )
    posteriors = {
        population.sd: fit_posterior(task.table, num_draws=NUM_DRAWS, seed=0, population=population)
        for population in CANDIDATES
    }
    return [
        score(dataclasses.replace(posteriors[population.sd], population=population), task) | usual
        for population in CANDIDATES
    ]


def score(posterior: LawPosterior, task: Task) -> dict[str, float]:
    """Return the scores of one posterior's forecasts of a task."""
    log_loss = np.log(task.held_out.loss)
    ends = posterior.compute_quantiles(task.held_out.params, task.held_out.tokens, SHARES)
    median_index = len(SHARES) // 2
    error = 100 * np.expm1(ends[median_index] - log_loss)
    quantile_losses = [
        np.where(log_loss >= end, share * (log_loss - end), (1 - share) * (end - log_loss))
        for share, end in zip(SHARES, ends, strict=True)
    ]
    low, high = ends[0], ends[-1]
    beyond = np.maximum(low - log_loss, 0) + np.maximum(log_loss - high, 0)
    return {
        "error": float(np.median(np.abs(error))),
        "signed_error": float(np.median(error)),
        # Twice the mean, in percent of the loss: an estimate of the CRPS (continuous ranked
        # probability score)
        "quantile_loss": float(100 * 2 * np.mean(quantile_losses)),
        **{
            f"covered_{level:g}": float(
                (
                    (log_loss >= ends[median_index - 1 - i])
                    & (log_loss <= ends[median_index + 1 + i])
                ).mean()
            )
            for i, level in enumerate(LEVELS)
        },
        # Winkler's score: the width of the interval of level 0.9, plus 2 / (1 - 0.9) times the
        # distance of a loss beyond it; in percent of the loss
        "winkler": float(100 * (high - low + 20 * beyond).mean()),
        "half_width": float(100 * (high - low).mean() / 2),
    }


def choose_without(study: str, tasks: list[Task], scores: list[list[dict[str, float]]]) -> int:
    """Return the place of the candidate with the least quantile loss on all studies but one."""
    places = [place for place, task in enumerate(tasks) if task.study != study]
    kept_tasks = [tasks[place] for place in places]
    losses = [
        average(kept_tasks, [scores[place][i]["quantile_loss"] for place in places])
        for i in range(len(CANDIDATES))
    ]
    return int(np.argmin(losses))


def predict_usual(method: str, task: Task) -> Floats | None:
    """Return log losses by one of the usual methods; None where it has no answer."""
    table, n, d = task.table, task.held_out.params, task.held_out.tokens
    if method == "chinchilla":
        fit = law.fit_law(table, "chinchilla")
        return law.compute_log_loss(fit.theta[None, :], n, d)[0] if fit.identified else None
    if method == "power_in_compute":
        order = np.argsort(table.flops, kind="stable")
        best = np.minimum.accumulate(table.loss[order]) >= table.loss[order]
        if best.sum() < 3:
            best[:] = True
        line = np.polyfit(
            np.log(6 * table.params * table.tokens)[order][best], np.log(table.loss[order][best]), 1
        )
        return np.asarray(np.polyval(line, np.log(6 * n * d)))
    # Variable projection: for each pair of exponents the coefficients are a least-squares problem.
    best_fit: tuple[float, float, float, Floats] | None = None
    for alpha in np.linspace(0.05, 1.2, 40):
        for beta in np.linspace(0.05, 1.2, 40):
            terms = np.stack(
                [np.ones(table.num_runs), table.params**-alpha, table.tokens**-beta], axis=1
            )
            scale = terms.max(axis=0)
            weights = np.linalg.lstsq(terms / scale, table.loss, rcond=None)[0]
            squares = float(((terms / scale @ weights - table.loss) ** 2).sum())
            if weights.min() >= 0 and (best_fit is None or squares < best_fit[0]):
                best_fit = squares, float(alpha), float(beta), weights / scale
    if best_fit is None:
        return None
    _, alpha, beta, (floor, a, b) = best_fit
    return np.asarray(np.log(floor + a * n**-alpha + b * d**-beta))


def summarize(tasks: list[Task], scores: list[dict[str, float]]) -> dict[str, Any]:
    """Return the average of every score with its 90 % interval over studies."""
    rng = np.random.default_rng(0)
    studies = sorted({task.study for task in tasks})
    samples = [rng.choice(studies, size=len(studies)) for _ in range(NUM_RESAMPLES)]
    summary: dict[str, Any] = {"num_tasks": len(tasks), "num_studies": len(studies)}
    for name in scores[0]:
        kept = [place for place, task_scores in enumerate(scores) if np.isfinite(task_scores[name])]
        of_study = {
            study: average([tasks[i] for i in rows], [scores[i][name] for i in rows])
            for study in studies
            if (rows := [i for i in kept if tasks[i].study == study])
        }
        if not of_study:
            continue
        means = [
            np.mean([of_study[study] for study in sample if study in of_study] or [np.nan])
            for sample in samples
        ]
        low, high = np.nanquantile(means, [0.05, 0.95])
        summary[name] = {
            "value": float(np.mean(list(of_study.values()))),
            "interval": [float(low), float(high)],
            "num_tasks": len(kept),
        }
        if name in METHODS[1:]:  # forerun's error on the tasks that the method answers
            summary[name]["forerun_on_the_same"] = average(
                [tasks[i] for i in kept], [scores[i]["error"] for i in kept]
            )
    return summary


def report(tasks: list[Task], scores: list[dict[str, float]]) -> dict[str, Any]:
    """Return the summary of all tasks, by reach, by kind of ladder, and by study."""

    def summarize_part(keep: list[bool]) -> dict[str, Any]:
        places = [place for place, is_in in enumerate(keep) if is_in]
        return summarize([tasks[place] for place in places], [scores[place] for place in places])

    studies = sorted({task.study for task in tasks})
    return {
        "all": summarize(tasks, scores),
        "by_reach": {
            str(ratio): summarize_part([task.ratio == ratio for task in tasks]) for ratio in RATIOS
        },
        "by_kind": {kind: summarize_part([task.kind == kind for task in tasks]) for kind in KINDS},
        "by_study": {
            study: summarize_part([task.study == study for task in tasks]) for study in studies
        },
    }


def main() -> None:
    """Run all tasks, write the results and print the summary."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="Result file.")
    parser.add_argument("--processes", type=int, default=2, help="Processes to use.")
    options = parser.parse_args()
    tasks = list_tasks(load_families())
    start = time.time()
    with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
        scores = pool.map(run_task, tasks, chunksize=4)
    stated = CANDIDATES.index(PUBLIC)
    chosen = {
        study: choose_without(study, tasks, scores)
        for study in sorted({task.study for task in tasks})
    }
    results = {
        "stated": report(tasks, [task_scores[stated] for task_scores in scores]),
        "left_out": report(
            tasks,
            [
                task_scores[chosen[task.study]]
                for task, task_scores in zip(tasks, scores, strict=True)
            ],
        ),
        "chosen": {
            study: {"sd_e": CANDIDATES[i].sd[0], "error_sd": CANDIDATES[i].error_sd}
            for study, i in chosen.items()
        },
        "seconds": time.time() - start,
    }
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    for title in ("stated", "left_out"):
        summary = results[title]
        print(f"{title}:")
        for name, values in (
            ("all", summary["all"]),
            *summary["by_reach"].items(),
            *summary["by_kind"].items(),
        ):
            covered = " ".join(f"{values[f'covered_{level:g}']['value']:.2f}" for level in LEVELS)
            method_errors = " ".join(
                f"{method} {values[method]['value']:.2f}"
                for method in METHODS[1:]
                if method in values
            )
            print(
                f"{name:17} {values['num_tasks']:4} tasks, error {values['error']['value']:.2f} "
                f"{values['signed_error']['value']:+.2f} %, covered {covered}, {method_errors}"
            )


if __name__ == "__main__":
    main()
