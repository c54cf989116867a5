"""Functions that the exported programs share: initial values, data, optimizer groups, the abort
policy, and the answer of `prove.py`.
"""

import hashlib
import json
import math
import re
import warnings
from collections.abc import Callable, Collection, Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from forerun._proxies.data.tokens import TokenStore


def initial_value(name: str, size: Sequence[int], init_std: float, seed: int) -> torch.Tensor:
    """Draw the initial value of a parameter on the CPU.

    The values are normal with standard deviation `init_std`. If that is 0, as for the gains of
    norms, they are ones. The seed of the draw is a hash of `seed` and the frozen config's name of
    the parameter. So a value depends neither on the trainer nor on the number of ranks.
    """
    if init_std == 0:
        return torch.ones(*size)
    # Seven bytes fit into torch's seeds, which are signed 64-bit numbers.
    own_seed = int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:7], "big")
    return torch.randn(*size, generator=torch.Generator().manual_seed(own_seed)) * init_std


@torch.no_grad()
def set_value(parameter: torch.Tensor, value: torch.Tensor) -> None:
    """Copy a whole value into a parameter; if it is sharded, each rank copies its own shard."""
    value = value.to(parameter.device)
    if isinstance(parameter, DTensor):
        value = distribute_tensor(
            value, parameter.device_mesh, parameter.placements, src_data_rank=None
        )
    parameter.copy_(value)


def assign_groups(
    model: torch.nn.Module, groups: list[dict[str, Any]], frozen_name: Callable[[str], str]
) -> dict[str, dict[str, Any]]:
    """Return the frozen group of each parameter by the trainer's name of the parameter.

    Args:
        model: The model that the trainer built.
        groups: Frozen groups.
        frozen_name: Function that translates a trainer's name to that of the frozen config.

    Raises:
        ValueError: A parameter has no group or several, or a group has no parameter.
    """
    names = [name for name, _ in model.named_parameters()]
    claims = {
        name: [g for g in groups if re.fullmatch(g["pattern"], frozen_name(name))] for name in names
    }
    problems = [
        f"{len(claiming)} groups claim {name}"
        for name, claiming in claims.items()
        if len(claiming) != 1
    ]
    used = [group for claiming in claims.values() for group in claiming]
    problems += [
        f"the group {group['pattern']!r} claims no parameter"
        for group in groups
        if group not in used
    ]
    if problems:
        raise ValueError("; ".join(problems))
    return {name: claiming[0] for name, claiming in claims.items()}


def set_initial_values(
    model: torch.nn.Module, frozen: SimpleNamespace, frozen_name: Callable[[str], str]
) -> None:
    """Set each parameter to its initial value."""
    groups = assign_groups(model, frozen.groups, frozen_name)
    for name, parameter in model.named_parameters():
        init_std = groups[name]["init_std"]
        set_value(
            parameter, initial_value(frozen_name(name), parameter.shape, init_std, frozen.seed)
        )


def read_rows(frozen: SimpleNamespace, store: TokenStore, first: int, count: int) -> torch.Tensor:
    """Return sequences of the frozen data order, each one token longer than the model reads,
    [count, seq_len + 1].
    """
    seq_len = frozen.shape.seq_len
    return torch.from_numpy(
        store.read_train_batch(
            seed=frozen.seed, first_sequence=first, num_sequences=count, seq_len=seq_len
        )
    )


def optimizer_arguments(group: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a frozen group by their names in torch's parameter groups."""
    settings = group["settings"]
    arguments = {"lr": settings["learning_rate"], "weight_decay": settings["weight_decay"]}
    if group["optimizer"] == "muon":
        return {**arguments, "momentum": settings["momentum"]}
    if group["optimizer"] == "adamw":
        return {
            **arguments,
            "eps": settings["eps"],
            "betas": (settings["beta1"], settings["beta2"]),
        }
    raise ValueError(f"optimizer = {group['optimizer']!r}: must be adamw or muon")


def uses_muon(groups: list[dict[str, Any]]) -> bool:
    """Return whether a frozen group is stepped by Muon."""
    return any(group["optimizer"] == "muon" for group in groups)


def import_muon() -> Any:
    """Return the Muon optimizer of forerun's embedded trainer, which steps other groups by AdamW.

    An export contains this optimizer only if it steps a frozen group.
    """
    from forerun._proxies.model.muon import Muon

    return Muon


def build_optimizer(
    groups: list[dict[str, Any]], members: Sequence[Sequence[torch.Tensor]]
) -> torch.optim.Optimizer:
    """Build the optimizer of the frozen groups: torch's AdamW or the embedded trainer's Muon.

    Args:
        groups: Frozen groups.
        members: Parameters of each group.
    """
    torch_groups = [
        {"params": list(parameters), **optimizer_arguments(group)}
        for group, parameters in zip(groups, members, strict=True)
    ]
    if uses_muon(groups):
        return import_muon()(torch_groups)  # type: ignore[no-any-return]
    return torch.optim.AdamW(torch_groups, foreach=True)


def gradient_norm(parameters: Iterable[torch.Tensor]) -> float:
    """Return the norm of the whole gradient, which the ranks compute together if it is sharded."""
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)


def stop_before_update(
    loss_nats: float, norm: float, step: int, warmup_steps: int, max_nats: float
) -> None:
    """Stop the run before an update, by the frozen abort policy.

    Args:
        loss_nats: Training loss of the step.
        norm: Gradient norm of the step.
        step: Number of the next update, counted from 1.
        warmup_steps: Steps of the warmup.
        max_nats: Limit of the loss after the warmup.

    Raises:
        RuntimeError: Loss or gradient norm is not finite, or the loss is above its limit.
    """
    where = f"at step {step}, before its update"
    if not (math.isfinite(loss_nats) and math.isfinite(norm)):
        raise RuntimeError(f"loss {loss_nats} or gradient norm {norm} not finite {where}")
    if step - 1 > warmup_steps and loss_nats > max_nats:
        raise RuntimeError(f"loss {loss_nats} over {max_nats} nats {where}")


def read_rates(
    optimizer: torch.optim.Optimizer,
    steps: Collection[int],
    num_steps: int,
    advance: Callable[[], None],
) -> list[list[float]]:
    """Return the learning rates of each optimizer group at the given updates.

    Args:
        optimizer: The optimizer, whose groups the scheduler changes.
        steps: Updates, counted from 0.
        num_steps: Number of updates of the run.
        advance: Function that moves the trainer's scheduler forward by one update.
    """
    wanted = set(steps)
    rates: list[list[float]] = [[] for _ in optimizer.param_groups]
    with warnings.catch_warnings():
        # torch warns because the scheduler steps without the optimizer.
        warnings.simplefilter("ignore")
        for step in range(num_steps):
            if step in wanted:
                for row, group in zip(rates, optimizer.param_groups, strict=True):
                    row.append(group["lr"])
            advance()
    return rates


def read_settings(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], peak: str
) -> dict[str, Any]:
    """Return a group's optimizer and settings in the form of a frozen group.

    Another optimizer, or a variant of one, ends the program.

    Args:
        optimizer: The optimizer that the trainer built.
        group: One of its groups.
        peak: Key of the group's peak learning rate.
    """
    settings = {"learning_rate": group[peak], "weight_decay": group["weight_decay"]}
    if type(optimizer) is torch.optim.AdamW:
        by_muon = False
    elif type(optimizer).__module__ == "forerun._proxies.model.muon":
        from forerun._proxies.model.muon import is_muon_group

        by_muon = is_muon_group(group)
    else:
        raise SystemExit(
            f"the optimizer must be AdamW or forerun's Muon, the trainer builds {optimizer}"
        )
    if group.get("amsgrad") or group.get("maximize"):
        raise SystemExit(
            "the optimizer must be plain, without amsgrad and maximize; the trainer builds "
            f"{optimizer}"
        )
    if by_muon:
        return {"optimizer": "muon", "settings": {**settings, "momentum": group["momentum"]}}
    beta1, beta2 = group["betas"]
    return {
        "optimizer": "adamw",
        "settings": {**settings, "eps": group["eps"], "beta1": beta1, "beta2": beta2},
    }


def answer(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    peak: str = "initial_lr",
    **view: object,
) -> None:
    """Print the trainer's view of the run for `forerun verify` as the last line of output.

    Args:
        model: The model that the trainer built.
        optimizer: The optimizer that the trainer built.
        peak: Key of the groups' peak learning rates.
        view: Fields of `forerun._launcher.main_run.exporters.comparison.TrainerView` other than
            `parameters`.
    """
    names = {parameter: name for name, parameter in model.named_parameters()}
    view["parameters"] = {
        names[parameter]: {
            **read_settings(optimizer, group, peak),
            "num_elements": parameter.numel(),
            "rates": row,
        }
        for row, group in enumerate(optimizer.param_groups)
        for parameter in group["params"]
    }
    print(json.dumps(view), flush=True)
