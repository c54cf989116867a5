"""The passes of a step over a rank's part of the batch: ids that are on the device in time, and
when ranks exchange gradients.
"""

from __future__ import annotations

import os
import sys
from typing import TypedDict, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from launcher.estimates.main_run import MASTER_BYTES, RESERVED, memory_per_rank
from launcher.frozen.frozen import Decision, Parallelism
from proxies.core.notation import counted, format_bytes
from proxies.core.spec import Precision
from proxies.data.tokens import TokenStore
from proxies.training.step_loop import to_device


class Rows(TypedDict):
    """Which rows of the data: what `TokenStore.train_batch` takes."""

    seed: int
    first_sequence: int
    num_sequences: int
    seq_len: int


class Batches:
    """This rank's rows of each batch, on its device; the next step's are read while the device
    computes.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._ahead: tuple[TokenStore, Rows, Tensor] | None = None

    def take(self, store: TokenStore, rows: Rows) -> Tensor:
        """Ids [B, T + 1], read now unless these were read ahead: a rollback asks for others."""
        self.read_ahead(store, rows)
        assert self._ahead is not None
        (_, _, ids_BT), self._ahead = self._ahead, None
        return ids_BT

    def read_ahead(self, store: TokenStore, rows: Rows) -> None:
        """Read what will be taken next, and begin to copy it; the host does not wait for the
        device.
        """
        if self._ahead is not None and self._ahead[0] is store and self._ahead[1] == rows:
            return
        self._ahead = (
            store,
            rows,
            to_device(torch.from_numpy(store.train_batch(**rows)), self._device),
        )


class Exchange:
    """When ranks exchange the gradients of a step that takes several passes.

    Once, behind the last pass, where a rank has room for the whole model's gradient in float32
    beside what it holds anyway: FSDP2 adds up the passes' gradients there. Otherwise a rank keeps
    its shard alone, so the shards' ranks exchange in every pass; replicas (HSDP) still do once, for
    what they add up are shards. Collective when made.
    """

    def __init__(
        self, model: nn.Module, decision: Decision, layout: Parallelism, sequences: int, passes: int
    ) -> None:
        """`sequences`: of a pass; `layout`: of the ranks there are."""
        self._model = cast(FSDPModule, model)
        self._replicas = layout.data_parallel_replicate > 1
        self.once = False
        """Whether the shards' ranks exchange behind the last pass alone."""
        if passes < 2 or layout.num_ranks == 1:
            return
        whole_bytes = MASTER_BYTES * sum(parameter.numel() for parameter in model.parameters())
        memory = memory_per_rank(
            decision.shape,
            layout,
            cast(Precision, decision.precision),
            sequences,
            passes,
            optimizer=decision.optimizer,
        )
        needed, there = memory.total_bytes + whole_bytes, (1 - RESERVED) * _device_bytes()
        fits = torch.tensor(
            needed <= there, dtype=torch.int32, device=next(model.parameters()).device
        )
        # another number of exchanges on one rank would hang them all
        dist.all_reduce(fits, op=dist.ReduceOp.MIN)
        self.once = bool(fits.item())
        if dist.get_rank() == 0:
            how = "once a step, behind the last" if self.once else "in each"
            print(
                f"gradients are exchanged {how} of {counted(passes, 'pass')}: the whole gradient "
                "takes "
                f"{format_bytes(whole_bytes)} a rank, {format_bytes(needed)} with all else, must "
                "be at most "
                f"{format_bytes(there)}",
                file=sys.stderr,
                flush=True,
            )

    def at_pass(self, due: bool) -> None:
        """Before each pass of several; `due`: its gradients, added to those before, are looked at
        or stepped on.
        """
        if self.once:
            self._model.set_requires_gradient_sync(due)
        elif self._replicas:
            self._model.set_requires_all_reduce(due)


def _device_bytes() -> float:
    """Memory of this rank's device; of a CPU, its share of the machine's."""
    if torch.cuda.is_available():
        return float(torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory)
    return (
        os.sysconf("SC_PAGE_SIZE")
        * os.sysconf("SC_PHYS_PAGES")
        / int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    )
