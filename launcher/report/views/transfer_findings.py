"""Findings of the search and of the transfer tests, and the base class of all findings of a report.

Losses and their differences are in nats per token. Sizes are in the unit of their axis, learning
rates and other values in the unit of the plan. Fields with `log2` in their names are in octaves. A
number that is not known is None.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict

from forerun._proxies.core.canon import Json
from forerun._transfer.question import Axis, Hyperparameter

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


# ---- Search ----


class Trial(Finding):
    """A trial of the search. Its hyperparameters are keys of the trial itself."""

    index: int
    loss_nats: Number | None
    status: str
    num_steps: int = 0

    def get_value(self, name: str) -> Number | None:
        """Return the trial's value of a hyperparameter; None if it was not searched."""
        return (self.model_extra or {}).get(name)


class OpenEdge(Finding):
    """An end of a range at which the best trials lie."""

    axis: str
    side: str
    range: Interval
    wider: Interval | None = None
    """Range with that end moved."""


class Standing(Finding):
    """The repeats of one of the best trials with other seeds."""

    trial: int
    num_repeats: int
    num_diverged: int
    mean_nats: Number | None
    standard_error_nats: Number | None


class Replicates(Finding):
    """The best trials repeated with other seeds, best first."""

    num_runs: int
    paired: bool
    """Whether trials are compared seed by seed."""
    lead_nats: Number | None
    """Loss of the second trial minus loss of the first."""
    lead_standard_error_nats: Number | None
    standings: list[Standing]


class Tie(Finding):
    """A conventional value compared with the searched one."""

    hyperparameter: str
    searched: Any
    """Best value of the search: a number, or the word of a categorical axis."""
    words: str
    """Sentence on the comparison."""


class Search(Finding):
    """The search at the base size."""

    trials: list[Trial]
    best: dict[str, Any]
    """Best values by hyperparameter."""
    best_trial: int
    sampler: str
    pruner: str = "none"
    ranges: dict[str, list[Any]]
    """Range or choices of each hyperparameter."""
    can_be_off: list[str]
    words: dict[str, list[str]] = {}
    """Words of each categorical axis, which trials give by index."""
    growth: list[Any]
    """Records of the extensions of ranges."""
    open_edges: list[OpenEdge]
    stopped: list[str]
    """Sentences on ends of ranges that could not be extended, each with the reason."""
    replicates: Replicates | None
    ties: list[Tie] = []
    replays: Any = None
    """Records of replays (`forerun._launcher.study.stages.winner_reruns`), as JSON."""


# ---- Transfer ----


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
    what_to_run: list[Suggestion] = []


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
    notes: list[str] = []
    dropped: list[Any] = []
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
