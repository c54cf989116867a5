"""Guards of a run's records: they notice if metrics or checkpoints are removed while the run
trains. One guards a run of the embedded trainer, the other the logs of a user's own trainer.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from forerun._launcher.main_run.checkpoint_folders import (
    CHECKPOINTS,
    list_complete_checkpoints,
    name_checkpoint,
)
from forerun._launcher.main_run.metrics_file import METRICS_FILE, RecordedSteps, read_recorded_steps
from forerun._launcher.main_run.progress_output import print_progress
from forerun._proxies.core.notation import format_counted
from forerun._proxies.external.metric_files import MetricFiles


class RecordGuard:
    """A guard that checks that a run's record stays complete: a metrics line for each step, and the
    checkpoints that the run keeps.

    The trainer itself rewrites its metrics when it resumes, and removes old checkpoints. So a file
    that changed is not yet a loss. A loss is a step without a line, or a checkpoint without a
    folder that the metrics report and the run keeps.
    """

    def __init__(self, run_dir: Path, from_step: int, num_kept: int) -> None:
        """Note the steps without a line and the saves without a folder; they were lost before.

        Args:
            run_dir: Folder of the metrics and checkpoints.
            from_step: Step of the checkpoint that the run resumes from; 0 for the start.
            num_kept: Number of the newest checkpoints that the run keeps at least.
        """
        self._run_dir, self._num_kept = run_dir, max(num_kept, 1)
        recorded = read_recorded_steps(run_dir)
        self._known_gaps = recorded.find_gaps(from_step)
        self._warned_gaps: list[range] = []
        self._known_absent = self._find_absent_saves(recorded)
        # Step of a save -> last recorded step when the save was first found absent
        self._absent_since: dict[int, int] = {}
        self._removed_saves: set[int] = set()

    def check(self, recorded: RecordedSteps) -> None:
        """Warn of steps and saves that were lost since the last check.

        While nothing is lost, this takes one system call per checkpoint.

        Args:
            recorded: Steps and saves that the metrics hold, as read just now.
        """
        if new_gaps := self._find_new_gaps(recorded):
            # If a file was cut and has grown again, the lines read since do not show which steps
            # are gone. Read it from its start.
            for gap in self._find_new_gaps(read_recorded_steps(self._run_dir)):
                print_progress(f"warning: {self._describe_gap(gap)}")
                self._warned_gaps.append(gap)
            self._warned_gaps += new_gaps
        # A run that goes back removes checkpoints, then cuts its metrics. If it trains on instead,
        # somebody else removed them.
        absent = sorted(self._find_absent_saves(recorded) - self._known_absent)
        self._absent_since = {step: self._absent_since.get(step, recorded.last) for step in absent}
        for step, last in self._absent_since.items():
            if recorded.last > last and step not in self._removed_saves:
                self._removed_saves.add(step)
                print_progress(f"warning: {self._describe_save(step)}")

    def describe_losses(self, last_step: int) -> str:
        """Return sentences on what the ended run lacks; empty if nothing was lost while it trained.

        Args:
            last_step: Last step that the run has done.
        """
        recorded = read_recorded_steps(self._run_dir)
        gaps = [
            gap for gap in recorded.find_gaps(last_step) if not _is_within(gap, self._known_gaps)
        ]
        absent = self._find_absent_saves(recorded) - self._known_absent
        removed = sorted(self._removed_saves | absent)
        sentences = [*map(self._describe_gap, gaps), *map(self._describe_save, removed)]
        if removed:
            newest = max(list_complete_checkpoints(self._run_dir / CHECKPOINTS), default=0)
            sentences.append(
                f"the newest checkpoint left is of step {newest}"
                if newest
                else "no checkpoint is left"
            )
        return "; ".join(sentences)

    def _find_new_gaps(self, recorded: RecordedSteps) -> list[range]:
        known = self._known_gaps + self._warned_gaps
        return [gap for gap in recorded.find_gaps() if not _is_within(gap, known)]

    def _find_absent_saves(self, recorded: RecordedSteps) -> set[int]:
        """Return the steps of the reported saves that the run keeps and that have no folder."""
        absent = {step for step in recorded.saves[-self._num_kept :] if not self._has(step)}
        if not absent:
            return set()
        with contextlib.suppress(OSError):
            # A save that is not reported yet may have taken the place of the oldest one.
            folders = list_complete_checkpoints(self._run_dir / CHECKPOINTS)
            return absent & {*sorted({*recorded.saves, *folders})[-self._num_kept :]}
        return set()

    def _has(self, step: int) -> bool:
        """Return whether the complete checkpoint of a step is there; true if the disk cannot answer
        now.
        """
        try:
            return (self._run_dir / CHECKPOINTS / name_checkpoint(step)).is_dir()
        except OSError:
            return True

    def _describe_gap(self, gap: range) -> str:
        steps = f"step {gap[0]}" if len(gap) == 1 else f"steps {gap[0]} to {gap[-1]}"
        return _describe_lost_metrics(self._run_dir / METRICS_FILE, steps)

    def _describe_save(self, step: int) -> str:
        return (
            f"{self._run_dir / CHECKPOINTS / name_checkpoint(step)} was removed while the run "
            "trained"
        )


class UserRecordGuard:
    """A guard of the logs of a user's own trainer, from the first new step of an attempt to its
    end.

    A trainer may log every tenth step, may write its log anew, and may cut it when it resumes. So a
    loss is a step that the files held after the first new step, and lack at two checks in a row.
    """

    def __init__(self) -> None:
        """Begin with nothing lost."""
        self._lost: set[int] = set()
        # Steps of this attempt: once in the files, and not in them at the last check
        self._held: set[int] = set()
        self._missing: set[int] = set()
        # Whether this attempt has logged a new step
        self._has_logged = False

    def begin(self, *, is_resumed: bool) -> None:
        """Begin an attempt; what a resumed trainer does to its log before its first new step is no
        loss.
        """
        self._held, self._missing, self._has_logged = set(), set(), not is_resumed

    def check(self, metrics: MetricFiles, *, is_over: bool = False) -> None:
        """Warn of steps that were lost since the last check.

        Args:
            metrics: Files of this attempt, as read to their ends just now.
            is_over: Whether the attempt has ended, so that missing steps count as lost at once.
        """
        held = metrics.get_steps_in_files()
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
            print_progress(
                f"warning: {_describe_lost_metrics(metrics.path, _describe_steps(lost))}"
            )

    def describe_losses(self, metrics: MetricFiles) -> str:
        """Return a sentence on the steps that the logs lack; empty if nothing was lost, or all of
        it is back.
        """
        lost = self._lost - metrics.get_steps_in_files()
        return _describe_lost_metrics(metrics.path, _describe_steps(lost)) if lost else ""


def _describe_steps(steps: set[int]) -> str:
    """Return steps of a log that may not have all of them."""
    if len(steps) == 1:
        return f"step {min(steps)}"
    return f"{format_counted(len(steps), 'logged step')} from {min(steps)} to {max(steps)}"


def _describe_lost_metrics(place: Path, steps: str) -> str:
    return (
        f"{place} was removed, replaced or cut while the run trained: it lacks {steps}; restore "
        "it from a copy"
    )


def _is_within(gap: range, gaps: list[range]) -> bool:
    """Return whether a gap lies within a known one.

    A run that goes back cuts the end of its metrics off, so a gap may be shorter than when it
    became known.
    """
    return any(known.start <= gap.start and gap.stop <= known.stop for known in gaps)
