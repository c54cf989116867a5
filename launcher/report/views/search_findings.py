"""Findings of the search.

Units are those of `forerun._launcher.report.views.finding`.
"""

from __future__ import annotations

from typing import Any

from pydantic import Field

from forerun._launcher.report.views.finding import Finding, Interval, Number


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
    words: dict[str, list[str]] = Field(default_factory=dict)
    """Words of each categorical axis, which trials give by index."""
    growth: list[Any]
    """Records of the extensions of ranges."""
    open_edges: list[OpenEdge]
    stopped: list[str]
    """Sentences on ends of ranges that could not be extended, each with the reason."""
    replicates: Replicates | None
    ties: list[Tie] = Field(default_factory=list)
    replays: Any = None
    """Records of replays (`forerun._launcher.study.stages.winner_reruns`), as JSON."""
