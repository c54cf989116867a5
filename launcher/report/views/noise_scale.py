"""Section `noise_scale` of the report: the gradient noise scale of the rungs, and the plan's batch
compared with it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from forerun._launcher.report.views.fit_findings import (
    BatchComparison,
    NoiseExponent,
    NoiseScale,
    NoiseScaleLook,
)
from forerun._proxies.core.noise_scale import (
    NoiseLaw,
    NoisePoint,
    estimate_inverse_scale,
    estimate_noise_scale,
    fit_noise_law,
)
from forerun._proxies.core.notation import (
    NONE,
    format_count,
    format_factor,
    format_interval,
    format_number,
)
from forerun._sweeps.store.curves import load_noise

if TYPE_CHECKING:
    from forerun._launcher.study.plan.study import Study
    from forerun._launcher.study.stages.main_run_choice import MainRunChoice
    from forerun._proxies.core.spec import RunSpec

MAX_INTERVAL_RATIO = 10.0
"""Ratio of an interval's ends above which it cannot tell anything about a batch inside it."""


def build_noise_section(
    study: Study, rungs: Sequence[RunSpec], choice: MainRunChoice | None
) -> NoiseScale | None:
    """Return section `noise_scale`; None if no rung measured the gradient noise.

    The section has every measurement ("look") at a rung, the law that is fitted to the looks, and
    the comparison of the chosen run's batch with that law.
    """
    level, looks = study.plan.transfer.level, []
    for spec in rungs:
        for look in load_noise(study.study_dir, spec.id):
            try:
                inverse, error, _ = estimate_inverse_scale([look], spec.shape.seq_len)
            except ValueError:  # The look has too few parts, or no noise.
                continue
            scale = estimate_noise_scale([look], spec.shape.seq_len, level)
            looks.append(
                NoiseScaleLook(
                    width=spec.shape.width,
                    num_layers=spec.shape.num_layers,
                    run_tokens=spec.num_tokens,
                    batch_tokens=spec.batch_tokens,
                    step=look.step,
                    tokens=spec.count_tokens_by(look.step),
                    scale_tokens=scale.tokens,
                    interval=(scale.low if math.isfinite(scale.low) else None, scale.high),
                    inverse=inverse,
                    inverse_error=error,
                )
            )
    if not looks:
        return None
    law = fit_noise_looks(looks, level)
    return NoiseScale(
        level=level,
        looks=looks,
        law=law and NoiseExponent(exponent=law.exponent, interval=law.exponent_interval),
        judged=None
        if choice is None
        else compare_batch(law, choice.batch_tokens, choice.num_tokens),
    )


def fit_noise_looks(looks: Sequence[NoiseScaleLook], level: float) -> NoiseLaw | None:
    """Fit the law of the noise scale to looks at rungs; None if there are too few."""
    points = [
        NoisePoint(tokens=look.tokens, inverse=look.inverse, error=look.inverse_error)
        for look in looks
        if look.tokens > 0
    ]
    return fit_noise_law(points, level)


def compare_batch(law: NoiseLaw | None, batch_tokens: float, num_tokens: float) -> BatchComparison:
    """Compare a batch with the noise scale that a law predicts for the end of a run.

    Args:
        law: Law of the noise scale; None if it could not be fitted.
        batch_tokens: Tokens per step.
        num_tokens: Tokens of the whole run.

    Returns:
        `outcome` (`over`, `under`, `about`, or `cannot_tell`) and the numbers behind it.
    """
    outcome, scale, interval = "cannot_tell", None, None
    if law is not None:
        scale, low, high = law.at(num_tokens)
        interval = (low, high)
        if not low <= batch_tokens <= high:
            outcome = "over" if batch_tokens > high else "under"
        elif high <= MAX_INTERVAL_RATIO * low:
            outcome = "about"
    return BatchComparison(
        outcome=outcome,
        batch_tokens=batch_tokens,
        num_tokens=num_tokens,
        scale_tokens=scale,
        interval=interval,
    )


def format_batch_comparison(comparison: BatchComparison) -> str:
    """Describe a comparison from `compare_batch` in one sentence."""
    batch, scale, interval = comparison.batch_tokens, comparison.scale_tokens, comparison.interval
    subject = f"batch of {format_count(batch)} tokens"
    undecided = f"cannot tell whether a {subject} is too large"
    if scale is None or interval is None:
        return f"{undecided}: too few looks at the gradient's noise"
    scale_text = (
        f"the gradient noise scale expected after {format_count(comparison.num_tokens)} tokens, "
        f"{format_number(scale, '.3g')} {format_interval(interval, '.3g')}"
    )
    if comparison.outcome == "cannot_tell":
        return f"{undecided}: {scale_text}"
    if comparison.outcome == "about":
        return f"{subject} is about {scale_text}"
    low, high = interval
    factor, ends = scale / batch, (low / batch, high / batch)
    advice = "a larger batch saves steps, at few more tokens"
    if comparison.outcome == "over":
        factor, ends = batch / scale, (batch / high, batch / low)
        advice = "a larger batch saves few steps and costs tokens"
    times = f"{format_factor(factor)} times {format_interval(ends, '.3g')}"
    return f"{subject} is {times} {comparison.outcome} {scale_text}: {advice}"


def format_noise_law(noise: NoiseScale) -> str:
    """Describe how the noise scale grows with the tokens trained on, in one sentence."""
    law = noise.law
    if law is None:
        return (
            "cannot tell how the noise scale grows: there are too few looks, or they cannot be "
            "told from noise"
        )
    low, high = law.interval
    grows = "grows" if low > 0 else "falls" if high < 0 else "cannot tell whether it grows:"
    return (
        f"{grows} as tokens to the {format_number(law.exponent, '.2f')} "
        f"{format_interval((low, high), '.2f')}"
    )


def build_look_rows(noise: NoiseScale) -> list[tuple[str, ...]]:
    """Return a row for each look.

    The columns are the width, the layers, the tokens of the run, the tokens before the look, the
    noise scale, and its interval.
    """
    return [
        (
            str(look.width),
            str(look.num_layers),
            format_count(look.run_tokens),
            format_count(look.tokens),
            format_count(look.scale_tokens),
            _format_bounds(look.interval),
        )
        for look in noise.looks
    ]


def _format_bounds(ends: Sequence[float | None]) -> str:
    """Format a lower and an upper bound in tokens, each of which may be missing."""
    low, high = ends
    if low is None:
        return NONE
    return (
        f"{format_count(low)} or more"
        if high is None
        else f"{format_count(low)} to {format_count(high)}"
    )
