"""What the programs of every export do with torch: initial values, optimizer groups, and what `prove.py` answers."""

import hashlib
import json
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, distribute_tensor


def initial_value(name: str, size: Sequence[int], init_std: float, seed: int) -> torch.Tensor:
    """Ones for norm gains (deviation 0), else normal(0, init_std) drawn on the CPU from a seed of (seed, name).

    `name` is the frozen config's: so a value depends neither on the trainer nor on the number of ranks.
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
        value = distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)
    parameter.copy_(value)


def optimizer_arguments(group: dict[str, Any]) -> dict[str, Any]:
    """A frozen group's arguments of torch.optim.AdamW."""
    return {
        "lr": group["learning_rate"],
        "weight_decay": group["weight_decay"],
        "eps": group["eps"],
        "betas": (group["beta1"], group["beta2"]),
    }


def gradient_norm(parameters: Iterable[torch.Tensor]) -> float:
    """The norm of the whole gradient, of all ranks' parts."""
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)


def trained_with(model: torch.nn.Module, optimizer: torch.optim.Optimizer, peak: str = "initial_lr") -> dict[str, Any]:
    """What a built optimizer holds for each parameter, by the trainer's name; `peak`: the key of the peak rate."""
    if type(optimizer) is not torch.optim.AdamW or any(g["amsgrad"] or g["maximize"] for g in optimizer.param_groups):
        raise SystemExit(f"plain torch.optim.AdamW is needed, the trainer builds {optimizer}")
    names = {parameter: name for name, parameter in model.named_parameters()}
    return {
        names[parameter]: {
            "num_elements": parameter.numel(),
            "learning_rate": group[peak],
            "weight_decay": group["weight_decay"],
            "eps": group["eps"],
            "beta1": group["betas"][0],
            "beta2": group["betas"][1],
            "rates": row,
        }
        for row, group in enumerate(optimizer.param_groups)
        for parameter in group["params"]
    }


def rates_of(
    optimizer: torch.optim.Optimizer, steps: Collection[int], num_steps: int, advance: Callable[[], None]
) -> list[list[float]]:
    """Each group's learning rate at the updates `steps`, while `advance` moves the trainer's scheduler by one."""
    wanted = set(steps)
    rates: list[list[float]] = [[] for _ in optimizer.param_groups]
    for step in range(num_steps):
        if step in wanted:
            for row, group in zip(rates, optimizer.param_groups, strict=True):
                row.append(group["lr"])
        advance()
    return rates


def answer(**view: object) -> None:
    """Print a trainer's view of the run, as the last line, for `forerun verify`."""
    print(json.dumps(view), flush=True)
