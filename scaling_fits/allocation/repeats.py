"""The value of repeated tokens, and of parameters beyond those that the unique tokens can train.

The formula is that of arXiv 2305.16264, section 3. A run of D tokens over U unique ones makes
R = D / U - 1 repeats, and its tokens count as

    D' = U + U R* (1 - exp(-R / R*)).

N parameters are discounted in the same way, relative to the number U_N that fits U tokens best. The
paper fitted the constants to models of up to 9 billion parameters on web text. They are not
measured on the user's data.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from forerun._proxies.core.notation import format_factor, format_significant
from forerun._scaling_fits.forecast.uncertainty import FittedRuns
from forerun._scaling_fits.laws.solver import Floats

TOKENS_DECAY = 15.39
"""R* of tokens (arXiv 2305.16264, section 6): the number of repeats after which 1 - 1/e of their
total value is reached."""
PARAMS_DECAY = 5.31
"""R* of parameters, from the same fit."""
TOKENS_PER_PARAM = 19.5
"""Tokens per parameter at the optimum of the law in the same paper (A = 521, B = 1488, both
exponents 0.353)."""
SAFE_EPOCHS = 4.0
"""Epochs up to which repeated tokens are almost as good as fresh ones (same paper)."""
FORM_EPOCHS = 15.0
"""Epochs above which the formula fails: a law fitted to the paper's public runs of one epoch
predicts a loss that is 11 % too high (median of 129 runs)."""
SOURCE = (
    f"arXiv 2305.16264 (R* = {TOKENS_DECAY} for tokens, {PARAMS_DECAY} for parameters, "
    f"{TOKENS_PER_PARAM} tokens per parameter): "
    "borrowed, not measured on these runs; the intervals leave out their uncertainty"
)


def discount_repeats(
    log_value: Floats, unique: float | None, decay: float
) -> tuple[Floats, Floats]:
    """Compute the log of the effective amount of a quantity, and the log of the derivative
    d log(effective) / d log(value).

    Up to `unique` the effective amount is the amount itself, and the second result is 0.

    Args:
        log_value: log of the amount with its repeats.
        unique: amount without repeats; None for no limit.
        decay: R*, the number of repeats after which 1 - 1/e of their total value is reached.
    """
    if unique is None:
        return log_value, np.zeros_like(log_value)
    log_unique = math.log(unique)
    repeats = np.expm1(np.clip(log_value - log_unique, 0.0, 600.0))
    effective = log_unique + np.log1p(decay * -np.expm1(-repeats / decay))
    is_repeated = log_value > log_unique
    result: Floats = np.where(is_repeated, effective, log_value)
    slope: Floats = np.where(is_repeated, log_value - repeats / decay - effective, 0.0)
    return result, slope


def compute_fitting_params(fitted: FittedRuns, unique_tokens: float) -> float:
    """Return U_N, the number of parameters that `unique_tokens` can train.

    U_N is the larger of two sizes. The first is the size for which the fitted law takes these
    tokens as compute-optimal, the median over the draws of the law. U_N must not be smaller,
    because a run that sees its data once would then be discounted. The second size is U /
    `TOKENS_PER_PARAM`, the ratio with which the paper fitted `PARAMS_DECAY`. A law fitted to
    the paper's public runs of one epoch then predicts too high a loss for its other runs: by 0.9 %
    up to 5 epochs, and by 2.1 % for 5 to 15 epochs (medians; `tests/scaling_fits/allocation`).
    """
    a, b, alpha, beta = fitted.require_area().theta.T[1:5]
    logs = float(np.median((np.log(alpha / beta) + a - b + beta * math.log(unique_tokens)) / alpha))
    # Clipped, so that an extreme law does not overflow
    return max(math.exp(min(max(logs, -600.0), 600.0)), unique_tokens / TOKENS_PER_PARAM)


@dataclass(frozen=True, kw_only=True, slots=True)
class DataLimit:
    """The effect of a limit on unique tokens on an allocation."""

    unique_tokens: float
    epochs: float
    effective_tokens: float
    """Number of fresh tokens with the same value."""


def list_limit_warnings(limit: DataLimit) -> tuple[str, ...]:
    """Return the warnings about an allocation under a limit on unique tokens."""
    warnings = []
    if limit.epochs > 1:
        warnings.append(
            f"tokens are seen {format_factor(limit.epochs)} times; what a repeated token is worth "
            f"is taken from {SOURCE}"
        )
    if limit.epochs > SAFE_EPOCHS:
        warnings.append(
            f"{format_significant(limit.epochs)} epochs: beyond {SAFE_EPOCHS:g} a repeated token "
            "is worth less and less; more unique tokens are worth more than more compute"
            + (
                f"; beyond {FORM_EPOCHS:g} the published formula itself fails, by some 10 % of the "
                "loss"
                if limit.epochs > FORM_EPOCHS
                else ""
            )
        )
    return tuple(warnings)
