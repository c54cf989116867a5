"""Runs of two ranks, one after the other under one torchrun; `test_care` looks at what they leave.

torchrun --nproc-per-node 2 care_ranks.py CORPUS OUT
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from care_case import Poisoned, care_decision
from main_run import tiny_decision
from torch.distributed.tensor import DTensor

from launcher.hooks import Hook
from launcher.launch_file import write_launch
from launcher.policy import Monitoring
from launcher.telemetry import layer_of
from launcher.trainer import Options, run
from launcher.training import Trainer

SLOW_SECONDS = 0.03


def whole(tensor):
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().double().clone()


class Ruler(Hook):
    """Every layer's numbers, measured on the whole weights and on a copy of them from before the update."""

    def __init__(self):
        self.measured = {}

    def begin(self, run, step, carried):
        self.run = run

    def _layers(self, tensors):
        layers = {}
        for name, tensor in tensors.items():
            layers.setdefault(layer_of(name), []).append(tensor.flatten())
        return {layer: torch.cat(parts) for layer, parts in layers.items()}

    def before_update(self, seen):
        named = dict(self.run.model.named_parameters())
        self.gradients = self._layers({name: whole(p.grad) for name, p in named.items()})
        self.before = self._layers({name: whole(p) for name, p in named.items()})

    def after_update(self, seen):
        after = self._layers({name: whole(p) for name, p in self.run.model.named_parameters()})
        self.measured[seen.step + 1] = {
            layer: {
                "weight_rms": weights.square().mean().sqrt().item(),
                "param_norm": weights.norm().item(),
                "grad_norm": self.gradients[layer].norm().item(),
                "update_ratio": ((weights - self.before[layer]).norm() / weights.norm()).item(),
            }
            for layer, weights in after.items()
        }
        return {}


class Flipping(Trainer):
    """One bit of one number of rank `faulty`'s backward pass is wrong, when step 6 is computed for the second time."""

    faulty = 1
    computed = 0

    def gradients(self, step):
        self.computed = self.computed + 1 if step == 5 else 0
        if self.rank != self.faulty or self.computed != 2:
            return super().gradients(step)
        handle = self.model.layers[0].register_forward_hook(lambda *given: plant(given[-1]))
        try:
            return super().gradients(step)
        finally:
            handle.remove()


def plant(output):
    def flipped(gradient):
        wrong = gradient.clone()
        wrong.view(torch.int32).flatten()[17] ^= 1 << 22
        return wrong

    output.register_hook(flipped)


def one_is_slow(decision, store, run_dir, interrupted):
    trainer = Trainer(decision, store, run_dir, interrupted, (ruler := Ruler(),))
    if trainer.rank == 1:
        trainer.model.layers[1].attention.register_forward_pre_hook(lambda *_: time.sleep(SLOW_SECONDS))
    trainer.ruler = ruler
    built.append(trainer)
    return trainer


def poisoned(decision, store, run_dir, interrupted):
    return Trainer(decision, Poisoned(store), run_dir, interrupted)


built = []


def main():
    corpus, out = map(Path, sys.argv[1:])
    watched = Monitoring(layers_every_steps=5, replay_every_steps=2, validate_every_steps=6)
    tiny = dataclasses.replace(tiny_decision(corpus, num_ranks=2), monitoring=watched)
    runs = {
        "watched": (tiny, one_is_slow),
        "flipped": (tiny, Flipping),
        "back": (care_decision(corpus, num_ranks=2), poisoned),
    }
    for name, (decision, build) in runs.items():
        config = out / name / "frozen" / decision.digest / "launch.json"
        if dist.get_rank() == 0:
            write_launch(out / name / "frozen", decision)
        dist.barrier()
        run(Options(config=config, data=corpus, out=out / name / "run"), build=build)
    if dist.get_rank() == 0:
        (out / "ruler.json").write_text(json.dumps(built[0].ruler.measured))
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
