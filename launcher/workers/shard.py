"""What one rank has of a trial that is sharded over several: its shares of weights and moments, its rows of a batch.

Our decoder, sharded block by block (FSDP2). Loss and gradient norm are those of the whole batch, and every rank has the
very same ones, so all agree on what has diverged.
"""

from __future__ import annotations

import dataclasses
import gc
import math
from collections.abc import Mapping
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from launcher.frozen.frozen import groups_of
from launcher.trainer.assembly import initialize, shard_blocks, shared_out
from launcher.trainer.ranks import device
from proxies.core.schedule import lr_multiplier
from proxies.core.spec import RunSpec
from proxies.data.tokens import TokenStore
from proxies.model.decoder import Decoder, Multipliers, parameter_shapes, token_loss
from proxies.model.optimizer import (
    MOMENTS,
    clip_gradients,
    grouped,
    moments_of,
    restore_moments,
    set_rates,
    torch_optimizer,
)
from proxies.parametrization.parametrization import forward_numbers, parameter_table
from proxies.training.outcome import validation_ids
from proxies.training.prefetch import Prefetch
from proxies.training.torch_device import set_arithmetic

_MOMENTS = ("exp_avg", "exp_avg_sq", "step")


class Part:
    """What one rank has of a trial. Every method is collective: all ranks call it together."""

    def __init__(self, spec: RunSpec, store: TokenStore, mesh: DeviceMesh, num_microbatches: int) -> None:
        """Its share of the run's initial weights, and no moments. `num_microbatches`: see `sharded`."""
        gc.collect()  # of the trial before: FSDP ties a model in a circle, and its share of the device waits for this
        numerics, numbers = spec.numerics, parameter_table(spec)
        set_arithmetic(numerics)
        self._spec, self._store, self._pass_sequences = spec, store, spec.pass_sequences(num_microbatches)
        self._rank, self._num_ranks, self._device = dist.get_rank(), dist.get_world_size(), device()
        model = Decoder(spec.shape, device="meta", checkpointing=numerics.activation_checkpointing)
        # Weights are gathered as they are, and autocast as they are on one device: the same arithmetic.
        self.model = shard_blocks(model.to(_dtype(spec)), mesh, MixedPrecisionPolicy())
        initialize(self.model, groups_of(numbers), spec.seed)
        self._multipliers = Multipliers(**dataclasses.asdict(forward_numbers(spec)))
        groups = grouped(numbers, self._parameters)
        self._optimizer, self._rates = torch_optimizer(spec.optimizer, groups), [rates for rates, _ in groups]
        self._batches = Prefetch(store, spec, self._device, rank=self._rank, num_ranks=self._num_ranks)

    @property
    def _parameters(self) -> dict[str, nn.Parameter]:
        return dict(self.model.named_parameters())

    def step(self, step: int) -> tuple[float, float]:
        """Make update `step`, if its batch's loss in nats per token and gradient's norm, returned, are finite."""
        ids_BT = self._batches.take(step)
        self._optimizer.zero_grad()
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        for part_BT in torch.split(ids_BT, self._pass_sequences):
            loss = self._losses(part_BT).mean() * (len(part_BT) / len(ids_BT))
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        gradients = [cast(DTensor, p.grad).to_local() for p in self.model.parameters() if p.grad is not None]
        told = torch.stack([total, torch.nn.utils.get_total_norm(gradients).double()])
        losses, norms = self._of_all(told)
        loss_nats, norm = sum(losses) / self._num_ranks, math.sqrt(sum(each * each for each in norms))
        if math.isfinite(loss_nats) and math.isfinite(norm):
            self._update(step, norm)
        return loss_nats, norm

    def _update(self, step: int, norm: float) -> None:
        """Clip by the whole gradient's norm and step, every group at its peak rate times the schedule's share."""
        spec = self._spec
        whole = torch.tensor(norm, dtype=_dtype(spec), device=self._device)
        clip_gradients(self.model.parameters(), spec.hparams, whole)
        set_rates(self._optimizer, self._rates, lr_multiplier(spec.schedule, step))
        self._optimizer.step()

    @torch.no_grad()
    def validation_loss(self) -> float:
        """In nats per token, over the windows that every run is judged on, each rank its share."""
        held_BT = validation_ids(self._store, self._spec.shape.seq_len)
        share = math.ceil(len(held_BT) / self._num_ranks)
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        for rows in torch.split(torch.arange(share) + self._rank * share, self._pass_sequences):
            # Every rank runs the model equally often, as sharding needs; rows past the end repeat and do not count.
            losses_B = self._losses(held_BT[rows.clamp(max=len(held_BT) - 1)].to(self._device)).double()
            total += losses_B[(rows < len(held_BT)).to(self._device)].sum()
        (totals,) = self._of_all(total[None])
        return sum(totals) / len(held_BT)

    def gathered(self) -> dict[str, Tensor]:
        """Weights and moments, whole and on the CPU; on rank 0 alone, for the others nothing."""
        found = {}
        for name, value in {**self._parameters, **moments_of(self._optimizer, self._parameters)}.items():
            whole = value.full_tensor() if isinstance(value, DTensor) else value
            if self._rank == 0:
                found[name] = whole.detach().cpu()
        return found

    @torch.no_grad()
    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Take up what `gathered` gave; only rank 0 need have it."""
        parameters, moments = self._parameters, {}
        for name, like in state_like(self._spec).items():
            whole = tensors[name] if self._rank == 0 else torch.empty_like(like, device="cpu")
            whole = whole.to(self._device)
            dist.broadcast(whole, 0)
            parameter = parameters[name.removeprefix(MOMENTS).partition(".")[2] if name.startswith(MOMENTS) else name]
            own = shared_out(whole, parameter) if whole.dim() else whole
            if name.startswith(MOMENTS):
                moments[name] = own
            else:
                parameter.copy_(own)
        restore_moments(self._optimizer, parameters, moments)

    def _losses(self, ids_BT: Tensor) -> Tensor:
        """Nats per token of every sequence, [B]."""
        spec = self._spec
        with torch.autocast(self._device.type, dtype=torch.bfloat16, enabled=spec.numerics.dtype == "bfloat16"):
            logits_NV: Tensor = self.model(ids_BT[:, :-1], self._multipliers)
        return token_loss(logits_NV.view(len(ids_BT), spec.shape.seq_len, -1), ids_BT[:, 1:])

    def _of_all(self, mine: Tensor) -> list[list[float]]:
        """Every number of every rank, [number][rank]: summed by each alike, for no rank may see another loss."""
        told = [torch.empty_like(mine) for _ in range(self._num_ranks)]
        dist.all_gather(told, mine)
        return torch.stack(told).T.tolist()


def state_like(spec: RunSpec) -> dict[str, Tensor]:
    """Names, shapes and dtypes of a run's whole state beside what was logged, in one order; nothing is allocated."""
    like = {
        name: torch.empty(size, dtype=_dtype(spec), device="meta")
        for name, size in parameter_shapes(spec.shape).items()
    }
    moments = {
        f"{MOMENTS}{key}.{name}": torch.empty((), device="meta") if key == "step" else tensor
        for name, tensor in like.items()
        for key in _MOMENTS
    }
    return {**like, **moments}


def _dtype(spec: RunSpec) -> torch.dtype:
    """Of weights, gradients and moments."""
    return torch.float64 if spec.numerics.dtype == "float64" else torch.float32
