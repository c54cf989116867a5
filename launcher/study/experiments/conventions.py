"""Conventional values of hyperparameters, and the paired runs that compare them with searched
values.

A search of some dozen runs prefers some values by luck. Therefore a value that published trainers
use wins, unless runs with the same seeds (the same initial values and data) clearly show that it
loses. The values are compared at the end of a search, before anything else runs, so that learning
rate, verdict, and forecast are those of the frozen values. `warmup_rule` compares two rules for the
warmup in the same way. The runs asked for are a pure function of outcomes. This module does not
import torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from forerun._launcher.study.plan.study import Study
from forerun._proxies.core.hyperparameters import HYPERPARAMETERS
from forerun._proxies.core.notation import format_counted, format_interval, format_nats
from forerun._proxies.core.spec import RunResult, RunSpec
from forerun._sweeps.search.space import Params, SearchSpace
from forerun._transfer.question import Hyperparameter

if TYPE_CHECKING:
    from forerun._launcher.study.plan.plan import Plan

Basis = Literal["same", "margin", "noise", "undetermined", "searched"]
"""Reason for the value that is used. The convention is used if both values give the same run
(same), if it loses less than the margin (margin), if it loses no more than the noise of one run
(noise), or if the runs do not decide (undetermined). Otherwise, the searched value is used
(searched).
"""
NUM_SCOUT_SEEDS = 2
"""Number of seeds that choose the better of two learning rates; the other seeds run only at that
rate.
"""
LOWER_RATE_OCTAVES = -1.0
"""Offset of a second learning rate, in octaves. Values that tolerate only lower rates, such as a
shorter warmup, are tried at this rate too.
"""
_CONVENTIONS = {
    name: hyperparameter.convention
    for name, hyperparameter in HYPERPARAMETERS.items()
    if hyperparameter.convention is not None
}
CONVENTIONAL: tuple[Hyperparameter, ...] = tuple(
    sorted(_CONVENTIONS, key=lambda name: _CONVENTIONS[name].needs_lower_rate)
)
"""Hyperparameters with a convention, in the order in which each is decided alone. The values that
may need a lower learning rate are the last.
"""


def get_convention(plan: Plan, name: Hyperparameter) -> tuple[float, str]:
    """Return the conventional value at the base, and its source."""
    return _CONVENTIONS[name].compute_value(plan.proxy.num_steps), _CONVENTIONS[name].source


def choose_rate_offsets(
    values: Mapping[str, float], best: Mapping[str, float]
) -> tuple[float, ...]:
    """Return the learning rates at which conventional values are tried, as offsets in octaves from
    the rate of the search's best point.

    Args:
        values: Conventional values that replace the searched ones.
        best: Best point of the search.
    """
    tolerates_less = any(
        _CONVENTIONS[name].needs_lower_rate and value < best[name] for name, value in values.items()
    )
    return (0.0, LOWER_RATE_OCTAVES) if tolerates_less else (0.0,)


# ---- One comparison ----


@dataclass(frozen=True, kw_only=True, slots=True)
class ConventionFinding:
    """Result of the paired runs for a convention."""

    basis: Basis
    loses_nats: tuple[float, float, float] | None = None
    """Mean loss of the conventional value minus that of the searched one, in nats: estimate, lower
    and upper end of its interval; None if unknown.
    """
    noise_nats: float | None = None
    """Standard deviation of one run's loss in nats, without the part that the seed explains."""
    octaves: float = 0.0
    """Learning rate of the convention relative to that of the searched value, in octaves."""
    num_seeds: int = 0
    num_diverged: int = 0
    """Number of runs of the convention that diverged."""

    @property
    def conventional(self) -> bool:
        """Whether the convention is used."""
        return self.basis != "searched"


def compare_with_convention(
    study: Study,
    searched: Callable[[int], RunSpec],
    conventional: Callable[[float, int], RunSpec],
    offsets: Sequence[float],
    num_seeds: int,
    results: Mapping[str, RunResult],
) -> tuple[tuple[RunSpec, ...], ConventionFinding | None]:
    """Compare a searched value with a convention, seed by seed, at the study's margin and level.

    Args:
        study: Study of the runs.
        searched: Returns the searched value's run with a seed, 0 ... num_seeds - 1.
        conventional: Returns the convention's run with a learning rate and a seed. The rate is
            given as an offset in octaves from the searched value's rate.
        offsets: Offsets to choose from, in octaves. If there are several, the first
            `NUM_SCOUT_SEEDS` seeds run at each offset, and choose one for the other seeds.
        num_seeds: Number of seeds of each value, 2 or more.
        results: Results so far, by run id.

    Returns:
        The runs that are asked for, as far as outcomes tell, and the finding once all have ended.
    """
    num_scouts = NUM_SCOUT_SEEDS if len(offsets) > 1 else num_seeds
    # Each run has a number: 0 for the searched value, and 1, 2, ... for the convention's offsets.
    runs = [(0, seed, searched(seed)) for seed in range(num_seeds)]
    runs += [
        (number, seed, conventional(octaves, seed))
        for number, octaves in enumerate(offsets, start=1)
        for seed in range(num_scouts)
    ]
    if any(spec.id not in results for number, _, spec in runs if number):
        return tuple(spec for _, _, spec in runs), None

    def rank(index: int) -> tuple[int, float]:
        losses = [results[spec.id].loss_nats for number, _, spec in runs if number == index]
        return losses.count(None), sum(loss for loss in losses if loss is not None)

    best = min(range(1, 1 + len(offsets)), key=rank)  # the first of equally good offsets
    octaves = offsets[best - 1]
    runs += [(best, seed, conventional(octaves, seed)) for seed in range(num_scouts, num_seeds)]
    specs = tuple(spec for _, _, spec in runs)
    if any(spec.id not in results for spec in specs):
        return specs, None
    outcomes = [(number, seed, results[spec.id]) for number, seed, spec in runs]
    return specs, _judge(study, outcomes, best, octaves)


def _judge(
    study: Study, outcomes: Sequence[tuple[int, int, RunResult]], best: int, octaves: float
) -> ConventionFinding:
    """Return the finding of a comparison.

    Args:
        study: Study of the runs.
        outcomes: Number, seed, and result of every run. Number 0 is the searched value, and the
            other numbers are offsets of the convention. All runs contribute to the noise.
        best: Number of the offset at which the convention is judged.
        octaves: That offset in octaves.
    """
    from forerun._sweeps.search.repeats import compute_difference

    margin_nats, level = study.plan.transfer.margin_nats, study.plan.transfer.level
    num_diverged = Counter(number for number, _, run in outcomes if run.status == "diverged")
    table = [
        (number, seed, run.loss_nats) for number, seed, run in outcomes if run.loss_nats is not None
    ]
    is_finite = not num_diverged[0] and not num_diverged[best]
    excess = compute_difference(table, 0, best, level) if is_finite else None
    basis: Basis = "undetermined"
    if num_diverged[best] > num_diverged[0]:
        basis = "searched"
    elif excess is not None and excess.high < margin_nats:
        basis = "margin"
    elif excess is not None and excess.low > 0:
        basis = "searched"
    elif excess is not None and excess.value <= excess.noise:
        basis = "noise"
    return ConventionFinding(
        basis=basis,
        loses_nats=None if excess is None else (excess.value, excess.low, excess.high),
        noise_nats=None if excess is None else excess.noise,
        octaves=octaves,
        num_seeds=sum(number == 0 for number, _, _ in outcomes),
        num_diverged=num_diverged[best],
    )


def count_contest_runs(num_offsets: int, num_seeds: int) -> int:
    """Return the number of runs of one comparison (`compare_with_convention`) that tries the
    convention at `num_offsets` learning rates.
    """
    return 2 * num_seeds + NUM_SCOUT_SEEDS * (num_offsets - 1)


def describe_finding(finding: ConventionFinding, margin_nats: float, rival: str) -> str:
    """Describe the result of the convention against its rival, as the predicate of a sentence."""
    seeds = format_counted(finding.num_seeds, "seed")
    if finding.basis == "same":
        return f"is {rival} too"
    if finding.loses_nats is not None and finding.noise_nats is not None:
        value, low, high = finding.loses_nats
        noise = f"{finding.noise_nats:.4f}"
        reasons = {
            "margin": f"less than the margin of {margin_nats:g}",
            "noise": f"no more than the noise of one run, {noise}",
            "undetermined": f"which does not decide (noise of one run: {noise}); more seeds would",
            "searched": "more than the noise of one run, and not surely less than the margin of "
            f"{margin_nats:g}",
        }
        return (
            f"loses {format_nats(value)} {format_interval((low, high), '.4f')} nats to {rival} "
            f"over {seeds}, {reasons[finding.basis]}"
        )
    if finding.basis == "searched":
        return f"diverged with {finding.num_diverged} of {seeds}, and {rival} with fewer"
    return f"could not be compared with {rival}: too few runs finished"


# ---- The decisions at the end of a search ----


@dataclass(frozen=True, kw_only=True, slots=True)
class ConventionDecision:
    """One hyperparameter's value at the end of a search: the searched or the conventional one."""

    hyperparameter: Hyperparameter
    searched: float
    """Searched value, rounded to three digits as later stages run it."""
    conventional: float
    source: str
    """Source of the conventional value."""
    tried_with: tuple[Hyperparameter, ...]
    """Hyperparameters that had their conventional values in these runs."""
    finding: ConventionFinding

    @property
    def value(self) -> float:
        """Value that is used."""
        return self.conventional if self.finding.conventional else self.searched

    def describe(self, margin_nats: float) -> str:
        """Return the value that is used, its source, and the evidence."""
        is_same = self.finding.basis == "same"
        rival = "the searched value" if is_same else f"the searched {self.searched:.3g}"
        evidence = describe_finding(self.finding, margin_nats, rival)
        labels = [
            HYPERPARAMETERS[name].label for name in self.tried_with if name != self.hyperparameter
        ]
        if labels and not is_same:
            evidence += f"; run with the conventional {' and '.join(labels)}"
        if self.finding.octaves:
            evidence += f", at {2.0**self.finding.octaves:g} times the rate"
        origin = "conventional" if self.finding.conventional else "searched"
        return (
            f"{self.value:.3g} used ({origin}). At the base, the conventional "
            f"{self.conventional:.3g} ({self.source}) {evidence}"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ConventionDecisions:
    """Decisions as far as outcomes tell, and the runs that they need."""

    ties: tuple[ConventionDecision, ...]
    specs: tuple[RunSpec, ...]
    """Runs of all comparisons; repeats of the best trial among them may have run already."""
    point: Params | None
    """Point that is used; None before everything has been decided."""


def decide_conventions(
    study: Study, space: SearchSpace, best: Params, results: Mapping[str, RunResult]
) -> ConventionDecisions:
    """Decide between the best trial's values and conventional ones.

    All conventions are tried together first. If they lose together, each is tried alone, in
    addition to the conventions that were accepted before it.

    Args:
        study: Study of the search.
        space: Search space at the end of the search.
        best: Point of the best trial.
        results: Results so far, by run id.
    """
    values = {name: get_convention(study.plan, name)[0] for name in _list_comparable(study, space)}
    best_id, rate = study.get_trial_id(best), best["learning_rate"]
    same = [name for name in values if study.get_trial_id({**best, name: values[name]}) == best_id]
    undecided = [name for name in values if name not in same]
    ties = [_make_tie(study, best, name, ConventionFinding(basis="same"), [name]) for name in same]
    point: Params = {**best, **{name: values[name] for name in same}}
    specs: dict[str, RunSpec] = {}
    accepted: list[Hyperparameter] = []
    rounds = [undecided] if undecided else []
    while rounds:
        names = rounds.pop(0)
        tried = {name: values[name] for name in (*same, *accepted, *names)}
        needed, finding = _compare(study, best, tried, results)
        specs.update((spec.id, spec) for spec in needed)
        if finding is None:
            return ConventionDecisions(ties=tuple(ties), specs=tuple(specs.values()), point=None)
        if len(names) > 1 and not finding.conventional:
            # All conventions together lose: try each one alone.
            rounds = [[name] for name in undecided]
            continue
        ties += [_make_tie(study, best, name, finding, [*accepted, *names]) for name in names]
        if finding.conventional:
            accepted += names
            point = {**best, **tried, "learning_rate": rate * 2.0**finding.octaves}
    return ConventionDecisions(ties=tuple(ties), specs=tuple(specs.values()), point=point)


def _compare(
    study: Study, best: Params, values: Params, results: Mapping[str, RunResult]
) -> tuple[tuple[RunSpec, ...], ConventionFinding | None]:
    """Compare the best trial's point with the same point at these values."""

    # Seed 0 of `build_trial` is the trial's own, which chose the point and would favor it.
    def run_conventional(octaves: float, seed: int) -> RunSpec:
        rate = best["learning_rate"] * 2.0**octaves
        return study.build_trial({**best, **values, "learning_rate": rate}, seed + 1)

    offsets, num_seeds = choose_rate_offsets(values, best), study.plan.search.tie_seeds
    return compare_with_convention(
        study,
        lambda seed: study.build_trial(best, seed + 1),
        run_conventional,
        offsets,
        num_seeds,
        results,
    )


def _list_comparable(study: Study, space: SearchSpace) -> list[Hyperparameter]:
    """Return the searched hyperparameters whose conventional value lies in the search space. There
    are none if the plan has no seeds for comparisons (`search.tie_seeds`).
    """
    names = []
    for name in CONVENTIONAL if study.plan.search.tie_seeds else ():
        if name in space.names:
            axis, value = space.axis(name), get_convention(study.plan, name)[0]
            low, high = axis.range
            inside = value in axis.choices if axis.choices else low <= value <= high
            if inside and (axis.can_be_off or not axis.is_fixed):
                names.append(name)
    return names


def _make_tie(
    study: Study,
    best: Params,
    name: Hyperparameter,
    finding: ConventionFinding,
    together: Sequence[Hyperparameter],
) -> ConventionDecision:
    value, source = get_convention(study.plan, name)
    return ConventionDecision(
        hyperparameter=name,
        searched=study.space.axis(name).round_value(best[name]),
        conventional=value,
        source=source,
        tried_with=tuple(together),
        finding=finding,
    )


def count_tie_runs(study: Study) -> tuple[int, int]:
    """Return the number of runs of the comparisons, before any outcome is known.

    Returns:
        The number of runs that compare all conventions at once, and the number if each convention
        is then compared alone too.
    """
    num_seeds = study.plan.search.tie_seeds
    # A conventional value below the searched one may need more offsets than one above it.
    num_offsets = [
        len(choose_rate_offsets({name: 0.0}, {name: 1.0}))
        for name in _list_comparable(study, study.space)
    ]
    if not num_offsets:
        return 0, 0
    together = count_contest_runs(max(num_offsets), num_seeds)
    # The searched value's runs are the same in every comparison, so they are counted once.
    singles = sum(count_contest_runs(number, num_seeds) - num_seeds for number in num_offsets)
    return together, together + (singles if len(num_offsets) > 1 else 0)
