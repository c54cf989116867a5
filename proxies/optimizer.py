"""AdamW over a flat [K, P] buffer: each trial its own learning rate, betas, eps, clip and step count.

All parameters of a bank are views into one buffer, so a step is a dozen operations whatever the depth, and each row
sees only itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from proxies.numbers import ParameterNumbers
from proxies.spec import Hparams


class BankAdamW:
    """Decoupled AdamW (arXiv 1711.05101) for K trials of P parameters each.

    Equal to `torch.optim.AdamW` with one group per parameter, after `clip_grad_norm_`.
    """

    def __init__(self, model: nn.Module, num_trials: int, dtype: torch.dtype) -> None:
        parameters = list(model.named_parameters())
        num_params = sum(p[0].numel() for _, p in parameters)
        self.weights_KP = torch.zeros(num_trials, num_params, dtype=dtype)
        self.gradients_KP = torch.zeros_like(self.weights_KP)
        self.first_KP = torch.zeros_like(self.weights_KP)
        self.second_KP = torch.zeros_like(self.weights_KP)
        self.peak_lr_KP = torch.zeros_like(self.weights_KP)
        self.decay_KP = torch.zeros_like(self.weights_KP)
        self.beta1_K1 = torch.zeros(num_trials, 1, dtype=dtype)
        self.beta2_K1 = torch.zeros(num_trials, 1, dtype=dtype)
        self.eps_K1 = torch.ones(num_trials, 1, dtype=dtype)
        self.clip_K1 = torch.full((num_trials, 1), torch.inf, dtype=dtype)
        self.updates_K1 = torch.zeros(num_trials, 1, dtype=dtype)
        self._decays = False
        self._parameters = [parameter for _, parameter in parameters]
        self.spans: dict[str, tuple[int, int]] = {}
        start = 0
        for name, parameter in parameters:
            stop = start + parameter[0].numel()
            self.spans[name] = (start, stop)
            parameter.data = self.weights_KP[:, start:stop].view(parameter.shape)
            start = stop

    def admit(
        self, trial: int, numbers: Sequence[ParameterNumbers], weights: Mapping[str, Tensor], hparams: Hparams
    ) -> None:
        """Give a trial its weights and rates, by parameter name, with fresh moments."""
        self.clear(trial)
        for parameter in numbers:
            span = slice(*self.spans[parameter.name])
            self.weights_KP[trial, span] = weights[parameter.name].flatten().to(self.weights_KP.dtype)
            self.peak_lr_KP[trial, span] = parameter.learning_rate
            self.decay_KP[trial, span] = parameter.weight_decay
        self.beta1_K1[trial] = hparams.beta1
        self.beta2_K1[trial] = hparams.beta2
        self.eps_K1[trial] = hparams.eps
        self.clip_K1[trial] = torch.inf if hparams.clip_norm is None else hparams.clip_norm
        self._decays = bool((self.decay_KP != 0).any())

    def clear(self, trial: int) -> None:
        """Empty a trial's row: weights, moments and rates to zero, so that it computes zeros."""
        for tensor in (
            self.weights_KP, self.first_KP, self.second_KP, self.peak_lr_KP, self.decay_KP,
            self.beta1_K1, self.beta2_K1, self.updates_K1,
        ):  # fmt: skip
            tensor[trial] = 0
        self.eps_K1[trial] = 1
        self.clip_K1[trial] = torch.inf

    def gather_gradients(self) -> Tensor:
        """Move the parameters' gradients into the flat buffer; returns their norms per trial, [K]."""
        gradients = [p.grad.flatten(1) for p in self._parameters if p.grad is not None]
        torch.cat(gradients, dim=1, out=self.gradients_KP)
        for parameter in self._parameters:
            parameter.grad = None
        norms_K: Tensor = torch.linalg.vector_norm(self.gradients_KP, dim=1)
        return norms_K

    @torch.no_grad()
    def step(self, lr_multiplier_K1: Tensor, active_K1: Tensor, grad_norm_K1: Tensor) -> None:
        """One update of the active trials, clipped by their gradient norms; an inactive row does not move."""
        # torch.nn.utils.clip_grad_norm_'s own form, its 1e-6 included.
        shrink_K1 = (self.clip_K1 / (grad_norm_K1 + 1e-6)).clamp(max=1.0)
        gradients_KP = self.gradients_KP.mul_(shrink_K1)
        if not bool(active_K1.all()):
            # where, not times: NaN * 0 is NaN, and a diverged row must not write.
            gradients_KP = torch.where(active_K1, gradients_KP, 0)
        self.updates_K1 += active_K1
        self.first_KP.lerp_(gradients_KP, 1 - self.beta1_K1)
        self.second_KP.mul_(self.beta2_K1).addcmul_(gradients_KP, gradients_KP * (1 - self.beta2_K1))
        correction1_K1 = torch.where(active_K1, 1 - self.beta1_K1**self.updates_K1, 1)
        correction2_K1 = torch.where(active_K1, 1 - self.beta2_K1**self.updates_K1, 1)
        share_K1 = lr_multiplier_K1 * active_K1
        if self._decays:  # multiplying by one changes nothing, but takes its time
            self.weights_KP.mul_(1 - self.peak_lr_KP * share_K1 * self.decay_KP)
        denominator_KP = (self.second_KP / correction2_K1).sqrt_().add_(self.eps_K1)
        step_KP = (self.peak_lr_KP * (share_K1 / correction1_K1)).mul_(self.first_KP).div_(denominator_KP)
        self.weights_KP.sub_(step_KP)
