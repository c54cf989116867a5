"""Implementations of the recipes' optimizers, for one model and for the trials of a bank.

A recipe (`forerun._proxies.core.optimizers`) assigns an optimizer to each kind of parameter. For
one model, AdamW (arXiv 1711.05101) is `torch.optim.AdamW` and Muon is in the module `muon`. For a
bank, that is K trials trained as one batched model, they are in `bank_adamw` and `bank_muon`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from forerun._proxies.core.hyperparameters import Hparams
from forerun._proxies.core.numbers import GroupSettings, ParameterNumbers
from forerun._proxies.core.optimizers import OPTIMIZERS, RECIPES
from forerun._proxies.model.bank_adamw import BankAdamW
from forerun._proxies.model.bank_muon import BankMuon
from forerun._proxies.model.muon import Muon, is_muon_group

MOMENTS = "adamw."
"""Prefix of the names of saved moments, whatever the optimizer: it is part of the file format."""
_BETAS = ("beta1", "beta2")
"""Settings that torch's parameter groups have as the pair `betas`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Implementation:
    """The implementation of a recipe."""

    kind: Callable[..., torch.optim.Optimizer]
    """Class of the optimizer of one model, which is made from torch's parameter groups."""
    bank: Callable[..., BankAdamW]
    """Function from the arguments of `BankAdamW` to the optimizer of a bank."""
    name_of: Callable[[Mapping[str, Any]], str]
    """Function from one of torch's parameter groups to the name of its optimizer (`OPTIMIZERS`)."""
    variants: tuple[str, ...] = ()
    """Options of torch's parameter groups that make a different optimizer."""
    options: Mapping[str, bool] = field(default_factory=dict)
    """Further arguments of `kind`."""
    fused_options: Mapping[str, bool] = field(default_factory=dict)
    """Arguments of `kind` in place of `options`, for torch's implementation in one kernel; empty if
    there is none."""


# ---- Building and reading torch's optimizers ----


def build_torch_optimizer(
    recipe: str,
    groups: Iterable[tuple[GroupSettings, Sequence[nn.Parameter]]],
    *,
    fused: bool = False,
) -> torch.optim.Optimizer:
    """Return the optimizer of one model, at the peak learning rates.

    Args:
        recipe: Name of the recipe.
        groups: Settings and parameters of each parameter group, in the order of the optimizer's.
        fused: Whether to use torch's single kernel, if there is one. It is the same up to rounding,
            counts its steps on the device, and can skip updates (`enable_skipping`).
    """
    implementation = IMPLEMENTATIONS[recipe]
    param_groups = [
        {"params": list(parameters), **_to_torch(group.settings)} for group, parameters in groups
    ]
    options = implementation.fused_options if fused else implementation.options
    return implementation.kind(param_groups, **options)


def _to_torch(settings: Mapping[str, float]) -> dict[str, Any]:
    """Return settings as torch's parameter groups have them."""
    group: dict[str, Any] = {name: settings[name] for name in settings if name not in _BETAS}
    group["lr"] = group.pop("learning_rate")
    if _BETAS[0] in settings:
        group["betas"] = tuple(settings[name] for name in _BETAS)
    return group


def read_settings(recipe: str, group: Mapping[str, Any]) -> GroupSettings:
    """Return the optimizer and the settings of one of torch's parameter groups."""
    settings = {**group, "learning_rate": group["lr"]}
    if "betas" in group:
        settings |= zip(_BETAS, group["betas"], strict=True)
    optimizer = IMPLEMENTATIONS[recipe].name_of(group)
    names = OPTIMIZERS[optimizer].settings
    return GroupSettings(optimizer=optimizer, settings={name: settings[name] for name in names})


def group_parameters(
    numbers: Iterable[ParameterNumbers], parameters: Mapping[str, nn.Parameter]
) -> list[tuple[ParameterNumbers, list[nn.Parameter]]]:
    """Return groups of parameters with the same optimizer and settings.

    Each group comes with the numbers of its first parameter.
    """
    groups: dict[tuple[object, ...], tuple[ParameterNumbers, list[nn.Parameter]]] = {}
    for parameter in numbers:
        key = (parameter.optimizer, *sorted(parameter.settings.items()))
        _, members = groups.setdefault(key, (parameter, []))
        members.append(parameters[parameter.name])
    return list(groups.values())


def set_rates(
    optimizer: torch.optim.Optimizer, rates: Iterable[GroupSettings], share: float
) -> None:
    """Set the learning rate of every group to a share of its peak.

    Args:
        optimizer: The optimizer.
        rates: Settings of each group, whose learning rate is the peak, in the order of the groups.
        share: The schedule's learning rate as a share of the peak.
    """
    for torch_group, group in zip(optimizer.param_groups, rates, strict=True):
        torch_group["lr"] = group.learning_rate * share


def enable_skipping(optimizer: torch.optim.Optimizer, found_inf: Tensor) -> bool:
    """Make an optimizer skip its updates while a tensor is 1, if it supports that.

    torch's fused optimizers support it, without synchronizing with the host (the protocol of
    `torch.amp.GradScaler`).

    Args:
        optimizer: The optimizer.
        found_inf: Scalar in float32, on the device of the parameters.

    Returns:
        Whether the optimizer supports it.
    """
    is_supported = getattr(optimizer, "_step_supports_amp_scaling", False)
    if is_supported:
        optimizer.found_inf = found_inf  # type: ignore[attr-defined]
    return is_supported


def find_variant_problems(recipe: str, optimizer: torch.optim.Optimizer) -> list[str]:
    """Return a problem if an optimizer is of another class or variant than the recipe's."""
    implementation = IMPLEMENTATIONS[recipe]
    variants = [
        name
        for name in sorted(implementation.variants)
        if any(group.get(name) for group in optimizer.param_groups)
    ]
    if type(optimizer) is implementation.kind and not variants:
        return []
    description = " ".join([type(optimizer).__name__, *variants])
    return [f"the optimizer is {description}, frozen as plain {RECIPES[recipe].label}"]


# ---- Clipping ----


APPLIED_TO_GRADIENT = ("clip_norm",)
"""Run-wide settings that the functions below and the optimizers of banks apply to the gradient."""


def clip_gradients(parameters: Iterable[nn.Parameter], hparams: Hparams, norm: Tensor) -> None:
    """Scale the gradients down to a run's maximum norm, if their global norm is above it."""
    clip_to_norm(parameters, hparams.clip_norm, norm)


def clip_to_norm(parameters: Iterable[nn.Parameter], limit: float | None, norm: Tensor) -> None:
    """Scale gradients down to a maximum norm if their global norm is above it.

    Args:
        parameters: Parameters with the gradients.
        limit: The maximum norm; None to never scale.
        norm: The global norm of the gradients.
    """
    if limit is not None:
        torch.nn.utils.clip_grads_with_norm_(parameters, limit, norm)


# ---- Saved moments ----


def get_moments(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]
) -> dict[str, Tensor]:
    """Return the optimizer's state by names of the form `adamw.KEY.PARAMETER`.

    Parameters that never had a gradient have no state.
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
    """Set the state of a new optimizer to the result of `get_moments`.

    Raises:
        ValueError: A moment belongs to an unknown parameter, or has another shape.
    """
    for name, value in moments.items():
        key, _, parameter_name = name.removeprefix(MOMENTS).partition(".")
        parameter = parameters.get(parameter_name)
        if parameter is None or value.shape not in (parameter.shape, torch.Size()):
            raise ValueError(
                f"{name} of shape {tuple(value.shape)} belongs to no parameter of this model"
            )
        # torch keeps the number of steps on the CPU, unless the optimizer is fused
        on_device = value.dim() > 0 or optimizer.defaults.get("fused")
        device = parameter.device if on_device else "cpu"
        optimizer.state[parameter][key] = value.to(device, copy=True)


IMPLEMENTATIONS: dict[str, Implementation] = {
    "adamw": Implementation(
        kind=torch.optim.AdamW,
        bank=BankAdamW,
        name_of=lambda group: "adamw",
        variants=("amsgrad", "maximize"),
        options={"foreach": True},
        fused_options={"fused": True},
    ),
    "muon": Implementation(
        kind=Muon,
        bank=BankMuon,
        name_of=lambda group: "muon" if is_muon_group(group) else "adamw",
    ),
}
"""Implementations by the name of the recipe (`RECIPES`)."""
