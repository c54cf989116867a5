"""Muon for the trials of a bank. The updates of all matrices of one shape, of all trials, are made
orthogonal at once.

Shape suffixes: K trials, M weights of a trial that Muon updates, H matrices of a trial that Muon
updates, G matrices of one shape among these, N = K * G matrices of one shape of all trials, R rows
and C columns of a matrix.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from forerun._proxies.core.hyperparameters import Hparams
from forerun._proxies.core.numbers import ParameterNumbers, get_kind
from forerun._proxies.core.optimizers import OPTIMIZERS
from forerun._proxies.model.bank_adamw import BankAdamW
from forerun._proxies.model.muon import get_iteration_dtype, group_by_shape, orthogonalize


class BankMuon(BankAdamW):
    """Muon for the hidden matrices of K trials, and AdamW for the other parameters.

    Every matrix product concerns one matrix of one trial, so that a trial's results do not depend
    on the other trials. The arguments are those of `BankAdamW`.
    """

    def __init__(self, model: nn.Module, *args: Any, **options: Any) -> None:
        super().__init__(model, *args, **options)
        matrices = {
            name: parameter
            for name, parameter in model.named_parameters()
            if OPTIMIZERS["muon"].can_step(get_kind(name), tuple(parameter.shape[1:]))
        }
        self._names = tuple(matrices)
        # `BankAdamW` reads this attribute and leaves these parameters to Muon
        self.excluded = frozenset(matrices)
        self._iteration_dtype = get_iteration_dtype(self.weights_KP.device, self.weights_KP.dtype)

        # Moving averages of the gradients
        one_trial = [matrix[0] for matrix in matrices.values()]
        num_trials, sizes = len(self.weights_KP), [matrix.numel() for matrix in one_trial]
        self._averages_KM = self.weights_KP.new_zeros(num_trials, sum(sizes))

        # Views of each matrix, [K, R, C]: its weights, gradients, and moving averages
        self._matrix_weights, self._matrix_gradients = (
            [self._view(buffer_KP, name, matrix) for name, matrix in matrices.items()]
            for buffer_KP in (self.weights_KP, self.gradients_KP)
        )
        self._matrix_averages = [
            average.view(matrix.shape)
            for average, matrix in zip(
                torch.split(self._averages_KM, sizes, dim=1), matrices.values(), strict=True
            )
        ]
        # Indices of the matrices by shape
        self._groups = list(group_by_shape(one_trial).values())

        # These numbers are on the device, because a recorded CUDA graph cannot ask the host
        self.momentum_K1 = torch.zeros_like(self.beta1_K1)
        self._peak_lr_KH = self.weights_KP.new_zeros(num_trials, len(sizes))
        self._decay_share_KH = torch.zeros_like(self._peak_lr_KH)

    def admit(
        self,
        trial: int,
        numbers: Sequence[ParameterNumbers],
        weights: Mapping[str, Tensor],
        hparams: Hparams,
    ) -> None:
        """Give a row to a new trial, like `BankAdamW.admit`."""
        super().admit(trial, numbers, weights, hparams)
        numbers_by_name = {parameter.name: parameter for parameter in numbers}
        for index, name in enumerate(self._names):
            matrix = numbers_by_name[name]
            self._peak_lr_KH[trial, index] = matrix.learning_rate
            self._decay_share_KH[trial, index] = matrix.decay_share
            self.momentum_K1[trial] = matrix.settings["momentum"]  # the same for all matrices

    def get_state(self, trial: int) -> dict[str, Tensor]:
        """Return a trial's weights, moments of AdamW, and moving averages of Muon, as views into
        the buffers.
        """
        return {**super().get_state(trial), "averages": self._averages_KM[trial]}

    def clear(self, trial: int) -> None:
        """Set a row to zero, like `BankAdamW.clear`."""
        super().clear(trial)
        for tensor in (
            self._averages_KM,
            self.momentum_K1,
            self._peak_lr_KH,
            self._decay_share_KH,
        ):
            tensor[trial] = 0

    @torch.no_grad()
    def step(self, lr_multiplier_K1: Tensor, active_K1: Tensor, grad_norm_K1: Tensor) -> None:
        """Make one update of the active trials, like `BankAdamW.step`."""
        dtype = self.weights_KP.dtype
        active_K11 = active_K1[:, :, None]
        shrink_K11 = self.compute_clip_factor(grad_norm_K1).to(dtype)[:, :, None]

        # Learning rate, and share of the new gradient in the moving average. Both are 0 for an
        # inactive trial, which keeps its weights and its moving average
        active_lr_K1 = torch.where(active_K1, lr_multiplier_K1, 0).to(dtype)
        new_share_K11 = torch.where(active_K1, 1 - self.momentum_K1, 0).to(dtype)[:, :, None]
        lr_KH = self._peak_lr_KH * active_lr_K1
        decay_share_KH = self._decay_share_KH * active_lr_K1

        for group in self._groups:
            lookaheads_KRC = []
            for i in group:
                # Clipping. `where` rather than a product: NaN * 0 is NaN
                gradient_KRC = torch.where(active_K11, self._matrix_gradients[i] * shrink_K11, 0)
                # Moving average, and Nesterov's look-ahead
                average_KRC = self._matrix_averages[i]
                average_KRC.lerp_(gradient_KRC, new_share_K11)
                lookaheads_KRC.append(gradient_KRC.lerp(average_KRC, 1 - new_share_K11))

            # Newton-Schulz iterations of all matrices of one shape
            stacked_NRC = torch.stack(lookaheads_KRC, dim=1).flatten(0, 1)
            directions_NRC = orthogonalize(stacked_NRC, self._iteration_dtype).to(dtype)
            directions_KGRC = directions_NRC.view(-1, len(group), *directions_NRC.shape[1:])

            for place, i in enumerate(group):  # `place` counts within the group
                # Decoupled weight decay, before the update
                self._matrix_weights[i].mul_(1 - decay_share_KH[:, i, None, None])
                # Update
                self._matrix_weights[i].sub_(directions_KGRC[:, place] * lr_KH[:, i, None, None])
        # AdamW for the other parameters; the matrices of Muon have the learning rate 0 there. It
        # comes last, because on a CPU it clips the gradients in place
        super().step(lr_multiplier_K1, active_K1, grad_norm_K1)
