"""Coordinate check: does each layer's output, and its change, keep its size as width (or depth)
grows?

Models of several widths train for some steps at a constant rate, seed by seed, and every layer's
output on the first batch that was trained on is measured at steps 0, 1, 2, 4, ... and the last
(Tensor Programs V, arXiv 2203.03466, appendix D.1). In a right parametrization slopes of log2(size)
per doubling of width are about 0; where updates blow up they are positive, where they vanish
negative. The same over depths checks a depth rule (arXiv 2505.01618). `docs/coordinate-check.md`
has the measured rates of false alarms and of mistakes found. No torch: runs are read elsewhere
(`activations.read_run`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from proxies.coordinates.verdict import (
    FLAGGED,
    INITIAL_STD,
    ORDER,
    Axis,
    CheckSettings,
    LayerReading,
    LayerVerdict,
    Measured,
    Outcome,
    alignment_slope,
    judge_layer,
    pool_variances,
)
from proxies.core.notation import counted
from proxies.core.spec import RunSpec

_ATTENTION = (
    "attention logits blow up with the head dim: q . k is scaled by 1 / sqrt(head_dim), or by "
    "less, and must be scaled "
    "by 1 / head_dim (random queries and keys hide this at first; trained ones align)"
)
_LATER = (
    "its own first update keeps its size: look at the multipliers before it, and whether a "
    "scheduler overwrites the "
    "groups' rates after the first step"
)
_NO_DEPTH_RULE = "no depth rule: the residual stream's updates grow with depth; completep has one"


def attributed(layers: list[LayerVerdict], setting: CheckSettings) -> list[LayerVerdict]:
    """The layers, each that is flagged without a cause of its own given one: a scale, or what it
    follows from.
    """
    roots = [layer for layer in layers if _flagged(layer) and layer.cause]
    # What is wrong in the blocks comes before the readout, which reaches them through the
    # gradients.
    roots.sort(key=lambda layer: layer.role == "readout")
    upset = bool(roots) and roots[0].role != "readout"
    wrong_start = any(layer.cause.startswith(INITIAL_STD) for layer in roots)

    def cause(layer: LayerVerdict) -> str:
        led = layer.role == "readout" and layer.outcome == "vanishes" and upset
        if not _flagged(layer) or (layer.cause and not led):
            return layer.cause
        grows = (
            layer.role == "attention_logits"
            and setting.head_dim_power > 0
            and layer.outcome == "blows_up"
        )
        if grows and not wrong_start:
            return _ATTENTION
        if roots:
            return f"follows from {roots[0].layer}"
        if setting.axis == "depth" and layer.outcome == "blows_up":
            ruleless = setting.parametrization.depth_alpha is None
            return (
                _NO_DEPTH_RULE
                if ruleless
                else "the branches' multiplier does not shrink with depth"
            )
        return _LATER

    return [dataclasses.replace(layer, cause=cause(layer)) for layer in layers]


def _flagged(layer: LayerVerdict) -> bool:
    return layer.outcome in FLAGGED


def named_mistakes(layers: Sequence[LayerVerdict]) -> tuple[str, ...]:
    """Causes that are not another layer's, each with the layers it was found in."""
    where: dict[str, list[str]] = {}
    for layer in layers:
        if _flagged(layer) and not layer.cause.startswith("follows from"):
            where.setdefault(layer.cause, []).append(layer.layer)
    return tuple(
        f"{cause} ({names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''})"
        for cause, names in where.items()
    )


def notes_of(layers: Sequence[LayerVerdict]) -> tuple[str, ...]:
    """What could not be looked at."""
    notes = []
    if layers and not any(layer.role == "attention_logits" for layer in layers):
        notes.append(
            "no attention logits were seen: the model does not call "
            "torch.nn.functional.scaled_dot_product_attention, "
            "so their scale is not checked"
        )
    if layers and not any(layer.role == "readout" for layer in layers):
        notes.append("no module was seen to return the logits: the readout is not checked")
    return tuple(notes)


@dataclass(frozen=True, kw_only=True, slots=True)
class CoordinateCheck:
    """The check of one parametrization over some widths, or some depths."""

    parametrization: str
    axis: Axis
    widths: tuple[int, ...]
    """Of the models compared; all alike where the axis is depth."""
    depths: tuple[int, ...]
    """Their numbers of blocks."""
    num_steps: int
    num_seeds: int
    learning_rate: float
    level: float
    layers: tuple[LayerVerdict, ...]
    """In order of the calls, judged over the models that stayed finite; none where fewer than two
    did."""
    not_finite_width: int | None
    """Of the first model of which a run left the finite numbers: a blow-up by itself."""
    not_finite_depth: int | None
    not_finite_step: int | None
    """The optimizer step, counted from 1, whose loss, gradient or outputs were not finite."""
    mistakes: tuple[str, ...]
    """What is wrong, in words."""
    notes: tuple[str, ...]
    """What could not be looked at."""
    outcome: Outcome
    """The worst of the layers'."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CoordinateProbe:
    """A run whose layers a worker is to read."""

    spec: RunSpec
    """All but the last step of its schedule is taken."""
    axis: Axis
    """What the runs of its check differ in."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunReadings:
    """What a worker read."""

    steps: tuple[tuple[LayerReading, ...], ...]
    """By recorded step (`recorded_steps`), in the order of the calls; up to `not_finite_step`."""
    not_finite_step: int | None = None
    """The optimizer step, counted from 1, whose loss, gradient or outputs were not finite; the last
    that was made."""


def check_coordinates(
    specs: Sequence[Sequence[RunSpec]],
    read: Callable[[Sequence[CoordinateProbe]], Sequence[RunReadings]],
    *,
    axis: Axis = "width",
    level: float = 0.9,
    progress: Callable[[int], None] = lambda point: None,
) -> CoordinateCheck:
    """Run the check: `specs[i]` holds the runs of one width (or depth), alike but for their seeds.

    Args:
        specs: at least two widths (or depths), increasing, and two seeds; all but the last step of
            their schedule is taken, best at a constant rate, without warmup or clipping.
        read: reads the runs of one width (or depth), in their order.
        axis: what the runs differ in.
        level: of the intervals over seeds.
        progress: called with each width (or depth) that is done.
    """
    points = tuple(
        getattr(runs[0].shape, "width" if axis == "width" else "num_layers") for runs in specs
    )
    steps = recorded_steps(specs[0][0].schedule.num_steps - 1)
    found, lost = _all_readings(specs, read, axis, progress, points)
    first = specs[0][0]
    setting = CheckSettings(
        axis=axis,
        points=points[: len(found)],
        level=level,
        parametrization=first.parametrization,
        head_dim_power=_head_dim_power(points, found) if axis == "width" else 0.0,
        tied=first.shape.tied,
    )
    mistakes = []
    if lost:
        which = (
            f"width {lost[0].shape.width} ({counted(lost[0].shape.num_layers, 'layer')}, seed "
            f"{lost[0].seed})"
        )
        mistakes.append(f"{which} became NaN or infinite at step {lost[1]}")
    layers = attributed(_judge_layers(_measured(found), setting) if len(found) > 1 else [], setting)
    return CoordinateCheck(
        parametrization=str(first.parametrization),
        axis=axis,
        widths=tuple(runs[0].shape.width for runs in specs),
        depths=tuple(runs[0].shape.num_layers for runs in specs),
        num_steps=steps[-1],
        num_seeds=len(specs[0]),
        learning_rate=first.hparams.learning_rate,
        level=level,
        layers=tuple(layers),
        not_finite_width=lost[0].shape.width if lost else None,
        not_finite_depth=lost[0].shape.num_layers if lost else None,
        not_finite_step=lost[1] if lost else None,
        mistakes=(*mistakes, *named_mistakes(layers)),
        notes=notes_of(layers),
        outcome="blows_up" if lost else min((layer.outcome for layer in layers), key=ORDER.index),
    )


def recorded_steps(num_steps: int) -> tuple[int, ...]:
    """0, 1, 2, 4, ... and the last."""
    return (*(0, *(2**i for i in range(num_steps.bit_length()) if 2**i < num_steps)), num_steps)


def _judge_layers(measured: Sequence[Measured], setting: CheckSettings) -> list[LayerVerdict]:
    """Judge the layers in the order of the calls, because a change contains the fading of all
    earlier updates.
    """
    fading, variances, layers = 0.0, pool_variances(measured, setting.points), []
    for layer in measured:
        own = alignment_slope(layer, setting)
        # The readout is judged by its own update alone
        fading = fading if layer.role == "readout" else min(fading, own)
        layers.append(
            judge_layer(layer, setting, own if layer.role == "readout" else fading, variances)
        )
    return layers


_Found = list[list[list[dict[str, LayerReading]]]]
"""Readings by width (or depth), seed, step and layer."""


def _head_dim_power(points: Sequence[int], found: _Found) -> float:
    """The power of the width that the head dim of the attention seen goes as; 0 for less than a
    fifth, or none seen.

    Of the queries themselves: a model of the user's own may have other heads than its plan says.
    """
    head_dims = [
        max((reading.head_dim for reading in runs[0][0].values()), default=0) for runs in found
    ]
    if len(found) < 2 or min(head_dims) < 1:
        return 0.0
    power = math.log(head_dims[-1] / head_dims[0]) / math.log(points[len(found) - 1] / points[0])
    return power if power >= 0.2 else 0.0


def _all_readings(
    specs: Sequence[Sequence[RunSpec]],
    read: Callable[[Sequence[CoordinateProbe]], Sequence[RunReadings]],
    axis: Axis,
    progress: Callable[[int], None],
    points: Sequence[int],
) -> tuple[_Found, tuple[RunSpec, int] | None]:
    """The readings up to the first run that left the finite numbers, and that run with its step."""
    found: _Found = []
    for point, runs in zip(points, specs, strict=True):
        row = read([CoordinateProbe(spec=run, axis=axis) for run in runs])
        for run, readings in zip(runs, row, strict=True):
            if readings.not_finite_step is not None:
                return found, (run, readings.not_finite_step)
        found.append(
            [
                [{layer.layer: layer for layer in step} for step in readings.steps]
                for readings in row
            ]
        )
        progress(point)
    return found, None


def _measured(found: _Found) -> list[Measured]:
    """Readings [P][K][S] by layer, in the order of the first model's calls; layers that only some
    have are left out.
    """
    everywhere = set.intersection(*(set(at) for runs in found for run in runs for at in run))

    def column(layer: str, name: str) -> NDArray[np.float64]:
        values_PKS = [[[getattr(at[layer], name) for at in run] for run in runs] for runs in found]
        return np.array(values_PKS, dtype=float).transpose(2, 0, 1)

    return [
        Measured(
            layer=layer,
            role=reading.role,
            size=column(layer, "size"),
            change=column(layer, "change"),
            update=column(layer, "update"),
            gain=column(layer, "gain"),
            rate=column(layer, "rate"),
        )
        for layer, reading in found[0][0][0].items()
        if layer in everywhere
    ]
