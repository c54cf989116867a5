"""Comparison of two reports, part by part: the content of `compare.json`.

The comparison lists the plan keys that differ, the differences of results, and the results that
cannot be compared. The first study is `a`, the second `b`; every difference is b minus a.

A difference of two estimates has an interval of its own. The squares of the distances from each
estimate to the end of its interval are added (MOVER, Zou and Donner 2008, doi:10.1002/sim.3095).
This rule holds for independent estimates. Studies with the same seeds and data share some of their
noise, so their interval is too wide.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from forerun._launcher.report.page.comparison import (
    Comparison,
    Difference,
    EstimateSides,
    ForecastSides,
    KeySides,
    Limit,
    OptimumSides,
    Sides,
    TestSides,
)
from forerun._launcher.report.views.finding import Interval, Number
from forerun._launcher.report.views.fit_findings import Prediction
from forerun._launcher.report.views.report_model import Report, to_report
from forerun._launcher.report.views.transfer import (
    format_axis_size,
    format_hyperparameter,
    format_test,
)
from forerun._launcher.report.views.transfer_findings import Optimum, Verdict
from forerun._launcher.report.views.wording import to_words
from forerun._proxies.core import canon
from forerun._proxies.core.errors import InputError
from forerun._proxies.core.notation import format_interval, format_number
from forerun._proxies.core.plain_files import read_plain
from forerun._scaling_fits.forecast.conclusive import split_warnings
from forerun._transfer.question import Hyperparameter, from_log2

NOT_IN_PLAN = "(not in the plan)"
"""Value shown for a key that one study's plan lacks because it has the default."""
_OPTIMUM_KEYS = {"status", "value", "log2_value", "interval_log2", "loss_nats", "num_runs"}
_CHOICE_KEYS = ("params", "params_non_embedding", "tokens", "num_steps", "budget_flops")


class NotAReportError(InputError):
    """One or both inputs are neither a study nor a report; `problems` has a sentence for each."""

    def __init__(self, problems: list[str]) -> None:
        self.problems = problems
        super().__init__("\n".join(problems))


# ---- Differences ----


def subtract_estimates(
    a: tuple[Number, Interval | None] | None,
    b: tuple[Number, Interval | None] | None,
    *,
    same_level: bool,
) -> Difference:
    """Return the second estimate minus the first, its interval, and whether it excludes zero.

    Args:
        a: First estimate and its interval; None if there is none.
        b: Second estimate and its interval.
        same_level: Whether both intervals have the same level; if not, the difference has no
            interval.
    """
    if a is None or b is None:
        return Difference(value=None, interval=None, apart=None)
    (first, first_ends), (second, second_ends) = a, b
    if first_ends is None or second_ends is None or not same_level:
        return Difference(value=second - first, interval=None, apart=None)
    # An interval from resampled fits may exclude its estimate; the distance to that end is then 0.
    low = second - first
    low -= math.hypot(max(second - second_ends[0], 0.0), max(first_ends[1] - first, 0.0))
    high = second - first
    high += math.hypot(max(second_ends[1] - second, 0.0), max(first - first_ends[0], 0.0))
    return Difference(value=second - first, interval=(low, high), apart=low > 0 or high < 0)


def flatten_plan(value: Any, path: str = "") -> dict[str, Any]:
    """Return every value of a plan by its dotted key; a list is one value."""
    if isinstance(value, dict) and (value or not path):
        leaves: dict[str, Any] = {}
        for key, child in value.items():
            leaves |= flatten_plan(child, f"{path}.{key}" if path else str(key))
        return leaves
    return {path: value}


def compare_plans(a: Report, b: Report) -> list[KeySides]:
    """Return the keys of the plans that differ, with both values."""
    first_leaves, second_leaves = flatten_plan(a.question), flatten_plan(b.question)
    rows = [
        KeySides(
            key=key, a=first_leaves.get(key, NOT_IN_PLAN), b=second_leaves.get(key, NOT_IN_PLAN)
        )
        for key in sorted(first_leaves.keys() | second_leaves.keys())
    ]
    return [row for row in rows if row.a != row.b]


def compare_tests(a: Report, b: Report, *, values: bool, losses: bool) -> list[TestSides]:
    """Compare every test that either study made: outcome, regret, drift, and optima by size.

    Args:
        a: First report.
        b: Second report.
        values: Whether optima may be subtracted.
        losses: Whether losses in nats may be subtracted.
    """
    first_verdicts, second_verdicts = (
        {(test.axis, test.hyperparameter): test.verdict for test in report.transfer.tests}
        if report.transfer
        else {}
        for report in (a, b)
    )
    rows = []
    for test in first_verdicts | second_verdicts:
        axis, name = test
        first, second = first_verdicts.get(test), second_verdicts.get(test)
        level = _pair_values(first, second, "level")
        regrets = _pair_values(first, second, "regret_nats")
        drifts = _pair_values(first, second, "drift_octaves_per_doubling")
        rows.append(
            TestSides(
                axis=axis,
                hyperparameter=name,
                outcome=_pair_values(first, second, "outcome"),
                target_size=_pair_values(first, second, "target_size"),
                level=level,
                regret_nats=_compare_estimates(regrets, level, comparable=losses),
                drift_octaves_per_doubling=_compare_estimates(drifts, level, comparable=True),
                optima=_compare_optima(first, second, name, comparable=values),
            )
        )
    return rows


def _pair_values(a: Verdict | None, b: Verdict | None, key: str) -> Sides:
    return Sides(a=getattr(a, key, None), b=getattr(b, key, None))


def _compare_estimates(sides: Sides, level: Sides, *, comparable: bool) -> EstimateSides:
    """Return both sides' estimates and their difference; None if they are not comparable."""
    first, second = (
        None if estimate is None or estimate.value is None else (estimate.value, estimate.interval)
        for estimate in (sides.a, sides.b)
    )
    return EstimateSides(
        a=sides.a,
        b=sides.b,
        difference=subtract_estimates(first, second, same_level=level.a == level.b)
        if comparable
        else None,
    )


def _compare_optima(
    a: Verdict | None, b: Verdict | None, name: Hyperparameter, *, comparable: bool
) -> list[OptimumSides]:
    """Return both sides' optima at every size that either study ran."""
    first_optima, second_optima = (
        {optimum.size: optimum for optimum in verdict.optima} if verdict else {}
        for verdict in (a, b)
    )
    same_level = a is not None and b is not None and a.level == b.level
    rows = []
    for size in sorted(first_optima.keys() | second_optima.keys()):
        pair = (first_optima.get(size), second_optima.get(size))
        first, second = (
            None
            if optimum is None or optimum.log2_value is None
            else (optimum.log2_value, optimum.interval_log2)
            for optimum in pair
        )
        rows.append(
            OptimumSides(
                size=size,
                a=_describe_optimum(pair[0], name),
                b=_describe_optimum(pair[1], name),
                difference_octaves=subtract_estimates(first, second, same_level=same_level)
                if comparable
                else None,
            )
        )
    return rows


def _describe_optimum(optimum: Optimum | None, name: Hyperparameter) -> dict[str, Any] | None:
    """Return the compared keys of an optimum, with its interval in octaves and in values."""
    if optimum is None:
        return None
    ends = optimum.interval_log2
    interval = None if ends is None else sorted(from_log2(name, end) for end in ends)
    return {**optimum.model_dump(include=_OPTIMUM_KEYS), "interval": interval}


def compare_choices(a: Report, b: Report) -> list[KeySides]:
    """Return the properties of the main runs that the studies chose, one row per property."""
    first, second = (
        {key: getattr(report.choice, key) for key in _CHOICE_KEYS}
        | dict(sorted(report.choice.shape.to_json().items()))
        if report.choice
        else {}
        for report in (a, b)
    )
    rows = [KeySides(key=key, a=first.get(key), b=second.get(key)) for key in first | second]
    return [row for row in rows if row.a is not None or row.b is not None]


def compare_forecasts(a: Report, b: Report, *, losses: bool) -> ForecastSides | None:
    """Return the predicted losses of both main runs, and their difference."""
    keys = set(Prediction.model_fields)
    first, second = (
        Prediction(**report.choice.prediction.model_dump(include=keys)) if report.choice else None
        for report in (a, b)
    )
    if first is None and second is None:
        return None
    same_level = first is not None and second is not None and first.level == second.level
    ends = ((side.loss, side.interval) if side else None for side in (first, second))
    return ForecastSides(
        a=first,
        b=second,
        difference_nats=subtract_estimates(*ends, same_level=same_level) if losses else None,
    )


# ---- What can be compared ----

_REASONS_LOSSES_DIFFER = {
    "tokenizer": "the tokenizers differ, so losses per token are not on one scale",
    "vocab_size": "the vocabularies differ, so losses per token are not on one scale",
    "data_id": "the data differs, so the losses were measured on different texts",
}
"""Reasons why losses cannot be compared, by the key of the corpus that differs. The first that
differs is given: another tokenizer or vocabulary changes `data_id` too."""
_MEANING_DIFFERS = "differs, so one value at the base means different values in the model"
_VALUE_LIMITS = {
    "parametrization": ("no", f"the parametrization {_MEANING_DIFFERS}"),
    "base_width": ("no", f"the base width {_MEANING_DIFFERS}"),
    "batch_tokens": ("with_care", "the batch at the base differs, and optima shift with it"),
    "num_steps": ("with_care", "the number of steps at the base differs, and optima shift with it"),
}
"""Limits on comparing hyperparameters, by the key of `proxy` that differs. Learning rates are set
at the base, under one parametrization."""


_STRICTEST_FIRST = ("no", "with_care", "yes")


def judge_comparability(a: Report, b: Report) -> dict[str, Limit]:
    """Return whether losses, values and forecasts can be compared, with reasons."""
    changed_keys = [
        key for key in _REASONS_LOSSES_DIFFER if getattr(a.corpus, key) != getattr(b.corpus, key)
    ]
    lengths = [report.question.get("model", {}).get("seq_len") for report in (a, b)]
    losses = [("no", _REASONS_LOSSES_DIFFER[changed_keys[0]])] if "data_id" in changed_keys else []
    if lengths[0] != lengths[1]:
        length = "the sequence lengths differ, and more context before a token lowers its loss"
        losses.append(("with_care", length))
    forecasts = list(losses)
    if _find_budget(a) != _find_budget(b):
        budget = "the budgets differ, so the forecasts are for main runs with different compute"
        forecasts.append(("with_care", budget))
    first, second = (report.question["proxy"] for report in (a, b))
    values = [limit for key, limit in _VALUE_LIMITS.items() if first.get(key) != second.get(key)]
    if "data_id" in changed_keys:
        values.append(("with_care", "the data differs, and optima may shift with it"))
    limits_by_quantity = {"losses": losses, "values": values, "forecasts": forecasts}
    return {name: _combine_limits(limits) for name, limits in limits_by_quantity.items()}


def _combine_limits(limits: list[tuple[str, str]]) -> Limit:
    """Return the strictest of some limits, with its reasons; `yes` if there is no limit."""
    worst = min((limit for limit, _ in limits), key=_STRICTEST_FIRST.index, default="yes")
    reasons = [reason for limit, reason in limits if limit == worst]
    return Limit.model_validate({"comparable": worst, "reasons": reasons})


def _find_budget(report: Report) -> float | None:
    """Return the main run's FLOPs as chosen, or as the plan gives them."""
    if report.choice:
        return report.choice.budget_flops
    budget: float | None = report.question.get("target", {}).get("budget_flops")
    return budget


# ---- The comparison ----


def read_reports(first: Path, second: Path) -> tuple[Report, Report]:
    """Read two reports, from files or from the folders of studies.

    Args:
        first: Path of a `report.json`, or a study's folder, for side `a`.
        second: The same for side `b`.

    Raises:
        NotAReportError: One path, or both, are not reports; every problem is named.
    """
    reports: list[Report] = []
    problems = []
    for path in (first, second):
        try:
            reports.append(_read_report(path / "report.json" if path.is_dir() else path))
        except (OSError, ValueError) as error:
            problem = error.strerror if isinstance(error, OSError) else error
            problems.append(
                f"{path}: {problem}; name a study with a report (`forerun report` writes it) or a "
                "report.json"
            )
    if problems:
        raise NotAReportError(problems)
    return reports[0], reports[1]


def _read_report(path: Path) -> Report:
    body = canon.parse(read_plain(path))
    try:
        if isinstance(body, dict) and body.get("schema_version") == 1:
            return to_report(body)
    except ValueError:
        pass  # pydantic's list of problems helps nobody who named a wrong file
    raise ValueError("not a report of this version")


def compare_reports(a: Report, b: Report, names: tuple[str, str]) -> Comparison:
    """Compare two reports.

    Args:
        a: First report.
        b: Second report.
        names: Names of the two studies.
    """
    limits = judge_comparability(a, b)
    values = limits["values"].comparable != "no"
    losses = limits["losses"].comparable != "no"
    comparison = Comparison(
        schema_version=1,
        studies={"a": _describe_study(a, names[0]), "b": _describe_study(b, names[1])},
        same_study=a.question == b.question and a.ledger_head == b.ledger_head,
        comparable=limits,
        question=compare_plans(a, b),
        tests=compare_tests(a, b, values=values, losses=losses),
        choice=compare_choices(a, b),
        forecast=compare_forecasts(a, b, losses=losses),
        summary=[],
    )
    summary = [
        f"{sentence[0].upper()}{sentence[1:]}." for sentence in describe_differences(comparison)
    ]
    return comparison.model_copy(update={"summary": summary})


def _describe_study(report: Report, name: str) -> dict[str, Any]:
    proxy = report.question["proxy"]
    return {
        "name": name,
        "digest": report.digest,
        "ledger_head": report.ledger_head,
        **report.corpus.model_dump(include=set(_REASONS_LOSSES_DIFFER)),
        **{key: proxy[key] for key in ("parametrization", "base_width")},
        "budget_flops": _find_budget(report),
        "progress": report.progress,
    }


def describe_differences(comparison: Comparison) -> list[str]:
    """Return the differences as plain sentences, the most important first."""
    if comparison.same_study:
        return ["both are the same study at the same moment: nothing differs"]
    lines = []
    losses, forecast = comparison.comparable["losses"], comparison.forecast
    if losses.comparable == "no":
        lines.append(f"losses cannot be compared: {'; '.join(losses.reasons)}")
    nats = forecast.difference_nats if forecast else None
    if nats is not None and nats.value is not None:
        lines += list_forecast_doubts(forecast)
        lines.append(
            "the main run's expected loss, B minus A: " + _format_difference(nats, "+.4f", "nats")
        )
    # Only the differences of optima that their intervals do not explain are shown.
    for test in comparison.tests:
        lines += [
            f"optimal {format_hyperparameter(test.hyperparameter)} at "
            f"{format_axis_size(test.axis, row.size)}, "
            f"B minus A: {_format_difference(row.difference_octaves, '+.2f', 'octaves')}"
            for row in test.optima
            if row.difference_octaves and row.difference_octaves.apart
        ]
    for test in comparison.tests:
        a, b = test.outcome.a, test.outcome.b
        if a is not None and b is not None and a != b:
            lines.append(f"{format_test(test)}: A {to_words(a)}, B {to_words(b)}")
    return [*lines, f"keys of the plans that differ: {len(comparison.question)}"]


def list_forecast_doubts(forecast: ForecastSides | None) -> list[str]:
    """Return the reasons why each side's forecast is inconclusive; they precede its number."""
    sides = {"A": forecast.a, "B": forecast.b} if forecast else {}
    return [
        f"{name}: {doubt}"
        for name, side in sides.items()
        if side is not None
        for doubt in split_warnings([*side.warnings])[0]
    ]


def _format_difference(difference: Difference, spec: str, unit: str) -> str:
    """Format a difference with its interval, and say if it may be zero."""
    value = f"{format_number(difference.value, spec)} {unit}"
    if difference.interval is None:
        return f"{value}, with no interval"
    doubt = "" if difference.apart else ", which may be zero"
    return f"{value} {format_interval(difference.interval, spec)}{doubt}"
