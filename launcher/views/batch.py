"""The plan's batch against the gradient noise scale that the ladder's rungs measured: `noise_scale`
of the report.
"""

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
"""An interval of more than a decade says nothing of a batch inside it."""


def noise_body(
    study: Study, rungs: Sequence[RunSpec], choice: Choice | None
) -> dict[str, Json] | None:
    """Every look of the rungs, the law through them, and the chosen run's batch beside it; None
    without a look.
    """
    level, looks = study.plan.transfer.level, []
    for spec in rungs:
        for look in load_noise(study.study_dir, spec.id):
            try:
                inverse, error, _ = inverse_scale([look], spec.shape.seq_len)
            except ValueError:  # of too few parts, or without noise
                continue
            found = noise_scale([look], spec.shape.seq_len, level)
            ends: list[Json] = [found.low if math.isfinite(found.low) else None, found.high]
            looks.append(
                {
                    "width": spec.shape.width,
                    "num_layers": spec.shape.num_layers,
                    "run_tokens": spec.num_tokens,
                    "batch_tokens": spec.batch_tokens,
                    "step": look.step,
                    "tokens": spec.tokens_by(look.step),
                    "scale_tokens": found.tokens,
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
    """The law through the looks of `noise_scale` of a report."""
    points = [
        NoisePoint(tokens=look["tokens"], inverse=look["inverse"], error=look["inverse_error"])
        for look in body["looks"]
        if look["tokens"] > 0
    ]
    return noise_law(points, body["level"])


def judged(law: NoiseLaw | None, batch_tokens: float, num_tokens: float) -> dict[str, Json]:
    """A batch beside the noise scale that a law expects at the end of a run of so many tokens."""
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


def judged_text(found: Any) -> str:
    """The judgement in a sentence."""
    batch, scale = found["batch_tokens"], found["scale_tokens"]
    unknown = f"cannot tell whether a batch of {format_count(batch)} tokens is too large"
    if scale is None:
        return f"{unknown}: too few looks at the gradient's noise"
    low, high = found["interval"]
    at = (
        f"the gradient noise scale expected after {format_count(found['num_tokens'])} tokens, "
        f"{format_number(scale, '.3g')} {format_interval((low, high), '.3g')}"
    )
    if found["outcome"] == "under":
        times = (
            f"{format_factor(scale / batch)} times "
            f"{format_interval((low / batch, high / batch), '.3g')}"
        )
        return (
            f"batch of {format_count(batch)} tokens is {times} under {at}: a larger one saves "
            "steps, at few more tokens"
        )
    if found["outcome"] == "over":
        times = (
            f"{format_factor(batch / scale)} times "
            f"{format_interval((batch / high, batch / low), '.3g')}"
        )
        return (
            f"batch of {format_count(batch)} tokens is {times} over {at}: a larger one saves "
            "few steps and costs tokens"
        )
    return (
        f"batch of {format_count(batch)} tokens is about {at}"
        if found["outcome"] == "about"
        else f"{unknown}: {at}"
    )


def law_text(body: Any) -> str:
    """How the noise scale grows, in a sentence."""
    law = body["law"]
    if law is None:
        return (
            "cannot tell how the noise scale grows: the looks are too few, or not told from noise"
        )
    low, high = law["interval"]
    grows = "grows" if low > 0 else "falls" if high < 0 else "cannot tell whether it grows:"
    return (
        f"{grows} as tokens to the {format_number(law['exponent'], '.2f')} "
        f"{format_interval((low, high), '.2f')}"
    )


def looks_rows(body: Any) -> list[tuple[str, ...]]:
    """A row for each look: width, layers, tokens of the run, tokens before the look, noise scale,
    its interval.
    """
    return [
        (
            str(look["width"]),
            str(look["num_layers"]),
            format_count(look["run_tokens"]),
            format_count(look["tokens"]),
            format_count(look["scale_tokens"]),
            _span(look["interval"]),
        )
        for look in body["looks"]
    ]


def _span(ends: Sequence[float | None]) -> str:
    low, high = ends
    if low is None:
        return NONE
    return (
        f"{format_count(low)} or more"
        if high is None
        else f"{format_count(low)} to {format_count(high)}"
    )
