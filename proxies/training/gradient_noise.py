"""A look at a run's gradient noise: at a few steps, gradients of several passes at the weights as
they are.

What the run computes stays as it is to the bit: a look reads weights, and writes none, no `.grad`
and no random state. It takes at most a sixtieth of the run's passes, and the run's own next
sequences, which it has not trained on.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.func import functional_call

from proxies.core.noise_scale import NoiseLook, look_passes
from proxies.core.spec import RunSpec
from proxies.data.tokens import TokenStore
from proxies.model.decoder import Decoder, Multipliers
from proxies.parametrization.parametrization import forward_numbers
from proxies.training.outcome import batch_of

MOST_KEPT = 2**20
"""Of a gradient's entries, evenly spaced: all of a small model's. Gradients of several passes are
held at once, and a sum of squares over so many of a larger one's entries is its share of the whole
within a few thousandths.
"""


@dataclass(slots=True)
class NoiseLooks:
    """What an engine measures of the runs in it, until somebody takes it."""

    taken: list[tuple[str, NoiseLook]] = field(default_factory=list)
    """By run id."""

    def due(self, spec: RunSpec, step: int, num_microbatches: int) -> int:
        """Passes of a look before update `step` of a run; 0: it is no step for one."""
        passes_per_step = -(-spec.batch_sequences // spec.pass_sequences(num_microbatches))
        return look_passes(spec.schedule.num_steps, passes_per_step).get(step, 0)

    def look(
        self,
        spec: RunSpec,
        step: int,
        module: Decoder,
        weights: Mapping[str, Tensor],
        store: TokenStore,
        num_microbatches: int,
    ) -> None:
        """Measure before update `step` of a run, if it is a step for it.

        Args:
            spec: the run.
            step: updates made.
            module: computes its loss, with whatever weights.
            weights: the run's, by name, without a trial axis.
            store: the corpus.
            num_microbatches: passes that its batches are split into, at least.
        """
        if num_passes := self.due(spec, step, num_microbatches):
            ids_NT = batch_of(store, spec, step, num_passes * spec.pass_sequences(num_microbatches))
            found = gram(spec, module, weights, ids_NT, num_passes)
            if all(value < float("inf") for row in found for value in row):
                look = NoiseLook(
                    step=step, num_sequences=spec.pass_sequences(num_microbatches), gram=found
                )
                self.taken.append((spec.id, look))


def _uncompiled(spec: RunSpec) -> AbstractContextManager[object]:
    """A graph for a look would cost more than it saves, and could take over the run's."""
    return torch.compiler.set_stance("force_eager") if spec.numerics.compiled else nullcontext()


def gram(
    spec: RunSpec, module: Decoder, weights: Mapping[str, Tensor], ids_NT: Tensor, num_passes: int
) -> tuple[tuple[float, ...], ...]:
    """Products of the mean gradients of as many equal parts of the sequences, each with each."""
    leaves = {name: weight.detach().requires_grad_() for name, weight in weights.items()}
    multipliers = Multipliers.of_run(forward_numbers(spec), spec.hparams.run_wide)
    stride = -(-sum(leaf.numel() for leaf in leaves.values()) // MOST_KEPT)
    device = next(iter(leaves.values())).device
    kept = []
    for part_BT in ids_NT.to(device).chunk(num_passes):
        with _uncompiled(spec):
            loss = functional_call(module, leaves, (part_BT[:, :-1], multipliers, part_BT[:, 1:]))
        gradients = torch.autograd.grad(loss, [*leaves.values()])
        kept.append(torch.cat([gradient.flatten()[::stride] for gradient in gradients]))
    kept_MP = torch.stack(kept).double()
    return tuple(map(tuple, (kept_MP @ kept_MP.T).tolist()))
