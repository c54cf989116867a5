"""Run the coordinate check: does each layer's output, and its change, keep its size as width (or
depth) grows?

Models of several widths train for a few steps at a constant learning rate, with several seeds. The
output of every layer on the first batch is measured at steps 0, 1, 2, 4, ... and the last (Tensor
Programs V, arXiv 2203.03466, appendix D.1). In a correct parametrization, the slope of log2(size)
per doubling of width is about 0. If updates blow up it is positive, if they vanish it is negative.
The same check over depths tests a depth rule (arXiv 2505.01618). `docs/coordinate-check.md` has the
measured rates of false alarms and of mistakes found. This module does not import torch: runs are
trained and measured by `activations.measure_run`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from forerun._proxies.coordinates.verdict import (
    FLAGGED,
    INITIAL_STD,
    ORDER,
    Axis,
    CheckSettings,
    LayerMeasurements,
    LayerReading,
    LayerVerdict,
    Outcome,
    fit_alignment_slope,
    judge_layer,
    pool_variances,
)
from forerun._proxies.core.notation import format_counted
from forerun._proxies.core.spec import RunSpec

_ATTENTION = (
    "attention logits blow up with the head dim: q . k is scaled by 1 / sqrt(head_dim), or by "
    "less, and must be scaled by 1 / head_dim (random queries and keys hide this at first; trained "
    "ones align)"
)
_WRONG_AFTER_FIRST_UPDATE = (
    "the first update of its own weights has the right size: look at the multipliers before it, "
    "and whether a scheduler overwrites the groups' learning rates after the first step"
)
_NO_DEPTH_RULE = "no depth rule: the residual stream's updates grow with depth; completep has one"
_FOLLOWS_FROM = "follows from"
"""Beginning of the cause of a layer whose fault comes from another layer."""
_MIN_HEAD_DIM_POWER = 0.2
"""Power of the width below which the head dim counts as fixed."""


def attribute_causes(layers: list[LayerVerdict], setting: CheckSettings) -> list[LayerVerdict]:
    """Return the layers with a cause for each flagged layer.

    A layer whose own weights show a mistake keeps this cause, except for a readout that vanishes
    after a mistake in an earlier layer: it follows from the earlier mistake. The cause of any other
    flagged layer is a wrong scale of the attention logits or of the branches, or the first layer
    whose own weights show a mistake.
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
            return f"{_FOLLOWS_FROM} {roots[0].layer}"
        if setting.axis == "depth" and layer.outcome == "blows_up":
            if setting.parametrization.depth_alpha is None:
                return _NO_DEPTH_RULE
            return "the branches' multiplier does not shrink with depth"
        return _WRONG_AFTER_FIRST_UPDATE

    return [dataclasses.replace(layer, cause=find_cause(layer)) for layer in layers]


def _is_flagged(layer: LayerVerdict) -> bool:
    return layer.outcome in FLAGGED


def list_mistakes(layers: Sequence[LayerVerdict]) -> tuple[str, ...]:
    """Return the causes that do not follow from another layer, each with its layers."""
    layers_by_cause: dict[str, list[str]] = {}
    for layer in layers:
        if _is_flagged(layer) and not layer.cause.startswith(_FOLLOWS_FROM):
            layers_by_cause.setdefault(layer.cause, []).append(layer.layer)
    return tuple(
        f"{cause} ({names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''})"
        for cause, names in layers_by_cause.items()
    )


def list_notes(layers: Sequence[LayerVerdict]) -> tuple[str, ...]:
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
    """Number of blocks of that model."""
    not_finite_step: int | None
    """First optimizer step of that run, counted from 1, whose loss, gradient or outputs were not
    finite."""
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
    """Readings by recorded step (`get_recorded_steps`), in the order of the calls, up to
    `not_finite_step`."""
    not_finite_step: int | None = None
    """Optimizer step, counted from 1, whose loss, gradient or outputs were not finite. The run was
    stopped after it. None if all steps were finite."""


_Readings = list[list[list[dict[str, LayerReading]]]]
"""Readings by width (or depth), seed, step and layer."""


def check_coordinates(
    specs: Sequence[Sequence[RunSpec]],
    measure: Callable[[Sequence[CoordinateProbe]], Sequence[RunReadings]],
    *,
    axis: Axis = "width",
    level: float = 0.9,
    progress: Callable[[int], None] = lambda point: None,
) -> CoordinateCheck:
    """Run the coordinate check.

    Args:
        specs: Runs by width (or depth) and seed: at least two widths, increasing, and two seeds.
            They are trained for all but the last step of their schedule, best at a constant
            learning rate, without warmup or clipping.
        measure: Function that trains and measures the runs of one width (or depth), and returns
            their readings in the same order.
        axis: Dimension in which the runs differ.
        level: Level of the intervals over seeds.
        progress: Called with each width (or depth) that is done.
    """
    points = tuple(
        getattr(runs[0].shape, "width" if axis == "width" else "num_layers") for runs in specs
    )
    steps = get_recorded_steps(specs[0][0].schedule.num_steps - 1)
    readings, not_finite = _measure_all(specs, measure, axis, progress, points)
    # A slope needs at least two points
    measured = _collect_layers(readings) if len(readings) > 1 else []
    first = specs[0][0]
    setting = _make_settings(first, axis, level, points, readings, measured)
    mistakes = []
    if not_finite:
        run, step = not_finite
        mistakes.append(
            f"width {run.shape.width} ({format_counted(run.shape.num_layers, 'layer')}, seed "
            f"{run.seed}) became NaN or infinite at step {step}"
        )
    layers = attribute_causes(_judge_layers(measured, setting), setting)
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
        not_finite_width=not_finite[0].shape.width if not_finite else None,
        not_finite_depth=not_finite[0].shape.num_layers if not_finite else None,
        not_finite_step=not_finite[1] if not_finite else None,
        mistakes=(*mistakes, *list_mistakes(layers)),
        notes=list_notes(layers),
        outcome=(
            "blows_up" if not_finite else min((layer.outcome for layer in layers), key=ORDER.index)
        ),
    )


def _make_settings(
    first: RunSpec,
    axis: Axis,
    level: float,
    points: tuple[int, ...],
    readings: _Readings,
    measured: Sequence[LayerMeasurements],
) -> CheckSettings:
    """Return the settings that the layers are judged by.

    Args:
        first: A run of the check.
        axis: Dimension in which the runs differ.
        level: Level of the intervals over seeds.
        points: All widths (or depths) of the check.
        readings: Readings of the widths (or depths) that stayed finite.
        measured: The readings by layer.
    """
    points = points[: len(readings)]
    change_variance, start_variance = pool_variances(measured, points)
    return CheckSettings(
        axis=axis,
        points=points,
        level=level,
        parametrization=first.parametrization,
        head_dim_power=_fit_head_dim_power(points, readings) if axis == "width" else 0.0,
        tied=first.shape.tied,
        change_variance=change_variance,
        start_variance=start_variance,
    )


def get_recorded_steps(num_steps: int) -> tuple[int, ...]:
    """Return the steps at which layers are measured: 0, 1, 2, 4, ... and the last."""
    powers = (2**i for i in range(num_steps.bit_length()) if 2**i < num_steps)
    return (0, *powers, num_steps)


def _judge_layers(
    measured: Sequence[LayerMeasurements], setting: CheckSettings
) -> list[LayerVerdict]:
    """Judge the layers in the order of the calls.

    The order matters. The change of a layer's output contains the effects of the updates of all
    earlier layers, so a correct change may fade as fast as the fastest of these effects. (An effect
    fades if it shrinks with width because updates align less with their inputs:
    `fit_alignment_slope`.)
    """
    fading, layers = 0.0, []
    for layer in measured:
        alignment = fit_alignment_slope(layer, setting)
        # The readout is judged by its own update only.
        is_readout = layer.role == "readout"
        fading = fading if is_readout else min(fading, alignment)
        layers.append(judge_layer(layer, setting, alignment if is_readout else fading))
    return layers


def _fit_head_dim_power(points: Sequence[int], readings: _Readings) -> float:
    """Return the power of the width with which the head dim grows.

    The head dim is read from the attention's queries, because a user's model may have other heads
    than its plan says. The power is 0 if it is below `_MIN_HEAD_DIM_POWER`, or if no attention was
    seen.
    """
    head_dims = [
        max((reading.head_dim for reading in runs[0][0].values()), default=0) for runs in readings
    ]
    if len(readings) < 2 or min(head_dims) < 1:
        return 0.0
    ratio = points[len(readings) - 1] / points[0]
    power = math.log(head_dims[-1] / head_dims[0]) / math.log(ratio)
    return power if power >= _MIN_HEAD_DIM_POWER else 0.0


def _measure_all(
    specs: Sequence[Sequence[RunSpec]],
    measure: Callable[[Sequence[CoordinateProbe]], Sequence[RunReadings]],
    axis: Axis,
    progress: Callable[[int], None],
    points: Sequence[int],
) -> tuple[_Readings, tuple[RunSpec, int] | None]:
    """Train and measure all runs, up to the first that becomes NaN or infinite.

    Returns:
        The readings of the widths (or depths) before that run, and the run with its step; None if
        all stayed finite.
    """
    all_readings: _Readings = []
    for point, runs in zip(points, specs, strict=True):
        point_readings = measure([CoordinateProbe(spec=run, axis=axis) for run in runs])
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


def _collect_layers(readings: _Readings) -> list[LayerMeasurements]:
    """Collect the readings by layer, in the order of the first model's calls.

    Layers that only some models have are left out. The arrays are [S, P, K]: S recorded steps, P
    widths or depths, K seeds.
    """
    common_layers = set.intersection(
        *(set(step) for runs in readings for run in runs for step in run)
    )

    def get_column(layer: str, name: str) -> NDArray[np.float64]:
        values_PKS = [
            [[getattr(step[layer], name) for step in run] for run in runs] for runs in readings
        ]
        return np.array(values_PKS, dtype=float).transpose(2, 0, 1)

    columns = ("size", "change", "update", "gain", "rate")
    return [
        LayerMeasurements(
            layer=layer, role=reading.role, **{name: get_column(layer, name) for name in columns}
        )
        for layer, reading in readings[0][0][0].items()
        if layer in common_layers
    ]
