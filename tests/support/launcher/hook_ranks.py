"""Helpers for tests of the trainer's callbacks on two ranks: a reference measurement of every
layer, and ranks with a planted fault.
"""

from __future__ import annotations

import time

import torch
from torch.distributed.tensor import DTensor

from forerun._launcher.main_run.trainer.callbacks import Callback
from forerun._launcher.main_run.trainer.telemetry import group_by_layer
from forerun._launcher.main_run.trainer.training import Trainer

SLOW_SECONDS = 0.08
"""Delay of a slow rank at every step."""


def get_full_tensor(tensor):
    """Return a float64 copy of a tensor, gathered from all ranks if it is sharded."""
    if isinstance(tensor, DTensor):
        tensor = tensor.full_tensor()
    return tensor.detach().double().clone()


class ReferenceTelemetry(Callback):
    """A callback that measures every layer's numbers as a reference for the layer telemetry.

    It computes them from the full weights and from a copy of them before the update.
    """

    def __init__(self):
        self.measured = {}

    def _group_by_layer(self, tensors):
        """Return one vector for each layer, from tensors by the name of their parameter."""
        return {
            layer: torch.cat([tensors[name].flatten() for name in names])
            for layer, names in group_by_layer(self.run).items()
        }

    def before_update(self, info):
        named = dict(self.run.model.named_parameters())
        self.gradients = self._group_by_layer(
            {name: get_full_tensor(p.grad) for name, p in named.items()}
        )
        self.before = self._group_by_layer({name: get_full_tensor(p) for name, p in named.items()})

    def after_update(self, info):
        after = self._group_by_layer(
            {name: get_full_tensor(p) for name, p in self.run.model.named_parameters()}
        )
        self.measured[info.step + 1] = {
            layer: {
                "weight_rms": weights.square().mean().sqrt().item(),
                "param_norm": weights.norm().item(),
                "grad_norm": self.gradients[layer].norm().item(),
                "update_ratio": ((weights - self.before[layer]).norm() / weights.norm()).item(),
            }
            for layer, weights in after.items()
        }
        return {}


class FlippingTrainer(Trainer):
    """A trainer with a fault on rank `faulty`: one wrong bit in the backward pass of step 6.

    The fault strikes when the gradients are computed for the second time, in the replay.
    """

    faulty = 1
    computed = 0
    """Number of times that the gradients of step 6 have been computed."""

    def compute_gradients(self, step):
        self.computed = self.computed + 1 if step == 5 else 0
        if self.rank != self.faulty or self.computed != 2:
            return super().compute_gradients(step)
        handle = self.model.layers[0].register_forward_hook(
            lambda module, inputs, output: flip_gradient_bit(output)
        )
        try:
            return super().compute_gradients(step)
        finally:
            handle.remove()


def flip_gradient_bit(output):
    """Flip one bit of the gradient that flows back through `output`."""

    def flip_bit(gradient):
        wrong = gradient.clone()
        wrong.view(torch.int32).flatten()[17] ^= 1 << 22
        return wrong

    output.register_hook(flip_bit)


def slow_down(trainer):
    """Delay the last block's attention, so that this rank is slower than the other."""
    trainer.model.layers[1].attention.register_forward_pre_hook(lambda *_: time.sleep(SLOW_SECONDS))
