"""The study's folder: room and locks."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from pathlib import Path

from launcher.doctor.findings import Finding, fail, ok, warn

LEAST_BYTES, ENOUGH_BYTES = 100 * 10**6, 2 * 10**9
"""Free where a study lies: the demo's takes some 20 MB, checkpoints of a large proxy more."""
_SHARED = ("nfs", "cifs", "smb", "9p", "afs", "ceph", "gluster", "lustre", "gpfs", "beegfs", "fuse.sshfs", "fuse.s3fs")
_ELSEWHERE = "name a folder on a local disk: --study /local/disk/study"
_LOCK_SECONDS = 20.0
_OTHER = """
import fcntl, os, sqlite3, sys
answers = []
try:
    sqlite3.connect(sys.argv[1], timeout=0, isolation_level=None).execute("BEGIN IMMEDIATE")
    answers.append("free")
except sqlite3.OperationalError as error:
    answers.append("held" if "locked" in str(error) else str(error))
try:
    fcntl.flock(os.open(sys.argv[2], os.O_RDWR), fcntl.LOCK_EX | fcntl.LOCK_NB)
    answers.append("free")
except BlockingIOError:
    answers.append("held")
print(*answers, sep="\\n")
"""
"""Of another process: the kernel does not hold a process's own locks against it."""


def nearest(path: Path) -> Path:
    """The path, or the closest folder above it that exists."""
    return next(each for each in (path.absolute(), *path.absolute().parents) if each.exists())


def check_folder(path: Path) -> list[Finding]:
    """Room and locks where a study would lie, tried in a folder made there and removed again."""
    there = nearest(path)
    try:
        with tempfile.TemporaryDirectory(prefix=".forerun-doctor-", dir=there, ignore_cleanup_errors=True) as name:
            inner = Path(name)
            kind, free = filesystem_of(there), shutil.disk_usage(inner).free
            return [judge_room(path, free, kind), judge_locks(locks_problem(inner), kind)]
    except OSError as error:
        said = f"{there}: {error.strerror}: nothing can be written"
        return [fail("study folder", said, "name another folder with --study")]


def judge_room(path: Path, free_bytes: int, filesystem: str) -> Finding:
    """Whether a study fits."""
    name, free = "study folder", f"{free_bytes / 1e9:,.1f} GB free at {path}"
    mend = "free some space, or --study elsewhere"
    if free_bytes < LEAST_BYTES:
        return fail(name, f"{free}: a study needs {LEAST_BYTES / 1e6:.0f} MB", mend)
    if free_bytes < ENOUGH_BYTES:
        return warn(name, f"{free}: `forerun estimate PLAN` says what a study takes", mend)
    return ok(name, f"{free}, {filesystem or 'filesystem not known'}")


def judge_locks(problem: str, filesystem: str) -> Finding:
    """Whether two drivers are kept from writing one ledger."""
    name = "study folder, locks"
    if problem:
        return fail(name, f"{problem}: two drivers could write one ledger", _ELSEWHERE)
    if filesystem.startswith(_SHARED):
        said = f"they hold here, on {filesystem}; whether also against another machine nobody can tell from one"
        return warn(name, said, f"start drivers of one study on one machine only, or {_ELSEWHERE}")
    return ok(name, "SQLite's and flock hold against another process")


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
        if path.resolve().is_relative_to(point) and len(point.parts) >= best:  # of two on one point the later counts
            best, kind = len(point.parts), tail.split()[0]
    return kind


def locks_problem(inner: Path) -> str:
    """Take both kinds, and have another process try; what is wrong, in words."""
    database, file = inner / "ledger.db", inner / "driver.lock"
    file.touch()
    handle = os.open(file, os.O_RDWR)
    try:
        with contextlib.closing(sqlite3.connect(database, timeout=0, isolation_level=None)) as connection:
            connection.execute("PRAGMA journal_mode = TRUNCATE")
            connection.execute("CREATE TABLE records (body TEXT)")
            connection.execute("BEGIN IMMEDIATE")
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            command = [sys.executable, "-I", "-S", "-c", _OTHER, str(database), str(file)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=_LOCK_SECONDS, check=False)
    except (sqlite3.Error, OSError) as error:
        return f"{type(error).__name__}: {error}"
    except subprocess.TimeoutExpired:
        return f"a lock asked for by another process has not answered in {_LOCK_SECONDS:g} s"
    finally:
        os.close(handle)
    if done.returncode != 0:
        return (done.stderr.strip().splitlines() or ["another process could not try"])[-1]
    said = dict(zip(("SQLite's", "flock"), done.stdout.splitlines(), strict=False))
    return "; ".join(f"{kind}: {answer}" for kind, answer in said.items() if answer != "held")
