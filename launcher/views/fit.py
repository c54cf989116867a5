"""What the report says of a fit beside the fit itself: each law alone.

All of it goes by the chosen run; before there is one, or where the rungs identify no law, parts are null. No torch.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from proxies.core.canon import Json

if TYPE_CHECKING:
    from scaling_fits.forecast.uncertainty import FittedRuns, Prediction
    from scaling_fits.laws.law import LawFit

NUM_FRONTIER_POINTS = 24


def frontier_flops(fit: FittedRuns, budget_flops: float) -> list[float]:
    """FLOPs, evenly spaced in their logs, from the smallest rung's to the budget."""
    low, high = math.log(min(fit.span.six_nd)), math.log(budget_flops)
    return [math.exp(low + (high - low) * i / (NUM_FRONTIER_POINTS - 1)) for i in range(NUM_FRONTIER_POINTS)]


def fit_body(fit: FittedRuns, at: Prediction | None) -> dict[str, Json]:
    """`fit` of the report: its summary, and of every member its exponents and its loss at the chosen run.

    Args:
        fit: of the ladder.
        at: the forecast of the chosen run; None before there is one.
    """
    from scaling_fits.summary import fit_summary

    body = fit_summary(fit)
    summaries = body["members"]
    assert isinstance(summaries, list)
    members: list[Json] = []
    for law, summary in zip(fit.members, summaries, strict=True):
        assert isinstance(summary, dict)
        members.append({**summary, **_alone(law, at)})
    return {**body, "members": members}


def _alone(law: LawFit, at: Prediction | None) -> dict[str, Json]:
    """What one law says by itself."""
    import numpy as np

    from scaling_fits.laws.law import exp_finite, log_loss

    if not law.identified:
        return {"params_vs_flops": None, "tokens_vs_flops": None, "loss_at_choice_nats": None}
    alpha, beta = (float(value) for value in law.theta[3:5])
    return {
        "params_vs_flops": beta / (alpha + beta),
        "tokens_vs_flops": alpha / (alpha + beta),
        "loss_at_choice_nats": None
        if at is None
        else exp_finite(float(log_loss(law.theta[None, :], np.array([at.params]), np.array([at.tokens]))[0, 0])),
    }
