"""What the search and the transfer tests found: values set at the base, and how they move. No torch."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from launcher.experiments.arms import (
    Arm,
    Sizes,
    TransferTest,
    base_sizes,
    base_value,
    carried_rate,
    measured,
    wanted_tests,
)
from launcher.experiments.grids import Setting, judged, learning_rate_test, other_test, warmup_runs
from launcher.experiments.searching import Replicated, ended_losses, growth, replicated, ties, trial_points
from launcher.experiments.ties import Tie
from launcher.experiments.warmup import Carry, Carrying, comparison_log2, followed
from launcher.plan.study import Study
from proxies.core.flops import count_params
from sweeps.search.space import Params
from transfer.question import Axis, to_log2
from transfer.verdict.rules import POWER_DIGITS

if TYPE_CHECKING:
    from sweeps.store.ledger import Ledger
    from transfer.verdict.together import Together
    from transfer.verdict.verdict import Judged

SPEND, SPENT = "spend", "spent"
"""Kinds of records: one more round of what verdicts want, and the end of such rounds, so that an interrupted spending
goes on where it stopped and buys what it would have bought.
"""


class StageMissingError(ValueError):
    """A decision needs a stage that has not run; the message names the command."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Searched:
    """What the search found."""

    points: tuple[Params, ...]
    best: Params
    """What is used: the best trial's point, with conventional values where these are no worse; to three digits."""
    best_trial: int
    ties: tuple[Tie, ...]
    """Between its values and conventional ones."""
    replicated: Replicated | None
    """Repeats of the best trials, which chose among them; None without."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Transferred:
    """What the transfer stage found."""

    tests: tuple[TransferTest, ...]
    """The learning rate's first, over width first of all."""
    best: Params
    """What the search settled on."""
    ties: tuple[Tie, ...]
    """Between the search's values and conventional ones."""
    warmup: Carry
    """How the warmup is carried over duration."""
    log2_lr: float
    """Set at the base, to be used everywhere."""
    at_optimum: bool
    """Whether it is the fitted optimum of the base width, or, where there is none, the search's best rate."""
    powers: Mapping[Axis, float]
    """Measured exponents of the learning rate, beyond what the parametrization does; where there are none, none."""

    @property
    def learning_rate(self) -> float:
        """At the base, to four digits."""
        return float(f"{2.0**self.log2_lr:.4g}")

    @property
    def point(self) -> Params:
        """What is launched with, as set at the base."""
        return {**self.best, "learning_rate": self.learning_rate}

    def rate_at(self, base: Sizes, target: Sizes) -> float:
        """The learning rate set at the base of width and depth, carried to the target's batch and duration."""
        return carried_rate(self.learning_rate, self.powers, base, target)

    def point_at(self, study: Study, target: Sizes) -> Params:
        """The point of a run at the target."""
        point = {**self.point, "learning_rate": self.rate_at(base_sizes(study), target)}
        return followed(study, self.warmup.rule, point, target.duration)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Verdicts:
    """Every test judged at one target."""

    target: Sizes
    tests: tuple[tuple[TransferTest, Judged], ...]
    together: Together
    """The learning rate over all axes at once."""

    failed: frozenset[str]
    """Ids of runs that failed, and did not diverge."""

    def num_failed(self, test: TransferTest) -> int:
        """Runs of a test's own arm that failed."""
        return sum(spec.id in self.failed for spec, _ in test.arm.specs)


def searched(study: Study, ledger: Ledger) -> Searched:
    """Points and winner of the search.

    Raises:
        StageMissingError: it has not ended.
    """
    missing = StageMissingError("the search has not ended: `forerun sweep PLAN` runs or resumes it")
    losses = ended_losses(study, ledger)
    if losses is None:
        raise missing
    points, results = trial_points(ledger), ledger.first_results()
    best_trial = study.best_trial(points, results)
    again = replicated(study, ledger, losses)
    if growth(study, ledger, losses) is not None or (again is not None and again.comparison is None):
        raise missing
    if again is not None and again.comparison is not None:
        best_trial = again.candidates[again.comparison.standings[0].candidate]
    decided = ties(study, ledger, losses)
    if decided is None or decided.point is None:
        raise missing
    best = study.space.rounded(decided.point)
    return Searched(points=tuple(points), best=best, best_trial=best_trial, ties=decided.ties, replicated=again)


def target_guess(study: Study) -> Sizes:
    """The target before any fit: the width that the budget suggests, and the tokens it leaves."""
    plan, width = study.plan, study.target_width_guess
    params = count_params(study.shape(width).at_depth(plan.target_num_layers)).total
    batch = plan.target_batch_tokens
    num_steps = plan.steps_for(plan.target.budget_flops / (6.0 * params * batch))
    tokens = batch * plan.schedule(num_steps, 0.0).num_full_batches
    return Sizes(width=width, depth=plan.target_num_layers, batch=batch, duration=int(tokens))


def _setting(study: Study, ledger: Ledger, won: Searched, target: Sizes | None = None) -> Setting:
    return Setting(
        study=study,
        results=ledger.results(),
        best=won.best,
        target=target or target_guess(study),
        rounds=study.plan.transfer.max_extensions + len(ledger.records(SPEND)),
    )


def _tests(setting: Setting) -> tuple[Setting, Carrying, tuple[TransferTest, ...]]:
    """The setting with the warmup's rule, its comparison, and the tests as far as results tell.

    Runs of other durations follow the rule, so tests over duration wait for it.
    """
    study, wanted = setting.study, wanted_tests(setting.study)
    warmup = warmup_runs(study, setting.best, target_guess(study), setting.results)
    if warmup.carry is not None:
        setting = dataclasses.replace(setting, warmup=warmup.carry.rule)
    tests = tuple(
        learning_rate_test(setting, axis) if name == "learning_rate" else other_test(setting, name, axis)
        for name, axis in wanted
        if (warmup.carry is not None or axis != "duration") and base_value(study, name, setting.best) > 0
    )
    return setting, warmup, tests


def asked(study: Study, ledger: Ledger) -> tuple[TransferTest, ...]:
    """The tests, with the runs they want as far as results tell, after the comparison of how a warmup is carried.

    Raises:
        StageMissingError: the search has not ended.
    """
    _, warmup, tests = _tests(_setting(study, ledger, searched(study, ledger)))
    if not warmup.specs:
        return tests
    arm = Arm(axis="duration", specs=tuple((spec, comparison_log2(spec)) for spec in warmup.specs))
    return (TransferTest(hyperparameter=Carry.HYPERPARAMETER, axis="duration", arm=arm), *tests)


def transferred(study: Study, ledger: Ledger) -> Transferred:
    """The transfer tests and the rate they give.

    Raises:
        StageMissingError: their runs have not ended.
    """
    won = searched(study, ledger)
    setting, warmup, tests = _tests(_setting(study, ledger, won))
    if warmup.carry is None or not all(test.done(setting.results) for test in tests):
        raise StageMissingError("the transfer runs have not ended: `forerun transfer PLAN` runs or resumes them")
    return _rates_found(setting, won.ties, warmup.carry, tests)


def _rates_found(
    setting: Setting, ties: tuple[Tie, ...], warmup: Carry, tests: Sequence[TransferTest]
) -> Transferred:  # fmt: skip
    """The base's optimum, and the measured exponents."""
    study, base = setting.study, base_sizes(setting.study)
    first = judged(setting, tests[0], None)
    log2_lr = next((o.log2_value for o in first.verdict.optima if o.size == base.width), None)
    at_optimum = log2_lr is not None
    if log2_lr is None:
        log2_lr = math.log2(setting.best["learning_rate"])
    powers: dict[Axis, float] = {}
    for test in tests:
        if test.hyperparameter == "learning_rate" and measured(study, test.axis):
            found = judged(setting, test, None)
            if found.at_target is not None:
                powers[test.axis] = round(found.at_target.power, POWER_DIGITS)
    return Transferred(
        tests=tuple(tests), best=setting.best, ties=ties, warmup=warmup, log2_lr=log2_lr, at_optimum=at_optimum,
        powers=powers,
    )  # fmt: skip


def verdicts_at(study: Study, ledger: Ledger, found: Transferred, target: Sizes) -> Verdicts:
    """Every test judged at a target, and the learning rate over all axes at once."""
    from transfer.verdict.together import judge_together

    base, rule = base_sizes(study), found.warmup.rule
    setting = dataclasses.replace(_setting(study, ledger, searched(study, ledger), target), warmup=rule)
    tests = []
    for test in found.tests:
        name = test.hyperparameter
        if name == "learning_rate":  # over other axes, what is asked is whether the rule carries their own base optimum
            value = found.log2_lr if test.axis == "width" else None
        else:
            value = to_log2(name, base_value(study, name, found.point))
        tests.append((test, judged(setting, test, value)))
    rates = [judgement for test, judgement in tests if test.hyperparameter == "learning_rate"]
    axes: tuple[Axis, ...] = ("width", "depth", "batch", "duration")
    together = judge_together(rates, {axis: math.log2(target.along(axis) / base.along(axis)) for axis in axes})
    failed = frozenset(id for id, result in setting.results.items() if result.status == "failed")
    return Verdicts(target=target, tests=tuple(tests), together=together, failed=failed)
