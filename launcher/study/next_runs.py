"""The further runs that would decide gates that cannot tell for lack of runs, and the cost of these
runs. No torch.

If the verdicts ask for runs at certain sizes and values, these are the runs of `forerun transfer
--spend`. If not, more seeds narrow the intervals by the square root of their number, so the number
follows from how far the upper end lies above the margin. More seeds need a child study, because the
number of seeds is part of a study's question. Time and price follow from this study's own rates so
far, by FLOPs.
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
"""Limits of the factor on the number of seeds. A smaller factor narrows an interval by less than a
quarter; if a larger one were needed, seeds are probably not what is missing."""
MOST_SEEDS = 1000
"""Maximum number of seeds that a plan allows."""


def next_runs(
    study: Study, ledger: Ledger, findings: StudyFindings, accepted: Collection[str] = ()
) -> dict[str, Json] | None:
    """Find the runs that would decide `transfer` and `ladder_tuned`; None if these gates do not
    lack runs.

    Args:
        study: Study as it is recorded.
        ledger: Ledger, read just now.
        findings: Findings from `gather`.
        accepted: Names of accepted gates, for which nothing needs to be decided.

    Returns:
        gates: Gates that the runs would decide.
        sets: Plan values of the child study; empty if `transfer --spend` runs them.
        num_runs, flops: Minimum number of runs and FLOPs.
        seconds, usd: Time and price by the study's own rates; null if unknown.
        times_spent: FLOPs divided by those of the study so far; null if unknown.
    """
    if findings.transferred is None or findings.verdicts is None:
        return None
    if any(gate.outcome == "failed" and gate.name not in accepted for gate in findings.gates):
        return None  # more runs cannot repair a gate that failed
    transfer_outcome = transfer_gate(findings.verdicts).outcome
    checks = findings.checks
    tuned = tuned_gate(checks) if checks is not None and checks.rungs else None
    if "failed" in (transfer_outcome, tuned and tuned.outcome):
        return None  # a failure is decided, and must be dealt with first
    # More seeds decide neither an axis without a test nor a failed run.
    lacking = findings.verdicts.together.untested or any(
        map(findings.verdicts.num_failed, findings.transferred.tests)
    )
    transfer = transfer_outcome == "cannot_tell" and not lacking and "transfer" not in accepted
    ladder = tuned is not None and tuned.outcome == "cannot_tell" and "ladder_tuned" not in accepted
    if transfer and not ladder:
        missing = _find_spend_runs(study, ledger, findings.transferred)
        if missing:
            return _build_body(study, ledger, ["transfer"], {}, own_flops(missing.values()))
    sets = (_set_transfer_seeds(study, findings) if transfer else {}) | (
        _set_ladder_seeds(study, findings) if ladder else {}
    )
    gates = [
        name for name, is_open in (("transfer", transfer), ("ladder_tuned", ladder)) if is_open
    ]
    if not sets:
        return None
    flops = _count_added_flops(study, ledger, findings.transferred, sets)
    return _build_body(study, ledger, gates, sets, flops)


def deciding_command(after: Any, study_dir: Path) -> str:
    """Return the command that runs the result of `next_runs`."""
    plan, study = shlex.quote(str(study_dir / PLAN_FILE)), shlex.quote(str(study_dir))
    if not after["sets"]:
        return f"forerun transfer {plan} --study {study} --spend"
    child, sets = (
        shlex.quote(f"{study_dir}-more-seeds"),
        " ".join(f"--set {value}" for value in after["sets"]),
    )
    return f"forerun run {plan} --study {child} --fork {study} {sets}"


def _find_spend_runs(study: Study, ledger: Ledger, moved: Transferred) -> dict[str, RunSpec] | None:
    """Return the runs of one more round if `--spend` would begin one; else None."""
    verdicts = verdicts_at(study, ledger, moved, target_guess(study))
    if transfer_gate(verdicts).outcome != "cannot_tell":
        return None
    return missing_after_another_round(study, ledger)


def _choose_seed_factor(value: float | None, high: float | None, margin: float) -> int:
    """Return the factor on the number of seeds that would bring the upper end of an interval down
    to the margin, if the estimate stays where it is.
    """
    if value is None or high is None or value >= margin:
        return LEAST_FACTOR
    factor = math.ceil(((high - value) / (margin - value)) ** 2)
    return min(MOST_FACTOR, max(LEAST_FACTOR, factor))


def _set_transfer_seeds(study: Study, findings: StudyFindings) -> dict[str, int]:
    """Return plan values with more seeds for the tests; empty if no interval tells how many."""
    assert findings.verdicts is not None
    section, together = study.plan.transfer, findings.verdicts.together
    regret = together.regret_nats
    if together.outcome == "cannot_tell" and regret is None:
        return {}
    is_open = together.outcome == "cannot_tell" and regret is not None
    factor = (
        _choose_seed_factor(regret.value, regret.high, section.margin_nats)
        if is_open and regret is not None
        else LEAST_FACTOR
    )
    keys = {"num_seeds": section.num_seeds}
    if {test.axis for test, _ in findings.verdicts.tests} - {"width"}:
        keys["axis_num_seeds"] = section.axis_num_seeds
    return {f"transfer.{key}": min(MOST_SEEDS, factor * number) for key, number in keys.items()}


def _set_ladder_seeds(study: Study, findings: StudyFindings) -> dict[str, int]:
    """Return a plan value with more seeds for the checked rungs."""
    assert findings.checks is not None
    open_excesses = [
        rung.excess
        for rung in findings.checks.rungs
        if rung.outcome == "cannot_tell" and rung.excess is not None
    ]
    margin, section = study.plan.transfer.margin_nats, study.plan.ladder
    factor = max(
        (_choose_seed_factor(excess.nats, excess.interval[1], margin) for excess in open_excesses),
        default=LEAST_FACTOR,
    )
    return {"ladder.check_num_seeds": min(MOST_SEEDS, factor * section.check_num_seeds)}


def _count_added_flops(
    study: Study, ledger: Ledger, moved: Transferred, sets: dict[str, int]
) -> list[float]:
    """Return the FLOPs of each run that a child study with these values adds. Runs of further seeds
    cost as much as those of the present seeds.
    """
    plan, results = study.plan, ledger.results()
    values = {key.partition(".")[2]: number for key, number in sets.items()}
    added: list[float] = []
    if "num_seeds" in values:  # more seeds move the learning rate a little, so all rungs train anew
        results = {}
        times = values["num_seeds"] / plan.transfer.num_seeds - 1
        specs = {spec.id: spec for test in moved.tests for spec, _ in test.condition.specs}
        added += own_flops(specs.values()) * round(times)
    ladder = plan.ladder.model_copy(
        update={k: n for k, n in values.items() if k == "check_num_seeds"}
    )
    child = dataclasses.replace(study, plan=plan.model_copy(update={"ladder": ladder}))
    rungs = stage_specs(child, decide.ladder_specs(child, moved))
    return added + own_flops(spec for spec in rungs if spec.id not in results)


def _build_body(
    study: Study, ledger: Ledger, gates: list[str], sets: dict[str, int], flops: Iterable[float]
) -> dict[str, Json]:
    """Return the body of the answer: gates, plan values, and cost of the runs."""
    run_flops, so_far = list(flops), spent(ledger, study.plan.cluster.caps)
    share = sum(run_flops) / so_far.flops if so_far.flops else 0.0
    # Hours of drivers that have ended; if there are none, assume that no worker was idle.
    seconds = 3600.0 * so_far.hours
    seconds = seconds or sum(result.seconds for result in ledger.own_results()) / num_workers(study)
    return {
        "gates": [*gates],
        "sets": [f"{key}={number}" for key, number in sets.items()],
        "num_runs": len(run_flops),
        "flops": sum(run_flops),
        "seconds": seconds * share or None,
        "usd": None if so_far.usd is None else so_far.usd * share,
        "times_spent": share or None,
    }
