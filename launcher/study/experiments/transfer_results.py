"""The results of the search and the transfer tests, from a study's ledger: values set at the base,
and the rules that carry them to the target (the sizes of the main run).

This module does not import torch.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from forerun._launcher.study.experiments.conventions import ConventionDecision
from forerun._launcher.study.experiments.search import (
    RepeatedTrials,
    SearchState,
)
from forerun._launcher.study.experiments.sizes import (
    SIZE_AXES,
    Sizes,
    get_base_sizes,
    get_base_value,
    list_tests,
    transfer_rate,
)
from forerun._launcher.study.experiments.transfer_tests import (
    GridSettings,
    RunGrid,
    TransferTest,
    build_transfer_test,
    build_warmup_runs,
    judge_test,
)
from forerun._launcher.study.experiments.warmup_rule import (
    WarmupRule,
    get_warmup_log2,
    set_transferred_warmup,
)
from forerun._launcher.study.plan.study import NoFinishedTrialError, Study
from forerun._proxies.core.errors import InputError
from forerun._proxies.core.hyperparameters import LEARNING_RATE, WARMUP
from forerun._proxies.core.notation import format_counted
from forerun._proxies.core.spec import RunSpec
from forerun._sweeps.search.growth import rank_trials
from forerun._sweeps.search.space import Params
from forerun._transfer.question import Axis, to_log2
from forerun._transfer.verdict.rules import POWER_DIGITS

if TYPE_CHECKING:
    from forerun._sweeps.store.ledger import Ledger
    from forerun._transfer.verdict.joint_verdict import JointVerdict
    from forerun._transfer.verdict.verdict import Verdict

SPEND_ROUND_RECORD, SPEND_END_RECORD = "spend", "spent"
"""Kinds of the ledger's records of `--spend`: the start of one more round of runs, and the end of
all rounds. With them, an interrupted `--spend` resumes where it stopped and makes the same runs.
"""


class StageMissingError(InputError):
    """A decision needs a stage that has not run; the message names the command."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchResult:
    """The result of the search."""

    points: tuple[Params, ...]
    """Points of all trials, by index."""
    best: Params
    """Point that is used: the best trial's, with conventional values where these are no worse,
    rounded to three digits.
    """
    best_trial: int
    """Index of the best trial."""
    ties: tuple[ConventionDecision, ...]
    """Decisions between the best trial's values and conventional ones."""
    replicated: RepeatedTrials | None
    """Repeats of the best trials, which chose among them; None without repeats."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TransferResult:
    """The result of the transfer stage."""

    search: SearchResult
    tests: tuple[TransferTest, ...]
    """Tests, those of the learning rate first."""
    warmup: WarmupRule
    """Rule that carries the warmup over duration."""
    log2_lr: float
    """Log2 of the learning rate set at the base."""
    at_optimum: bool
    """Whether `log2_lr` is the fitted optimum at the base width. If there is no such optimum, it is
    the search's best rate.
    """
    powers_at: Callable[[Sizes], Mapping[Axis, float]]
    """Function that returns the measured exponents of the learning rate from the base to a target,
    in addition to the parametrization's; empty if none were measured. They depend on the target if
    the optimum follows a curve instead of a power law.
    """

    @property
    def best(self) -> Params:
        """Point that the search settled on."""
        return self.search.best

    @property
    def learning_rate(self) -> float:
        """Learning rate at the base, rounded to four digits."""
        return float(f"{2.0**self.log2_lr:.4g}")

    @property
    def point(self) -> Params:
        """Point of the main run, as set at the base."""
        return {**self.best, LEARNING_RATE: self.learning_rate}

    def get_rate(self, base: Sizes, target: Sizes) -> float:
        """Return the learning rate set at the base width and depth, carried to the target's batch
        and duration.
        """
        return transfer_rate(self.learning_rate, self.powers_at(target), base, target)

    def get_point(self, study: Study, target: Sizes) -> Params:
        """Return the point of a run at the target."""
        point = {**self.point, LEARNING_RATE: self.get_rate(get_base_sizes(study), target)}
        return set_transferred_warmup(study, self.warmup.rule, point, target.duration)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Verdicts:
    """The verdicts of all tests for one target."""

    target: Sizes
    tests: tuple[tuple[TransferTest, Verdict], ...]
    together: JointVerdict
    """Verdict on the learning rate over all axes at once."""
    failed: frozenset[str]
    """Ids of runs that failed without diverging."""

    def count_failed(self, test: TransferTest) -> int:
        """Return the number of failed runs of a test, without its control."""
        return sum(spec.id in self.failed for spec, _ in test.grid.specs)


# ---- From the ledger ----


def load_search_result(study: Study, ledger: Ledger) -> SearchResult:
    """Return the points and the winner of the search.

    Raises:
        StageMissingError: The search has not ended.
        NoFinishedTrialError: Every trial diverged or failed.
    """
    state = SearchState(study, ledger)
    points = state.points
    if state.losses is not None and not rank_trials(state.losses):
        last = ledger.get_first_results()[study.get_trial_id(points[-1])]
        raise NoFinishedTrialError(
            f"none of {format_counted(len(points), 'trial')} finished; the last: {last.status}, "
            f"{last.reason}. If they diverged, lower search.learning_rate = "
            f"{list(study.plan.search.learning_rate)}, in a study folder of its own"
        )
    winner, ties = state.winner, state.ties
    if state.growth is not None or winner is None or ties is None or ties.point is None:
        raise StageMissingError(
            f"the search has not ended: `{study.format_command('sweep')}` runs or resumes it"
        )
    return SearchResult(
        points=tuple(points),
        best=study.space.round_point(ties.point),
        best_trial=winner,
        ties=ties.ties,
        replicated=state.repeats,
    )


def guess_target_sizes(study: Study) -> Sizes:
    """Return the sizes of the target before any fit: the width that the budget suggests, and the
    tokens that remain.
    """
    plan, shape = study.plan, study.target_shape_guess
    batch = plan.target_batch_tokens
    tokens = plan.count_tokens(plan.count_target_steps(study.count_params(shape)), batch)
    return Sizes(width=shape.width, depth=shape.num_layers, batch=batch, duration=tokens)


def _make_settings(study: Study, ledger: Ledger, best: Params) -> GridSettings:
    return GridSettings(
        study=study,
        results=ledger.get_results(),
        best=best,
        target=guess_target_sizes(study),
        rounds=study.plan.transfer.max_extensions + len(ledger.read_records(SPEND_ROUND_RECORD)),
    )


def _build_tests(
    settings: GridSettings,
) -> tuple[GridSettings, tuple[RunSpec, ...], WarmupRule | None, tuple[TransferTest, ...]]:
    """Choose the rule of the warmup, and build the tests with it, as far as results tell.

    Runs of other durations follow the rule, so tests over duration wait for it.

    Returns:
        The settings with the rule, the runs that compare the rules, the rule (None before these
        runs have ended), and the tests.
    """
    study = settings.study
    compared, warmup = build_warmup_runs(
        study, settings.best, guess_target_sizes(study), settings.results
    )
    if warmup is not None:
        settings = dataclasses.replace(settings, warmup=warmup.rule)
    tests = tuple(
        build_transfer_test(settings, name, axis)
        for name, axis in list_tests(study)
        if (warmup is not None or axis != "duration")
        and get_base_value(study, name, settings.best) > 0
    )
    return settings, compared, warmup, tests


def list_tests_with_runs(
    study: Study, ledger: Ledger, more_rounds: int = 0
) -> tuple[TransferTest, ...]:
    """Return the tests with the runs that they ask for as far as results tell, after the comparison
    of warmup rules.

    `more_rounds` are rounds of spending beyond the recorded ones.

    Raises:
        StageMissingError: The search has not ended.
    """
    settings = _make_settings(study, ledger, load_search_result(study, ledger).best)
    settings = dataclasses.replace(settings, rounds=settings.rounds + more_rounds)
    _, compared, _, tests = _build_tests(settings)
    if not compared:
        return tests
    specs = tuple((spec, get_warmup_log2(spec)) for spec in compared)
    comparison = TransferTest(
        hyperparameter=WARMUP,
        axis="duration",
        grid=RunGrid(axis="duration", specs=specs),
    )
    return (comparison, *tests)


def find_next_round_runs(study: Study, ledger: Ledger) -> dict[str, RunSpec]:
    """Return the runs, by id, that the tests ask for after one more round of spending and that have
    no result yet.

    Raises:
        StageMissingError: The search has not ended.
    """
    results, tests = ledger.get_results(), list_tests_with_runs(study, ledger, more_rounds=1)
    return {spec.id: spec for test in tests for spec in test.specs if spec.id not in results}


def load_transfer_result(study: Study, ledger: Ledger) -> TransferResult:
    """Return the transfer tests and the learning rate that they give.

    Raises:
        StageMissingError: Their runs have not ended.
    """
    search = load_search_result(study, ledger)
    settings, _, warmup, tests = _build_tests(_make_settings(study, ledger, search.best))
    if warmup is None or not all(test.is_done(settings.results) for test in tests):
        raise StageMissingError(
            f"the transfer runs have not ended: `{study.format_command('transfer')}` runs or "
            "resumes them"
        )
    over_width = next(
        test for test in tests if (test.hyperparameter, test.axis) == (LEARNING_RATE, "width")
    )
    optima, base_width = judge_test(settings, over_width, None).optima, study.plan.proxy.base_width
    log2_lr = next((optimum.log2_value for optimum in optima if optimum.size == base_width), None)
    measured = [
        test
        for test in tests
        if test.hyperparameter == LEARNING_RATE and test.axis in study.plan.transfer.measured_rules
    ]

    @functools.cache
    def powers_at(target: Sizes) -> Mapping[Axis, float]:
        target_setting = dataclasses.replace(settings, target=target)
        at_target = {
            test.axis: judge_test(target_setting, test, None).at_target for test in measured
        }
        return {axis: round(at.power, POWER_DIGITS) for axis, at in at_target.items() if at}

    return TransferResult(
        search=search,
        tests=tests,
        warmup=warmup,
        at_optimum=log2_lr is not None,
        powers_at=powers_at,
        log2_lr=math.log2(search.best[LEARNING_RATE]) if log2_lr is None else log2_lr,
    )


def judge_tests(
    study: Study, ledger: Ledger, transfer_result: TransferResult, target: Sizes
) -> Verdicts:
    """Judge every test for a target, and the learning rate over all axes at once."""
    from forerun._transfer.verdict.joint_verdict import judge_axes_together

    base, rule = get_base_sizes(study), transfer_result.warmup.rule
    settings = _make_settings(study, ledger, transfer_result.best)
    settings = dataclasses.replace(settings, target=target, warmup=rule)

    def get_log2_value(test: TransferTest) -> float | None:
        name = test.hyperparameter
        if name != LEARNING_RATE:
            return to_log2(name, get_base_value(study, name, transfer_result.point))
        # Over other axes, the question is whether the rule carries the axis's own base optimum.
        return transfer_result.log2_lr if test.axis == "width" else None

    tests = [
        (test, judge_test(settings, test, get_log2_value(test))) for test in transfer_result.tests
    ]
    return Verdicts(
        target=target,
        tests=tuple(tests),
        together=judge_axes_together(
            [verdict for test, verdict in tests if test.hyperparameter == LEARNING_RATE],
            {axis: math.log2(target.get_size(axis) / base.get_size(axis)) for axis in SIZE_AXES},
        ),
        failed=frozenset(
            run_id for run_id, result in settings.results.items() if result.status == "failed"
        ),
    )
