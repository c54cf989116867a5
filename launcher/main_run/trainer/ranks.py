"""The ranks of a run: their devices and mesh, their parts of tensors, and work that one rank can
refuse for all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor

from forerun._launcher.main_run.frozen.frozen import Parallelism
from forerun._proxies.core.errors import ExitCode, InputError

_Value = TypeVar("_Value")


class TrainerError(InputError):
    """A rank refused to go on, so all ranks do."""

    def __init__(self, message: str, exit_code: int = ExitCode.INPUT) -> None:
        self.exit_code = exit_code
        super().__init__(message)


def get_local_device() -> torch.device:
    """Return the device on which this rank computes."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def build_device_mesh(parallelism: Parallelism, device_type: str) -> DeviceMesh:
    """Return the mesh of all ranks.

    Its last axis shards. If there are several replicas (HSDP), they are the first of two axes.
    """
    sizes = {"shard": parallelism.data_parallel_shard}
    if parallelism.data_parallel_replicate > 1:
        sizes = {"replicate": parallelism.data_parallel_replicate, **sizes}
    return init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def get_local_part(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that this rank holds."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def gather_full_value(tensor: Tensor) -> Tensor:
    """Return the full value of a tensor on every rank; collective."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def compute_norm(tensors: Iterable[Tensor | None]) -> Tensor:
    """Return the common norm of some tensors, sharded or not, over all ranks; collective.

    None counts as a tensor of zeros.
    """
    present = [tensor for tensor in tensors if tensor is not None]
    return gather_full_value(torch.nn.utils.get_total_norm(present))


def compute_grad_norm(model: nn.Module) -> Tensor:
    """Return the norm of a model's gradients over all ranks; collective."""
    return compute_norm(parameter.grad for parameter in model.parameters())


@torch.no_grad()
def broadcast_parameter(parameter: Tensor, full_value: Tensor | None, owner: int) -> None:
    """Set a parameter to the value that rank `owner` has; collective.

    Each rank receives the full value and keeps its own part, so each device holds one full
    parameter for a moment. A broadcast goes around a ring. A scatter would need a connection
    between every two ranks, and buffers on the devices for each connection.

    Args:
        parameter: The parameter, sharded or not.
        full_value: Full value of the parameter on rank `owner`, on any device; ignored on other
            ranks.
        owner: Rank that has the value.
    """
    value = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
    if full_value is not None and dist.get_rank() == owner:
        value.copy_(full_value)
    dist.broadcast(value, src=owner)
    if isinstance(parameter, DTensor):
        value = distribute_tensor(
            value, parameter.device_mesh, parameter.placements, src_data_rank=None
        )
    parameter.copy_(value)


def agree(work: Callable[[], _Value], group: dist.ProcessGroup | None = None) -> _Value:
    """Do `work` on every rank, and return this rank's result; collective.

    If one rank refuses, all ranks do, so that none waits forever for another.

    Args:
        work: The work; it may refuse with an `InputError`.
        group: A gloo group, for the thread that saves during training; with it, an OSError counts
            as a refusal too. None for the process group of the training.

    Raises:
        TrainerError: Some rank refused.
        OSError: This rank's machine failed, and `group` is None.
    """
    value, problem, code = None, "another rank refused: see its log", 0
    try:
        value = work()
    except InputError as error:
        problem, code = str(error), int(error.exit_code)
    except OSError as error:
        if group is None:
            raise  # this rank's machine failed; torchrun ends the others
        problem, code = str(error), int(ExitCode.INPUT)
    worst = torch.tensor(code, device=get_local_device() if group is None else "cpu")
    dist.all_reduce(worst, op=dist.ReduceOp.MAX, group=group)
    if worst.item():
        raise TrainerError(problem, int(worst.item()))
    return cast(_Value, value)


def run_on_first_rank(work: Callable[[], _Value], group: dist.ProcessGroup | None = None) -> _Value:
    """Do `work` on rank 0, and return its result on every rank; collective.

    Only rank 0 reads the run's files: another host may still see an older version of a file that
    was just renamed. Arguments and errors are those of `agree`.
    """
    result = [agree(lambda: work() if dist.get_rank() == 0 else None, group)]
    dist.broadcast_object_list(result, src=0, group=group)
    return cast(_Value, result[0])


def gather(value: _Value, group: dist.ProcessGroup | None = None) -> list[_Value]:
    """Return the value of each rank, in the order of the ranks; collective."""
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group)
    return values
