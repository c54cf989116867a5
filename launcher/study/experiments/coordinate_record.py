"""The coordinate checks as the ledger records them, with the verdict on every layer."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict

if TYPE_CHECKING:
    from forerun._sweeps.store.ledger import Ledger

COORDINATES = "coordinates"
"""Kind of the ledger's records of coordinate checks."""
_OUTCOMES = ("blows_up", "vanishes", "cannot_tell", "passes")
"""Outcomes of a layer or of a check, the worst first."""
_MAX_LAYERS_NAMED = 4
"""Maximum number of layers that are named in a sentence; the table lists all."""


class RecordedLayer(BaseModel):
    """The verdict on one layer (`forerun._proxies.coordinates.verdict.LayerVerdict`).

    Extra fields are kept, because versions of forerun record different fields.
    """

    model_config = ConfigDict(extra="allow", frozen=True)

    layer: str
    role: str
    change: tuple[float, ...] = ()
    """Mean absolute change of the output at each size."""
    slope: float
    """Slope of log2 of that change against log2 of the size."""
    interval: tuple[float, float]
    """Interval of the slope."""
    expected: tuple[float, float]
    """Smallest and largest slope in a correct parametrization."""
    outcome: str
    cause: str

    @property
    def has_rate(self) -> bool:
        """Whether the size of the first update was judged; the first version of the check did
        not judge it.
        """
        return "rate" in (self.model_extra or {})

    @property
    def badness(self) -> tuple[int, float]:
        """Sort key: outcomes worst first, then slopes farthest from the expected range first."""
        low, high = self.expected
        excess = max(low - self.slope, self.slope - high, 0.0)
        return _OUTCOMES.index(self.outcome), -excess


_BADNESS = operator.attrgetter("badness")


class RecordedCheck(BaseModel):
    """One check (`forerun._proxies.coordinates.coordinate_check.CoordinateCheck`). Extra fields are
    kept.
    """

    model_config = ConfigDict(extra="allow", frozen=True)

    axis: str
    """Dimension that grows: `width` or `depth`."""
    widths: tuple[int, ...]
    depths: tuple[int, ...]
    level: float
    layers: tuple[RecordedLayer, ...]
    not_finite_width: int | None
    not_finite_depth: int | None
    not_finite_step: int | None
    """First optimizer step that was not finite, counted from 1; None if all were."""
    mistakes: tuple[str, ...]
    notes: tuple[str, ...]
    outcome: str

    @property
    def sizes(self) -> tuple[int, ...]:
        """Widths or depths that the check compared."""
        return self.depths if self.axis == "depth" else self.widths

    def group_by_role(self) -> list[tuple[str, list[RecordedLayer]]]:
        """Return each role with its layers, worst first; roles are in the order of their first
        calls.
        """
        roles: dict[str, list[RecordedLayer]] = {}
        for layer in self.layers:
            roles.setdefault(layer.role, []).append(layer)
        return [(role, sorted(layers, key=_BADNESS)) for role, layers in roles.items()]

    def describe_problems(self) -> list[str]:
        """Return the reasons why the check does not pass, as sentences; empty if it passes."""
        notes = list(self.mistakes)
        if not notes and self.not_finite_step is not None:
            size = self.not_finite_depth if self.axis == "depth" else self.not_finite_width
            notes.append(f"{self.axis} {size} became non-finite at step {self.not_finite_step}")
        flagged = [layer for layer in self.layers if layer.outcome != "passes"]
        flagged.sort(key=_BADNESS)
        for layer in flagged[:_MAX_LAYERS_NAMED] if not self.mistakes else ():
            cause = f": {layer.cause}" if layer.cause else ""
            notes.append(
                f"{layer.layer} {layer.outcome.replace('_', ' ')} (slope {layer.slope:+.2f}){cause}"
            )
        if len(flagged) > _MAX_LAYERS_NAMED or (flagged and self.mistakes):
            notes.append(f"layers that do not pass: {len(flagged)} of {len(self.layers)}")
        return notes


def read_coordinate_checks(ledger: Ledger) -> dict[str, RecordedCheck]:
    """Return the checks of a study's plan by name: the name of its parametrization, `sp` for the
    control, or `depth` for the check over depth.
    """
    return {
        name: RecordedCheck.model_validate(record)
        for name, record in ledger.read_records_for_plan(COORDINATES).items()
    }
