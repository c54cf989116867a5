"""Optimizers by name, made from the numbers of a parametrization: of one model, and of the trials
of a bank.

AdamW (arXiv 1711.05101) is torch's own for one model, and `bank_adamw`'s for a bank; Muon is
`muon`'s for both.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from proxies.core.hyperparameters import Hparams
from proxies.core.numbers import ParameterNumbers
from proxies.core.optimizers import GROUP_NUMBERS, OPTIMIZERS, GroupNumbers, OptimizerName
from proxies.model.bank_adamw import BankAdamW
from proxies.model.bank_muon import BankMuon
from proxies.model.muon import Muon

MOMENTS = "adamw."
"""What the names of saved moments begin with, whatever the optimizer."""
DIRECTION = "direction"
"""The name of a kept direction beside a parameter's moments."""


def torch_optimizer(
    name: OptimizerName,
    groups: Iterable[tuple[GroupNumbers, Sequence[nn.Parameter]]],
    *,
    fused: bool = False,
) -> torch.optim.Optimizer:
    """An optimizer of torch, with one parameter group per entry, in that order, at the peak rates.

    `fused`: as torch's one kernel, where there is one: the same up to rounding, its count of steps
    is on the device, and it can skip updates (`skips_on`).
    """
    make, _, _, one_kernel = _OF_TORCH[name]
    return make(
        [
            {
                "params": list(parameters),
                "lr": rates.learning_rate,
                "weight_decay": rates.weight_decay,
                "eps": rates.eps,
                "betas": (rates.beta1, rates.beta2),
                **({"momentum": rates.momentum} if rates.by_muon else {}),
            }
            for rates, parameters in groups
        ],
        **(one_kernel if fused else {}),
    )


def skips_on(optimizer: torch.optim.Optimizer, found_inf: Tensor) -> bool:
    """Have an optimizer's steps change nothing while `found_inf`, a float32 scalar beside its
    parameters, is 1.

    Returns:
        Whether it can: torch's fused ones do, without a word from the host (the protocol of
            `torch.amp.GradScaler`).
    """
    able = getattr(optimizer, "_step_supports_amp_scaling", False)
    if able:
        optimizer.found_inf = found_inf  # type: ignore[attr-defined]
    return able


def not_plain(name: OptimizerName, optimizer: torch.optim.Optimizer) -> list[str]:
    """In what a live optimizer is another than the registry's; nothing, if it is the one."""
    _, kind, options, _ = _OF_TORCH[name]
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
        learning_rate=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        beta1=beta1,
        beta2=beta2,
        momentum=group.get("momentum", 0.0),
    )


def keep_directions(optimizer: torch.optim.Optimizer, keep: bool) -> None:
    """Whether the next steps keep what `last_update` needs beside the moments: Muon's orthogonal
    matrices.
    """
    if isinstance(optimizer, Muon):
        optimizer.kept = {} if keep else None


def state_of(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> dict[str, Tensor]:
    """A parameter's moments, with its last direction if that was kept."""
    state: dict[str, Tensor] = dict(optimizer.state.get(parameter, {}))
    kept = optimizer.kept if isinstance(optimizer, Muon) else None
    return {**state, DIRECTION: kept[parameter]} if kept and parameter in kept else state


def last_update(weights: Tensor, group: Mapping[str, Any], state: Mapping[str, Tensor]) -> Tensor:
    """What the last step of the optimizer added to a parameter, out of its moments: no older
    weights are kept.

    The step took w to w (1 - lr decay) - lr u, with u from the moments as they are now, or Muon's
    direction; so of the new weights v it added -lr (u + decay v) / (1 - lr decay).

    Args:
        weights: after the step; of a sharded parameter this rank's part, as in `state`.
        group: torch's, that the parameter is in.
        state: of the parameter, as `state_of` gives it.
    """
    numbers = _numbers_of(group)
    if numbers.by_muon:
        direction = state[DIRECTION].clone()
    else:
        direction = _adamw_direction(numbers, state)
    share = 1 - numbers.decay_share
    update: Tensor = direction.add_(weights, alpha=numbers.weight_decay).mul_(
        -numbers.learning_rate / share
    )
    return update


def _adamw_direction(numbers: GroupNumbers, state: Mapping[str, Tensor]) -> Tensor:
    num_updates = float(state["step"])
    root = (state["exp_avg_sq"] / (1 - numbers.beta2**num_updates)).sqrt_().add_(numbers.eps)
    direction: Tensor = (state["exp_avg"] / (1 - numbers.beta1**num_updates)).div_(root)
    return direction


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
    """Parameters by their numbers: those that share them all are one group, under the first
    one's.
    """
    groups: dict[tuple[float, ...], tuple[ParameterNumbers, list[nn.Parameter]]] = {}
    for n in numbers:
        key = tuple(getattr(n, name) for name in GROUP_NUMBERS)
        groups.setdefault(key, (n, []))[1].append(parameters[n.name])
    return list(groups.values())


def set_rates(
    optimizer: torch.optim.Optimizer, rates: Iterable[GroupNumbers], share: float
) -> None:
    """Every group's learning rate: its peak times the schedule's `share`."""
    for live, group in zip(optimizer.param_groups, rates, strict=True):
        live["lr"] = group.learning_rate * share


def moments_of(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]
) -> dict[str, Tensor]:
    """The optimizer's state by `MOMENTS` + its own key + parameter; nothing of those that have no
    gradient.
    """
    return {
        f"{MOMENTS}{key}.{name}": value
        for name, parameter in parameters.items()
        for key, value in optimizer.state[parameter].items()
    }


def restore_moments(
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, nn.Parameter],
    moments: Mapping[str, Tensor],
) -> None:
    """Give a fresh optimizer what `moments_of` took from another.

    Raises:
        ValueError: of a parameter that is not there, or of another shape.
    """
    for name, value in moments.items():
        key, _, parameter_name = name.removeprefix(MOMENTS).partition(".")
        parameter = parameters.get(parameter_name)
        if parameter is None or value.shape not in (parameter.shape, torch.Size()):
            raise ValueError(
                f"{name} of shape {tuple(value.shape)} belongs to no parameter of this model"
            )
        # The count of steps is where torch itself keeps it: on the CPU, but for the fused form.
        beside = value.dim() > 0 or optimizer.defaults.get("fused")
        optimizer.state[parameter][key] = value.to(parameter.device if beside else "cpu", copy=True)


_Made = tuple[
    Callable[..., torch.optim.Optimizer],
    type[torch.optim.Optimizer],
    tuple[str, ...],
    dict[str, bool],
]
_OF_TORCH: Mapping[OptimizerName, _Made] = {
    "adamw": (
        partial(torch.optim.AdamW, foreach=True),
        torch.optim.AdamW,
        ("amsgrad", "maximize"),
        {"foreach": False, "fused": True},
    ),
    "muon": (Muon, Muon, (), {}),
}
"""By name: how one is made, its class, options of a group that make another optimizer of it, those
of one kernel."""
BANK_OPTIMIZERS: dict[OptimizerName, Callable[..., BankAdamW]] = {
    "adamw": BankAdamW,
    "muon": BankMuon,
}
"""The same for the trials of a bank."""
