"""The coordinate check's verdict on one layer: slopes against width (or depth), intervals over seeds, causes.

A slope is that of log2(size) per doubling, by least squares for each seed, with a t-interval over the seeds. Thresholds
are fixed, not fitted: the classic mistakes have slopes of a half and more. No torch: the record is read without it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
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
FINITE_BATCH = -0.2
"""Slope of a hidden matrix's own update as measured in right parametrizations (-0.25 to 0.07): with few tokens in a
batch, an update is less aligned with its input the wider that is."""
_FALSE_SCALING: dict[Outcome, str] = {"blows_up": "does not shrink", "vanishes": "shrinks too fast"}
INITIAL_STD = "hidden matrices' initial std"

MISTAKE = 0.5
"""The smallest slope, in octaves per doubling, of a classic mistake (a root of the width too much)."""
TOLERANCE = 0.25
"""A slope surely so far beyond the expected ones is a mistake; surely within `MISTAKE` of them, a layer passes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerReading:
    """One layer at one step. Sizes are mean absolute values over the probe batch."""

    layer: str
    role: Role
    size: float
    """Of the output."""
    change: float
    """Of the output less the output at step 0; of the readout only what its own update makes of its input at step
    0."""
    update: float | None
    """Of a matrix: of what its own update so far makes of its input at step 0, over that input's size. The rate by
    itself, whatever the other layers do; None for other roles."""
    gain: float | None
    """Of the output over that of the input; None without parameters."""
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
    """Least and largest slope of a right parametrization: (0, 0) but for a choice by design."""
    start: Slope | None
    """Of the size at step 0; None where a size is zero."""
    update: Slope | None
    """Of its own first update's effect (a hidden matrix's over the size of its input): the rate by itself, before
    mistakes elsewhere reach it through the gradients. None for roles without a rate rule, and where nothing moved."""
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


def _slopes(size_PK: NDArray[np.float64], points: Sequence[int]) -> NDArray[np.float64] | None:
    """The slope of each seed, [K]; None where a size is not a positive number."""
    if not (np.isfinite(size_PK).all() and (size_PK > 0).all()):
        return None
    octaves_P = np.log2(np.array(points, dtype=float))
    centred_P = octaves_P - octaves_P.mean()
    slopes_K: NDArray[np.float64] = centred_P @ np.log2(size_PK) / (centred_P @ centred_P)
    return slopes_K


def _with_interval(slopes_K: NDArray[np.float64], level: float) -> Slope:
    num_seeds, slope = len(slopes_K), float(slopes_K.mean())
    half = float(stdtrit(num_seeds - 1, 0.5 + level / 2) * slopes_K.std(ddof=1) / math.sqrt(num_seeds))
    return Slope(slope=slope, interval=(slope - half, slope + half))


def fitted(size_PK: NDArray[np.float64], points: Sequence[int], level: float) -> Slope | None:
    """Slope over the points with its t-interval over seeds; None where a size is not a positive number."""
    slopes_K = _slopes(size_PK, points)
    return None if slopes_K is None else _with_interval(slopes_K, level)


def _typical(change_SPK: NDArray[np.float64], points: Sequence[int], level: float) -> Slope | None:
    """The median over the steps, of each seed; None where the layer stays still at the last.

    A mistake shows at every step; at a high rate the last ones alone can be chaos of the smallest models.
    """
    slopes_SK = [slopes_K for change_PK in change_SPK[1:] if (slopes_K := _slopes(change_PK, points)) is not None]
    if _slopes(change_SPK[-1], points) is None:
        return None
    return _with_interval(np.median(np.stack(slopes_SK), axis=0), level)


def ruled(found: Slope | None, expected: tuple[float, float], share: float = 1.0) -> Outcome:
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


def expected_change(layer: str, role: Role, setting: CheckSettings) -> tuple[float, float]:
    """Slopes of the change that a right parametrization has, least and largest: (0, 0) unless by choice or place."""
    chosen = setting.parametrization
    if setting.axis == "depth":
        # The first block's stream carries one block's share of the change, and what enters the last lacks one: only
        # what comes after all blocks is compared like with like. Inside them, their own updates are.
        within = any(place in layer.split(".") for place in ("first", "middle", "last"))
        return (-1.0, 0.5) if within and not layer.endswith(".last.stream") else (0.0, 0.0)
    if chosen.width == "mup" and chosen.embedding_rate == "inverse_root" and role != "readout":
        # What the embedding's update makes of later layers fades with it, their own updates do not.
        return (-0.5, -0.5 if role == "embedding" else 0.0)
    return (-0.5 * setting.head_dim_power, 0.0) if role == "attention_logits" else (0.0, 0.0)


def expected_update(role: Role, setting: CheckSettings) -> tuple[float, float]:
    """Slopes of a layer's own first update, least and largest."""
    chosen = setting.parametrization
    if role == "hidden" and setting.axis == "depth":
        # Blocks' rates shrink as m_L^(alpha - 1): by choice.
        return ((chosen.depth_alpha or 1.0) - 1.0, 0.0)
    if role == "hidden":
        return (FINITE_BATCH, 0.0)
    return expected_change("", role, setting)


def expected_size(role: Role, setting: CheckSettings) -> tuple[float, float]:
    """Slopes of the size at step 0, least and largest."""
    if setting.axis == "depth":
        # With alpha 1 what random blocks add fades with the root of the depth.
        return (-0.5, 0.0) if role == "stream" else (0.0, 0.0)
    if role == "readout":
        return (-1.0, 0.0)  # random weights against an input of fixed size: fades in every right parametrization
    # Random queries and keys: over head_dim their product fades with its root. Over its root it keeps its size, and
    # grows once training aligns them: too slowly for a short check to see in the change.
    fading = -0.5 * setting.head_dim_power if role == "attention_logits" else 0.0
    return (fading, fading)


def judged(measured: Measured, setting: CheckSettings) -> LayerVerdict:
    """The verdict on one layer: the worst of its last change, its size at step 0, and its own first update.

    The cause is what the layer's own weights do wrong; empty where that is nothing.
    """
    points, level = setting.points, setting.level
    final = _typical(measured.change, points, level)
    start = fitted(measured.size[0], points, level)
    expected = expected_change(measured.layer, measured.role, setting)
    share = setting.head_dim_power or 1.0 if measured.role == "attention_logits" else 1.0
    start_outcome: Outcome = "passes" if start is None else ruled(start, expected_size(measured.role, setting), share)
    update = _first_update(measured, setting)
    update_outcome: Outcome = "passes" if update is None else ruled(update, expected_update(measured.role, setting))
    worst = min((ruled(final, expected), start_outcome, update_outcome), key=ORDER.index)
    cause = _cause(measured, setting, start_outcome, update_outcome)
    if final is None:
        still = [point for point, change_K in zip(points, measured.change[-1], strict=True) if not change_K.all()]
        cause = cause or f"it did not move at {setting.axis} {', '.join(map(str, still))}"
    return LayerVerdict(
        layer=measured.layer,
        role=measured.role,
        change=_geometric(measured.change[-1]),
        slope=final.slope if final else 0.0,
        interval=final.interval if final else (0.0, 0.0),
        expected=expected,
        start=start,
        update=update,
        outcome=worst,
        cause=cause,
    )


def _geometric(size_PK: NDArray[np.float64]) -> tuple[float, ...]:
    with np.errstate(divide="ignore"):
        means_P = np.exp(np.log(size_PK).mean(axis=1))
    return tuple(float(f"{mean:.5g}") for mean in means_P)


def _first_update(measured: Measured, setting: CheckSettings) -> Slope | None:
    """The slope at the first recorded step at which the layer moved everywhere."""
    if measured.role not in ("embedding", "hidden", "readout"):
        return None
    updates_SPK = measured.update if measured.role == "hidden" else measured.change
    found = (fitted(update_PK, setting.points, setting.level) for update_PK in updates_SPK[1:])
    return next((slope for slope in found if slope is not None), None)


def _cause(measured: Measured, setting: CheckSettings, start: Outcome, update: Outcome) -> str:
    """What the layer's own weights do wrong, at the start or by their own first update; empty if nothing."""
    role, along = measured.role, setting.axis
    if role == "hidden":
        gain = ruled(fitted(measured.gain[0], setting.points, setting.level), (0.0, 0.0))
        said = [f"{INITIAL_STD} {_FALSE_SCALING[gain]} with fan-in"] if start in FLAGGED and gain in FLAGGED else []
        grows = setting.parametrization.by_muon and update == "blows_up"  # Muon's must stay, and not shrink
        word = "grows" if grows else _FALSE_SCALING.get(update, "")
        said += [f"hidden matrices' learning rate {word} with {along}"] if update in FLAGGED else []
        return "; ".join(said)
    if role == "embedding" and start in FLAGGED:
        return f"the embedding's initial std {'grows' if start == 'blows_up' else 'shrinks'} with {along}"
    if role == "readout" and "blows_up" in (start, update):
        return f"unscaled readout: its output multiplier (or learning rate) does not shrink with {along}"
    if role == "readout" and update == "vanishes":
        return f"the readout's output multiplier (or learning rate) shrinks too fast with {along}"
    if role == "embedding" and update in FLAGGED:
        return f"the embedding's learning rate {'grows' if update == 'blows_up' else 'shrinks'} with {along}"
    return ""
