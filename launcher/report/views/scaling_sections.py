"""The report's sections `ladder`, `frontier`, and `choice`, which follow from the scaling ladder.

`tables.build_fit_section` builds section `fit`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from forerun._launcher.report.views.aspect import build_aspect_section
from forerun._launcher.report.views.curve_comparison import build_branches
from forerun._launcher.report.views.finding import Estimate
from forerun._launcher.report.views.fit_findings import (
    Allocation,
    Choice,
    FrontierPoint,
    Ladder,
    Prediction,
    RateOffset,
    Rung,
    RungCheck,
    ShapeSize,
    TunedCheck,
)
from forerun._launcher.report.views.tables import list_frontier_flops
from forerun._launcher.study.plan.study import Study
from forerun._launcher.study.stages.gates import build_forecast_warnings
from forerun._launcher.study.stages.ladder_checks import RungCheck as JudgedRung
from forerun._proxies.core import canon
from forerun._proxies.core.flops import compute_flops_per_token, count_params
from forerun._proxies.core.spec import RunResult

if TYPE_CHECKING:
    from forerun._launcher.study.stages.study_findings import StudyFindings


def build_ladder_section(
    study: Study, findings: StudyFindings, results: Mapping[str, RunResult]
) -> Ladder | None:
    """Return section `ladder`: the rungs, and the checks of their learning rates.

    It is None until all rungs have ended and a law has been fitted.
    """
    if findings.fit is None:
        return None
    from forerun._scaling_fits.forecast.uncertainty import predict
    from forerun._scaling_fits.laws.law import CannotTellError

    rungs = []
    for spec in findings.ladder:
        params = study.count_params(spec.shape)
        try:
            fitted = predict(findings.fit, params, spec.num_tokens).loss_nats
        except CannotTellError:
            fitted = None
        rungs.append(
            Rung(
                width=spec.shape.width,
                num_layers=spec.shape.num_layers,
                params=params,
                tokens=spec.num_tokens,
                flops=6.0 * params * spec.num_tokens,
                loss_nats=results[spec.id].loss_nats,
                fitted_nats=fitted,
            )
        )
    gate = next((gate for gate in findings.gates if gate.name == "ladder_tuned"), None)
    checked_rungs = findings.checks.rungs if findings.checks else ()
    return Ladder(
        rungs=rungs,
        branches=build_branches(study, findings.ladder, results),
        checks=tuple(build_rung_check(study, checked) for checked in checked_rungs),
        tuned=gate and TunedCheck(outcome=gate.outcome, reason=gate.reason),
    )


def build_rung_check(study: Study, checked: JudgedRung) -> RungCheck:
    """Return a checked rung as the report shows it."""
    rung, excess, best = checked.rung, checked.excess, checked.best
    unknown = Estimate(value=None, interval=None)
    return RungCheck(
        width=rung.shape.width,
        params=study.count_params(rung.shape),
        tokens=rung.num_tokens,
        num_steps=rung.schedule.num_steps,
        offsets=[
            RateOffset(
                octaves=rate.octaves,
                learning_rate=rate.learning_rate,
                loss_nats=rate.loss_nats,
                num_seeds=len(rate.losses_nats),
            )
            for rate in checked.rates
        ],
        noise_nats=checked.noise_nats,
        excess_nats=Estimate(value=excess.nats, interval=excess.interval) if excess else unknown,
        optimum_octaves=Estimate(value=excess.optimum_octaves, interval=excess.optimum_interval)
        if excess
        else unknown,
        # The rung's own rate has the offset 0, and then no other rate was better.
        better_octaves=None if best is None or best.octaves == 0 else best.octaves,
        outcome=checked.outcome,
        words=checked.words,
    )


def build_frontier_section(study: Study, findings: StudyFindings) -> list[FrontierPoint] | None:
    """Return section `frontier`: the best loss at each compute, up to the budget.

    Each point is a forecast for one new run of the optimal size.
    """
    if findings.fit is None or findings.choice is None:
        return None
    from forerun._scaling_fits.allocation.allocate import allocate

    return [
        FrontierPoint.model_validate(allocate(findings.fit, flops), from_attributes=True)
        for flops in list_frontier_flops(findings.fit, study.plan.target.budget_flops)
    ]


def build_choice_section(study: Study, findings: StudyFindings) -> Choice | None:
    """Return section `choice`: the main run that the fit chooses; None before there is one."""
    choice = findings.choice
    if choice is None:
        return None
    from forerun._scaling_fits.summary import summarize_allocation, summarize_prediction

    params, counts = study.count_params(choice.shape), count_params(choice.shape)
    prediction = Prediction.model_validate(summarize_prediction(choice.prediction))
    warnings = [*build_forecast_warnings(findings.gates), *choice.prediction.warnings]
    return Choice(
        budget_flops=study.plan.target.budget_flops,
        allocation=Allocation.model_validate(
            summarize_allocation(choice.allocation, choice.batch_tokens)
        ),
        shape=ShapeSize.model_validate(canon.to_json(choice.shape)),
        aspect=build_aspect_section(choice),
        params=params,
        # `counts` holds for forerun's own model of this shape. The user's model may have fewer
        # parameters than that model's embeddings, so the difference is limited to 0.
        params_non_embedding=max(0, params - (counts.total - counts.non_embedding)),
        num_steps=choice.num_steps,
        tokens=choice.num_tokens,
        flops_causal=float(compute_flops_per_token(choice.shape)) * choice.num_tokens,
        prediction=prediction.model_copy(update={"warnings": warnings}),
    )
