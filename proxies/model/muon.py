"""Muon (Jordan 2024, kellerjordan.github.io/posts/muon): hidden matrices step by their momentum made orthogonal, all
else by AdamW.

`Muon` trains one model, sharded or not, and equals `torch.optim.Muon` with `torch.optim.AdamW` for the rest. It takes a
matrix's learning rate as it is: what a rule multiplies it with by its shape (`proxies.core.muon`) is in it already.
Exports carry this file: what it imports, they carry too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim.adamw import adamw

from proxies.core.muon import COEFFICIENTS, EPS, NUM_ITERATIONS

BUFFER = "momentum_buffer"
"""The name of the moving average in a parameter's state: torch's own."""


def iteration_dtype(device: torch.device, weights: torch.dtype) -> torch.dtype:
    """What Newton-Schulz computes in: bfloat16 on a GPU, as published; on a CPU, where that is slow, as the weights."""
    return torch.bfloat16 if device.type == "cuda" else weights


def orthogonalized(matrices_NRC: Tensor, dtype: torch.dtype) -> Tensor:
    """Matrices [N, R, C] with their singular values moved near one, in `dtype`: to 0.7 to 1.2, but for the smallest.

    Each by itself: a matrix's result does not depend on the others'. Zero stays zero.
    """
    a, b, c = COEFFICIENTS
    x_NRC = matrices_NRC.to(dtype)
    if tall := x_NRC.shape[1] > x_NRC.shape[2]:
        x_NRC = x_NRC.mT
    # In the iteration's own precision, as torch.optim.Muon has it.
    x_NRC = x_NRC / torch.linalg.vector_norm(x_NRC, dim=(1, 2), keepdim=True).clamp(min=EPS)
    for _ in range(NUM_ITERATIONS):
        gram_NRR = torch.bmm(x_NRC, x_NRC.mT)
        update_NRR = torch.baddbmm(gram_NRR, gram_NRR, gram_NRR, beta=b, alpha=c)
        x_NRC = torch.baddbmm(x_NRC, update_NRR, x_NRC, beta=a)
    return x_NRC.mT if tall else x_NRC


def by_shape(matrices: Sequence[Tensor]) -> dict[tuple[int, ...], list[int]]:
    """Indices of matrices by their shape: those of one are made orthogonal at once."""
    found: dict[tuple[int, ...], list[int]] = {}
    for index, matrix in enumerate(matrices):
        found.setdefault(tuple(matrix.shape), []).append(index)
    return found


class Muon(torch.optim.Optimizer):
    """Muon for groups whose `momentum` is above 0, AdamW for the others.

    Args:
        params: torch's parameter groups, each with `lr`, `weight_decay`, `eps`, `betas` and `momentum`.
        dtype: of the iteration; None: see `iteration_dtype`.

    A sharded matrix is gathered, made orthogonal by one rank, each rank taking its turn, and sent back; `step` is
    collective then.

    Raises:
        ValueError: a group of Muon's holds what is no matrix.
    """

    def __init__(self, params: Iterable[dict[str, Any]], dtype: torch.dtype | None = None) -> None:
        self._dtype = dtype
        self.kept: dict[Tensor, Tensor] | None = None
        """Where it is a dict: the last step's orthogonal matrices by parameter."""
        super().__init__(params, {"momentum": 0.0})
        for group in self.param_groups:
            wrong = [tuple(p.shape) for p in group["params"] if group["momentum"] and p.dim() != 2]
            if wrong:
                raise ValueError(f"Muon steps matrices only, and got parameters of shape {wrong[0]}")

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient.

        Raises:
            ValueError: a closure is given; this optimizer evaluates nothing itself.
        """
        if closure is not None:
            raise ValueError("closure: must be None")
        matrices: list[tuple[Tensor, dict[str, Any]]] = []
        for group in self.param_groups:
            with_gradient = [p for p in group["params"] if p.grad is not None]
            if group["momentum"]:
                matrices += [(p, group) for p in with_gradient]
            else:
                self._step_adamw(with_gradient, group)
        self._step_muon(matrices)

    def _step_adamw(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        for p in parameters:
            if not self.state[p]:
                self.state[p].update(
                    step=torch.zeros((), dtype=torch.float32),
                    exp_avg=torch.zeros_like(p, memory_format=torch.preserve_format),
                    exp_avg_sq=torch.zeros_like(p, memory_format=torch.preserve_format),
                )
        states = [self.state[p] for p in parameters]
        beta1, beta2 = group["betas"]
        adamw(
            parameters, [p.grad for p in parameters if p.grad is not None], [s["exp_avg"] for s in states],
            [s["exp_avg_sq"] for s in states], [], [s["step"] for s in states], foreach=True, amsgrad=False,
            maximize=False, beta1=beta1, beta2=beta2, lr=group["lr"], weight_decay=group["weight_decay"],
            eps=group["eps"],
        )  # fmt: skip

    def _step_muon(self, matrices: list[tuple[Tensor, dict[str, Any]]]) -> None:
        directions = self._directions([self._averaged(p, group["momentum"]) for p, group in matrices])
        for (p, group), direction in zip(matrices, directions, strict=True):
            p.mul_(1 - group["lr"] * group["weight_decay"])
            p.add_(direction.to(p.dtype), alpha=-group["lr"])
            if self.kept is not None:
                self.kept[p] = direction.to(p.dtype)

    def _averaged(self, p: Tensor, momentum: float) -> Tensor:
        """Nesterov's look ahead of the moving average, which takes the gradient in."""
        state = self.state[p]
        if BUFFER not in state:
            state[BUFFER] = torch.zeros_like(p, memory_format=torch.preserve_format)
        assert p.grad is not None
        state[BUFFER].lerp_(p.grad, 1 - momentum)
        ahead: Tensor = p.grad.lerp(state[BUFFER], momentum)
        return ahead

    def _directions(self, averages: list[Tensor]) -> list[Tensor]:
        """Orthogonal matrices, placed and sharded as their averages are."""
        found: list[Tensor] = list(averages)
        sharded = [index for index, average in enumerate(averages) if isinstance(average, DTensor)]
        whole = [index for index in range(len(averages)) if index not in sharded]
        for index, direction in zip(whole, self._orthogonalized([averages[i] for i in whole]), strict=True):
            found[index] = direction
        if sharded:
            parts = [average for average in averages if isinstance(average, DTensor)]
            for index, direction in zip(sharded, self._taking_turns(parts), strict=True):
                found[index] = direction
        return found

    def _orthogonalized(self, matrices: list[Tensor]) -> list[Tensor]:
        found = list(matrices)
        for indices in by_shape(matrices).values():
            stacked_NRC = torch.stack([matrices[i] for i in indices])
            dtype = self._dtype or iteration_dtype(stacked_NRC.device, stacked_NRC.dtype)
            for index, direction in zip(indices, orthogonalized(stacked_NRC, dtype), strict=True):
                found[index] = direction
        return found

    def _taking_turns(self, parts: list[DTensor]) -> list[DTensor]:
        """Those of sharded matrices: every rank is the worker of each so manieth matrix, so that none does all."""
        num_ranks, me = dist.get_world_size(), dist.get_rank()
        found: list[DTensor] = []
        for start in range(0, len(parts), num_ranks):  # no more than so many whole matrices at once
            turn = parts[start : start + num_ranks]
            full = [part.full_tensor() for part in turn]
            if me < len(full):
                full[me] = self._orthogonalized([full[me]])[0].to(full[me].dtype).contiguous()
            for worker, (part, matrix) in enumerate(zip(turn, full, strict=True)):
                if num_ranks > 1:
                    dist.broadcast(matrix, src=worker)
                found.append(distribute_tensor(matrix, part.device_mesh, part.placements, src_data_rank=None))
        return found
