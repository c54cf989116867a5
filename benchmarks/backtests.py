"""How well fits predict larger runs: error, coverage and Winkler score on public families and on planted ladders.

    make data                                                   # once: families beyond those beside the checkout
    python benchmarks/backtests.py --json benchmarks/results/backtests.json

A task fits all runs of a family that cost up to max / r (r = 3, 10, 30) and predicts the good runs of the largest
budget: those within 2 % of its best loss. Tasks start from the largest budget and again from the next one below it.
Per family: median over tasks of the median relative error; share of runs in their 90 % interval; Winkler score
(alpha 0.1) of 100 log loss; then means over families, and over groups, since families of one study share runs.
Beside `auto`: what most people do, one law and a bootstrap of its parameters.

Calibration of `auto`: coverage of intervals of 50, 80 and 90 %, and the PIT, the share of the predicted distribution
below each run, in tenths (a tenth of the runs in each would be right). And leave-one-study-out: the factor on both arms
that would make intervals cover right in all studies but one, and what intervals of the one cover with it.

Planted ladders: a law with noise is the truth, and a run at 100 times the largest FLOPs is predicted. The oracle knows
the form, the parameters up to what the runs say (linearised), and the noise; widths are over the oracle's.
Two processes take about 15 minutes; `--quick` takes the largest budget and few ladders.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import os
import platform
import sys
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from datasets import Family, families

from scaling_fits.forecast import cloud
from scaling_fits.forecast.uncertainty import FittedRuns, fit_runs, predict
from scaling_fits.laws import law
from scaling_fits.laws.forms import Form
from scaling_fits.laws.solver import Floats
from scaling_fits.laws.table import RunTable, from_columns

RATIOS = (3, 10, 30)
LEVEL = 0.9
NUM_DRAWS = 200
LEAST_RUNS = 7
SAME_BUDGET, NEXT_BUDGET, GOOD_RUN = 1.25, 1.5, 1.02
PLANTED_RATIO = 100
NOMINAL = (0.5, 0.8, 0.9)
TENTHS = tuple(i / 10 for i in range(1, 10))
FACTORS = np.geomspace(0.25, 8.0, 201)
METHODS: tuple[Literal["auto", "chinchilla", "coupled"], ...] = ("auto", "chinchilla", "coupled")
Ends = tuple[Floats, Floats, Floats]
"""Centre and ends of the interval, logs of losses."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """One method on one task."""

    family: str
    group: str
    ratio: int
    budget: int
    """0: from the largest budget; 1: from the next."""
    method: str
    num_fitted: int
    num_predicted: int
    error_percent: float
    bias_percent: float
    coverage: float
    winkler: float
    width_percent: float
    seconds: float
    pit: tuple[float, ...] = ()
    """Of `auto`: tenths of the runs by their place in the predicted distribution."""
    arms: tuple[float, ...] = ()
    """Of `auto`: of each run, by what factor the 90 % interval's arm must be multiplied to reach it."""
    covered: tuple[float, ...] = ()
    """Of `auto`: shares of the runs in the intervals of `NOMINAL`."""


def auto(table: RunTable, params: Floats, tokens: Floats) -> Ends:
    """What `forerun fit` and `predict` say."""
    return foretold(fit_runs(table, bootstrap=NUM_DRAWS, level=LEVEL), params, tokens)


def foretold(fitted: FittedRuns, params: Floats, tokens: Floats) -> Ends:
    """What a fit says of new runs."""
    said = [predict(fitted, float(n), float(d)) for n, d in zip(params, tokens, strict=True)]
    columns = np.log([(each.loss_nats, each.low or np.nan, each.high or np.nan) for each in said])
    return columns[:, 0], columns[:, 1], columns[:, 2]


def calibration(fitted: FittedRuns, held: RunTable) -> dict[str, Any]:
    """Where the held-out runs lie in what the fit says of them."""
    y = np.log(held.loss)

    def at(level: float) -> Ends:
        return foretold(dataclasses.replace(fitted, level=level), held.params, held.tokens)

    centre, low, high = at(LEVEL)
    inside = [at(level)[1:] for level in NOMINAL]
    cuts = [centre if tenth == 0.5 else at(abs(2 * tenth - 1))[1 if tenth < 0.5 else 2] for tenth in TENTHS]
    place = (y[None, :] > np.array(cuts)).sum(axis=0)
    arm = np.where(y > centre, high - centre, centre - low)
    return {
        "pit": tuple((np.bincount(place, minlength=10) / len(y)).tolist()),
        "arms": tuple((np.abs(y - centre) / np.maximum(arm, 1e-9)).tolist()),
        "covered": tuple(float(((y >= least) & (y <= most)).mean()) for least, most in inside),
    }


def usual(form: Form) -> Callable[[RunTable, Floats, Floats], Ends]:
    """One law, and percentiles of a bootstrap of its parameters: the field's usual interval."""

    def method(table: RunTable, params: Floats, tokens: Floats) -> Ends:
        fit = cloud.with_draws(table, law.fit_law(table, form), NUM_DRAWS, 0)
        fit_MR = law.log_loss(np.concatenate([fit.theta[None, :], fit.draws]), params, tokens)
        low, high = np.quantile(fit_MR[1:], [(1 - LEVEL) / 2, (1 + LEVEL) / 2], axis=0)
        return fit_MR[0], low, high

    return method


def tasks(table: RunTable, budgets: int) -> Iterable[tuple[int, int, RunTable, RunTable]]:
    """(r, budget, runs to fit, runs to predict) of one family."""
    largest = float(table.flops.max())
    for budget in range(budgets):
        top = (table.flops <= largest) & (table.flops > largest / SAME_BUDGET)
        good = top & (table.loss <= GOOD_RUN * table.loss[top].min())
        for ratio in RATIOS:
            fitted = table.flops <= largest / ratio * 1.0001
            if fitted.sum() >= LEAST_RUNS and len(np.unique(table.params[fitted])) > 1:
                yield ratio, budget, table.rows(fitted), table.rows(good)
        rest = table.flops[table.flops < largest / NEXT_BUDGET]
        if not rest.size:
            return
        largest = float(rest.max())


def score_family(work: tuple[Family, int]) -> list[Score]:
    """All methods on all tasks of one family."""
    family, budgets = work
    scores = []
    for ratio, budget, table, held in tasks(family.table, budgets):
        if not law.fit_law(table, "coupled").identified:
            continue
        for name in METHODS:
            start = time.process_time()
            more: dict[str, Any] = {}
            if name == "auto":
                fitted = fit_runs(table, bootstrap=NUM_DRAWS, level=LEVEL)
                centre, low, high = foretold(fitted, held.params, held.tokens)
            else:
                centre, low, high = usual(name)(table, held.params, held.tokens)
            seconds = time.process_time() - start
            if name == "auto":
                more = calibration(fitted, held)
            scores.append(
                Score(
                    family=family.name, group=family.group, ratio=ratio, budget=budget, method=name,
                    num_fitted=table.num_runs, num_predicted=held.num_runs, seconds=seconds,
                    **_marks(np.log(held.loss), centre, low, high), **more,
                )
            )  # fmt: skip
    return scores


def _marks(y: Floats, centre: Floats, low: Floats, high: Floats) -> dict[str, float]:
    beyond = np.maximum(low - y, 0) + np.maximum(y - high, 0)
    return {
        "error_percent": float(100 * np.median(np.abs(np.expm1(centre - y)))),
        "bias_percent": float(100 * np.median(np.expm1(centre - y))),
        "coverage": float(((y >= low) & (y <= high)).mean()),
        "winkler": float(100 * (high - low + 2 / (1 - LEVEL) * beyond).mean()),
        "width_percent": float(100 * (high - low).mean()),
    }


MARKS = ("error_percent", "bias_percent", "coverage", "winkler", "width_percent")


def by_family(scores: list[Score], method: str) -> dict[str, dict[str, float]]:
    """Marks of each family: medians over tasks of error and bias, means of the others."""
    found: dict[str, dict[str, float]] = {}
    for name in dict.fromkeys(score.family for score in scores):
        own = [score for score in scores if score.family == name and score.method == method]
        middle = {mark: np.median if mark in MARKS[:2] else np.mean for mark in MARKS}
        found[name] = {mark: float(middle[mark]([getattr(score, mark) for score in own])) for mark in MARKS}
        found[name]["num_tasks"] = len(own)
    return found


def means(scores: list[Score], method: str) -> dict[str, dict[str, float]]:
    """Means over families, over groups, and over tasks at each r."""
    families_ = by_family(scores, method)
    groups: dict[str, list[dict[str, float]]] = {}
    for score in scores:
        if families_[score.family] not in groups.setdefault(score.group, []):
            groups[score.group].append(families_[score.family])

    def mean(rows: list[dict[str, float]]) -> dict[str, float]:
        return {mark: float(np.mean([row[mark] for row in rows])) for mark in MARKS}

    found = {"families": mean(list(families_.values())), "groups": mean([mean(rows) for rows in groups.values()])}
    for ratio in RATIOS:
        own = [asdict(score) for score in scores if score.method == method and score.ratio == ratio]
        found[f"r = {ratio}"] = mean(own)
    return found


def calibrated(scores: list[Score]) -> dict[str, Any]:
    """Calibration of `auto`: means over tasks in a family, families in a study, and studies, which count alike."""
    own = [score for score in scores if score.method == "auto"]
    studies = sorted({score.group for score in own})

    def over(value: Callable[[Score], Floats], names: list[str]) -> Floats:
        rows = []
        for study in names:
            inside = sorted({score.family for score in own if score.group == study})
            rows.append(
                np.mean([np.mean([value(s) for s in own if s.family == name], axis=0) for name in inside], axis=0)
            )
        result: Floats = np.mean(rows, axis=0)
        return result

    def at_factors(score: Score) -> Floats:
        return (np.array(score.arms)[:, None] <= FACTORS).mean(axis=0)

    def row(study: str) -> dict[str, Any]:
        others = over(at_factors, [name for name in studies if name != study])
        place = min(int((others < LEVEL).sum()), len(FACTORS) - 1)
        return {
            "covered": over(lambda score: np.array(score.covered), [study]).tolist(),
            "factor_of_the_others": float(FACTORS[place]),
            "covered_with_it": float(over(at_factors, [study])[place]),
        }

    rows = {study: row(study) for study in studies}
    return {
        "nominal": list(NOMINAL),
        "covered": over(lambda score: np.array(score.covered), studies).tolist(),
        "pit": over(lambda score: np.array(score.pit), studies).tolist(),
        "leave_one_study_out": rows,
        "leave_one_study_out_covered": float(np.mean([row["covered_with_it"] for row in rows.values()])),
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class Planted:
    """Ladders of one truth and size."""

    form: str
    num_runs: int
    noise: float
    num_ladders: int
    coverage: float
    """Of noisy new runs, 90 % intervals."""
    width_over_oracle: float
    """Median over ladders."""
    error_percent: float
    """Median of the absolute error of the prediction."""


def planted(work: tuple[str, int, float, int]) -> Planted:
    """Ladders drawn from a law: how `auto` does at 100 times their largest FLOPs."""
    form, num_runs, noise, num_ladders = work
    covered, widths, errors = [], [], []
    for seed in range(num_ladders):
        rng = np.random.default_rng([seed, num_runs, int(noise * 1e5), form == "coupled"])
        theta, (params, tokens) = _truth(rng, form), _design(num_runs)
        y = law.log_loss(theta[None], params, tokens)[0] + noise * rng.standard_normal(num_runs)
        sizes = np.geomspace(1e6, 1e14, 4000)
        flops = PLANTED_RATIO * float((6 * params * tokens).max())
        best = sizes[[int(law.log_loss(theta[None], sizes, flops / 6 / sizes)[0].argmin())]]
        target = (best, flops / 6 / best)
        centre, low, high = auto(from_columns(params, tokens, np.exp(y)), *target)
        truth = law.log_loss(theta[None], *target)[0]
        new = truth + noise * rng.standard_normal(500)
        covered.append(float(((new >= low) & (new <= high)).mean()))
        widths.append(float((high - low)[0]) / _oracle_width(theta, form, params, tokens, target, noise))
        errors.append(float(100 * np.abs(np.expm1(centre - truth))[0]))
    return Planted(
        form=form, num_runs=num_runs, noise=noise, num_ladders=num_ladders, coverage=float(np.mean(covered)),
        width_over_oracle=float(np.median(widths)), error_percent=float(np.median(errors)),
    )  # fmt: skip


def _truth(rng: np.random.Generator, form: str) -> Floats:
    """A law: E 1.3 to 2.2 nats, 0.5 to 1.2 above it at 100M parameters and 2B tokens, exponents 0.25 to 0.45."""
    floor, (alpha, beta), share = rng.uniform(1.3, 2.2), rng.uniform(0.25, 0.45, size=2), rng.uniform(0.35, 0.65)
    power = rng.uniform(0.6, 1.4) if form == "coupled" else 1.0
    inner = rng.uniform(0.5, 1.2) ** (1 / power)
    a = np.log(share * inner) + alpha / power * np.log(1e8)
    b = np.log((1 - share) * inner) + beta / power * np.log(2e9)
    return np.array([np.log(floor), a, b, alpha / power, beta / power, power])


def _design(num_runs: int) -> tuple[Floats, Floats]:
    """IsoFLOP budgets over three decades, up to eight sizes each from a quarter to four times 20 tokens a parameter."""
    num_budgets = max(4, num_runs // 8)
    budgets = np.repeat(np.geomspace(3e16, 3e19, num_budgets), -(-num_runs // num_budgets))[-num_runs:]
    spread = np.resize(np.geomspace(0.25, 4, -(-num_runs // num_budgets)), num_runs)
    params = np.sqrt(budgets / 120) * spread
    return params, budgets / 6 / params


def _oracle_width(
    theta: Floats, form: str, params: Floats, tokens: Floats, target: tuple[Floats, Floats], noise: float
) -> float:
    free = range(6 if form == "coupled" else 5)
    steps = 1e-5 * np.eye(6)[list(free)]

    def tangents(n: Floats, d: Floats) -> Floats:
        return (law.log_loss(theta + steps, n, d) - law.log_loss(theta - steps, n, d)).T / 2e-5

    at_runs, at_target = tangents(params, tokens), tangents(*target)
    covariance = np.linalg.pinv(at_runs.T @ at_runs) * noise**2
    return float(2 * 1.6449 * np.sqrt((at_target @ covariance @ at_target.T)[0, 0] + noise**2))


def _table(name: str, rows: dict[str, dict[str, float]]) -> None:
    print(f"\n{name:48s} {'error %':>8s} {'bias %':>8s} {'covered':>8s} {'Winkler':>8s} {'width %':>8s}")
    for row, marks in rows.items():
        print(f"{row:48s} " + " ".join(f"{marks[mark]:8.2f}" for mark in MARKS))


def main() -> None:
    """Run all, print, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true", help="the largest budget only, few ladders")
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    found = sorted(families(), key=lambda family: -family.table.num_runs)
    if not found:
        sys.exit("no public data here: `make data` fetches it")
    ladders = 4 if options.quick else 20
    worlds = [(form, n, sd, ladders) for form in METHODS[1:] for n in (20, 60, 240) for sd in (0.002, 0.006)]
    with multiprocessing.Pool(options.jobs) as pool:
        budgets = 1 if options.quick else 2
        scores = [
            s for rows in pool.imap(score_family, [(family, budgets) for family in found], chunksize=1) for s in rows
        ]
        ladders_ = pool.map(planted, worlds, chunksize=1)
    body: dict[str, Any] = {
        "machine": {"platform": platform.platform(), "python": platform.python_version(), "cpus": os.cpu_count()},
        "level": LEVEL, "bootstrap": NUM_DRAWS, "num_families": len(found), "num_tasks": len(scores) // len(METHODS),
        "largest_budget_only": {name: means([s for s in scores if s.budget == 0], name) for name in METHODS},
        "means": {name: means(scores, name) for name in METHODS},
        "families": {name: by_family(scores, name) for name in METHODS},
        "calibration": calibrated(scores),
        "planted": [asdict(row) for row in ladders_],
    }  # fmt: skip
    for name in METHODS:
        _table(f"{name}: families", body["families"][name] if name == "auto" else {})
        _table(f"{name}: {len(found)} families, {body['num_tasks']} tasks", body["means"][name])
    found_ = body["calibration"]
    print(f"\ncovered at {NOMINAL}: {np.round(found_['covered'], 2)}; PIT in tenths: {np.round(found_['pit'], 2)}")
    print(f"{'leave one study out':32s} {'50 %':>6s} {'80 %':>6s} {'90 %':>6s} {'factor':>7s} {'covered':>8s}")
    for study, row in found_["leave_one_study_out"].items():
        shares = " ".join(f"{share:6.2f}" for share in row["covered"])
        print(f"{study:32s} {shares} {row['factor_of_the_others']:7.2f} {row['covered_with_it']:8.2f}")
    print(f"{'mean over studies':61s} {found_['leave_one_study_out_covered']:8.2f}")
    print(f"\n{'planted, 100x':32s} {'covered':>8s} {'width / oracle':>15s} {'error %':>8s}")
    for cell in ladders_:
        name = f"{cell.form}, {cell.num_runs} runs, noise {cell.noise:g}"
        print(f"{name:32s} {cell.coverage:8.2f} {cell.width_over_oracle:15.2f} {cell.error_percent:8.2f}")
    if options.json:
        options.json.write_text(json.dumps(body, indent=1) + "\n")


if __name__ == "__main__":
    main()
