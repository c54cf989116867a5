"""Rollbacks of a main run: their record, and the callback that orders one if a loss spike lasts.

This is PaLM's procedure (arXiv 2204.02311, section 5.1): the run loads a checkpoint from before the
spike, and from there on trains on other data. If another spike follows, the clip norm is lowered
too, as OPT did (arXiv 2205.01068, section 2.5).

`RUN_DIR/rollbacks.json` lists all rollbacks of a run. Three things are functions of that list: the
data of each step, the clip norm of each step, and the checkpoints that the run may use. To roll
back, the trainer therefore adds an entry to the list and resumes. A run that is killed at any
moment resumes to the same run.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from forerun._launcher.main_run import event_log, metrics_file
from forerun._launcher.main_run.checkpoint_folders import (
    CHECKPOINTS,
    ROLLBACKS_FILE,
    CheckpointError,
    CorruptError,
    report_refused_checkpoint,
)
from forerun._launcher.main_run.frozen.run_policies import SpikeDetector, SpikePolicy
from forerun._launcher.main_run.trainer import checkpoints
from forerun._launcher.main_run.trainer.callbacks import Callback, StepInfo
from forerun._launcher.main_run.trainer.checkpoints import Manifest
from forerun._proxies.core import canon
from forerun._proxies.core.checks import Checks
from forerun._proxies.core.notation import format_counted, format_loss
from forerun._proxies.core.plain_files import read_plain


@dataclass(frozen=True, kw_only=True, slots=True)
class Rollback:
    """A decision to load a checkpoint from `to_step` or before, to train up to that step as before,
    and to continue with other data.
    """

    at_step: int
    """Number of updates made when the rollback was decided."""
    to_step: int
    """Number of updates after which the run continues with other data."""
    skipped_sequences: int
    """Number of sequences of the data that are skipped at that step."""
    clip_norm: float | None
    """Maximum gradient norm from that step on; None for no clipping."""
    reason: str

    def __post_init__(self) -> None:
        checks = Checks(self)
        checks.require_whole("at_step", "to_step", "skipped_sequences", least=0)
        if self.clip_norm is not None:
            checks.require_number("clip_norm", above=0)
        checks.raise_problems()


@dataclass(frozen=True, kw_only=True, slots=True)
class RollbackHistory:
    """All rollbacks of a run, which is the content of its file `rollbacks.json`."""

    digest: str
    """Digest of the run's launch config."""
    rollbacks: tuple[Rollback, ...] = ()
    """Oldest first."""

    @classmethod
    def read(cls, run_dir: Path, digest: str) -> RollbackHistory:
        """Return the history of a run.

        Raises:
            CorruptError: The file is not one of forerun's.
            CheckpointError: The file belongs to another launch config.
        """
        path = run_dir / ROLLBACKS_FILE
        if not path.exists():
            return cls(digest=digest)
        try:
            history = canon.decode(cls, canon.parse(read_plain(path)))
        except ValueError as error:
            raise CorruptError(
                f"{path}: {error}; restore it: without it the run's data order is not known"
            ) from error
        checkpoints.check_digest(path, history.digest, digest)
        return history

    def write(self, run_dir: Path) -> None:
        """Write the history to disk; call it on one rank only.

        Raises:
            CheckpointError: The file cannot be written, and is unchanged.
        """
        path = run_dir / ROLLBACKS_FILE
        try:
            canon.write_atomic(path, canon.to_pretty_json(self))
        except OSError as error:
            raise CheckpointError(
                f"{path} cannot be written ({error.strerror}), so the run is not rolled back"
            ) from error

    def count_skipped(self, step: int) -> int:
        """Return the number of sequences of the data that were skipped before update `step`."""
        return sum(back.skipped_sequences for back in self.rollbacks if back.to_step <= step)

    def get_clip_norm(self, step: int, frozen: float | None) -> float | None:
        """Return the clip norm at update `step`: that of the last rollback before it, or else the
        frozen one.
        """
        newest_first = reversed(self.rollbacks)
        return next((back.clip_norm for back in newest_first if back.to_step <= step), frozen)

    def holds(self, manifest: Manifest) -> bool:
        """Return whether a checkpoint belongs to the run as it is now.

        It does unless a later rollback goes back to a step before the checkpoint's.
        """
        later = self.rollbacks[manifest.num_rollbacks :]
        return all(manifest.step <= rollback.to_step for rollback in later)

    def find_checkpoint(self, run_dir: Path, first_save: int) -> Manifest:
        """Return the manifest of the checkpoint to resume from; call it on one rank only.

        A manifest without files, at step 0, says that the run begins with initial weights.

        Args:
            run_dir: Folder of the run.
            first_save: Step after which the run saves its first checkpoint. A rollback to a step
                before it begins at step 0.

        Raises:
            CheckpointError: See `checkpoints.find_newest_good`.
        """
        manifest = checkpoints.find_newest_good(
            run_dir / CHECKPOINTS,
            self.digest,
            partial(report_refused_checkpoint, run_dir, self.digest),
            usable=self.holds,
            may_begin=any(rollback.to_step < first_save for rollback in self.rollbacks),
        )
        return manifest or Manifest(digest=self.digest, step=0)

    def report(self, run_dir: Path, start: int) -> None:
        """Add missing rollbacks to the event log and the metrics of a run that resumes at step
        `start`; call it on one rank only.

        A rollback is missing if it is new, or if the run was killed before it was reported.
        """
        entries, lines = event_log.read_events(run_dir), metrics_file.read_lines(run_dir)
        recorded = {
            entry.data.get("number")
            for entry in entries
            if (entry.kind, entry.digest) == ("rolled_back", self.digest)
        }
        in_metrics = {line.get("number") for line in lines if line.get("event") == "rolled_back"}
        for number, rollback in enumerate(self.rollbacks, start=1):
            clip = rollback.clip_norm
            if number not in recorded:
                event_log.append_event(
                    run_dir,
                    "rolled_back",
                    f"rollback {number}: {rollback.reason}; went back to step {rollback.to_step}, "
                    f"from the checkpoint of step {start}, skipping "
                    f"{format_counted(rollback.skipped_sequences, 'sequence')} of the data, "
                    + ("clipping nothing" if clip is None else f"clipping at {clip:g}"),
                    step=rollback.at_step,
                    digest=self.digest,
                    data={"from_step": start, "number": number, **asdict(rollback)},
                )
            if number not in in_metrics:
                line = {
                    "event": "rolled_back",
                    "step": start,
                    "number": number,
                    "to_step": rollback.to_step,
                    "skipped_sequences": rollback.skipped_sequences,
                    "clip_norm": clip,
                    "reason": rollback.reason,
                }
                metrics_file.append_line(run_dir, line)


# ---- Spikes ----


class SpikeWatch(Callback):
    """A callback that rolls the run back if a spike lasts.

    After as many rollbacks as the policy allows, it reports each further spike as an alert, and the
    run continues. The limit of `AbortPolicy` applies at all times.
    """

    def __init__(self, policy: SpikePolicy) -> None:
        self._policy = policy

    def begin(self, step: int, carried: Any) -> None:
        """Restore the window of losses from the checkpoint."""
        window, num_above = carried or ([], 0)
        self._detector = SpikeDetector(self._policy, tuple(window), num_above)

    def before_update(self, info: StepInfo) -> Rollback | None:
        """Order a rollback to a step before the spike, skipping the data that led to it."""
        limit_nats = self._detector.limit_nats
        if not self._detector.add_loss(info.loss_nats):
            return None
        policy, run = self._policy, self.run
        reason = (
            f"a loss of {format_loss(info.loss_nats)} nats at step {info.step + 1}, above "
            f"{limit_nats:.4f} for {format_counted(policy.patience_steps, 'step')}"
        )
        earlier = run.history.rollbacks
        if len(earlier) >= policy.max_rollbacks:
            used = f"all {policy.max_rollbacks} rollbacks are used"
            run.record_event("alert", f"{reason}; {used}: the run continues", info.step + 1)
            return None
        first_step = info.step - policy.patience_steps + 1
        to_step, clip_norm = max(first_step - policy.rollback_steps, 0), run.decision.clip_norm
        if earlier:
            # Do not go further back than the last rollback: that state was good, and older
            # checkpoints may be gone. The second and later rollbacks lower the clip norm.
            to_step = max(to_step, earlier[-1].to_step)
            clip_norm = clip_norm and clip_norm * policy.clip_share
        skipped = run.find_first_sequence(to_step + policy.skip_batches) - run.find_first_sequence(
            to_step
        )
        return Rollback(
            at_step=info.step,
            to_step=to_step,
            skipped_sequences=skipped,
            clip_norm=clip_norm,
            reason=reason,
        )

    def get_state(self) -> canon.Json:
        """Return the window of losses, and how many steps in a row were above its limit."""
        return [list(self._detector.window), self._detector.num_above]
