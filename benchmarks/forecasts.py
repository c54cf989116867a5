"""How well forecasts of larger runs hold on studies that taught them nothing, by kind of ladder and by reach.

    make data                                                        # once: the public families
    python benchmarks/forecasts.py --json benchmarks/results/forecasts.json
    python benchmarks/forecasts.py --learn                           # the numbers of `forecast.population.PUBLIC`

A task takes a ladder of one family, fits the runs of up to 1/r of its largest budget (r = 3, 10, 30, 100), and
predicts the good runs of that budget: those within 2 % of its best loss. Ladders are the families as published, and,
of grids and isoFLOP families, the runs along one ratio of tokens to parameters and those of one duration.

**The split.** Studies are dealt into four folds. The population that predicts a study is learned from the studies of
the other folds alone, by a random search from `START` that never sees the study; what departs from `START` is
penalized, since 17 studies tell little of 18 numbers. The factor on the arms of its intervals (`Population.scale`) is
the one under which all other studies, each predicted by a population that had not seen it, are covered. `PUBLIC` is
learned by the same search from all studies. What was chosen once with all studies in view: the model itself (six
coordinates, departure, noise that grows off the frontier), and the ratios in `posterior.DEPARTURES`.

Averages are over tasks in a family, families in a study, and studies, which count alike; their 90 % intervals are
from a bootstrap over studies. Beside it: Chinchilla's law by Huber loss, the same law by least squares over a grid of
exponents (variable projection), and a power law in compute through the best runs.

Both take about 40 minutes of one core each.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from datasets import Family, families

from scaling_fits.forecast.path import find_path
from scaling_fits.forecast.population import PUBLIC, Population
from scaling_fits.forecast.posterior import fit_posterior
from scaling_fits.laws import law
from scaling_fits.laws.solver import Floats
from scaling_fits.laws.table import RunTable

Kind = Literal["grid", "isoflop", "fixed ratio", "fixed duration", "along a schedule"]
KINDS: tuple[Kind, ...] = ("grid", "isoflop", "fixed ratio", "fixed duration", "along a schedule")
RATIOS = (3, 10, 30, 100)
LEVELS = (0.5, 0.8, 0.9)
SHARES = (0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95)
SAME_BUDGET, GOOD_RUN = 1.25, 1.02
MIN_RUNS, MIN_SIZES, MAX_RUNS = 4, 3, 250
NUM_FOLDS = 4
NUM_DRAWS = 200
LEARNING_DRAWS, NUM_STEPS, TASKS_OF_A_KIND = 50, 180, 4
PENALTY = 0.01
"""Quantile loss, in percent, that a departure from `START` by three steps of one number must gain."""
SCALES = np.round(np.arange(0.7, 2.51, 0.05), 2)
NUM_RESAMPLES = 1000
METHODS = ("forerun", "chinchilla", "variable_projection", "power_in_compute")

NAMES = (
    "mean_e", "mean_w", "mean_slope", "mean_k", "log_sd_e", "log_sd_w", "log_sd_slope", "log_sd_k",
    "e_slope", "slope_k", "e_k", "slopes", "log_noise_sd", "log_length", "decay", "log_near", "log_error_sd",
    "reach_power",
)  # fmt: skip
START = np.array([0.2, 0.0, np.log(0.33), -0.3, np.log(0.7), np.log(0.7), np.log(0.35), np.log(0.4), 0.3, 0.3, 0.3, 0.3,
                  np.log(0.003), np.log(2.0), 0.0, np.log(0.03), np.log(0.004), 0.75])  # fmt: skip
STEP = np.array([0.4, 0.3, 0.2, 0.3, 0.3, 0.3, 0.3, 0.3, 0.25, 0.25, 0.25, 0.25, 0.4, 0.3, 0.4, 0.7, 0.5, 0.2])


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Task:
    """Runs to fit and runs to predict."""

    ladder: str
    study: str
    kind: Kind
    ratio: int
    table: RunTable
    held: RunTable


def to_population(values: Floats) -> Population:
    """Return the population that a point of the search stands for."""
    point = dict(zip(NAMES, values.tolist(), strict=True))
    sd_slope = float(np.exp(point["log_sd_slope"]))
    return Population(
        mean=(point["mean_e"], point["mean_w"], point["mean_slope"], point["mean_slope"], point["mean_k"]),
        sd=(float(np.exp(point["log_sd_e"])), float(np.exp(point["log_sd_w"])), sd_slope, sd_slope,
            float(np.exp(point["log_sd_k"]))),
        correlation_e_slope=float(np.tanh(point["e_slope"])),
        correlation_slope_k=float(np.tanh(point["slope_k"])),
        correlation_e_k=float(np.tanh(point["e_k"])),
        correlation_slopes=float(np.tanh(point["slopes"])),
        noise_sd=float(np.exp(point["log_noise_sd"])),
        length=float(np.exp(point["log_length"])),
        decay=point["decay"],
        near=float(np.exp(point["log_near"])),
        error_sd=float(np.exp(point["log_error_sd"])),
        reach_power=point["reach_power"],
    )  # fmt: skip


def find_kind(family: Family) -> Kind:
    """Return the kind of ladder that a family is."""
    table = family.table
    if "points along" in family.note:
        return "along a schedule"
    path = find_path(table)
    if path is not None:
        return "fixed duration" if path.direction[1] < 0.1 else "fixed ratio"
    order = np.sort(np.log(table.flops if table.budget is None else table.budget))
    groups = np.split(order, np.flatnonzero(np.diff(order) > 0.3) + 1)
    return "isoflop" if np.mean([len(group) >= 4 for group in groups for _ in group]) > 0.7 else "grid"


def list_ladders(family: Family) -> Iterator[tuple[str, Kind, RunTable]]:
    """Yield the family as published, and its runs along one ratio and of one duration where they are five sizes."""
    table, kind = family.table, find_kind(family)
    yield family.name, kind, table
    if kind not in ("grid", "isoflop"):
        return
    log_ratio, log_tokens = np.log(table.tokens / table.params), np.log(table.tokens)
    order = np.argsort(table.flops, kind="stable")
    is_best = np.minimum.accumulate(table.loss[order]) >= table.loss[order]
    is_near = np.abs(log_ratio - np.median(log_ratio[order][is_best])) < np.log(1.35)
    if len(np.unique(table.params[is_near])) >= 5:
        yield f"{family.name}/ratio", "fixed ratio", table.rows(is_near)
    durations = [np.abs(log_tokens - length) < 0.06 for length in np.unique(log_tokens.round(2))]
    longest = max(durations, key=lambda rows: len(np.unique(table.params[rows])))
    if len(np.unique(table.params[longest])) >= 5:
        yield f"{family.name}/duration", "fixed duration", table.rows(longest)


def list_tasks(found: list[Family]) -> list[Task]:
    """Return the tasks of all families."""
    tasks = []
    for family in found:
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
                if len(np.unique(table.params[below])) < MIN_SIZES or law.why_no_forecast(table.rows(below)):
                    continue
                sizes.add(num_runs)
                tasks.append(
                    Task(ladder=ladder, study=family.group, kind=kind, ratio=ratio, table=table.rows(below),
                         held=table.rows(good))
                )  # fmt: skip
    return tasks


def average(tasks: list[Task], values: list[float], by_kind: bool = False) -> float:
    """Return the mean over studies of the mean over families (or kinds) of the mean over tasks."""
    studies: dict[str, dict[str, list[float]]] = {}
    for task, value in zip(tasks, values, strict=True):
        studies.setdefault(task.study, {}).setdefault(task.kind if by_kind else task.ladder, []).append(value)
    return float(np.mean([np.mean([np.mean(each) for each in study.values()]) for study in studies.values()]))


def quantile_loss(task: Task, population: Population, num_draws: int) -> float:
    """Return the mean quantile loss over `SHARES`, in percent of the loss: an estimate of the CRPS."""
    posterior = fit_posterior(task.table, num_draws=num_draws, seed=0, population=population)
    y = np.log(task.held.loss)
    ends = posterior.quantiles(task.held.params, task.held.tokens, SHARES)
    losses = [
        np.where(y >= end, share * (y - end), (1 - share) * (end - y)) for share, end in zip(SHARES, ends, strict=True)
    ]
    return float(200 * np.mean(losses))


def choose_tasks(tasks: list[Task]) -> list[Task]:
    """Return at most `TASKS_OF_A_KIND` tasks of each kind of each study, so that no study takes all the time."""
    rng = np.random.default_rng(0)
    groups: dict[tuple[str, str], list[int]] = {}
    for place, task in enumerate(tasks):
        groups.setdefault((task.study, task.kind), []).append(place)
    chosen = [rng.choice(group, size=min(TASKS_OF_A_KIND, len(group)), replace=False) for group in groups.values()]
    return [tasks[place] for place in sorted(np.concatenate(chosen).tolist())]


def learn(tasks: list[Task], seed: int = 0) -> Floats:
    """Learn a population: a random search from `START` for the least quantile loss, studies counting alike."""
    chosen = choose_tasks(tasks)

    def score(values: Floats) -> float:
        population = to_population(values)
        penalty = PENALTY * float((((values - START) / (3 * STEP)) ** 2).sum())
        losses = [quantile_loss(task, population, LEARNING_DRAWS) for task in chosen]
        return penalty + average(chosen, losses, by_kind=True)

    rng = np.random.default_rng(seed)
    best, best_score, last = START, score(START), np.zeros(len(START))
    sizes = STEP.copy()
    for step in range(NUM_STEPS):
        moved = last != 0
        if moved.any():  # once more the way that was better
            values = best + last * rng.uniform(0.5, 1.5)
        else:
            moved = np.isin(np.arange(len(START)), rng.choice(len(START), size=rng.integers(1, 4), replace=False))
            values = best + moved * sizes * rng.standard_normal(len(START))
        new_score = score(values)
        is_better = new_score < best_score
        last = values - best if is_better else np.zeros(len(START))
        sizes[moved] *= 1.2 if is_better else 0.93
        if is_better:
            best, best_score = values, new_score
        print(f"step {step}: {best_score:.4f}", file=sys.stderr, flush=True)
    return best


def fold_of(study: str, studies: list[str]) -> int:
    """Return the fold that a study is dealt into."""
    return int(np.random.default_rng(1).permutation(len(studies))[studies.index(study)]) % NUM_FOLDS


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What became of one task's forecast."""

    scores: dict[str, float]
    """Errors in percent, of ours and of the usual methods."""
    log_loss: Floats
    """What the held-out runs measured (T,)."""
    ends: Floats
    """Quantiles (7, T): the median, and the ends of the intervals of `LEVELS`, at scale 1."""

    def at_scale(self, scale: float) -> dict[str, float]:
        """Return all scores with the arms of the intervals longer by a factor."""
        ends = list((self.ends[0] + scale * (self.ends - self.ends[0]))[1:])
        y, found = self.log_loss, dict(self.scores)
        for level, low, high in zip(LEVELS, ends[::2], ends[1::2], strict=True):
            found[f"covered_{level:g}"] = float(((y >= low) & (y <= high)).mean())
        beyond = np.maximum(ends[-2] - y, 0) + np.maximum(y - ends[-1], 0)
        found["winkler"] = float(100 * (ends[-1] - ends[-2] + 20 * beyond).mean())
        found["half_width"] = float(50 * (ends[-1] - ends[-2]).mean())
        return found


def choose_scale(tasks: list[Task], outcomes: list[Outcome]) -> float:
    """Return the factor on the arms of intervals under which studies, counting alike, are covered most nearly right."""

    def miss(scale: float) -> float:
        scores = [outcome.at_scale(scale) for outcome in outcomes]
        return sum(abs(average(tasks, [s[f"covered_{level:g}"] for s in scores]) - level) for level in LEVELS)

    return float(min(SCALES, key=miss))


def run_task(task: Task, population: Population) -> Outcome:
    """Fit and predict one task, by forerun and by the usual methods."""
    posterior = fit_posterior(task.table, num_draws=NUM_DRAWS, seed=0, population=population)
    y = np.log(task.held.loss)
    shares = tuple((1 + sign * level) / 2 for level in LEVELS for sign in (-1, 1))
    ends = posterior.quantiles(task.held.params, task.held.tokens, (0.5, *shares))
    error = 100 * np.expm1(ends[0] - y)
    scores = {"error": float(np.median(np.abs(error))), "signed_error": float(np.median(error))}
    for method in METHODS[1:]:
        point = predict_usual(method, task)
        scores[method] = float("nan") if point is None else float(np.median(np.abs(100 * np.expm1(point - y))))
    return Outcome(scores=scores, log_loss=y, ends=np.array(ends))


def predict_usual(method: str, task: Task) -> Floats | None:
    """Return log losses by one of the usual methods; None where it has no answer."""
    table, n, d = task.table, task.held.params, task.held.tokens
    if method == "chinchilla":
        fit = law.fit_law(table, "chinchilla")
        return law.log_loss(fit.theta[None, :], n, d)[0] if fit.identified else None
    if method == "power_in_compute":
        order = np.argsort(table.flops, kind="stable")
        best = np.minimum.accumulate(table.loss[order]) >= table.loss[order]
        if best.sum() < 3:
            best[:] = True
        line = np.polyfit(np.log(6 * table.params * table.tokens)[order][best], np.log(table.loss[order][best]), 1)
        return np.asarray(np.polyval(line, np.log(6 * n * d)))
    found: tuple[float, float, float, Floats] | None = None
    for alpha in np.linspace(0.05, 1.2, 40):
        for beta in np.linspace(0.05, 1.2, 40):
            terms = np.stack([np.ones(table.num_runs), table.params**-alpha, table.tokens**-beta], axis=1)
            scale = terms.max(axis=0)
            weights = np.linalg.lstsq(terms / scale, table.loss, rcond=None)[0]
            squares = float(((terms / scale @ weights - table.loss) ** 2).sum())
            if weights.min() >= 0 and (found is None or squares < found[0]):
                found = squares, float(alpha), float(beta), weights / scale
    if found is None:
        return None
    _, alpha, beta, (floor, a, b) = found
    return np.asarray(np.log(floor + a * n**-alpha + b * d**-beta))


def summarize(tasks: list[Task], scores: list[dict[str, float]]) -> dict[str, Any]:
    """Return the average of every score with its 90 % interval over studies."""
    rng = np.random.default_rng(0)
    studies = sorted({task.study for task in tasks})
    samples = [rng.choice(studies, size=len(studies)) for _ in range(NUM_RESAMPLES)]
    summary: dict[str, Any] = {"num_tasks": len(tasks), "num_studies": len(studies)}
    for name in scores[0]:
        kept = [place for place, score in enumerate(scores) if np.isfinite(score[name])]
        of_study = {
            study: average([tasks[i] for i in rows], [scores[i][name] for i in rows])
            for study in studies
            if (rows := [i for i in kept if tasks[i].study == study])
        }
        if not of_study:
            continue
        means = [np.mean([of_study[s] for s in sample if s in of_study] or [np.nan]) for sample in samples]
        low, high = np.nanquantile(means, [0.05, 0.95])
        summary[name] = {"value": float(np.mean(list(of_study.values()))), "interval": [float(low), float(high)],
                         "num_tasks": len(kept)}  # fmt: skip
        if name in METHODS[1:]:  # ours on the tasks that the method answers
            ours = average([tasks[i] for i in kept], [scores[i]["error"] for i in kept])
            summary[name]["forerun_on_the_same"] = ours
    return summary


def report(tasks: list[Task], scores: list[dict[str, float]]) -> dict[str, Any]:
    """Return the summary of all tasks, by reach, by kind of ladder, and by study."""

    def part(keep: list[bool]) -> dict[str, Any]:
        places = [place for place, is_in in enumerate(keep) if is_in]
        return summarize([tasks[place] for place in places], [scores[place] for place in places])

    studies = sorted({task.study for task in tasks})
    return {
        "all": summarize(tasks, scores),
        "by_reach": {str(ratio): part([task.ratio == ratio for task in tasks]) for ratio in RATIOS},
        "by_kind": {kind: part([task.kind == kind for task in tasks]) for kind in KINDS},
        "by_study": {study: part([task.study == study for task in tasks]) for study in studies},
    }


def scale_without(study: str, tasks: list[Task], outcomes: list[Outcome]) -> float:
    """Return the scale of intervals that the other studies ask for."""
    places = [place for place, task in enumerate(tasks) if task.study != study]
    return choose_scale([tasks[place] for place in places], [outcomes[place] for place in places])


def run_fold(work: tuple[int, list[Task], list[str]]) -> tuple[Floats, list[tuple[int, Outcome]]]:
    """Learn without the studies of one fold, and score the tasks of that fold."""
    fold, tasks, studies = work
    os.environ["OMP_NUM_THREADS"] = "1"
    values = learn([task for task in tasks if fold_of(task.study, studies) != fold])
    population = to_population(values)
    return values, [
        (place, run_task(task, population)) for place, task in enumerate(tasks) if fold_of(task.study, studies) == fold
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description="Leave-studies-out forecasts of public families.")
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--learn", action="store_true", help="print the population of all studies")
    parser.add_argument("--public", action="store_true", help="score PUBLIC itself: in-sample, a minute")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    tasks = list_tasks(families())
    studies = sorted({task.study for task in tasks})
    start = time.time()
    if options.learn:
        print(to_population(learn(tasks)))
        return
    results: dict[str, Any]
    if options.public:
        outcomes = [run_task(task, PUBLIC) for task in tasks]
        results = {"split": "none: in-sample", **report(tasks, [outcome.at_scale(1.0) for outcome in outcomes])}
    else:
        work = [(fold, tasks, studies) for fold in range(NUM_FOLDS)]
        with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
            folds = pool.map(run_fold, work, chunksize=1)
        by_place = dict(pair for _, pairs in folds for pair in pairs)
        outcomes = [by_place[place] for place in range(len(tasks))]
        scales = {study: scale_without(study, tasks, outcomes) for study in studies}
        results = {
            "split": {study: fold_of(study, studies) for study in studies},
            "populations": [dict(zip(NAMES, values.tolist(), strict=True)) for values, _ in folds],
            "scales": scales,
            "scale_of_all": choose_scale(tasks, outcomes),
            **report(tasks, [o.at_scale(scales[task.study]) for task, o in zip(tasks, outcomes, strict=True)]),
        }
    results["seconds"] = time.time() - start
    text = json.dumps(results, indent=1)
    if options.json:
        options.json.write_text(text + "\n")
    for name, values in (("all", results["all"]), *results["by_reach"].items(), *results["by_kind"].items()):
        covered = " ".join(f"{values[f'covered_{level:g}']['value']:.2f}" for level in LEVELS)
        others = " ".join(f"{method} {values[method]['value']:.2f}" for method in METHODS[1:] if method in values)
        print(f"{name:17} {values['num_tasks']:4} tasks, error {values['error']['value']:.2f} "
              f"{values['signed_error']['value']:+.2f} %, covered {covered}, {others}")  # fmt: skip


if __name__ == "__main__":
    main()
