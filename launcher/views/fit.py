"""What the report says of a fit beside the fit itself: each law alone, the rungs the choice hangs on, what to run next.

All of it goes by the chosen run; before there is one, or where the rungs identify no law, parts are null. No torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from launcher.views.transfer import short_size
from proxies.core.canon import Json

if TYPE_CHECKING:
    from launcher.plan.study import Study
    from scaling_fits.forecast.uncertainty import FittedRuns, Prediction
    from scaling_fits.laws.law import LawFit
    from scaling_fits.laws.table import RunTable

NUM_FRONTIER_POINTS = 24


def frontier_flops(fit: FittedRuns, budget_flops: float) -> list[float]:
    """FLOPs, evenly spaced in their logs, from the smallest rung's to the budget."""
    low, high = math.log(min(fit.span.six_nd)), math.log(budget_flops)
    return [math.exp(low + (high - low) * i / (NUM_FRONTIER_POINTS - 1)) for i in range(NUM_FRONTIER_POINTS)]


def fit_body(
    fit: FittedRuns, table: RunTable | None, at: Prediction | None, budget_flops: float, rungs: Sequence[Any]
) -> dict[str, Json]:  # fmt: skip
    """`fit` of the report: its summary, and of every member its exponents, its frontier, its loss at the chosen run.

    Args:
        fit: of the ladder.
        table: the runs it was fitted to.
        at: the forecast of the chosen run; None before there is one.
        budget_flops: where the frontiers end.
        rungs: `ladder.rungs` of the report; those with a loss are the rows of `table`, in order.
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
    hangs = None if table is None or at is None else influence_body(table, fit, at, rungs)
    return {**body, "members": members, "influence": hangs}


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


def influence_body(table: RunTable, fit: FittedRuns, at: Prediction, rungs: Sequence[Any]) -> dict[str, Json]:
    """Every rung by what the choice would be without it, the most influential first, and what must be said of them."""
    from scaling_fits.influence import influence, influence_warnings

    finished = [index for index, rung in enumerate(rungs) if rung["loss_nats"] is not None]
    names = rung_names(rungs)
    found = influence(
        table, fit, target_params=at.params, target_tokens=at.tokens, names=[names[index] for index in finished]
    )
    rows: list[Json] = []
    for row in found:
        sizes, losses = row.shift_log_params, row.shift_log_loss
        rows.append(
            {
                "run": row.place,
                "rung": finished[row.place],
                "params_shift": None if sizes is None or not row.size_determined else math.expm1(sizes),
                "loss_shift": None if losses is None or not row.loss_determined else math.expm1(losses),
                "share_of_arm": row.share_of_arm if row.size_determined and row.loss_determined else None,
                "residual_sds": row.residual_sds,
                "outlier": row.outlier,
                "decisive": row.decisive,
            }
        )
    return {"form": fit.chooser.form, "rows": rows, "warnings": list(influence_warnings(found))}


def rung_names(rungs: Sequence[Any]) -> list[str]:
    """Every rung by width and tokens, `width 96, 819k tokens`; repeated ones by their place among their like too."""
    sizes = [(rung["width"], rung["tokens"]) for rung in rungs]
    return [
        f"width {size[0]}, {short_size(size[1])} tokens"
        + (f" (seed {sizes[:index].count(size) + 1} of {sizes.count(size)})" if sizes.count(size) > 1 else "")
        for index, size in enumerate(sizes)
    ]


def next_body(study: Study, fit: FittedRuns, at: Prediction) -> dict[str, Json]:
    """`next_runs`: the runs that would narrow the chosen run's interval most for their FLOPs, or why there are none."""
    from scaling_fits.allocation.next_rungs import advice

    runs, note = advice(fit, at.params, at.tokens, at.flops, money="the main run's compute")
    return {
        "runs": [
            {
                "width": _width_near(study, run.params),
                "params": run.params,
                "tokens": run.tokens,
                "flops": run.flops,
                "budget_share": run.flops / at.flops,
                "interval_shrink": run.interval_shrink,
            }
            for run in runs
        ],
        "interval_shrink": 1 - math.prod(1 - run.interval_shrink for run in runs) if runs else None,
        "note": note,
    }


def _width_near(study: Study, params: float) -> int:
    """Width of a rung of about so many parameters."""
    from scaling_fits.allocation.shapes import ShapeRequest, Template, choose_shapes

    request = ShapeRequest(params=params, template=Template(shape=study.base_shape))
    return int(choose_shapes(request).options[0].shape.width)
