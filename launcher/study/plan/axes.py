"""Axes that a plan declares for values of the user's own code. They are searched and transferred
like any other hyperparameter.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from forerun._launcher.study.plan.keys import ONCE, RISING, Section
from forerun._proxies.core.hyperparameters import Scale, UserValue
from forerun._proxies.core.powers import Powers
from forerun._sweeps.search.space import Axis

Power = Annotated[float, Field(ge=-4, le=4)]
_SCALES: dict[str, Scale] = {
    "log": "log2",
    "linear": "linear",
    "integer": "linear",
    "categorical": "linear",
}


class UserAxis(Section):
    """An axis of the user's own code: the values that are searched, their scale, and the growth of
    the value from the base to other sizes.
    """

    range: Annotated[tuple[float, float], RISING] | None = None
    """Lowest and highest value."""
    values: Annotated[tuple[float | str, ...], ONCE] = ()
    """The values of a categorical axis."""
    scale: Literal["log", "linear", "integer", "categorical"] = "log"
    """Scale on which the values are searched."""
    width: Power = 0.0
    """Exponent for width: the value is multiplied by (width / base width)^exponent."""
    depth: Power = 0.0
    """Exponent for depth, the number of layers."""
    batch: Power = 0.0
    """Exponent for batch, the tokens per step."""
    duration: Power = 0.0
    """Exponent for duration, the training tokens."""

    @model_validator(mode="after")
    def _check_axis(self) -> UserAxis:
        problem = self._find_problem()
        if problem:
            raise PydanticCustomError("refused", problem)
        return self

    def _find_problem(self) -> str:
        if self.scale == "categorical":
            if self.range is not None or len(self.values) < 2:
                return "must have values, at least two, and no range: its scale is categorical"
            if self.powers != Powers() and self.word_values:
                return "must not grow: its values are words"
            return ""
        if self.values or self.range is None:
            return 'must have a range, or values with scale = "categorical"'
        if self.scale == "log" and self.range[0] <= 0:
            return 'must be above 0 on a log scale (scale = "linear" takes any)'
        if self.scale == "integer" and any(end != round(end) for end in self.range):
            return "must be whole at both ends: its scale is integer"
        return ""

    @property
    def word_values(self) -> tuple[str, ...]:
        """Values of the axis if they are words, else empty. A point of the search then holds the
        index of a word.
        """
        return (
            tuple(map(str, self.values))
            if any(isinstance(value, str) for value in self.values)
            else ()
        )

    @property
    def powers(self) -> Powers:
        """Powers by which the value grows from the base."""
        return Powers(width=self.width, depth=self.depth, batch=self.batch, duration=self.duration)

    @property
    def is_testable(self) -> bool:
        """Whether the transfer of the optimum can be tested. The tests change a value by factors of
        two, so it must be a positive number.
        """
        return self.scale == "log" or (
            self.scale != "categorical" and self.range is not None and self.range[0] > 0
        )

    def to_search_axis(self, name: str) -> Axis:
        """Return the axis of the search."""
        choices: tuple[float, ...] = ()
        if self.values:
            choices = tuple(
                i if self.word_values else float(value) for i, value in enumerate(self.values)
            )
        low, high = self.range or (min(choices), max(choices))
        return Axis(
            name=name,
            range=(low, high),
            choices=choices,
            own_scale=_SCALES[self.scale],
            is_integer=self.scale == "integer",
        )

    def get_value(self, name: str, point: float | None) -> UserValue:
        """Return the value that a run gets; the middle of the range if the point has none."""
        axis = self.to_search_axis(name)
        number = (
            axis.interpolate(0.5)
            if point is None
            else float(round(point))
            if axis.is_integer
            else point
        )
        word = self.word_values[int(number)] if self.word_values else ""
        return UserValue(
            name=name, value=number, whole=axis.is_integer, word=word, powers=self.powers
        )
