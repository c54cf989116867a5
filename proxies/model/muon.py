"""Muon (Jordan 2024, kellerjordan.github.io/posts/muon): hidden matrices step by their momentum
made orthogonal, all else by AdamW.

`Muon` trains one model, sharded or not, and equals `torch.optim.Muon` with `torch.optim.AdamW` for
the rest. It takes a matrix's learning rate as it is: what a rule multiplies it with by its shape
(`proxies.core.muon`) is in it already. Exports carry this file: what it imports, they carry too.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.adamw import adamw

from proxies.core.muon import COEFFICIENTS, EPS, NUM_ITERATIONS

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

MOMENTUM = "momentum"
"""The key that only Muon's groups have among torch's parameter groups."""
BUFFER = "momentum_buffer"
"""The name of the moving average in a parameter's state: torch's own."""


def iteration_dtype(device: torch.device, weights: torch.dtype) -> torch.dtype:
    """What Newton-Schulz computes in: bfloat16 on a GPU, as published; on a CPU, where that is
    slow, as the weights.
    """
    return torch.bfloat16 if device.type == "cuda" else weights


def orthogonalized(matrices_NRC: Tensor, dtype: torch.dtype) -> Tensor:
    """Matrices [N, R, C] with their singular values moved near one, in `dtype`: to 0.7 to 1.2, but
    for the smallest.

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


def is_muon_group(group: Mapping[str, Any]) -> bool:
    """Return whether `Muon` steps one of torch's parameter groups by Muon: it has a `momentum`, and
    no `betas`.
    """
    return MOMENTUM in group


class Muon(torch.optim.Optimizer):
    """One optimizer for groups of Muon and groups of AdamW.

    Args:
        params: torch's parameter groups, each with `lr` and `weight_decay`; a group of Muon with
            `momentum`, a group of AdamW with `betas` and `eps`.
        dtype: dtype of the iteration; None: see `iteration_dtype`.

    A matrix sharded by rows, as FSDP2 has it, is gathered by one rank, made orthogonal there and
    sent back, a rank to each of so many matrices; `step` is collective then.

    Raises:
        ValueError: a group has the settings of both or of neither, or a group of Muon holds what is
            no matrix; at a step, a matrix is sharded otherwise.
    """

    def __init__(self, params: Iterable[dict[str, Any]], dtype: torch.dtype | None = None) -> None:
        self._dtype = dtype
        self.kept: dict[Tensor, Tensor] | None = None
        """Where it is a dict: the last step's orthogonal matrices by parameter."""
        super().__init__(params, {})
        for group in self.param_groups:
            if is_muon_group(group) == ("betas" in group):
                raise ValueError("each group must have either momentum (Muon) or betas (AdamW)")
            wrong = [
                tuple(p.shape) for p in group["params"] if is_muon_group(group) and p.dim() != 2
            ]
            if wrong:
                raise ValueError(
                    f"Muon steps matrices only, and got parameters of shape {wrong[0]}"
                )

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
            if is_muon_group(group):
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
            parameters,
            [p.grad for p in parameters if p.grad is not None],
            [s["exp_avg"] for s in states],
            [s["exp_avg_sq"] for s in states],
            [],
            [s["step"] for s in states],
            foreach=True,
            amsgrad=False,
            maximize=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
        )

    def _step_muon(self, matrices: list[tuple[Tensor, dict[str, Any]]]) -> None:
        directions = self._directions([self._averaged(p, group[MOMENTUM]) for p, group in matrices])
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
        by_rows: dict[tuple[Any, int], list[int]] = {}
        whole = []
        for index, average in enumerate(averages):
            if _is_sharded(average):
                by_rows.setdefault((average.device_mesh, _rows_dimension(average)), []).append(
                    index
                )
            else:
                whole.append(index)
        for index, direction in zip(
            whole, self._orthogonalized([averages[i] for i in whole]), strict=True
        ):
            found[index] = direction
        for (mesh, dimension), indices in by_rows.items():
            parts = [average for average in (averages[i] for i in indices) if _is_sharded(average)]
            group = mesh.get_group(dimension)
            num_ranks = dist.get_world_size(group)
            for start in range(0, len(parts), num_ranks):  # a rank holds one whole matrix at a time
                turn = slice(start, start + num_ranks)
                for index, direction in zip(
                    indices[turn], self._taking_turns(parts[turn], group), strict=True
                ):
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

    def _taking_turns(self, parts: list[DTensor], group: dist.ProcessGroup) -> list[DTensor]:
        """Those of no more sharded matrices than there are ranks: each rank gathers one and makes
        it orthogonal.
        """
        me, num_ranks = dist.get_rank(group), dist.get_world_size(group)
        averages = [part.to_local().contiguous() for part in parts]
        directions = [torch.empty_like(local) for local in averages]
        mine = averages[me].new_empty(parts[me].shape) if me < len(parts) else None
        rows = [] if mine is None else _rows_by_rank(mine, num_ranks)
        _exchange(averages, rows, me, group)
        if mine is not None:
            mine.copy_(self._orthogonalized([mine])[0])
        _exchange(rows, directions, me, group)
        return [
            type(part).from_local(
                local,
                part.device_mesh,
                part.placements,
                run_check=False,
                shape=part.shape,
                stride=part.stride(),
            )
            for local, part in zip(directions, parts, strict=True)
        ]


def _is_sharded(tensor: Tensor) -> TypeGuard[DTensor]:
    # Half a second of every process that trains goes into loading what one rank alone never needs.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def _rows_dimension(part: DTensor) -> int:
    """The dimension of the mesh over which a matrix's rows are sharded.

    Raises:
        ValueError: it is sharded otherwise.
    """
    over = [
        dimension
        for dimension, placement in enumerate(part.placements)
        if not placement.is_replicate()
    ]
    if len(over) != 1 or not part.placements[over[0]].is_shard(0):
        raise ValueError(
            f"placements = {part.placements}: Muon needs matrices sharded by rows over one "
            "dimension"
        )
    return over[0]


def _rows_by_rank(matrix: Tensor, num_ranks: int) -> list[Tensor]:
    """Views of the rows that each rank holds: as many each, but the last ones fewer or none."""
    pieces = list(torch.chunk(matrix, num_ranks))
    return [*pieces, *[matrix[:0]] * (num_ranks - len(pieces))]


def _exchange(
    sent: list[Tensor], received: list[Tensor], me: int, group: dist.ProcessGroup
) -> None:
    """Send the k-th tensor to the k-th rank of a group, and receive the k-th from it; empty ones
    are not sent.
    """
    operations = []
    for index in range(max(len(sent), len(received))):
        peer = dist.get_global_rank(group, index)
        for tensors, operation in ((sent, dist.isend), (received, dist.irecv)):
            if index != me and index < len(tensors) and tensors[index].numel():
                operations.append(dist.P2POp(operation, tensors[index], peer, group))
    if me < min(len(sent), len(received)):
        received[me].copy_(sent[me])
    for work in dist.batch_isend_irecv(operations) if operations else ():
        work.wait()
