"""Signs of life of a run, which come from the run's folder and not from its log.

An attempt loads a checkpoint and compiles before its first line, and a save may take longer than
any number of steps. A silence that these explain is not a stall.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

from forerun._launcher.main_run import event_log
from forerun._launcher.main_run.checkpoint_folders import CHECKPOINTS, ROLLBACKS_FILE


@dataclass(frozen=True, kw_only=True, slots=True)
class Liveness:
    """Signs of life in a run's folder; times in seconds since 1970, None where unknown."""

    launched_at: float | None = None
    """Time of the newest launch or restart by a supervisor that still works, or of the run's own
    rollback."""
    saved_at: float | None = None
    """Time of the newest write below the folder of checkpoints."""
    ended: str = ""
    """Message of the supervisor when it ended; empty if it has not."""
    paused_seconds: float = 0.0
    """Seconds that do not count as lost: from a requested stop to the next launch, and after the
    end."""

    def is_starting(self, newest_at: float | None) -> bool:
        """Return whether an attempt was launched that has not written a line yet.

        Args:
            newest_at: Time of the newest line, in seconds since 1970; None if unknown.
        """
        # Times in the event log are whole seconds.
        return self.launched_at is not None and (
            newest_at is None or self.launched_at + 1 > newest_at
        )


UNKNOWN_LIVENESS = Liveness()
"""Liveness of a run whose folder says nothing."""


def read_liveness(run_dir: Path, digest: str) -> Liveness:
    """Read the liveness of a launch config's run; files that cannot be read say nothing.

    Args:
        run_dir: The run's folder.
        digest: Digest of the launch config.
    """
    launched_at, stopped_at, finished_at, saved_at = None, None, None, None
    ended, paused_seconds = "", 0.0
    with contextlib.suppress(OSError):
        for entry in event_log.read_events(run_dir):
            if entry.digest != digest or entry.kind not in ("launched", "restarted", "ended"):
                continue
            try:
                at = event_log.parse_time(entry.at).timestamp()
            except ValueError:
                continue
            launched_at, ended = None, entry.text if entry.kind == "ended" else ""
            if entry.kind == "launched" and stopped_at is not None:
                paused_seconds += max(0.0, at - stopped_at)
            if entry.kind != "ended":
                launched_at, stopped_at = at, None
                continue
            event = entry.data.get("event")
            stopped_at = at if event in ("stopped", "interrupted") else None
            # A finished run that is launched again trains nothing and finishes again.
            if event == "finished":
                paused_seconds += max(0.0, at - (finished_at or at))
                finished_at = at
    if not ended:
        with contextlib.suppress(OSError):
            launched_at = max((run_dir / ROLLBACKS_FILE).stat().st_mtime, launched_at or 0.0)
    with contextlib.suppress(OSError):
        times = [path.stat().st_mtime for path in (run_dir / CHECKPOINTS).rglob("*")]
        saved_at = max(times, default=None)
    return Liveness(
        launched_at=launched_at, saved_at=saved_at, ended=ended, paused_seconds=paused_seconds
    )
