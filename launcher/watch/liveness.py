"""Whether a run is alive, as its folder says and its log does not: just launched, saving, or lying still.

Loading a large checkpoint, and compiling before the first step, come before the first line of an attempt; a save may
take longer than any number of steps. A silence that these explain is no stall.
"""

from __future__ import annotations

import contextlib
import datetime
from dataclasses import dataclass
from pathlib import Path

from launcher.base import chronicle
from launcher.base.plain_files import CHECKPOINTS, ROLLBACKS_FILE


@dataclass(frozen=True, kw_only=True, slots=True)
class Liveness:
    """Times in seconds since 1970, None where the folder does not say."""

    launched_at: float | None = None
    """The newest launch or restart by a supervisor that is still at it, or the run's own going back."""
    saved_at: float | None = None
    """The newest write below the folder of checkpoints."""
    ended: str = ""
    """What the supervisor said when it gave up, or ended in order."""

    def starting(self, newest_at: float | None) -> bool:
        """Whether an attempt was launched that has not written a line yet; `newest_at`: of the newest line."""
        # The chronicle's times are whole seconds.
        return self.launched_at is not None and (newest_at is None or self.launched_at + 1 > newest_at)


UNKNOWN = Liveness()


def liveness_of(run_dir: Path, digest: str) -> Liveness:
    """What the folder of a launch config's run says; what cannot be read says nothing."""
    launched_at, saved_at, ended = None, None, ""
    with contextlib.suppress(OSError):
        for entry in chronicle.entries(run_dir):
            if entry.digest == digest and entry.kind in ("launched", "restarted", "ended"):
                over = entry.kind == "ended"
                launched_at, ended = None, entry.text if over else ""
                with contextlib.suppress(ValueError):
                    launched_at = None if over else unix_seconds(entry.at)
    if not ended:
        with contextlib.suppress(OSError):
            launched_at = max((run_dir / ROLLBACKS_FILE).stat().st_mtime, launched_at or 0.0)
    with contextlib.suppress(OSError):
        times = [path.stat().st_mtime for path in (run_dir / CHECKPOINTS).rglob("*")]
        saved_at = max(times, default=None)
    return Liveness(launched_at=launched_at, saved_at=saved_at, ended=ended)


def unix_seconds(text: str) -> float:
    """Return the time that a text in ISO 8601 names, in UTC where it names no zone. Raises ValueError."""
    at = datetime.datetime.fromisoformat(text)
    return (at if at.tzinfo else at.replace(tzinfo=datetime.UTC)).timestamp()
