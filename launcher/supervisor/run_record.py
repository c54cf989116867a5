"""Notices metrics and checkpoints that are removed while a run trains."""

from __future__ import annotations

import contextlib
from pathlib import Path

from launcher.base.metrics import METRICS_FILE, RecordedSteps, read_recorded
from launcher.base.run_files import CHECKPOINTS, complete_folders, name_checkpoint
from launcher.base.talk import say
from proxies.core.notation import counted
from proxies.external.metric_files import MetricFiles


class RunRecord:
    """What a run has recorded must stay: a line for each step in its metrics, and the checkpoints that it keeps.

    The trainer rewrites its metrics when it resumes and removes old checkpoints, so files are not compared with
    themselves. A loss is a step without a line, or a reported save that is kept and has no folder.
    """

    def __init__(self, run_dir: Path, from_step: int, num_kept: int) -> None:
        """Take the steps without a line and the saves without a folder as lost before this launch.

        Args:
            run_dir: Folder of the metrics and checkpoints.
            from_step: Step of the checkpoint that the run resumes from; 0 for the start.
            num_kept: Number of the newest checkpoints that the run keeps at least.
        """
        self._run_dir, self._num_kept = run_dir, max(num_kept, 1)
        recorded = read_recorded(run_dir)
        self._known_gaps = recorded.find_gaps(from_step)
        self._warned_gaps: list[range] = []
        self._known_absent: list[int] = []
        self._known_absent = self._find_absent_saves(recorded)
        self._absent_since: dict[int, int] = {}  # step of a save -> last step recorded when it was first absent
        self._removed_saves: list[int] = []

    def check(self, recorded: RecordedSteps) -> None:
        """Warn of what was lost since the last check; one system call a checkpoint while nothing was.

        Args:
            recorded: Steps and save that the metrics hold, as read just now.
        """
        if new_gaps := self._find_new_gaps(recorded):
            # A file that was cut and has grown again hides which lines: read it from its start.
            for gap in self._find_new_gaps(read_recorded(self._run_dir)):
                say(f"warning: {self._describe_gap(gap)}")
                self._warned_gaps.append(gap)
            self._warned_gaps += new_gaps
        # A run that goes back removes checkpoints, then cuts its metrics. If it trains on instead, it lost them.
        absent = self._find_absent_saves(recorded)
        self._absent_since = {step: self._absent_since.get(step, recorded.last) for step in absent}
        for step, last in self._absent_since.items():
            if recorded.last > last and step not in self._removed_saves:
                self._removed_saves.append(step)
                say(f"warning: {self._describe_save(step)}")

    def describe_losses(self, last_step: int) -> str:
        """Return sentences on what the ended run lacks; empty if nothing was lost while it trained.

        Args:
            last_step: Last step that the run has done.
        """
        recorded = read_recorded(self._run_dir)
        gaps = [gap for gap in recorded.find_gaps(last_step) if not _is_within(gap, self._known_gaps)]
        removed = sorted({*self._removed_saves, *self._find_absent_saves(recorded)})
        sentences = [self._describe_gap(gap) for gap in gaps] + [self._describe_save(step) for step in removed]
        if removed:
            newest = max(complete_folders(self._run_dir / CHECKPOINTS), default=0)
            sentences.append(f"the newest checkpoint left is of step {newest}" if newest else "no checkpoint is left")
        return "; ".join(sentences)

    def _find_new_gaps(self, recorded: RecordedSteps) -> list[range]:
        known = self._known_gaps + self._warned_gaps
        return [gap for gap in recorded.find_gaps() if not _is_within(gap, known)]

    def _find_absent_saves(self, recorded: RecordedSteps) -> list[int]:
        """Return the reported saves that the run keeps and that have no folder, oldest first."""
        absent = [step for step in recorded.saves[-self._num_kept :] if not self._has(step)]
        if not absent:
            return []
        with contextlib.suppress(OSError):
            # A save that is not reported yet may have taken the place of the oldest one.
            folders = complete_folders(self._run_dir / CHECKPOINTS)
            kept = sorted({*recorded.saves, *folders})[-self._num_kept :]
            return sorted({step for step in absent if step in kept} - {*self._known_absent})
        return []

    def _has(self, step: int) -> bool:
        """Return whether a complete checkpoint is there; true if the disk cannot answer now."""
        try:
            return (self._run_dir / CHECKPOINTS / name_checkpoint(step)).is_dir()
        except OSError:
            return True

    def _describe_gap(self, gap: range) -> str:
        steps = f"step {gap[0]}" if len(gap) == 1 else f"steps {gap[0]} to {gap[-1]}"
        return _describe_lost_metrics(self._run_dir / METRICS_FILE, steps)

    def _describe_save(self, step: int) -> str:
        return f"{self._run_dir / CHECKPOINTS / name_checkpoint(step)} was removed while the run trained"


class UserRunRecord:
    """What a user's own trainer has logged must stay, from its first new step of an attempt to the attempt's end.

    A trainer may log every tenth step, may write its log anew, and may cut it when it resumes. So a loss is a step that
    the files held after the first new step, and lack at two checks in a row.
    """

    def __init__(self) -> None:
        """Begin with nothing lost."""
        self._lost: set[int] = set()
        self._held: set[int] = set()
        self._missing: set[int] = set()
        self._has_logged = False

    def begin(self, *, is_resumed: bool) -> None:
        """Begin an attempt; what a resumed trainer does to its log before its first new step is no loss."""
        self._held, self._missing, self._has_logged = set(), set(), not is_resumed

    def check(self, metrics: MetricFiles, *, is_over: bool = False) -> None:
        """Warn of steps that were lost since the last check.

        Args:
            metrics: Files of this attempt, as read to their ends just now.
            is_over: Whether the attempt has ended: what is missing now is lost.
        """
        held = metrics.held_steps()
        if not self._has_logged:
            self._has_logged = bool(self._held) and held > self._held
            self._held = held
            return
        missing = self._held - held
        lost = (missing if is_over else missing & self._missing) - self._lost
        self._missing = missing
        self._held |= held
        if lost:
            self._lost |= lost
            say(f"warning: {_describe_lost_metrics(metrics.path, _describe_steps(lost))}")

    def describe_losses(self, metrics: MetricFiles) -> str:
        """Return a sentence on the steps that the logs lack; empty if nothing was lost, or all of it is back."""
        lost = self._lost - metrics.held_steps()
        return _describe_lost_metrics(metrics.path, _describe_steps(lost)) if lost else ""


def _describe_steps(steps: set[int]) -> str:
    """Return steps of a log that may not have all of them."""
    if len(steps) == 1:
        return f"step {min(steps)}"
    return f"{counted(len(steps), 'logged step')} from {min(steps)} to {max(steps)}"


def _describe_lost_metrics(place: Path, steps: str) -> str:
    return f"{place} was removed, replaced or cut while the run trained: it lacks {steps}; restore it from a copy"


def _is_within(gap: range, gaps: list[range]) -> bool:
    """Return whether a gap lies within one of others: a run that goes back cuts the ends of its gaps off."""
    return any(known.start <= gap.start and gap.stop <= known.stop for known in gaps)
