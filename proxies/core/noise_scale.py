"""The gradient noise scale: the batch at which a gradient's noise is as large as the gradient.
Standard library only.

The gradient of a batch of B tokens has the expected squared norm |G|^2 + tr(S) / B, G being that
over all data and S the covariance of a token's (a sequence's times its length: the tokens of one
are not independent); two independent batches' gradients have the expected product |G|^2. So both
are had without bias, and B_simple = tr(S) / |G|^2 (arXiv 1812.06162, section 2 and appendix A).
Estimated is its inverse, |G|^2 / tr(S): the error of that does not grow with it, and where it
cannot be told from 0 the noise scale has no upper end.

The gradient is the plain one, before any optimizer. What Adam or Muon make of it has a critical
batch of its own, of this order of magnitude (docs/noise-scale.md).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

from proxies.core.checks import Checks

SHARE = 60
"""A run's looks take one in so many of its passes at most; a pass of theirs makes no update, so it
takes less."""
LEAST_PASSES, USUAL_PASSES, MOST_PASSES, MOST_LOOKS = 3, 12, 16, 5
"""Of a look; its precision grows with its passes and not with their root: a short run has one look,
not five poor ones."""
LAST_LOOK = 0.5
"""Of a run; the looks before it at halves of that each: what a noise scale follows is a power of
the tokens."""


def look_passes(num_steps: int, passes_per_step: int) -> dict[int, int]:
    """At which steps a run is looked at, and in how many passes; nowhere, where it is too short."""
    allowed = num_steps * passes_per_step // SHARE
    if allowed < LEAST_PASSES:
        return {}
    num_looks = min(MOST_LOOKS, max(1, allowed // USUAL_PASSES))
    passes = min(MOST_PASSES, allowed // num_looks)
    return {int(LAST_LOOK * num_steps / 2**back): passes for back in range(num_looks)}


@dataclass(frozen=True, kw_only=True, slots=True)
class NoiseLook:
    """Gradients of several independent parts of the data at the weights of one step."""

    step: int
    """Updates made."""
    num_sequences: int
    """Of each part."""
    gram: tuple[tuple[float, ...], ...]
    """Products of the parts' mean gradients, each with each, before clipping; up to one factor for
    all."""

    def __post_init__(self) -> None:
        checks = Checks(self)
        checks.whole("step", least=0)
        checks.whole("num_sequences")
        size = len(self.gram)
        checks.that(
            size >= 2 and all(len(row) == size for row in self.gram),
            "gram: must be square, for two parts or more",
        )
        checks.that(
            all(math.isfinite(value) for row in self.gram for value in row),
            "gram: a value is not finite",
        )
        checks.done()


@dataclass(frozen=True, kw_only=True, slots=True)
class NoiseScale:
    """In tokens, with its interval."""

    tokens: float | None
    """None: the gradient is not told from its noise."""
    low: float
    high: float | None
    """None: no upper end can be told."""


def _sums(look: NoiseLook, without: int | None = None) -> tuple[float, float]:
    """Estimates of |G|^2 and of a sequence's tr(S), of all parts or without one."""
    used = [i for i in range(len(look.gram)) if i != without]
    num = len(used)
    squares = math.fsum(look.gram[i][i] for i in used) / num
    products = math.fsum(look.gram[i][j] for i in used for j in used if i != j) / (num * (num - 1))
    return products, (squares - products) * look.num_sequences


def inverse_scale(looks: Sequence[NoiseLook], seq_len: int) -> tuple[float, float, int]:
    """|G|^2 / tr(S) per token over looks at neighbouring steps, its standard error and that one's
    degrees of freedom.

    The ratio of means, and the jackknife over parts within looks (a look without one of its parts,
    the others whole).

    Raises:
        ValueError: a look has less than three parts, or there is no noise.
    """
    if not looks or any(len(look.gram) < 3 for look in looks):
        raise ValueError("a look of three parts or more is needed")
    whole = [_sums(look) for look in looks]
    top, bottom = math.fsum(top for top, _ in whole), math.fsum(bottom for _, bottom in whole)
    if bottom <= 0:
        raise ValueError("the parts' gradients are equal: no noise")
    variance = 0.0
    for look, (own_top, own_bottom) in zip(looks, whole, strict=True):
        num = len(look.gram)
        ratios = []
        for part in range(num):
            less_top, less_bottom = _sums(look, part)
            ratios.append((top - own_top + less_top) / (bottom - own_bottom + less_bottom))
        mean = math.fsum(ratios) / num
        variance += (num - 1) / num * math.fsum((ratio - mean) ** 2 for ratio in ratios)
    freedom = sum(len(look.gram) - 1 for look in looks)
    return top / bottom / seq_len, math.sqrt(variance) / seq_len, freedom


def noise_scale(looks: Sequence[NoiseLook], seq_len: int, level: float = 0.9) -> NoiseScale:
    """Over looks at neighbouring steps, with the interval by Student's t on the inverse. Raises
    ValueError as above.
    """
    value, error, freedom = inverse_scale(looks, seq_len)
    reach = student_t(0.5 + level / 2, freedom) * error
    return NoiseScale(
        tokens=1 / value if value > 0 else None,
        low=1 / (value + reach) if value + reach > 0 else math.inf,
        high=1 / (value - reach) if value > reach else None,
    )


def split(part: tuple[float, float], batch: tuple[float, float]) -> tuple[float, float]:
    """Estimates of |G|^2 and of a token's tr(S), from a part of a batch and all of it: (tokens,
    squared norm) each.

    Raises:
        ValueError: the part is not smaller.
    """
    (part_tokens, part_square), (batch_tokens, batch_square) = part, batch
    if not 0 < part_tokens < batch_tokens:
        raise ValueError(
            f"a part of {part_tokens} tokens of a batch of {batch_tokens}: must be smaller"
        )
    signal = (batch_tokens * batch_square - part_tokens * part_square) / (
        batch_tokens - part_tokens
    )
    return signal, (part_square - batch_square) / (1 / part_tokens - 1 / batch_tokens)


def running_scale(splits: Sequence[tuple[float, float]], level: float = 0.9) -> NoiseScale | None:
    """Over the `split`s of many steps; None where no interval can be told.

    The interval is Fieller's of |G|^2 / tr(S), a ratio of two means measured together, with
    Student's t: all ratios r at which the mean of `signal - r noise` is not told from 0.
    """
    num = len(splits)
    if num < LEAST_POINTS:
        return None
    top, bottom = (math.fsum(values) / num for values in zip(*splits, strict=True))
    factor = student_t(0.5 + level / 2, num - 1) ** 2 / (num * (num - 1))
    top_variance = factor * math.fsum((a - top) ** 2 for a, _ in splits)
    bottom_variance = factor * math.fsum((b - bottom) ** 2 for _, b in splits)
    covariance = factor * math.fsum((a - top) * (b - bottom) for a, b in splits)
    square, half = bottom**2 - bottom_variance, top * bottom - covariance
    root = half**2 - square * (top**2 - top_variance)
    if bottom <= 0 or square <= 0 or root < 0:
        return None
    low, high = (half - math.sqrt(root)) / square, (half + math.sqrt(root)) / square
    return NoiseScale(
        tokens=bottom / top if top > 0 else None,
        low=1 / high if high > 0 else math.inf,
        high=1 / low if low > 0 else None,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class NoisePoint:
    """What the looks at a step say, on the way of a law."""

    tokens: float
    """Trained on before the step."""
    inverse: float
    """|G|^2 / tr(S) per token."""
    error: float
    """Its standard error."""


STEP_SCATTER = 0.4
"""Standard deviation, as a share, between the noise scales of one run at steps near each other,
beyond their errors: the weights' own swings (benchmarks/README.md). A look is of one step, a law of
them all."""
LEAST_POINTS = 5
_ROUNDS = 60


@dataclass(frozen=True, kw_only=True, slots=True)
class NoiseLaw:
    """The noise scale as a power of tokens trained on: its log is `log_scale` + `exponent` (log
    tokens - `centre`).
    """

    log_scale: float
    exponent: float
    centre: float
    covariance: tuple[float, float, float]
    """Of the two: variance of the first, covariance, variance of the second."""
    freedom: int
    level: float
    last: float
    """The most tokens of a point."""

    @property
    def exponent_interval(self) -> tuple[float, float]:
        """Of the exponent."""
        reach = self._quantile * math.sqrt(self.covariance[2])
        return self.exponent - reach, self.exponent + reach

    @property
    def _quantile(self) -> float:
        return student_t(0.5 + self.level / 2, self.freedom)

    def at(self, tokens: float) -> tuple[float, float, float]:
        """The noise scale in tokens after so many, and its interval.

        Beyond the last point the interval also holds what it was there: critical batches were seen
        to grow fast at first and then hardly (arXiv 2505.23971), and points of short runs do not
        show where that begins.
        """
        middle, low, high = self._on_the_line(tokens)
        _, last_low, last_high = self._on_the_line(min(tokens, self.last))
        return middle, min(low, last_low), max(high, last_high)

    def _on_the_line(self, tokens: float) -> tuple[float, float, float]:
        far = math.log(tokens) - self.centre
        variance = self.covariance[0] + 2 * far * self.covariance[1] + far**2 * self.covariance[2]
        middle, reach = (
            self.log_scale + self.exponent * far,
            self._quantile * math.sqrt(max(variance, 0.0)),
        )
        return math.exp(middle), math.exp(middle - reach), math.exp(min(middle + reach, 700.0))


def noise_law(points: Sequence[NoisePoint], level: float = 0.9) -> NoiseLaw | None:
    """The power law of points of several runs; None where they are too few, or at one length, or
    say nothing.

    Least squares on the inverse, whose errors are those of its measurement, also where it is not
    told from 0: no point is left out, as each logarithm would have to be. Errors grow where the
    points scatter more than they say.
    """
    xs = [math.log(point.tokens) for point in points]
    weights = [1 / point.error**2 for point in points if point.error > 0]
    if len(weights) < max(LEAST_POINTS, len(points)) or max(xs) - min(xs) < math.log(2):
        return None
    mean = math.fsum(w * p.inverse for w, p in zip(weights, points, strict=True)) / math.fsum(
        weights
    )
    if mean <= 0:
        return None
    centre = math.fsum(xs) / len(xs)
    level_log, slope = -math.log(mean), 0.0
    for _ in range(_ROUNDS):
        expected = [math.exp(-level_log - slope * (x - centre)) for x in xs]
        weights = [
            mu**2 / (p.error**2 + (STEP_SCATTER * mu) ** 2)
            for mu, p in zip(expected, points, strict=True)
        ]  # of the inverse as a share of what is expected
        off = [1 - p.inverse / mu for mu, p in zip(expected, points, strict=True)]
        normal = [
            math.fsum(w * (x - centre) ** k for w, x in zip(weights, xs, strict=True))
            for k in range(3)
        ]
        right = [
            math.fsum(w * o * (x - centre) ** k for w, o, x in zip(weights, off, xs, strict=True))
            for k in (0, 1)
        ]
        determinant = normal[0] * normal[2] - normal[1] ** 2
        if not determinant > 0:
            return None
        steps = (
            (normal[2] * right[0] - normal[1] * right[1]) / determinant,
            (normal[0] * right[1] - normal[1] * right[0]) / determinant,
        )
        level_log += max(-1.0, min(1.0, steps[0]))
        slope += max(-1.0, min(1.0, steps[1]))
    if max(map(abs, steps)) > 1e-6 or abs(slope) > 5:
        return None
    freedom = len(points) - 2
    spread = max(1.0, math.fsum(w * o**2 for w, o in zip(weights, off, strict=True)) / freedom)
    covariance = (
        spread * normal[2] / determinant,
        -spread * normal[1] / determinant,
        spread * normal[0] / determinant,
    )
    return NoiseLaw(
        log_scale=level_log,
        exponent=slope,
        centre=centre,
        covariance=covariance,
        freedom=freedom,
        level=level,
        last=max(point.tokens for point in points),
    )


def student_t(share: float, freedom: int) -> float:
    """The quantile of Student's t, by the expansion about the normal one (Abramowitz and Stegun
    26.7.5): within .2 % from 3 degrees of freedom on, at shares up to .975.
    """
    z = NormalDist().inv_cdf(share)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + math.fsum(term / freedom**power for power, term in enumerate(terms, start=1))
