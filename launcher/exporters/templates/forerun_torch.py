"""What the programs of every export do with torch: initial values, optimizer groups, and what
`prove.py` answers.
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

from proxies.data.tokens import TokenStore


def initial_value(name: str, size: Sequence[int], init_std: float, seed: int) -> torch.Tensor:
    """Ones for norm gains (deviation 0), else normal(0, init_std) drawn on the CPU from a seed of
    (seed, name).

    `name` is the frozen config's: so a value depends neither on the trainer nor on the number of
    ranks.
    """
    if init_std == 0:
        return torch.ones(*size)
    own_seed = int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:7], "big")
    return torch.randn(*size, generator=torch.Generator().manual_seed(own_seed)) * init_std


@torch.no_grad()
def set_value(parameter: torch.Tensor, value: torch.Tensor) -> None:
    """Copy a whole value into a parameter; of a sharded one every rank keeps its own part."""
    value = value.to(parameter.device)
    if isinstance(parameter, DTensor):
        value = distribute_tensor(
            value, parameter.device_mesh, parameter.placements, src_data_rank=None
        )
    parameter.copy_(value)


def claimed(
    model: torch.nn.Module, groups: list[dict[str, Any]], frozen_name: Callable[[str], str]
) -> dict[str, dict[str, Any]]:
    """Each parameter's frozen group: exactly one, and none without a parameter."""
    names = [name for name, _ in model.named_parameters()]
    claims = {
        name: [g for g in groups if re.fullmatch(g["pattern"], frozen_name(name))] for name in names
    }
    problems = [
        f"{len(found)} groups claim {name}" for name, found in claims.items() if len(found) != 1
    ]
    used = [group for found in claims.values() for group in found]
    problems += [
        f"the group {group['pattern']!r} claims no parameter"
        for group in groups
        if group not in used
    ]
    if problems:
        raise ValueError("; ".join(problems))
    return {name: found[0] for name, found in claims.items()}


def set_initial_values(
    model: torch.nn.Module, frozen: SimpleNamespace, frozen_name: Callable[[str], str]
) -> None:
    """Give each parameter its value of (seed, name)."""
    groups = claimed(model, frozen.groups, frozen_name)
    for name, parameter in model.named_parameters():
        init_std = groups[name]["init_std"]
        set_value(
            parameter, initial_value(frozen_name(name), parameter.shape, init_std, frozen.seed)
        )


def read_rows(frozen: SimpleNamespace, store: TokenStore, first: int, count: int) -> torch.Tensor:
    """So many sequences of the frozen order of the data, each a token longer than the model
    reads.
    """
    seq_len = frozen.shape.seq_len
    return torch.from_numpy(
        store.train_batch(
            seed=frozen.seed, first_sequence=first, num_sequences=count, seq_len=seq_len
        )
    )


def optimizer_arguments(group: dict[str, Any]) -> dict[str, Any]:
    """Return a frozen group's settings by the names of torch's parameter groups."""
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


def muon() -> Any:
    """Return the embedded trainer's Muon, which exports carry where it steps a group. It steps the
    rest by AdamW.
    """
    from proxies.model.muon import Muon

    return Muon


def built_optimizer(
    groups: list[dict[str, Any]], members: Sequence[Sequence[torch.Tensor]]
) -> torch.optim.Optimizer:
    """Return the optimizer of the frozen groups, each with its parameters: torch's AdamW, or
    `muon`.
    """
    made = [
        {"params": list(parameters), **optimizer_arguments(group)}
        for group, parameters in zip(groups, members, strict=True)
    ]
    if uses_muon(groups):
        return muon()(made)  # type: ignore[no-any-return]
    return torch.optim.AdamW(made, foreach=True)


def gradient_norm(parameters: Iterable[torch.Tensor]) -> float:
    """The norm of the whole gradient, of all ranks' parts."""
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)


def stop_before_update(
    loss_nats: float, norm: float, step: int, warmup_steps: int, most_nats: float
) -> None:
    """Stop at a loss or gradient norm that is not finite, and past the warmup at a loss over the
    ceiling.

    `step`: of the update that comes next, counted from 1.
    """
    where = f"at step {step}, before its update"
    if not (math.isfinite(loss_nats) and math.isfinite(norm)):
        raise RuntimeError(f"loss {loss_nats} or gradient norm {norm} not finite {where}")
    if step - 1 > warmup_steps and loss_nats > most_nats:
        raise RuntimeError(f"loss {loss_nats} over {most_nats} nats {where}")


def rates_of(
    optimizer: torch.optim.Optimizer,
    steps: Collection[int],
    num_steps: int,
    advance: Callable[[], None],
) -> list[list[float]]:
    """Each group's learning rate at the updates `steps`, while `advance` moves the trainer's
    scheduler by one.
    """
    wanted = set(steps)
    rates: list[list[float]] = [[] for _ in optimizer.param_groups]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the scheduler steps, the optimizer does not
        for step in range(num_steps):
            if step in wanted:
                for row, group in zip(rates, optimizer.param_groups, strict=True):
                    row.append(group["lr"])
            advance()
    return rates


def held_settings(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], peak: str
) -> dict[str, Any]:
    """Return the optimizer that steps a built optimizer's group, and its settings, as frozen groups
    have them.
    """
    settings = {"learning_rate": group[peak], "weight_decay": group["weight_decay"]}
    if type(optimizer) is torch.optim.AdamW:
        by_muon = False
    elif type(optimizer).__module__ == "proxies.model.muon":
        from proxies.model.muon import is_muon_group

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
    """Print, as the last line, a trainer's view of the run for `forerun verify`, with what a built
    optimizer holds.

    `peak`: the key of its groups' peak rates. `view`: the other fields of
    launcher.exporters.view.TrainerView.
    """
    names = {parameter: name for name, parameter in model.named_parameters()}
    view["parameters"] = {
        names[parameter]: {
            **held_settings(optimizer, group, peak),
            "num_elements": parameter.numel(),
            "rates": row,
        }
        for row, group in enumerate(optimizer.param_groups)
        for parameter in group["params"]
    }
    print(json.dumps(view), flush=True)
