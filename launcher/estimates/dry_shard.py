"""A layout tried on the real shape before it is frozen: meta tensors over a fake process group, in one process.

Nothing is computed or sent: every parameter of a stage is split over the tensor axis and sharded over the data axes by
torch's own FSDP2 and DTensor, as `launcher.trainer.assembly` does, and what rank 0 of the first and of the last stage
then holds is counted.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from launcher.estimates.layout import Layout
from launcher.estimates.parallelism import NoParallelismError
from proxies.core.shape import Shape

_COLUMNS = ("wq.weight", "wk.weight", "wv.weight", "w1.weight", "w3.weight", "wq.bias", "wk.bias", "wv.bias", "w1.bias",
            "tok_embeddings.weight", "lm_head.weight")  # fmt: skip
_ROWS = ("wo.weight", "w2.weight")


@dataclass(frozen=True, kw_only=True, slots=True)
class DryShard:
    """What the sharded model holds."""

    num_ranks: int
    num_parameters: int
    """Of the whole model."""
    local_parameters: tuple[int, ...]
    """Of rank 0 of the first stage, and of the last one where there is more than one."""
    seconds: float


def dry_shard(shape: Shape, layout: Layout) -> DryShard:
    """Shard the shape as `layout` says over a fake process group of all its ranks.

    Raises:
        NoParallelismError: torch refuses the mesh or a split.
    """
    began = time.perf_counter()
    last = layout.pipeline - 1
    try:
        with _fake_ranks(layout.num_ranks):
            local = [_stage(shape, layout, index) for index in dict.fromkeys((0, last))]
    except (ValueError, RuntimeError, NotImplementedError) as error:
        raise NoParallelismError([f"torch cannot shard it: {error}"]) from error
    from proxies.core.flops import count_params

    return DryShard(
        num_ranks=layout.num_ranks, num_parameters=count_params(shape).total, local_parameters=tuple(local),
        seconds=time.perf_counter() - began,
    )  # fmt: skip


@contextmanager
def _fake_ranks(num_ranks: int) -> Iterator[None]:
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=num_ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _stage(shape: Shape, layout: Layout, index: int) -> int:
    """Parameters that rank 0 of a stage holds."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    from proxies.model.decoder import Decoder

    sizes = (layout.pipeline, layout.replicate, layout.shard * layout.context, layout.tensor)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("pipeline", "replicate", "shard", "tensor"))
    model = Decoder(dataclasses.replace(shape, num_layers=shape.num_layers // layout.pipeline), device="meta")
    if index > 0:
        del model.tok_embeddings, model.pos_embeddings
    if index < layout.pipeline - 1:
        del model.norm, model.lm_head
    if layout.tensor > 1:
        for path, parameter in list(model.named_parameters(remove_duplicate=False)):
            place = Shard(0) if path.endswith(_COLUMNS) else Shard(1) if path.endswith(_ROWS) else Replicate()
            split = distribute_tensor(parameter, mesh["tensor"], [place], src_data_rank=None)
            owner, _, name = path.rpartition(".")
            model.get_submodule(owner).register_parameter(name, torch.nn.Parameter(split))
        if shape.tied:
            model.lm_head.weight = model.tok_embeddings.weight
    data = mesh["replicate", "shard"] if layout.replicate > 1 else mesh["shard"]
    for block in model.layers:
        fully_shard(block, mesh=data)
    fully_shard(model, mesh=data)
    return sum(p.to_local().numel() if isinstance(p, DTensor) else p.numel() for p in model.parameters())
