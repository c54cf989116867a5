"""Runs that failed for good: named before any verdict, a gate of freezing, and how to have them run again."""

from __future__ import annotations

from pathlib import Path

from launcher.plan.study import PLAN_FILE
from launcher.study.gates import Gate
from sweeps.store.ledger import Ledger

GATE = "runs_ended"
_NUM_NAMED = 8


def failed_text(ledger: Ledger, study_dir: Path) -> str:
    """Every run that failed, with its reason and the command that runs them again; empty where there is none.

    That is a child study: what was suggested after a failure took it for one.
    """
    failed = [result for result in ledger.results().values() if result.status == "failed"]
    if not failed:
        return ""
    named = [f"{result.id[:12]} ({result.reason})" for result in failed[:_NUM_NAMED]]
    named += [f"{len(failed) - _NUM_NAMED} more"] if len(failed) > _NUM_NAMED else []
    what = "1 run failed for good, and says" if len(failed) == 1 else f"{len(failed)} runs failed for good, and say"
    return (
        f"{what} nothing: {'; '.join(named)}. `forerun run {study_dir / PLAN_FILE} --study ANOTHER --fork {study_dir}` "
        "runs what failed again, and keeps the others"
    )


def failed_gates(ledger: Ledger, study_dir: Path) -> tuple[Gate, ...]:
    """The gate of the runs that failed: none where none did."""
    said = failed_text(ledger, study_dir)
    return (Gate(name=GATE, outcome="cannot_tell", reason=said),) if said else ()
