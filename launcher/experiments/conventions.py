"""Conventional values of hyperparameters, and the paired runs that compare them with searched
values. No torch.

A search of some dozen runs prefers some values by luck. Therefore a value that published trainers
use wins, unless runs with the same seeds (the same initial values and data) clearly show that it
loses. This comparison is made at the end of a search, before anything else runs, so that learning
rate, verdict, and forecast are those of the frozen values. It is made again for the rule that
carries a warmup set at the base over duration. The runs asked for are a pure function of outcomes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, cast

from launcher.plan.study import Study, base_duration
from proxies.core import canon
from proxies.core.canon import Json
from proxies.core.hyperparameters import HYPERPARAMETERS, WARMUP, warmup_of, with_warmup
from proxies.core.notation import counted, format_interval, format_nats, format_percent
from proxies.core.spec import RunResult, RunSpec
from sweeps.search.space import Params, SearchSpace
from transfer.question import Hyperparameter

if TYPE_CHECKING:
    from launcher.plan.plan import Plan

    RunAt = Callable[[int, Params, int], RunSpec]
    """A run of the base's settings but for its tokens, at a point, with a seed."""

Basis = Literal["same", "margin", "noise", "undetermined", "searched"]
"""Reason for the value that is used: both values are the same run; the convention loses less than
the margin; it loses no more than one run's noise; too few runs can tell; or the searched value is
clearly better.
"""

SCOUTS = 2
"""Number of seeds that choose the better of two learning rates; the other seeds run only at that
rate.
"""
LOWER_RATE = -1.0
"""Offset in octaves of the second learning rate at which a value is tried that tolerates only lower
rates, such as a shorter warmup.
"""

_OPEN = [one for one in HYPERPARAMETERS.values() if one.convention is not None]
CONVENTIONAL: tuple[Hyperparameter, ...] = tuple(
    one.name
    for one in sorted(
        _OPEN, key=lambda one: one.convention is not None and one.convention.bears_less
    )
)
"""Hyperparameters with a convention, in the order in which single ones are decided: last those on
which the learning rate depends.
"""


def convention(plan: Plan, name: Hyperparameter) -> tuple[float, str]:
    """Return the conventional value at the base, and its source."""
    found = HYPERPARAMETERS[name].convention
    assert found is not None, name
    return found.at(plan.proxy.num_steps), found.source


def rate_offsets(values: Mapping[str, float], best: Mapping[str, float]) -> tuple[float, ...]:
    """Return the offsets of the learning rate, in octaves, at which conventional values are tried
    in place of a search's best.
    """
    for name, value in values.items():
        found = HYPERPARAMETERS[name].convention
        if found is not None and found.bears_less and value < best[name]:
            return 0.0, LOWER_RATE
    return (0.0,)


@dataclass(frozen=True, kw_only=True, slots=True)
class ConventionFinding:
    """Result of the paired runs for a convention."""

    basis: Basis
    loses_nats: tuple[float, float, float] | None
    """Mean loss of the conventional value minus that of the searched one, in nats: estimate, lower
    and upper end of its interval; None if unknown.
    """
    noise_nats: float | None
    """Standard deviation of one run's loss in nats, without the part that its seed explains if
    seeds are paired.
    """
    octaves: float
    """Learning rate of the convention relative to that of the searched value, in octaves."""
    num_seeds: int
    num_diverged: int = 0
    """Number of runs of the convention that diverged."""

    @property
    def conventional(self) -> bool:
        """Whether the convention is used."""
        return self.basis != "searched"


def contest(
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
        conventional: Returns the convention's run with a learning rate so many octaves above the
            searched value's, and a seed.
        offsets: Offsets in octaves to choose from, by the first `SCOUTS` seeds if there are
            several.
        num_seeds: Seeds of each value, 2 or more.
        results: Results so far, by run id.

    Returns:
        The runs that are asked for, as far as outcomes tell, and the finding once all have ended.
    """
    scouts = SCOUTS if len(offsets) > 1 else num_seeds
    runs = {(0, seed): searched(seed) for seed in range(num_seeds)}
    runs |= {
        (1 + i, seed): conventional(octaves, seed)
        for i, octaves in enumerate(offsets)
        for seed in range(scouts)
    }
    if any(spec.id not in results for (which, _), spec in runs.items() if which):
        return tuple(runs.values()), None

    def lost(i: int) -> tuple[int, float]:
        losses = [results[runs[1 + i, seed].id].loss_nats for seed in range(scouts)]
        return losses.count(None), sum(loss for loss in losses if loss is not None)

    best = min(range(len(offsets)), key=lost)  # of equals, the first
    runs |= {
        (1 + best, seed): conventional(offsets[best], seed) for seed in range(scouts, num_seeds)
    }
    specs = tuple(runs.values())
    if any(spec.id not in results for spec in specs):
        return specs, None
    outcomes = {key: results[spec.id] for key, spec in runs.items()}
    return specs, _found(study, outcomes, 1 + best, offsets[best], num_seeds)


def _found(
    study: Study,
    outcomes: Mapping[tuple[int, int], RunResult],
    which: int,
    octaves: float,
    num_seeds: int,
) -> ConventionFinding:
    """Return the finding from the runs of the searched value (index 0) and of the convention (index
    `which`). All runs contribute to the noise.
    """
    from sweeps.search.replicates import difference

    margin_nats, level = study.plan.transfer.margin_nats, study.plan.transfer.level
    diverged = [
        sum(o.status == "diverged" for (n, _), o in outcomes.items() if n == of)
        for of in (0, which)
    ]
    rows = [(number, seed, result.loss_nats) for (number, seed), result in outcomes.items()]
    told = (
        None
        if any(diverged)
        else difference([(n, k, x) for n, k, x in rows if x is not None], 0, which, level)
    )
    basis: Basis = "undetermined"
    if diverged[1] > diverged[0]:
        basis = "searched"
    elif told is not None and told.high < margin_nats:
        basis = "margin"
    elif told is not None and told.low > 0:
        basis = "searched"
    elif told is not None and told.value <= told.noise:
        basis = "noise"
    return ConventionFinding(
        basis=basis,
        loses_nats=None if told is None else (told.value, told.low, told.high),
        noise_nats=None if told is None else told.noise,
        octaves=octaves,
        num_seeds=num_seeds,
        num_diverged=diverged[1],
    )


def num_runs(num_offsets: int, num_seeds: int) -> int:
    """Return the number of runs of a contest."""
    scouts = SCOUTS * num_offsets + num_seeds - SCOUTS if num_offsets > 1 else num_seeds
    return num_seeds + scouts


def describe_finding(finding: ConventionFinding, margin_nats: float, rival: str) -> str:
    """Describe the result of the convention against its rival, as the predicate of a sentence."""
    if finding.basis == "same":
        return f"is {rival} too"
    if finding.loses_nats is not None and finding.noise_nats is not None:
        value, low, high = finding.loses_nats
        noise = f"{finding.noise_nats:.4f}"
        reasons = {
            "margin": f"less than the margin of {margin_nats:g}",
            "noise": f"no more than the noise of one run, {noise}",
            "undetermined": f"which does not decide (noise of one run: {noise}); more seeds would",
            "searched": (
                "more than the noise of one run, and not surely less than the margin of "
                f"{margin_nats:g}"
            ),
        }
        return (
            f"loses {format_nats(value)} {format_interval((low, high), '.4f')} nats to {rival} "
            "over "
            f"{counted(finding.num_seeds, 'seed')}, {reasons[finding.basis]}"
        )
    if finding.basis == "searched":
        return (
            f"diverged with {finding.num_diverged} of {counted(finding.num_seeds, 'seed')}, and "
            f"{rival} with fewer"
        )
    return f"could not be compared with {rival}: too few runs finished"


SAME = ConventionFinding(basis="same", loses_nats=None, noise_nats=None, octaves=0.0, num_seeds=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Tie:
    """One hyperparameter's value at the end of a search: the searched or the conventional one."""

    hyperparameter: Hyperparameter
    searched: float
    """Searched value, rounded to three digits as later stages run it."""
    conventional: float
    source: str
    """Source of the conventional value."""
    together: tuple[Hyperparameter, ...]
    """Hyperparameters that had their conventional values in these runs."""
    finding: ConventionFinding

    @property
    def value(self) -> float:
        """Value that is used."""
        return self.conventional if self.finding.conventional else self.searched

    def words(self, margin_nats: float) -> str:
        """Return the value that is used, its source, and the evidence."""
        with_others = [
            HYPERPARAMETERS[name].label for name in self.together if name != self.hyperparameter
        ]
        is_same = self.finding.basis == "same"
        rival = "the searched value" if is_same else f"the searched {self.searched:.3g}"
        evidence = describe_finding(self.finding, margin_nats, rival)
        if with_others and not is_same:
            evidence += f"; run with the conventional {' and '.join(with_others)}"
        if self.finding.octaves:
            evidence += f", at {2.0**self.finding.octaves:g} times the rate"
        origin = "conventional" if self.finding.conventional else "searched"
        return (
            f"{self.value:.3g} used ({origin}). At the base, the conventional "
            f"{self.conventional:.3g} ({self.source}) "
            f"{evidence}"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ConventionDecisions:
    """Decisions as far as outcomes tell, and the runs that they need."""

    ties: tuple[Tie, ...]
    specs: tuple[RunSpec, ...]
    """Runs of all comparisons; repeats of the best trial among them may have run already."""
    point: Params | None
    """Point that is used; None before everything has been decided."""


def settled(
    study: Study, space: SearchSpace, best: Params, results: Mapping[str, RunResult]
) -> ConventionDecisions:
    """Decide between the best trial's values and conventional ones.

    Args:
        study: Study of the search.
        space: Search space at the end of the search.
        best: Point of the best trial.
        results: Results so far, by run id.
    """
    values = {name: convention(study.plan, name)[0] for name in _open(study, space)}
    own = study.trial_id(best)
    same = [name for name in values if study.trial_id({**best, name: values[name]}) == own]
    left = [name for name in values if name not in same]
    ties = [_tie(study, best, name, SAME, (name,)) for name in same]
    specs: dict[str, RunSpec] = {}
    taken: tuple[Hyperparameter, ...] = tuple(same)
    octaves = 0.0

    def tried(names: tuple[Hyperparameter, ...]) -> ConventionFinding | None:
        needed, found = _tried(study, best, {name: values[name] for name in names}, results)
        specs.update((spec.id, spec) for spec in needed)
        return found

    def ended(*, whole: bool) -> ConventionDecisions:
        rate = best["learning_rate"] * 2.0**octaves
        point: Params = {**best, "learning_rate": rate}
        point.update((name, values[name]) for name in taken)
        return ConventionDecisions(
            ties=tuple(ties), specs=tuple(specs.values()), point=point if whole else None
        )

    if not left:
        return ended(whole=True)
    every = (*same, *left)
    found = tried(every)
    if found is None:
        return ended(whole=False)
    if found.conventional or len(left) == 1:
        ties += [_tie(study, best, name, found, tuple(left)) for name in left]
        taken, octaves = (every, found.octaves) if found.conventional else (taken, 0.0)
        return ended(whole=True)
    for name in left:
        found = tried((*taken, name))
        if found is None:
            return ended(whole=False)
        ties.append(
            _tie(study, best, name, found, tuple(n for n in (*taken, name) if n not in same))
        )
        taken, octaves = ((*taken, name), found.octaves) if found.conventional else (taken, octaves)
    return ended(whole=True)


def num_tie_runs(study: Study) -> tuple[int, int]:
    """Return the number of runs before any outcome is known: for all conventions at once, and with
    those of each one alone.
    """
    names, seeds = _open(study, study.space), study.plan.search.tie_seeds
    if not names:
        return 0, 0
    offsets = [len(rate_offsets({name: 0.0}, {name: 1.0})) for name in names]
    least = num_runs(max(offsets), seeds)
    # The searched value's runs are there by then.
    return least, least + (
        sum(num_runs(number, seeds) - seeds for number in offsets) if len(names) > 1 else 0
    )


def ties_body(ties: Sequence[Tie], margin_nats: float) -> list[Json]:
    """Return the decisions as JSON: the findings, the values used, and the margin."""
    return [
        {
            "hyperparameter": tie.hyperparameter,
            "value": tie.value,
            "searched": tie.searched,
            "conventional": tie.conventional,
            "source": tie.source,
            "together": list(tie.together),
            "margin_nats": margin_nats,
            "words": tie.words(margin_nats),
            **cast(dict[str, Json], canon.to_json(tie.finding)),
        }
        for tie in ties
    ]


def _open(study: Study, space: SearchSpace) -> list[Hyperparameter]:
    """Return the hyperparameters that the search varies and whose range contains the convention."""
    if not study.plan.search.tie_seeds:
        return []
    found = []
    for name in CONVENTIONAL:
        if name not in space.names:
            continue
        axis, (value, _) = space.axis(name), convention(study.plan, name)
        inside = value in axis.choices if axis.choices else axis.range[0] <= value <= axis.range[1]
        if inside and (axis.can_be_off or not axis.fixed):
            found.append(name)
    return found


def _tried(
    study: Study, best: Params, values: Params, results: Mapping[str, RunResult]
) -> tuple[tuple[RunSpec, ...], ConventionFinding | None]:
    """Compare the best trial's point with the same point at these values."""

    def conventional(octaves: float, seed: int) -> RunSpec:
        rate = best["learning_rate"] * 2.0**octaves
        return study.trial({**best, **values, "learning_rate": rate}, seed + 1)

    offsets, num_seeds = rate_offsets(values, best), study.plan.search.tie_seeds
    return contest(
        study, lambda seed: study.trial(best, seed + 1), conventional, offsets, num_seeds, results
    )


def _tie(
    study: Study,
    best: Params,
    name: Hyperparameter,
    finding: ConventionFinding,
    together: tuple[Hyperparameter, ...],
) -> Tie:
    value, source = convention(study.plan, name)
    return Tie(
        hyperparameter=name,
        searched=study.space.axis(name).rounded(best[name]),
        conventional=value,
        source=source,
        together=together,
        finding=finding,
    )


Rule = Literal["share", "tokens"]
_CONVENTION = HYPERPARAMETERS[WARMUP].convention
CONVENTIONAL_WARMUP = _CONVENTION.value if _CONVENTION else 0.0
WARMUP_SHARE = 0.1
"""Maximum FLOPs of the comparison of warmup rules, as a share of the other transfer tests': it
settles one hyperparameter of many.
"""
DIGITS = 6
"""Number of significant digits of a warmup share."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WarmupRule:
    """The rule that carries a warmup over duration, with its evidence."""

    HYPERPARAMETER: ClassVar[str] = WARMUP
    """Hyperparameter for which a rule over duration is chosen."""

    rule: Rule
    num_tokens: int | None = None
    """Tokens of the runs that compared both rules; None if none did."""
    finding: ConventionFinding | None = None
    """Result of the comparison, in which the convention is a number of tokens; None if not
    compared.
    """

    def body(self, margin_nats: float) -> dict[str, Json]:
        """Return the rule as JSON, with the margin of the comparison."""
        return {**cast(dict[str, Json], canon.to_json(self)), "margin_nats": margin_nats}

    def words(self, margin_nats: float) -> str:
        """Describe the rule and its evidence in words."""
        if self.rule == "share" and self.finding is None:
            return "The same share of the steps"
        share = format_percent(CONVENTIONAL_WARMUP)
        kept = f"As many warmup tokens as at the base, at least {share} of the steps in long runs"
        if self.finding is None:
            return f"{kept} (conventional: GPT-3, Llama). Not tested for long runs"
        evidence = describe_finding(self.finding, margin_nats, "the same share of the steps")
        if self.rule == "tokens":
            return f"{kept}. At {self.num_tokens:,} tokens this rule {evidence}"
        return (
            f"The same share of the steps. At {self.num_tokens:,} tokens a fixed number of "
            f"warmup tokens {evidence}"
        )


def transferred_warmup(study: Study, rule: Rule, fraction: float, num_tokens: float) -> float:
    """Return the warmup of a run on `num_tokens` tokens, as a share of its steps, from the warmup
    set at the base.

    As a number of tokens it is never a larger share than at the base, nor, in long runs, a smaller
    one than the conventional share.
    """
    base = base_duration(study)
    if rule == "share" or num_tokens <= base:
        return fraction
    return float(
        f"{max(fraction * base / num_tokens, min(fraction, CONVENTIONAL_WARMUP)):.{DIGITS}g}"
    )


def followed(study: Study, rule: Rule, point: Params, num_tokens: float) -> Params:
    """Return a point set at the base with the warmup of a run on `num_tokens` tokens."""
    return with_warmup(point, transferred_warmup(study, rule, warmup_of(point), num_tokens))


def as_proxy(study: Study, rule: Rule, point: Params, num_tokens: int, num_steps: int) -> Params:
    """Return a point set at the base with the warmup of a proxy. If durations share a stable phase,
    the warmup has as many steps as the base's.
    """
    if not study.plan.proxy.decay_branches:
        return followed(study, rule, point, num_tokens)
    base = study.plan.schedule(study.plan.proxy.num_steps, warmup_of(point))
    return with_warmup(point, min(1.0, base.warmup_steps / num_steps))


def power_of(study: Study, rule: Rule, point: Params, num_tokens: int) -> float:
    """Return the power of duration by which the rule scales a point's warmup for a run on
    `num_tokens` tokens.
    """
    own, base = warmup_of(point), base_duration(study)
    if num_tokens == base or not own:
        return 0.0
    return math.log(transferred_warmup(study, rule, own, num_tokens) / own) / math.log(
        num_tokens / base
    )


def comparison_log2(spec: RunSpec) -> float:
    """Return log2 of the warmup share of a run of the comparison."""
    return HYPERPARAMETERS[WARMUP].to_log2(spec.schedule.warmup_steps / spec.schedule.num_steps)


def compare_warmup_rules(
    study: Study,
    point: Params,
    durations: tuple[int, ...],
    budget_flops: float,
    run_at: RunAt,
    results: Mapping[str, RunResult],
) -> tuple[tuple[RunSpec, ...], WarmupRule | None]:
    """Compare a share with a number of tokens at the longest duration that the budget allows.

    The number of tokens is run at the point's learning rate and at half of it, because a shorter
    warmup tolerates less.

    Args:
        study: Study of the runs. Without `search.tie_seeds` nothing is compared, and a warmup is a
            share.
        point: Point set at the base.
        durations: Tokens of the plan's durations.
        budget_flops: FLOPs of all runs together.
        run_at: Returns a run on so many tokens, at a point, with a seed.
        results: Results so far, by run id.

    Returns:
        The runs, as far as outcomes tell, and the rule once all have ended.
    """
    if study.plan.proxy.decay_branches:
        return (), WarmupRule(rule="tokens")  # all durations share one warmup
    if not study.plan.search.tie_seeds:
        return (), WarmupRule(rule="share")
    design = _design(study, point, durations, budget_flops, run_at)
    if design is None:
        return (), WarmupRule(rule="tokens")
    num_tokens, num_seeds = design
    shorter = followed(study, "tokens", point, num_tokens)

    def tokens(octaves: float, seed: int) -> RunSpec:
        return run_at(
            num_tokens, {**shorter, "learning_rate": point["learning_rate"] * 2.0**octaves}, seed
        )

    offsets = (0.0, LOWER_RATE)
    specs, found = contest(
        study, lambda seed: run_at(num_tokens, point, seed), tokens, offsets, num_seeds, results
    )
    if found is None:
        return specs, None
    rule: Rule = "tokens" if found.conventional else "share"
    return specs, WarmupRule(rule=rule, num_tokens=num_tokens, finding=found)


def _design(
    study: Study, point: Params, durations: tuple[int, ...], budget_flops: float, run_at: RunAt
) -> tuple[int, int] | None:
    """Return tokens and seeds of the comparison: the longest duration that the budget allows, then
    as many seeds as it allows; None if it allows none.
    """
    for num_tokens in sorted(durations, reverse=True):
        run = run_at(num_tokens, point, 0)
        if run_at(num_tokens, followed(study, "tokens", point, num_tokens), 0).id == run.id:
            continue
        for num_seeds in range(study.plan.search.tie_seeds, SCOUTS - 1, -1):
            if run.flops * num_runs(2, num_seeds) <= budget_flops:
                return num_tokens, num_seeds
    return None
