"""The recipes' optimizers, built from the numbers of a parametrization: of one model, and of the
trials of a bank.

AdamW (arXiv 1711.05101) is torch's own for one model, and `bank_adamw`'s for a bank; Muon is
`muon`'s for both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from proxies.core.hyperparameters import Hparams
from proxies.core.numbers import GroupSettings, ParameterNumbers
from proxies.core.optimizers import OPTIMIZERS, RECIPES
from proxies.model.bank_adamw import BankAdamW
from proxies.model.bank_muon import BankMuon
from proxies.model.muon import Muon, is_muon_group

MOMENTS = "adamw."
"""What the names of saved moments begin with, whatever the optimizer."""
DIRECTION = "direction"
"""The name of a kept direction beside a parameter's moments."""
_TORCH_NAMES = {"learning_rate": "lr"}
"""Names of settings in torch's parameter groups, where torch has another name."""
_BETAS = ("beta1", "beta2")
"""Settings that torch's parameter groups hold as the pair `betas`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Implementation:
    """The optimizers that step the parameters of a recipe: one model's, and those of a bank's
    trials.
    """

    build: Callable[..., torch.optim.Optimizer]
    """Builds the optimizer of one model from torch's parameter groups."""
    kind: type[torch.optim.Optimizer]
    """Class that it builds."""
    bank: Callable[..., BankAdamW]
    """Builds the optimizer of a bank."""
    name_of: Callable[[Mapping[str, Any]], str]
    """Returns the name of the optimizer (`OPTIMIZERS`) that steps one of torch's parameter
    groups."""
    variants: tuple[str, ...] = ()
    """Options of a group that make another optimizer of it."""
    fused: Mapping[str, bool] = field(default_factory=dict)
    """Arguments of `build` by which it is one kernel, if there is one."""


def torch_optimizer(
    recipe: str,
    groups: Iterable[tuple[GroupSettings, Sequence[nn.Parameter]]],
    *,
    fused: bool = False,
) -> torch.optim.Optimizer:
    """Return an optimizer of torch, with one parameter group per entry, in that order, at the peak
    rates.

    `fused`: as torch's one kernel, where there is one: the same up to rounding, its count of steps
    is on the device, and it can skip updates (`skips_on`).
    """
    chosen = IMPLEMENTATIONS[recipe]
    made = [
        {"params": list(parameters), **_to_torch(group.settings)} for group, parameters in groups
    ]
    return chosen.build(made, **(chosen.fused if fused else {}))


def _to_torch(settings: Mapping[str, float]) -> dict[str, Any]:
    """Return settings by the names of torch's parameter groups."""
    found: dict[str, Any] = {
        _TORCH_NAMES.get(name, name): value
        for name, value in settings.items()
        if name not in _BETAS
    }
    if _BETAS[0] in settings:
        found["betas"] = tuple(settings[name] for name in _BETAS)
    return found


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


def not_plain(recipe: str, optimizer: torch.optim.Optimizer) -> list[str]:
    """Return how a live optimizer differs from the recipe's own class and variant; empty if it does
    not.
    """
    chosen = IMPLEMENTATIONS[recipe]
    variants = {
        key for key in chosen.variants for group in optimizer.param_groups if group.get(key)
    }
    if type(optimizer) is chosen.kind and not variants:
        return []
    words = " ".join([type(optimizer).__name__, *sorted(variants)])
    return [f"the optimizer is {words}, frozen as plain {RECIPES[recipe].label}"]


def live_settings(recipe: str, group: Mapping[str, Any]) -> GroupSettings:
    """Return what one of torch's parameter groups holds, and which optimizer of the recipe steps
    it.
    """
    name = IMPLEMENTATIONS[recipe].name_of(group)
    return GroupSettings(optimizer=name, settings=_from_torch(group, OPTIMIZERS[name].settings))


def _from_torch(group: Mapping[str, Any], names: Iterable[str]) -> dict[str, float]:
    return {
        name: group["betas"][_BETAS.index(name)]
        if name in _BETAS
        else group[_TORCH_NAMES.get(name, name)]
        for name in names
    }


def keep_directions(optimizer: torch.optim.Optimizer, keep: bool) -> None:
    """Set whether the next steps keep what `last_update` needs beside the moments, as Muon's
    orthogonal matrices.

    An optimizer whose moments do not give its update has the attribute `kept` for it.
    """
    if hasattr(optimizer, "kept"):
        optimizer.kept = {} if keep else None


def state_of(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> dict[str, Tensor]:
    """Return a parameter's moments, with its last direction if that was kept."""
    state: dict[str, Tensor] = dict(optimizer.state.get(parameter, {}))
    kept: dict[Tensor, Tensor] | None = getattr(optimizer, "kept", None)
    return {**state, DIRECTION: kept[parameter]} if kept and parameter in kept else state


def last_update(weights: Tensor, group: Mapping[str, Any], state: Mapping[str, Tensor]) -> Tensor:
    """Return what the last step added to a parameter, out of its moments: no older weights are
    kept.

    The step took w to w (1 - lr decay) - lr u, with the kept direction u, or u from AdamW's moments
    as they are now; so of the new weights v it added -lr (u + decay v) / (1 - lr decay).

    Args:
        weights: after the step; of a sharded parameter this rank's part, as in `state`.
        group: torch's, that the parameter is in.
        state: of the parameter, as `state_of` gives it.
    """
    learning_rate, decay = group["lr"], group["weight_decay"]
    direction = state[DIRECTION].clone() if DIRECTION in state else _adamw_direction(group, state)
    share = 1 - learning_rate * decay
    update: Tensor = direction.add_(weights, alpha=decay).mul_(-learning_rate / share)
    return update


def _adamw_direction(group: Mapping[str, Any], state: Mapping[str, Tensor]) -> Tensor:
    num_updates, (beta1, beta2) = float(state["step"]), group["betas"]
    # Bias correction
    root = (state["exp_avg_sq"] / (1 - beta2**num_updates)).sqrt_().add_(group["eps"])
    direction: Tensor = (state["exp_avg"] / (1 - beta1**num_updates)).div_(root)
    return direction


APPLIED_TO_GRADIENT = ("clip_norm",)
"""Run-wide settings that are applied to the gradient, by the functions below and by the optimizers
of banks."""


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
    """Return parameters by their numbers: those with the same optimizer and settings are one
    group.
    """
    groups: dict[tuple[object, ...], tuple[ParameterNumbers, list[nn.Parameter]]] = {}
    for n in numbers:
        key = (n.optimizer, *sorted(n.settings.items()))
        groups.setdefault(key, (n, []))[1].append(parameters[n.name])
    return list(groups.values())


def set_rates(
    optimizer: torch.optim.Optimizer, rates: Iterable[GroupSettings], share: float
) -> None:
    """Set every group's learning rate: its peak times the schedule's `share`."""
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


IMPLEMENTATIONS: dict[str, Implementation] = {
    "adamw": Implementation(
        build=partial(torch.optim.AdamW, foreach=True),
        kind=torch.optim.AdamW,
        bank=BankAdamW,
        name_of=lambda group: "adamw",
        variants=("amsgrad", "maximize"),
        fused={"foreach": False, "fused": True},
    ),
    "muon": Implementation(
        build=Muon,
        kind=Muon,
        bank=BankMuon,
        name_of=lambda group: "muon" if is_muon_group(group) else "adamw",
    ),
}
"""Implementations by the name of the recipe (`RECIPES`)."""
