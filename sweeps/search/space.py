"""The search space: named axes, each a range or a set of values; some axes can be switched off."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from forerun._proxies.core.checks import Checks
from forerun._proxies.core.hyperparameters import (
    CAN_BE_OFF,
    HYPERPARAMETERS,
    Scale,
    get_hyperparameter,
)

Params = dict[str, float]
"""One point: the value of every axis by name; 0.0 if the axis is off."""

Range = tuple[float, float]
"""Lowest and highest value, both included; equal ends fix the value."""

OFF = 0.0
"""Value of an axis that is off."""
NUM_DIGITS = 3
"""Significant digits to which a value is rounded for later stages."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Axis:
    """One hyperparameter that a search varies; equal ends of its range fix its value."""

    name: str
    range: Range
    """Lowest and highest value, which are the lowest and highest choice if there are `choices`."""
    choices: tuple[float, ...] = ()
    """The only values that are searched; empty: every value of the range."""
    can_be_off: bool = False
    """Whether a trial may do without this hyperparameter.

    The search then has an additional axis, a switch; the value counts only if the switch is on.
    """
    own_scale: Scale | None = None
    """Scale of a hyperparameter that the user's plan declares; None: the scale in the registry of
    hyperparameters.
    """
    is_integer: bool = False
    """Whether the values are integers."""

    @property
    def scale(self) -> Scale:
        """Scale on which the axis is searched."""
        return self.own_scale or get_hyperparameter(self.name).scale

    @property
    def is_fixed(self) -> bool:
        """Whether the axis has only one value."""
        return self.range[0] == self.range[1]

    @property
    def coordinates(self) -> Range:
        """Range of the coordinate: the range of the value, or of 1 - value for a complement."""
        low, high = self.range
        return (1 - high, 1 - low) if self.scale == "log2_complement" else (low, high)

    def coordinate(self, value: float) -> float:
        """Return the coordinate of a value, clipped to `coordinates`.

        The coordinate is the value itself, or 1 - value for a complement.
        """
        low, high = self.coordinates
        return min(max(1 - value if self.scale == "log2_complement" else value, low), high)

    def value(self, coordinate: float) -> float:
        """Return the value at a coordinate, the inverse of `coordinate`."""
        return self._clip(1 - coordinate if self.scale == "log2_complement" else coordinate)

    def _clip(self, value: float) -> float:
        """Return the nearest value in the range, an integer if the axis has only integers."""
        low, high = self.range
        return min(max(float(round(value)) if self.is_integer else value, low), high)

    def interpolate(self, share: float) -> float:
        """Return the value at a share, in [0, 1], of the searched range."""
        if self.choices:
            return self.choices[min(int(share * len(self.choices)), len(self.choices) - 1)]
        low, high = self.coordinates
        if self.scale == "linear":
            coordinate = low + share * (high - low)
        else:
            coordinate = 2.0 ** (math.log2(low) + share * (math.log2(high) - math.log2(low)))
        # Clipped, because rounding may leave the range
        return self.value(min(max(coordinate, low), high))

    def nearest(self, value: float) -> float:
        """Return the value of this axis that is nearest to `value`."""
        if value == OFF and self.can_be_off:
            return OFF
        if self.choices:
            return min(self.choices, key=lambda choice: abs(choice - value))
        return self._clip(value)

    def octaves(self, value: float) -> float:
        """Return log2 of a value; for a complement, log2 of 1 - value."""
        return get_hyperparameter(self.name).to_log2(value)

    def round_value(self, value: float) -> float:
        """Return a value rounded to `NUM_DIGITS` digits; for a complement, 1 - value is rounded.

        Choices and integers are returned as they are.
        """
        if self.choices or self.is_integer:
            return value
        return get_hyperparameter(self.name).round_value(value, NUM_DIGITS)


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchSpace:
    """The axes of a search; `build_search_space` makes it, in the registry's order.

    Raises:
        SpecError: names every axis that is not valid.
    """

    axes: tuple[Axis, ...]

    def __post_init__(self) -> None:
        checks = Checks(self)
        for axis in self.axes:
            known = axis.name in HYPERPARAMETERS or axis.own_scale is not None
            checks.require(
                known,
                f"{axis.name} is not a hyperparameter: must be one of {', '.join(HYPERPARAMETERS)}",
            )
            if known:
                checks.require(*_check_range(axis))
        checks.raise_problems()

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the axes."""
        return tuple(axis.name for axis in self.axes)

    @property
    def switches(self) -> tuple[Axis, ...]:
        """Axes that can be off; each has an additional coordinate that says whether it is off."""
        return tuple(axis for axis in self.axes if axis.can_be_off)

    @property
    def num_coordinates(self) -> int:
        """Number of axes and switches."""
        return len(self.axes) + len(self.switches)

    def axis(self, name: str) -> Axis:
        """Return the axis with that name."""
        return next(axis for axis in self.axes if axis.name == name)

    def make_point(self, shares: Sequence[float]) -> Params:
        """Return the point at shares of the searched ranges.

        Args:
            shares: one share in [0, 1] per axis, then one per switch; a switch below 1/2 is off.
        """
        axis_shares, switch_shares = shares[: len(self.axes)], shares[len(self.axes) :]
        off = {
            axis.name
            for axis, share in zip(self.switches, switch_shares, strict=True)
            if share < 0.5
        }
        return {
            axis.name: OFF if axis.name in off else axis.interpolate(share)
            for axis, share in zip(self.axes, axis_shares, strict=True)
        }

    def nearest(self, values: Params) -> Params:
        """Return the point nearest to some values by name; an axis without a value is at its
        middle.
        """
        return {
            axis.name: axis.nearest(values[axis.name])
            if axis.name in values
            else axis.interpolate(0.5)
            for axis in self.axes
        }

    @property
    def lowest(self) -> Params:
        """The point with every axis at its lowest value."""
        return {axis.name: axis.range[0] for axis in self.axes}

    @property
    def highest(self) -> Params:
        """The point with every axis at its highest value."""
        return {axis.name: axis.range[1] for axis in self.axes}

    def round_point(self, point: Params) -> Params:
        """Return a point rounded to `NUM_DIGITS` digits, at which later stages run."""
        return {name: self.axis(name).round_value(value) for name, value in point.items()}

    def widen_axis(self, name: str, range_: Range) -> SearchSpace:
        """Return this space with another range of one axis."""
        wider = dataclasses.replace(self.axis(name), range=range_)
        return SearchSpace(axes=tuple(wider if axis.name == name else axis for axis in self.axes))


def build_search_space(
    *,
    ranges: Mapping[str, Range],
    choices: Mapping[str, Sequence[float]] | None = None,
    can_be_off: Sequence[str] = (),
    own: Sequence[Axis] = (),
) -> SearchSpace:
    """Build a space.

    Args:
        ranges: range of each axis by name, in any order.
        choices: values of each axis that has choices, by name.
        can_be_off: names of the axes that can be off.
        own: axes of hyperparameters that the user's plan declares; they come last.

    Raises:
        SpecError: see `SearchSpace`.
    """
    choices_by_name = {name: tuple(values) for name, values in (choices or {}).items()}
    range_by_name = {
        **ranges,
        **{name: (min(values), max(values)) for name, values in choices_by_name.items()},
    }
    known = [name for name in HYPERPARAMETERS if name in range_by_name]
    ordered = known + [name for name in range_by_name if name not in HYPERPARAMETERS]
    axes = (
        Axis(
            name=name,
            range=range_by_name[name],
            choices=choices_by_name.get(name, ()),
            can_be_off=name in can_be_off,
        )
        for name in ordered
    )
    return SearchSpace(axes=(*axes, *own))


def _check_range(axis: Axis) -> tuple[bool, str]:
    """Return whether an axis has a range that its scale allows, and the problem if not."""
    if axis.can_be_off and axis.name not in CAN_BE_OFF:
        return False, f"{axis.name} cannot be off: {', '.join(CAN_BE_OFF)} can"
    low, high = axis.range
    must_be_positive = axis.scale == "log2"
    # All known hyperparameters that are not searched in log2 are shares below 1
    must_be_share = axis.own_scale is None and not must_be_positive
    is_valid = (
        -math.inf < low <= high < math.inf
        and (low > 0 or not must_be_positive)
        and (not must_be_share or 0 <= low <= high < 1)
        and not (axis.is_integer and any(end != round(end) for end in axis.range))
    )
    limits = (
        "above 0"
        if must_be_positive
        else "of any size"
        if axis.own_scale
        else "at least 0 and below 1"
    )
    return is_valid, (
        f"{axis.name} = {[low, high]}: must be [low, high], two finite numbers {limits}, with "
        "low <= high"
    )
