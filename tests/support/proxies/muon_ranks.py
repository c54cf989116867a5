"""Two ranks that train sharded matrices with Muon: the test is rank 0, this program is rank 1.

Some matrices have a number of rows that two does not divide, and one has a single row. Usage:
muon_ranks.py RENDEZVOUS_FILE.
"""

import datetime
import os
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from forerun._proxies.model.muon import Muon

SHAPES = [(7, 5), (2, 6), (6, 4), (1, 3), (5, 9)]
NUM_STEPS = 3


def train_steps(shard):
    """Return the matrices after some steps of Muon, each placed by `shard`."""
    generator = torch.Generator().manual_seed(2)
    parameters = [
        torch.nn.Parameter(shard(torch.randn(size, generator=generator))) for size in SHAPES
    ]
    group = {"lr": 0.1, "weight_decay": 0.2, "momentum": 0.9}
    optimizer = Muon([{"params": parameters, **group}])
    for _ in range(NUM_STEPS):
        for parameter, size in zip(parameters, SHAPES, strict=True):
            parameter.grad = shard(torch.randn(size, generator=generator))
        optimizer.step()
    return [p.detach().full_tensor() if isinstance(p, DTensor) else p.detach() for p in parameters]


def train_sharded_steps(rank, rendezvous_file):
    """Train as one of two ranks; return the whole matrices."""
    dist.init_process_group(
        "gloo",
        init_method=f"file://{rendezvous_file}",
        rank=rank,
        world_size=2,
        timeout=datetime.timedelta(seconds=90),
    )
    mesh = init_device_mesh("cpu", (2,))
    matrices = train_steps(lambda tensor: distribute_tensor(tensor, mesh, [Shard(0)]))
    dist.barrier()
    return matrices


if __name__ == "__main__":
    train_sharded_steps(1, sys.argv[1])
    os._exit(0)
