"""The study's folder and Ray's: do locks lock, does the disk keep what it is given, is the path short?"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from launcher.doctor.findings import Finding, fail, ok, warn

LEAST_BYTES, ENOUGH_BYTES = 100 * 10**6, 2 * 10**9
"""Free where a study lies: the demo's takes some 20 MB, checkpoints of a large proxy more."""
SLOW_FSYNC_SECONDS = 0.5
"""A commit of the ledger waits for some of them."""
MOST_SKEW_SECONDS = 2.0
MOST_SOCKET_BYTES = 107
OWN_BASE_CHARS = 24
"""A longer temporary folder is not taken by `sweeps.ray.own`, and Ray takes its own."""
FULL_SHARE = 0.95
"""Ray keeps no object on a fuller disk."""
_SOCKET = "/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store"
"""The longest that Ray makes below its folder."""
_SHARED = ("nfs", "cifs", "smb", "9p", "afs", "ceph", "gluster", "lustre", "gpfs", "beegfs", "fuse.sshfs", "fuse.s3fs")
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


@dataclass(frozen=True, kw_only=True, slots=True)
class FolderFacts:
    """What a folder is like, tried in a folder made in it and removed again."""

    path: str
    """As given; what was tried is the nearest one that exists."""
    problem: str = ""
    """Why nothing can be written there; the rest is not known then."""
    filesystem: str = ""
    free_bytes: int = 0
    total_bytes: int = 0
    free_inodes: int = -1
    """-1: the filesystem does not count."""
    locks: str = ""
    """What is wrong with them; empty: both kinds hold against another process."""
    fsync_seconds: float = 0.0
    fsync_problem: str = ""
    skew_seconds: float = 0.0
    """The filesystem's clock minus ours."""
    ignores_case: bool = False


def nearest(path: Path) -> Path:
    """The path, or the closest folder above it that exists."""
    return next(each for each in (path.absolute(), *path.absolute().parents) if each.exists())


def look_at_folder(path: Path) -> FolderFacts:
    """The facts; leaves nothing behind."""
    there = nearest(path)
    try:
        inner = Path(tempfile.mkdtemp(prefix=".forerun-doctor-", dir=there))
    except OSError as error:
        return FolderFacts(path=str(path), problem=f"{there}: {error.strerror}")
    try:
        took, fsync_problem, skew = _fsync(inner / "A")
        usage, room = shutil.disk_usage(inner), os.statvfs(inner)
        return FolderFacts(
            path=str(path), filesystem=filesystem_of(there), free_bytes=usage.free, total_bytes=usage.total,
            free_inodes=room.f_favail if room.f_files else -1, locks=_locks(inner), fsync_seconds=took,
            fsync_problem=fsync_problem, skew_seconds=skew, ignores_case=(inner / "a").exists(),
        )  # fmt: skip
    except OSError as error:
        return FolderFacts(path=str(path), problem=f"{there}: {error.strerror}")
    finally:
        shutil.rmtree(inner, ignore_errors=True)


def judge_folder(facts: FolderFacts, name: str = "study folder") -> list[Finding]:
    """One line each of writing, room, locks, and what else is odd."""
    elsewhere = "name a folder on a local disk: --study /local/disk/study"
    if facts.problem:
        return [fail(name, f"{facts.problem}: nothing can be written", "name another folder with --study")]
    return [
        _judge_room(facts, name),
        _judge_locks(facts, f"{name}, locks", elsewhere),
        _judge_disk(facts, f"{name}, disk", elsewhere),
        _judge_clock(facts),
    ]


def _judge_room(facts: FolderFacts, name: str) -> Finding:
    free = f"{facts.free_bytes / 1e9:,.1f} GB free at {facts.path}"
    if facts.free_inodes == 0 or facts.free_bytes < LEAST_BYTES:
        said = "no file more can be made" if facts.free_inodes == 0 else free
        return fail(name, f"{said}: a study needs {LEAST_BYTES / 1e6:.0f} MB", "free some space, or --study elsewhere")
    if facts.free_bytes < ENOUGH_BYTES:
        said = f"{free}: `forerun estimate PLAN` says what a study takes"
        return warn(name, said, "free some space, or --study elsewhere")
    return ok(name, f"{free}, {facts.filesystem or 'filesystem not known'}")


def _judge_locks(facts: FolderFacts, name: str, elsewhere: str) -> Finding:
    if facts.locks:
        return fail(name, f"{facts.locks}: two drivers could write one ledger", elsewhere)
    if facts.filesystem.startswith(_SHARED):
        said = f"they hold here, on {facts.filesystem}; whether also against another machine nobody can tell from one"
        return warn(name, said, f"start drivers of one study on one machine only, or {elsewhere}")
    return ok(name, "SQLite's and flock hold against another process")


def _judge_disk(facts: FolderFacts, name: str, elsewhere: str) -> Finding:
    if facts.fsync_problem:
        return fail(name, f"fsync: {facts.fsync_problem}: what is recorded could be lost", elsewhere)
    if facts.filesystem in ("tmpfs", "ramfs"):
        return warn(name, f"{facts.filesystem}: memory, gone when the machine restarts", elsewhere)
    took = f"fsync takes {facts.fsync_seconds * 1000:.0f} ms"
    if facts.fsync_seconds > SLOW_FSYNC_SECONDS:
        return warn(name, f"{took}, and every finished run waits for it", elsewhere)
    return ok(name, took + (", and upper and lower case are one" if facts.ignores_case else ""))


def _judge_clock(facts: FolderFacts) -> Finding:
    name, mend = "clock", "timedatectl set-ntp true, here or on the file server"
    year = time.gmtime().tm_year
    if year < 2026:
        return fail(name, f"it says {year}: certificates and dates will be wrong", mend)
    if abs(facts.skew_seconds) > MOST_SKEW_SECONDS:
        return warn(name, f"files at {facts.path} are dated {facts.skew_seconds:+.0f} s off this machine's clock", mend)
    return ok(name, time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()) + ", and files are dated so")


@dataclass(frozen=True, kw_only=True, slots=True)
class TemporaryFacts:
    """Where Ray puts its sockets."""

    base: str
    """The temporary folder of Python."""
    ray_base: str
    """That of Ray, where Python's is too long."""
    problem: str
    free_bytes: int
    total_bytes: int
    noexec: bool


def look_at_temporary() -> TemporaryFacts:
    """The facts of the folders that TMPDIR and RAY_TMPDIR name."""
    base = tempfile.gettempdir()
    problem, free, total, noexec = "", 0, 0, False
    try:
        with tempfile.TemporaryDirectory(prefix="forerun-doctor-") as inner:
            usage = shutil.disk_usage(inner)
            free, total, noexec = usage.free, usage.total, bool(os.statvfs(inner).f_flag & getattr(os, "ST_NOEXEC", 0))
    except OSError as error:
        problem = f"{base}: {error.strerror}"
    own = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"
    return TemporaryFacts(
        base=base, ray_base=f"{own}/ray", problem=problem, free_bytes=free, total_bytes=total, noexec=noexec
    )


def judge_temporary(facts: TemporaryFacts) -> list[Finding]:
    """Whether Ray can work there, and torch.compile."""
    name, mend = "temporary folder", "export TMPDIR=/tmp, or another short path on a local disk"
    if facts.problem:
        return [fail(name, f"{facts.problem}: nothing can be written", mend)]
    ray = f"{facts.base}/forerun-12345678/r" if len(facts.base) <= OWN_BASE_CHARS else facts.ray_base
    num_bytes = len(os.fsencode(ray + _SOCKET))
    if num_bytes > MOST_SOCKET_BYTES:
        said = f"Ray's sockets below {ray} would have paths of {num_bytes} bytes, {MOST_SOCKET_BYTES} is the most"
        return [fail(name, said, mend)]
    free = f"{facts.free_bytes / 1e9:,.1f} GB free at {facts.base}"
    if facts.free_bytes < LEAST_BYTES or facts.free_bytes < (1 - FULL_SHARE) * facts.total_bytes:
        said = f"{free}: Ray keeps nothing on a disk that is more than {FULL_SHARE:.0%} full"
        return [warn(name, said, f"df -h {facts.base}; free some space, or {mend}")]
    if facts.noexec:
        said = f"{facts.base} is mounted noexec: what torch.compile builds there cannot be loaded"
        return [warn(name, said, "export TORCHINDUCTOR_CACHE_DIR=~/.cache/inductor")]
    return [ok(name, f"{free}; sockets' paths have {num_bytes} of {MOST_SOCKET_BYTES} bytes")]


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


def _fsync(path: Path) -> tuple[float, str, float]:
    """Seconds, what is wrong, and how far the file's date is from our clock."""
    with path.open("wb") as file:
        file.write(os.urandom(2**16))
        file.flush()
        began = time.monotonic()
        try:
            os.fsync(file.fileno())
        except OSError as error:
            return 0.0, str(error.strerror), 0.0
    return time.monotonic() - began, "", path.stat().st_mtime - time.time()


def _locks(inner: Path) -> str:
    """Take both kinds, and have another process try; what is wrong, in words."""
    database, file = inner / "ledger.db", inner / "driver.lock"
    file.touch()
    handle = os.open(file, os.O_RDWR)
    try:
        with contextlib.closing(sqlite3.connect(database, timeout=0, isolation_level=None)) as connection:
            connection.execute("PRAGMA journal_mode = TRUNCATE")
            connection.execute("PRAGMA synchronous = FULL")
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
