"""The coordinate check's verdict on one layer: slopes against width (or depth), intervals over seeds, causes.

A slope is that of log2(size) per doubling, by least squares for each seed, with a t-interval over the seeds. Thresholds
are fixed, not fitted: the classic mistakes have slopes of a half and more. The size of a matrix's own update follows
the rate rule exactly, whatever the data; the change of an output is that size times the alignment of updates with their
inputs, which fades in small models without any mistake and is measured. No torch: the record is read without it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

from proxies.core.rules import Parametrization

Axis = Literal["width", "depth"]
Role = Literal["embedding", "hidden", "readout", "norm", "stream", "attention_logits"]
Outcome = Literal["passes", "blows_up", "vanishes", "cannot_tell"]
ORDER: tuple[Outcome, ...] = ("blows_up", "vanishes", "cannot_tell", "passes")
"""Worst first."""
FLAGGED: tuple[Outcome, ...] = ("blows_up", "vanishes")
NOISE_SLOPE = -0.5
"""Slope of the effect of an update on unrelated input, at a right rate: elements as 1 / fan-in, added at random. No
effect of a right rate fades faster."""
_FALSE_SCALING: dict[Outcome, str] = {"blows_up": "does not shrink", "vanishes": "shrinks too fast"}
INITIAL_STD = "hidden matrices' initial std"

MISTAKE = 0.5
"""The smallest slope, in octaves per doubling, of a classic mistake (a root of the width too much)."""
TOLERANCE = 0.25
"""A slope surely so far beyond the expected ones is a mistake; surely within `MISTAKE` of them, a layer passes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerReading:
    """One layer at one step. Sizes are mean absolute values over the batch that the first update was made from."""

    layer: str
    role: Role
    size: float
    """Of the output."""
    change: float
    """Of the output less the output at step 0; of the readout only what its own update makes of its input at step
    0."""
    update: float | None
    """Effect of a matrix's own update so far on its input at step 0, over that input's size; None for other roles."""
    gain: float | None
    """Of the output over that of the input; None without parameters."""
    rate: float | None
    """Effect of that update on unrelated input (its Frobenius norm, by sampling) times the root of the fan-in; of the
    readout not over the input's size, so that its multiplier counts. Of an AdamW update it is the size of an element
    times the fan-in, whatever the data: the rate rule itself. None for other roles."""
    head_dim: int = 0
    """Of attention logits: the width of a query."""

    @property
    def finite(self) -> bool:
        """Whether the sizes are finite numbers."""
        return math.isfinite(self.size) and math.isfinite(self.change)


@dataclass(frozen=True, kw_only=True, slots=True)
class Slope:
    """The slope of log2(size) per doubling of the axis."""

    slope: float
    interval: tuple[float, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerVerdict:
    """One layer: how its change at the last step, and its size at step 0, go with the axis."""

    layer: str
    role: Role
    change: tuple[float, ...]
    """Mean absolute change of the output since step 0 (of the readout: by its own update) at the last step, at each
    width (or depth): geometric means over seeds, to five digits."""
    slope: float
    """Of the change, the median over the steps (of each seed); 0 where the layer did not move, and cannot be judged."""
    interval: tuple[float, float]
    expected: tuple[float, float]
    """Least and largest slope of a right parametrization: (0, 0) but for a choice by design, and for the fading of the
    updates' alignment with their inputs, as measured."""
    start: Slope | None
    """Of the size at step 0; None where a size is zero."""
    update: Slope | None
    """Slope of the effect of its own first update on the batch it was made from (a hidden matrix's over the size of its
    input). None for roles without a rate rule, and where nothing moved."""
    rate: Slope | None
    """Slope of the size of its own first update against the rate rule, before mistakes elsewhere reach it through the
    gradients; None where `update` is, and where the size is not known."""
    outcome: Outcome
    cause: str
    """In words; empty for a layer that passes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """One layer's readings (`LayerReading`), each an array [S, P, K]: S steps, the first 0, P widths or
    depths, K seeds.
    """

    layer: str
    role: Role
    size: NDArray[np.float64]
    change: NDArray[np.float64]
    update: NDArray[np.float64]
    gain: NDArray[np.float64]
    rate: NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckSettings:
    """What the readings are judged against."""

    axis: Axis
    points: tuple[int, ...]
    """Widths or depths."""
    level: float
    parametrization: Parametrization
    head_dim_power: float
    """The head dim goes as this power of the width; 0 where it is fixed."""
    tied: bool = False
    """Whether the readout shares the embedding's matrix, and so its learning rate."""


def _slopes(size_PK: NDArray[np.float64], points: Sequence[int]) -> NDArray[np.float64] | None:
    """The slope of each seed, [K]; None where a size is not a positive number."""
    if not (np.isfinite(size_PK).all() and (size_PK > 0).all()):
        return None
    octaves_P = np.log2(np.array(points, dtype=float))
    centred_P = octaves_P - octaves_P.mean()
    slopes_K: NDArray[np.float64] = centred_P @ np.log2(size_PK) / (centred_P @ centred_P)
    return slopes_K


def _with_interval(slopes_K: NDArray[np.float64], level: float, pooled: float | None = None) -> Slope:
    """Return the mean with its t-interval; `pooled` is a variance between seeds that counts as much as the slopes' own.

    Few seeds tell a layer's variance badly: it is shrunk towards that of all layers, which doubles the degrees of
    freedom (moderated t, Smyth 2004, doi 10.2202/1544-6115.1027).
    """
    num_seeds, slope, variance = len(slopes_K), float(slopes_K.mean()), float(slopes_K.var(ddof=1))
    free = num_seeds - 1
    if pooled is not None:
        free, variance = 2 * free, (variance + pooled) / 2
    half = float(stdtrit(free, 0.5 + level / 2)) * math.sqrt(variance / num_seeds)
    return Slope(slope=slope, interval=(slope - half, slope + half))


def fit_slope(
    size_PK: NDArray[np.float64], points: Sequence[int], level: float, pooled: float | None = None
) -> Slope | None:
    """Slope over the points with its t-interval over seeds; None where a size is not a positive number."""
    slopes_K = _slopes(size_PK, points)
    return None if slopes_K is None else _with_interval(slopes_K, level, pooled)


def _typical_slopes(change_SPK: NDArray[np.float64], points: Sequence[int]) -> NDArray[np.float64] | None:
    """Return the median over the steps, of each seed, [K]; None where the layer stays still at the last.

    A mistake shows at every step; at a high rate the last ones alone can be chaos of the smallest models.
    """
    slopes_SK = [slopes_K for change_PK in change_SPK[1:] if (slopes_K := _slopes(change_PK, points)) is not None]
    if _slopes(change_SPK[-1], points) is None:
        return None
    median_K: NDArray[np.float64] = np.median(np.stack(slopes_SK), axis=0)
    return median_K


@dataclass(frozen=True, kw_only=True, slots=True)
class SeedVariances:
    """Variance of slopes between seeds, the mean over the layers of a check; None without a slope."""

    change: float | None = None
    start: float | None = None


def pool_variances(layers: Sequence[Measured], points: Sequence[int]) -> SeedVariances:
    """Return the variances between seeds that are common to the layers of a check."""

    def pool(slopes: Iterable[NDArray[np.float64] | None]) -> float | None:
        variances = [float(slopes_K.var(ddof=1)) for slopes_K in slopes if slopes_K is not None]
        return sum(variances) / len(variances) if variances else None

    return SeedVariances(
        change=pool(_typical_slopes(layer.change, points) for layer in layers),
        start=pool(_slopes(layer.size[0], points) for layer in layers),
    )


def judge_slope(found: Slope | None, expected: tuple[float, float], share: float = 1.0) -> Outcome:
    """What a slope says, against the least and the largest that are expected; the thresholds taken times `share`."""
    if found is None:
        return "cannot_tell"
    low, high = found.interval
    if low > expected[1] + TOLERANCE * share:
        return "blows_up"
    if high < expected[0] - TOLERANCE * share:
        return "vanishes"
    inside = low > expected[0] - MISTAKE * share and high < expected[1] + MISTAKE * share
    return "passes" if inside else "cannot_tell"


def alignment_slope(measured: Measured, setting: CheckSettings) -> float:
    """Return how fast the alignment of a matrix's updates with their inputs fades along the axis, -1/2 to 0.

    The effect of an update on the batch it was made from is its size times its alignment. In a right parametrization
    the size follows the rate rule exactly, and the alignment tends to a constant as width grows; in small models, and
    with few tokens, much of it is the noise of unrelated inputs. Muon's updates have none: on the span of their inputs
    their size is the effect.
    """
    if measured.role not in ("hidden", "readout") or _by_muon(measured, setting):
        return 0.0
    effect_SPK = measured.update if measured.role == "hidden" else measured.change
    with np.errstate(divide="ignore", invalid="ignore"):
        aligned_SPK = effect_SPK / measured.rate
    slopes_K = _typical_slopes(aligned_SPK, setting.points)
    # Without a known size all of the noise may be there
    return NOISE_SLOPE if slopes_K is None else min(max(float(slopes_K.mean()), NOISE_SLOPE), 0.0)


def _by_muon(measured: Measured, setting: CheckSettings) -> bool:
    return setting.parametrization.by_muon and measured.role == "hidden"


def expected_change(layer: str, role: Role, setting: CheckSettings, fading: float = 0.0) -> tuple[float, float]:
    """Return the least and largest slope of the change in a right parametrization.

    Args:
        layer: its name.
        role: of the layer.
        setting: of the check.
        fading: the steepest `alignment_slope` of the matrices up to this layer; of the readout, its own.
    """
    if setting.axis == "depth":
        return _expected_depth_change(layer, role, setting, fading)
    rate = expected_rate(role, setting)
    if role in ("embedding", "readout"):
        return (rate + fading, rate) if role == "readout" else (rate, rate)
    # What the embedding's update makes of later layers fades with it, their own updates do not.
    low = min(fading, expected_rate("embedding", setting))
    if role == "attention_logits":
        # Fading changes of queries and of keys are multiplied; over head_dim they add up at random or aligned.
        low = 2 * low - 0.5 * setting.head_dim_power
    return (low, 0.0)


def _expected_depth_change(layer: str, role: Role, setting: CheckSettings, fading: float) -> tuple[float, float]:
    """Return the least and largest slope of the change over depths."""
    if role == "embedding":
        return (0.0, 0.0)
    if role == "readout":
        return (fading, 0.0)
    # The first block's stream carries one block's share of the change, or a share of that where one branch moves the
    # next; what enters the last block lacks one. Only what comes after all blocks is compared like with like.
    if _is_within_blocks(layer):
        return (-2.0, 0.5)
    # The blocks' updates add up at random or aligned. A norm divides by the stream's size, which fades with the root of
    # the depth at most; with alpha 1/2, branches of few blocks still move one another (measured: up to 0.25).
    grows = 0.5 if role == "norm" else (1.0 - (setting.parametrization.depth_alpha or 1.0)) / 2
    return (-0.5, grows)


def _is_within_blocks(layer: str) -> bool:
    """Return whether a layer of a check over depths comes before the end of the last block."""
    parts = layer.split(".")
    return any(place in parts for place in ("first", "middle", "last")) and not layer.endswith(".last.stream")


def expected_rate(role: Role, setting: CheckSettings) -> float:
    """Return the slope of the size of a layer's own update: the rate rule, which no data changes."""
    chosen = setting.parametrization
    if role == "hidden" and setting.axis == "depth":
        # Blocks' rates shrink as m_L^(alpha - 1): by choice.
        return (chosen.depth_alpha or 1.0) - 1.0
    rooted = chosen.width == "mup" and chosen.embedding_rate == "inverse_root" and setting.axis == "width"
    return -0.5 if rooted and (role == "embedding" or (role == "readout" and setting.tied)) else 0.0


def expected_size(layer: str, role: Role, setting: CheckSettings) -> tuple[float, float]:
    """Return the least and largest slope of a layer's size at step 0."""
    if setting.axis == "depth":
        # With alpha 1 what random blocks add fades with the root of the depth, and what one block adds with the depth.
        if role == "stream":
            return (-1.0 if _is_within_blocks(layer) else -0.5, 0.0)
        # The multiplier of a user's branch acts on the output of its last matrix.
        return (-(setting.parametrization.depth_alpha or 0.0), 0.0) if role == "hidden" else (0.0, 0.0)
    if role == "readout":
        return (-1.0, 0.0)  # random weights against an input of fixed size: fades in every right parametrization
    # Random queries and keys: over head_dim their product fades with its root. Over its root it keeps its size, and
    # grows once training aligns them: too slowly for a short check to see in the change.
    fading = -0.5 * setting.head_dim_power if role == "attention_logits" else 0.0
    return (fading, fading)


def judge_layer(
    measured: Measured, setting: CheckSettings, fading: float, variances: SeedVariances | None = None
) -> LayerVerdict:
    """Judge one layer: the worst of its change, its size at step 0, and the size of its own first and last update.

    The cause is what the layer's own weights do wrong; empty where that is nothing.

    Args:
        measured: its readings.
        setting: of the check.
        fading: as in `expected_change`.
        variances: of the check's layers.
    """
    points, level, role = setting.points, setting.level, measured.role
    variances = variances or SeedVariances()
    slopes_K = _typical_slopes(measured.change, points)
    final = None if slopes_K is None else _with_interval(slopes_K, level, variances.change)
    start = fit_slope(measured.size[0], points, level, variances.start)
    expected = expected_change(measured.layer, role, setting, fading)
    share = setting.head_dim_power or 1.0 if role == "attention_logits" else 1.0
    start_outcome: Outcome = (
        "passes" if start is None else judge_slope(start, expected_size(measured.layer, role, setting), share)
    )
    rate, rate_outcomes = _judge_rate(measured, setting)
    # The readout's change is its own update's: of a known size, and its alignment is no mistake
    explained = role == "readout" and rate is not None and final is not None
    change_outcome: Outcome = "passes" if explained else judge_slope(final, expected)
    worst = min((change_outcome, start_outcome, *rate_outcomes), key=ORDER.index)
    cause = _cause(measured, setting, start_outcome, rate_outcomes[0] if rate_outcomes else "passes")
    if final is None:
        still = [point for point, change_K in zip(points, measured.change[-1], strict=True) if not change_K.all()]
        cause = cause or f"it did not move at {setting.axis} {', '.join(map(str, still))}"
    return LayerVerdict(
        layer=measured.layer,
        role=role,
        change=_geometric(measured.change[-1]),
        slope=final.slope if final else 0.0,
        interval=final.interval if final else (0.0, 0.0),
        expected=expected,
        start=start,
        update=_first_slope(_own_effect(measured), setting),
        rate=rate,
        outcome=worst,
        cause=cause,
    )


def _geometric(size_PK: NDArray[np.float64]) -> tuple[float, ...]:
    with np.errstate(divide="ignore"):
        means_P = np.exp(np.log(size_PK).mean(axis=1))
    return tuple(float(f"{mean:.5g}") for mean in means_P)


def _own_effect(measured: Measured) -> NDArray[np.float64]:
    """Return the effect of a layer's own update on the trained batch, [S, P, K]; NaN for roles without a rate rule."""
    if measured.role in ("embedding", "readout"):
        return measured.change
    return measured.update if measured.role == "hidden" else np.full_like(measured.change, np.nan)


def _judge_rate(measured: Measured, setting: CheckSettings) -> tuple[Slope | None, list[Outcome]]:
    """Judge the size of a layer's own update against the rate rule.

    Returns:
        The slope of its first update's size, None if that is not known, and the outcomes at the first update and at
        the last step; none where there is no rate rule, or nothing moved.
    """
    effect_SPK, wanted = _own_effect(measured), expected_rate(measured.role, setting)
    # An embedding's row is used as it is. A Muon update keeps the size of every input in the span of its gradient, so
    # there the trained batch shows its rate; the size of its elements depends on the gradient's rank.
    direct = measured.role == "embedding" or _by_muon(measured, setting)
    size_SPK, expected = (effect_SPK if direct else measured.rate), (wanted, wanted)
    rate = _first_slope(size_SPK, setting)
    if rate is None:
        size_SPK, expected = effect_SPK, (wanted + NOISE_SLOPE, wanted)
    first, last = _first_slope(size_SPK, setting), fit_slope(size_SPK[-1], setting.points, setting.level)
    return rate, [judge_slope(slope, expected) for slope in (first, last) if slope is not None]


def _first_slope(size_SPK: NDArray[np.float64], setting: CheckSettings) -> Slope | None:
    """Return the slope at the first recorded step at which the layer moved everywhere."""
    slopes = (fit_slope(size_PK, setting.points, setting.level) for size_PK in size_SPK[1:])
    return next((slope for slope in slopes if slope is not None), None)


def _cause(measured: Measured, setting: CheckSettings, start: Outcome, rate: Outcome) -> str:
    """What the layer's own weights do wrong, at the start or by their own first update; empty if nothing."""
    role, along = measured.role, setting.axis
    if role == "hidden":
        gain = judge_slope(fit_slope(measured.gain[0], setting.points, setting.level), (0.0, 0.0))
        said = [f"{INITIAL_STD} {_FALSE_SCALING[gain]} with fan-in"] if start in FLAGGED and gain in FLAGGED else []
        grows = setting.parametrization.by_muon and rate == "blows_up"  # Muon's must stay, and not shrink
        word = "grows" if grows else _FALSE_SCALING.get(rate, "")
        said += [f"hidden matrices' learning rate {word} with {along}"] if rate in FLAGGED else []
        return "; ".join(said)
    if role == "embedding" and start in FLAGGED:
        return f"the embedding's initial std {'grows' if start == 'blows_up' else 'shrinks'} with {along}"
    if role == "readout" and "blows_up" in (start, rate):
        return f"unscaled readout: its output multiplier (or learning rate) does not shrink with {along}"
    if role == "readout" and rate == "vanishes":
        return f"the readout's output multiplier (or learning rate) shrinks too fast with {along}"
    if role == "embedding" and rate in FLAGGED:
        return f"the embedding's learning rate {'grows' if rate == 'blows_up' else 'shrinks'} with {along}"
    return ""
