"""Tables that a study's verbs print and the report shows: the same rows for both, as plain text.

`fit_body` and `frontier_flops` give what the report shows of each law of a fit at the chosen run;
parts are null where there is no choice yet, or the rungs identify no law. No torch is loaded.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from launcher.study.gates import by_role
from launcher.views.numbers import Outcome, words
from launcher.views.transfer import (
    axis_name,
    estimate,
    exponent,
    hyperparameter_name,
    judged,
    short_size,
)
from proxies.core.canon import Json
from proxies.core.hyperparameters import HYPERPARAMETERS, hyperparameter_named
from proxies.core.notation import (
    NONE,
    format_count,
    format_interval,
    format_learning_rate,
    format_loss,
    format_nats,
    format_number,
    format_percent,
)
from transfer.question import at_size, from_log2, written

if TYPE_CHECKING:
    from scaling_fits.forecast.uncertainty import FittedRuns, Prediction

NUM_FRONTIER_POINTS = 24
"""Points of the frontier in the report."""


def frontier_flops(fit: FittedRuns, budget_flops: float) -> list[float]:
    """Return FLOPs from the smallest rung's to the budget, evenly spaced in their logarithms."""
    low, high = math.log(min(fit.span.six_nd)), math.log(budget_flops)
    return [
        math.exp(low + (high - low) * i / (NUM_FRONTIER_POINTS - 1))
        for i in range(NUM_FRONTIER_POINTS)
    ]


def fit_body(fit: FittedRuns, at: Prediction | None) -> dict[str, Json]:
    """Return section `fit` of the report: the fit's summary, and each law's exponents and loss.

    Args:
        fit: Fit of the ladder.
        at: Forecast of the chosen run; None before there is one.
    """
    from scaling_fits.summary import fit_summary

    body = fit_summary(fit)
    members = body["members"]
    assert isinstance(members, list)
    return {
        **body,
        "members": [
            {**member, **_describe_law(fit, at)} for member in members if isinstance(member, dict)
        ],
    }


def _describe_law(fit: FittedRuns, at: Prediction | None) -> dict[str, Json]:
    """Return the exponents of the law itself, and the loss that it predicts for the chosen run."""
    import numpy as np

    from scaling_fits.laws.law import exp_finite, log_loss

    law = fit.fit
    if not law.identified or fit.path is not None:
        return {"params_vs_flops": None, "tokens_vs_flops": None, "loss_at_choice_nats": None}
    alpha, beta = (float(value) for value in law.theta[3:5])
    return {
        "params_vs_flops": beta / (alpha + beta),
        "tokens_vs_flops": alpha / (alpha + beta),
        "loss_at_choice_nats": None
        if at is None
        else exp_finite(
            float(log_loss(law.theta[None, :], np.array([at.params]), np.array([at.tokens]))[0, 0])
        ),
    }


NUM_TRIALS = 5
"""Trials shown by `trials_table`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TextTable:
    """A table of text: a head, and rows of cells."""

    head: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    left: Collection[int] = (0,)
    """Indices of the columns that hold words and are aligned left; the others hold numbers."""


def tests_table(transfer: Any) -> TextTable:
    """Build the table of a study's verdicts, one row each."""
    rows = [
        (
            name,
            Outcome(verdict["outcome"]),
            estimate(verdict.get("drift_octaves_per_doubling"), "+.2f"),
            estimate(verdict["regret_nats"]),
            format_number(verdict.get("transferred_value")),
        )
        for name, verdict in judged(transfer)
    ]
    return TextTable(
        head=("test", "outcome", "octaves per doubling", "nats lost", "set to"),
        rows=rows,
        left=(0, 1),
    )


def optima_table(verdict: Any) -> TextTable:
    """Build the table of a verdict's optima, one row per size, followed by those of the control."""
    rows = [_format_optimum(verdict, optimum, "") for optimum in verdict["optima"]]
    control = verdict["control"]
    rows += (
        [_format_optimum(control, optimum, ", control") for optimum in control["optima"]]
        if control
        else []
    )
    head = (
        axis_name(verdict["axis"]),
        "optimum",
        "interval",
        "fitted (nats)",
        "lowest run",
        "runs",
        "diverged",
    )
    return TextTable(head=head, rows=rows)


def minimum_notes(verdict: Any) -> list[str]:
    """Return a sentence on minima that are fitted more than one run's noise below the lowest run.

    The list is empty if there are none.
    """
    noise, distances = verdict["noise_nats"] or 0.0, []
    for optimum in verdict["optima"]:
        lowest, fitted = optimum.get("lowest_run_nats"), optimum["loss_nats"]
        if lowest is not None and fitted is not None and lowest - fitted > noise:
            distances.append(
                f"{format_nats(lowest - fitted)} nats at "
                f"{at_size(verdict['axis'], optimum['size'])}"
            )
    if not distances:
        return []
    lead = (
        "fitted minima below the lowest run by more than the noise of one run "
        f"({format_nats(noise)} nats)"
    )
    reason = "the basins go through the runs, and their minima lie between the values that were run"
    return [f"{lead}: {', '.join(distances)}; {reason}"]


def _format_optimum(verdict: Any, optimum: Any, arm: str) -> tuple[str, ...]:
    name, ends = verdict["hyperparameter"], optimum["interval_log2"]
    has_value = optimum["log2_value"] is not None
    low, high = sorted(ends, key=lambda end: from_log2(name, end)) if has_value else (0.0, 0.0)
    return (
        short_size(optimum["size"]) + arm,
        written(name, optimum["log2_value"]) if has_value else "-",
        f"[{written(name, low)}, {written(name, high)}]"
        if has_value
        else Outcome(optimum["status"]),
        format_loss(optimum["loss_nats"]),
        format_loss(optimum.get("lowest_run_nats")),
        str(optimum["num_runs"]),
        str(optimum["num_diverged"]),
    )


def values_table(values: Any) -> TextTable:
    """Build the table of hyperparameters with their values at the base and at the target."""
    rows = [
        (
            hyperparameter_name(value["hyperparameter"]),
            _format_value(value["base_value"]),
            _format_value(value["target_value"]),
            ", ".join(value["tested"]) or "not tested",
            Outcome(value["outcome"]) if value["outcome"] else "-",
            estimate(value["regret_nats"]),
            format_nats(value["cost_of_2x_off_nats"]),
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


def value_rules(values: Any) -> list[str]:
    """Return the rule that sets each value at the target, and the axes it was not tested over."""
    return [
        f"{hyperparameter_name(value['hyperparameter'])}: {value['rule']}"
        + (f". Not tested over {', '.join(value['untested'])}" if value["untested"] else "")
        for value in values
    ]


def coordinates_table(check: Any) -> TextTable:
    """Build the table of a coordinate check, one row per role: layers that pass, and the worst."""
    rows = [
        (
            words(role),
            f"{sum(layer['outcome'] == 'passes' for layer in layers)} of {len(layers)}",
            layers[0]["layer"],
            format_number(layers[0]["slope"], "+.2f"),
            format_interval(layers[0]["interval"], "+.2f"),
            Outcome(layers[0]["outcome"]),
        )
        for role, layers in by_role(check)
    ]
    head = (
        "role",
        "pass",
        "worst layer",
        "slope",
        f"{format_percent(check['level'])} interval",
        "outcome",
    )
    return TextTable(head=head, rows=rows, left=(0, 2, 5))


def trials_table(search: Any) -> TextTable:
    """Build the table of the best trials of a search."""
    finished = sorted(
        (trial for trial in search["trials"] if trial["loss_nats"] is not None),
        key=lambda trial: trial["loss_nats"],
    )
    best, axis_words = search["best"], search.get("words", {})

    def format_value(name: str, value: Any) -> str:
        if value is None:
            return NONE
        return (
            str(axis_words[name][int(value)])
            if name in axis_words
            else str(hyperparameter_named(name).text(value))
        )

    names = sorted(
        best,
        key=lambda name: (
            list(HYPERPARAMETERS).index(name) if name in HYPERPARAMETERS else len(best) + 9
        ),
    )
    rows = [
        (
            str(trial["index"]),
            *(format_value(name, trial[name]) for name in names),
            format_loss(trial["loss_nats"]),
        )
        for trial in finished[:NUM_TRIALS]
    ]
    return TextTable(head=("trial", *map(hyperparameter_name, names), "loss (nats)"), rows=rows)


def checks_table(ladder: Any) -> TextTable:
    """Build the table of rungs that were run at other rates too, one row per rate."""
    rows = [
        (
            str(check["width"]),
            format_count(check["tokens"]),
            exponent(offset["octaves"]),
            format_learning_rate(offset["learning_rate"]),
            format_loss(offset["loss_nats"])
            if offset["loss_nats"] is not None
            else Outcome("diverged"),
            *(
                (estimate(check["excess_nats"]), Outcome(check["outcome"]))
                if offset["octaves"] == 0
                else ("", "")
            ),
        )
        for check in ladder["checks"]
        for offset in check["offsets"]
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


def check_sentences(ladder: Any) -> list[str]:
    """Return the reason of every checked rung that is not tuned."""
    return [check["words"] for check in ladder["checks"] if check["outcome"] != "tuned"]


def rungs_table(ladder: Any) -> TextTable:
    """Build the table of the ladder's rungs, with measured and fitted losses."""
    rows = [
        (
            str(rung["width"]),
            format_count(rung["params"]),
            format_count(rung["tokens"]),
            format_loss(rung["loss_nats"])
            if rung["loss_nats"] is not None
            else Outcome("diverged"),
            format_loss(rung["fitted_nats"]),
        )
        for rung in ladder["rungs"]
    ]
    return TextTable(head=("width", "params", "tokens", "loss (nats)", "fitted"), rows=rows)


def calibration_line(body: Any) -> str:
    """Describe in a line how each size computes, and how many of the choices were measured."""
    widths: dict[tuple[str, str], dict[str, None]] = {}
    for calibration in body:
        widths.setdefault((calibration["part"], calibration["mode"]), {})[
            str(calibration["width"])
        ] = None
    measured = sum(bool(calibration["figures"]) for calibration in body)
    choices = [
        f"{'ladder: ' if part == 'ladder' else ''}{mode} at width {', '.join(names)}"
        for (part, mode), names in widths.items()
    ]
    return f"{'; '.join(choices)} ({measured} of {len(body)} measured)"
