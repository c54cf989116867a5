"""How a hyperparameter is carried along an axis, and what the runs say of it: what a launch config
keeps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from proxies.core.hyperparameters import hyperparameter_named
from transfer.question import Axis, Hyperparameter, Outcome, TransferError

if TYPE_CHECKING:
    from transfer.verdict.verdict import Verdict

POWER_DIGITS = 4
"""After the point: the last bits of a fit are nothing to launch by."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TransferRule:
    """One hyperparameter along one axis, with the evidence. Nulls: the runs do not say."""

    hyperparameter: Hyperparameter
    axis: Axis
    power: float
    """Used: the value at the target is the base's times (target / base)^power, for every group
    alike, beside what each kind of parameter has by itself."""
    source: Literal["measured", "parametrization"]
    outcome: Outcome
    measured_power: float | None
    """What the runs measured over their own sizes, with its interval at `level`; the power used
    differs where the line through the optima bends."""
    measured_low: float | None
    measured_high: float | None
    regret_nats: float | None
    """At the target, of the value used."""
    regret_low_nats: float | None
    regret_high_nats: float | None
    level: float

    def __post_init__(self) -> None:
        if not hyperparameter_named(self.hyperparameter).has_optimum:
            raise TransferError(
                [f"hyperparameter = {self.hyperparameter!r}: has no optimum that could transfer"]
            )


def rule_of(verdict: Verdict) -> TransferRule:
    """The rule that a verdict judged, with what it found; powers are absolute."""
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
