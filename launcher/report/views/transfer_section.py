"""Section `transfer` of the report: verdicts, their runs, and the values for the main run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from forerun._launcher.report.views import transfer_findings as findings
from forerun._launcher.report.views.finding import Estimate, Number
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
    from forerun._transfer.verdict.summary import summarize_joint_verdict, summarize_verdict

    tests = [
        findings.TransferTest(
            axis=test.axis,
            hyperparameter=test.hyperparameter,
            verdict=findings.Verdict.model_validate(summarize_verdict(verdict)),
            runs=_list_runs(study, test, results),
        )
        for test, verdict in verdicts.tests
    ]
    together = findings.JointVerdict.model_validate(summarize_joint_verdict(verdicts.together))
    shown = {*_ALWAYS_SHOWN, *transfer_result.best, *(test.hyperparameter for test in tests)}
    values = []
    for name in (*WITH_OPTIMUM, *study.plan.search.user_axes):
        if name in shown and study.plan.is_passed_to_trainer(name):
            tested = [test.verdict for test in tests if test.hyperparameter == name]
            overall: findings.BaseVerdict | None = max(tested, key=_rank_verdict, default=None)
            if name == LEARNING_RATE:
                overall = together
            values.append(
                _build_value_row(study, transfer_result, verdicts.target, name, tested, overall)
            )
    return findings.Transfer(
        tests=tests,
        together=together,
        values=values,
        learning_rate=transfer_result.learning_rate,
        at_base_optimum=transfer_result.at_optimum,
    )


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
    study: Study,
    transfer_result: TransferResult,
    target: Sizes,
    name: Hyperparameter,
    tested: Sequence[findings.Verdict],
    overall: findings.BaseVerdict | None,
) -> findings.TargetValue:
    """Return a hyperparameter's row of the table of values.

    The row has the value at the base and at the target, the rule that connects them, and the axes
    over which that was tested.

    Args:
        study: The study.
        transfer_result: Values that the transfer tests give.
        target: Sizes of the main run.
        name: Name of the hyperparameter.
        tested: Verdicts on the hyperparameter.
        overall: Verdict of the row: the worst one, or for the learning rate the joint one.
    """
    from forerun._transfer.verdict.joint_verdict import needs_test

    base, warmup = get_base_sizes(study), transfer_result.warmup
    has_duration_rule = name == WARMUP
    covered_axes = {verdict.axis for verdict in tested}
    if has_duration_rule and warmup.finding:
        covered_axes.add("duration")
    margin_nats = study.plan.transfer.margin_nats
    tie = next((tie for tie in transfer_result.search.ties if tie.hyperparameter == name), None)
    value, rule = _carry_value(study, transfer_result, target, name)
    costs = (verdict.cost_of_2x_off_nats for verdict in tested)
    return findings.TargetValue(
        hyperparameter=name,
        base_value=_get_base_value(study, transfer_result, name),
        target_value=value,
        rule=f"{tie.describe(margin_nats)}. {rule}" if tie else rule,
        tested=[verdict.axis for verdict in tested],
        untested=[
            axis
            for axis in SIZE_AXES
            if axis not in covered_axes and needs_test(target.get_size(axis), base.get_size(axis))
        ],
        outcome=overall.outcome if overall else None,
        drifts={verdict.axis: verdict.drift_octaves_per_doubling for verdict in tested},
        regret_nats=overall.regret_nats if overall else Estimate(value=None, interval=None),
        cost_of_2x_off_nats=next((cost for cost in costs if cost is not None), None),
        tie=build_tie(tie, margin_nats) if tie else None,
        carry=warmup.to_json(margin_nats) if has_duration_rule else None,
    )


def _get_base_value(
    study: Study, transfer_result: TransferResult, name: Hyperparameter
) -> Number | str | None:
    """Return a hyperparameter's value at the base; for a categorical axis of words, the word."""
    value = get_base_value(study, name, transfer_result.point)
    axis = study.plan.search.user_axes.get(name)
    return axis.get_value(name, value).word if axis and axis.word_values else value


def _rank_verdict(verdict: findings.Verdict) -> tuple[int, float]:
    """Return the sort key of a verdict: drifts last, then cannot tell, then by regret."""
    rank = ("holds", "cannot_tell", "drifts").index(verdict.outcome)
    interval = verdict.regret_nats.interval if verdict.regret_nats else None
    return rank, interval[1] if interval else 0.0


def _carry_value(
    study: Study, transfer_result: TransferResult, target: Sizes, name: Hyperparameter
) -> tuple[Number | str | None, str]:
    """Return a value at the target, and the rule that gives it, in words."""
    base, rules = get_base_sizes(study), study.plan.parametrization
    ratios = Ratios(**{axis: target.get_size(axis) / base.get_size(axis) for axis in SIZE_AXES})
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
        powers, scaled = user_value.powers, user_value.compute_value(ratios)
        text = f"Times {powers}"
    else:
        powers, hyperparameter = get_scaling(rules, name), get_hyperparameter(name)
        if hyperparameter.can_be_off and not value:
            return value, "Off at every size"
        scaled = scale_value(rules, name, value, ratios)
        text = f"Hidden matrices: multiplied by {powers}"
        if hyperparameter.scale == "log2_complement":
            text = f"1 - {name} is multiplied by {powers}"
    return scaled, "The same value at every size" if powers == Powers() else text
