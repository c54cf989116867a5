"""The ranks of a run: their devices, how they lie in a mesh, what each holds of a tensor, and
refusing as one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor

from launcher.frozen.frozen import FrozenError, Parallelism, TamperedError
from launcher.trainer.checkpoints import CheckpointError, CorruptError
from proxies.core.errors import InputError
from proxies.core.programs import FactoryChangedError, FactoryError
from proxies.data.tokens import DataError

_Value = TypeVar("_Value")

REFUSED = 2
CORRUPT = 5


class TrainerError(InputError):
    """A config that this trainer does not train, here. `problems` lists all of it."""

    def __init__(self, problems: list[str], exit_code: int = REFUSED) -> None:
        self.problems = problems
        self.exit_code = exit_code
        super().__init__("; ".join(problems))


def device() -> torch.device:
    """Where this rank computes."""
    return (
        torch.device("cuda", torch.cuda.current_device())
        if torch.cuda.is_available()
        else torch.device("cpu")
    )


def device_mesh(parallelism: Parallelism, device_type: str) -> DeviceMesh:
    """Ranks as a mesh: the data axis that shards, and replicas of it (HSDP) where there are
    some.
    """
    if parallelism.data_parallel_replicate == 1:
        return init_device_mesh(
            device_type, (parallelism.data_parallel_shard,), mesh_dim_names=("shard",)
        )
    size = (parallelism.data_parallel_replicate, parallelism.data_parallel_shard)
    return init_device_mesh(device_type, size, mesh_dim_names=("replicate", "shard"))


def own_part(tensor: Tensor) -> tuple[Tensor, float]:
    """What this rank holds of a tensor, and what share of it is this rank's to count: others may
    hold it too.
    """
    if not isinstance(tensor, DTensor):
        return tensor, 1 / dist.get_world_size()
    mesh, num_parts = tensor.device_mesh, 1
    for axis, placement in enumerate(tensor.placements):
        if not placement.is_replicate():
            num_parts *= mesh.size(axis)
    return tensor.to_local(), num_parts / dist.get_world_size()


@torch.no_grad()
def hand_out(parameter: Tensor, whole: Tensor | None, owner: int) -> None:
    """Give a parameter the value that rank `owner` has the whole of, each rank its own part of it;
    collective.

    A broadcast, of which each rank keeps its part: it goes round a ring, where a scatter would need
    a connection, and buffers on the device, between every two ranks. So each device holds one whole
    parameter for a moment.
    """
    there = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
    if whole is not None:
        there.copy_(whole)
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.broadcast(there, src=owner)
    if isinstance(parameter, DTensor):
        there = distribute_tensor(
            there, parameter.device_mesh, parameter.placements, src_data_rank=None
        )
    parameter.copy_(there)


def together(work: Callable[[], _Value], group: dist.ProcessGroup | None = None) -> _Value:
    """Do `work` on every rank; collective. A `group` of gloo may do so in a thread beside the
    training.

    Raises:
        TrainerError: one rank refused, so all do: none waits for ever for another.
    """
    value, problem, code = None, "another rank refused: see its log", 0
    try:
        value = work()
    except (TamperedError, CorruptError) as error:
        problem, code = str(error), CORRUPT
    except (
        TrainerError,
        FrozenError,
        DataError,
        CheckpointError,
        FactoryError,
        FactoryChangedError,
    ) as error:
        problem, code = str(error), REFUSED
    worst = torch.tensor(code, device=device() if group is None else "cpu")
    dist.all_reduce(worst, op=dist.ReduceOp.MAX, group=group)
    if worst.item():
        raise TrainerError([problem], int(worst.item()))
    return cast(_Value, value)
