"""Run the coordinate check: does each layer's output, and its change, keep its size as width (or
depth) grows?

Models of several widths train for a few steps at a constant learning rate, with several seeds. The
output of every layer on the first batch is measured at steps 0, 1, 2, 4, ... and the last (Tensor
Programs V, arXiv 2203.03466, appendix D.1). In a correct parametrization, the slope of log2(size)
per doubling of width is about 0. If updates blow up it is positive, if they vanish it is negative.
The same check over depths tests a depth rule (arXiv 2505.01618). `docs/coordinate-check.md` has the
measured rates of false alarms and of mistakes found. This module does not import torch: runs are
trained and measured by `activations.read_run`.
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
    "less, and must be scaled by 1 / head_dim (random queries and keys hide this at first; trained "
    "ones align)"
)
_LATER = (
    "its own first update keeps its size: look at the multipliers before it, and whether a "
    "scheduler overwrites the groups' rates after the first step"
)
_NO_DEPTH_RULE = "no depth rule: the residual stream's updates grow with depth; completep has one"


def attributed(layers: list[LayerVerdict], setting: CheckSettings) -> list[LayerVerdict]:
    """Give a cause to each flagged layer whose own weights show no mistake.

    The cause is a wrong scale, or the layer that the mistake follows from.
    """
    roots = [layer for layer in layers if _is_flagged(layer) and layer.cause]
    # Mistakes in the blocks come before those of the readout, which affect the blocks only through
    # the gradients.
    roots.sort(key=lambda layer: layer.role == "readout")
    is_wrong_before_readout = bool(roots) and roots[0].role != "readout"
    is_start_wrong = any(layer.cause.startswith(INITIAL_STD) for layer in roots)

    def find_cause(layer: LayerVerdict) -> str:
        is_consequence = (
            layer.role == "readout" and layer.outcome == "vanishes" and is_wrong_before_readout
        )
        if not _is_flagged(layer) or (layer.cause and not is_consequence):
            return layer.cause
        do_logits_grow = (
            layer.role == "attention_logits"
            and setting.head_dim_power > 0
            and layer.outcome == "blows_up"
        )
        if do_logits_grow and not is_start_wrong:
            return _ATTENTION
        if roots:
            return f"follows from {roots[0].layer}"
        if setting.axis == "depth" and layer.outcome == "blows_up":
            if setting.parametrization.depth_alpha is None:
                return _NO_DEPTH_RULE
            return "the branches' multiplier does not shrink with depth"
        return _LATER

    return [dataclasses.replace(layer, cause=find_cause(layer)) for layer in layers]


def _is_flagged(layer: LayerVerdict) -> bool:
    return layer.outcome in FLAGGED


def named_mistakes(layers: Sequence[LayerVerdict]) -> tuple[str, ...]:
    """Return the causes that do not follow from another layer, each with its layers."""
    layers_by_cause: dict[str, list[str]] = {}
    for layer in layers:
        if _is_flagged(layer) and not layer.cause.startswith("follows from"):
            layers_by_cause.setdefault(layer.cause, []).append(layer.layer)
    return tuple(
        f"{cause} ({names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''})"
        for cause, names in layers_by_cause.items()
    )


def notes_of(layers: Sequence[LayerVerdict]) -> tuple[str, ...]:
    """Return sentences about parts of the model that could not be checked."""
    notes = []
    if layers and not any(layer.role == "attention_logits" for layer in layers):
        notes.append(
            "no attention logits were seen: the model does not call "
            "torch.nn.functional.scaled_dot_product_attention, so their scale is not checked"
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
    """Widths of the compared models; all equal if the axis is depth."""
    depths: tuple[int, ...]
    """Numbers of blocks of the compared models."""
    num_steps: int
    num_seeds: int
    learning_rate: float
    level: float
    layers: tuple[LayerVerdict, ...]
    """Verdicts in the order of the calls, over the models that stayed finite; none if fewer than
    two did."""
    not_finite_width: int | None
    """Width of the first model with a run that became NaN or infinite, which is a blow-up; None if
    all stayed finite."""
    not_finite_depth: int | None
    not_finite_step: int | None
    """First optimizer step, counted from 1, whose loss, gradient or outputs were not finite."""
    mistakes: tuple[str, ...]
    """Sentences about the mistakes."""
    notes: tuple[str, ...]
    """Sentences about parts of the model that could not be checked."""
    outcome: Outcome
    """Worst outcome of the layers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CoordinateProbe:
    """A run whose layers a worker measures."""

    spec: RunSpec
    """The run; it is trained for all but the last step of its schedule."""
    axis: Axis
    """Dimension in which the runs of the check differ."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunReadings:
    """The measurements of one run."""

    steps: tuple[tuple[LayerReading, ...], ...]
    """Readings by recorded step (`recorded_steps`), in the order of the calls, up to
    `not_finite_step`."""
    not_finite_step: int | None = None
    """Optimizer step, counted from 1, whose loss, gradient or outputs were not finite, and after
    which the run was stopped; None if there is none."""


def check_coordinates(
    specs: Sequence[Sequence[RunSpec]],
    read: Callable[[Sequence[CoordinateProbe]], Sequence[RunReadings]],
    *,
    axis: Axis = "width",
    level: float = 0.9,
    progress: Callable[[int], None] = lambda point: None,
) -> CoordinateCheck:
    """Run the coordinate check.

    Args:
        specs: Runs by width (or depth) and seed: at least two widths, increasing, and two seeds.
            They are trained for all but the last step of their schedule, best at a constant rate,
            without warmup or clipping.
        read: Trains and measures the runs of one width (or depth), in their order.
        axis: Dimension in which the runs differ.
        level: Level of the intervals over seeds.
        progress: Called with each width (or depth) that is done.
    """
    points = tuple(
        getattr(runs[0].shape, "width" if axis == "width" else "num_layers") for runs in specs
    )
    steps = recorded_steps(specs[0][0].schedule.num_steps - 1)
    readings, lost = _read_all(specs, read, axis, progress, points)
    first = specs[0][0]
    setting = CheckSettings(
        axis=axis,
        points=points[: len(readings)],
        level=level,
        parametrization=first.parametrization,
        head_dim_power=_fit_head_dim_power(points, readings) if axis == "width" else 0.0,
        tied=first.shape.tied,
    )
    mistakes = []
    if lost:
        lost_run, lost_step = lost
        mistakes.append(
            f"width {lost_run.shape.width} ({counted(lost_run.shape.num_layers, 'layer')}, seed "
            f"{lost_run.seed}) became NaN or infinite at step {lost_step}"
        )
    judged = _judge_layers(_collect_layers(readings), setting) if len(readings) > 1 else []
    layers = attributed(judged, setting)
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
    """Return the steps at which layers are measured: 0, 1, 2, 4, ... and the last."""
    powers = (2**i for i in range(num_steps.bit_length()) if 2**i < num_steps)
    return (0, *powers, num_steps)


def _judge_layers(measured: Sequence[Measured], setting: CheckSettings) -> list[LayerVerdict]:
    """Judge the layers in the order of the calls.

    The order matters: the change of a layer contains the fading of all earlier updates.
    """
    fading, variances, layers = 0.0, pool_variances(measured, setting.points), []
    for layer in measured:
        alignment = alignment_slope(layer, setting)
        # The readout is judged by its own update only.
        if layer.role == "readout":
            layers.append(judge_layer(layer, setting, alignment, variances))
        else:
            fading = min(fading, alignment)
            layers.append(judge_layer(layer, setting, fading, variances))
    return layers


_Readings = list[list[list[dict[str, LayerReading]]]]
"""Readings by width (or depth), seed, step and layer."""


def _fit_head_dim_power(points: Sequence[int], readings: _Readings) -> float:
    """Return the power of the width with which the head dim grows.

    It is taken from the queries of the attention, because a user's model may have other heads than
    its plan says. Returns 0 if it is below 0.2, or no attention was seen.
    """
    head_dims = [
        max((reading.head_dim for reading in runs[0][0].values()), default=0) for runs in readings
    ]
    if len(readings) < 2 or min(head_dims) < 1:
        return 0.0
    ratio = points[len(readings) - 1] / points[0]
    power = math.log(head_dims[-1] / head_dims[0]) / math.log(ratio)
    return power if power >= 0.2 else 0.0


def _read_all(
    specs: Sequence[Sequence[RunSpec]],
    read: Callable[[Sequence[CoordinateProbe]], Sequence[RunReadings]],
    axis: Axis,
    progress: Callable[[int], None],
    points: Sequence[int],
) -> tuple[_Readings, tuple[RunSpec, int] | None]:
    """Read all runs, up to the first that becomes NaN or infinite.

    Returns:
        The readings of the widths (or depths) before that run, and the run with its step; None if
        all stayed finite.
    """
    all_readings: _Readings = []
    for point, runs in zip(points, specs, strict=True):
        point_readings = read([CoordinateProbe(spec=run, axis=axis) for run in runs])
        for run, readings in zip(runs, point_readings, strict=True):
            if readings.not_finite_step is not None:
                return all_readings, (run, readings.not_finite_step)
        all_readings.append(
            [
                [{layer.layer: layer for layer in step} for step in readings.steps]
                for readings in point_readings
            ]
        )
        progress(point)
    return all_readings, None


def _collect_layers(readings: _Readings) -> list[Measured]:
    """Collect the readings by layer, in the order of the first model's calls.

    Layers that only some models have are left out.
    """
    common_layers = set.intersection(
        *(set(step) for runs in readings for run in runs for step in run)
    )

    def column(layer: str, name: str) -> NDArray[np.float64]:
        values_PKS = [
            [[getattr(step[layer], name) for step in run] for run in runs] for runs in readings
        ]
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
        for layer, reading in readings[0][0][0].items()
        if layer in common_layers
    ]
