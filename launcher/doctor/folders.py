"""The study's folder: free space, and the kind of filesystem that it lies on."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from launcher.doctor.findings import DoctorFinding, fail, ok, warn
from proxies.core.notation import format_bytes

LEAST_BYTES, ENOUGH_BYTES = 100 * 10**6, 2 * 10**9
"""Free where a study lies: the demo's takes some 20 MB, checkpoints of a large proxy more."""
_SHARED = (
    "nfs",
    "cifs",
    "smb",
    "9p",
    "afs",
    "ceph",
    "gluster",
    "lustre",
    "gpfs",
    "beegfs",
    "fuse.sshfs",
    "fuse.s3fs",
)


def check_folder(path: Path) -> DoctorFinding:
    """Free space and filesystem where a study would lie; a trial file is written there and
    removed.
    """
    there = next(each for each in (path.absolute(), *path.absolute().parents) if each.exists())
    try:
        with tempfile.TemporaryDirectory(
            prefix=".forerun-doctor-", dir=there, ignore_cleanup_errors=True
        ):
            return judge_room(path, shutil.disk_usage(there).free, filesystem_of(there))
    except OSError as error:
        sentence = f"{there}: {error.strerror}: nothing can be written"
        return fail("study folder", sentence, "name another folder with --study")


def judge_room(path: Path, free_bytes: int, filesystem: str) -> DoctorFinding:
    """Whether a study fits, and whether drivers on two machines may miss each other's locks."""
    name, free = "study folder", f"{format_bytes(free_bytes)} free at {path}"
    mend = "free some space, or choose another folder with --study"
    if free_bytes < LEAST_BYTES:
        return fail(name, f"{free}: a study needs {format_bytes(LEAST_BYTES)}", mend)
    if free_bytes < ENOUGH_BYTES:
        return warn(name, f"{free}: `forerun estimate PLAN` counts what a study needs", mend)
    if filesystem.startswith(_SHARED):
        sentence = (
            f"{free}, on {filesystem}: locks may not hold there between machines, which one "
            "machine cannot test"
        )
        return warn(
            name,
            sentence,
            "start all drivers of a study on one machine, or use --study /local/disk/study",
        )
    return ok(name, f"{free}, {filesystem or 'filesystem not known'}")


def filesystem_of(path: Path, mounts: Path = Path("/proc/self/mountinfo")) -> str:
    """The type of the innermost mount that a path lies in; empty where the system does not say."""
    try:
        lines = mounts.read_text().splitlines()
    except OSError:
        return ""
    best, kind = -1, ""
    for line in lines:
        head, _, tail = line.partition(" - ")
        point = Path(head.split()[4].replace("\\040", " "))
        # of two on one point the later counts
        if path.resolve().is_relative_to(point) and len(point.parts) >= best:
            best, kind = len(point.parts), tail.split()[0]
    return kind
