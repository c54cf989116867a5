"""What the report says of a fit beside the fit itself: each law alone.

All of it goes by the chosen run; before there is one, or where the rungs identify no law, parts are null. No torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
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


def fit_body(fit: FittedRuns, at: Prediction | None, budget_flops: float) -> dict[str, Json]:
    """`fit` of the report: its summary, and of every member its exponents, its frontier, its loss at the chosen run.

    Args:
        fit: of the ladder.
        at: the forecast of the chosen run; None before there is one.
        budget_flops: where the frontiers end.
    """
    from scaling_fits.summary import fit_summary

    body = fit_summary(fit)
    summaries = body["members"]
    assert isinstance(summaries, list)
    flops = [] if at is None else frontier_flops(fit, budget_flops)
    members: list[Json] = []
    for law, summary in zip(fit.members, summaries, strict=True):
        assert isinstance(summary, dict)
        members.append({**summary, **_alone(law, flops, at)})
    return {**body, "members": members}


def _alone(law: LawFit, flops: Sequence[float], at: Prediction | None) -> dict[str, Json]:
    """What one law says by itself; its frontier is of its own optima, which are not the pool's."""
    import numpy as np

    from scaling_fits.laws.law import exp_finite, log_best_params, log_loss

    if not law.identified:
        return {"params_vs_flops": None, "tokens_vs_flops": None, "frontier": None, "loss_at_choice_nats": None}
    theta_1P = law.theta[None, :]

    def loss_nats(params: float, tokens: float) -> float:
        return exp_finite(float(log_loss(theta_1P, np.array([params]), np.array([tokens]))[0, 0]))

    frontier: list[Json] = []
    for budget in flops:
        params = exp_finite(float(log_best_params(theta_1P, math.log(budget / 6))[0]))
        frontier.append({"flops": budget, "loss_nats": loss_nats(params, budget / (6 * params))})
    alpha, beta = (float(value) for value in law.theta[3:5])
    return {
        "params_vs_flops": beta / (alpha + beta),
        "tokens_vs_flops": alpha / (alpha + beta),
        "frontier": frontier if flops else None,
        "loss_at_choice_nats": None if at is None else loss_nats(at.params, at.tokens),
    }
