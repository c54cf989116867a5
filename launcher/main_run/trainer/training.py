"""The embedded trainer, from the frozen config to the last checkpoint, in the order of a run.

`run` reads the config and the corpus. `Trainer` builds model and optimizer, resumes, and makes the
steps: read a batch, forward, backward, check, clip, update, log, save.

The global batch of a step depends on (seed, step) alone. Each rank trains on its rows of the batch,
and FSDP2 averages the gradients. So the number of ranks changes the losses by rounding only, and a
resumed run is the same run. All ranks know the loss before the update, so no update is made from a
batch that gives NaN. Every public method is collective: all ranks call it together. Shape suffixes:
B sequences of this rank, T tokens.
"""

from __future__ import annotations

import dataclasses
import math
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from forerun._launcher.main_run import event_log, metrics_file
from forerun._launcher.main_run.checkpoint_folders import CHECKPOINTS
from forerun._launcher.main_run.event_log import EventKind
from forerun._launcher.main_run.frozen.frozen import Decision
from forerun._launcher.main_run.metrics_file import AttemptEnd
from forerun._launcher.main_run.trainer import checkpoints, model_builder, ranks, telemetry
from forerun._launcher.main_run.trainer.callbacks import Callback, Columns, StepInfo, is_due
from forerun._launcher.main_run.trainer.checkpoint_saver import SaveError, Saver
from forerun._launcher.main_run.trainer.inputs import RunOptions, read_inputs
from forerun._launcher.main_run.trainer.replay import RecordingReduceScatter, Replay
from forerun._launcher.main_run.trainer.rollback import Rollback, RollbackHistory, SpikeWatch
from forerun._proxies.core.canon import Json
from forerun._proxies.core.notation import format_loss
from forerun._proxies.core.schedule import compute_lr_table
from forerun._proxies.data.tokens import TokenStore
from forerun._proxies.model.optimizer import clip_to_norm, set_rates
from forerun._proxies.training.engine import copy_to_device


def run(
    options: RunOptions,
    interrupted: Callable[[], bool] = lambda: False,
    build: Callable[..., Trainer] | None = None,
) -> AttemptEnd:
    """Train on every rank of an initialized process group, and return how the run ended.

    Args:
        options: The command line.
        interrupted: Returns whether this rank got a signal to save and end.
        build: Builds the trainer; a rehearsal builds one with a fault. None for `Trainer`.
    """
    if dist.get_rank() == 0:
        options.out.mkdir(parents=True, exist_ok=True)
    try:
        decision, store = ranks.agree(lambda: read_inputs(options))
        build_trainer = build or Trainer
        trainer = build_trainer(decision, store, options.out, interrupted, code_dir=options.code)
        ending = trainer.train(options.stop_after)
    except ranks.TrainerError as error:
        ending = AttemptEnd(event="refused", exit_code=error.exit_code, step=0, reason=str(error))
    if dist.get_rank() == 0:
        metrics_file.write_ending(options.out, ending)
    return ending


def build_callbacks(decision: Decision, num_ranks: int) -> list[Callback]:
    """Return the callbacks that a config asks for, in the order in which they are called."""
    monitoring, spikes = decision.monitoring, decision.spikes
    has_hooks = num_ranks > 1 and not decision.compiled  # a compiled block calls no hooks
    return [
        telemetry.BatchNoise(),
        *([telemetry.RankSeconds()] if has_hooks else []),
        telemetry.Layers(monitoring.layers_every_steps),
        # A replay computes the gradients again, so it comes after the callbacks that measure them.
        Replay(monitoring.replay_every_steps),
        *([SpikeWatch(spikes)] if spikes.max_rollbacks else []),
    ]


class Trainer:
    """One rank of a run."""

    def __init__(
        self,
        decision: Decision,
        store: TokenStore,
        run_dir: Path,
        interrupted: Callable[[], bool],
        callbacks: Sequence[Callback] = (),
        *,
        code_dir: Path | None = None,
    ) -> None:
        self.decision, self.store, self.run_dir = decision, store, run_dir
        self.interrupted, self.device = interrupted, ranks.get_local_device()
        self.rank, self.num_ranks = dist.get_rank(), dist.get_world_size()
        self.callbacks = (*build_callbacks(decision, self.num_ranks), *callbacks)
        for callback in self.callbacks:
            callback.run = self
        layout = decision.parallelism
        if self.num_ranks != layout.num_ranks:
            layout = dataclasses.replace(
                layout, data_parallel_shard=self.num_ranks, data_parallel_replicate=1
            )
        self._has_replicas = layout.data_parallel_replicate > 1

        # Model and optimizer, uninitialized
        self.source = ranks.agree(lambda: model_builder.load_trained_model(decision, code_dir))
        self.model = model_builder.build_sharded_model(self.source, layout, self.device.type)
        self.recorder = RecordingReduceScatter(self.model)
        self.lr_shares = compute_lr_table(decision.learning_rate.schedule)

        # Data: a rank's part of the global batch takes one pass or several
        self._batch_sequences = decision.batch_tokens // decision.shape.seq_len
        rank_sequences = self._batch_sequences // self.num_ranks
        self.pass_sequences = min(rank_sequences, layout.microbatch_sequences or rank_sequences)
        self._read_ahead: tuple[tuple[TokenStore, int, int], Tensor] | None = None
        self.first_pass: tuple[float, Tensor] | None = None
        """Share of the newest step's batch that its first pass has, over all ranks, and the norm of
        that pass's gradient; None unless it was measured."""

        # Checkpoints
        self.saver = Saver(
            run_dir / CHECKPOINTS,
            keep=decision.checkpointing.keep,
            reach_steps=decision.spikes.reach_steps,
            report=self.log,
        )
        self.done = 0
        """Number of updates made."""

    def train(self, stop_after: int | None = None) -> AttemptEnd:
        """Resume or begin, and train to the end of the schedule or to `stop_after` steps.

        Raises:
            TrainerError: No checkpoint is good, or the live optimizer is not the frozen one.
        """
        self._resume()
        self.header = telemetry.build_header(self)
        self.log(self.header)
        try:
            ending = self._train_steps(stop_after)
            self.saver.settle()  # a run that was aborted completes its last checkpoint too
        except SaveError as error:
            ending = self._abort(str(error))
        return ending

    # ---- Resume ----

    def _resume(self) -> None:
        """Load the newest good checkpoint, or begin at step 0 with initial weights."""
        run_dir, decision, model = self.run_dir, self.decision, self.model
        # After a rollback: free memory, and let torch fill the new optimizer's state.
        model.zero_grad()
        self.optimizer = ranks.agree(lambda: model_builder.build_optimizer(model, decision))
        digest, save_every_steps = decision.digest, decision.checkpointing.every_steps
        self.history = ranks.run_on_first_rank(lambda: RollbackHistory.read(run_dir, digest))
        manifest = ranks.run_on_first_rank(
            lambda: self.history.find_checkpoint(run_dir, save_every_steps)
        )
        self.done = start = manifest.step
        # A checkpoint may lack the buffers of a user's model, so these are always initialized.
        if not start or decision.model is not None:
            self.source.initialize(model)
        if start:
            folder = checkpoints.get_checkpoint_folder(run_dir / CHECKPOINTS, start)
            checkpoints.read_tensors(folder, model, self.optimizer)
        else:
            ranks.agree(lambda: self.source.prove_initial(model))
        lr_share = self.lr_shares[start - 1] if start else 1.0
        ranks.agree(
            lambda: model_builder.prove_optimizer(model, self.optimizer, decision, lr_share)
        )
        if self.rank == 0:
            metrics_file.rewind_metrics(run_dir, start)
            self.history.report(run_dir, start)
        for callback in self.callbacks:
            callback.begin(start, manifest.carried.get(type(callback).__name__))

    # ---- Steps ----

    def _train_steps(self, stop_after: int | None) -> AttemptEnd:
        decision, num_steps = self.decision, len(self.lr_shares)
        save_every_steps = decision.checkpointing.every_steps
        target = num_steps if stop_after is None else max(self.done, min(stop_after, num_steps))
        while (step := self.done) < target:
            began = time.perf_counter()

            # Forward and backward; nothing is updated if the loss or a callback forbids it
            self.recorder.fingerprints = None
            due = [callback for callback in self.callbacks if is_due(callback.every_steps, step)]
            for callback in due:
                callback.before_gradients(step)
            loss_nats, norm, interrupted = self.compute_gradients(step)
            num_tokens = self.count_sequences(step)[1] * decision.shape.seq_len
            info = StepInfo(step, num_tokens, loss_nats, norm.item())
            answers = (callback.before_update(info) for callback in due)
            objection = self._find_trouble(info) or next((a for a in answers if a), None)
            if isinstance(objection, str):
                return self._abort(objection)
            if objection:
                self._go_back(objection)
                continue

            # Clip by the full norm, and update every group at its rate of this step
            clip_norm = self.history.get_clip_norm(step, decision.clip_norm)
            clip_to_norm(self.model.parameters(), clip_norm, norm)
            set_rates(self.optimizer, decision.groups, self.lr_shares[step])
            self.optimizer.step()
            self.done = step + 1

            # Measure and log
            columns: Columns = {} if clip_norm is None else {"clip_norm": clip_norm}
            for callback in due:
                columns |= callback.after_update(info)
            if is_due(decision.monitoring.validate_every_steps, step):
                columns["validation_loss_nats"] = telemetry.measure_validation_loss(self)
            trouble = metrics_file.find_not_finite(columns)
            line = telemetry.build_step_line(self, info, time.perf_counter() - began)
            self.log(line if trouble else {**columns, **line})
            if trouble:
                reason = f"{trouble} after the update of step {self.done}, which is not saved"
                return self._abort(reason)

            # Save
            if interrupted or self.done == target or is_due(save_every_steps, step):
                self._save()
            if interrupted:
                reason = "by a signal; saved"
                return AttemptEnd(event="interrupted", exit_code=130, step=step + 1, reason=reason)
        loss_nats = telemetry.measure_validation_loss(self)
        if not math.isfinite(loss_nats):
            return self._abort(f"validation loss is {loss_nats}")
        end = AttemptEnd(event="finished", exit_code=0, step=target, validation_loss_nats=loss_nats)
        return end if target == num_steps else dataclasses.replace(end, event="stopped")

    def compute_gradients(self, step: int) -> tuple[float, Tensor, bool]:
        """Compute the gradients of the global batch of `step`.

        Returns:
            Its loss in nats per token, the norm of its gradient, and whether any rank got a signal.
        """
        batch_BT = self._read_batch(step)
        passes = torch.split(batch_BT, self.pass_sequences)
        measures_first = len(passes) > 1 and is_due(telemetry.NOISE_EVERY_STEPS, step)
        self.optimizer.zero_grad()
        self.first_pass = None
        mean_nats = torch.zeros((), dtype=torch.float64, device=self.device)
        for index, ids_BT in enumerate(passes):
            is_measured = measures_first and index == 0
            # Replicas exchange gradients after the last pass, and after a first pass to measure.
            if self._has_replicas:
                exchanges = is_measured or index == len(passes) - 1
                cast(FSDPModule, self.model).set_requires_all_reduce(exchanges)
            share = len(ids_BT) / len(batch_BT)
            loss = self.source.forward(self.model, ids_BT[:, :-1], ids_BT[:, 1:]) * share
            loss.backward()  # type: ignore[no-untyped-call]
            mean_nats += loss.detach()  # not read here: a GPU would wait after every pass
            if is_measured:
                self.first_pass = (share, ranks.compute_grad_norm(self.model) / share)
        norm = ranks.compute_grad_norm(self.model)
        # Sum over all ranks: the loss, and the numbers of ranks with a signal or a failed save
        flags = torch.tensor([self.interrupted(), self.saver.failed], dtype=torch.float64)
        sums = torch.cat([(mean_nats / self.num_ranks)[None], copy_to_device(flags, self.device)])
        dist.all_reduce(sums)
        if step + 1 < len(self.lr_shares):  # while the device computes
            self._read_batch(step + 1)
        # The step waits for the device only here; the loss may forbid the update that follows.
        loss_nats, num_interrupted, num_failed = sums.tolist()
        if num_failed:
            self.saver.settle()
        return loss_nats, norm, num_interrupted > 0

    def _read_batch(self, step: int) -> Tensor:
        """Return this rank's ids [B, T + 1] of a step, on the device; each batch is read once."""
        num_sequences = self.count_sequences(step)[1] // self.num_ranks
        batch = self.store, self.find_first_sequence(step), num_sequences
        if self._read_ahead is None or self._read_ahead[0] != batch:
            rows = self.store.read_train_batch(
                seed=self.decision.seed,
                first_sequence=batch[1] + self.rank * num_sequences,
                num_sequences=num_sequences,
                seq_len=self.decision.shape.seq_len,
            )
            self._read_ahead = batch, copy_to_device(torch.from_numpy(rows), self.device)
        return self._read_ahead[1]

    def find_first_sequence(self, step: int) -> int:
        """Return the index of the first sequence of a step's batch, counting skipped sequences."""
        return self.count_sequences(step)[0] + self.history.count_skipped(step)

    def count_sequences(self, step: int) -> tuple[int, int]:
        """Return the number of sequences trained on before a step, and the number in the step."""
        return self.decision.learning_rate.schedule.count_sequences(step, self._batch_sequences)

    def _find_trouble(self, info: StepInfo) -> str:
        """Return why the update must not be made; empty if it may be.

        The search used the same rule to call a proxy diverged.
        """
        when = f"at step {info.step + 1}, before its update"
        if not (math.isfinite(info.loss_nats) and math.isfinite(info.grad_norm)):
            return f"loss {info.loss_nats} or gradient norm {info.grad_norm} not finite {when}"
        schedule = self.decision.learning_rate.schedule
        ceiling = self.decision.abort.train_loss_above_nats
        if info.step > schedule.warmup_steps and info.loss_nats > ceiling:
            return f"loss {info.loss_nats:.6g} over {format_loss(ceiling)} nats {when}"
        return ""

    def log(self, line: object) -> None:
        """Append a line to the run's metrics on rank 0; do nothing on other ranks."""
        if self.rank == 0:
            metrics_file.append_line(self.run_dir, line)

    def record_event(self, kind: EventKind, text: str, step: int, **data: Json) -> None:
        """Print an event and add it to the event log on rank 0; do nothing on other ranks."""
        if self.rank == 0:
            print(text, file=sys.stderr)
            digest = self.decision.digest
            event_log.append_event(self.run_dir, kind, text, step=step, digest=digest, data=data)

    def _abort(self, reason: str) -> AttemptEnd:
        return AttemptEnd(event="aborted", exit_code=3, step=self.done, reason=reason)

    def _go_back(self, new_rollback: Rollback) -> None:
        """Record a rollback, then resume. A run that is killed in between resumes alike."""
        self.saver.settle()
        rollbacks = (*self.history.rollbacks, new_rollback)
        history = dataclasses.replace(self.history, rollbacks=rollbacks)
        try:
            ranks.run_on_first_rank(lambda: history.write(self.run_dir))
        except ranks.TrainerError as error:
            raise SaveError(str(error)) from error
        self._resume()

    def _save(self) -> None:
        states = {type(callback).__name__: callback.get_state() for callback in self.callbacks}
        manifest = checkpoints.Manifest(
            digest=self.decision.digest,
            step=self.done,
            carried={name: state for name, state in states.items() if state is not None},
            num_rollbacks=len(self.history.rollbacks),
        )
        self.saver.save(manifest, self.model, self.optimizer)
