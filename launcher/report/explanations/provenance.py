"""The provenance of every field of a frozen config, as built at the freeze.

Each kind of origin (`forerun._launcher.report.explanations.origins`) has a function in
`_EXPLAINERS`. The function states the source of the field, the strength of the evidence, and the
transfer tests that bear on the field.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, cast

from forerun._launcher.main_run.frozen.frozen import ParameterGroup
from forerun._launcher.report.explanations.context import (
    DecisionContext,
    TestEvidence,
    build_strength,
)
from forerun._launcher.report.explanations.field_provenance import (
    EvidenceStrength,
    Field,
    Provenance,
    SourceKind,
    SourceRuns,
    StrengthKind,
    ValueSource,
    list_fields,
)
from forerun._launcher.report.explanations.origins import (
    Origin,
    OriginKind,
    find_hyperparameter,
    find_origin,
)
from forerun._launcher.report.explanations.parametrizations import (
    describe_forward_laws,
    describe_group_law,
)
from forerun._launcher.report.explanations.text import format_plan_key, format_value
from forerun._launcher.report.views.transfer import (
    describe_deciding_runs,
    format_axis_size,
    format_short_size,
)
from forerun._launcher.report.views.wording import join_names, to_words
from forerun._launcher.study.plan import sources
from forerun._launcher.study.stages.gates import build_forecast_warnings
from forerun._proxies.core import notation
from forerun._proxies.core.hyperparameters import LEARNING_RATE, get_hyperparameter
from forerun._proxies.core.optimizers import RECIPES
from forerun._proxies.core.rules import has_decay
from forerun._transfer.question import from_log2
from forerun._transfer.verdict.rules import TransferRule

if TYPE_CHECKING:
    from forerun._launcher.report.views.finding import Interval
    from forerun._launcher.report.views.transfer_findings import TargetValue

_SECTIONS_OF_ALL_RUNS = ("data", "model", "proxy")
"""Sections of the plan that every run follows."""


class Explanation(NamedTuple):
    """The explanation of a field by its kind of origin."""

    source: ValueSource
    strength: EvidenceStrength
    tests: Sequence[TestEvidence] = ()
    """Transfer tests that bear on the field."""


def build_provenance(context: DecisionContext) -> list[Provenance]:
    """Build a record for every field of the decision."""
    records = []
    for field in list_fields(context.decision):
        origin = find_origin(field.key)
        explanation = _EXPLAINERS[origin.kind](context, field, origin)
        records.append(
            Provenance(
                field=field.path,
                source=explanation.source,
                strength=explanation.strength,
                change=tuple(_list_changes(context, origin.kind, explanation)),
                warnings=build_forecast_warnings(explanation.strength.gates),
            )
        )
    return records


def _list_changes(
    context: DecisionContext, kind: OriginKind, explanation: Explanation
) -> list[str]:
    """Return sentences on what would change a field: gates, tests, plan keys, and other fields."""
    source, strength, tests = explanation
    changes = [
        f"gate {gate.name}: {gate.reason}" for gate in strength.gates if gate.outcome != "passed"
    ]
    changes += [sentence for test in tests for sentence in describe_deciding_runs(test.verdict)]
    if any(test.verdict.outcome == "cannot_tell" for test in tests):
        changes.append(
            "`forerun transfer PLAN --study STUDY --spend` adds the runs that a verdict still needs"
        )
    changes += context.describe_key_changes([key.key for key in source.plan_keys])
    if kind == "derived":
        decider = source.fields[0]
        changes.append(f"It changes with {decider}: see `forerun explain FROZEN {decider}`")
    elif kind == "corpus":
        changes.append(
            "`forerun tokenize SOURCE --out DIR` makes another corpus. Other data need new runs"
        )
    elif kind == "fixed":
        changes.append(
            "No plan key sets it. Only another version of forerun may freeze another value"
        )
    return changes


# ---- Fields without evidence from runs ----


def _explain_stated(context: DecisionContext, field: Field, origin: Origin) -> Explanation:
    """Explain a field that the corpus, other fields, or this version of forerun determine."""
    strength_kind: StrengthKind = "exact"
    if origin.kind == "corpus":
        text = "The manifest states it"
    elif origin.kind == "derived":
        text = "Follows from other fields"
    elif origin.practices:
        strength_kind, text = "assumed", "Common practice. No run of this study tests it"
    else:
        strength_kind, text = "chosen", "A convention. No run tests another"
    return Explanation(
        ValueSource(
            kind=cast(SourceKind, origin.kind),
            text=origin.text,
            rules=origin.practices,
            fields=origin.fields,
            plan_keys=context.get_plan_keys(origin.keys),
        ),
        EvidenceStrength(kind=strength_kind, text=text, gates=context.select_gates(*origin.gates)),
    )


# ---- Fields that a plan key decides ----


def _build_plan_source(
    context: DecisionContext, keys: Sequence[str], text: str = "", rules: tuple[str, ...] = ()
) -> ValueSource:
    """Build the source of a field that a plan key decides.

    The first key that is not 0 or empty decides, or else the last.
    """
    plan_keys = context.get_plan_keys(keys)
    num_read = next((i for i, key in enumerate(plan_keys, 1) if key.value), len(plan_keys))
    *unset, deciding = plan_keys[:num_read]
    sentence = f"Plan key {format_plan_key(deciding)}"
    if unset:
        sentence += f", because {join_names(list(map(format_plan_key, unset)))} leaves it open"
    return ValueSource(
        kind="default" if deciding.value == deciding.default else "plan",
        text=". ".join(filter(None, (sentence, text))),
        plan_keys=(*unset, deciding),
        rules=rules,
    )


def _explain_plan_key(context: DecisionContext, field: Field, origin: Origin) -> Explanation:
    """Explain a field that a plan key decides.

    The evidence comes from the transfer tests along the field's axis, or from the gates of its
    origin. Without tests and gates, it comes from whether the runs used the same value.
    """
    record_name, _, name = field.key.rpartition(".")
    rules: tuple[str, ...] = ()
    if field.key == "parametrization.name":
        rules = _describe_preset(context)
    elif record_name == "parametrization":
        rules = (f"{name} = {field.value}: {sources.describe_answer(name, field.value)}",)
    source = _build_plan_source(context, origin.keys, origin.text, rules)
    tests = context.select_tests(lambda _, axis: axis == origin.axis)
    strength = (
        build_strength(tests, context.select_gates(*origin.gates))
        if tests or origin.gates
        else _compare_with_runs(context, field, origin)
    )
    return Explanation(source, strength, tests)


def _describe_preset(context: DecisionContext) -> tuple[str, ...]:
    """Return the name of the parametrization, and its source."""
    rules = context.decision.parametrization
    return (f"{rules}: {sources.PRESETS[rules.name]}",)


def _compare_with_runs(context: DecisionContext, field: Field, origin: Origin) -> EvidenceStrength:
    """Return the strength of the evidence, by whether the runs used the same value.

    The evidence is `assumed` for a value that runs used or might have used, and `chosen` for a
    value that is no part of a run.
    """
    if not origin.in_runs:
        if origin.keys[-1].startswith(_SECTIONS_OF_ALL_RUNS):
            return _describe_untested(context)
        return EvidenceStrength(kind="chosen", text="A choice. No proxy tests it")
    run_values = list(map(operator.attrgetter(origin.in_runs), context.specs))
    num_same = run_values.count(field.value)
    if num_same == len(run_values):
        return _describe_untested(context)
    runs = notation.format_counted(len(run_values), "run")
    values = ", ".join(sorted(set(map(format_value, run_values))))
    return EvidenceStrength(
        kind="assumed",
        text=f"{num_same} of the {runs} behind this config used this value. Values used: {values}",
        extrapolation=int(str(field.value)) / max(run_values) if origin.axis else None,
    )


def _describe_untested(context: DecisionContext) -> EvidenceStrength:
    """Return the evidence for a value that every run used, so that no run tests another value."""
    num_runs = len(context.specs)
    text = (
        f"All {notation.format_counted(num_runs, 'run')} behind this config used this value, so "
        "none tests another"
    )
    return EvidenceStrength(kind="assumed", num_runs=num_runs, text=text)


# ---- Numbers of the parametrization, and hyperparameters ----


def _explain_verdict(context: DecisionContext, field: Field, origin: Origin) -> Explanation:
    """Explain a number of a transfer rule."""
    rule = field.record
    assert isinstance(rule, TransferRule)
    tests = context.select_tests(
        lambda name, axis: (name, axis) == (rule.hyperparameter, rule.axis)
    )
    text = f"The verdict on {get_hyperparameter(rule.hyperparameter).label} over {rule.axis}. "
    if field.value is None:
        text += "The runs do not determine this number"
    elif rule.source == "parametrization":
        text += "The exponent comes from the parametrization"
    else:
        text += "The exponent is measured"
    # The two exponents differ if the line through the optima bends.
    if (
        rule.source == "measured"
        and rule.measured_power is not None
        and rule.power != round(rule.measured_power, 2)
    ):
        text += (
            f": {rule.power:+.2f} from base to target, {rule.measured_power:+.2f} over the "
            "sizes that were run"
        )
    return Explanation(
        ValueSource(
            kind="verdict",
            text=text,
            runs=tuple(test.runs for test in tests),
            plan_keys=context.get_plan_keys(origin.keys),
        ),
        build_strength(tests, context.select_gates(*origin.gates)),
        tests,
    )


def _explain_number(context: DecisionContext, field: Field, origin: Origin) -> Explanation:
    """Explain a number that follows from a rule of the parametrization or a hyperparameter.

    It is a number of a parameter group, a multiplier of the forward pass, a number of steps of the
    schedule, or a run-wide setting.
    """
    decision, (record_name, _, name) = context.decision, field.key.rpartition(".")
    rules, group = decision.parametrization, field.record
    hyperparameter = find_hyperparameter(field.key)
    law, detail = "", ""
    if isinstance(group, ParameterGroup):
        law = describe_group_law(rules, group, name)
        if hyperparameter is not None:
            if get_hyperparameter(name).can_be_off and not has_decay(rules, group.kind):
                return _explain_no_decay(context, group)
            hyperparameter = RECIPES[decision.optimizer].get_hyperparameter_name(
                group.optimizer, hyperparameter
            )
    elif record_name == "forward":
        law = describe_forward_laws(rules)[name]
    elif name != hyperparameter:
        num_steps = decision.learning_rate.schedule.num_steps
        detail = f"{format_value(field.value)} of {format_value(num_steps)} steps"
    preset = _describe_preset(context) if law else ()
    is_set_by_rule = origin.kind == "rule" and not (
        hyperparameter is not None and _is_searched(context, hyperparameter)
    )
    if hyperparameter is None or is_set_by_rule:
        source = ValueSource(
            kind="rule",
            text=law,
            rules=preset,
            plan_keys=context.get_plan_keys(("proxy.parametrization",)),
        )
        preface = "The same scaling rule set it in the proxies"
        gates = context.select_gates(*origin.gates)
        return Explanation(source, build_strength((), gates, preface=preface))
    return _explain_by_search(context, hyperparameter, detail=law or detail, rules=preset)


def _explain_no_decay(context: DecisionContext, group: ParameterGroup) -> Explanation:
    """Explain the weight decay of a group that the parametrization does not decay."""
    choice = context.decision.parametrization.decayed
    source = ValueSource(
        kind="rule",
        text=f"0 for {to_words(group.kind)} parameters, whatever the value of others",
        plan_keys=context.get_plan_keys(("proxy.rules.decayed",)),
        rules=(f"decayed = {choice}: {sources.describe_answer('decayed', choice)}",),
    )
    return Explanation(source, _describe_untested(context))


# ---- Values that the search found ----


def _is_searched(context: DecisionContext, name: str) -> bool:
    """Return whether the search tried more than one value of a hyperparameter."""
    search = context.report.search
    assert search is not None
    return len(set(search.ranges.get(name, ()))) > 1 or name in search.can_be_off


def _find_plan_key(context: DecisionContext, name: str) -> str:
    """Return the plan key that sets a hyperparameter, or the range or choices of its search."""
    search, set_by = context.plan.search, get_hyperparameter(name).set_by
    for key, section in (("search.choices", search.choices), ("search.axes", search.axes)):
        if name in section:
            return f"{key}.{name}"
    return f"search.axes.{name}" if set_by == "axes" else f"{set_by}.{name}"


def _explain_by_search(
    context: DecisionContext, name: str, *, detail: str, rules: tuple[str, ...]
) -> Explanation:
    """Explain a field by the search, the loss basins and the verdicts of its hyperparameter.

    Args:
        context: Knowledge of the study.
        name: Name of the hyperparameter.
        detail: How the field follows from the hyperparameter; empty if the two are equal.
        rules: Rules of the parametrization that apply.
    """
    row = context.find_value_row(name)
    tests = context.select_tests(lambda tested_name, _: tested_name == name)
    key, untested = _find_plan_key(context, name), join_names(row.untested) if row else ""
    how = ". ".join(filter(None, (row.rule if row else "", detail)))
    if not _is_searched(context, name):
        source = _build_plan_source(context, [key], how, rules)
        strength = _describe_untested(context)
    else:
        kind, text, runs = _describe_value_source(context, name, row, tests)
        source = ValueSource(
            kind=kind,
            text=". ".join(filter(None, (text, how))),
            plan_keys=context.get_plan_keys((key,)),
            rules=rules,
            runs=runs,
        )
        scope = f" over {untested}" if untested else ""
        text = f"Searched at the base. That it stays the same{scope} is assumed, not tested"
        strength = EvidenceStrength(kind="assumed", text=text)
    if tests:
        outcome = row.outcome if row else tests[0].verdict.outcome
        prefaces = [f"Over all axes together: {to_words(outcome)}"] if len(tests) > 1 else []
        prefaces += [f"Over {untested}: assumed, not tested"] if untested else []
        gates = context.select_gates("transfer")
        strength = build_strength(tests, gates, preface=". ".join(prefaces), outcome=outcome)
    return Explanation(source, strength, tests)


def _describe_value_source(
    context: DecisionContext, name: str, row: TargetValue | None, tests: Sequence[TestEvidence]
) -> tuple[SourceKind, str, tuple[SourceRuns, ...]]:
    """Describe how a searched value was found, and return the runs behind it.

    The value is that of the search's best trial. A learning rate is the fitted optimum at the base
    instead, if one was fitted. `row` is the hyperparameter's row of the table of values, or None.
    """
    search, transfer = context.report.search, context.report.transfer
    assert search is not None and transfer is not None
    if name == LEARNING_RATE and transfer.at_base_optimum:
        test = next(test for test in tests if test.verdict.axis == "width")
        verdict = test.verdict
        optimum = next(optimum for optimum in verdict.optima if optimum.size == verdict.base_size)
        size = format_axis_size(verdict.axis, verdict.base_size)
        text = f"The fitted optimum at {size}, {format_value(optimum.value)}"
        if (ends := optimum.interval_log2) is not None:
            bounds = (format_value(from_log2(name, end)) for end in ends)
            text += f" [{', '.join(bounds)}]"
        num_runs = notation.format_counted(optimum.num_runs, "run")
        text += f" at level {verdict.level:g}, from {num_runs}"
        return "valley", text, (test.runs, context.search)
    best = next(trial for trial in search.trials if trial.index == search.best_trial)
    ties = (tie.searched for tie in search.ties if tie.hyperparameter == name)
    best_value = next(ties, search.best.get(name))
    trials = notation.format_counted(len(search.trials), "trial")
    text = (
        f"The best of {trials} ({search.sampler}), trial {best.index} with "
        f"{notation.format_loss(best.loss_nats)} nats, has {get_hyperparameter(name).label} "
        f"{format_value(best_value)}"
    )
    base_value = best_value if row is None or row.tie else row.base_value
    if base_value not in (None, best_value):
        text += f". {format_value(base_value)} is used"
    return "search", text, (context.search,)


# ---- The ladder's fit ----


def _explain_fit(context: DecisionContext, field: Field, origin: Origin) -> Explanation:
    """Explain a field that the ladder's fit decides: size, tokens, steps, or the expected loss."""
    fit, choice, expected = context.report.fit, context.report.choice, context.decision.predicted
    assert fit is not None and choice is not None
    best = choice.allocation
    members = [
        f"{law.form} {notation.format_percent(law.weight)}" for law in fit.members if law.weight > 0
    ]
    text = (
        f"{origin.text}, by the fit of {notation.format_counted(fit.num_runs, 'ladder run')} "
        f"({', '.join(members) or fit.form}; {fit.status})"
    )
    if field.key.startswith("predicted."):
        if field.value in (None, []):
            text += ". The ladder has too few runs, or too few short ones, to determine it"
        intervals: dict[str, Interval | None] = {
            "Loss of one new run in nats:": (expected.low_nats, expected.high_nats)
        }
    else:
        params, tokens = (format_short_size(round(size)) for size in (best.params, best.tokens))
        text += (
            f". Its optimum is {params} parameters on {tokens} tokens, for "
            f"{notation.format_flops(best.flops)} FLOPs"
        )
        intervals = {
            "Params at the optimum:": best.params_interval,
            "Tokens at the optimum:": best.tokens_interval,
        }
    facts = ["No rung was held out"]
    if backtest := fit.backtest:
        error = notation.format_percent(backtest.largest_error)
        facts = [f"Largest rungs held out: {backtest.num_held_out}, predicted within {error}"]
    facts += [
        f"{label} {notation.format_interval(interval, '.4g')} at level {expected.level:g}"
        for label, interval in intervals.items()
        if interval
    ]
    source = ValueSource(
        kind="fit",
        text=text,
        plan_keys=context.get_plan_keys(origin.keys),
        runs=(context.ladder,),
        fields=origin.fields,
    )
    strength = build_strength(
        (),
        context.select_gates(*origin.gates),
        preface=". ".join(facts),
        num_runs=fit.num_runs,
        num_seeds=context.plan.ladder.num_seeds,
        extrapolation=expected.extrapolation,
    )
    return Explanation(source, strength)


_EXPLAINERS: dict[OriginKind, Callable[[DecisionContext, Field, Origin], Explanation]] = {
    "plan": _explain_plan_key,
    "tuned": _explain_number,
    "rule": _explain_number,
    "fit": _explain_fit,
    "verdict": _explain_verdict,
    "corpus": _explain_stated,
    "derived": _explain_stated,
    "fixed": _explain_stated,
}
