"""A ruler for every layer, and ranks with a fault: what `test_care` holds the trainer's own hooks
against.
"""

from __future__ import annotations

import time

import torch
from torch.distributed.tensor import DTensor

from launcher.trainer.callbacks import Callback
from launcher.trainer.telemetry import layer_of
from launcher.trainer.training import Trainer

SLOW_SECONDS = 0.08


def whole(tensor):
    return (
        (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().double().clone()
    )


class Ruler(Callback):
    """Every layer's numbers, measured on the whole weights and on a copy of them from before the
    update.
    """

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
    """One bit of one number of rank `faulty`'s backward pass is wrong, when step 6 is computed for
    the second time.
    """

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


def slowed(trainer):
    """Its last block's attention takes longer than another rank's."""
    trainer.model.layers[1].attention.register_forward_pre_hook(lambda *_: time.sleep(SLOW_SECONDS))
