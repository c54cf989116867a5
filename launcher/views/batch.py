"""The plan's batch compared with the gradient noise scale of the rungs: report's `noise_scale`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from proxies.core.canon import Json
from proxies.core.noise_scale import NoiseLaw, NoisePoint, inverse_scale, noise_law, noise_scale
from proxies.core.notation import NONE, format_count, format_factor, format_interval, format_number
from sweeps.store.curves import load_noise

if TYPE_CHECKING:
    from launcher.plan.study import Study
    from launcher.study.decide import Choice
    from proxies.core.spec import RunSpec

WIDE = 10.0
"""Ratio of an interval's ends above which it cannot tell anything about a batch inside it."""


def noise_body(
    study: Study, rungs: Sequence[RunSpec], choice: Choice | None
) -> dict[str, Json] | None:
    """Return section `noise_scale` of the report; None if no rung measured the gradient noise.

    It has every measurement ("look") at a rung, the law fitted to them, and the chosen run's batch
    judged by that law.
    """
    level, looks = study.plan.transfer.level, []
    for spec in rungs:
        for look in load_noise(study.study_dir, spec.id):
            try:
                inverse, error, _ = inverse_scale([look], spec.shape.seq_len)
            except ValueError:  # The look has too few parts, or no noise.
                continue
            scale = noise_scale([look], spec.shape.seq_len, level)
            ends: list[Json] = [scale.low if math.isfinite(scale.low) else None, scale.high]
            looks.append(
                {
                    "width": spec.shape.width,
                    "num_layers": spec.shape.num_layers,
                    "run_tokens": spec.num_tokens,
                    "batch_tokens": spec.batch_tokens,
                    "step": look.step,
                    "tokens": spec.tokens_by(look.step),
                    "scale_tokens": scale.tokens,
                    "interval": ends,
                    "inverse": inverse,
                    "inverse_error": error,
                }
            )
    if not looks:
        return None
    body: dict[str, Any] = {"level": level, "looks": looks}
    law = law_of(body)
    body["law"] = (
        None if law is None else {"exponent": law.exponent, "interval": [*law.exponent_interval]}
    )
    return body | {
        "judged": None if choice is None else judged(law, choice.batch_tokens, choice.num_tokens)
    }


def law_of(body: Any) -> NoiseLaw | None:
    """Fit the law to the looks in section `noise_scale` of a report; None if it has too few."""
    points = [
        NoisePoint(tokens=look["tokens"], inverse=look["inverse"], error=look["inverse_error"])
        for look in body["looks"]
        if look["tokens"] > 0
    ]
    return noise_law(points, body["level"])


def judged(law: NoiseLaw | None, batch_tokens: float, num_tokens: float) -> dict[str, Json]:
    """Compare a batch with the noise scale that a law predicts for the end of a run.

    Args:
        law: Law of the noise scale; None if it could not be fitted.
        batch_tokens: Tokens per step.
        num_tokens: Tokens of the whole run.

    Returns:
        `outcome` (`over`, `under`, `about`, or `cannot_tell`) and the numbers behind it.
    """
    if law is None:
        return {
            "outcome": "cannot_tell",
            "batch_tokens": batch_tokens,
            "num_tokens": num_tokens,
            "scale_tokens": None,
            "interval": None,
        }
    scale, low, high = law.at(num_tokens)
    outcome = "over" if batch_tokens > high else "under" if batch_tokens < low else "about"
    if outcome == "about" and high > WIDE * low:
        outcome = "cannot_tell"
    return {
        "outcome": outcome,
        "batch_tokens": batch_tokens,
        "num_tokens": num_tokens,
        "scale_tokens": scale,
        "interval": [low, high],
    }


def judged_text(judgment: Any) -> str:
    """Describe a comparison from `judged` in one sentence."""
    batch, scale = judgment["batch_tokens"], judgment["scale_tokens"]
    undecided = f"cannot tell whether a batch of {format_count(batch)} tokens is too large"
    if scale is None:
        return f"{undecided}: too few looks at the gradient's noise"
    low, high = judgment["interval"]
    scale_text = (
        f"the gradient noise scale expected after {format_count(judgment['num_tokens'])} tokens, "
        f"{format_number(scale, '.3g')} {format_interval((low, high), '.3g')}"
    )
    if judgment["outcome"] == "under":
        times = (
            f"{format_factor(scale / batch)} times "
            f"{format_interval((low / batch, high / batch), '.3g')}"
        )
        return (
            f"batch of {format_count(batch)} tokens is {times} under {scale_text}: "
            "a larger one saves steps, at few more tokens"
        )
    if judgment["outcome"] == "over":
        times = (
            f"{format_factor(batch / scale)} times "
            f"{format_interval((batch / high, batch / low), '.3g')}"
        )
        return (
            f"batch of {format_count(batch)} tokens is {times} over {scale_text}: "
            "a larger one saves few steps and costs tokens"
        )
    return (
        f"batch of {format_count(batch)} tokens is about {scale_text}"
        if judgment["outcome"] == "about"
        else f"{undecided}: {scale_text}"
    )


def law_text(body: Any) -> str:
    """Describe how the noise scale grows with the tokens trained on, in one sentence."""
    law = body["law"]
    if law is None:
        return (
            "cannot tell how the noise scale grows: there are too few looks, or they cannot be "
            "told from noise"
        )
    low, high = law["interval"]
    grows = "grows" if low > 0 else "falls" if high < 0 else "cannot tell whether it grows:"
    return (
        f"{grows} as tokens to the {format_number(law['exponent'], '.2f')} "
        f"{format_interval((low, high), '.2f')}"
    )


def looks_rows(body: Any) -> list[tuple[str, ...]]:
    """Return a row for each look: width, layers, tokens of the run, tokens before the look, noise
    scale, and its interval.
    """
    return [
        (
            str(look["width"]),
            str(look["num_layers"]),
            format_count(look["run_tokens"]),
            format_count(look["tokens"]),
            format_count(look["scale_tokens"]),
            _format_bounds(look["interval"]),
        )
        for look in body["looks"]
    ]


def _format_bounds(ends: Sequence[float | None]) -> str:
    low, high = ends
    if low is None:
        return NONE
    return (
        f"{format_count(low)} or more"
        if high is None
        else f"{format_count(low)} to {format_count(high)}"
    )
