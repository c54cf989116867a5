"""Muon for the trials of a bank: every trial's matrices of one shape are made orthogonal at
once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from proxies.core.hyperparameters import Hparams
from proxies.core.numbers import ParameterNumbers, kind_of
from proxies.core.optimizers import OPTIMIZERS
from proxies.model.bank_adamw import BankAdamW
from proxies.model.muon import by_shape, iteration_dtype, orthogonalized


class BankMuon(BankAdamW):
    """Muon for the hidden matrices of K trials, AdamW for the rest; all matrices of one shape at
    once.

    A trial's results do not depend on its neighbours': every product is by matrix.
    """

    def __init__(
        self,
        model: nn.Module,
        num_trials: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        *,
        by_row: bool | None = None,
        compiled: bool = False,
    ) -> None:
        """As `BankAdamW`."""
        super().__init__(model, num_trials, dtype, device, by_row=by_row, compiled=compiled)
        matrices = {
            name: tuple(parameter.shape[1:])
            for name, parameter in model.named_parameters()
            if OPTIMIZERS["muon"].can_step(kind_of(name), tuple(parameter.shape[1:]))
        }
        self.left_out = frozenset(matrices)
        device, weights = self.weights_KP.device, self.weights_KP
        self._dtype = iteration_dtype(device, dtype)
        self.momentum_K1 = torch.zeros(num_trials, 1, dtype=torch.float64, device=device)
        self._names = tuple(matrices)
        sizes = [size[0] * size[1] for size in matrices.values()]
        self._averages_KM = torch.zeros(num_trials, sum(sizes), dtype=dtype, device=device)
        averages = torch.split(self._averages_KM, sizes, dim=1)
        self._average_KRC = [
            a_KM.view(-1, *size) for a_KM, size in zip(averages, matrices.values(), strict=True)
        ]
        spans = [self.spans[name] for name in self._names]
        self._weight_KRC, self._gradient_KRC = (
            [
                b_KP[:, start:stop].view(-1, *size)
                for (start, stop), size in zip(spans, matrices.values(), strict=True)
            ]
            for b_KP in (weights, self.gradients_KP)
        )
        self._by_shape = list(by_shape([w_KRC[0] for w_KRC in self._weight_KRC]).values())
        # Per matrix, on the device: a recorded step asks the host for nothing.
        self._lr_KS, self._share_KS = (
            torch.zeros(num_trials, len(sizes), dtype=dtype, device=device) for _ in "ab"
        )

    def admit(
        self,
        trial: int,
        numbers: Sequence[ParameterNumbers],
        weights: Mapping[str, Tensor],
        hparams: Hparams,
    ) -> None:
        """As `BankAdamW.admit`; hidden matrices have Muon's numbers."""
        super().admit(trial, numbers, weights, hparams)
        named = {parameter.name: parameter for parameter in numbers}
        for index, name in enumerate(self._names):
            self._lr_KS[trial, index] = named[name].learning_rate
            self._share_KS[trial, index] = named[name].decay_share
            self.momentum_K1[trial] = named[name].settings["momentum"]

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
                gradient_KRC = torch.where(
                    on_K11, self._gradient_KRC[i] * shrink_K1.to(dtype)[:, :, None], 0
                )
                self._average_KRC[i].lerp_(gradient_KRC, weight_K11)
                ahead.append(gradient_KRC.lerp(self._average_KRC[i], 1 - weight_K11))
            stacked_NRC = torch.stack(ahead, dim=1).flatten(0, 1)
            step_NRC = orthogonalized(stacked_NRC, self._dtype).to(dtype)
            step_KSRC = step_NRC.view(-1, len(indices), *step_NRC.shape[1:])
            for place, i in enumerate(indices):
                rate_K11, kept_K11 = (
                    (own_KS[:, i : i + 1] * share_K1)[:, :, None]
                    for own_KS in (self._lr_KS, self._share_KS)
                )
                self._weight_KRC[i].mul_(1 - kept_K11).sub_(step_KSRC[:, place] * rate_K11)
        super().step(lr_multiplier_K1, active_K1, grad_norm_K1)
