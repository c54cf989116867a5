"""What is asked about transfer, and the runs that answer it. Standard library only.

Sizes along an axis double, hyperparameters are in octaves: everything here is log2 against log2, so
that a drift is a power law's exponent.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from proxies.core.checks import Checks
from proxies.core.errors import InputError
from proxies.core.hyperparameters import LEARNING_RATE, hyperparameter_named

Axis = Literal["width", "depth", "batch", "duration", "params"]
"""What grows: model width, layers, tokens per step (at equal tokens in all), tokens in all,
parameters."""
Hyperparameter = str
"""By name: one of `proxies.core.hyperparameters`, or one that a plan declares."""
AXES: tuple[Axis, ...] = get_args(Axis)

_SIZE = {
    "width": "width {}",
    "depth": "{} layers",
    "batch": "{} tokens a step",
    "duration": "{} tokens",
    "params": "{} parameters",
}


class TransferError(InputError):
    """Input no verdict can be made from. `problems` lists everything that is wrong with it."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = list(problems)
        super().__init__("; ".join(self.problems))


def at_size(axis: Axis, size: int) -> str:
    """A size as one says it: `width 64`, `204,800 tokens`."""
    return _SIZE[axis].format(size if axis in ("width", "depth") else f"{size:,}")


def to_log2(hyperparameter: Hyperparameter, value: float) -> float:
    """Octaves of a value, as its scale counts them.

    Raises:
        TransferError: the value has no logarithm.
    """
    try:
        return hyperparameter_named(hyperparameter).to_log2(value)
    except ValueError as error:
        raise TransferError([str(error)]) from error


def from_log2(hyperparameter: Hyperparameter, log2_value: float) -> float:
    """The value of so many octaves; the inverse of `to_log2`."""
    return hyperparameter_named(hyperparameter).from_log2(log2_value)


def written(hyperparameter: Hyperparameter, log2_value: float) -> str:
    """A value as one says it: learning rates as powers, `2^-6` or `2^-5.58`; others as they are."""
    if hyperparameter == LEARNING_RATE:
        return f"2^{round(log2_value, 2):g}"
    return f"{from_log2(hyperparameter, log2_value):.3g}"


Outcome = Literal["holds", "drifts", "cannot_tell"]
"""A verdict in a word."""


CORNERS = ((1, 1), (-1, -1), (1, -1), (-1, 1))
"""Of a pair of values, octaves from the base's: `transfer.verdict.pair_verdict`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """One run: where it was, and what it reached."""

    size: int
    """Along the question's axis."""
    log2_value: float
    """The value of the question's hyperparameter as it is set at the base (`to_log2`)."""
    loss_nats: float | None
    """Validation loss at the end, nats per token; None: it diverged."""
    seed: int = 0
    """Runs of one seed share data order and initialisation."""

    def __post_init__(self) -> None:
        checks = Checks(self)
        checks.whole("size")
        checks.number("log2_value")
        if self.loss_nats is not None:
            checks.number("loss_nats")
        checks.whole("seed", least=0)
        if checks.problems:
            raise TransferError(checks.problems)


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """Does a value set at the base size serve at the target's?"""

    target_size: int
    base_size: int
    axis: Axis = "width"
    hyperparameter: Hyperparameter = LEARNING_RATE
    transferred_log2: float | None = None
    """Value set at the base; None: the fitted optimum there."""
    power: float | None = 0.0
    """The value at the target is the base's times (target / base)^power, beyond what `built_in`
    does; None: the power is measured, and the measured one is used."""
    built_in: float = 0.0
    """The power by which the runs' own parametrization moves the value already, so that sums are
    absolute exponents."""
    margin_nats: float = 0.01
    """The largest loss one is ready to give away."""
    level: float = 0.9
    """The level of all intervals, equal-tailed: each bound is one-sided at (1 + level) / 2."""
    untrained_nats: float | None = None
    """Loss of a model that has learned nothing, ln(vocabulary); None: unknown, and the highest loss
    of the runs stands for it."""

    def __post_init__(self) -> None:
        checks = Checks(self)
        checks.one_of("axis", AXES)
        has_optimum = (
            bool(self.hyperparameter) and hyperparameter_named(self.hyperparameter).has_optimum
        )
        checks.that(
            has_optimum,
            f"hyperparameter = {self.hyperparameter!r}: has no optimum that could transfer",
        )
        checks.whole("target_size", "base_size")
        for name in ("transferred_log2", "power"):
            if getattr(self, name) is not None:
                checks.number(name)
        checks.number("built_in")
        checks.number("margin_nats", above=0)
        checks.number("level", above=0, below=1)
        if self.untrained_nats is not None:
            checks.number("untrained_nats", above=0)
        if checks.problems:
            raise TransferError(checks.problems)

    @property
    def doublings(self) -> float:
        """From the base to the target."""
        return math.log2(self.target_size) - math.log2(self.base_size)

    def most_nats(self, points: Sequence[Point]) -> float:
        """What a bad value can cost: from the lowest loss of the runs up to that of a model that
        has learned nothing.

        Shapes are extrapolated without an end, losses are not: beyond this a cost is known to be
        more, not how much. It never falls to the margin, so that what is beyond it is beyond the
        margin too.
        """
        losses = [p.loss_nats for p in points if p.loss_nats is not None] or [0.0]
        highest = max(losses) if self.untrained_nats is None else max(self.untrained_nats, *losses)
        return max(highest - min(losses), 2 * self.margin_nats)
