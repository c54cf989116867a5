"""Check of the study's folder: free space, and the kind of filesystem."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from forerun._launcher.cli.doctor.findings import DoctorFinding, fail, ok, warn
from forerun._proxies.core.notation import format_bytes

MIN_BYTES, ENOUGH_BYTES = 100 * 10**6, 2 * 10**9
"""Free bytes below which the folder fails, and below which it gets a warning. The demo's study
takes about 20 MB; checkpoints of a large proxy take more.
"""
_NETWORK_FILESYSTEMS = (
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
"""Beginnings of the types of filesystems that several machines share."""


def check_folder(path: Path) -> DoctorFinding:
    """Check free space and filesystem of the folder in which a study would be. To test whether the
    folder can be written, a temporary folder is made there and removed.
    """
    existing = next(
        folder for folder in (path.absolute(), *path.absolute().parents) if folder.exists()
    )
    try:
        with tempfile.TemporaryDirectory(
            prefix=".forerun-doctor-", dir=existing, ignore_cleanup_errors=True
        ):
            return judge_room(path, shutil.disk_usage(existing).free, find_filesystem(existing))
    except OSError as error:
        fact = f"{existing}: {error.strerror}: nothing can be written"
        return fail("study folder", fact, "name another folder with --study")


def judge_room(path: Path, free_bytes: int, filesystem: str) -> DoctorFinding:
    """Judge whether a study fits, and whether locks hold between machines: on some network
    filesystems, two drivers could write to one study.
    """
    name, free = "study folder", f"{format_bytes(free_bytes)} free at {path}"
    fix = "free some space, or choose another folder with --study"
    if free_bytes < MIN_BYTES:
        return fail(name, f"{free}: a study needs {format_bytes(MIN_BYTES)}", fix)
    if free_bytes < ENOUGH_BYTES:
        return warn(name, f"{free}: `forerun estimate PLAN` counts what a study needs", fix)
    if filesystem.startswith(_NETWORK_FILESYSTEMS):
        fact = (
            f"{free}, on {filesystem}: locks may not hold there between machines, which one "
            "machine cannot test"
        )
        fix = "start all drivers of a study on one machine, or use --study /local/disk/study"
        return warn(name, fact, fix)
    return ok(name, f"{free}, {filesystem or 'filesystem not known'}")


def find_filesystem(path: Path, mounts: Path = Path("/proc/self/mountinfo")) -> str:
    """Return the type of the innermost mount that contains a path; empty if the system does not
    tell.
    """
    try:
        lines = mounts.read_text().splitlines()
    except OSError:
        return ""
    depth, kind = -1, ""
    for line in lines:
        # The fifth field is the mount point; the type follows the separator.
        head, _, tail = line.partition(" - ")
        point = Path(head.split()[4].replace("\\040", " "))
        # If two mounts share a mount point, the later one counts.
        if path.resolve().is_relative_to(point) and len(point.parts) >= depth:
            depth, kind = len(point.parts), tail.split()[0]
    return kind
