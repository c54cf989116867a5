"""The base class of all findings, which are the parts of a report, and the findings that several
parts share.

Losses and their differences are in nats per token. Sizes are in the unit of their axis, learning
rates and other values in the unit of the plan. Fields with `log2` in their names are in octaves. A
number that is not known is None.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from forerun._proxies.core.canon import Json

Number = int | float
"""Number of a JSON file, kept as it is written: 4 stays 4."""
Interval = tuple[Number, Number]
"""Lower and upper bound."""


class Finding(BaseModel):
    """A part of the report. Keys that are not declared are kept as they are."""

    model_config = ConfigDict(extra="allow", frozen=True)

    def to_json(self) -> dict[str, Json]:
        """Return the finding as plain JSON, with the keys that it was made from."""
        return self.model_dump(exclude_unset=True, by_alias=True)


class Estimate(Finding):
    """An estimate with its interval."""

    value: Number | None
    interval: Interval | None
    more_than: Number | None = None
    """Largest number that could be measured. A value, or an end of an interval, that equals it is
    only known to be higher. None if there is no such limit."""

    @property
    def known(self) -> tuple[float, Interval] | None:
        """Value and interval; None if they are not known."""
        return None if self.value is None or self.interval is None else (self.value, self.interval)


class LossCurve(Finding):
    """Training loss over steps."""

    steps: list[Number]
    train_loss_nats: list[Number]
    width: int | None = None
    num_steps: int = 0
    branch_step: int = 0
    """Step at which this rung begins to decay. The curve of the next longer rung begins there."""
