"""The steps of the main run: what one rank computes, sharded, saved and resumed.

A step: each rank takes its rows of the global batch of (seed, step); FSDP2 averages the gradients; loss and trouble are
agreed upon by all; only then the clipped update. So a batch that gives NaN is never stepped on, the loss curve depends
on the number of ranks by rounding only, and a resumed run is the same run.
"""

from __future__ import annotations

import dataclasses
import math
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from launcher import assembly, checkpoints, metrics
from launcher.frozen import Decision
from launcher.hooks import Hook, Seen
from launcher.metrics import Ending
from launcher.ranks import device, together
from proxies import canon
from proxies.data.tokens import TokenStore
from proxies.model import Multipliers, token_loss
from proxies.optimizer import set_rates
from proxies.outcome import validation_ids
from proxies.schedule import lr_table

CHECKPOINTS = "checkpoints"
PARITY_FILE = "parity.json"


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
        hooks: Sequence[Hook] = (),
    ) -> None:
        self.decision, self.store, self.run_dir, self.interrupted = decision, store, run_dir, interrupted
        self.hooks = tuple(hooks)
        self.rank, self.num_ranks, self.device = dist.get_rank(), dist.get_world_size(), device()
        parallelism = decision.parallelism
        if self.num_ranks != parallelism.num_ranks:
            parallelism = dataclasses.replace(
                parallelism, data_parallel_shard=self.num_ranks, data_parallel_replicate=1
            )
        self.model = assembly.sharded_model(decision.shape, parallelism, decision.precision, self.device.type)
        self.optimizer = assembly.build_optimizer(self.model, decision.groups)
        self.multipliers = Multipliers(**dataclasses.asdict(decision.forward))
        self.lr_shares = lr_table(decision.learning_rate.schedule)

    def train(self, stop_after: int | None = None) -> Ending:
        """Resume or begin; train to the end of the schedule, or until `stop_after` steps are done.

        Raises:
            TrainerError: nothing good to resume from, or the live optimizer is not the frozen one.
        """
        start, num_steps = self._resume(), len(self.lr_shares)
        target = num_steps if stop_after is None else max(start, min(stop_after, num_steps))
        for step in range(start, target):
            began = time.perf_counter()
            loss_nats, norm, interrupted = self._gradients(step)
            seen = Seen(
                step=step, loss_nats=loss_nats, grad_norm=norm.item(), compute_seconds=time.perf_counter() - began
            )
            if trouble := self._trouble(step, loss_nats, norm.item()):
                return Ending(event="aborted", exit_code=3, step=step, reason=trouble)
            self._update(step, norm)
            columns = {name: value for hook in self.hooks for name, value in hook.after_update(seen).items()}
            self._log(seen, columns, time.perf_counter() - began)
            done = step + 1
            if interrupted or done == target or done % self.decision.checkpointing.every_steps == 0:
                self._save(done)
            if interrupted:
                return Ending(event="interrupted", exit_code=130, step=done, reason="by a signal; saved")
        loss_nats = self.validation_loss()
        if not math.isfinite(loss_nats):
            return Ending(event="aborted", exit_code=3, step=target, reason=f"validation loss is {loss_nats}")
        event: Literal["finished", "stopped"] = "finished" if target == num_steps else "stopped"
        return Ending(event=event, exit_code=0, step=target, validation_loss_nats=loss_nats)

    def _resume(self) -> int:
        """Steps done: the newest good checkpoint's, or 0 with initial weights."""
        found = torch.tensor(together(self._newest_step), device=self.device)
        dist.all_reduce(found, op=dist.ReduceOp.MAX)  # only rank 0 has looked
        start = int(found.item())
        if start:
            checkpoints.read_tensors(checkpoints.folder_of(self._root, start), self.model, self.optimizer)
        else:
            assembly.initialize(self.model, self.decision.groups, self.decision.seed)
        self._prove_parity(start)
        if self.rank == 0:
            metrics.rewind(self.run_dir, start)
        return start

    @property
    def _root(self) -> Path:
        return self.run_dir / CHECKPOINTS

    def _newest_step(self) -> int:
        if self.rank != 0:
            return 0
        self.run_dir.mkdir(parents=True, exist_ok=True)
        warnings: list[str] = []
        try:
            manifest = checkpoints.newest_good(self._root, self.decision.digest, warnings)
        finally:
            sys.stderr.writelines(f"{warning}\n" for warning in warnings)
        return 0 if manifest is None else manifest.step

    def _prove_parity(self, start: int) -> None:
        """Hold the live optimizer, and at step 0 the weights, against the frozen numbers; keep the table."""
        model, optimizer, groups = self.model, self.optimizer, self.decision.groups
        lr_share = self.lr_shares[start - 1] if start else 1.0
        together(lambda: assembly.prove_groups(model, optimizer, groups, lr_share))
        if start:
            return
        init_stds = together(lambda: assembly.prove_init(model, groups))
        if self.rank == 0:
            table = assembly.parity_table(model, optimizer, init_stds)
            canon.write_atomic(
                self.run_dir / PARITY_FILE, canon.pretty({"digest": self.decision.digest, "parameters": table})
            )

    def _gradients(self, step: int) -> tuple[float, Tensor, bool]:
        """Loss of the global batch in nats per token, norm of its gradient, and whether any rank got a signal."""
        first, count = self._sequences(step)
        mine = count // self.num_ranks
        batch = self.store.train_batch(
            seed=self.decision.seed,
            first_sequence=first + self.rank * mine,
            num_sequences=mine,
            seq_len=self.decision.shape.seq_len,
        )
        self.optimizer.zero_grad()
        loss_nats = 0.0
        most = self.decision.parallelism.microbatch_sequences or mine
        for start in range(0, mine, most):
            ids_BT = torch.from_numpy(batch[start : start + most]).to(self.device)
            loss = token_loss(self.model(ids_BT[:, :-1], self.multipliers), ids_BT[:, 1:]) * (len(ids_BT) / mine)
            loss.backward()  # type: ignore[no-untyped-call]
            loss_nats += loss.item()
        norm = torch.nn.utils.get_total_norm([p.grad for p in self.model.parameters() if p.grad is not None])
        if isinstance(norm, DTensor):
            norm = norm.full_tensor()
        told = torch.tensor([loss_nats / self.num_ranks, self.interrupted()], dtype=torch.float64)
        told = told.to(self.device)
        dist.all_reduce(told)
        loss_nats, num_interrupted = told.tolist()
        return loss_nats, norm, num_interrupted > 0

    def _sequences(self, step: int) -> tuple[int, int]:
        """Where the global batch of `step` stands in the data: its first sequence, and how many it takes."""
        decision = self.decision
        return decision.learning_rate.schedule.sequences(step, decision.batch_tokens // decision.shape.seq_len)

    def _trouble(self, step: int, loss_nats: float, grad_norm: float) -> str:
        """Why the update of `step` must not be made; proxies are called diverged by the same rule."""
        if not (math.isfinite(loss_nats) and math.isfinite(grad_norm)):
            return f"loss {loss_nats} or gradient norm {grad_norm} not finite at step {step + 1}, before its update"
        ceiling = self.decision.abort.train_loss_above_nats
        if step > self.decision.learning_rate.schedule.warmup_steps and loss_nats > ceiling:
            return f"loss {loss_nats:.6g} over {ceiling:.3f} nats at step {step + 1}, before its update"
        return ""

    def _update(self, step: int, norm: Tensor) -> None:
        """Clip by the full norm and step, every group at its peak rate times the schedule's share."""
        if self.decision.clip_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(self.model.parameters(), self.decision.clip_norm, norm)
        set_rates(self.optimizer, self.decision.groups, self.lr_shares[step])
        self.optimizer.step()

    def _log(self, seen: Seen, columns: dict[str, canon.Json], seconds: float) -> None:
        if self.rank == 0:
            first, count = self._sequences(seen.step)
            seq_len = self.decision.shape.seq_len
            line = {
                **columns,
                "step": seen.step + 1,
                "train_loss_nats": seen.loss_nats,
                "grad_norm": seen.grad_norm,
                "lr": self.optimizer.param_groups[0]["lr"],
                "tokens": (first + count) * seq_len,
                "tokens_per_second": count * seq_len / seconds,
                "seconds": seconds,
            }
            metrics.append(self.run_dir, line)

    def _save(self, step: int) -> None:
        if self.rank == 0:
            checkpoints.begin(self._root, step)
        dist.barrier()
        part = checkpoints.part_of(self._root, step)
        checkpoints.write_tensors(part, self.model, self.optimizer)
        if self.rank == 0:
            keep = self.decision.checkpointing.keep
            checkpoints.complete(part, digest=self.decision.digest, step=step, keep=keep)
        dist.barrier()

    @torch.no_grad()
    def validation_loss(self) -> float:
        """Loss in nats per token over the proxies' validation windows, each rank its share."""
        seq_len = self.decision.shape.seq_len
        held = validation_ids(self.store, seq_len)
        num_sequences = len(held)
        mine = self.decision.batch_tokens // seq_len // self.num_ranks
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for first in range(0, num_sequences, mine * self.num_ranks):
            # Every rank runs the model equally often, as sharding needs; rows past the end repeat and do not count.
            rows = torch.arange(mine) + first + self.rank * mine
            ids_BT = held[rows.clamp(max=num_sequences - 1)].to(self.device)
            logits_BTV = self.model(ids_BT[:, :-1], self.multipliers).unflatten(0, (mine, seq_len))
            losses_B = token_loss(logits_BTV, ids_BT[:, 1:])
            total += losses_B[(rows < num_sequences).to(self.device)].double().sum()
        dist.all_reduce(total)
        return total.item() / num_sequences
