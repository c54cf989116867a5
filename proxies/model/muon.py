"""Muon (Jordan 2024, kellerjordan.github.io/posts/muon) for hidden matrices, with AdamW for all
other parameters.

Muon updates a matrix by its momentum, made orthogonal by Newton-Schulz iterations. `Muon` trains
one model, sharded or not, and equals `torch.optim.Muon` together with `torch.optim.AdamW`. It uses
learning rates as they are: the factor that depends on a matrix's shape
(`forerun._proxies.core.muon`) is already part of them. Exports contain this file and the modules
that it imports.

Shape suffixes: N matrices, R rows, C columns.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.adamw import adamw

from forerun._proxies.core.muon import COEFFICIENTS, EPS, NUM_ITERATIONS

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

MOMENTUM = "momentum"
"""Key that only Muon's groups have among torch's parameter groups."""
BUFFER = "momentum_buffer"
"""Name of the moving average in a parameter's state, as in torch.optim.Muon."""


def get_iteration_dtype(device: torch.device, weights: torch.dtype) -> torch.dtype:
    """Return the dtype of the iterations: bfloat16 on a GPU, as published.

    On a CPU bfloat16 is slow, so the dtype is that of the weights.
    """
    return torch.bfloat16 if device.type == "cuda" else weights


def orthogonalize(matrices_NRC: Tensor, dtype: torch.dtype) -> Tensor:
    """Return matrices [N, R, C] with singular values near one, by Newton-Schulz iterations.

    The singular values become 0.7 to 1.2, apart from the smallest; a zero matrix stays
    zero. A matrix's result does not depend on the other matrices.

    Args:
        matrices_NRC: The matrices.
        dtype: Dtype of the iterations and of the result.
    """
    a, b, c = COEFFICIENTS
    x_NRC = matrices_NRC.to(dtype)

    # Products over the shorter side
    is_tall = x_NRC.shape[1] > x_NRC.shape[2]
    if is_tall:
        x_NRC = x_NRC.mT

    # Normalization, in the dtype of the iterations as in torch.optim.Muon
    x_NRC = x_NRC / torch.linalg.vector_norm(x_NRC, dim=(1, 2), keepdim=True).clamp(min=EPS)

    # X <- a X + (b X X^T + c (X X^T)^2) X
    for _ in range(NUM_ITERATIONS):
        gram_NRR = torch.bmm(x_NRC, x_NRC.mT)
        update_NRR = torch.baddbmm(gram_NRR, gram_NRR, gram_NRR, beta=b, alpha=c)
        x_NRC = torch.baddbmm(x_NRC, update_NRR, x_NRC, beta=a)
    return x_NRC.mT if is_tall else x_NRC


def group_by_shape(matrices: Sequence[Tensor]) -> dict[tuple[int, ...], list[int]]:
    """Return the indices of matrices by their shape."""
    indices: dict[tuple[int, ...], list[int]] = {}
    for index, matrix in enumerate(matrices):
        indices.setdefault(tuple(matrix.shape), []).append(index)
    return indices


def is_muon_group(group: Mapping[str, Any]) -> bool:
    """Return whether a parameter group is updated by Muon: it has a `momentum` and no `betas`."""
    return MOMENTUM in group


class Muon(torch.optim.Optimizer):
    """An optimizer for groups of Muon and groups of AdamW.

    Matrices may be sharded by rows, as by FSDP2. Then one rank gathers each matrix, makes it
    orthogonal, and sends the rows back. The ranks work on different matrices, so all of them must
    call `step`.

    Args:
        params: torch's parameter groups, each with `lr` and `weight_decay`; a group of Muon also
            with `momentum`, a group of AdamW with `betas` and `eps`.
        dtype: Dtype of the iterations; None for `get_iteration_dtype`.

    Raises:
        ValueError: A group has the settings of both optimizers or of neither, or a group of Muon
            has a parameter that is not a matrix. `step` raises it if a matrix is sharded in another
            way than by rows over one dimension of the device mesh.
    """

    def __init__(self, params: Iterable[dict[str, Any]], dtype: torch.dtype | None = None) -> None:
        self._dtype = dtype
        super().__init__(params, {})
        for group in self.param_groups:
            if is_muon_group(group) == ("betas" in group):
                raise ValueError("each group must have either momentum (Muon) or betas (AdamW)")
            for p in group["params"]:
                if is_muon_group(group) and p.dim() != 2:
                    raise ValueError(
                        f"Muon steps matrices only, and got parameters of shape {tuple(p.shape)}"
                    )

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Make one update of every parameter that has a gradient.

        Raises:
            ValueError: A closure is given; this optimizer does not evaluate the model.
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
        averages = [self._update_average(p, group[MOMENTUM]) for p, group in matrices]
        directions = self._find_directions(averages)
        for (p, group), direction in zip(matrices, directions, strict=True):
            # Decoupled weight decay, before the update
            p.mul_(1 - group["lr"] * group["weight_decay"])
            # Update
            p.add_(direction.to(p.dtype), alpha=-group["lr"])

    def _update_average(self, p: Tensor, momentum: float) -> Tensor:
        """Add the gradient to the moving average, and return Nesterov's look-ahead of it."""
        state = self.state[p]
        if BUFFER not in state:
            state[BUFFER] = torch.zeros_like(p, memory_format=torch.preserve_format)
        assert p.grad is not None
        state[BUFFER].lerp_(p.grad, 1 - momentum)
        lookahead: Tensor = p.grad.lerp(state[BUFFER], momentum)
        return lookahead

    def _find_directions(self, averages: list[Tensor]) -> list[Tensor]:
        """Return the orthogonal matrix of each average, on the average's device and sharded like
        the average.
        """
        unsharded: list[int] = []
        sharded: dict[tuple[Any, int], list[int]] = {}
        for index, average in enumerate(averages):
            if _is_sharded(average):
                key = average.device_mesh, _find_sharded_dimension(average)
                sharded.setdefault(key, []).append(index)
            else:
                unsharded.append(index)
        directions = dict(
            zip(unsharded, self._orthogonalize([averages[i] for i in unsharded]), strict=True)
        )
        for (mesh, dimension), indices in sharded.items():
            group = mesh.get_group(dimension)
            num_ranks = dist.get_world_size(group)
            # Each rank holds one whole matrix at a time
            for start in range(0, len(indices), num_ranks):
                chosen = indices[start : start + num_ranks]
                parts = [average for i in chosen if _is_sharded(average := averages[i])]
                directions |= zip(chosen, self._orthogonalize_sharded(parts, group), strict=True)
        return [directions[index] for index in range(len(averages))]

    def _orthogonalize(self, matrices: list[Tensor]) -> list[Tensor]:
        """Return the orthogonal matrix of each matrix; those of one shape are computed at once."""
        directions = list(matrices)
        for indices in group_by_shape(matrices).values():
            stacked_NRC = torch.stack([matrices[i] for i in indices])
            dtype = self._dtype or get_iteration_dtype(stacked_NRC.device, stacked_NRC.dtype)
            for index, direction in zip(indices, orthogonalize(stacked_NRC, dtype), strict=True):
                directions[index] = direction
        return directions

    def _orthogonalize_sharded(
        self, parts: list[DTensor], group: dist.ProcessGroup
    ) -> list[DTensor]:
        """Return the orthogonal matrices of no more sharded matrices than there are ranks.

        Rank k gathers the k-th matrix, makes it orthogonal, and returns the rows to their ranks.
        """
        rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)
        averages = [part.to_local().contiguous() for part in parts]
        directions = [torch.empty_like(local) for local in averages]
        own_matrix: Tensor | None = None
        rows: list[Tensor] = []
        if rank < len(parts):
            own_matrix = averages[rank].new_empty(parts[rank].shape)
            rows = _split_rows(own_matrix, num_ranks)
        _exchange(averages, rows, rank, group)
        if own_matrix is not None:
            own_matrix.copy_(self._orthogonalize([own_matrix])[0])
        _exchange(rows, directions, rank, group)
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


# ---- Sharded matrices ----


def _is_sharded(tensor: Tensor) -> TypeGuard[DTensor]:
    # Not imported: loading it takes half a second, and a single rank never needs it
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def _find_sharded_dimension(part: DTensor) -> int:
    """Return the dimension of the mesh over which a matrix's rows are sharded.

    Raises:
        ValueError: The matrix is sharded differently.
    """
    dimensions = [i for i, placement in enumerate(part.placements) if not placement.is_replicate()]
    if len(dimensions) != 1 or not part.placements[dimensions[0]].is_shard(0):
        raise ValueError(
            f"placements = {part.placements}: Muon needs matrices sharded by rows over one "
            "dimension"
        )
    return dimensions[0]


def _split_rows(matrix: Tensor, num_ranks: int) -> list[Tensor]:
    """Return views of the rows of each rank: equally many, but the last ranks fewer or none."""
    pieces = list(torch.chunk(matrix, num_ranks))
    return [*pieces, *[matrix[:0]] * (num_ranks - len(pieces))]


def _exchange(
    sent: list[Tensor], received: list[Tensor], rank: int, group: dist.ProcessGroup
) -> None:
    """Send the k-th tensor to the k-th rank of a group, and receive the k-th from it.

    Empty tensors are not sent.
    """
    operations = []
    for index in range(max(len(sent), len(received))):
        peer = dist.get_global_rank(group, index)
        for tensors, operation in ((sent, dist.isend), (received, dist.irecv)):
            if index != rank and index < len(tensors) and tensors[index].numel():
                operations.append(dist.P2POp(operation, tensors[index], peer, group))
    if rank < min(len(sent), len(received)):
        received[rank].copy_(sent[rank])
    for work in dist.batch_isend_irecv(operations) if operations else ():
        work.wait()
