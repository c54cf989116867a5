"""Section `transfer` of the report: verdicts, their runs, and the values for the main run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from forerun._launcher.report.views import transfer_findings as findings
from forerun._launcher.report.views.curve_comparison import describe_spikes
from forerun._launcher.report.views.search import build_tie
from forerun._launcher.study.experiments.sizes import (
    SIZE_AXES,
    Sizes,
    get_base_sizes,
    get_base_value,
    list_axis_sizes,
)
from forerun._launcher.study.experiments.transfer_tests import TransferTest
from forerun._launcher.study.plan.study import Study
from forerun._proxies.core.hyperparameters import (
    HYPERPARAMETERS,
    LEARNING_RATE,
    WARMUP,
    WITH_OPTIMUM,
    get_hyperparameter,
)
from forerun._proxies.core.notation import format_factor
from forerun._proxies.core.powers import Powers, Ratios
from forerun._proxies.core.rules import get_scaling, scale_value
from forerun._proxies.core.spec import RunResult
from forerun._transfer.question import Hyperparameter

if TYPE_CHECKING:
    from forerun._launcher.study.experiments.transfer_results import TransferResult, Verdicts
    from forerun._transfer.verdict.joint_verdict import JointVerdict
    from forerun._transfer.verdict.verdict import Verdict


_ALWAYS_SHOWN = tuple(name for name, known in HYPERPARAMETERS.items() if known.set_by != "axes")
"""Hyperparameters that are shown whether they were searched or not."""


def build_transfer_section(
    study: Study,
    transfer_result: TransferResult,
    verdicts: Verdicts,
    results: Mapping[str, RunResult],
) -> findings.Transfer:
    """Return section `transfer`.

    The section has the tests with their verdicts and runs, the verdict on the learning rate over
    all axes, and the table of values.
    """
    from forerun._transfer.verdict.summary import summarize_joint_verdict

    tested = [test.hyperparameter for test, _ in verdicts.tests]
    return findings.Transfer(
        tests=[
            findings.TransferTest(
                axis=test.axis,
                hyperparameter=test.hyperparameter,
                verdict=_summarize_verdict(study, test, results, verdict),
                runs=_list_runs(study, test, results),
            )
            for test, verdict in verdicts.tests
        ],
        together=findings.JointVerdict.model_validate(summarize_joint_verdict(verdicts.together)),
        values=[
            _build_value_row(study, transfer_result, verdicts, name)
            for name in (*WITH_OPTIMUM, *study.plan.search.user_axes)
            if name in (*_ALWAYS_SHOWN, *transfer_result.best, *tested)
            and study.plan.is_passed_to_trainer(name)
        ],
        learning_rate=transfer_result.learning_rate,
        at_base_optimum=transfer_result.at_optimum,
    )


def _summarize_verdict(
    study: Study, test: TransferTest, results: Mapping[str, RunResult], verdict: Verdict
) -> findings.Verdict:
    """Return a verdict as a finding.

    If a single run causes the drift, its reasons get a sentence about the run's gradient spikes.
    """
    from forerun._transfer.verdict.summary import summarize_verdict

    body, condition = summarize_verdict(verdict), test.grid
    if verdict.culprit is not None:
        sizes = {spec.id: condition.get_size(spec) for spec, _ in condition.specs}
        words = describe_spikes(study, condition.specs, results, sizes, verdict.culprit)
        body["reasons"] = [*verdict.reasons, *filter(None, [words])]
    return findings.Verdict.model_validate(body)


def _list_runs(
    study: Study, test: TransferTest, results: Mapping[str, RunResult]
) -> list[findings.TransferRun]:
    conditions = {study.plan.proxy.parametrization: test.grid}
    if test.control:
        conditions["sp"] = test.control
    return [
        findings.TransferRun(
            arm=name,
            size=condition.get_size(spec),
            log2_value=log2_value,
            seed=spec.seed,
            loss_nats=results[spec.id].loss_nats,
            status=results[spec.id].status,
        )
        for name, condition in conditions.items()
        for spec, log2_value in condition.specs
    ]


def _build_value_row(
    study: Study, transfer_result: TransferResult, verdicts: Verdicts, name: Hyperparameter
) -> findings.TargetValue:
    """Return a hyperparameter's row of the table of values.

    The row has the value at the base and at the target, the rule that connects them, and the axes
    over which that was tested.
    """
    from forerun._transfer.verdict.joint_verdict import needs_test
    from forerun._transfer.verdict.summary import summarize_regret, summarize_verdict

    base, target, warmup = get_base_sizes(study), verdicts.target, transfer_result.warmup
    tested = [verdict for test, verdict in verdicts.tests if test.hyperparameter == name]
    worst: Verdict | JointVerdict | None = max(tested, key=_rank_verdict, default=None)
    if name == LEARNING_RATE:
        worst = verdicts.together
    axes = [verdict.question.axis for verdict in tested]
    has_duration_rule = name == WARMUP
    covered_axes = [*axes, *(["duration"] if has_duration_rule and warmup.finding else [])]
    margin_nats = study.plan.transfer.margin_nats
    tie = next((tie for tie in transfer_result.search.ties if tie.hyperparameter == name), None)
    value, rule = _carry_value(study, transfer_result, target, name)
    summaries = [findings.Verdict.model_validate(summarize_verdict(verdict)) for verdict in tested]
    costs = (summary.cost_of_2x_off_nats for summary in summaries)
    return findings.TargetValue(
        hyperparameter=name,
        base_value=_get_base_value(study, transfer_result, name),
        target_value=value,
        rule=f"{tie.describe(margin_nats)}. {rule}" if tie else rule,
        tested=list(axes),
        untested=[
            axis
            for axis in SIZE_AXES
            if axis not in covered_axes and needs_test(target.get_size(axis), base.get_size(axis))
        ],
        outcome=worst.outcome if worst else None,
        drifts={summary.axis: summary.drift_octaves_per_doubling for summary in summaries},
        regret_nats=findings.Estimate.model_validate(summarize_regret(worst)),
        cost_of_2x_off_nats=next((cost for cost in costs if cost is not None), None),
        tie=build_tie(tie, margin_nats) if tie else None,
        carry=warmup.to_json(margin_nats) if has_duration_rule else None,
    )


def _get_base_value(
    study: Study, transfer_result: TransferResult, name: Hyperparameter
) -> findings.Number | str | None:
    """Return a hyperparameter's value at the base; for a categorical axis of words, the word."""
    value = get_base_value(study, name, transfer_result.point)
    axis = study.plan.search.user_axes.get(name)
    return axis.get_value(name, value).word if axis and axis.word_values else value


def _rank_verdict(verdict: Verdict) -> tuple[int, float]:
    """Return the sort key of a verdict: drifts last, then cannot tell, then by regret."""
    rank = ("holds", "cannot_tell", "drifts").index(verdict.outcome)
    return rank, verdict.regret_nats.high if verdict.regret_nats else 0.0


def _carry_value(
    study: Study, transfer_result: TransferResult, target: Sizes, name: Hyperparameter
) -> tuple[findings.Number | str | None, str]:
    """Return a value at the target, and the rule that gives it, in words."""
    base, rules = get_base_sizes(study), study.plan.parametrization
    ratios = Ratios(**{axis: target.get_size(axis) / base.get_size(axis) for axis in SIZE_AXES})
    unscaled = "The same value at every size"
    if name == LEARNING_RATE:
        measured = transfer_result.powers_at(target)
        notes = [f"Set at the base width, and scaled by {rules.name} for each kind of parameter"]
        notes += [
            f"Times {format_factor(ratio)}^{power:+.3f} over {axis}, as measured"
            for axis, power in measured.items()
            if (ratio := getattr(ratios, axis)) != 1
        ]
        notes += [
            f"No exponent over {axis} could be measured, so none is used"
            for axis in study.plan.transfer.measured_rules
            if list_axis_sizes(study, axis) and axis not in measured
        ]
        return transfer_result.get_rate(base, target), ". ".join(notes)
    value = get_base_value(study, name, transfer_result.point)
    if name == WARMUP:
        words = transfer_result.warmup.describe(study.plan.transfer.margin_nats)
        return transfer_result.get_point(study, target)[name], words
    if name in study.plan.search.user_axes:
        user_value = study.plan.search.user_axes[name].get_value(name, value)
        is_unscaled = user_value.powers == Powers()
        return user_value.compute_value(
            ratios
        ), unscaled if is_unscaled else f"Times {user_value.powers}"
    powers, hyperparameter = get_scaling(rules, name), get_hyperparameter(name)
    if hyperparameter.can_be_off and not value:
        return value, "Off at every size"
    if powers == Powers():
        return value, unscaled
    subject = "Hidden matrices: multiplied"
    if hyperparameter.scale == "log2_complement":
        subject = f"1 - {name} is multiplied"
    return scale_value(rules, name, value, ratios), f"{subject} by {powers}"
