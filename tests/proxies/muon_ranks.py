"""Three ranks step sharded matrices by Muon, some with fewer rows than ranks: torchrun, and a file
for the outcome.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from proxies.model.muon import Muon

SHAPES = [(7, 5), (2, 6), (6, 4), (1, 3), (5, 9)]
NUM_STEPS = 3


def stepped(shard):
    """The matrices after some steps, each as `shard` places it."""
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


if __name__ == "__main__":
    mesh = init_device_mesh("cpu", (3,))
    found = stepped(lambda tensor: distribute_tensor(tensor, mesh, [Shard(0)]))
    if dist.get_rank() == 0:
        torch.save(found, sys.argv[1])
    dist.barrier()
    os._exit(0)
