"""Which further runs would decide gates that cannot tell for lack of runs, and what those take. No torch.

Where the verdicts ask for runs at sizes and values of their own, these are what `forerun transfer --spend` runs. Where
they ask for none, more seeds narrow the intervals: as the root of their number, so the number follows from how far the
upper end lies above the margin. That takes a child study, since the number of seeds is part of a study's question.
Time and price are this study's own so far, by FLOPs.
"""

from __future__ import annotations

import dataclasses
import math
import shlex
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.calibration.study_cost import num_workers
from launcher.experiments.ladder import stage_specs
from launcher.experiments.transferred_values import (
    Transferred,
    missing_after_another_round,
    target_guess,
    verdicts_at,
)
from launcher.plan.study import PLAN_FILE, Study
from launcher.study import decide
from launcher.study.gates import transfer_gate, tuned_gate
from proxies.core.branches import own_flops
from proxies.core.canon import Json
from proxies.core.spec import RunSpec
from sweeps.run.budget import spent

if TYPE_CHECKING:
    from launcher.study.evidence import StudyFindings
    from sweeps.store.ledger import Ledger

LEAST_FACTOR, MOST_FACTOR = 2, 8
"""Times the seeds: fewer narrow an interval by less than a quarter; beyond, seeds are hardly what is missing."""
MOST_SEEDS = 1000
"""As the plan allows."""


def next_runs(
    study: Study, ledger: Ledger, found: StudyFindings, accepted: Collection[str] = ()
) -> dict[str, Json] | None:
    """What would decide `transfer` and `ladder_tuned`, if it is runs that they lack; None if it is not.

    Args:
        study: as it is recorded.
        ledger: as just read.
        found: what `gather` gave.
        accepted: names of gates that somebody accepted: nothing is to be decided there.

    Returns:
        gates: those that it is for. sets: plan values of the child study; empty where `transfer --spend` runs them.
        num_runs, flops: what it takes, at least. seconds, usd: the same by the study's own rate; null if unknown.
        times_spent: the FLOPs over those of the study so far; null if unknown.
    """
    if found.transferred is None or found.verdicts is None:
        return None
    if any(gate.outcome == "failed" and gate.name not in accepted for gate in found.gates):
        return None  # these runs mend no gate that failed, so they would open nothing
    judged = transfer_gate(found.verdicts).outcome
    tuned = tuned_gate(found.checks) if found.checks is not None and found.checks.rungs else None
    if "failed" in (judged, tuned and tuned.outcome):
        return None  # that is decided, and comes first
    # An axis without a test, or a failed run, is not decided by seeds.
    lacking = found.verdicts.together.untested or any(map(found.verdicts.num_failed, found.transferred.tests))
    transfer = judged == "cannot_tell" and not lacking and "transfer" not in accepted
    ladder = tuned is not None and tuned.outcome == "cannot_tell" and "ladder_tuned" not in accepted
    if transfer and not ladder and (missing := _by_spending(study, ledger, found.transferred)):
        return _taking(study, ledger, ["transfer"], {}, own_flops(missing.values()))
    sets = (_transfer_sets(study, found) if transfer else {}) | (_ladder_sets(study, found) if ladder else {})
    gates = [name for name, open_ in (("transfer", transfer), ("ladder_tuned", ladder)) if open_]
    return _taking(study, ledger, gates, sets, _added(study, ledger, found.transferred, sets)) if sets else None


def deciding_command(after: Any, study_dir: Path) -> str:
    """The command that runs what `next_runs` found."""
    plan, study = shlex.quote(str(study_dir / PLAN_FILE)), shlex.quote(str(study_dir))
    if not after["sets"]:
        return f"forerun transfer {plan} --study {study} --spend"
    child, sets = shlex.quote(f"{study_dir}-more-seeds"), " ".join(f"--set {value}" for value in after["sets"])
    return f"forerun run {plan} --study {child} --fork {study} {sets}"


def _by_spending(study: Study, ledger: Ledger, moved: Transferred) -> dict[str, RunSpec] | None:
    """The runs of one more round, if `--spend` would begin one."""
    verdicts = verdicts_at(study, ledger, moved, target_guess(study))
    if transfer_gate(verdicts).outcome != "cannot_tell":
        return None
    return missing_after_another_round(study, ledger)


def _factor(value: float | None, high: float | None, margin: float) -> int:
    """Times the seeds after which the upper end of an interval would lie at the margin, the estimate staying put."""
    if value is None or high is None or value >= margin:
        return LEAST_FACTOR
    wanted = math.ceil(((high - value) / (margin - value)) ** 2)
    return min(MOST_FACTOR, max(LEAST_FACTOR, wanted))


def _transfer_sets(study: Study, found: StudyFindings) -> dict[str, int]:
    """Seeds of the tests, as plan values; none where no interval tells how many."""
    assert found.verdicts is not None
    section, together = study.plan.transfer, found.verdicts.together
    cost = together.regret_nats
    if together.outcome == "cannot_tell" and cost is None:
        return {}
    open_ = together.outcome == "cannot_tell" and cost is not None
    times = _factor(cost.value, cost.high, section.margin_nats) if open_ and cost is not None else LEAST_FACTOR
    keys = {"num_seeds": section.num_seeds}
    if {test.axis for test, _ in found.verdicts.tests} - {"width"}:
        keys["axis_num_seeds"] = section.axis_num_seeds
    return {f"transfer.{key}": min(MOST_SEEDS, times * number) for key, number in keys.items()}


def _ladder_sets(study: Study, found: StudyFindings) -> dict[str, int]:
    """Seeds of the checked rungs, as a plan value."""
    assert found.checks is not None
    open_ = [rung.excess for rung in found.checks.rungs if rung.outcome == "cannot_tell" and rung.excess is not None]
    margin, section = study.plan.transfer.margin_nats, study.plan.ladder
    times = max((_factor(excess.nats, excess.interval[1], margin) for excess in open_), default=LEAST_FACTOR)
    return {"ladder.check_num_seeds": min(MOST_SEEDS, times * section.check_num_seeds)}


def _added(study: Study, ledger: Ledger, moved: Transferred, sets: dict[str, int]) -> list[float]:
    """FLOPs of each run that a child study with these values adds; runs of further seeds are like those there are."""
    plan, results = study.plan, ledger.results()
    values = {key.partition(".")[2]: number for key, number in sets.items()}
    added: list[float] = []
    if "num_seeds" in values:  # then the rate moves a little, and the rungs with it
        results = {}
        times = values["num_seeds"] / plan.transfer.num_seeds - 1
        specs = {spec.id: spec for test in moved.tests for spec, _ in test.condition.specs}
        added += own_flops(specs.values()) * round(times)
    ladder = plan.ladder.model_copy(update={k: n for k, n in values.items() if k == "check_num_seeds"})
    child = dataclasses.replace(study, plan=plan.model_copy(update={"ladder": ladder}))
    rungs = stage_specs(child, decide.ladder_specs(child, moved))
    return added + own_flops(spec for spec in rungs if spec.id not in results)


def _taking(
    study: Study, ledger: Ledger, gates: list[str], sets: dict[str, int], flops: Iterable[float]
) -> dict[str, Json]:
    every, so_far = list(flops), spent(ledger, study.plan.cluster.caps)
    share = sum(every) / so_far.flops if so_far.flops else 0.0
    seconds = 3600.0 * so_far.hours  # of drivers that have ended; before, as if no worker had been idle
    seconds = seconds or sum(result.seconds for result in ledger.own_results()) / num_workers(study)
    return {
        "gates": [*gates], "sets": [f"{key}={number}" for key, number in sets.items()],
        "num_runs": len(every), "flops": sum(every),
        "seconds": seconds * share or None,
        "usd": None if so_far.usd is None else so_far.usd * share,
        "times_spent": share or None,
    }  # fmt: skip
