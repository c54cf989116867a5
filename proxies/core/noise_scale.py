"""The gradient noise scale: the batch at which the noise of a gradient is as large as the gradient.

The gradient of a batch of B tokens has the expected squared norm |G|^2 + tr(S) / B. G is the
gradient over all data. S is the covariance of a token's gradient. The tokens of a sequence are not
independent, so S is defined by sequences: the covariance of a sequence's mean gradient, times the
length of the sequence. The gradients of two independent batches have the expected inner product
|G|^2. So both |G|^2 and tr(S) are estimated without bias, and the noise scale is
B_simple = tr(S) / |G|^2 (arXiv 1812.06162, section 2 and appendix A).

This module estimates the inverse of the noise scale, |G|^2 / tr(S), because the error of the
inverse does not grow with its value. If the inverse cannot be distinguished from 0, the interval of
the noise scale has no upper end.

The gradient is taken before any optimizer changes it. The updates of Adam or Muon have a critical
batch of their own, of the same order of magnitude (docs/noise-scale.md).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

from forerun._proxies.core.checks import Checks

# ---- Measurements during a run ----

RUN_PASSES_PER_LOOK_PASS = 60
"""Minimum number of passes of a run for each pass of a look, so that looks take little of its time.
A look is one measurement of the noise, by several forward and backward passes without an update."""
MIN_PASSES, USUAL_PASSES, MAX_PASSES = 3, 12, 16
"""Numbers of passes of a look. The precision of a look grows in proportion to its passes, not to
their root. So a short run has one look rather than several imprecise looks."""
MAX_LOOKS = 5
LAST_LOOK = 0.5
"""Share of the run before the last look. Each earlier look is at half the steps of the next look,
because the noise scale follows a power of the tokens."""


def plan_looks(num_steps: int, passes_per_step: int) -> dict[int, int]:
    """Return the number of passes of each look by its step; empty if the run is too short."""
    max_passes = num_steps * passes_per_step // RUN_PASSES_PER_LOOK_PASS
    if max_passes < MIN_PASSES:
        return {}
    num_looks = min(MAX_LOOKS, max(1, max_passes // USUAL_PASSES))
    passes = min(MAX_PASSES, max_passes // num_looks)
    return {int(LAST_LOOK * num_steps / 2**back): passes for back in range(num_looks)}


@dataclass(frozen=True, kw_only=True, slots=True)
class NoiseLook:
    """Gradients of several independent parts of the data, at the weights of one step."""

    step: int
    """Updates made before the look."""
    num_sequences: int
    """Sequences of each part."""
    gram: tuple[tuple[float, ...], ...]
    """Gram matrix of the parts' mean gradients before clipping, up to a common factor: element
    (i, j) is the inner product of the gradients of parts i and j."""

    def __post_init__(self) -> None:
        checks = Checks(self)
        checks.require_whole("step", least=0)
        checks.require_whole("num_sequences")
        size = len(self.gram)
        checks.require(
            size >= 2 and all(len(row) == size for row in self.gram),
            "gram: must be square, for two parts or more",
        )
        checks.require(
            all(math.isfinite(value) for row in self.gram for value in row),
            "gram: a value is not finite",
        )
        checks.raise_problems()


# ---- Estimates ----


@dataclass(frozen=True, kw_only=True, slots=True)
class NoiseScale:
    """A noise scale in tokens, with its interval."""

    tokens: float | None
    """Estimate; None if the gradient is not distinguished from its noise."""
    low: float
    high: float | None
    """Upper end of the interval; None if the interval has no upper end."""


def estimate_inverse_scale(looks: Sequence[NoiseLook], seq_len: int) -> tuple[float, float, int]:
    """Estimate |G|^2 / tr(S) per token from looks at nearby steps.

    The estimate is a ratio of means. Its standard error is a jackknife: the ratio is computed again
    without one part of one look, for every part of every look.

    Returns:
        The estimate, its standard error, and the degrees of freedom of this error.

    Raises:
        ValueError: A look has fewer than three parts, or there is no noise.
    """
    if not looks or any(len(look.gram) < 3 for look in looks):
        raise ValueError("a look of three parts or more is needed")
    estimates = [_estimate_look_moments(look) for look in looks]
    signal = math.fsum(signal for signal, _ in estimates)
    noise = math.fsum(noise for _, noise in estimates)
    if noise <= 0:
        raise ValueError("the parts' gradients are equal: no noise")
    variance = 0.0
    for look, (look_signal, look_noise) in zip(looks, estimates, strict=True):
        num_parts = len(look.gram)
        ratios = []
        for part in range(num_parts):
            rest_signal, rest_noise = _estimate_look_moments(look, without=part)
            ratios.append((signal - look_signal + rest_signal) / (noise - look_noise + rest_noise))
        mean = math.fsum(ratios) / num_parts
        squares = math.fsum((ratio - mean) ** 2 for ratio in ratios)
        variance += (num_parts - 1) / num_parts * squares
    freedom = sum(len(look.gram) - 1 for look in looks)
    return signal / noise / seq_len, math.sqrt(variance) / seq_len, freedom


def _estimate_look_moments(look: NoiseLook, without: int | None = None) -> tuple[float, float]:
    """Estimate |G|^2 and a sequence's tr(S) from the parts of a look, or from all parts but one."""
    parts = [i for i in range(len(look.gram)) if i != without]
    num_parts = len(parts)
    squares = math.fsum(look.gram[i][i] for i in parts) / num_parts
    products = math.fsum(look.gram[i][j] for i in parts for j in parts if i != j)
    products /= num_parts * (num_parts - 1)
    return products, (squares - products) * look.num_sequences


def estimate_noise_scale(
    looks: Sequence[NoiseLook], seq_len: int, level: float = 0.9
) -> NoiseScale:
    """Estimate the noise scale from looks at nearby steps.

    The interval is Student's t on the inverse.

    Raises:
        ValueError: A look has fewer than three parts, or there is no noise.
    """
    value, error, freedom = estimate_inverse_scale(looks, seq_len)
    reach = compute_t_quantile(0.5 + level / 2, freedom) * error
    return NoiseScale(
        tokens=1 / value if value > 0 else None,
        low=1 / (value + reach) if value + reach > 0 else math.inf,
        high=1 / (value - reach) if value > reach else None,
    )


def estimate_moments(part: tuple[float, float], batch: tuple[float, float]) -> tuple[float, float]:
    """Estimate |G|^2 and a token's tr(S) from a batch and a part of the batch.

    Args:
        part: Tokens of the part, and squared norm of its gradient.
        batch: Tokens of the whole batch, and squared norm of its gradient.

    Raises:
        ValueError: The part is not smaller than the batch.
    """
    (part_tokens, part_square), (batch_tokens, batch_square) = part, batch
    if not 0 < part_tokens < batch_tokens:
        raise ValueError(
            f"a part of {part_tokens} tokens of a batch of {batch_tokens}: must be smaller"
        )
    signal = batch_tokens * batch_square - part_tokens * part_square
    signal /= batch_tokens - part_tokens
    return signal, (part_square - batch_square) / (1 / part_tokens - 1 / batch_tokens)


def estimate_running_scale(splits: Sequence[tuple[float, float]]) -> NoiseScale | None:
    """Estimate the noise scale from the results of `estimate_moments` at many steps.

    The interval is Fieller's for |G|^2 / tr(S), a ratio of two means that are measured together. It
    has all ratios r at which Student's t, at a level of 90 %, does not distinguish the mean of
    `signal - r noise` from 0.

    Returns:
        The noise scale; None if it has no interval.
    """
    num_splits = len(splits)
    if num_splits < MIN_POINTS:
        return None
    signal, noise = (math.fsum(values) / num_splits for values in zip(*splits, strict=True))

    # Variances and covariance of the means, times the square of the t quantile
    quantile = compute_t_quantile(0.95, num_splits - 1)
    factor = quantile**2 / (num_splits * (num_splits - 1))
    signal_variance = factor * math.fsum((s - signal) ** 2 for s, _ in splits)
    noise_variance = factor * math.fsum((n - noise) ** 2 for _, n in splits)
    covariance = factor * math.fsum((s - signal) * (n - noise) for s, n in splits)

    # Roots of square * r^2 - 2 * half * r + signal^2 - signal_variance
    square, half = noise**2 - noise_variance, signal * noise - covariance
    discriminant = half**2 - square * (signal**2 - signal_variance)
    if noise <= 0 or square <= 0 or discriminant < 0:
        return None
    root = math.sqrt(discriminant)
    low, high = (half - root) / square, (half + root) / square
    return NoiseScale(
        tokens=noise / signal if signal > 0 else None,
        low=1 / high if high > 0 else math.inf,
        high=1 / low if low > 0 else None,
    )


# ---- The noise scale as a power law of the tokens ----

STEP_SCATTER = 0.4
"""Relative standard deviation between the noise scales of one run at nearby steps, beyond their
errors: the weights oscillate (benchmarks/README.md). A look is at one step; a law holds for all."""
MIN_POINTS = 5
"""Minimum number of measurements for an interval of a running scale, or for a law."""
_NUM_ROUNDS = 60
"""Number of Gauss-Newton steps, far more than a fit that converges needs."""
_MAX_STEP = 1.0
"""Maximum change of the log scale and of the exponent in one step, so that the fit does not diverge
if it starts far away."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NoisePoint:
    """A measurement to which a law is fitted."""

    tokens: float
    """Tokens trained on before the measurement."""
    inverse: float
    """|G|^2 / tr(S) per token."""
    error: float
    """Standard error of `inverse`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NoiseLaw:
    """The noise scale as a power of the tokens trained on.

    Its logarithm is `log_scale` + `exponent` * (log tokens - `centre`).
    """

    log_scale: float
    exponent: float
    centre: float
    covariance: tuple[float, float, float]
    """Variance of `log_scale`, covariance, and variance of `exponent`."""
    freedom: int
    """Degrees of freedom."""
    level: float
    last: float
    """Maximum tokens of a fitted point."""

    @property
    def exponent_interval(self) -> tuple[float, float]:
        """Interval of the exponent."""
        reach = self._quantile * math.sqrt(self.covariance[2])
        return self.exponent - reach, self.exponent + reach

    @property
    def _quantile(self) -> float:
        return compute_t_quantile(0.5 + self.level / 2, self.freedom)

    def at(self, tokens: float) -> tuple[float, float, float]:
        """Return the noise scale in tokens after some training tokens, with its interval.

        Beyond the last fitted point, the interval also contains the interval at the last point:
        measured critical batches grow fast at first and then hardly (arXiv 2505.23971), and points
        of short runs do not show where the slow growth begins.
        """
        middle, low, high = self._evaluate(tokens)
        _, last_low, last_high = self._evaluate(min(tokens, self.last))
        return middle, min(low, last_low), max(high, last_high)

    def _evaluate(self, tokens: float) -> tuple[float, float, float]:
        """Return the law's value and its interval, without regard to the last point."""
        offset = math.log(tokens) - self.centre
        scale_variance, covariance, exponent_variance = self.covariance
        variance = scale_variance + 2 * offset * covariance + offset**2 * exponent_variance
        middle = self.log_scale + self.exponent * offset
        reach = self._quantile * math.sqrt(max(variance, 0.0))
        # exp of more than about 709 would overflow
        return math.exp(middle), math.exp(middle - reach), math.exp(min(middle + reach, 700.0))


def fit_noise_law(points: Sequence[NoisePoint], level: float = 0.9) -> NoiseLaw | None:
    """Fit a power law to points of several runs.

    The fit is least squares on the inverses with their standard errors. A point whose inverse is
    not distinguished from 0, or is negative, stays in the fit; a fit of logarithms would have to
    leave it out. If the points scatter more than their own errors explain, the law has larger
    errors.

    Returns:
        The law; None if there are too few points, if all have about the same tokens, or if no law
        fits.
    """
    if len(points) < MIN_POINTS or any(point.error <= 0 for point in points):
        return None
    logs = [math.log(point.tokens) for point in points]
    if max(logs) - min(logs) < math.log(2):
        return None
    weights = [1 / point.error**2 for point in points]
    total = math.fsum(w * p.inverse for w, p in zip(weights, points, strict=True))
    mean = total / math.fsum(weights)
    if mean <= 0:
        return None
    centre = math.fsum(logs) / len(logs)
    fit = _fit_power(points, [log - centre for log in logs], log_scale=-math.log(mean))
    if fit is None:
        return None
    log_scale, exponent, covariance = fit
    return NoiseLaw(
        log_scale=log_scale,
        exponent=exponent,
        centre=centre,
        covariance=covariance,
        freedom=len(points) - 2,
        level=level,
        last=max(point.tokens for point in points),
    )


def _fit_power(
    points: Sequence[NoisePoint], offsets: Sequence[float], *, log_scale: float
) -> tuple[float, float, tuple[float, float, float]] | None:
    """Fit log scale and exponent by Gauss-Newton steps on the inverses.

    Args:
        points: The points.
        offsets: Log tokens of each point, minus their mean.
        log_scale: Start of the log scale; the exponent starts at 0.

    Returns:
        Log scale, exponent, and their covariance; None if the fit does not converge.
    """
    exponent = 0.0
    for _ in range(_NUM_ROUNDS):
        # Residuals relative to the expected inverses, with their weights
        expected = [math.exp(-log_scale - exponent * x) for x in offsets]
        residuals = [1 - p.inverse / mu for mu, p in zip(expected, points, strict=True)]
        weights = [
            mu**2 / (p.error**2 + (STEP_SCATTER * mu) ** 2)
            for mu, p in zip(expected, points, strict=True)
        ]
        weighted = [w * residual for w, residual in zip(weights, residuals, strict=True)]

        # Normal equations [[a, b], [b, c]] step = [d, e]
        a, b, c = (
            math.fsum(w * x**power for w, x in zip(weights, offsets, strict=True))
            for power in range(3)
        )
        d, e = (
            math.fsum(w * x**power for w, x in zip(weighted, offsets, strict=True))
            for power in range(2)
        )
        determinant = a * c - b**2
        if not determinant > 0:
            return None
        step = (c * d - b * e) / determinant, (a * e - b * d) / determinant
        log_scale += max(-_MAX_STEP, min(_MAX_STEP, step[0]))
        exponent += max(-_MAX_STEP, min(_MAX_STEP, step[1]))

    # Refuse a fit that has not converged, or has an exponent far above that of any run
    if max(map(abs, step)) > 1e-6 or abs(exponent) > 5:
        return None

    # Covariance, widened if the points scatter more than their errors explain
    chi_square = math.fsum(w * r**2 for w, r in zip(weights, residuals, strict=True))
    spread = max(1.0, chi_square / (len(points) - 2))
    covariance = (spread * c / determinant, -spread * b / determinant, spread * a / determinant)
    return log_scale, exponent, covariance


def compute_t_quantile(probability: float, freedom: int) -> float:
    """Return the quantile of Student's t by its expansion about the normal distribution's quantile.

    The expansion is Abramowitz and Stegun 26.7.5. It is accurate to 0.2 % from 3 degrees of freedom
    on, for probabilities up to 0.975.
    """
    z = NormalDist().inv_cdf(probability)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + math.fsum(term / freedom**power for power, term in enumerate(terms, start=1))
