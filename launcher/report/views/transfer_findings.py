"""Findings of the transfer tests.

Units are those of `forerun._launcher.report.views.finding`.
"""

from __future__ import annotations

from typing import Any

from pydantic import Field

from forerun._launcher.report.views.finding import Estimate, Finding, Interval, Number
from forerun._launcher.report.views.search_findings import Tie
from forerun._transfer.question import Axis, Hyperparameter


class Optimum(Finding):
    """The loss basin at one size, and its minimum."""

    size: int
    status: str
    value: Number | None
    log2_value: Number | None
    interval_log2: Interval | None
    loss_nats: Number | None
    """Loss of the fitted basin at its minimum."""
    lowest_run_nats: Number | None = None
    """Lowest loss of a run at this size."""
    num_runs: int
    num_diverged: int
    curve: list[Interval]
    """Points (log2 of the value, loss) of the fitted basin."""

    @property
    def minimum(self) -> tuple[float, Interval, float] | None:
        """The fitted minimum: log2 of the value, its interval, and the loss.

        None if no minimum was fitted.
        """
        if self.log2_value is None or self.interval_log2 is None or self.loss_nats is None:
            return None
        return self.log2_value, self.interval_log2, self.loss_nats


class Suggestion(Finding):
    """Runs at one size and value that would help to decide a verdict."""

    size: int
    log2_value: Number
    num_seeds: int
    reason: str


class NamedTest(Finding):
    """A hyperparameter over an axis."""

    axis: Axis
    hyperparameter: Hyperparameter


class BaseVerdict(NamedTest):
    """A verdict of any kind. Not every kind has an axis of its own, so `axis` has a default."""

    axis: Axis = "width"
    hyperparameter: Hyperparameter = "learning_rate"
    outcome: str
    regret_nats: Estimate | None
    margin_nats: Number | None = None
    reasons: list[str]
    transferred_value: Number | None = None
    drift_octaves_per_doubling: Estimate | None = None
    what_to_run: list[Suggestion] = Field(default_factory=list)


class Bend(Finding):
    """A bend of the line through the optima at the largest size that was run."""

    probability: Number | None
    """Probability that the line bends."""
    octaves_per_doubling: Estimate
    """Slope beyond the largest size minus the slope up to there."""


class Verdict(BaseVerdict):
    """The verdict of one test: a hyperparameter over an axis."""

    axis: Axis
    hyperparameter: Hyperparameter
    drift_octaves_per_doubling: Estimate
    bend: Bend
    offset_octaves: Estimate
    """Value used minus the optimum expected, at the target."""
    level: Number
    target_size: int
    base_size: int
    power_is_measured: bool
    transferred_value: Number | None
    transferred_log2: Number | None
    base_log2: Number | None
    cost_of_2x_off_nats: Number | None
    """Regret of a value twice or half the optimum, whichever is worse, at the largest usable
    size."""
    noise_nats: Number | None
    """Standard deviation of the loss of one run about its basin."""
    optima: list[Optimum]
    control: Verdict | None
    """Verdict of the standard parametrization."""
    notes: list[str] = Field(default_factory=list)
    dropped: list[Any] = Field(default_factory=list)
    """Rows of a table that were not used."""

    @property
    def has_optimum(self) -> bool:
        """Whether an optimum was found at any size."""
        return any(optimum.minimum for optimum in self.optima)


class JointVerdict(BaseVerdict):
    """The verdict on the learning rate over all axes at once."""

    axes: list[str]


class TransferRun(Finding):
    """A run of a transfer test."""

    arm: str
    """Parametrization of the run."""
    size: int
    log2_value: Number
    seed: int
    loss_nats: Number | None
    status: str


class TransferTest(NamedTest):
    """A test of one hyperparameter over one axis."""

    verdict: Verdict
    runs: list[TransferRun]

    def list_verdicts(self, main_arm: str) -> dict[str, Verdict]:
        """Return the verdict of every arm by the arm's name, the study's own arm first."""
        control = self.verdict.control
        return {main_arm: self.verdict} | ({"sp": control} if control else {})

    def select_runs(self, arm: str | None = None) -> list[TransferRun]:
        """Return the runs of one arm, or of all, except those that failed.

        A diverged run is kept, because its loss says something about its value.
        """
        return [run for run in self.runs if run.status != "failed" and arm in (None, run.arm)]


class TargetValue(Finding):
    """A hyperparameter at the base and at the target."""

    hyperparameter: str
    base_value: Number | str | None
    target_value: Number | str | None
    tested: list[str]
    """Axes over which it was tested."""
    untested: list[str]
    outcome: str | None
    drifts: dict[str, Estimate]
    """Drift in octaves per doubling, by tested axis."""
    regret_nats: Estimate | None
    cost_of_2x_off_nats: Number | None
    rule: str
    """Sentence on the rule that sets the value at the target."""
    carry: Any = None
    """Rule that carries a warmup over duration, with its evidence; None for other
    hyperparameters."""
    tie: Tie | None = None
    """Comparison with the conventional value."""


class Transfer(Finding):
    """The transfer tests, and the values that they give for the target."""

    tests: list[TransferTest]
    together: JointVerdict
    values: list[TargetValue]
    learning_rate: Number
    at_base_optimum: bool
    """Whether the learning rate is that of a fitted optimum at the base."""
