"""A child study takes over what its parent has finished: outcomes found by id, with their curves,
paid for once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from proxies.core.canon import Json
from sweeps.store.curves import append_noise, load_curve, load_noise, store_curve
from sweeps.store.errors import CurveCorrupt, ForkRefused
from sweeps.store.ledger import IMPORTED, LEDGER_NAME, Ledger

# what failed may work here; what was pruned lost against that study's runs
_ENDED_WELL = ("finished", "diverged")


@dataclass(frozen=True, kw_only=True, slots=True)
class ImportedRecords:
    """What was taken over."""

    num_runs: int
    """Just now."""
    num_known: int
    """That the child had an outcome of already."""
    damaged: tuple[str, ...]
    """A sentence for every run whose curve is not sound: not taken over, it runs again if it is
    asked for."""


def read_parent(study_dir: Path, parent_dir: Path, same: Mapping[str, Json]) -> Ledger:
    """The parent's records as they are now; it is only read, and may be running.

    Args:
        study_dir: the child, which need not be there yet.
        parent_dir: where runs are taken from.
        same: keys of the plan that decide what a run means, with the child's values.

    Raises:
        StudyMissing, LedgerCorrupt, LedgerTooNew, LedgerTooOld: of the parent.
        ForkRefused: the parent is the child, or its runs are of other data or of another meaning.
    """
    if _is_same(study_dir, parent_dir):
        raise ForkRefused(
            f"--fork {parent_dir}: this is the same study; name a new folder with --study"
        )
    parent = Ledger.read(parent_dir)
    plan = parent.plan if isinstance(parent.plan, dict) else {}
    other = {key: (plan.get(key), value) for key, value in same.items() if plan.get(key) != value}
    if other:
        pairs = ", ".join(
            f"{key} is {old!r} there and {new!r} here" for key, (old, new) in other.items()
        )
        raise ForkRefused(
            f"--fork {parent_dir}: none of its runs can be used: {pairs}; run without --fork"
        )
    return parent


def import_runs(
    ledger: Ledger, study_dir: Path, parent: Ledger, parent_dir: Path
) -> ImportedRecords:
    """Record every run of `parent` that ended well and has no outcome here, its curve first; cut
    short, go on again.

    A `fork` record (the parent's folder and head) comes before what is taken over, so that it names
    its origin.

    Raises:
        DiskFull, StaleDriver: as named; what was recorded is kept.
    """
    ended = [run for run in parent.runs() if run.result.status in _ENDED_WELL]
    wanted = [run for run in ended if run.spec.id not in ledger.results()]
    if wanted and ledger.find("fork", parent.head_hash) is None:
        body = {
            "parent": str(parent_dir.resolve()),
            "head_hash": parent.head_hash,
            "num_runs": len(wanted),
        }
        ledger.append("fork", parent.head_hash, body)
    damaged = []
    for run in wanted:
        try:
            curve = load_curve(parent_dir, run.result)
        except CurveCorrupt as error:
            damaged.append(str(error))
            continue
        store_curve(study_dir, run.spec.id, curve)
        for look in load_noise(parent_dir, run.spec.id):
            append_noise(study_dir, run.spec.id, look)
        ledger.append(IMPORTED, run.spec.id, run)
    return ImportedRecords(
        num_runs=len(wanted) - len(damaged),
        num_known=len(ended) - len(wanted),
        damaged=tuple(damaged),
    )


def _is_same(study_dir: Path, parent_dir: Path) -> bool:
    """Whether two folders are one, by whatever path, or hold one ledger."""
    pairs = ((study_dir, parent_dir), (study_dir / LEDGER_NAME, parent_dir / LEDGER_NAME))
    return any(
        ours.exists() and theirs.exists() and ours.samefile(theirs) for ours, theirs in pairs
    )
