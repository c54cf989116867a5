"""Fork of a study: a child study imports the finished runs of its parent, with their curves, so
that these runs are paid for once. Runs are identified by id.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from forerun._proxies.core.canon import Json
from forerun._sweeps.store.curves import append_noise, load_curve, load_noise, store_curve
from forerun._sweeps.store.errors import CurveCorrupt, ForkRefused
from forerun._sweeps.store.ledger import IMPORTED, LEDGER_NAME, Ledger

# Failed runs are not imported, because they may succeed in the child. Pruned runs are not, because
# the decision depended on the parent's other runs.
_ENDED_WELL = ("finished", "diverged")


@dataclass(frozen=True, kw_only=True, slots=True)
class ImportedRecords:
    """The result of an import."""

    num_runs: int
    """Number of runs that were imported now."""
    num_known: int
    """Number of the parent's runs whose outcome the child already had."""
    damaged: tuple[str, ...]
    """A sentence for every run whose curve is damaged: it is not imported, and runs again if it is
    requested.
    """


def read_parent(study_dir: Path, parent_dir: Path, must_match: Mapping[str, Json]) -> Ledger:
    """Read the parent's records as they are now; the parent may be running, and is not changed.

    Args:
        study_dir: folder of the child, which may be missing.
        parent_dir: folder of the parent.
        must_match: keys of the plan that decide what a run means, with the child's values.

    Raises:
        StudyMissing, LedgerCorrupt, LedgerTooNew, LedgerTooOld: the parent cannot be read.
        ForkRefused: the parent is the child, or its runs have other data or another meaning.
    """
    if _is_same(study_dir, parent_dir):
        raise ForkRefused(
            f"--fork {parent_dir}: this is the same study; name a new folder with --study"
        )
    parent = Ledger.read(parent_dir)
    plan = parent.plan if isinstance(parent.plan, dict) else {}
    differences = {
        key: (plan.get(key), value) for key, value in must_match.items() if plan.get(key) != value
    }
    if differences:
        pairs = ", ".join(
            f"{key} is {old!r} there and {new!r} here" for key, (old, new) in differences.items()
        )
        raise ForkRefused(
            f"--fork {parent_dir}: none of its runs can be used: {pairs}; run without --fork"
        )
    return parent


def import_runs(
    ledger: Ledger, study_dir: Path, parent: Ledger, parent_dir: Path
) -> ImportedRecords:
    """Record every run of `parent` that ended well and has no outcome in the child, its curve
    first.

    An import that was interrupted can be called again. A `fork` record (the parent's folder and
    head) precedes the imported runs and names their origin.

    Raises:
        DiskFull, StaleDriver: see `forerun._sweeps.store.errors`; recorded runs are kept.
    """
    ended = [run for run in parent.read_runs() if run.result.status in _ENDED_WELL]
    missing = [run for run in ended if run.spec.id not in ledger.get_results()]
    if missing and ledger.find("fork", parent.head_hash) is None:
        body = {
            "parent": str(parent_dir.resolve()),
            "head_hash": parent.head_hash,
            "num_runs": len(missing),
        }
        ledger.append("fork", parent.head_hash, body)
    damaged = []
    for run in missing:
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
        num_runs=len(missing) - len(damaged),
        num_known=len(ended) - len(missing),
        damaged=tuple(damaged),
    )


def _is_same(study_dir: Path, parent_dir: Path) -> bool:
    """Return whether two folders are the same, or hold the same ledger."""
    pairs = ((study_dir, parent_dir), (study_dir / LEDGER_NAME, parent_dir / LEDGER_NAME))
    return any(
        path.exists() and parent_path.exists() and path.samefile(parent_path)
        for path, parent_path in pairs
    )
