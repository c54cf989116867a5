"""Lion (arXiv 2302.06675), for one model and for a bank of trials, which is one batched model.

`test_registries.py` adds this file to a copy of the packages, as `proxies/model/lion.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from forerun._proxies.core.numbers import ParameterNumbers
from forerun._proxies.model.bank_adamw import BankAdamW


class Lion(torch.optim.Optimizer):
    """Steps by the sign of an interpolation between the moving average and the gradient."""

    def __init__(self, params: Iterable[dict[str, Any]]) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Make one update of every parameter that has a gradient."""
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                average = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                direction = average.lerp(p.grad, 1 - beta1).sign_()
                # Decoupled weight decay, before the update
                p.mul_(1 - group["lr"] * group["weight_decay"]).add_(direction, alpha=-group["lr"])
                average.lerp_(p.grad, 1 - beta2)


class BankLion(BankAdamW):
    """Lion for the trials of a bank; the second moment stays zero.

    Suffixes of tensors name their dimensions: K trials, P weights of a trial, and S tensors of a
    trial.
    """

    def get_tensor_settings(self, parameter: ParameterNumbers) -> tuple[float, float, float]:
        """Return a tensor's peak learning rate, weight decay and eps, which Lion does not use."""
        return parameter.learning_rate, parameter.weight_decay, 1.0

    @torch.no_grad()
    def step(self, lr_multiplier_K1: Tensor, active_K1: Tensor, grad_norm_K1: Tensor) -> None:
        """Make one update of the active trials, as `BankAdamW.step`."""
        dtype = self.weights_KP.dtype
        self.updates_K1 += active_K1
        shrink_K1 = self.compute_clip_factor(grad_norm_K1).to(dtype)
        gradients_KP = torch.where(active_K1, self.gradients_KP * shrink_K1, 0)
        weight1_K1, weight2_K1 = (
            torch.where(active_K1, 1 - beta_K1, 0).to(dtype)
            for beta_K1 in (self.beta1_K1, self.beta2_K1)
        )
        direction_KP = self.first_KP.lerp(gradients_KP, weight1_K1).sign_()
        rates_KS = self.peak_lr_KS * torch.where(active_K1, lr_multiplier_K1, 0)
        # The number of weights of each tensor, to repeat the tensor's rate for each of its weights
        sizes_S = torch.tensor(
            [stop - start for start, stop in self.spans.values()], device=rates_KS.device
        )
        # Decoupled weight decay, before the update
        self.weights_KP.mul_(
            (1 - rates_KS * self.decay_KS).to(dtype).repeat_interleave(sizes_S, dim=1)
        )
        self.weights_KP.addcmul_(
            rates_KS.to(dtype).repeat_interleave(sizes_S, dim=1), direction_KP, value=-1
        )
        self.first_KP.lerp_(gradients_KP, weight2_K1)
