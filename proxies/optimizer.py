"""AdamW (arXiv 1711.05101), from the numbers of a parametrization: torch's own, and one over a flat [K, P] buffer.

The only file that knows the optimizer's rule. In the bank all parameters are views into one buffer, so a step is a
dozen operations whatever the depth, and each row sees only itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from proxies.numbers import ParameterNumbers

MOMENTS = "adamw."
"""What the names of saved moments begin with."""


class Rates(Protocol):
    """AdamW's numbers, of one parameter or of a group that shares them."""

    @property
    def learning_rate(self) -> float:
        """At the schedule's peak."""

    @property
    def weight_decay(self) -> float:
        """A step multiplies the weight by 1 - lr * weight_decay."""

    @property
    def eps(self) -> float:
        """Added to the root of the second moment."""

    @property
    def beta1(self) -> float:
        """Of the first moment."""

    @property
    def beta2(self) -> float:
        """Of the second moment."""


def adamw(groups: Iterable[tuple[Rates, Sequence[nn.Parameter]]]) -> torch.optim.AdamW:
    """The AdamW of torch, with one parameter group per entry, in that order, at the peak rates."""
    return torch.optim.AdamW(
        [
            {
                "params": list(parameters),
                "lr": rates.learning_rate,
                "weight_decay": rates.weight_decay,
                "eps": rates.eps,
                "betas": (rates.beta1, rates.beta2),
            }
            for rates, parameters in groups
        ],
        foreach=True,
    )


def grouped(
    numbers: Iterable[ParameterNumbers], parameters: Mapping[str, nn.Parameter]
) -> list[tuple[ParameterNumbers, list[nn.Parameter]]]:
    """Parameters by their AdamW numbers: those that share them all are one group, under the first one's."""
    groups: dict[tuple[float, ...], tuple[ParameterNumbers, list[nn.Parameter]]] = {}
    for n in numbers:
        key = (n.learning_rate, n.weight_decay, n.eps, n.beta1, n.beta2)
        groups.setdefault(key, (n, []))[1].append(parameters[n.name])
    return list(groups.values())


def set_rates(optimizer: torch.optim.Optimizer, rates: Iterable[Rates], share: float) -> None:
    """Every group's learning rate: its peak times the schedule's `share`."""
    for live, group in zip(optimizer.param_groups, rates, strict=True):
        live["lr"] = group.learning_rate * share


def moments_of(optimizer: torch.optim.AdamW, parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """The optimizer's state by `MOMENTS` + its own key + parameter; nothing of those that have no gradient."""
    return {
        f"{MOMENTS}{key}.{name}": value
        for name, parameter in parameters.items()
        for key, value in optimizer.state[parameter].items()
    }


def restore_moments(
    optimizer: torch.optim.AdamW, parameters: Mapping[str, nn.Parameter], moments: Mapping[str, Tensor]
) -> None:
    """Give a fresh optimizer what `moments_of` took from another.

    Raises:
        ValueError: of a parameter that is not there, or of another shape.
    """
    for name, value in moments.items():
        key, _, parameter_name = name.removeprefix(MOMENTS).partition(".")
        parameter = parameters.get(parameter_name)
        if parameter is None or value.shape not in (parameter.shape, torch.Size()):
            raise ValueError(f"{name} of shape {tuple(value.shape)} is of no parameter of this model")
        # The count of steps stays on the CPU, as torch itself keeps it.
        optimizer.state[parameter][key] = value.to(parameter.device if value.dim() else "cpu", copy=True)


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
        self.eps_KP = torch.ones_like(self.weights_KP)
        self.beta1_K1 = torch.zeros(num_trials, 1, dtype=dtype)
        self.beta2_K1 = torch.zeros(num_trials, 1, dtype=dtype)
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
        self,
        trial: int,
        numbers: Sequence[ParameterNumbers],
        weights: Mapping[str, Tensor],
        clip_norm: float | None,
    ) -> None:
        """Give a trial its weights and rates, by parameter name, with fresh moments.

        Raises:
            ValueError: betas that differ between parameters, which no parametrization asks for.
        """
        if len(betas := {(parameter.beta1, parameter.beta2) for parameter in numbers}) != 1:
            raise ValueError(f"betas = {sorted(betas)}: one pair for all parameters of a trial is wanted")
        self.clear(trial)
        for parameter in numbers:
            span = slice(*self.spans[parameter.name])
            self.weights_KP[trial, span] = weights[parameter.name].flatten().to(self.weights_KP.dtype)
            self.peak_lr_KP[trial, span] = parameter.learning_rate
            self.decay_KP[trial, span] = parameter.weight_decay
            self.eps_KP[trial, span] = parameter.eps
        self.beta1_K1[trial], self.beta2_K1[trial] = numbers[0].beta1, numbers[0].beta2
        self.clip_K1[trial] = torch.inf if clip_norm is None else clip_norm
        self._decays = bool((self.decay_KP != 0).any())

    def state(self, trial: int) -> dict[str, Tensor]:
        """A trial's weights and moments, [P] each: views into the buffers."""
        buffers = {"weights": self.weights_KP, "first": self.first_KP, "second": self.second_KP}
        return {name: buffer_KP[trial] for name, buffer_KP in buffers.items()}

    def restore(self, trial: int, state: Mapping[str, Tensor], num_updates: int) -> None:
        """Give an admitted trial the weights and moments of `state` after so many updates."""
        for name, row_P in self.state(trial).items():
            row_P.copy_(state[name])
        self.updates_K1[trial] = num_updates

    def clear(self, trial: int) -> None:
        """Empty a trial's row: weights, moments and rates to zero, so that it computes zeros."""
        for tensor in (
            self.weights_KP, self.first_KP, self.second_KP, self.peak_lr_KP, self.decay_KP,
            self.beta1_K1, self.beta2_K1, self.updates_K1,
        ):  # fmt: skip
            tensor[trial] = 0
        self.eps_KP[trial] = 1
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
        denominator_KP = (self.second_KP / correction2_K1).sqrt_().add_(self.eps_KP)
        step_KP = (self.peak_lr_KP * (share_K1 / correction1_K1)).mul_(self.first_KP).div_(denominator_KP)
        self.weights_KP.sub_(step_KP)
