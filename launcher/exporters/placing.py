"""Puts an export in its place: whole, or not at all, also when the command that writes it is stopped."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

from proxies.core import canon


@contextlib.contextmanager
def scratch_beside(target: Path, *, inside: bool) -> Iterator[Path]:
    """An empty folder on the disk of `target`, gone at the end unless it was put in its place.

    It lies in `target` itself if that may be (`inside`) and is there, so that neither its parent need be writable nor
    it be on its parent's disk. What killed exports to `target` left is removed first.

    Raises:
        OSError: it cannot be made; names `target`.
    """
    for left in left_of(target):
        shutil.rmtree(left, ignore_errors=True)
    near = next(folder for folder in ((target, *target.parents) if inside else target.parents) if folder.is_dir())
    scratch = near / f".{target.name}.{os.getpid()}.part"
    try:
        try:
            scratch.mkdir()
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(target)) from error
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def left_of(target: Path) -> list[Path]:
    """Scratch folders of processes that are no more, in `target` and above it."""
    places = [folder for folder in (target, *target.parents[:2]) if folder.is_dir()]
    found = [(entry, _pid_of(entry, target)) for folder in places for entry in folder.glob(".*.part")]
    return [entry for entry, pid in found if pid is not None and not _runs(pid)]


def _pid_of(entry: Path, target: Path) -> int | None:
    """The process whose scratch folder for `target` this is; None: it is none."""
    match = re.fullmatch(rf"\.{re.escape(target.name)}\.(\d+)\.part", entry.name)
    return int(match[1]) if match else None


def _runs(pid: int) -> bool:
    """Whether another process than this one has that number."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):  # somebody else's, or no number of a process
        return True
    return pid != os.getpid()


def put(scratch: Path, target: Path, first: str) -> None:
    """Make what lies in `scratch` all that lies in `target`, but for empty folders; the file named `first` comes first.

    A folder that is there stays the same one, for whoever is in it.

    Raises:
        OSError: `target` cannot be written.
    """
    if not target.exists():
        canon.make_folder(target.parent)
        scratch.rename(target)
        canon.sync_folder(target.parent)
        return
    (scratch / first).rename(target / first)
    fresh = [entry.name for entry in scratch.iterdir()]
    old = scratch / ".old"  # goes with the scratch folder
    old.mkdir()
    for entry in list(target.iterdir()):
        empty = entry.is_dir() and not any(entry.iterdir())
        if entry.name in fresh or not (entry.name == first or empty or _pid_of(entry, target)):
            entry.rename(old / entry.name)
    for name in fresh:
        (scratch / name).rename(target / name)
    canon.sync_folder(target)


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Ctrl-C and other asks to end wait until the block, which is short, is through. Only the main thread is asked."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    asked: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, lambda number, _: asked.append(number)) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
        if asked:
            signal.raise_signal(asked[0])
