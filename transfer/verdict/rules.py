"""The transfer rule of a hyperparameter along an axis, with the evidence for it, as a launch config
stores it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from forerun._proxies.core.hyperparameters import get_hyperparameter
from forerun._transfer.question import Axis, Hyperparameter, Outcome, TransferError

if TYPE_CHECKING:
    from forerun._transfer.verdict.verdict import Verdict

POWER_DIGITS = 4
"""Decimal places of a power. The last bits of a fit carry no information for a launch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TransferRule:
    """The transfer rule of one hyperparameter along one axis, with the evidence for it. A number
    that the runs do not determine is None.
    """

    hyperparameter: Hyperparameter
    axis: Axis
    power: float
    """Exponent that is used: the value at the target is the base's value times (target /
    base)^power. It applies to all parameter groups alike, in addition to the factors by which the
    parametrization scales each kind of parameter."""
    source: Literal["measured", "parametrization"]
    """Origin of `power`: the runs, or the parametrization of the model."""
    outcome: Outcome
    measured_power: float | None
    """Exponent that the runs measured over their own sizes, with its interval at `level`. The power
    used differs from it where the line through the optima bends."""
    measured_low: float | None
    measured_high: float | None
    regret_nats: float | None
    """Regret at the target, in nats, of the value that the rule gives."""
    regret_low_nats: float | None
    regret_high_nats: float | None
    level: float

    def __post_init__(self) -> None:
        if not get_hyperparameter(self.hyperparameter).has_optimum:
            raise TransferError(
                [f"hyperparameter = {self.hyperparameter!r}: has no optimum that could transfer"]
            )


def build_rule(verdict: Verdict) -> TransferRule:
    """Return the rule that a verdict judged, with the evidence for it.

    The powers of the rule are total exponents: each is an exponent of the verdict plus the exponent
    by which the parametrization already scales (`Question.built_in`).
    """
    question, drift, regret = verdict.question, verdict.drift, verdict.regret_nats
    # A question that gives a power gives the parametrization's. A question without a power asks for
    # the measured one, but the runs may determine none: then only the parametrization scales
    is_measured = question.power is None and verdict.power is not None
    return TransferRule(
        hyperparameter=question.hyperparameter,
        axis=question.axis,
        power=round((verdict.power or 0.0) + question.built_in, POWER_DIGITS),
        source="measured" if is_measured else "parametrization",
        outcome=verdict.outcome,
        measured_power=drift.estimate + question.built_in if drift else None,
        measured_low=drift.low + question.built_in if drift else None,
        measured_high=drift.high + question.built_in if drift else None,
        regret_nats=regret.estimate if regret else None,
        regret_low_nats=regret.low if regret else None,
        regret_high_nats=regret.high if regret else None,
        level=question.level,
    )
