"""The runs that would decide the gates that cannot tell for lack of runs, and the cost of these
runs.

Verdicts themselves may ask for runs, and `forerun transfer --spend` makes them. If they ask for
none, the tests must grow. The tests are part of the study's question (the plan keys that decide
what is measured), so this needs a child study. If the interval at the target is wide because the
target lies far beyond the tests, the child study tests a larger size. Otherwise it has more seeds,
which narrow the interval by the square root of their number; that gives the number. Time and price
are those of this study so far, scaled by FLOPs. This module does not import torch.
"""

from __future__ import annotations

import dataclasses
import math
import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from forerun._launcher.study.calibration.study_cost import count_workers
from forerun._launcher.study.experiments.ladder import build_stage_runs
from forerun._launcher.study.experiments.sizes import list_axis_sizes
from forerun._launcher.study.experiments.transfer_results import (
    TransferResult,
    Verdicts,
    find_next_round_runs,
    guess_target_sizes,
    judge_tests,
)
from forerun._launcher.study.experiments.transfer_tests import build_first_runs
from forerun._launcher.study.plan.study import PLAN_FILE, Study
from forerun._launcher.study.plan.writing import format_toml
from forerun._launcher.study.stages import main_run_choice
from forerun._launcher.study.stages.gates import judge_ladder_rates, judge_transfer
from forerun._proxies.core.branches import compute_own_flops
from forerun._proxies.core.hyperparameters import LEARNING_RATE
from forerun._proxies.core.spec import RunSpec
from forerun._sweeps.run.budget import compute_spend

if TYPE_CHECKING:
    from forerun._launcher.study.stages.study_findings import StudyFindings
    from forerun._sweeps.store.ledger import Ledger
    from forerun._transfer.verdict.verdict import Verdict

MIN_FACTOR, MAX_FACTOR = 2, 8
"""Limits of the factor on the number of seeds. A smaller factor narrows an interval by less than a
quarter. If a larger factor were needed, more seeds would probably not help."""
MAX_SEEDS = 1000
"""Maximum number of seeds that a plan allows."""
TEST_SIZE_FACTORS = (4, 2)
"""Sizes of an added test, as multiples of the largest tested size. The first one that is not beyond
the target is used."""
MIN_GROWTH = 1.5
"""Minimum ratio of the interval's width at the target to its width at the largest tested size, for
a larger size to be added instead of seeds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NextRuns:
    """The runs that would decide some gates, and their cost."""

    gates: tuple[str, ...]
    """Names of the gates that the runs would decide."""
    sets: tuple[str, ...]
    """Values of `--set` for a child study, which runs them; empty if `transfer --spend` does."""
    num_runs: int
    """Minimum number of runs."""
    flops: float
    """FLOPs of these runs."""
    seconds: float | None
    """Time of the runs, by the study's own rate; None if unknown."""
    usd: float | None
    """Price of the runs in dollars, by the study's own rate; None if unknown."""
    times_spent: float | None
    """FLOPs divided by those of the study so far; None if unknown."""


def find_next_runs(
    study: Study, ledger: Ledger, findings: StudyFindings, accepted: Collection[str] = ()
) -> NextRuns | None:
    """Find the runs that would decide `transfer` and `ladder_tuned`; None if these gates do not
    lack runs.

    Args:
        study: Study as it is recorded.
        ledger: Ledger, read just now.
        findings: Findings from `gather_findings`.
        accepted: Names of accepted gates, for which nothing needs to be decided.
    """
    transfer_result, verdicts = findings.transferred, findings.verdicts
    if transfer_result is None or verdicts is None:
        return None
    checks = findings.checks
    gates = [
        judge_transfer(verdicts),
        *([judge_ladder_rates(checks)] if checks and checks.rungs else []),
    ]
    failed = {gate.name for gate in findings.gates if gate.outcome == "failed"} - {*accepted}
    if failed or any(gate.outcome == "failed" for gate in gates):
        return None  # more runs cannot repair a gate that failed
    undecided = {gate.name for gate in gates if gate.outcome == "cannot_tell"} - {*accepted}
    if verdicts.together.untested or any(map(verdicts.count_failed, transfer_result.tests)):
        undecided.discard("transfer")  # more runs decide neither a missing test nor a failed run
    sets: dict[str, object] = {}
    if "transfer" in undecided:
        at_guess = judge_tests(study, ledger, transfer_result, guess_target_sizes(study))
        if judge_transfer(at_guess).outcome == "cannot_tell":  # else `--spend` runs nothing
            missing = find_next_round_runs(study, ledger)
            if missing:
                return _build_next_runs(
                    study, ledger, ["transfer"], {}, compute_own_flops(missing.values())
                )
        sets |= _add_sizes(study, verdicts) or _add_transfer_seeds(study, verdicts)
    if "ladder_tuned" in undecided:
        sets |= _add_ladder_seeds(study, findings)
    if not sets:
        return None
    flops = _count_added_flops(study, ledger, transfer_result, sets)
    names = [gate.name for gate in gates if gate.name in undecided]
    return _build_next_runs(study, ledger, names, sets, flops)


def format_deciding_command(after: NextRuns, study_dir: Path) -> str:
    """Return the command that runs the result of `find_next_runs`."""
    plan, study = shlex.quote(str(study_dir / PLAN_FILE)), shlex.quote(str(study_dir))
    if not after.sets:
        return f"forerun transfer {plan} --study {study} --spend"
    child = shlex.quote(f"{study_dir}-more-runs")
    sets = " ".join(f"--set {shlex.quote(value)}" for value in after.sets)
    return f"forerun run {plan} --study {child} --fork {study} {sets}"


# ---- Plan values of a child study ----


def _add_sizes(study: Study, verdicts: Verdicts) -> dict[str, object]:
    """Return plan values with one more size on each axis whose target lies too far beyond the
    tested sizes; empty if there is no such axis.
    """
    undecided = [
        verdict
        for test, verdict in verdicts.tests
        if test.hyperparameter == LEARNING_RATE and verdict.outcome == "cannot_tell"
    ]
    sets: dict[str, object] = {}
    for verdict in filter(_is_far_beyond_tests, undecided):
        question = verdict.question
        sizes = list_axis_sizes(study, question.axis)
        factor = next(
            (factor for factor in TEST_SIZE_FACTORS if factor * sizes[-1] <= question.target_size),
            TEST_SIZE_FACTORS[-1],
        )
        transfer = study.plan.transfer
        key, values = {
            "width": ("widths", transfer.widths),
            "depth": ("depths", study.plan.tested_depths),
            "batch": ("batches", transfer.batches),
            "duration": ("durations", transfer.durations),
        }[question.axis]
        sets[f"transfer.{key}"] = (*values, factor * max(values))
    return sets


def _is_far_beyond_tests(verdict: Verdict) -> bool:
    """Return whether the interval of the optimum widens mainly between the largest size and the
    target.
    """
    optimum, offset = verdict.optima[-1], verdict.offset
    if offset is None or optimum.interval_log2 is None:
        return False
    low, high = optimum.interval_log2
    is_wider = offset.high - offset.low > MIN_GROWTH * (high - low)
    return is_wider and verdict.question.target_size > optimum.size


def _choose_seed_factor(value: float, high: float, margin: float) -> int:
    """Return the factor on the number of seeds that would bring the upper end of an interval down
    to the margin, if the estimate stays where it is.
    """
    if value >= margin:
        return MIN_FACTOR
    factor = math.ceil(((high - value) / (margin - value)) ** 2)
    return min(MAX_FACTOR, max(MIN_FACTOR, factor))


def _add_transfer_seeds(study: Study, verdicts: Verdicts) -> dict[str, object]:
    """Return plan values with more seeds for the tests; empty if there is no interval from which
    their number follows.
    """
    section, together, factor = study.plan.transfer, verdicts.together, MIN_FACTOR
    if together.outcome == "cannot_tell":
        if together.regret_nats is None:
            return {}
        regret = together.regret_nats
        factor = _choose_seed_factor(regret.estimate, regret.high, section.margin_nats)
    keys = ["num_seeds"]
    if {test.axis for test, _ in verdicts.tests} - {"width"}:
        keys.append("axis_num_seeds")
    return {f"transfer.{key}": min(MAX_SEEDS, factor * getattr(section, key)) for key in keys}


def _add_ladder_seeds(study: Study, findings: StudyFindings) -> dict[str, object]:
    """Return a plan value with more seeds for the checked rungs."""
    assert findings.checks is not None
    margin, number = study.plan.transfer.margin_nats, study.plan.ladder.check_num_seeds
    factors = [
        _choose_seed_factor(rung.excess.nats, rung.excess.interval[1], margin)
        for rung in findings.checks.rungs
        if rung.outcome == "cannot_tell" and rung.excess is not None
    ]
    factor = max(factors, default=MIN_FACTOR)
    return {"ladder.check_num_seeds": min(MAX_SEEDS, factor * number)}


# ---- Cost ----


def _count_added_flops(
    study: Study, ledger: Ledger, transfer_result: TransferResult, sets: Mapping[str, object]
) -> Sequence[float]:
    """Return the FLOPs of each run that a child study with these plan values adds."""
    plan, results, specs = study.plan, ledger.get_results(), list[RunSpec]()
    for key, value in sets.items():
        section, _, name = key.partition(".")
        changed = getattr(plan, section).model_copy(update={name: value})
        plan = plan.model_copy(update={section: changed})
    child = dataclasses.replace(study, plan=plan)
    if plan.transfer != study.plan.transfer:
        before, after = (
            {spec.id: spec for runs in first.values() for spec in runs}
            for first in (
                build_first_runs(any_study, transfer_result.best, guess_target_sizes(study))
                for any_study in (study, child)
            )
        )
        specs += [spec for run_id, spec in after.items() if run_id not in before]
        results = {}  # other tests move the learning rate a little, so all rungs train anew
    rungs = build_stage_runs(child, main_run_choice.build_ladder_runs(child, transfer_result))
    return compute_own_flops([*specs, *(spec for spec in rungs if spec.id not in results)])


def _build_next_runs(
    study: Study,
    ledger: Ledger,
    gates: list[str],
    sets: Mapping[str, object],
    flops: Iterable[float],
) -> NextRuns:
    """Return the runs with their gates, plan values, and cost."""
    run_flops, so_far = list(flops), compute_spend(ledger, study.plan.cluster.caps)
    share = sum(run_flops) / so_far.flops if so_far.flops else 0.0
    # Hours of drivers that have ended; if there are none, assume that no worker was idle.
    seconds = 3600.0 * so_far.hours
    seconds = seconds or sum(result.seconds for result in ledger.get_own_results()) / count_workers(
        study
    )
    return NextRuns(
        gates=tuple(gates),
        sets=tuple(f"{key}={format_toml(value)}" for key, value in sets.items()),
        num_runs=len(run_flops),
        flops=sum(run_flops),
        seconds=seconds * share or None,
        usd=None if so_far.usd is None else so_far.usd * share,
        times_spent=share or None,
    )
