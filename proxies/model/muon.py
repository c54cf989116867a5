"""Muon (Jordan 2024, kellerjordan.github.io/posts/muon): hidden matrices step by their momentum made orthogonal, all
else by AdamW.

`Muon` trains one model, sharded or not, and equals `torch.optim.Muon` with `torch.optim.AdamW` for the rest;
`BankMuon` trains the trials of a bank. Both take a matrix's learning rate as it is: what a rule multiplies it with by
its shape (`proxies.core.muon`) is in the numbers already.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim.adamw import adamw

from proxies.core.hyperparameters import Hparams
from proxies.core.muon import COEFFICIENTS, EPS, NUM_ITERATIONS, stepped_by_muon
from proxies.core.numbers import ParameterNumbers, kind_of
from proxies.core.optimizers import GroupNumbers
from proxies.model.bank_adamw import BankAdamW

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
        groups: numbers and parameters, one torch group each, in that order, at the peak rates.
        dtype: of the iteration; None: see `iteration_dtype`.

    A sharded matrix is gathered, made orthogonal by one rank, each rank taking its turn, and sent back; `step` is
    collective then.

    Raises:
        ValueError: a group of Muon's holds what is no matrix.
    """

    def __init__(
        self,
        groups: Iterable[tuple[GroupNumbers, Sequence[nn.Parameter]]],
        dtype: torch.dtype | None = None,
    ) -> None:
        self._dtype = dtype
        self.kept: dict[Tensor, Tensor] | None = None
        """Where it is a dict: the last step's orthogonal matrices by parameter."""
        made = [
            {
                "params": list(parameters), "lr": rates.learning_rate, "weight_decay": rates.weight_decay,
                "eps": rates.eps, "betas": (rates.beta1, rates.beta2), "momentum": rates.momentum,
            }
            for rates, parameters in groups
        ]  # fmt: skip
        for group in made:
            wrong = [tuple(p.shape) for p in group["params"] if group["momentum"] and p.dim() != 2]  # type: ignore[attr-defined]
            if wrong:
                raise ValueError(f"Muon steps matrices only, and got parameters of shape {wrong[0]}")
        super().__init__(made, {})

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


class BankMuon(BankAdamW):
    """Muon for the hidden matrices of K trials, AdamW for the rest; all matrices of one shape at once.

    A trial's results do not depend on its neighbours': every product is by matrix.
    """

    def __init__(
        self, model: nn.Module, num_trials: int, dtype: torch.dtype, device: torch.device | str = "cpu", *,
        by_row: bool | None = None, compiled: bool = False,
    ) -> None:  # fmt: skip
        """As `BankAdamW`."""
        super().__init__(model, num_trials, dtype, device, by_row=by_row, compiled=compiled)
        matrices = {
            name: tuple(parameter.shape[1:])
            for name, parameter in model.named_parameters()
            if stepped_by_muon(kind_of(name), tuple(parameter.shape[1:]))
        }
        self.left_out = frozenset(matrices)
        device, weights = self.weights_KP.device, self.weights_KP
        self._dtype = iteration_dtype(device, dtype)
        self.momentum_K1 = torch.zeros(num_trials, 1, dtype=torch.float64, device=device)
        self._names = tuple(matrices)
        sizes = [size[0] * size[1] for size in matrices.values()]
        self._averages_KM = torch.zeros(num_trials, sum(sizes), dtype=dtype, device=device)
        averages = torch.split(self._averages_KM, sizes, dim=1)
        self._average_KRC = [a_KM.view(-1, *size) for a_KM, size in zip(averages, matrices.values(), strict=True)]
        spans = [self.spans[name] for name in self._names]
        self._weight_KRC, self._gradient_KRC = (
            [b_KP[:, start:stop].view(-1, *size) for (start, stop), size in zip(spans, matrices.values(), strict=True)]
            for b_KP in (weights, self.gradients_KP)
        )
        self._by_shape = list(by_shape([w_KRC[0] for w_KRC in self._weight_KRC]).values())
        # Per matrix, on the device: a recorded step asks the host for nothing.
        self._lr_KS, self._share_KS = (torch.zeros(num_trials, len(sizes), dtype=dtype, device=device) for _ in "ab")

    def admit(
        self, trial: int, numbers: Sequence[ParameterNumbers], weights: Mapping[str, Tensor], hparams: Hparams
    ) -> None:
        """As `BankAdamW.admit`; hidden matrices have Muon's numbers."""
        super().admit(trial, numbers, weights, hparams)
        named = {parameter.name: parameter for parameter in numbers}
        for index, name in enumerate(self._names):
            self._lr_KS[trial, index] = named[name].learning_rate
            self._share_KS[trial, index] = named[name].decay_share
            self.momentum_K1[trial] = named[name].momentum

    def state(self, trial: int) -> dict[str, Tensor]:
        """A trial's weights, moments and Muon's averages: views into the buffers."""
        return {**super().state(trial), "averages": self._averages_KM[trial]}

    def clear(self, trial: int) -> None:
        """Empty a trial's row, so that it computes zeros."""
        super().clear(trial)
        for tensor in (self._averages_KM, self.momentum_K1, self._lr_KS, self._share_KS):
            tensor[trial] = 0

    @torch.no_grad()
    def step(self, lr_multiplier_K1: Tensor, active_K1: Tensor, grad_norm_K1: Tensor) -> None:
        """One update of the active trials, as `BankAdamW.step`."""
        shrink_K1 = self.shrink(grad_norm_K1)
        dtype = self.weights_KP.dtype
        on_K11 = active_K1[:, :, None]
        weight_K11 = torch.where(active_K1, 1 - self.momentum_K1, 0).to(dtype)[:, :, None]
        share_K1 = torch.where(active_K1, lr_multiplier_K1, 0).to(dtype)
        for indices in self._by_shape:
            ahead = []
            for i in indices:
                # where, not times: NaN * 0 is NaN, and a diverged row must not write.
                gradient_KRC = torch.where(on_K11, self._gradient_KRC[i] * shrink_K1.to(dtype)[:, :, None], 0)
                self._average_KRC[i].lerp_(gradient_KRC, weight_K11)
                ahead.append(gradient_KRC.lerp(self._average_KRC[i], 1 - weight_K11))
            stacked_NRC = torch.stack(ahead, dim=1).flatten(0, 1)
            step_NRC = orthogonalized(stacked_NRC, self._dtype).to(dtype)
            step_KSRC = step_NRC.view(-1, len(indices), *step_NRC.shape[1:])
            for place, i in enumerate(indices):
                rate_K11, kept_K11 = (
                    (own_KS[:, i : i + 1] * share_K1)[:, :, None] for own_KS in (self._lr_KS, self._share_KS)
                )
                self._weight_KRC[i].mul_(1 - kept_K11).sub_(step_KSRC[:, place] * rate_K11)
        super().step(lr_multiplier_K1, active_K1, grad_norm_K1)
