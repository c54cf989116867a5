"""Axes that a plan declares for values of the user's own code. They are searched and transferred
like any other hyperparameter.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from launcher.plan.keys import ONCE, RISING, Section
from proxies.core.hyperparameters import OwnValue, Scale
from proxies.core.powers import Powers
from sweeps.search.space import Axis

Power = Annotated[float, Field(ge=-4, le=4)]
_SCALES: dict[str, Scale] = {
    "log": "log2",
    "linear": "linear",
    "integer": "linear",
    "categorical": "linear",
}


class OwnAxis(Section):
    """An axis of the user's own code: what is searched, on which scale, and how the value grows
    from the base.
    """

    range: Annotated[tuple[float, float], RISING] | None = Field(
        None, description="Lowest and highest value."
    )
    values: Annotated[tuple[float | str, ...], ONCE] = Field(
        (), description="The values of a categorical axis."
    )
    scale: Literal["log", "linear", "integer", "categorical"] = Field(
        "log", description="How it is searched."
    )
    width: Power = Field(
        0.0, description="The value grows with the width over the base's to this power."
    )
    depth: Power = Field(0.0, description="With the number of layers over the base's.")
    batch: Power = Field(0.0, description="With the tokens per step over the base's.")
    duration: Power = Field(0.0, description="With the tokens in all over the base's.")

    @model_validator(mode="after")
    def _check_axis(self) -> OwnAxis:
        problem = self._find_problem()
        if problem:
            raise PydanticCustomError("refused", problem)
        return self

    def _find_problem(self) -> str:
        if self.scale == "categorical":
            if self.range is not None or len(self.values) < 2:
                return "must have values, at least two, and no range: its scale is categorical"
            if self.powers != Powers() and self.words:
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
    def words(self) -> tuple[str, ...]:
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
    def tested(self) -> bool:
        """Whether the transfer of the optimum can be tested, which needs octaves."""
        return self.scale == "log" or (
            self.scale != "categorical" and self.range is not None and self.range[0] > 0
        )

    def searched(self, name: str) -> Axis:
        """Return the axis of the search."""
        choices: tuple[float, ...] = ()
        if self.values:
            choices = tuple(
                i if self.words else float(value) for i, value in enumerate(self.values)
            )
        low, high = self.range or (min(choices), max(choices))
        return Axis(
            name=name,
            range=(low, high),
            choices=choices,
            own_scale=_SCALES[self.scale],
            whole=self.scale == "integer",
        )

    def value(self, name: str, point: float | None) -> OwnValue:
        """Return the value that a run gets; the middle of the range if the point has none."""
        axis = self.searched(name)
        number = axis.at(0.5) if point is None else float(round(point)) if axis.whole else point
        word = self.words[int(number)] if self.words else ""
        return OwnValue(name=name, value=number, whole=axis.whole, word=word, powers=self.powers)
