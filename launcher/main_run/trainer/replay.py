"""Replays: the gradients of a step are computed twice and compared, to find processors that compute
wrongly without an error.

Some machines of a fleet have such processors (arXiv 2102.11245). The ranks average their gradients,
so one rank's wrong gradient reaches every rank's weights. Each rank therefore takes a fingerprint
(sum and norm) of every gradient before the exchange among ranks, and again when the same step is
computed a second time. If a rank's two fingerprints differ by more than rounding, its host is
faulty. The gradients after the exchange are compared too, which finds an exchange that went wrong.
A machine that makes the same error each time is not found.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter

from forerun._launcher.main_run.trainer.callbacks import Callback, StepInfo
from forerun._launcher.main_run.trainer.ranks import gather, get_local_part
from forerun._sweeps.store.sites import get_host

MAX_REORDERED = {"float32": 2.0**-16, "bfloat16": 2.0**-7}
"""Maximum difference between sums of the same numbers in two orders, as a share of their norm, by
precision of the passes. The limit is at least six times the measured difference (docs/run-care.md).
The kernels of a GPU may sometimes choose another order. On a CPU, the same computation gives the
same bits.
"""
MAX_DIFFERENCE = 1e9
"""Largest difference that is reported; a difference that is not a number counts as this one."""


# ---- Fingerprints ----


def compute_fingerprint(tensor: Tensor) -> Tensor:
    """Return sum and norm of a tensor in float64, [2].

    Tensors with equal bits have equal fingerprints, and tensors with close values close ones.
    """
    return torch.stack(
        [tensor.sum(dtype=torch.float64), torch.linalg.vector_norm(tensor, dtype=torch.float64)]
    )


def compute_difference(first: list[Tensor], second: list[Tensor]) -> float:
    """Return the largest difference between paired fingerprints, each as a share of its norm."""
    if not first:
        return 0.0
    first_N2, second_N2 = torch.stack(first), torch.stack(second)
    apart_N = (first_N2 - second_N2).abs().amax(dim=1)
    share_N = torch.where(apart_N == 0, 0.0, apart_N / first_N2[:, 1])
    return float(share_N.nan_to_num(nan=MAX_DIFFERENCE).max().clamp(max=MAX_DIFFERENCE))


class RecordingReduceScatter(DefaultReduceScatter):
    """FSDP's exchange of gradients, which can record the gradients that this rank gives to it."""

    fingerprints: list[Tensor] | None = None
    """Fingerprints of the gradients that this rank has given, in order; None to record nothing."""

    def __init__(self, model: nn.Module) -> None:
        """Install this object as the reduce-scatter of every sharded module of a model."""
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_custom_reduce_scatter(self)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, *args: Any, **options: Any
    ) -> dist.Work:
        """Reduce and scatter as FSDP does."""
        if self.fingerprints is not None:
            self.fingerprints.append(compute_fingerprint(input_tensor))
        return super().__call__(output_tensor, input_tensor, *args, **options)


# ---- Replays ----


class RankDifference(NamedTuple):
    """The difference between the two computations of a step on one rank."""

    host: str
    given: float
    """Difference of the gradients before the exchange among ranks, as a share of their norm."""
    received: float
    """Difference of the gradients after the exchange, as a share of their norm."""


class Replay(Callback):
    """A callback that computes the gradients again every `every_steps` steps, and stops the run if
    they differ by more than rounding.
    """

    def __init__(self, every_steps: int) -> None:
        self.every_steps = every_steps

    def before_gradients(self, step: int) -> None:
        """Record fingerprints of the exchange."""
        self.run.recorder.fingerprints = []

    def before_update(self, info: StepInfo) -> str | None:
        """Compute the gradients of this step again. The update uses the second gradients."""
        given, received = self._take_fingerprints()
        self.run.compute_gradients(info.step)
        given_again, received_again = self._take_fingerprints()
        difference = RankDifference(
            host=get_host(),
            given=compute_difference(given, given_again),
            received=compute_difference(received, received_again),
        )
        return self._judge(info.step + 1, gather(difference))

    @torch.no_grad()
    def _take_fingerprints(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return the fingerprints of the gradients before and after the exchange among ranks.

        The recorder then starts an empty list for the next computation.
        """
        recorder = self.run.recorder
        given, recorder.fingerprints = recorder.fingerprints or [], []
        received = [
            compute_fingerprint(get_local_part(parameter.grad))
            for parameter in self.run.model.parameters()
            if parameter.grad is not None
        ]
        return given, received

    def _judge(self, step: int, by_rank: list[RankDifference]) -> str | None:
        """Log the largest difference, and return the reason to stop the run if it exceeds rounding.

        Args:
            step: Number of the step, counted from 1.
            by_rank: The difference on each rank.
        """
        run, worst = self.run, [max(rank.given, rank.received) for rank in by_rank]
        limit = 0.0 if run.device.type == "cpu" else MAX_REORDERED[run.decision.precision]
        run.log({"event": "replayed", "step": step, "difference": max(worst)})
        if max(worst) <= limit:
            return None
        # A rank that gave other gradients the second time is the cause. If there is none, the
        # message names the ranks that received other gradients.
        ranks = [rank for rank, difference in enumerate(by_rank) if difference.given > limit]
        ranks = ranks or [rank for rank, difference in enumerate(worst) if difference > limit]
        places = ", ".join(f"rank {rank} on host {by_rank[rank].host}" for rank in ranks)
        hosts = sorted({by_rank[rank].host for rank in ranks})
        share = max(worst[rank] for rank in ranks)
        reason = (
            f"gradients of step {step}, computed twice, differ by {share:.3g} of their norm at "
            f"{places}, before the update: exclude {', '.join(hosts)} and launch again"
        )
        run.record_event(
            "quarantined", reason, step - 1, ranks=[*ranks], hosts=[*hosts], difference=share
        )
        return reason
