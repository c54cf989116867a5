"""The tables that a study's verbs print and the report shows: the same rows for both, cells as
plain text.
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

# What the report says of a fit beside the fit itself: each law alone.
#
# All of it goes by the chosen run; before there is one, or where the rungs identify no law, parts
# are null. No torch.

NUM_FRONTIER_POINTS = 24


def frontier_flops(fit: FittedRuns, budget_flops: float) -> list[float]:
    """FLOPs, evenly spaced in their logs, from the smallest rung's to the budget."""
    low, high = math.log(min(fit.span.six_nd)), math.log(budget_flops)
    return [
        math.exp(low + (high - low) * i / (NUM_FRONTIER_POINTS - 1))
        for i in range(NUM_FRONTIER_POINTS)
    ]


def fit_body(fit: FittedRuns, at: Prediction | None) -> dict[str, Json]:
    """`fit` of the report: its summary, and of every member its exponents and its loss at the
    chosen run.

    Args:
        fit: of the ladder.
        at: the forecast of the chosen run; None before there is one.
    """
    from scaling_fits.summary import fit_summary

    body = fit_summary(fit)
    members = body["members"]
    assert isinstance(members, list)
    return {
        **body,
        "members": [
            {**member, **_of_law(fit, at)} for member in members if isinstance(member, dict)
        ],
    }


def _of_law(fit: FittedRuns, at: Prediction | None) -> dict[str, Json]:
    """Return the exponents of the law itself, and the loss it gives the chosen run."""
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


@dataclass(frozen=True, kw_only=True, slots=True)
class TextTable:
    """Columns and rows."""

    head: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    left: Collection[int] = (0,)
    """Columns of words; the others are numbers."""


def tests_table(transfer: Any) -> TextTable:
    """Every verdict of a study: one row each."""
    rows = [
        (
            name,
            Outcome(of["outcome"]),
            estimate(of.get("drift_octaves_per_doubling"), "+.2f"),
            estimate(of["regret_nats"]),
            format_number(of.get("transferred_value")),
        )
        for name, of in judged(transfer)
    ]
    return TextTable(
        head=("test", "outcome", "octaves per doubling", "nats lost", "set to"),
        rows=rows,
        left=(0, 1),
    )


def optima_table(verdict: Any) -> TextTable:
    """The optimum at every size that a verdict rests on, the control's below it."""
    rows = [_optimum(verdict, optimum, "") for optimum in verdict["optima"]]
    control = verdict["control"]
    rows += (
        [_optimum(control, optimum, ", control") for optimum in control["optima"]]
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
    """Return a sentence on fitted minima that lie more than the noise of one run below every run,
    or nothing.
    """
    noise, parts = verdict["noise_nats"] or 0.0, []
    for optimum in verdict["optima"]:
        lowest, fitted = optimum.get("lowest_run_nats"), optimum["loss_nats"]
        if lowest is not None and fitted is not None and lowest - fitted > noise:
            parts.append(
                f"{format_nats(lowest - fitted)} nats at "
                f"{at_size(verdict['axis'], optimum['size'])}"
            )
    if not parts:
        return []
    lead = (
        "fitted minima below the lowest run by more than the noise of one run "
        f"({format_nats(noise)} nats)"
    )
    reason = "the basins go through the runs, and their minima lie between the values that were run"
    return [f"{lead}: {', '.join(parts)}; {reason}"]


def _optimum(verdict: Any, optimum: Any, arm: str) -> tuple[str, ...]:
    name, ends = verdict["hyperparameter"], optimum["interval_log2"]
    found = optimum["log2_value"] is not None
    low, high = sorted(ends, key=lambda end: from_log2(name, end)) if found else (0.0, 0.0)
    return (
        short_size(optimum["size"]) + arm,
        written(name, optimum["log2_value"]) if found else "-",
        f"[{written(name, low)}, {written(name, high)}]" if found else Outcome(optimum["status"]),
        format_loss(optimum["loss_nats"]),
        format_loss(optimum.get("lowest_run_nats")),
        str(optimum["num_runs"]),
        str(optimum["num_diverged"]),
    )


def values_table(values: Any) -> TextTable:
    """Every hyperparameter at the base and at the target."""
    rows = [
        (
            hyperparameter_name(value["hyperparameter"]),
            _shown(value["base_value"]),
            _shown(value["target_value"]),
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


def _shown(value: float | str | None) -> str:
    """A number, or a word of a categorical axis."""
    return value if isinstance(value, str) else format_number(value)


def value_rules(values: Any) -> list[str]:
    """By which rule each value comes to the target, and what of it was not tested."""
    return [
        f"{hyperparameter_name(value['hyperparameter'])}: {value['rule']}"
        + (f". Not tested over {', '.join(value['untested'])}" if value["untested"] else "")
        for value in values
    ]


def coordinates_table(check: Any) -> TextTable:
    """One row a role: how many layers pass, and the worst."""
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
    """The best trials of a search."""
    finished = sorted(
        (t for t in search["trials"] if t["loss_nats"] is not None), key=lambda t: t["loss_nats"]
    )
    best, spoken = search["best"], search.get("words", {})

    def text(name: str, value: Any) -> str:
        if value is None:
            return NONE
        return (
            str(spoken[name][int(value)])
            if name in spoken
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
            str(t["index"]),
            *(text(name, t[name]) for name in names),
            format_loss(t["loss_nats"]),
        )
        for t in finished[:NUM_TRIALS]
    ]
    return TextTable(head=("trial", *map(hyperparameter_name, names), "loss (nats)"), rows=rows)


def checks_table(ladder: Any) -> TextTable:
    """Rungs that were run at other rates too, one row a rate."""
    rows = [
        (
            str(one["width"]),
            format_count(one["tokens"]),
            exponent(tried["octaves"]),
            format_learning_rate(tried["learning_rate"]),
            format_loss(tried["loss_nats"])
            if tried["loss_nats"] is not None
            else Outcome("diverged"),
            *(
                (estimate(one["excess_nats"]), Outcome(one["outcome"]))
                if tried["octaves"] == 0
                else ("", "")
            ),
        )
        for one in ladder["checks"]
        for tried in one["offsets"]
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
    """What keeps a checked rung from counting as tuned."""
    return [check["words"] for check in ladder["checks"] if check["outcome"] != "tuned"]


def rungs_table(ladder: Any) -> TextTable:
    """The rungs of the ladder, measured and fitted."""
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
    """All choices in a line: which sizes compute how."""
    widths: dict[tuple[str, str], dict[str, None]] = {}
    for one in body:
        widths.setdefault((one["part"], one["mode"]), {})[str(one["width"])] = None
    measured = sum(bool(one["figures"]) for one in body)
    chosen = [
        f"{'ladder: ' if part == 'ladder' else ''}{mode} at width {', '.join(of)}"
        for (part, mode), of in widths.items()
    ]
    return f"{'; '.join(chosen)} ({measured} of {len(body)} measured)"
