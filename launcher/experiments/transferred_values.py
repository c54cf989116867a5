"""The results of the search and the transfer tests: values set at the base, and the rules that
carry them to the target. Also as plain data for the report and the verbs. No torch.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from launcher.experiments.conventions import Tie, WarmupRule, comparison_log2, followed, ties_body
from launcher.experiments.rate_pairs import judged_pair
from launcher.experiments.search import (
    RepeatedTrials,
    ended_losses,
    growth,
    replicated,
    ties,
    trial_points,
    winner,
)
from launcher.experiments.sweep_grids import (
    Condition,
    RatePair,
    SharedSettings,
    Sizes,
    TransferTest,
    axis_sizes,
    base_sizes,
    base_value,
    judged,
    rate_pairs,
    transfer_test,
    transferred_rate,
    wanted_tests,
    warmup_runs,
)
from launcher.experiments.wider import spike_words
from launcher.plan.study import NoFinishedTrialError, Study
from proxies.core.canon import Json
from proxies.core.errors import InputError
from proxies.core.hyperparameters import (
    HYPERPARAMETERS,
    LEARNING_RATE,
    WITH_OPTIMUM,
    hyperparameter_named,
)
from proxies.core.notation import counted, format_factor
from proxies.core.powers import Powers, Ratios
from proxies.core.rules import scaled, scaling
from proxies.core.spec import RunResult, RunSpec
from sweeps.search.growth import ranked
from sweeps.search.space import Params
from transfer.question import Axis, Hyperparameter, to_log2
from transfer.verdict.rules import POWER_DIGITS

if TYPE_CHECKING:
    from sweeps.store.ledger import Ledger
    from transfer.verdict.joint_verdict import JointVerdict
    from transfer.verdict.pair_verdict import PairVerdict
    from transfer.verdict.verdict import DetailedVerdict, Verdict

_AXES: tuple[Axis, ...] = ("width", "depth", "batch", "duration")
_USUAL = tuple(one.name for one in HYPERPARAMETERS.values() if one.set_by != "axes")
"""Hyperparameters that are shown whether they were searched or not."""
SPEND, SPENT = "spend", "spent"
"""Kinds of records: one more round of runs that verdicts ask for, and the end of such rounds. With
them, an interrupted `--spend` resumes where it stopped and makes the same runs.
"""


class StageMissingError(InputError):
    """A decision needs a stage that has not run; the message names the command."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchOutcome:
    """The result of the search."""

    points: tuple[Params, ...]
    best: Params
    """Point that is used: the best trial's, with conventional values where these are no worse,
    rounded to three digits.
    """
    best_trial: int
    ties: tuple[Tie, ...]
    """Decisions between its values and conventional ones."""
    replicated: RepeatedTrials | None
    """Repeats of the best trials, which chose among them; None without repeats."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Transferred:
    """The result of the transfer stage."""

    tests: tuple[TransferTest, ...]
    """Tests: those of the learning rate first, and among them the one over width."""
    best: Params
    """Point that the search settled on."""
    ties: tuple[Tie, ...]
    """Decisions between the search's values and conventional ones."""
    warmup: WarmupRule
    """Rule that carries the warmup over duration."""
    log2_lr: float
    """Log2 of the learning rate set at the base."""
    at_optimum: bool
    """Whether that is the fitted optimum of the base width; if there is none, it is the search's
    best rate.
    """
    powers_at: Callable[[Sizes], Mapping[Axis, float]]
    """Function that returns the measured exponents of the learning rate from the base to a target,
    in addition to the parametrization's; empty if none were measured. If an optimum bends, they
    depend on the target.
    """
    pairs: tuple[RatePair, ...] = ()
    """Pairs of the learning rate with other rates of the user's own code."""

    @property
    def learning_rate(self) -> float:
        """Learning rate at the base, rounded to four digits."""
        return float(f"{2.0**self.log2_lr:.4g}")

    @property
    def point(self) -> Params:
        """Point of the main run, as set at the base."""
        return {**self.best, "learning_rate": self.learning_rate}

    def rate_at(self, base: Sizes, target: Sizes) -> float:
        """Return the learning rate set at the base width and depth, carried to the target's batch
        and duration.
        """
        return transferred_rate(self.learning_rate, self.powers_at(target), base, target)

    def point_at(self, study: Study, target: Sizes) -> Params:
        """Return the point of a run at the target."""
        point = {**self.point, "learning_rate": self.rate_at(base_sizes(study), target)}
        return followed(study, self.warmup.rule, point, target.duration)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Verdicts:
    """The verdicts of all tests for one target."""

    target: Sizes
    tests: tuple[tuple[TransferTest, DetailedVerdict], ...]
    together: JointVerdict
    """Verdict on the learning rate over all axes at once."""

    failed: frozenset[str]
    """Ids of runs that failed without diverging."""
    pairs: tuple[PairVerdict, ...] = ()

    def num_failed(self, test: TransferTest) -> int:
        """Return the number of failed runs of a test's own condition."""
        return sum(spec.id in self.failed for spec, _ in test.condition.specs)


def searched(study: Study, ledger: Ledger) -> SearchOutcome:
    """Return the points and the winner of the search.

    Raises:
        StageMissingError: The search has not ended.
        NoFinishedTrialError: Every trial diverged or failed.
    """
    missing = StageMissingError(
        f"the search has not ended: `{study.command_line('sweep')}` runs or resumes it"
    )
    losses = ended_losses(study, ledger)
    if losses is None:
        raise missing
    points = trial_points(ledger)
    if not ranked(losses):
        last = ledger.first_results()[study.trial_id(points[-1])]
        raise NoFinishedTrialError(
            f"none of {counted(len(points), 'trial')} finished; the last: {last.status}, "
            f"{last.reason}. If they "
            f"diverged, lower search.learning_rate = {list(study.plan.search.learning_rate)}, in a "
            "study folder of "
            "its own"
        )
    if growth(study, ledger, losses) is not None:
        raise missing
    best_trial, decided = winner(study, ledger, losses), ties(study, ledger, losses)
    if best_trial is None or decided is None or decided.point is None:
        raise missing
    best = study.space.rounded(decided.point)
    return SearchOutcome(
        points=tuple(points),
        best=best,
        best_trial=best_trial,
        ties=decided.ties,
        replicated=replicated(study, ledger, losses),
    )


def target_guess(study: Study) -> Sizes:
    """Return the sizes of the target before any fit: the width that the budget suggests, and the
    tokens that remain.
    """
    plan, shape = study.plan, study.target_shape_guess
    params = study.num_params(shape)
    batch = plan.target_batch_tokens
    tokens = plan.num_tokens(plan.target_steps(params), batch)
    return Sizes(width=shape.width, depth=shape.num_layers, batch=batch, duration=tokens)


def _setting(
    study: Study, ledger: Ledger, won: SearchOutcome, target: Sizes | None = None
) -> SharedSettings:
    return SharedSettings(
        study=study,
        results=ledger.results(),
        best=won.best,
        target=target or target_guess(study),
        rounds=study.plan.transfer.max_extensions + len(ledger.records(SPEND)),
    )


def _tests(
    setting: SharedSettings,
) -> tuple[SharedSettings, tuple[RunSpec, ...], WarmupRule | None, tuple[TransferTest, ...]]:
    """Return the settings with the warmup's rule, the runs that compare the rules, the rule, and
    the tests as far as results tell.

    Runs of other durations follow the rule, so tests over duration wait for it.
    """
    study, needed = setting.study, wanted_tests(setting.study)
    compared, warmup = warmup_runs(study, setting.best, target_guess(study), setting.results)
    if warmup is not None:
        setting = dataclasses.replace(setting, warmup=warmup.rule)
    tests = tuple(
        transfer_test(setting, name, axis)
        for name, axis in needed
        if (warmup is not None or axis != "duration") and base_value(study, name, setting.best) > 0
    )
    return setting, compared, warmup, tests


def asked(study: Study, ledger: Ledger) -> tuple[TransferTest | RatePair, ...]:
    """Return the tests with the runs that they ask for as far as results tell, after the comparison
    of warmup rules.

    Raises:
        StageMissingError: The search has not ended.
    """
    setting, compared, _, tests = _tests(_setting(study, ledger, searched(study, ledger)))
    wanted: tuple[TransferTest | RatePair, ...] = (*tests, *rate_pairs(setting))
    if not compared:
        return wanted
    condition = Condition(
        axis="duration", specs=tuple((spec, comparison_log2(spec)) for spec in compared)
    )
    return (
        TransferTest(
            hyperparameter=WarmupRule.HYPERPARAMETER, axis="duration", condition=condition
        ),
        *wanted,
    )


def missing_after_another_round(study: Study, ledger: Ledger) -> dict[str, RunSpec]:
    """Return the runs, by id, that the tests ask for after one more round of spending and that have
    no result yet.

    Raises:
        StageMissingError: The search has not ended.
    """
    setting = _setting(study, ledger, searched(study, ledger))
    _, compared, _, tests = _tests(dataclasses.replace(setting, rounds=setting.rounds + 1))
    wanted = [*compared, *(spec for test in tests for spec in test.specs)]
    return {spec.id: spec for spec in wanted if spec.id not in setting.results}


def transferred(study: Study, ledger: Ledger) -> Transferred:
    """Return the transfer tests and the learning rate that they give.

    Raises:
        StageMissingError: Their runs have not ended.
    """
    won = searched(study, ledger)
    setting, _, warmup, tests = _tests(_setting(study, ledger, won))
    pairs = rate_pairs(setting)
    done = all(test.done(setting.results) for test in tests) and all(
        pair.done(setting.results) for pair in pairs
    )
    if warmup is None or not done:
        raise StageMissingError(
            f"the transfer runs have not ended: `{study.command_line('transfer')}` runs or resumes "
            "them"
        )
    optima = judged(setting, tests[0], None).verdict.optima
    log2_lr = next((o.log2_value for o in optima if o.size == study.plan.proxy.base_width), None)
    measured = [
        t
        for t in tests
        if t.hyperparameter == LEARNING_RATE and t.axis in study.plan.transfer.measured_rules
    ]

    @functools.cache
    def powers_at(target: Sizes) -> Mapping[Axis, float]:
        there = dataclasses.replace(setting, target=target)
        found = {test.axis: judged(there, test, None).at_target for test in measured}
        return {axis: round(at.power, POWER_DIGITS) for axis, at in found.items() if at is not None}

    return Transferred(
        tests=tests,
        best=won.best,
        ties=won.ties,
        warmup=warmup,
        at_optimum=log2_lr is not None,
        powers_at=powers_at,
        log2_lr=math.log2(won.best["learning_rate"]) if log2_lr is None else log2_lr,
        pairs=pairs,
    )


def verdicts_at(study: Study, ledger: Ledger, found: Transferred, target: Sizes) -> Verdicts:
    """Judge every test for a target, and the learning rate over all axes at once."""
    from transfer.verdict.joint_verdict import judge_together

    base, rule = base_sizes(study), found.warmup.rule
    setting = dataclasses.replace(
        _setting(study, ledger, searched(study, ledger), target), warmup=rule
    )
    tests = []
    for test in found.tests:
        name = test.hyperparameter
        # Over other axes, the question is whether the rule carries the axis's own base optimum.
        if name == "learning_rate":
            value = found.log2_lr if test.axis == "width" else None
        else:
            value = to_log2(name, base_value(study, name, found.point))
        tests.append((test, judged(setting, test, value)))
    rates = [judgement for test, judgement in tests if test.hyperparameter == "learning_rate"]
    together = judge_together(
        rates, {axis: math.log2(target.along(axis) / base.along(axis)) for axis in _AXES}
    )
    failed = frozenset(id for id, result in setting.results.items() if result.status == "failed")
    pairs = tuple(judged_pair(setting, pair, tuple(tests), together) for pair in found.pairs)
    return Verdicts(
        target=target, tests=tuple(tests), together=together, failed=failed, pairs=pairs
    )


def transfer_body(
    study: Study, found: Transferred, verdicts: Verdicts, results: Mapping[str, RunResult]
) -> dict[str, Json]:
    """Return the tests with their verdicts and runs, the learning rate over all axes, and the table
    of values.
    """
    from transfer.verdict.summary import pair_summary, together_summary

    told = {*_USUAL, *found.best, *(test.hyperparameter for test, _ in verdicts.tests)}
    return {
        "tests": [
            {
                "axis": test.axis,
                "hyperparameter": test.hyperparameter,
                "verdict": _with_spike(study, test, results, judged.verdict),
                "runs": _runs(study, test, results),
            }
            for test, judged in verdicts.tests
        ],
        "together": together_summary(verdicts.together),
        **({"pairs": [pair_summary(pair) for pair in verdicts.pairs]} if verdicts.pairs else {}),
        "values": [
            _value(study, found, verdicts, name)
            for name in (*WITH_OPTIMUM, *study.plan.search.own)
            if name in told and study.plan.reaches(name)
        ],
        "learning_rate": found.learning_rate,
        "at_base_optimum": found.at_optimum,
    }


def _with_spike(
    study: Study, test: TransferTest, results: Mapping[str, RunResult], verdict: Verdict
) -> dict[str, Json]:
    """Return a verdict; if a single run causes the drift, with a sentence about its gradient
    spikes.
    """
    from transfer.verdict.summary import verdict_summary

    body, condition = verdict_summary(verdict), test.condition
    if verdict.culprit is None:
        return body
    sizes = {spec.id: condition.size(spec) for spec, _ in condition.specs}
    said = spike_words(study, condition.specs, results, sizes, verdict.culprit)
    return {**body, "reasons": [*verdict.reasons, *([said] if said else [])]}


def _runs(study: Study, test: TransferTest, results: Mapping[str, RunResult]) -> list[Json]:
    conditions = {study.plan.proxy.parametrization: test.condition} | (
        {"sp": test.control} if test.control else {}
    )
    return [
        {
            "arm": name,
            "size": condition.size(spec),
            "log2_value": log2_value,
            "seed": spec.seed,
            "loss_nats": results[spec.id].loss_nats,
            "status": results[spec.id].status,
        }
        for name, condition in conditions.items()
        for spec, log2_value in condition.specs
    ]


def _value(
    study: Study, found: Transferred, verdicts: Verdicts, name: Hyperparameter
) -> dict[str, Json]:
    """Return a hyperparameter's row: its value at the base and at the target, the rule between
    them, and how far that was tested.
    """
    from transfer.verdict.joint_verdict import differs
    from transfer.verdict.summary import estimate_summary, verdict_summary

    base, target = base_sizes(study), verdicts.target
    mine = [judged.verdict for test, judged in verdicts.tests if test.hyperparameter == name]
    axes = [verdict.question.axis for verdict in mine]
    value, rule = _ruled(study, found, target, name)
    margin, ties = (
        study.plan.transfer.margin_nats,
        [tie for tie in found.ties if tie.hyperparameter == name],
    )
    rate = name == LEARNING_RATE
    worst = max(mine, key=_regret, default=None)
    regret = verdicts.together.regret_nats if rate else worst.regret_nats if worst else None
    outcome = verdicts.together.outcome if rate else worst.outcome if worst else None
    over = [
        *axes,
        *(["duration"] if name == found.warmup.HYPERPARAMETER and found.warmup.finding else []),
    ]
    twice = [
        cost
        for verdict in mine
        if (cost := verdict_summary(verdict)["cost_of_2x_off_nats"]) is not None
    ]
    return {
        "hyperparameter": name,
        "base_value": _at_base(study, found, name),
        "target_value": value,
        "rule": ". ".join([*(tie.words(margin) for tie in ties), rule]),
        "tested": list(axes),
        "untested": [a for a in _AXES if a not in over and differs(target.along(a), base.along(a))],
        "outcome": outcome,
        "drifts": {v.question.axis: estimate_summary(v.drift) for v in mine},
        "regret_nats": estimate_summary(regret),
        "cost_of_2x_off_nats": twice[0] if twice else None,
        "tie": next(iter(ties_body(ties, margin)), None),
        "carry": found.warmup.body(margin) if name == found.warmup.HYPERPARAMETER else None,
    }


def _at_base(study: Study, found: Transferred, name: Hyperparameter) -> Json:
    """Return a hyperparameter's value at the base; for a categorical axis of words, the word."""
    value = found.learning_rate if name == LEARNING_RATE else base_value(study, name, found.point)
    own = study.plan.search.own.get(name)
    return value if own is None or not own.words else own.value(name, value).word


def _regret(verdict: Verdict) -> tuple[int, float]:
    """Return the sort key of a verdict: drifts last, then cannot tell, then by regret."""
    rank = ("holds", "cannot_tell", "drifts").index(verdict.outcome)
    return rank, verdict.regret_nats.high if verdict.regret_nats else 0.0


_UNSCALED = "The same value at every size"


def _ruled(
    study: Study, found: Transferred, target: Sizes, name: Hyperparameter
) -> tuple[Json, str]:
    """Return a value at the target, and the rule that gives it, in words."""
    base, rules = base_sizes(study), study.plan.parametrization
    ratios = Ratios(**{axis: target.along(axis) / base.along(axis) for axis in _AXES})
    if name == LEARNING_RATE:
        measured = found.powers_at(target)
        notes = [f"Set at the base width, and scaled by {rules.name} for each kind of parameter"]
        notes += [
            f"Times {format_factor(ratio)}^{power:+.3f} over {axis}, as measured"
            for axis, power in measured.items()
            if (ratio := target.along(axis) / base.along(axis)) != 1
        ]
        notes += [
            f"No exponent over {axis} could be measured, so none is used"
            for axis in study.plan.transfer.measured_rules
            if axis_sizes(study, axis) and axis not in measured
        ]
        return found.rate_at(base, target), ". ".join(notes)
    value = base_value(study, name, found.point)
    if name == found.warmup.HYPERPARAMETER:
        return found.point_at(study, target)[name], found.warmup.words(
            study.plan.transfer.margin_nats
        )
    if name in study.plan.search.own:
        own = study.plan.search.own[name].value(name, value)
        return own.at(ratios), _UNSCALED if own.powers == Powers() else f"Times {own.powers}"
    powers, one = scaling(rules, name), hyperparameter_named(name)
    if one.can_be_off and not value:
        return value, "Off at every size"
    if powers == Powers():
        return value, _UNSCALED
    scaled_words = (
        f"1 - {name} is multiplied"
        if one.scale == "log2_complement"
        else "Hidden matrices: multiplied"
    )
    return scaled(rules, name, value, ratios), f"{scaled_words} by {powers}"
