"""A step's gradients computed twice and compared, against processors that miscompute without a
word.

Some machines of a fleet do (arXiv 2102.11245), and one wrong gradient is everybody's after the
exchange. So each rank takes the fingerprint of what it hands to the others, and again when the same
step is computed anew: where the two differ by more than equal computations do, that rank's host is
to be taken out. A second fingerprint, of what came back, tells of an exchange that went wrong. A
machine that errs the same way each time is not found so.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter

from launcher.base import chronicle, metrics
from launcher.trainer.callbacks import Callback, StepInfo, Stop
from proxies.core.canon import Json
from sweeps.store.sites import host

if TYPE_CHECKING:
    from launcher.trainer.training import Trainer

ANOTHER_ORDER = {"float32": 2.0**-16, "bfloat16": 2.0**-7}
"""By what the same sums in another order may differ, at the precision of the passes: six times what
was measured (docs/run-care.md). A GPU's kernels may choose an order now and then; on a CPU the same
computation gives the same bits.
"""
_LISTENING = "_forerun_listening"
_MOST = 1e9
"""Differences are reported up to this; one that is not a number counts as this."""


def fingerprint(tensor: Tensor) -> Tensor:
    """Sum and norm in float64, [2]: equal where all bits are, and close together where the values
    are.
    """
    return torch.stack(
        [tensor.sum(dtype=torch.float64), torch.linalg.vector_norm(tensor, dtype=torch.float64)]
    )


def difference(first: list[Tensor], second: list[Tensor]) -> float:
    """The farthest that two lists of fingerprints lie apart, as a share of each norm; 0.0 where
    they are equal.
    """
    if len(first) != len(second):
        return _MOST
    if not first:
        return 0.0
    one_N2, other_N2 = torch.stack(first), torch.stack(second)
    apart_N = (one_N2 - other_N2).abs().amax(dim=1)
    share_N = torch.where(apart_N == 0, 0.0, apart_N / one_N2[:, 1])
    return float(share_N.nan_to_num(nan=_MOST).max().clamp(max=_MOST))


class RecordingReduceScatter(DefaultReduceScatter):
    """FSDP's reduce-scatter; takes the fingerprint, or the norm, of what this rank gives to it too,
    when asked to.
    """

    def __init__(self) -> None:
        self.heard: list[Tensor] | None = None
        self.norms: list[Tensor] | None = None

    @classmethod
    def of(cls, model: nn.Module) -> RecordingReduceScatter:
        """A sharded model's own: one for all that listen."""
        found = getattr(model, _LISTENING, None)
        if not isinstance(found, cls):
            found = cls()
            object.__setattr__(model, _LISTENING, found)
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    module.set_custom_reduce_scatter(found)
        return found

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, *rest: Any, **options: Any
    ) -> dist.Work:
        """As the one it replaces."""
        if self.heard is not None:
            self.heard.append(fingerprint(input_tensor))
        if self.norms is not None:
            self.norms.append(torch.linalg.vector_norm(input_tensor, dtype=torch.float64))
        return super().__call__(output_tensor, input_tensor, *rest, **options)


class Replay(Callback):
    """Every so many steps the gradients are computed again, and the run stops where they differ."""

    def __init__(self, every_steps: int) -> None:
        self._every_steps = every_steps
        self._listening: RecordingReduceScatter | None = None

    def begin(self, run: Trainer, step: int, carried: Json) -> None:
        """Listens to the exchange of gradients."""
        self._run = run
        self._listening = RecordingReduceScatter.of(run.model)
        self._listen_at(step)

    def _listen_at(self, step: int) -> None:
        if self._listening is not None:
            self._listening.heard = [] if (step + 1) % self._every_steps == 0 else None

    def after_update(self, seen: StepInfo) -> dict[str, Json]:
        """Listens to the next step, where it is one to compute twice."""
        self._listen_at(seen.step + 1)
        return {}

    def before_update(self, seen: StepInfo) -> Stop | None:
        """Computes the gradients of this step again; the update is made with these."""
        listening, run = self._listening, self._run
        if listening is None or listening.heard is None:
            return None
        given, received = listening.heard, self._received()
        listening.heard = []
        run.gradients(seen.step)
        mine = [difference(given, listening.heard), difference(received, self._received())]
        told_R2 = torch.zeros(run.num_ranks, 2, dtype=torch.float64, device=run.device)
        told_R2[run.rank] = torch.tensor(mine, dtype=torch.float64)
        dist.all_reduce(told_R2)
        return self._judge(seen.step + 1, told_R2.tolist())

    @torch.no_grad()
    def _received(self) -> list[Tensor]:
        gradients = (p.grad for p in self._run.model.parameters() if p.grad is not None)
        return [
            fingerprint(gradient.to_local() if hasattr(gradient, "to_local") else gradient)
            for gradient in gradients
        ]

    def _judge(self, step: int, told: list[list[float]]) -> Stop | None:
        """What the ranks saw, [gave, received] each."""
        worst, run = [max(seen) for seen in told], self._run
        limit = 0.0 if run.device.type == "cpu" else ANOTHER_ORDER[run.decision.precision]
        if run.rank == 0:
            metrics.append(
                run.run_dir, {"event": "replayed", "step": step, "difference": max(worst)}
            )
        if max(worst) <= limit:
            return None
        # Who gave something else is the cause; where nobody did, whoever received something else.
        gave = [rank for rank, (share, _) in enumerate(told) if share > limit]
        ranks = gave or [rank for rank, share in enumerate(worst) if share > limit]
        hosts: list[Any] = [None] * run.num_ranks
        dist.all_gather_object(hosts, host())
        where = ", ".join(f"rank {rank} on host {hosts[rank]}" for rank in ranks)
        out, share = sorted({hosts[rank] for rank in ranks}), max(worst[rank] for rank in ranks)
        reason = (
            f"gradients of step {step}, computed twice, differ by {share:.3g} of their norm at "
            f"{where}, "
            f"before the update: exclude {', '.join(out)} and launch again"
        )
        if run.rank == 0:
            print(reason, file=sys.stderr)
            data: dict[str, Json] = {"ranks": list(ranks), "hosts": list(out), "difference": share}
            chronicle.record(
                run.run_dir,
                "quarantined",
                reason,
                step=step - 1,
                digest=run.decision.digest,
                data=data,
            )
        return Stop(reason=reason)
