"""Tables that a study's verbs print and the report shows: the same rows for both, as plain text.

`build_fit_section` and `list_frontier_flops` compute two parts of the report: section `fit`, and
the FLOPs at which section `frontier` has points. The module does not import torch.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from forerun._launcher.report.views.fit_findings import Fit
from forerun._launcher.report.views.transfer import (
    format_axis,
    format_estimate,
    format_hyperparameter,
    format_short_size,
    list_verdicts,
)
from forerun._launcher.report.views.wording import Outcome, to_words
from forerun._proxies.core.hyperparameters import HYPERPARAMETERS, get_hyperparameter
from forerun._proxies.core.notation import (
    NONE,
    format_count,
    format_interval,
    format_learning_rate,
    format_loss,
    format_nats,
    format_number,
    format_percent,
)
from forerun._transfer.question import format_size, format_value, from_log2

if TYPE_CHECKING:
    from forerun._launcher.report.views.fit_findings import Ladder
    from forerun._launcher.report.views.report_model import Calibration
    from forerun._launcher.report.views.search_findings import Search
    from forerun._launcher.report.views.transfer_findings import (
        Optimum,
        TargetValue,
        Transfer,
        Verdict,
    )
    from forerun._launcher.study.experiments.coordinate_record import RecordedCheck
    from forerun._scaling_fits.forecast.uncertainty import FittedRuns, Prediction

NUM_FRONTIER_POINTS = 24
"""Points of the frontier in the report."""


def list_frontier_flops(fit: FittedRuns, budget_flops: float) -> list[float]:
    """Return FLOPs from the smallest rung's to the budget, evenly spaced in their logarithms."""
    low, high = math.log(min(fit.span.six_nd)), math.log(budget_flops)
    return [
        math.exp(low + (high - low) * i / (NUM_FRONTIER_POINTS - 1))
        for i in range(NUM_FRONTIER_POINTS)
    ]


def build_fit_section(fit: FittedRuns, forecast: Prediction | None) -> Fit:
    """Return section `fit` of the report: the fit's summary, and each law's exponents and loss.

    Args:
        fit: Fit of the ladder.
        forecast: Forecast of the chosen run; None before there is one.
    """
    from forerun._scaling_fits.summary import summarize_fit

    section = Fit.model_validate(summarize_fit(fit))
    law = _describe_law(fit, forecast)
    members = [member.model_copy(update=law) for member in section.members]
    return section.model_copy(update={"members": members})


def _describe_law(fit: FittedRuns, forecast: Prediction | None) -> dict[str, float | None]:
    """Return the exponents of the law itself, and the loss that it predicts for the chosen run.

    All are None if the rungs identify no law. The loss is None also before there is a choice.
    """
    import numpy as np

    from forerun._scaling_fits.laws.law import compute_finite_exp, compute_log_loss

    law = fit.fit
    if not law.identified or fit.path is not None:
        return {"params_vs_flops": None, "tokens_vs_flops": None, "loss_at_choice_nats": None}
    # The law's vector of parameters has the exponents of params and tokens at places 3 and 4.
    alpha, beta = (float(value) for value in law.theta[3:5])
    return {
        "params_vs_flops": beta / (alpha + beta),
        "tokens_vs_flops": alpha / (alpha + beta),
        "loss_at_choice_nats": None
        if forecast is None
        else compute_finite_exp(
            float(
                compute_log_loss(
                    law.theta[None, :], np.array([forecast.params]), np.array([forecast.tokens])
                )[0, 0]
            )
        ),
    }


NUM_TRIALS = 5
"""Trials shown by `build_trials_table`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TextTable:
    """A table of text: a head, and rows of cells."""

    head: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    left: Collection[int] = (0,)
    """Indices of the columns that hold words and are aligned left; the others hold numbers."""


def build_tests_table(transfer: Transfer) -> TextTable:
    """Build the table of a study's verdicts, one row each."""
    rows = [
        (
            name,
            Outcome(verdict.outcome),
            format_estimate(verdict.drift_octaves_per_doubling, "+.2f"),
            format_estimate(verdict.regret_nats),
            format_number(verdict.transferred_value),
        )
        for name, verdict in list_verdicts(transfer)
    ]
    return TextTable(
        head=("test", "outcome", "octaves per doubling", "nats lost", "set to"),
        rows=rows,
        left=(0, 1),
    )


def build_optima_table(verdict: Verdict) -> TextTable:
    """Build the table of a verdict's optima, one row per size, followed by the control's optima."""
    rows = [_format_optimum(verdict, optimum, "") for optimum in verdict.optima]
    if control := verdict.control:
        rows += [_format_optimum(control, optimum, ", control") for optimum in control.optima]
    head = (
        format_axis(verdict.axis),
        "optimum",
        "interval",
        "fitted (nats)",
        "lowest run",
        "runs",
        "diverged",
    )
    return TextTable(head=head, rows=rows)


def describe_low_minima(verdict: Verdict) -> list[str]:
    """Return a sentence on fitted minima that are below the lowest run by more than a run's noise.

    The list is empty if there are no such minima.
    """
    noise, distances = verdict.noise_nats or 0.0, []
    for optimum in verdict.optima:
        lowest, fitted = optimum.lowest_run_nats, optimum.loss_nats
        if lowest is not None and fitted is not None and lowest - fitted > noise:
            distances.append(
                f"{format_nats(lowest - fitted)} nats at {format_size(verdict.axis, optimum.size)}"
            )
    if not distances:
        return []
    lead = (
        "fitted minima below the lowest run by more than the noise of one run "
        f"({format_nats(noise)} nats)"
    )
    reason = "the basins go through the runs, and their minima lie between the values that were run"
    return [f"{lead}: {', '.join(distances)}; {reason}"]


def _format_optimum(verdict: Verdict, optimum: Optimum, arm: str) -> tuple[str, ...]:
    name, value = verdict.hyperparameter, NONE
    interval: str = Outcome(optimum.status)
    if optimum.log2_value is not None:
        ends = sorted(optimum.interval_log2 or (), key=lambda end: from_log2(name, end))
        value = format_value(name, optimum.log2_value)
        interval = f"[{', '.join(format_value(name, end) for end in ends)}]"
    return (
        format_short_size(optimum.size) + arm,
        value,
        interval,
        format_loss(optimum.loss_nats),
        format_loss(optimum.lowest_run_nats),
        str(optimum.num_runs),
        str(optimum.num_diverged),
    )


def build_values_table(values: Sequence[TargetValue]) -> TextTable:
    """Build the table of hyperparameters with their values at the base and at the target."""
    rows = [
        (
            format_hyperparameter(value.hyperparameter),
            _format_value(value.base_value),
            _format_value(value.target_value),
            ", ".join(value.tested) or "not tested",
            Outcome(value.outcome) if value.outcome else "-",
            format_estimate(value.regret_nats),
            format_nats(value.cost_of_2x_off_nats),
        )
        for value in values
    ]
    head = (
        "value",
        "at the base",
        "at the target",
        "tested over",
        "outcome",
        "nats lost",
        "if 2x off",
    )
    return TextTable(head=head, rows=rows, left=(0, 3, 4))


def _format_value(value: float | str | None) -> str:
    """Format a number; a word of a categorical axis is returned as it is."""
    return value if isinstance(value, str) else format_number(value)


def describe_value_rules(values: Sequence[TargetValue]) -> list[str]:
    """Return the rule that sets each value at the target, and the axes it was not tested over."""
    return [
        f"{format_hyperparameter(value.hyperparameter)}: {value.rule}"
        + (f". Not tested over {', '.join(value.untested)}" if value.untested else "")
        for value in values
    ]


def build_coordinates_table(check: RecordedCheck) -> TextTable:
    """Build the table of a coordinate check.

    Each role has a row with the number of its layers that pass, and its worst layer.
    """
    rows = [
        (
            to_words(role),
            f"{sum(layer.outcome == 'passes' for layer in layers)} of {len(layers)}",
            layers[0].layer,
            format_number(layers[0].slope, "+.2f"),
            format_interval(layers[0].interval, "+.2f"),
            Outcome(layers[0].outcome),
        )
        for role, layers in check.group_by_role()
    ]
    head = (
        "role",
        "pass",
        "worst layer",
        "slope",
        f"{format_percent(check.level)} interval",
        "outcome",
    )
    return TextTable(head=head, rows=rows, left=(0, 2, 5))


def build_trials_table(search: Search) -> TextTable:
    """Build the table of the best trials of a search."""
    finished = sorted(
        (trial.loss_nats, trial.index, trial)
        for trial in search.trials
        if trial.loss_nats is not None
    )
    best, axis_words = search.best, search.words

    def format_trial_value(name: str, value: Any) -> str:
        if value is None:
            return NONE
        return (
            str(axis_words[name][int(value)])
            if name in axis_words
            else get_hyperparameter(name).format_value(value)
        )

    names = sorted(best, key=[*HYPERPARAMETERS, *best].index)
    rows = [
        (
            str(trial.index),
            *(format_trial_value(name, trial.get_value(name)) for name in names),
            format_loss(loss),
        )
        for loss, _, trial in finished[:NUM_TRIALS]
    ]
    return TextTable(head=("trial", *map(format_hyperparameter, names), "loss (nats)"), rows=rows)


def build_checks_table(ladder: Ladder) -> TextTable:
    """Build the table of rungs that were run at other rates too, one row per rate."""
    # The estimate and the outcome of a rung are shown once, in the row of its own rate.
    rows = [
        (
            str(check.width),
            format_count(check.tokens),
            format_number(offset.octaves, "+.3g") if offset.octaves else "0",
            format_learning_rate(offset.learning_rate),
            format_loss(offset.loss_nats) if offset.loss_nats is not None else Outcome("diverged"),
            *(
                (format_estimate(check.excess_nats), Outcome(check.outcome))
                if offset.octaves == 0
                else ("", "")
            ),
        )
        for check in ladder.checks
        for offset in check.offsets
    ]
    head = (
        "width",
        "tokens",
        "octaves off",
        "rate",
        "loss (nats)",
        "over the best rate (nats)",
        "outcome",
    )
    return TextTable(head=head, rows=rows, left=(0, 6))


def describe_failed_checks(ladder: Ladder) -> list[str]:
    """Return the reason of every checked rung that is not tuned."""
    return [check.words for check in ladder.checks if check.outcome != "tuned"]


def build_rungs_table(ladder: Ladder) -> TextTable:
    """Build the table of the ladder's rungs, with measured and fitted losses."""
    rows = [
        (
            str(rung.width),
            format_count(rung.params),
            format_count(rung.tokens),
            format_loss(rung.loss_nats) if rung.loss_nats is not None else Outcome("diverged"),
            format_loss(rung.fitted_nats),
        )
        for rung in ladder.rungs
    ]
    return TextTable(head=("width", "params", "tokens", "loss (nats)", "fitted"), rows=rows)


def format_calibration(calibrations: Sequence[Calibration]) -> str:
    """Describe in a line the mode of each size, and how many of the choices were measured."""
    widths: dict[tuple[str, str], dict[str, None]] = {}
    for calibration in calibrations:
        widths.setdefault((calibration.part, calibration.mode), {})[str(calibration.width)] = None
    measured = sum(bool(calibration.measurements) for calibration in calibrations)
    choices = [
        f"{'ladder: ' if part == 'ladder' else ''}{mode} at width {', '.join(names)}"
        for (part, mode), names in widths.items()
    ]
    return f"{'; '.join(choices)} ({measured} of {len(calibrations)} measured)"
