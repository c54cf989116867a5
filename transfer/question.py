"""A transfer question, and the runs that answer it.

The question is whether the best value of a hyperparameter, found at a base size, can be used at a
larger target size. Differences between sizes are measured in doublings, and differences between
values of the hyperparameter in octaves (factors of two). The drift is the number of octaves by
which the best value moves per doubling of the size. The drift is therefore the exponent of a power
law: the best value grows as size^drift.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from forerun._proxies.core.checks import Checks
from forerun._proxies.core.errors import InputError
from forerun._proxies.core.hyperparameters import LEARNING_RATE, get_hyperparameter

Axis = Literal["width", "depth", "batch", "duration", "params"]
"""The size that grows: model width, number of layers, tokens per step (at a constant total number
of tokens), total tokens, or parameters."""
Hyperparameter = str
"""Name of a hyperparameter: one of `forerun._proxies.core.hyperparameters`, or one that a plan
declares.
"""
AXES: tuple[Axis, ...] = get_args(Axis)

_SIZE_FORMATS = {
    "width": "width {}",
    "depth": "{} layers",
    "batch": "{} tokens a step",
    "duration": "{} tokens",
    "params": "{} parameters",
}


class TransferError(InputError):
    """Invalid input of a transfer question. `problems` lists everything that is wrong with it."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = list(problems)
        super().__init__("; ".join(self.problems))


def format_size(axis: Axis, size: int) -> str:
    """Return a size with its unit, such as `width 64` or `204,800 tokens`."""
    # Widths and numbers of layers are small: they have no separators of thousands
    return _SIZE_FORMATS[axis].format(size if axis in ("width", "depth") else f"{size:,}")


def to_log2(hyperparameter: Hyperparameter, value: float) -> float:
    """Return the log2 of a value on its hyperparameter's scale.

    Raises:
        TransferError: The value has no logarithm.
    """
    try:
        return get_hyperparameter(hyperparameter).to_log2(value)
    except ValueError as error:
        raise TransferError([str(error)]) from error


def from_log2(hyperparameter: Hyperparameter, log2_value: float) -> float:
    """Return the value whose log2 is given; the inverse of `to_log2`."""
    return get_hyperparameter(hyperparameter).from_log2(log2_value)


def format_value(hyperparameter: Hyperparameter, log2_value: float) -> str:
    """Format a value for people: a learning rate as a power of two (`2^-6`, `2^-5.58`), others as
    plain numbers.
    """
    if hyperparameter == LEARNING_RATE:
        return f"2^{round(log2_value, 2):g}"
    return f"{from_log2(hyperparameter, log2_value):.3g}"


Outcome = Literal["holds", "drifts", "cannot_tell"]
"""Outcome of a verdict."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """One run: its size, its value of the hyperparameter, its loss, and its seed."""

    size: int
    """Size along the question's axis."""
    log2_value: float
    """Log2 of the hyperparameter's value as it is set at the base (`to_log2`)."""
    loss_nats: float | None
    """Final validation loss, nats per token; None if the run diverged."""
    seed: int = 0
    """Random seed. Runs of one seed share data order and initialization."""

    def __post_init__(self) -> None:
        checks = Checks(self)
        checks.require_whole("size")
        checks.require_number("log2_value")
        if self.loss_nats is not None:
            checks.require_number("loss_nats")
        checks.require_whole("seed", least=0)
        if checks.problems:
            raise TransferError(checks.problems)


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """The question of a verdict: which hyperparameter, over which axis, from which size to which.

    It asks whether a value that is set at the base size can be used at the target size.
    """

    target_size: int
    base_size: int
    axis: Axis = "width"
    hyperparameter: Hyperparameter = LEARNING_RATE
    transferred_log2: float | None = None
    """Log2 of the value set at the base; None to use the optimum fitted to the runs there."""
    power: float | None = 0.0
    """Exponent of the transfer rule: the value at the target is the base's value times (target /
    base)^power, in addition to `built_in`. None to use the exponent that the runs measure."""
    built_in: float = 0.0
    """Exponent by which the parametrization of the runs, such as muP, already scales the value with
    size. The total exponent is the sum of this and `power`."""
    margin_nats: float = 0.01
    """Largest regret that is allowed, nats per token."""
    level: float = 0.9
    """Level of all intervals, equal-tailed: each bound is one-sided at (1 + level) / 2."""
    untrained_nats: float | None = None
    """Loss of a model that has learned nothing, ln(vocabulary); None if unknown, in which case the
    highest loss of the runs is used instead."""

    def __post_init__(self) -> None:
        checks = Checks(self)
        checks.require_one_of("axis", AXES)
        has_optimum = (
            bool(self.hyperparameter) and get_hyperparameter(self.hyperparameter).has_optimum
        )
        checks.require(
            has_optimum,
            f"hyperparameter = {self.hyperparameter!r}: has no optimum that could transfer",
        )
        checks.require_whole("target_size", "base_size")
        for name in ("transferred_log2", "power"):
            if getattr(self, name) is not None:
                checks.require_number(name)
        checks.require_number("built_in")
        checks.require_number("margin_nats", above=0)
        checks.require_number("level", above=0, below=1)
        if self.untrained_nats is not None:
            checks.require_number("untrained_nats", above=0)
        if checks.problems:
            raise TransferError(checks.problems)

    @property
    def doublings(self) -> float:
        """Doublings of size from the base to the target."""
        return math.log2(self.target_size) - math.log2(self.base_size)

    def compute_max_regret(self, points: Sequence[Point]) -> float:
        """Return the largest possible regret: from the lowest loss of the runs to that of a model
        that has learned nothing.

        Basin shapes are extrapolated without limit, but losses are bounded. A regret at this bound
        is known only to be at least this large. The bound is at least twice the margin, so a regret
        at the bound is always beyond the margin.
        """
        losses = [p.loss_nats for p in points if p.loss_nats is not None] or [0.0]
        highest = max(losses) if self.untrained_nats is None else max(self.untrained_nats, *losses)
        return max(highest - min(losses), 2 * self.margin_nats)
