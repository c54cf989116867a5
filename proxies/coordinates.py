"""Coordinate check: does each layer move by the same amount at every width?

For some steps at a constant rate, every layer's output on a probe batch is compared with what it was at the start. The
change's mean absolute size against width, as a slope in log2 per doubling, is about 0 in a right parametrization
(Tensor Programs V, arXiv 2203.03466, appendix D.1), positive where updates blow up with width, negative where they
vanish. Seeds train side by side in one bank, and give the slope its interval.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import stats
from torch import Tensor, nn

from proxies.bank import Bank
from proxies.model import linear
from proxies.spec import RunSpec
from proxies.tokens import TokenStore

Outcome = Literal["passes", "blows_up", "vanishes", "cannot_tell"]

MISTAKE = 0.5
"""The smallest slope, in octaves per doubling of width, of a classic mistake (a root of the width too much)."""
TOLERANCE = 0.25
"""A slope surely beyond this is a mistake; a layer passes once its interval is surely inside `MISTAKE`."""
PROBE_SEQUENCES = 8
READOUT = "lm_head"
_CAUSES = {
    ("blows_up", "readout"): "the readout's output multiplier does not shrink with width",
    ("blows_up", "hidden"): "hidden matrices' learning rate does not shrink with width",
    ("blows_up", "embedding"): "the embedding's learning rate grows with width",
    ("vanishes", "readout"): "the readout is scaled down more than its input grows",
    ("vanishes", "hidden"): "hidden matrices' learning rate shrinks too fast with width",
    ("vanishes", "embedding"): "the embedding's learning rate shrinks with width",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerVerdict:
    """One layer: mean size of its output's change per width (over seeds), and the slope."""

    layer: str
    change: tuple[float, ...]
    """Mean absolute change of the output, one per width, geometric mean over seeds."""
    slope: float
    """Of log2(change) per doubling of width."""
    interval: tuple[float, float]
    outcome: Outcome
    cause: str


@dataclass(frozen=True, kw_only=True, slots=True)
class CoordinateCheck:
    """The check of one parametrization over some widths."""

    parametrization: str
    widths: tuple[int, ...]
    num_steps: int
    num_seeds: int
    learning_rate: float
    level: float
    layers: tuple[LayerVerdict, ...]
    """Judged over the widths that stayed finite; none where fewer than two did."""
    not_finite_width: int | None
    """The first width at which a run left the finite numbers: a blow-up by itself."""
    outcome: Outcome
    """The worst of the layers'."""


def check_coordinates(
    specs: Sequence[Sequence[RunSpec]],
    store: TokenStore,
    *,
    level: float = 0.9,
    progress: Callable[[int], None] = lambda width: None,
) -> CoordinateCheck:
    """Run the check: `specs[i]` holds the runs of one width, alike but for their seeds.

    Raises:
        ValueError: fewer than two widths or two seeds, widths not increasing, or no step to take.
    """
    widths, num_seeds = _arguments(specs)
    changes: dict[str, list[NDArray[np.float64]]] = {}
    not_finite_width: int | None = None
    for runs in specs:
        at_width = _changes(runs, store)
        if at_width is None:
            not_finite_width = runs[0].shape.width
            break
        for layer, change_K in at_width.items():
            changes.setdefault(layer, []).append(change_K)
        progress(runs[0].shape.width)
    finite = [width for width in widths if not_finite_width is None or width < not_finite_width]
    judged = changes if len(finite) > 1 else {}
    layers = tuple(_judge(layer, finite, np.stack(change_WK), level) for layer, change_WK in judged.items())
    order: list[Outcome] = ["blows_up", "vanishes", "cannot_tell", "passes"]
    outcomes = [layer.outcome for layer in layers]
    worst = min(outcomes, key=order.index) if not_finite_width is None else "blows_up"
    first = specs[0][0]
    return CoordinateCheck(
        parametrization=first.parametrization,
        widths=widths,
        num_steps=first.schedule.num_steps - 1,
        num_seeds=num_seeds,
        learning_rate=first.hparams.learning_rate,
        level=level,
        layers=layers,
        not_finite_width=not_finite_width,
        outcome=worst,
    )


def _arguments(specs: Sequence[Sequence[RunSpec]]) -> tuple[tuple[int, ...], int]:
    """The widths and the number of seeds, if they can be judged."""
    widths = tuple(runs[0].shape.width for runs in specs if runs)
    counts = sorted({len(runs) for runs in specs})
    if len(widths) < 2 or list(widths) != sorted(set(widths)) or len(counts) != 1 or counts[0] < 2:
        raise ValueError(
            f"widths = {widths}, {counts} seeds: at least 2 increasing widths, and as many seeds at each, at least 2, "
            "are wanted"
        )
    num_steps = min(run.schedule.num_steps for runs in specs for run in runs)
    if num_steps < 2:
        raise ValueError(f"num_steps = {num_steps}: at least 2 are wanted, the last of which is not taken")
    return widths, counts[0]


def _changes(runs: Sequence[RunSpec], store: TokenStore) -> dict[str, NDArray[np.float64]] | None:
    """Mean absolute change of every layer's output, [K], over all but the last step of the runs' schedule.

    None if a run left the finite numbers; a loss that is merely large is what is being measured.
    """
    spec = runs[0]
    bank = Bank(spec.shape, spec.batch_tokens, spec.numerics, store, diverged_above_nats=math.inf)
    for slot, run in enumerate(runs):
        bank.admit(slot, run)
    num_sequences = min(PROBE_SEQUENCES, store.num_windows("validation", spec.shape.seq_len))
    batch_BT = store.validation_batch(num_sequences=num_sequences, seq_len=spec.shape.seq_len)
    ids_KBT = torch.from_numpy(batch_BT[:, :-1]).expand(spec.numerics.num_slots, -1, -1)
    before, readout_KVD = _outputs(bank, ids_KBT)[0], bank.model.lm_head.weight.detach().clone()
    # One step short of the end: a finished run would be evicted.
    if bank.advance(spec.schedule.num_steps - 1):
        return None
    after, normed_KND = _outputs(bank, ids_KBT)
    changes = {layer: after[layer] - before[layer] for layer in before}
    # The readout's random start turns a change of its input into one that fades with the root of the width in every
    # right parametrization, so its own update alone is judged.
    changes[READOUT] = linear(normed_KND, bank.model.lm_head.weight.detach() - readout_KVD)
    return {layer: change.abs().mean(dim=(1, 2))[: len(runs)].double().numpy() for layer, change in changes.items()}


@torch.no_grad()
def _outputs(bank: Bank, ids_KBT: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Every layer's output on the probe batch, [K, N, width of the layer], and the readout's input, [K, N, D]."""
    found: dict[str, Tensor] = {}

    def keep(name: str) -> Callable[[nn.Module, Any, Tensor], None]:
        def hook(module: nn.Module, inputs: Any, output: Tensor) -> None:
            found[name] = output
            if name == READOUT:
                found["input"] = inputs[0]

        return hook

    watched = [name for name, _ in bank.model.named_modules() if _watched(name)]
    handles = [bank.model.get_submodule(name).register_forward_hook(keep(name)) for name in watched]
    try:
        bank.predict(ids_KBT)
    finally:
        for handle in handles:
            handle.remove()
    return {name: found[name] for name in watched}, found["input"]


def _watched(name: str) -> bool:
    return name in ("tok_embeddings", "norm", READOUT) or name.endswith((".attention", ".feed_forward"))


def _judge(layer: str, widths: Sequence[int], change_WK: NDArray[np.float64], level: float) -> LayerVerdict:
    octaves_W = np.log2(np.array(widths, dtype=float))
    logs_WK = np.log2(np.maximum(change_WK, np.finfo(float).tiny))
    centred_W = octaves_W - octaves_W.mean()
    slopes_K = centred_W @ logs_WK / (centred_W @ centred_W)
    num_seeds = len(slopes_K)
    half = float(stats.t.ppf(0.5 + level / 2, num_seeds - 1) * slopes_K.std(ddof=1) / math.sqrt(num_seeds))
    slope = float(slopes_K.mean())
    outcome: Outcome = "cannot_tell"
    if not change_WK.all():
        outcome = "cannot_tell"  # an output that did not move has no slope
    elif slope - half > TOLERANCE:
        outcome = "blows_up"
    elif slope + half < -TOLERANCE:
        outcome = "vanishes"
    elif abs(slope) + half < MISTAKE:
        outcome = "passes"
    kind = {"tok_embeddings": "embedding", READOUT: "readout"}.get(layer, "hidden")
    return LayerVerdict(
        layer=layer,
        change=tuple(float(x) for x in 2 ** logs_WK.mean(axis=1)),
        slope=slope,
        interval=(slope - half, slope + half),
        outcome=outcome,
        cause=_CAUSES.get((outcome, kind), ""),
    )
