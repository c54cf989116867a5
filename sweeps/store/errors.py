"""Errors of this package.

Each message names the value, the limit, and what to do. This module needs no third-party package.
"""

# ruff: noqa: N818  (users read these names: they state the problem instead of ending in `Error`)

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator
from pathlib import Path

from forerun._proxies.core.errors import ExitCode, InputError

_ADVICE = {
    errno.EACCES: "check the folder's permissions",
    errno.EPERM: "check the folder's permissions",
    errno.ENAMETOOLONG: "the path is too long; choose a folder with a shorter name",
    errno.ENOSPC: "free some space, then try again",
    errno.EDQUOT: "your quota is used up; free some space, then try again",
    errno.EROFS: "the disk is mounted read-only; choose a folder on another one",
    errno.EIO: "the disk fails; copy what can still be read to another one",
    errno.ELOOP: "its links form a loop; remove them",
    errno.EINVAL: "put the study's own file back in its place",
    errno.EISDIR: "put the study's own file back in its place",
    errno.ENOTDIR: "a part of the path is a file; name another folder",
    errno.ENOENT: "the folder is gone; put it back, or name another one",
    errno.ENOLCK: "this disk has no file locks; put the study on another one",
    errno.EOPNOTSUPP: "this disk has no file locks; put the study on another one",
    errno.EMFILE: "too many files are open; raise `ulimit -n`",
    errno.ESTALE: "the network disk has lost the file; try again once it answers",
}


def advise(error: OSError) -> str:
    """Return advice for a file that cannot be opened or written."""
    return _ADVICE.get(error.errno or 0, "name another folder")


class SweepError(InputError):
    """A sweep cannot continue for a reason that the user can fix; no recorded result is lost."""


class StudyMissing(SweepError):
    """The folder holds no study."""


class LedgerCorrupt(SweepError):
    """The ledger differs from what was written; it is refused as a whole and never guessed at."""

    exit_code = ExitCode.CORRUPT


class LedgerLost(LedgerCorrupt):
    """The ledger is missing or empty although there are curves of runs: nothing can be repaired."""


class LedgerRefused(SweepError):
    """A file of the ledger is a pipe, a device, or a folder, or its kind cannot be determined."""


class LedgerTooNew(SweepError):
    """The ledger has a newer schema than this version can read."""


class LedgerTooOld(SweepError):
    """The ledger has a schema from before the first release."""


class PlanChanged(SweepError):
    """The study was started from another plan; `changes` maps dotted keys to (old, new) as JSON
    text.
    """

    def __init__(
        self, changes: dict[str, tuple[str, str]], study_dir: Path, *, num_runs: int = 1
    ) -> None:
        self.changes = changes
        lines = [f"  {key}: {old} -> {new}" for key, (old, new) in changes.items()]
        advice = (
            "start a child study that imports the finished runs: forerun run PLAN --study "
            f"ANOTHER --fork {study_dir}"
        )
        if not num_runs:
            advice = f"begin a new study with --study ANOTHER: no run is recorded in {study_dir}"
        super().__init__(
            "the plan differs from the one this study was started with:\n"
            + "\n".join(lines)
            + f"\nrestore the old values, or {advice}"
        )


class ForkRefused(SweepError):
    """The study to import runs from has no usable run, or is this study itself."""


class StudyHeld(SweepError):
    """Another driver, which is alive, holds the study."""

    exit_code = ExitCode.HELD


class StaleDriver(SweepError):
    """Another driver has taken over the study: the records of this driver are refused."""

    exit_code = ExitCode.HELD


class FolderRemoved(SweepError):
    """The folder of a study or a run was removed or emptied while a command was using it."""


class DuplicateRecord(SweepError):
    """The ledger already has this (kind, key); records are never replaced."""

    exit_code = ExitCode.BUG


class DiskFull(SweepError):
    """A write did not fit, or the disk failed; earlier records are kept."""


@contextlib.contextmanager
def explain_write_errors(path: Path, advice: str) -> Iterator[None]:
    """Turn operating system errors while writing into a DiskFull that names the file."""
    try:
        yield
    except OSError as error:
        raise DiskFull(f"{path}: {error.strerror}: {advice}") from error


KEPT_ADVICE = "free some space and resume; recorded results are kept"


class CurveCorrupt(SweepError):
    """A curve file is missing, unreadable, or different from the one that its result names."""

    exit_code = ExitCode.CORRUPT


class PoolDead(SweepError):
    """The whole pool is gone, not just one of its workers."""


class ClusterUnfit(SweepError):
    """The plan's cluster cannot be joined, has too few free resources, or cannot run the study;
    each node is named.
    """


class BudgetSpent(SweepError):
    """A cap of the plan is reached; finished runs are recorded, and runs in flight are saved."""

    exit_code = ExitCode.CANNOT_TELL


class SourceStuck(SweepError):
    """The source waits for results although no run is running or queued."""

    exit_code = ExitCode.BUG


class RunsFail(SweepError):
    """A run failed as often as allowed before any run finished, so the cause is probably not that
    run.
    """
