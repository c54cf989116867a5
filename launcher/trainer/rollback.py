"""Rollbacks of a main run: recorded before they are acted on, so that a kill at any instant resumes to the same run.

`RUN_DIR/rollbacks.json` is the truth. What the run trains on at a step, how it clips, and which checkpoints are still
of its path are functions of it; a rollback is nothing but one more entry there, and a resume.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist

from launcher.base import chronicle, metrics
from launcher.base.policy import SpikePolicy
from launcher.base.run_files import ROLLBACKS_FILE
from launcher.trainer.callbacks import Callback, RollbackOrder, StepInfo
from launcher.trainer.checkpoint_saver import SaveError
from launcher.trainer.checkpoints import CheckpointError, CorruptError, Manifest
from launcher.trainer.ranks import TrainerError, together
from proxies.core import canon
from proxies.core.canon import Json
from proxies.core.checks import Checks

if TYPE_CHECKING:
    from launcher.trainer.training import Trainer

# Spikes of the training loss, found as the frozen policy says, and the run sent back before them.
#
# PaLM's protocol (arXiv 2204.02311, section 5.1): a checkpoint from before the spike, and other data from there on.
# Where spikes come again the clip is lowered too, as OPT did (arXiv 2205.01068, section 2.5).

MAD_TO_SIGMA = 1.4826
"""Standard deviations of a normal sample per median absolute deviation."""


class Detector:
    """Tells where a loss has left the level of the steps before it. O(window) a step, and a pure function of losses."""

    def __init__(self, policy: SpikePolicy, window: tuple[float, ...] = (), num_above: int = 0) -> None:
        self._policy = policy
        self.window = deque(window, maxlen=policy.window_steps)
        """Losses in nats of the last steps that were no spike."""
        self.num_above = num_above
        """Steps in a row, up to the last one, that were above the limit."""

    @property
    def limit_nats(self) -> float:
        """What a loss must exceed to be a spike's; infinite until the window is full."""
        if len(self.window) < self._policy.window_steps:
            return math.inf
        median = statistics.median(self.window)
        sigma = MAD_TO_SIGMA * statistics.median(abs(loss - median) for loss in self.window)
        return median + max(self._policy.threshold * sigma, self._policy.least_nats)

    def see(self, loss_nats: float) -> bool:
        """Take the next step's loss; whether it is the one with which a spike has lasted for too long.

        A spike's losses do not enter the window: they must not become the level that it is compared with.
        """
        # No median is below the window's least: few losses of a healthy run are worth one.
        least = min(self.window, default=math.inf)
        if loss_nats > least + self._policy.least_nats and loss_nats > self.limit_nats:
            self.num_above += 1
        else:
            self.num_above = 0
            self.window.append(loss_nats)
        return self.num_above == self._policy.patience_steps


class SpikeWatch(Callback):
    """Goes back before a spike that lasts, as often as the policy allows; after that it says so, and the run goes on.

    The run's own ceiling (`AbortPolicy`) holds all the while.
    """

    def __init__(self, policy: SpikePolicy) -> None:
        self._policy = policy
        self._detector = Detector(policy)

    def begin(self, run: Trainer, step: int, carried: Json) -> None:
        """With the window that the checkpoint holds."""
        self._run = run
        window, num_above = carried if isinstance(carried, list) else ([], 0)
        self._detector = Detector(self._policy, tuple(window), num_above)  # type: ignore[arg-type]

    def before_update(self, seen: StepInfo) -> RollbackOrder | None:
        """To before the spike's first step, with the data skipped that led to it."""
        limit_nats = self._detector.limit_nats
        if not self._detector.see(seen.loss_nats):
            return None
        policy, run = self._policy, self._run
        first = seen.step - policy.patience_steps + 1
        reason = (
            f"a loss of {seen.loss_nats:.4f} nats at step {seen.step + 1}, above {limit_nats:.4f} "
            f"for {policy.patience_steps} steps"
        )
        if len(run.rollbacks) >= policy.max_rollbacks:
            self._say_that_none_is_left(seen.step + 1, reason)
            return None
        # Not farther than last time: that state was held for good, and older checkpoints may be gone.
        to_step = max(first - policy.rollback_steps, run.rollbacks[-1].to_step if run.rollbacks else 0)
        return RollbackOrder(
            to_step=to_step,
            skipped_sequences=run.first_sequence(to_step + policy.skip_batches) - run.first_sequence(to_step),
            clip_norm=self._clip_norm(),
            reason=reason,
        )

    def _clip_norm(self) -> float | None:
        """The frozen one the first time; lower where spikes come again."""
        clip_norm = self._run.decision.clip_norm
        return clip_norm if clip_norm is None or not self._run.rollbacks else clip_norm * self._policy.clip_share

    def _say_that_none_is_left(self, step: int, reason: str) -> None:
        run = self._run
        if run.rank != 0 or any(e.kind == "alert" and e.step == step for e in chronicle.entries(run.run_dir)):
            return  # resumed, the run meets the same step again
        text = f"{reason}; all {self._policy.max_rollbacks} rollbacks are spent: the run goes on"
        print(text, file=sys.stderr)
        chronicle.record(run.run_dir, "alert", text, step=step, digest=run.decision.digest)

    def carried(self) -> Json:
        """The window, and how many steps the loss has been above it."""
        return [list(self._detector.window), self._detector.num_above]


@dataclass(frozen=True, kw_only=True, slots=True)
class Rollback(RollbackOrder):
    """The run went back: to the newest good checkpoint until `to_step`, and as before up to that step."""

    at_step: int
    """Updates made when it was decided."""

    def __post_init__(self) -> None:
        checks = Checks(self)
        checks.whole("at_step", "to_step", "skipped_sequences", least=0)
        if self.clip_norm is not None:
            checks.number("clip_norm", above=0)
        checks.done()


@dataclass(frozen=True, kw_only=True, slots=True)
class _Record:
    """The file."""

    digest: str
    """The digest of the launch config."""
    rollbacks: tuple[Rollback, ...]


def skipped_sequences(rollbacks: Sequence[Rollback], step: int) -> int:
    """By how many sequences the data of update `step` lies farther than the schedule says."""
    return sum(rollback.skipped_sequences for rollback in rollbacks if rollback.to_step <= step)


def clip_norm(rollbacks: Sequence[Rollback], step: int, frozen: float | None) -> float | None:
    """In force at update `step`: the last rollback's from before it, or the frozen one."""
    return next((rollback.clip_norm for rollback in reversed(rollbacks) if rollback.to_step <= step), frozen)


def on_path(rollbacks: Sequence[Rollback], manifest: Manifest) -> bool:
    """Whether a checkpoint is of the run as it is now: of before each rollback that it does not know of."""
    return all(manifest.step <= rollback.to_step for rollback in rollbacks[manifest.num_rollbacks :])


def read(run_dir: Path, digest: str) -> tuple[Rollback, ...]:
    """The run's rollbacks, oldest first.

    Raises:
        CorruptError: the file is not one of ours.
        CheckpointError: it is of another launch config.
    """
    path = run_dir / ROLLBACKS_FILE
    if not path.exists():
        return ()
    try:
        record = canon.decode(_Record, canon.parse(path.read_bytes()))
    except ValueError as error:
        raise CorruptError(f"{path}: {error}; restore it: without it the run's data order is not known") from error
    if record.digest != digest:
        raise CheckpointError(
            f"{path} is of the launch config {record.digest[:16]}..., this is {digest[:16]}...: resume with that "
            "config, or start this one in another folder"
        )
    return record.rollbacks


def shared(run_dir: Path, digest: str) -> tuple[Rollback, ...]:
    """The same on every rank, as rank 0 reads it: another host's view of a file just renamed may be older; collective.

    Raises:
        CheckpointError: see `read`; on rank 0.
    """
    told: list[tuple[Rollback, ...] | None] = [None]
    try:
        told = [read(run_dir, digest) if dist.get_rank() == 0 else None]
    finally:
        dist.broadcast_object_list(told, src=0)
    return told[0] or ()


def write(run_dir: Path, digest: str, rollbacks: tuple[Rollback, ...]) -> None:
    """On disk when this returns. One rank only.

    Raises:
        CheckpointError: it cannot be written; the file is as it was.
    """
    path = run_dir / ROLLBACKS_FILE
    try:
        canon.write_atomic(path, canon.pretty(_Record(digest=digest, rollbacks=rollbacks)))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be written ({error.strerror}), so the run does not go back") from error


def add(run_dir: Path, digest: str, rollbacks: tuple[Rollback, ...], new: Rollback) -> None:
    """Record one more; from there on it is what a run that was killed does too. Collective.

    Raises:
        SaveError: it cannot be written.
    """
    try:
        together(lambda: write(run_dir, digest, (*rollbacks, new)) if dist.get_rank() == 0 else None)
    except TrainerError as error:
        raise SaveError(error.problems) from error


def tell(run_dir: Path, digest: str, rollbacks: Sequence[Rollback], start: int) -> None:
    """Say in the chronicle and in the metrics what is not yet said there, the run being at step `start`.

    One rank only. Whoever was killed before it could say so is made up for.
    """
    entries = chronicle.entries(run_dir)
    chronicled = [e.data.get("number") for e in entries if (e.kind, e.digest) == ("rolled_back", digest)]
    told = [line.get("number") for line in metrics.read(run_dir) if line.get("event") == "rolled_back"]
    for number, rollback in enumerate(rollbacks, start=1):
        if number not in chronicled:
            chronicle.record(
                run_dir,
                "rolled_back",
                f"rollback {number}: {rollback.reason}; went back to step {rollback.to_step}, by the checkpoint of "
                f"step {start}, skipping {rollback.skipped_sequences} sequences of the data, "
                + ("clipping nothing" if rollback.clip_norm is None else f"clipping at {rollback.clip_norm:g}"),
                step=rollback.at_step,
                digest=digest,
                data={"number": number, "from_step": start, **asdict(rollback)},
            )
        if number not in told:
            line = {name: value for name, value in asdict(rollback).items() if name != "at_step"}
            metrics.append(run_dir, {"event": "rolled_back", "step": start, "number": number, **line})
