"""Judge one layer of the coordinate check by its slopes against width (or depth).

The slope of a size is the growth of log2(size) per doubling of the width. It is fitted by least
squares for each seed, with a t-interval over the seeds. The thresholds are constants, not fitted:
the classic mistakes have slopes of 0.5 and more.

The size of a matrix's own update follows the rate rule (the power of the width or depth by which
the parametrization scales the learning rate) exactly, whatever the data. The change of an output is
the size of the update times the alignment of the update with its inputs. In small models the
alignment shrinks as the width grows, without any mistake. This is called *fading* here. Its slope,
from -1/2 to 0, is measured by `fit_alignment_slope`. This module does not import torch.

Shape suffixes: S recorded steps, P widths or depths, K seeds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

from forerun._proxies.core.rules import Parametrization

Axis = Literal["width", "depth"]
Role = Literal["embedding", "hidden", "readout", "norm", "stream", "attention_logits"]
Outcome = Literal["passes", "blows_up", "vanishes", "cannot_tell"]
ORDER: tuple[Outcome, ...] = ("blows_up", "vanishes", "cannot_tell", "passes")
"""Outcomes, worst first."""
FLAGGED: tuple[Outcome, ...] = ("blows_up", "vanishes")
NOISE_SLOPE = -0.5
"""Slope of the effect of an update on unrelated input at a correct learning rate: the update's
elements shrink as 1 / fan-in and add up at random. No effect fades faster at a correct rate."""
_FALSE_SCALING: dict[Outcome, str] = {"blows_up": "does not shrink", "vanishes": "shrinks too fast"}
"""Words for a number that must shrink as the width grows, by the outcome of its slope."""
INITIAL_STD = "hidden matrices' initial std"
"""Beginning of a cause. `attribute_causes` recognizes a wrong initial std by it."""

MISTAKE = 0.5
"""Smallest slope of a classic mistake (a factor of sqrt(width) too much), in octaves per
doubling."""
TOLERANCE = 0.25
"""If the whole interval of a slope is further than this from the expected slopes, the slope is a
mistake. If the whole interval is within `MISTAKE` of the expected slopes, the layer passes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerReading:
    """The sizes of one layer at one step: mean absolute values over the batch of the first
    update.
    """

    layer: str
    role: Role
    size: float
    """Size of the output."""
    change: float
    """Size of the change in the output since step 0; for the readout, only the effect of its own
    update on its input at step 0."""
    update: float | None = None
    """Effect of a matrix's own update since step 0 on its input at step 0, over the size of that
    input; None for layers without a matrix."""
    gain: float | None = None
    """Size of the output over that of the input; None for layers without parameters."""
    rate: float | None = None
    """Size of the same update by itself: its effect on unrelated random input (a sample of its
    Frobenius norm) times the root of the fan-in. With AdamW this follows the rate rule exactly,
    whatever the data. For a hidden matrix it is relative to the input's size; for the readout it is
    not, so that a multiplier of the input counts. None for other roles."""
    head_dim: int = 0
    """Width of a query of attention logits; 0 for other roles."""

    @property
    def is_finite(self) -> bool:
        """Whether the sizes are finite numbers."""
        return math.isfinite(self.size) and math.isfinite(self.change)


@dataclass(frozen=True, kw_only=True, slots=True)
class Slope:
    """The slope of log2(size) per doubling of the axis."""

    slope: float
    interval: tuple[float, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerVerdict:
    """The verdict on one layer, by the slopes of its change and of its size at step 0."""

    layer: str
    role: Role
    change: tuple[float, ...]
    """Mean absolute change of the output from step 0 to the last step, at each width (or depth):
    geometric means over seeds, to five digits. For the readout, only the change by its own
    update."""
    slope: float
    """Slope of the change: the median over the steps for each seed, averaged over the seeds. 0 if
    the layer did not move, so that it cannot be judged."""
    interval: tuple[float, float]
    expected: tuple[float, float]
    """Smallest and largest slope in a correct parametrization: (0, 0), except for rules that change
    with width or depth by design, and for the measured fading of the updates' alignment with their
    inputs."""
    start: Slope | None
    """Slope of the size at step 0; None if a size is zero."""
    update: Slope | None
    """Slope of the effect of the layer's first update on the batch of that update; for a hidden
    matrix, over the input's size. None for roles without a rate rule, and if nothing moved."""
    rate: Slope | None
    """Slope of the size of the layer's first update against the rate rule, before mistakes
    elsewhere affect it through the gradients; None if `update` is None or the size is unknown."""
    outcome: Outcome
    cause: str
    """Description of the mistake; empty for a layer that passes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerMeasurements:
    """One layer's readings (`LayerReading`), each an array [S, P, K]; the first step is step 0."""

    layer: str
    role: Role
    size: NDArray[np.float64]
    change: NDArray[np.float64]
    update: NDArray[np.float64]
    gain: NDArray[np.float64]
    rate: NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckSettings:
    """The settings that the readings of a check are judged by."""

    axis: Axis
    points: tuple[int, ...]
    """Widths or depths."""
    level: float
    """Level of the intervals over seeds."""
    parametrization: Parametrization
    head_dim_power: float
    """Power of the width with which the head dim grows; 0 if it is fixed."""
    tied: bool = False
    """Whether the readout shares the embedding's matrix, and so its learning rate."""
    change_variance: float | None = None
    """Variance between seeds of the slopes of changes, as a mean over the layers; None if
    unknown."""
    start_variance: float | None = None
    """Variance between seeds of the slopes of sizes at step 0, as a mean over the layers; None if
    unknown."""


def _fit_slopes(size_PK: NDArray[np.float64], points: Sequence[int]) -> NDArray[np.float64] | None:
    """Fit the slope of each seed, [K]; None if a size is not a positive number."""
    if not (np.isfinite(size_PK).all() and (size_PK > 0).all()):
        return None
    octaves_P = np.log2(np.array(points, dtype=float))
    centered_P = octaves_P - octaves_P.mean()
    slopes_K: NDArray[np.float64] = centered_P @ np.log2(size_PK) / (centered_P @ centered_P)
    return slopes_K


def _add_interval(slopes_K: NDArray[np.float64], level: float, pooled: float | None) -> Slope:
    """Return the mean slope with its t-interval.

    With few seeds a layer's variance is uncertain, so it is averaged with `pooled`, the variance
    between seeds over all layers, which doubles the degrees of freedom (moderated t, Smyth 2004,
    doi 10.2202/1544-6115.1027).
    """
    num_seeds, slope, variance = len(slopes_K), float(slopes_K.mean()), float(slopes_K.var(ddof=1))
    degrees = num_seeds - 1
    if pooled is not None:
        degrees, variance = 2 * degrees, (variance + pooled) / 2
    half_width = float(stdtrit(degrees, 0.5 + level / 2)) * math.sqrt(variance / num_seeds)
    return Slope(slope=slope, interval=(slope - half_width, slope + half_width))


def fit_slope(
    size_PK: NDArray[np.float64], points: Sequence[int], level: float, pooled: float | None = None
) -> Slope | None:
    """Fit the slope over the points, with its t-interval over seeds; None if a size is not a
    positive number.
    """
    slopes_K = _fit_slopes(size_PK, points)
    return None if slopes_K is None else _add_interval(slopes_K, level, pooled)


def _compute_typical_slopes(
    change_SPK: NDArray[np.float64], points: Sequence[int]
) -> NDArray[np.float64] | None:
    """Return the median slope over the steps for each seed, [K]; None if the layer has not moved at
    the last step.

    A mistake shows at every step, while the last steps alone may be chaotic in the smallest models
    at a high rate.
    """
    slopes_SK = [
        slopes_K
        for change_PK in change_SPK[1:]
        if (slopes_K := _fit_slopes(change_PK, points)) is not None
    ]
    if _fit_slopes(change_SPK[-1], points) is None:
        return None
    return np.asarray(np.median(np.stack(slopes_SK), axis=0))


def pool_variances(
    layers: Sequence[LayerMeasurements], points: Sequence[int]
) -> tuple[float | None, float | None]:
    """Return the variances of slopes between seeds, averaged over the layers of a check.

    Returns:
        The variance of the slopes of changes, and of the slopes of sizes at step 0; None if no
        layer has such a slope.
    """

    def pool(slopes: Iterable[NDArray[np.float64] | None]) -> float | None:
        variances = [float(slopes_K.var(ddof=1)) for slopes_K in slopes if slopes_K is not None]
        return sum(variances) / len(variances) if variances else None

    return (
        pool(_compute_typical_slopes(layer.change, points) for layer in layers),
        pool(_fit_slopes(layer.size[0], points) for layer in layers),
    )


def judge_slope(
    slope: Slope | None, expected: tuple[float, float], threshold_scale: float = 1.0
) -> Outcome:
    """Judge a slope by the smallest and largest expected slopes, with scaled thresholds."""
    if slope is None:
        return "cannot_tell"
    low, high = slope.interval
    if low > expected[1] + TOLERANCE * threshold_scale:
        return "blows_up"
    if high < expected[0] - TOLERANCE * threshold_scale:
        return "vanishes"
    slack = MISTAKE * threshold_scale
    is_inside = low > expected[0] - slack and high < expected[1] + slack
    return "passes" if is_inside else "cannot_tell"


def fit_alignment_slope(measured: LayerMeasurements, setting: CheckSettings) -> float:
    """Return the slope of the alignment of a matrix's updates with their inputs, from -1/2 to 0.

    The effect of an update on its own batch is its size times its alignment. In a correct
    parametrization the size follows the rate rule exactly, and the alignment tends to a constant as
    the width grows. In small models and with few tokens, much of the alignment is noise. Muon's
    updates have no such noise: on the span of their inputs, their effect equals their size.
    """
    if measured.role not in ("hidden", "readout") or _has_rate_by_shape(measured, setting):
        return 0.0
    effect_SPK = measured.update if measured.role == "hidden" else measured.change
    with np.errstate(divide="ignore", invalid="ignore"):
        aligned_SPK = effect_SPK / measured.rate
    slopes_K = _compute_typical_slopes(aligned_SPK, setting.points)
    # If the size is unknown, all of the effect may be noise
    return NOISE_SLOPE if slopes_K is None else min(max(float(slopes_K.mean()), NOISE_SLOPE), 0.0)


def _has_rate_by_shape(measured: LayerMeasurements, setting: CheckSettings) -> bool:
    return setting.parametrization.rates_by_shape and measured.role == "hidden"


def get_expected_change(
    layer: str, role: Role, setting: CheckSettings, fading: float
) -> tuple[float, float]:
    """Return the smallest and largest slope of the change in a correct parametrization.

    Args:
        layer: Name of the layer.
        role: Role of the layer.
        setting: Settings of the check.
        fading: Steepest `fit_alignment_slope` of the matrices up to this layer; for the readout,
            that of the readout alone.
    """
    if setting.axis == "depth":
        return _get_expected_depth_change(layer, role, setting, fading)
    rate = get_expected_rate(role, setting)
    if role in ("embedding", "readout"):
        return (rate + fading, rate) if role == "readout" else (rate, rate)
    # If the embedding's learning rate shrinks with width, so does the effect of its update on later
    # layers; the effects of their own updates do not.
    low = min(fading, get_expected_rate("embedding", setting))
    if role == "attention_logits":
        # The changes of queries and of keys are multiplied, so both fade; over the head dim, the
        # products add up at random or aligned.
        low = 2 * low - 0.5 * setting.head_dim_power
    return (low, 0.0)


def _get_expected_depth_change(
    layer: str, role: Role, setting: CheckSettings, fading: float
) -> tuple[float, float]:
    """Return the smallest and largest slope of the change over depth."""
    if role == "embedding":
        return (0.0, 0.0)
    if role == "readout":
        return (fading, 0.0)
    # The stream after the first block has one block's share of the change, or less if one branch
    # affects the next. The input of the last block lacks one block's share. Only layers after all
    # blocks are comparable between depths.
    if _is_within_blocks(layer):
        return (-2.0, 0.5)
    # The updates of the blocks add up at random or aligned. A norm divides by the size of the
    # stream, which fades at most with the root of the depth. With alpha 1/2, the branches of few
    # blocks still affect one another (measured: up to 0.25).
    high = 0.5 if role == "norm" else (1.0 - (setting.parametrization.depth_alpha or 1.0)) / 2
    return (-0.5, high)


def _is_within_blocks(layer: str) -> bool:
    """Return whether a layer of a check over depth comes before the end of the last block."""
    parts = layer.split(".")
    return any(place in parts for place in ("first", "middle", "last")) and not layer.endswith(
        ".last.stream"
    )


def get_expected_rate(role: Role, setting: CheckSettings) -> float:
    """Return the slope that the rate rule gives to the size of a layer's own update, whatever the
    data.
    """
    parametrization = setting.parametrization
    if role == "hidden" and setting.axis == "depth":
        # The learning rates in blocks scale as m_L^(alpha - 1) by design.
        return (parametrization.depth_alpha or 1.0) - 1.0
    has_inverse_root = (
        parametrization.width == "mup"
        and parametrization.embedding_rate == "inverse_root"
        and setting.axis == "width"
    )
    has_embedding_rate = role == "embedding" or (role == "readout" and setting.tied)
    return -0.5 if has_inverse_root and has_embedding_rate else 0.0


def get_expected_size(layer: str, role: Role, setting: CheckSettings) -> tuple[float, float]:
    """Return the smallest and largest slope of a layer's size at step 0."""
    if setting.axis == "depth":
        # With alpha 1, the output of one block shrinks with the depth, and the sum of all blocks,
        # which are random, with the root of the depth.
        if role == "stream":
            return (-1.0 if _is_within_blocks(layer) else -0.5, 0.0)
        # The multiplier of a branch in a user's model scales the output of its last matrix.
        return (
            (-(setting.parametrization.depth_alpha or 0.0), 0.0) if role == "hidden" else (0.0, 0.0)
        )
    if role == "readout":
        # Random weights on an input of fixed size: the logits shrink in every correct
        # parametrization.
        return (-1.0, 0.0)
    # Divided by head_dim, the product of random queries and keys fades with the root of head_dim.
    # Divided by the root, it keeps its size, and grows once training aligns them: too slowly for a
    # short check to notice.
    fading = -0.5 * setting.head_dim_power if role == "attention_logits" else 0.0
    return (fading, fading)


def judge_layer(measured: LayerMeasurements, setting: CheckSettings, fading: float) -> LayerVerdict:
    """Judge one layer by its change, its size at step 0, and the sizes of its own first and last
    update.

    The verdict is the worst of these outcomes. Its cause is a mistake of the layer's own weights;
    the cause is empty if they have none.

    Args:
        measured: Readings of the layer.
        setting: Settings of the check.
        fading: See `get_expected_change`.
    """
    points, level, role = setting.points, setting.level, measured.role
    slopes_K = _compute_typical_slopes(measured.change, points)
    final = None if slopes_K is None else _add_interval(slopes_K, level, setting.change_variance)
    start = fit_slope(measured.size[0], points, level, setting.start_variance)
    expected = get_expected_change(measured.layer, role, setting, fading)
    # A mistake in the scale of attention logits is a power of the head dim, not of the width
    threshold_scale = setting.head_dim_power or 1.0 if role == "attention_logits" else 1.0
    start_outcome: Outcome = (
        "passes"
        if start is None
        else judge_slope(start, get_expected_size(measured.layer, role, setting), threshold_scale)
    )
    rate, rate_outcomes = _judge_rate(measured, setting)
    # The change of the readout is the effect of its own update. If the size of this update is
    # known, the size is judged instead of the change, whose alignment may fade without a mistake.
    is_size_judged = role == "readout" and rate is not None and final is not None
    change_outcome = "passes" if is_size_judged else judge_slope(final, expected)
    worst = min((change_outcome, start_outcome, *rate_outcomes), key=ORDER.index)
    cause = _find_cause(
        measured, setting, start_outcome, rate_outcomes[0] if rate_outcomes else "passes"
    )
    if final is None:
        unmoved = [
            point
            for point, change_K in zip(points, measured.change[-1], strict=True)
            if not change_K.all()
        ]
        cause = cause or f"it did not move at {setting.axis} {', '.join(map(str, unmoved))}"
    return LayerVerdict(
        layer=measured.layer,
        role=role,
        change=_compute_geometric_means(measured.change[-1]),
        slope=final.slope if final else 0.0,
        interval=final.interval if final else (0.0, 0.0),
        expected=expected,
        start=start,
        update=_fit_first_slope(_get_own_effect(measured), setting),
        rate=rate,
        outcome=worst,
        cause=cause,
    )


def _compute_geometric_means(size_PK: NDArray[np.float64]) -> tuple[float, ...]:
    """Return the geometric mean over the seeds at each point, to five digits."""
    with np.errstate(divide="ignore"):
        means_P = np.exp(np.log(size_PK).mean(axis=1))
    return tuple(float(f"{mean:.5g}") for mean in means_P)


def _get_own_effect(measured: LayerMeasurements) -> NDArray[np.float64]:
    """Return the effect of a layer's own update on the batch, [S, P, K]; NaN for roles without a
    rate rule.
    """
    if measured.role in ("embedding", "readout"):
        return measured.change
    return measured.update if measured.role == "hidden" else np.full_like(measured.change, np.nan)


def _judge_rate(
    measured: LayerMeasurements, setting: CheckSettings
) -> tuple[Slope | None, list[Outcome]]:
    """Judge the size of a layer's own update against the rate rule.

    Returns:
        The slope of the first update's size, None if it is unknown; and the outcomes at the first
        update and at the last step, empty if the role has no rate rule or the layer did not move.
    """
    effect_SPK, rule = _get_own_effect(measured), get_expected_rate(measured.role, setting)
    # The effect on the batch shows the learning rate directly for an embedding, whose rows are the
    # output, and for Muon, whose update keeps the size of every input in the span of its gradient.
    # The size of an element of Muon's update depends on the gradient's rank instead.
    is_direct = measured.role == "embedding" or _has_rate_by_shape(measured, setting)
    size_SPK, expected = (effect_SPK if is_direct else measured.rate), (rule, rule)
    rate = _fit_first_slope(size_SPK, setting)
    if rate is None:
        size_SPK, expected = effect_SPK, (rule + NOISE_SLOPE, rule)
    first = _fit_first_slope(size_SPK, setting)
    last = fit_slope(size_SPK[-1], setting.points, setting.level)
    return rate, [judge_slope(slope, expected) for slope in (first, last) if slope is not None]


def _fit_first_slope(size_SPK: NDArray[np.float64], setting: CheckSettings) -> Slope | None:
    """Return the slope at the first recorded step at which the layer has moved at every point."""
    slopes = (fit_slope(size_PK, setting.points, setting.level) for size_PK in size_SPK[1:])
    return next((slope for slope in slopes if slope is not None), None)


def _find_cause(
    measured: LayerMeasurements, setting: CheckSettings, start: Outcome, rate: Outcome
) -> str:
    """Describe the mistake of the layer's own weights, at step 0 (outcome `start`) or in their
    first update (outcome `rate`); empty if there is none.
    """
    role, along = measured.role, setting.axis
    if role == "hidden":
        gain = judge_slope(fit_slope(measured.gain[0], setting.points, setting.level), (0.0, 0.0))
        mistakes = (
            [f"{INITIAL_STD} {_FALSE_SCALING[gain]} with fan-in"]
            if start in FLAGGED and gain in FLAGGED
            else []
        )
        # Muon's rate must not change with width.
        is_muon_growing = setting.parametrization.rates_by_shape and rate == "blows_up"
        fault = "grows" if is_muon_growing else _FALSE_SCALING.get(rate, "")
        if rate in FLAGGED:
            mistakes.append(f"hidden matrices' learning rate {fault} with {along}")
        return "; ".join(mistakes)
    if role == "embedding" and start in FLAGGED:
        return (
            f"the embedding's initial std {'grows' if start == 'blows_up' else 'shrinks'} with "
            f"{along}"
        )
    if role == "readout" and "blows_up" in (start, rate):
        return (
            "unscaled readout: its output multiplier (or learning rate) does not shrink with "
            f"{along}"
        )
    if role == "readout" and rate == "vanishes":
        return f"the readout's output multiplier (or learning rate) shrinks too fast with {along}"
    if role == "embedding" and rate in FLAGGED:
        return (
            f"the embedding's learning rate {'grows' if rate == 'blows_up' else 'shrinks'} with "
            f"{along}"
        )
    return ""
