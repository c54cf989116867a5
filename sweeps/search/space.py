"""What a search varies: named axes, each a range or some values, some of which may be off
altogether.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from proxies.core.checks import Checks
from proxies.core.hyperparameters import CAN_BE_OFF, HYPERPARAMETERS, Scale, hyperparameter_named

Params = dict[str, float]
"""One point: a value for every axis, by name. 0.0 where it is off."""

Range = tuple[float, float]
"""Lowest and highest value, both included; equal ends fix the value."""

OFF = 0.0
DIGITS = 3
"""Digits of a value that later stages run at."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Axis:
    """One thing a search varies. Equal ends hold that value fixed."""

    name: str
    range: Range
    """Its lowest and highest value; of `choices`, those of them."""
    choices: tuple[float, ...] = ()
    """These values alone; empty: all of the range."""
    can_be_off: bool = False
    """Whether a trial may do without: whether it does is then an axis of its own, and the value
    counts only where it does not.
    """
    own_scale: Scale | None = None
    """How an axis that only the plan knows is searched; None: as the registry says."""
    whole: bool = False
    """Whether its values are whole numbers."""

    @property
    def scale(self) -> Scale:
        """How it is searched."""
        return self.own_scale or hyperparameter_named(self.name).scale

    @property
    def fixed(self) -> bool:
        """Whether there is one value."""
        return self.range[0] == self.range[1]

    @property
    def coordinates(self) -> Range:
        """The range as it is searched, linear or in log2: of a complement, that of 1 - value."""
        low, high = self.range
        return (1 - high, 1 - low) if self.scale == "log2_complement" else (low, high)

    def coordinate(self, value: float) -> float:
        """A value as it is searched, within the range."""
        low, high = self.coordinates
        return min(max(1 - value if self.scale == "log2_complement" else value, low), high)

    def value(self, coordinate: float) -> float:
        """The inverse of `coordinate`."""
        low, high = self.range
        found = 1 - coordinate if self.scale == "log2_complement" else coordinate
        return min(max(float(round(found)) if self.whole else found, low), high)

    def at(self, share: float) -> float:
        """The value at a share, in [0, 1], of the range as it is searched."""
        if self.choices:
            return self.choices[min(int(share * len(self.choices)), len(self.choices) - 1)]
        low, high = self.coordinates
        if self.scale == "linear":
            found = low + share * (high - low)
        else:
            found = 2.0 ** (math.log2(low) + share * (math.log2(high) - math.log2(low)))
        return self.value(min(max(found, low), high))  # rounding must not leave the range

    def nearest(self, value: float) -> float:
        """Its value nearest to another one."""
        if value == OFF and self.can_be_off:
            return OFF
        if self.choices:
            return min(self.choices, key=lambda choice: abs(choice - value))
        low, high = self.range
        return min(max(float(round(value)) if self.whole else value, low), high)

    def octaves(self, value: float) -> float:
        """Log2 of a value as it is searched: of a complement, that of 1 - value."""
        return hyperparameter_named(self.name).to_log2(value)

    def rounded(self, value: float) -> float:
        """To three digits; of a complement, of 1 - value; a choice and a whole number as they
        are.
        """
        if self.choices or self.whole:
            return value
        return hyperparameter_named(self.name).rounded(value, DIGITS)


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchSpace:
    """The axes of a search; `search_space` makes it, in the registry's order.

    Raises:
        SpecError: every axis that is not one, all at once.
    """

    axes: tuple[Axis, ...]

    def __post_init__(self) -> None:
        checks = Checks(self)
        for axis in self.axes:
            known = axis.name in HYPERPARAMETERS or axis.own_scale is not None
            checks.that(
                known,
                f"{axis.name} is not a hyperparameter: must be one of {', '.join(HYPERPARAMETERS)}",
            )
            if known:
                checks.that(*_range_check(axis))
        checks.done()

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the axes."""
        return tuple(axis.name for axis in self.axes)

    @property
    def switches(self) -> tuple[Axis, ...]:
        """Axes that can be off: each has a coordinate that says whether it is."""
        return tuple(axis for axis in self.axes if axis.can_be_off)

    @property
    def num_coordinates(self) -> int:
        """Axes and switches."""
        return len(self.axes) + len(self.switches)

    def axis(self, name: str) -> Axis:
        """By name."""
        return next(axis for axis in self.axes if axis.name == name)

    def at(self, unit: Sequence[float]) -> Params:
        """The point at coordinates `unit` (one in [0, 1] per axis, then one per switch: off below
        1/2), as values.
        """
        values = unit[: len(self.axes)]
        off = {
            axis.name
            for axis, u in zip(self.switches, unit[len(self.axes) :], strict=True)
            if u < 0.5
        }
        return {
            axis.name: OFF if axis.name in off else axis.at(share)
            for axis, share in zip(self.axes, values, strict=True)
        }

    def nearest(self, values: Params) -> Params:
        """The point nearest to some values by name; an axis without one is in its middle."""
        return {
            axis.name: axis.nearest(values[axis.name]) if axis.name in values else axis.at(0.5)
            for axis in self.axes
        }

    @property
    def lowest(self) -> Params:
        """Every axis at its lowest value."""
        return {axis.name: axis.range[0] for axis in self.axes}

    @property
    def highest(self) -> Params:
        """Every axis at its highest value."""
        return {axis.name: axis.range[1] for axis in self.axes}

    def rounded(self, point: Params) -> Params:
        """To three digits: what a later stage runs at."""
        return {name: self.axis(name).rounded(value) for name, value in point.items()}

    def grown(self, name: str, range_: Range) -> SearchSpace:
        """The same with another range of one axis."""
        wider = dataclasses.replace(self.axis(name), range=range_)
        return SearchSpace(axes=tuple(wider if axis.name == name else axis for axis in self.axes))


def search_space(
    *,
    ranges: Mapping[str, Range],
    choices: Mapping[str, Sequence[float]] | None = None,
    can_be_off: Sequence[str] = (),
    own: Sequence[Axis] = (),
) -> SearchSpace:
    """A space by ranges or choices of its axes, in whatever order, and then axes that only the plan
    knows.

    Raises:
        SpecError: see `SearchSpace`.
    """
    some = {name: tuple(values) for name, values in (choices or {}).items()}
    both = {**ranges, **{name: (min(values), max(values)) for name, values in some.items()}}
    known = [name for name in HYPERPARAMETERS if name in both]
    ordered = known + [name for name in both if name not in HYPERPARAMETERS]
    axes = (
        Axis(name=name, range=both[name], choices=some.get(name, ()), can_be_off=name in can_be_off)
        for name in ordered
    )
    return SearchSpace(axes=(*axes, *own))


def _range_check(axis: Axis) -> tuple[bool, str]:
    """Whether an axis has a range that its scale can be searched on, and what to say if not."""
    value: object = axis.range
    ends = list(value) if isinstance(value, tuple | list) else []
    fine = len(ends) == 2 and all(type(end) in (int, float) and math.isfinite(end) for end in ends)
    above = axis.scale == "log2"
    if fine:
        low, high = ends
        share = axis.own_scale is None and not above
        fine = low <= high and (low > 0 or not above) and (not share or 0 <= low <= high < 1)
        fine = fine and not (axis.whole and any(end != round(end) for end in ends))
    limits = "above 0" if above else "of any size" if axis.own_scale else "at least 0 and below 1"
    problem = (
        f"{axis.name} = {ends or value!r}: must be [low, high], two finite numbers {limits}, "
        "with low <= high"
    )
    if axis.can_be_off and axis.name not in CAN_BE_OFF:
        return False, f"{axis.name} cannot be off: {', '.join(CAN_BE_OFF)} can"
    return fine, problem
