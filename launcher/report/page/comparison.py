"""The comparison of two reports as pydantic models. `compare.json` is `Comparison` as JSON."""

from __future__ import annotations

from typing import Any, Literal

from forerun._launcher.report.views.finding import Estimate, Finding, Interval, Number
from forerun._launcher.report.views.fit_findings import Prediction
from forerun._launcher.report.views.transfer_findings import NamedTest


class Difference(Finding):
    """An estimate of the second study minus that of the first. A field is None if unknown."""

    value: Number | None = None
    interval: Interval | None = None
    apart: bool | None = None
    """Whether the interval excludes zero."""


class Sides(Finding):
    """A value of the first study, `a`, and of the second, `b`; None if a study lacks it."""

    a: Any
    b: Any


class KeySides(Sides):
    """A key of the plan or of the chosen run, with the value of each study."""

    key: str


class EstimateSides(Finding):
    """An estimate of each study, and their difference; None if the two are not comparable."""

    a: Estimate | None
    b: Estimate | None
    difference: Difference | None


class OptimumSides(Finding):
    """The optimum of each study at one size."""

    size: int
    a: Any
    """Keys of the optimum of the first study as JSON; None if the study did not run the size."""
    b: Any
    difference_octaves: Difference | None


class TestSides(NamedTest):
    """A transfer test that either study made."""

    outcome: Sides
    target_size: Sides
    level: Sides
    regret_nats: EstimateSides
    drift_octaves_per_doubling: EstimateSides
    optima: list[OptimumSides]


class ForecastSides(Finding):
    """The forecast of each study's main run."""

    a: Prediction | None
    b: Prediction | None
    difference_nats: Difference | None


class Limit(Finding):
    """Whether results of one kind can be compared, with the reasons why not."""

    comparable: Literal["yes", "with_care", "no"]
    reasons: list[str]


class Comparison(Finding):
    """The content of `compare.json`. A section that a study lacks is None on its side."""

    schema_version: int = 1
    studies: dict[str, dict[str, Any]]
    same_study: bool
    comparable: dict[str, Limit]
    """Limits on comparing `losses`, `values` (of hyperparameters) and `forecasts`."""
    question: list[KeySides]
    """Keys of the plans that differ."""
    tests: list[TestSides]
    choice: list[KeySides]
    forecast: ForecastSides | None
    summary: list[str]
    """Sentences on the differences, the most important first."""
