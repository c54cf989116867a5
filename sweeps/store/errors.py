"""What this room refuses, each by name: value, limit and what to do are in the message. Standard library only."""

# ruff: noqa: N818  (they are named for what is the case, not `...Error`: the user reads them)

from __future__ import annotations

from pathlib import Path


class SweepError(ValueError):
    """A sweep cannot go on, for a reason the user can act on. Nothing recorded is lost."""


class StudyMissing(SweepError):
    """There is no study in this folder."""


class LedgerCorrupt(SweepError):
    """The ledger's bytes are not what was written; refused as a whole, never guessed at."""


class LedgerLost(LedgerCorrupt):
    """There is no ledger, or an empty one, although runs have left their curves: nothing is there to repair."""


class LedgerTooNew(SweepError):
    """The ledger has a schema that this version does not know."""


class LedgerTooOld(SweepError):
    """The ledger has a schema of before the first release."""


class PlanChanged(SweepError):
    """The study was started from another plan. `changes` maps dotted keys to (old, new) as JSON text."""

    def __init__(self, changes: dict[str, tuple[str, str]], study_dir: Path) -> None:
        self.changes = changes
        lines = [f"  {key}: {old} -> {new}" for key, (old, new) in changes.items()]
        super().__init__(
            "the plan differs from the one this study was started with:\n" + "\n".join(lines) +
            "\nput the old values back, or start a child study that takes over the finished runs: "
            f"forerun run PLAN --study ANOTHER --fork {study_dir}"
        )  # fmt: skip


class ForkRefused(SweepError):
    """The study named to import runs from has none that this one could use, or is this one."""


class StudyHeld(SweepError):
    """Another driver, alive, holds the study."""


class StaleDriver(SweepError):
    """Another driver has taken the study over: this one's records are refused."""


class DuplicateRecord(SweepError):
    """The ledger has this (kind, key) already; records are never replaced."""


class DiskFull(SweepError):
    """A write did not fit (or the disk failed); what was recorded before stands."""


class CurveCorrupt(SweepError):
    """A curve file is missing, unreadable, or not the one its result names."""


class PoolDead(SweepError):
    """The pool as a whole is gone, not just one of its workers."""


class ClusterUnfit(SweepError):
    """The cluster that the plan names cannot be joined, has no room, or cannot run the study; each node is named."""


class BudgetSpent(SweepError):
    """A cap of the plan is reached. Everything finished is recorded, what was in flight is saved."""


class SourceStuck(SweepError):
    """The source waits for results although nothing is running or queued."""


class RunsFail(SweepError):
    """A run failed as often as it may, and nothing has ended yet: what fails is likely not that run."""
