"""AdamW (arXiv 1711.05101), from the numbers of a parametrization: torch's own, and one over a flat [K, P] buffer.

The only file that knows the optimizer's rule. In the bank all parameters are views into one buffer, and each row sees
only itself.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from proxies.core.hyperparameters import Hparams
from proxies.core.numbers import ParameterNumbers
from proxies.core.optimizers import GROUP_NUMBERS, OPTIMIZERS, GroupNumbers, OptimizerName

MOMENTS = "adamw."
"""What the names of saved moments begin with."""
SHARED_RECOMPILE_LIMIT = 64
"""Of all banks of a process together, where torch counts them so: two graphs of each, training and validation; torch's
own limit of 8 is for one."""


def adamw(groups: Iterable[tuple[GroupNumbers, Sequence[nn.Parameter]]]) -> torch.optim.AdamW:
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


def torch_optimizer(
    name: OptimizerName, groups: Iterable[tuple[GroupNumbers, Sequence[nn.Parameter]]]
) -> torch.optim.Optimizer:
    """An optimizer of torch, with one parameter group per entry, in that order, at the peak rates."""
    return _OF_TORCH[name][0](groups)


def not_plain(name: OptimizerName, optimizer: torch.optim.Optimizer) -> list[str]:
    """In what a live optimizer is another than the registry's; nothing, if it is the one."""
    _, kind, options = _OF_TORCH[name]
    variants = {key for key in options for group in optimizer.param_groups if group.get(key)}
    if type(optimizer) is kind and not variants:
        return []
    words = " ".join([type(optimizer).__name__, *sorted(variants)])
    return [f"the optimizer is {words}, frozen as plain {OPTIMIZERS[name].label}"]


def live_numbers(group: Mapping[str, Any]) -> dict[str, float]:
    """What one of torch's parameter groups holds, by the names of `GroupNumbers`."""
    return dataclasses.asdict(_numbers_of(group))


def _numbers_of(group: Mapping[str, Any]) -> GroupNumbers:
    beta1, beta2 = group["betas"]
    return GroupNumbers(
        learning_rate=group["lr"], weight_decay=group["weight_decay"], eps=group["eps"], beta1=beta1, beta2=beta2
    )


def last_update(weights: Tensor, group: Mapping[str, Any], state: Mapping[str, Tensor]) -> Tensor:
    """What the last step of torch's optimizer added to a parameter, out of its moments: no older weights are kept.

    The step took w to w (1 - lr decay) - lr u, with u from the moments as they are now; so of the new weights v it
    added -lr (u + decay v) / (1 - lr decay).

    Args:
        weights: after the step; of a sharded parameter this rank's part, as in `state`.
        group: torch's, that the parameter is in.
        state: torch's, of the parameter.
    """
    numbers, num_updates = _numbers_of(group), float(state["step"])
    root = (state["exp_avg_sq"] / (1 - numbers.beta2**num_updates)).sqrt_().add_(numbers.eps)
    direction = (state["exp_avg"] / (1 - numbers.beta1**num_updates)).div_(root)
    share = 1 - numbers.decay_share
    update: Tensor = direction.add_(weights, alpha=numbers.weight_decay).mul_(-numbers.learning_rate / share)
    return update


def clip_gradients(parameters: Iterable[nn.Parameter], hparams: Hparams, norm: Tensor) -> None:
    """Scale gradients whose global norm is above a run's limit down to it."""
    clip_to(parameters, hparams.clip_norm, norm)


def clip_to(parameters: Iterable[nn.Parameter], limit: float | None, norm: Tensor) -> None:
    """Scale gradients whose global norm is above the limit down to it; None never clips."""
    if limit is not None:
        torch.nn.utils.clip_grads_with_norm_(parameters, limit, norm)


def grouped(
    numbers: Iterable[ParameterNumbers], parameters: Mapping[str, nn.Parameter]
) -> list[tuple[ParameterNumbers, list[nn.Parameter]]]:
    """Parameters by their numbers: those that share them all are one group, under the first one's."""
    groups: dict[tuple[float, ...], tuple[ParameterNumbers, list[nn.Parameter]]] = {}
    for n in numbers:
        key = tuple(getattr(n, name) for name in GROUP_NUMBERS)
        groups.setdefault(key, (n, []))[1].append(parameters[n.name])
    return list(groups.values())


def isolated() -> dict[str, Any]:
    """Options of `torch.compile` by which each bank counts its own recompilations.

    A torch without `isolate_recompiles`, which 2.13 has, counts those of all banks of the
    process together: there its limit is raised, and no option given.
    """
    if "isolate_recompiles" in inspect.signature(torch.compile).parameters:
        return {"isolate_recompiles": True}
    from torch._dynamo import config

    config.recompile_limit = max(config.recompile_limit, SHARED_RECOMPILE_LIMIT)
    return {}


def fail_past_recompile_limit() -> None:
    """Have a model that is compiled again too often raise: torch would quietly run it uncompiled."""
    from torch._dynamo import config  # 2.9's `torch.compiler.config` lacks the name

    config.fail_on_recompile_limit_hit = True


def set_rates(optimizer: torch.optim.Optimizer, rates: Iterable[GroupNumbers], share: float) -> None:
    """Every group's learning rate: its peak times the schedule's `share`."""
    for live, group in zip(optimizer.param_groups, rates, strict=True):
        live["lr"] = group.learning_rate * share


def moments_of(optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """The optimizer's state by `MOMENTS` + its own key + parameter; nothing of those that have no gradient."""
    return {
        f"{MOMENTS}{key}.{name}": value
        for name, parameter in parameters.items()
        for key, value in optimizer.state[parameter].items()
    }


def restore_moments(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter], moments: Mapping[str, Tensor]
) -> None:
    """Give a fresh optimizer what `moments_of` took from another.

    Raises:
        ValueError: of a parameter that is not there, or of another shape.
    """
    for name, value in moments.items():
        key, _, parameter_name = name.removeprefix(MOMENTS).partition(".")
        parameter = parameters.get(parameter_name)
        if parameter is None or value.shape not in (parameter.shape, torch.Size()):
            raise ValueError(f"{name} of shape {tuple(value.shape)} belongs to no parameter of this model")
        # The count of steps stays on the CPU, as torch itself keeps it.
        optimizer.state[parameter][key] = value.to(parameter.device if value.dim() else "cpu", copy=True)


class BankAdamW:
    """Decoupled AdamW (arXiv 1711.05101) for K trials of P parameters in S tensors each.

    Equal to `torch.optim.AdamW` with one group per tensor, after `clip_grad_norm_`. On a CPU torch's own fused kernel
    updates row by row, in one pass over the memory; elsewhere all rows are updated at once, by as few launches whatever
    K, and without a word from the host, so that a step can be recorded.
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
        """`by_row` None: on a CPU. `compiled`: one kernel for the update of all rows, where that is how it is done."""
        parameters = list(model.named_parameters())
        num_params = sum(p[0].numel() for _, p in parameters)
        make = partial(torch.zeros, dtype=dtype, device=device)
        self.weights_KP, self.gradients_KP, self.first_KP, self.second_KP = (
            make(num_trials, num_params) for _ in range(4)
        )
        # A trial's own numbers in float64: 1 - beta2 ** updates in float32 would keep few of its digits.
        self.beta1_K1, self.beta2_K1, self.updates_K1 = (make(num_trials, 1, dtype=torch.float64) for _ in range(3))
        self.clip_K1 = torch.full_like(self.beta1_K1, torch.inf)
        self.peak_lr_KS, self.decay_KS = (
            torch.zeros(num_trials, len(parameters), dtype=torch.float64) for _ in range(2)
        )
        self.eps_KS = torch.ones_like(self.peak_lr_KS)
        self._by_row = self.weights_KP.device.type == "cpu" if by_row is None else by_row
        # Every weight's own rates, where all rows are updated at once: learning rate, decay, eps.
        empty = () if self._by_row else (0.0, 0.0, 1.0)
        self._rates_KP = [torch.full_like(self.weights_KP, rate) for rate in empty]
        self._update: Callable[..., None] = _update
        if compiled:
            self._update = torch.compile(_update, fullgraph=True, **isolated())
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
        hparams: Hparams,
    ) -> None:
        """Give a trial its weights and rates, by parameter name, with fresh moments; betas are alike for all."""
        self.clear(trial)
        named = {parameter.name: parameter for parameter in numbers}
        for index, (name, (start, stop)) in enumerate(self.spans.items()):
            parameter = named[name]
            self.weights_KP[trial, start:stop] = weights[name].flatten().to(self.weights_KP)
            rates = (parameter.learning_rate, parameter.weight_decay, parameter.eps)
            for rate_KS, rate in zip((self.peak_lr_KS, self.decay_KS, self.eps_KS), rates, strict=True):
                rate_KS[trial, index] = rate
            for rate_KP, rate in zip(self._rates_KP, rates, strict=False):
                rate_KP[trial, start:stop] = rate
        self.beta1_K1[trial], self.beta2_K1[trial] = numbers[0].beta1, numbers[0].beta2
        self.clip_K1[trial] = torch.inf if hparams.clip_norm is None else hparams.clip_norm

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
            self.weights_KP, self.first_KP, self.second_KP, self.peak_lr_KS, self.decay_KS, *self._rates_KP[:2],
            self.beta1_K1, self.beta2_K1, self.updates_K1,
        ):  # fmt: skip
            tensor[trial] = 0
        for eps in (self.eps_KS, *self._rates_KP[2:]):
            eps[trial] = 1
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
        """One update of the active trials, clipped by their gradient norms; an inactive row does not move.

        Args:
            lr_multiplier_K1: the schedule's share of the peak rates.
            active_K1: bool; which trials train, and have a finite gradient.
            grad_norm_K1: of the gradients that were gathered.
        """
        # torch.nn.utils.clip_grad_norm_'s own form, its 1e-6 included.
        shrink_K1 = (self.clip_K1 / (grad_norm_K1 + 1e-6)).clamp(max=1.0)
        self.updates_K1 += active_K1
        if self._by_row:
            rows = zip(*(t_K1.flatten().tolist() for t_K1 in (active_K1, lr_multiplier_K1, shrink_K1)), strict=True)
            for trial, (active, lr_multiplier, shrink) in enumerate(rows):
                if active:
                    self._update_row(trial, lr_multiplier, shrink)
            return
        self._update(
            (self.weights_KP, self.gradients_KP, self.first_KP, self.second_KP, *self._rates_KP),
            (self.beta1_K1, self.beta2_K1, self.updates_K1, lr_multiplier_K1, shrink_K1),
            active_K1,
        )

    def _update_row(self, trial: int, lr_multiplier: float, shrink: float) -> None:
        if shrink < 1.0:  # times one changes nothing
            self.gradients_KP[trial] *= shrink
        buffers = (self.weights_KP, self.gradients_KP, self.first_KP, self.second_KP)
        sizes = [stop - start for start, stop in self.spans.values()]
        rows = [torch.split(buffer_KP[trial], sizes) for buffer_KP in buffers]
        alike: dict[tuple[float, ...], list[int]] = {}
        rates_KS = (self.peak_lr_KS, self.decay_KS, self.eps_KS)
        for index, rates in enumerate(zip(*(rate_KS[trial].tolist() for rate_KS in rates_KS), strict=True)):
            alike.setdefault(rates, []).append(index)
        beta1, beta2 = self.beta1_K1[trial].item(), self.beta2_K1[trial].item()
        for (learning_rate, decay, eps), indices in alike.items():
            weights, gradients, first, second = ([row[index] for index in indices] for row in rows)
            torch._fused_adamw_(
                weights, gradients, first, second, [],
                [self.updates_K1[trial]] * len(indices),
                lr=learning_rate * lr_multiplier, beta1=beta1, beta2=beta2, weight_decay=decay, eps=eps,
                amsgrad=False, maximize=False,
            )  # fmt: skip


def _update(buffers_KP: tuple[Tensor, ...], numbers_K1: tuple[Tensor, ...], active_K1: Tensor) -> None:
    """The rule for all rows at once; every operation is by row or by element."""
    weights_KP, gradients_KP, first_KP, second_KP, peak_lr_KP, decay_KP, eps_KP = buffers_KP
    beta1_K1, beta2_K1, updates_K1, lr_multiplier_K1, shrink_K1 = numbers_K1
    dtype = weights_KP.dtype
    correction1_K1 = torch.where(active_K1, 1 - beta1_K1**updates_K1, 1)
    correction2_K1 = torch.where(active_K1, 1 - beta2_K1**updates_K1, 1)
    share_K1 = torch.where(active_K1, lr_multiplier_K1, 0)
    # where, not times: NaN * 0 is NaN, and a diverged row must not write.
    gradients_KP = torch.where(active_K1, gradients_KP * shrink_K1.to(dtype), 0)
    first_KP.lerp_(gradients_KP, (1 - beta1_K1).to(dtype))
    second_KP.mul_(beta2_K1.to(dtype)).addcmul_(gradients_KP, gradients_KP * (1 - beta2_K1).to(dtype))
    weights_KP.mul_(1 - peak_lr_KP * share_K1.to(dtype) * decay_KP)
    denominator_KP = (second_KP / correction2_K1.to(dtype)).sqrt_().add_(eps_KP)
    weights_KP.sub_((peak_lr_KP * (share_K1 / correction1_K1).to(dtype)).mul_(first_KP).div_(denominator_KP))


_Made = tuple[Callable[..., torch.optim.Optimizer], type[torch.optim.Optimizer], tuple[str, ...]]
_OF_TORCH: Mapping[OptimizerName, _Made] = {"adamw": (adamw, torch.optim.AdamW, ("amsgrad", "maximize"))}
"""By name: how one is made, its class, and options of a group that make another optimizer of it."""
BANK_OPTIMIZERS: dict[OptimizerName, Callable[..., BankAdamW]] = {"adamw": BankAdamW}
"""The same for the trials of a bank."""
