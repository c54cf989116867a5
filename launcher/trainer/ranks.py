"""The ranks of a run: their devices, how they lie in a mesh, and refusing as one."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from launcher.frozen.frozen import FrozenError, Parallelism, TamperedError
from launcher.trainer.checkpoints import CheckpointError, CorruptError
from proxies.core.programs import FactoryChangedError, FactoryError
from proxies.data.tokens import DataError

_Value = TypeVar("_Value")

REFUSED = 2
CORRUPT = 5


class TrainerError(ValueError):
    """A config that this trainer does not train, here. `problems` lists all of it."""

    def __init__(self, problems: list[str], exit_code: int = REFUSED) -> None:
        self.problems = problems
        self.exit_code = exit_code
        super().__init__("; ".join(problems))


def device() -> torch.device:
    """Where this rank computes."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def device_mesh(parallelism: Parallelism, device_type: str) -> DeviceMesh:
    """Ranks as a mesh: the data axis that shards, and replicas of it (HSDP) where there are some."""
    if parallelism.data_parallel_replicate == 1:
        return init_device_mesh(device_type, (parallelism.data_parallel_shard,), mesh_dim_names=("shard",))
    size = (parallelism.data_parallel_replicate, parallelism.data_parallel_shard)
    return init_device_mesh(device_type, size, mesh_dim_names=("replicate", "shard"))


def together(work: Callable[[], _Value], group: dist.ProcessGroup | None = None) -> _Value:
    """Do `work` on every rank; collective. A `group` of gloo may do so in a thread beside the training.

    Raises:
        TrainerError: one rank refused, so all do: none waits for ever for another.
    """
    value, problem, code = None, "another rank refused: see its log", 0
    try:
        value = work()
    except (TamperedError, CorruptError) as error:
        problem, code = str(error), CORRUPT
    except (TrainerError, FrozenError, DataError, CheckpointError, FactoryError, FactoryChangedError) as error:
        problem, code = str(error), REFUSED
    worst = torch.tensor(code, device=device() if group is None else "cpu")
    dist.all_reduce(worst, op=dist.ReduceOp.MAX, group=group)
    if worst.item():
        raise TrainerError([problem], int(worst.item()))
    return cast(_Value, value)
