"""Measure the gradient noise of a run while it trains.

At a few steps, the gradients of several passes are computed at the current weights. The Gram matrix
of these gradients gives the gradient noise scale (arXiv 1812.06162), from which
`forerun._proxies.core.noise_scale` estimates the critical batch size.

A measurement does not change the run: it reads the weights and writes neither weights, `.grad`, nor
random state, so the losses stay identical to the bit. All measurements together cost at most one
pass for each `RUN_PASSES_PER_LOOK_PASS` passes of the run, and they use sequences that the run has
not trained on yet.

Shape suffixes: P passes, N sequences of all passes, B sequences of one pass, T tokens of a
sequence, M kept entries of a gradient.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.func import functional_call

from forerun._proxies.core.noise_scale import NoiseLook, plan_looks
from forerun._proxies.core.spec import RunSpec
from forerun._proxies.data.tokens import TokenStore
from forerun._proxies.model.decoder import Decoder, Multipliers
from forerun._proxies.parametrization.parametrization import compute_forward_numbers
from forerun._proxies.training.run_progress import read_batch

TARGET_GRADIENT_ENTRIES = 2**20
"""Approximate number of entries kept of each gradient, evenly spaced.

The gradients of all passes are in memory at once. Of a small model, every entry is kept. Of a large
model, this many entries give the ratios of the inner products to a few thousandths.
"""


@dataclass(slots=True)
class GradientNoiseProbe:
    """Collects the gradient noise measurements of the runs that an engine trains."""

    measurements: list[tuple[str, NoiseLook]] = field(default_factory=list)
    """Run ids and measurements made since the caller last took them, oldest first."""

    def get_num_passes(self, spec: RunSpec, step: int, num_microbatches: int) -> int:
        """Return the number of passes to measure before update `step`, 0 if none are due.

        None are due for a user's model, which may change its state in a forward pass.
        """
        if spec.factory is not None:
            return 0
        passes_per_step = math.ceil(
            spec.batch_sequences / spec.compute_pass_sequences(num_microbatches)
        )
        return plan_looks(spec.schedule.num_steps, passes_per_step).get(step, 0)

    def measure_if_due(
        self,
        spec: RunSpec,
        step: int,
        module: Decoder,
        weights: Mapping[str, Tensor],
        store: TokenStore,
        num_microbatches: int,
    ) -> None:
        """Measure the gradient noise before update `step`, if a measurement is due.

        Args:
            spec: The run that is training.
            step: Number of updates made so far.
            module: Computes the loss; its own weights are not used.
            weights: Weights of this run only, not stacked with other trials, by parameter name.
            store: The training corpus.
            num_microbatches: Minimum number of passes that a batch is split into.
        """
        num_passes = self.get_num_passes(spec, step, num_microbatches)
        if num_passes == 0:
            return

        num_sequences = spec.compute_pass_sequences(num_microbatches)
        ids_NT = read_batch(store, spec, step, num_passes * num_sequences)
        gram_PP = compute_gradient_gram(spec, module, weights, ids_NT, num_passes)

        # A diverging run has infinite or NaN gradients, and no noise scale.
        if all(math.isfinite(product) for row in gram_PP for product in row):
            look = NoiseLook(step=step, num_sequences=num_sequences, gram=gram_PP)
            self.measurements.append((spec.id, look))


def _run_eagerly(spec: RunSpec) -> AbstractContextManager[object]:
    """Return a context in which a compiled model runs eagerly.

    Compiling for one measurement costs more time than it saves, and could evict the run's own graph
    from torch.compile's cache.
    """
    return torch.compiler.set_stance("force_eager") if spec.numerics.compiled else nullcontext()


def compute_gradient_gram(
    spec: RunSpec, module: Decoder, weights: Mapping[str, Tensor], ids_NT: Tensor, num_passes: int
) -> tuple[tuple[float, ...], ...]:
    """Return the inner products of the gradients of equal parts of a batch.

    Args:
        spec: The run that is training.
        module: Computes the loss; its own weights are not used.
        weights: Weights of this run only, not stacked with other trials, by parameter name.
        ids_NT: Token ids of the batch, [num_sequences, seq_len + 1].
        num_passes: Number of parts, P.

    Returns:
        The Gram matrix, [P, P], in float64, over the entries that are kept of each gradient.
    """
    parameters = {name: weight.detach().requires_grad_() for name, weight in weights.items()}
    # One run needs one number per multiplier; a bank passes a tensor with one per trial.
    multipliers = Multipliers.from_run(compute_forward_numbers(spec), spec.hparams.run_wide)
    device = next(iter(parameters.values())).device

    num_entries = sum(parameter.numel() for parameter in parameters.values())
    stride = math.ceil(num_entries / TARGET_GRADIENT_ENTRIES)

    kept_gradients = []
    for ids_BT in ids_NT.to(device).chunk(num_passes):
        inputs_BT, targets_BT = ids_BT[:, :-1], ids_BT[:, 1:]
        with _run_eagerly(spec):
            loss = functional_call(module, parameters, (inputs_BT, multipliers, targets_BT))
        gradients = torch.autograd.grad(loss, list(parameters.values()))
        kept_gradients.append(torch.cat([gradient.flatten()[::stride] for gradient in gradients]))
    gradients_PM = torch.stack(kept_gradients).double()

    gram_PP = gradients_PM @ gradients_PM.T
    return tuple(tuple(row) for row in gram_PP.tolist())
