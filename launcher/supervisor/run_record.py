"""Notices metrics lines and checkpoints that are removed while a run trains."""

from __future__ import annotations

from pathlib import Path

from launcher.base.metrics import METRICS_FILE, RecordedSteps, read_recorded
from launcher.base.run_files import CHECKPOINTS, complete_folders, name_checkpoint
from launcher.base.talk import say


class RunRecord:
    """What a run has recorded must stay: a line for each step in its metrics, and its newest checkpoint.

    The trainer rewrites its metrics when it resumes and removes old checkpoints, so files are not compared with
    themselves. A loss is a step without a line, or a reported save without its folder.
    """

    def __init__(self, run_dir: Path, from_step: int) -> None:
        """Take the steps that have no line now as lost before this launch.

        Args:
            run_dir: Folder of the metrics and checkpoints.
            from_step: Step of the checkpoint that the run resumes from; 0 for the start.
        """
        self._run_dir = run_dir
        self._known_gaps = read_recorded(run_dir).find_gaps(from_step)
        self._warned_gaps: list[range] = []
        self._absent = (0, 0)
        self._removed_saves: list[int] = []

    def check(self, recorded: RecordedSteps) -> None:
        """Warn of what was lost since the last check; one system call while nothing was.

        Args:
            recorded: Steps and save that the metrics hold, as read just now.
        """
        if new_gaps := self._find_new_gaps(recorded):
            # A file that was cut and has grown again hides which lines: read it from its start.
            for gap in self._find_new_gaps(read_recorded(self._run_dir)):
                say(f"warning: {self._describe_gap(gap)}")
                self._warned_gaps.append(gap)
            self._warned_gaps += new_gaps
        if not recorded.saved or recorded.saved in self._removed_saves or self._has(recorded.saved):
            return
        # A run that goes back removes checkpoints, then cuts its metrics. If it trains on instead, it lost this one.
        saved, last = self._absent
        if saved != recorded.saved:
            self._absent = (recorded.saved, recorded.last)
        elif recorded.last > last:
            self._removed_saves.append(saved)
            say(f"warning: {self._describe_save(saved)}")

    def describe_losses(self, last_step: int) -> str:
        """Return sentences on what the ended run lacks; empty if nothing was lost while it trained.

        Args:
            last_step: Last step that the run has done.
        """
        recorded = read_recorded(self._run_dir)
        gaps = [gap for gap in recorded.find_gaps(last_step) if not _is_within(gap, self._known_gaps)]
        removed = dict.fromkeys(self._removed_saves)
        if recorded.saved and not self._has(recorded.saved):
            removed[recorded.saved] = None
        sentences = [self._describe_gap(gap) for gap in gaps] + [self._describe_save(step) for step in removed]
        if removed:
            newest = max(complete_folders(self._run_dir / CHECKPOINTS), default=0)
            sentences.append(f"the newest checkpoint left is of step {newest}" if newest else "no checkpoint is left")
        return "; ".join(sentences)

    def _find_new_gaps(self, recorded: RecordedSteps) -> list[range]:
        known = self._known_gaps + self._warned_gaps
        return [gap for gap in recorded.find_gaps() if not _is_within(gap, known)]

    def _has(self, step: int) -> bool:
        """Return whether a complete checkpoint is there; true if the disk cannot answer now."""
        try:
            return (self._run_dir / CHECKPOINTS / name_checkpoint(step)).is_dir()
        except OSError:
            return True

    def _describe_gap(self, gap: range) -> str:
        steps = f"step {gap[0]}" if len(gap) == 1 else f"steps {gap[0]} to {gap[-1]}"
        place = self._run_dir / METRICS_FILE
        return f"{place} was removed, replaced or cut while the run trained: it lacks {steps}; restore it from a copy"

    def _describe_save(self, step: int) -> str:
        return f"{self._run_dir / CHECKPOINTS / name_checkpoint(step)} was removed while the run trained"


def _is_within(gap: range, gaps: list[range]) -> bool:
    """Return whether a gap lies within one of others: a run that goes back cuts the ends of its gaps off."""
    return any(known.start <= gap.start and gap.stop <= known.stop for known in gaps)
