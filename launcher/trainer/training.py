"""The steps of the main run: what one rank computes, sharded, saved and resumed.

A step: each rank takes its rows of the global batch of (seed, step); FSDP2 averages several ranks'
gradients; loss and trouble are agreed upon by all; only then the clipped update. So a batch that
gives NaN is never stepped on, the loss curve depends on the number of ranks by rounding only, and a
resumed run is the same run.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import math
import re
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from launcher.base import metrics
from launcher.base.metrics import AttemptEnd, Header
from launcher.base.reference import GPUS
from launcher.base.run_files import CHECKPOINTS, RefusedCheckpoint, expected, tell
from launcher.frozen.frozen import Decision, FrozenError
from launcher.trainer import assembly, checkpoints, rollback
from launcher.trainer.callbacks import Callback, RollbackOrder, StepInfo, Stop
from launcher.trainer.checkpoint_saver import SaveError, Saver
from launcher.trainer.passes import Batches, Exchange, Rows
from launcher.trainer.ranks import device, together
from launcher.trainer.replay import Replay
from launcher.trainer.spikes import SpikeWatch
from launcher.trainer.telemetry import NOISE_EVERY_STEPS, BatchNoise, Layers, Machines, Validation
from launcher.trainer.trained_model import trained_model
from proxies.core import canon
from proxies.core.flops import flops_per_token
from proxies.core.notation import format_loss
from proxies.core.schedule import lr_table
from proxies.data.tokens import TokenStore
from proxies.model.loss import token_loss
from proxies.model.optimizer import clip_to, set_rates
from proxies.training.outcome import validation_ids
from proxies.training.step_loop import to_device

_OTHER_FORMS = {"PCIe", "NVL"}
"""Forms of a card that are slower than the one of the reference table."""


def header(decision: Decision, step: int, num_ranks: int, device: torch.device) -> Header:
    """What the lines of an attempt that begins after `step` updates belong to."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return Header(
        digest=decision.digest,
        step=step,
        started_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        num_ranks=num_ranks,
        device=name,
        model_flops_per_token=float(flops_per_token(decision.shape)),
        peak_flops_per_second=peak_flops_per_second(name)
        if decision.precision == "bfloat16"
        else None,
    )


def peak_flops_per_second(device_name: str) -> float | None:
    """Dense bfloat16 peak of the device that a driver names so; None where the reference table has
    no such one.
    """
    words = re.split(r"[^A-Za-z0-9]+", device_name)
    names = {*words, *(first + second for first, second in pairwise(words))}  # GeForce RTX 4090
    found = [
        gpu.peak_flops for name, gpu in GPUS.items() if name in names and not names & _OTHER_FORMS
    ]
    return found[0] if found else None


def share_of_peak(header: Header, tokens_per_second: float) -> dict[str, canon.Json]:
    """`mfu` of a step, of all ranks together; nothing where the peak is not known."""
    if header.peak_flops_per_second is None:
        return {}
    reached = tokens_per_second / (header.peak_flops_per_second * header.num_ranks)
    return {"mfu": reached * header.model_flops_per_token}


def hooks_of(decision: Decision) -> list[Callback]:
    """In the order in which they are called. What the config does not ask for is not there."""
    watched = decision.monitoring
    hooks: list[Callback] = [Machines(), BatchNoise()]  # before the replay, as the layers
    if decision.spikes.max_rollbacks:
        hooks.append(SpikeWatch(decision.spikes))
    if watched.layers_every_steps:
        # before the replay, which computes the gradients anew
        hooks.append(Layers(watched.layers_every_steps))
    if watched.replay_every_steps:
        hooks.append(Replay(watched.replay_every_steps))
    if watched.validate_every_steps:
        hooks.append(Validation(watched.validate_every_steps))
    return hooks


class Trainer:
    """One rank of a run. Every public method is collective: all ranks call it together.

    Shape suffixes: B sequences of this rank, T tokens.
    """

    def __init__(
        self,
        decision: Decision,
        store: TokenStore,
        run_dir: Path,
        interrupted: Callable[[], bool],
        hooks: Sequence[Callback] = (),
        *,
        code_dir: Path | None = None,
    ) -> None:
        self.decision, self.store, self.run_dir, self.interrupted = (
            decision,
            store,
            run_dir,
            interrupted,
        )
        self.hooks = (*hooks_of(decision), *hooks)
        self.rank, self.num_ranks, self.device = dist.get_rank(), dist.get_world_size(), device()
        parallelism = decision.parallelism
        if self.num_ranks != parallelism.num_ranks:
            parallelism = dataclasses.replace(
                parallelism, data_parallel_shard=self.num_ranks, data_parallel_replicate=1
            )
        mine = decision.batch_tokens // decision.shape.seq_len // self.num_ranks
        self._most = min(mine, parallelism.microbatch_sequences or mine)
        self.source = together(lambda: trained_model(decision, code_dir))
        self.model = assembly.sharded_model(self.source, parallelism, self.device.type)
        self.optimizer = assembly.build_optimizer(self.model, decision.groups, decision.optimizer)
        self.exchange = Exchange(
            self.model, decision, parallelism, self._most, -(-mine // self._most)
        )
        self._batches = Batches(self.device)
        self.lr_shares = lr_table(decision.learning_rate.schedule)
        spikes = decision.spikes
        reach_steps = spikes.rollback_steps + spikes.patience_steps if spikes.max_rollbacks else 0
        self.saver = Saver(self._root, decision.digest, decision.checkpointing.keep, reach_steps)
        self.rollbacks: tuple[rollback.Rollback, ...] = ()
        self.done = 0
        self.part: tuple[float, Tensor] | None = None
        """Of the newest step: which share of the batch its first pass has, over all ranks, and the
        norm of that part's gradient; None where it is not measured, as where there is one pass
        only.
        """

    def train(self, stop_after: int | None = None) -> AttemptEnd:
        """Resume or begin; train to the end of the schedule, or until `stop_after` steps are done.

        Raises:
            TrainerError: nothing good to resume from, or the live optimizer is not the frozen one.
        """
        self._resume()
        self.header = header(self.decision, self.done, self.num_ranks, self.device)
        if self.rank == 0:
            metrics.append(self.run_dir, self.header)
        try:
            ending = self._steps(stop_after)
            self._settle()  # a run that its brake stopped, too, completes its last checkpoint
        except SaveError as error:
            ending = self._aborted(str(error))
        return ending

    def _steps(self, stop_after: int | None) -> AttemptEnd:
        num_steps = len(self.lr_shares)
        target = num_steps if stop_after is None else max(self.done, min(stop_after, num_steps))
        columns: dict[str, canon.Json] = {}
        while (step := self.done) < target:
            began = time.perf_counter()
            loss_nats, norm, interrupted = self.gradients(step)
            seen = StepInfo(step=step, loss_nats=loss_nats, grad_norm=norm.item())
            if trouble := self._trouble(step, loss_nats, seen.grad_norm):
                return self._aborted(trouble)
            answers = [hook.before_update(seen) for hook in self.hooks]
            if stop := next((answer for answer in answers if isinstance(answer, Stop)), None):
                return self._aborted(stop.reason)
            if back := next(
                (answer for answer in answers if isinstance(answer, RollbackOrder)), None
            ):
                self._go_back(step, back)
                continue
            self._update(step, norm)
            self.done = step + 1
            columns = {
                name: value
                for hook in self.hooks
                for name, value in hook.after_update(seen).items()
            }
            trouble = metrics.not_finite(columns)
            self._log(seen, {} if trouble else columns, time.perf_counter() - began)
            if trouble:
                return self._aborted(
                    f"{trouble} after the update of step {self.done}, which is not saved"
                )
            if (
                interrupted
                or self.done == target
                or self.done % self.decision.checkpointing.every_steps == 0
            ):
                self._save()
            if interrupted:
                return AttemptEnd(
                    event="interrupted", exit_code=130, step=self.done, reason="by a signal; saved"
                )
        # after the last update, where that is when the run looks
        measured = columns.get("validation_loss_nats")
        loss_nats = measured if isinstance(measured, float) else self.validation_loss()
        if not math.isfinite(loss_nats):
            return self._aborted(f"validation loss is {loss_nats}")
        event: Literal["finished", "stopped"] = "finished" if target == num_steps else "stopped"
        return AttemptEnd(event=event, exit_code=0, step=target, validation_loss_nats=loss_nats)

    def _aborted(self, reason: str) -> AttemptEnd:
        return AttemptEnd(event="aborted", exit_code=3, step=self.done, reason=reason)

    def _go_back(self, step: int, back: RollbackOrder) -> None:
        """Recorded first, and then as any resume."""
        self._settle()
        new = rollback.Rollback(at_step=step, **dataclasses.asdict(back))
        rollback.add(self.run_dir, self.decision.digest, self.rollbacks, new)
        self.optimizer.zero_grad()
        self.optimizer = assembly.build_optimizer(
            self.model, self.decision.groups, self.decision.optimizer
        )
        self._resume()

    def _resume(self) -> None:
        """From the newest good checkpoint, or from step 0 with initial weights."""
        self.rollbacks = together(lambda: rollback.shared(self.run_dir, self.decision.digest))
        found = torch.tensor(together(self._newest_step), device=self.device)
        dist.all_reduce(found, op=dist.ReduceOp.MAX)  # only rank 0 has looked
        start = int(found.item())
        if not start or self.decision.model is not None:  # whose buffers no checkpoint may hold
            self.source.initialize(self.model)
        if start:
            checkpoints.read_tensors(
                checkpoints.folder_of(self._root, start), self.model, self.optimizer
            )
        self._prove_parity(start)
        if self.rank == 0:
            metrics.rewind(self.run_dir, start)
            rollback.tell(self.run_dir, self.decision.digest, self.rollbacks, start)
        self.done = start
        carried = (
            together(lambda: checkpoints.manifest_of(self._root, start)).carried if start else {}
        )
        for hook in self.hooks:
            hook.begin(self, start, cast(canon.Json, carried.get(type(hook).__name__)))

    @property
    def _root(self) -> Path:
        return self.run_dir / CHECKPOINTS

    def _newest_step(self) -> int:
        if self.rank != 0:
            return 0
        self.run_dir.mkdir(parents=True, exist_ok=True)
        refused: list[RefusedCheckpoint] = []
        try:
            usable = functools.partial(rollback.on_path, self.rollbacks)
            first_save = self.decision.checkpointing.every_steps
            may_begin = any(back.to_step < first_save for back in self.rollbacks)
            manifest = checkpoints.newest_good(
                self._root,
                self.decision.digest,
                refused,
                usable,
                may_begin=may_begin,
                expected="" if may_begin else expected(self.run_dir, self.decision.digest),
                find_problem=checkpoints.find_index_problem,
            )
        finally:
            tell(self.run_dir, self.decision.digest, refused)
        return 0 if manifest is None else manifest.step

    def _prove_parity(self, start: int) -> None:
        """Hold the live optimizer, and at step 0 the weights, against the frozen numbers."""
        lr_share = self.lr_shares[start - 1] if start else 1.0

        def prove() -> None:
            decision = self.decision
            if wrong := assembly.mismatches(
                self.model, self.optimizer, decision.groups, decision.optimizer, lr_share
            ):
                raise FrozenError("live optimizer", wrong)

        together(prove)
        if not start:
            together(lambda: self.source.prove_initial(self.model))

    def gradients(self, step: int) -> tuple[float, Tensor, bool]:
        """Loss of the global batch in nats per token, norm of its gradient, and whether any rank
        got a signal.
        """
        batch_BT = self._batches.take(self.store, self._rows(step))
        self.optimizer.zero_grad()
        mean_nats = torch.zeros((), dtype=torch.float64, device=self.device)
        self.part = None
        mine, parts = len(batch_BT), torch.split(batch_BT, self._most)
        looked_at = len(parts) > 1 and (step + 1) % NOISE_EVERY_STEPS == 0
        for index, ids_BT in enumerate(parts):
            if len(parts) > 1:
                self.exchange.at_pass(ids_BT is parts[-1] or (looked_at and index == 0))
            loss = self.source.loss(self.model, ids_BT[:, :-1], ids_BT[:, 1:]) * (
                len(ids_BT) / mine
            )
            loss.backward()  # type: ignore[no-untyped-call]
            mean_nats += loss.detach()  # not read here: a GPU would wait after every pass
            if looked_at and index == 0:
                self.part = (len(ids_BT) / mine, self._grad_norm() * (mine / len(ids_BT)))
        norm = self._grad_norm()
        flags = torch.tensor([self.interrupted(), self.saver.failed], dtype=torch.float64)
        told = torch.cat([(mean_nats / self.num_ranks)[None], to_device(flags, self.device)])
        dist.all_reduce(told)
        if step + 1 < len(self.lr_shares):
            self._batches.read_ahead(self.store, self._rows(step + 1))
        # The step's one wait for the device. What it tells may forbid the update, so it cannot be
        # read a step late.
        loss_nats, num_interrupted, num_failed = told.tolist()
        if num_failed:
            self._settle()
        return loss_nats, norm, num_interrupted > 0

    def _rows(self, step: int) -> Rows:
        """This rank's rows of the global batch of `step`."""
        mine = self._sequences(step)[1] // self.num_ranks
        return Rows(
            seed=self.decision.seed,
            first_sequence=self.first_sequence(step) + self.rank * mine,
            num_sequences=mine,
            seq_len=self.decision.shape.seq_len,
        )

    def _grad_norm(self) -> Tensor:
        """Of the gradients that are there, over all ranks."""
        norm = torch.nn.utils.get_total_norm(
            [p.grad for p in self.model.parameters() if p.grad is not None]
        )
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    @property
    def accumulates(self) -> bool:
        """Whether a rank's share of the batch takes several passes."""
        most = self.decision.parallelism.microbatch_sequences
        return (
            bool(most)
            and most * self.num_ranks < self.decision.batch_tokens // self.decision.shape.seq_len
        )

    def first_sequence(self, step: int) -> int:
        """Where the global batch of `step` stands in the data: past what the schedule says and
        rollbacks skipped.
        """
        return self._sequences(step)[0] + rollback.skipped_sequences(self.rollbacks, step)

    def num_batch_tokens(self, step: int) -> int:
        """Of the global batch of `step`."""
        return self._sequences(step)[1] * self.decision.shape.seq_len

    def _sequences(self, step: int) -> tuple[int, int]:
        """Sequences trained on before `step`, and how many it takes."""
        decision = self.decision
        return decision.learning_rate.schedule.sequences(
            step, decision.batch_tokens // decision.shape.seq_len
        )

    def _trouble(self, step: int, loss_nats: float, grad_norm: float) -> str:
        """Why the update of `step` must not be made; proxies are called diverged by the same
        rule.
        """
        if not (math.isfinite(loss_nats) and math.isfinite(grad_norm)):
            return (
                f"loss {loss_nats} or gradient norm {grad_norm} not finite at step {step + 1}, "
                "before its update"
            )
        ceiling = self.decision.abort.train_loss_above_nats
        if step > self.decision.learning_rate.schedule.warmup_steps and loss_nats > ceiling:
            return (
                f"loss {loss_nats:.6g} over {format_loss(ceiling)} nats at step {step + 1}, "
                "before its update"
            )
        return ""

    def clip_norm(self, step: int) -> float | None:
        """In force at update `step`."""
        return rollback.clip_norm(self.rollbacks, step, self.decision.clip_norm)

    def _update(self, step: int, norm: Tensor) -> None:
        """Clip by the full norm and step, every group at its peak rate times the schedule's
        share.
        """
        clip_to(self.model.parameters(), self.clip_norm(step), norm)
        set_rates(self.optimizer, self.decision.groups, self.lr_shares[step])
        self.optimizer.step()

    def _log(self, seen: StepInfo, columns: dict[str, canon.Json], seconds: float) -> None:
        if self.rank == 0:
            first, count = self._sequences(seen.step)
            seq_len = self.decision.shape.seq_len
            line = {
                **columns,
                "step": seen.step + 1,
                "train_loss_nats": seen.loss_nats,
                "grad_norm": seen.grad_norm,
                "lr": self.optimizer.param_groups[0]["lr"],
                **(
                    {}
                    if (clip_norm := self.clip_norm(seen.step)) is None
                    else {"clip_norm": clip_norm}
                ),
                "tokens": (first + count) * seq_len,
                "tokens_per_second": count * seq_len / seconds,
                "seconds": seconds,
            }
            metrics.append(
                self.run_dir, {**line, **share_of_peak(self.header, count * seq_len / seconds)}
            )
        self._tell_saves()

    def _save(self) -> None:
        carried = {
            type(hook).__name__: kept for hook in self.hooks if (kept := hook.carried()) is not None
        }
        self.saver.save(self.done, self.model, self.optimizer, carried, len(self.rollbacks))

    def _settle(self) -> None:
        """Wait for the save under way. Raises SaveError where it failed."""
        self.saver.settle()
        self._tell_saves()

    def _tell_saves(self) -> None:
        for saved in self.saver.finished():
            if self.rank == 0:
                metrics.append(self.run_dir, saved)

    @torch.no_grad()
    def validation_loss(self) -> float:
        """Loss in nats per token over the proxies' validation windows, each rank its share."""
        seq_len = self.decision.shape.seq_len
        held = validation_ids(self.store, seq_len)
        num_sequences = len(held)
        mine = self._most  # as many as fit, in training too
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for first in range(0, num_sequences, mine * self.num_ranks):
            # Every rank runs the model equally often, as sharding needs; rows past the end repeat
            # and do not count.
            rows = torch.arange(mine) + first + self.rank * mine
            ids_BT = held[rows.clamp(max=num_sequences - 1)].to(self.device)
            logits_BTV = self.source.logits(self.model, ids_BT[:, :-1]).view(mine, seq_len, -1)
            losses_B = token_loss(logits_BTV, ids_BT[:, 1:])
            total += losses_B[(rows < num_sequences).to(self.device)].double().sum()
        dist.all_reduce(total)
        return total.item() / num_sequences
