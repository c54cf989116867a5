"""The transfer rule of a hyperparameter along an axis, with its evidence, as a launch config stores
it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from proxies.core.hyperparameters import hyperparameter_named
from transfer.question import Axis, Hyperparameter, Outcome, TransferError

if TYPE_CHECKING:
    from transfer.verdict.verdict import Verdict

POWER_DIGITS = 4
"""Decimal places of a power. The last bits of a fit carry no information for a launch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TransferRule:
    """The transfer rule of one hyperparameter along one axis, with its evidence. A number that the
    runs do not determine is None.
    """

    hyperparameter: Hyperparameter
    axis: Axis
    power: float
    """Exponent that is used: the value at the target is the base's value times (target /
    base)^power. It applies to all parameter groups alike, in addition to the scaling of each kind
    of parameter."""
    source: Literal["measured", "parametrization"]
    outcome: Outcome
    measured_power: float | None
    """Exponent that the runs measured over their own sizes, with its interval at `level`. The power
    used differs from it where the line through the optima bends."""
    measured_low: float | None
    measured_high: float | None
    regret_nats: float | None
    """Regret at the target of the value used."""
    regret_low_nats: float | None
    regret_high_nats: float | None
    level: float

    def __post_init__(self) -> None:
        if not hyperparameter_named(self.hyperparameter).has_optimum:
            raise TransferError(
                [f"hyperparameter = {self.hyperparameter!r}: has no optimum that could transfer"]
            )


def rule_of(verdict: Verdict) -> TransferRule:
    """Return the rule that a verdict judged, with its evidence. Powers are absolute."""
    q, drift, regret = verdict.question, verdict.drift, verdict.regret_nats
    return TransferRule(
        hyperparameter=q.hyperparameter,
        axis=q.axis,
        power=round((verdict.power or 0.0) + q.built_in, POWER_DIGITS),
        source="measured" if q.power is None and verdict.power is not None else "parametrization",
        outcome=verdict.outcome,
        measured_power=drift.value + q.built_in if drift else None,
        measured_low=drift.low + q.built_in if drift else None,
        measured_high=drift.high + q.built_in if drift else None,
        regret_nats=regret.value if regret else None,
        regret_low_nats=regret.low if regret else None,
        regret_high_nats=regret.high if regret else None,
        level=q.level,
    )
