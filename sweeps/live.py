"""What the driver is doing right now, for whoever looks on: `live.json`, rewritten about once a second.

No record: it is never durable, never trusted, and a study without it is whole. What a killed driver had spent is read
from it by the next one.
"""

from __future__ import annotations

import contextlib
import os
import socket
from dataclasses import dataclass
from pathlib import Path

from proxies import canon
from proxies.checks import SpecError
from sweeps.progress import Running

LIVE_NAME = "live.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Live:
    """One look at a driver at work."""

    driver: int
    """Its number in the ledger."""
    pid: int
    host: str
    stage: str
    stretch: int
    """Of its work: times it has written down what it took."""
    seconds: float
    """Since then, in no record yet."""
    device_seconds: float
    left_seconds: float | None
    """Of this stage, at the rate so far; None before anything has ended."""
    num_queued: int
    running: tuple[Running, ...]
    at: str
    """Time of writing, a label."""

    @property
    def at_work(self) -> bool | None:
        """Whether that process lives; None if it is on another host."""
        if self.host != socket.gethostname():
            return None
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            return True
        return True


def write_live(study_dir: Path, live: Live) -> None:
    """Replace the file, if there is room; nobody waits for it."""
    path = study_dir / LIVE_NAME
    scratch = path.with_suffix(".tmp")
    with contextlib.suppress(OSError):
        scratch.write_text(canon.canonical(live), encoding="utf-8")
        scratch.replace(path)


def read_live(study_dir: Path) -> Live | None:
    """The last look; None if there is none that can be read."""
    try:
        return canon.decode(Live, canon.parse((study_dir / LIVE_NAME).read_bytes()))
    except (OSError, canon.CanonError, SpecError):
        return None
