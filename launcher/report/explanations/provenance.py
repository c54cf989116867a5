"""The provenance of every field of a frozen config, as built at the freeze.

Each kind of origin (`forerun._launcher.report.explanations.origins`) has a function in
`_EXPLAINERS`. The function states the source of the field, the strength of the evidence, and the
changes of the study that would change the field.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

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
    ValueSource,
    list_fields,
)
from forerun._launcher.report.explanations.origins import (
    Origin,
    OriginKind,
    find_hyperparameter,
    find_origin,
)
from forerun._launcher.report.explanations.parametrizations import describe_forward_laws
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
from forerun._proxies.core.hyperparameters import get_hyperparameter
from forerun._proxies.core.optimizers import OPTIMIZERS, RECIPES
from forerun._proxies.core.rules import (
    Parametrization,
    depends_on_shape,
    get_scaling,
    has_decay,
    make_kind_rule,
)
from forerun._transfer.question import from_log2
from forerun._transfer.verdict.rules import TransferRule

if TYPE_CHECKING:
    from forerun._launcher.report.views.transfer_findings import Interval, TargetValue

_SECTIONS_OF_ALL_RUNS = ("data", "model", "proxy")
"""Sections of the plan that every run follows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OriginParts:
    """The explanation of a field by its kind of origin."""

    source: ValueSource
    tests: Sequence[TestEvidence] = ()
    """Transfer tests that bear on the field."""
    strength: EvidenceStrength | None = None
    """Strength of the evidence; None if tests and gates determine it."""
    change: Sequence[str] = ()
    """Sentences on what would change the field, other than tests, gates, and plan keys."""
    keys: Sequence[str] = ()
    """Plan keys that would change the field; if empty, the keys of the field's origin do."""


def build_provenance(context: DecisionContext) -> list[Provenance]:
    """Build a record for every field of the decision."""
    return [
        _build_record(context, field, find_origin(field.key))
        for field in list_fields(context.decision)
    ]


def _build_record(context: DecisionContext, field: Field, origin: Origin) -> Provenance:
    """Build the record of a field from its origin, its tests, and its gates."""
    parts = _EXPLAINERS[origin.kind](context, field, origin)
    strength = parts.strength or build_strength(
        parts.tests, context.select_gates(*origin.gates), before=origin.strength
    )
    change = [
        f"gate {gate.name}: {gate.reason}" for gate in strength.gates if gate.outcome != "passed"
    ]
    change += [
        sentence for test in parts.tests for sentence in describe_deciding_runs(test.verdict)
    ]
    if any(test.verdict.outcome == "cannot_tell" for test in parts.tests):
        change.append(
            "`forerun transfer PLAN --study STUDY --spend` adds the runs that a verdict still needs"
        )
    return Provenance(
        field=field.path,
        source=parts.source,
        strength=strength,
        change=(
            *change,
            *parts.change,
            *context.describe_key_changes(parts.keys or origin.keys),
            *origin.change,
        ),
        warnings=build_forecast_warnings(strength.gates),
    )


def _build_plan_source(
    context: DecisionContext, keys: Sequence[str], text: str = "", rules: tuple[str, ...] = ()
) -> ValueSource:
    """Build the source of a field that a plan key decides.

    The first key that is not 0 or empty decides, or else the last.
    """
    plan_keys = []
    for key in keys:
        plan_keys.append(context.get_plan_key(key))
        if plan_keys[-1].value:
            break
    *unset, deciding = plan_keys
    sentence = f"Plan key {format_plan_key(deciding)}"
    if unset:
        sentence += f", because {join_names(list(map(format_plan_key, unset)))} leaves it open"
    kind: SourceKind = "default" if deciding.value == deciding.default else "plan"
    return ValueSource(
        kind=kind,
        text=". ".join(filter(None, (sentence, text))),
        plan_keys=tuple(plan_keys),
        rules=rules,
    )


def _explain_plan_key(context: DecisionContext, field: Field, origin: Origin) -> OriginParts:
    """Explain a field that a plan key decides.

    The evidence comes from the transfer tests along the field's axis, or from the gates of its
    origin. Without tests and gates, it comes from whether the runs used the same value.
    """
    record, _, name = field.key.rpartition(".")
    rules: tuple[str, ...] = ()
    if record == "parametrization" and name != "name":
        rules = (f"{name} = {field.value}: {sources.describe_answer(name, field.value)}",)
    tests = context.select_tests(lambda _, axis: axis == origin.axis)
    source = _build_plan_source(
        context,
        origin.keys,
        origin.text,
        rules or _describe_preset(context) if record == "parametrization" else (),
    )
    strength = None if tests or origin.gates else _compare_with_runs(context, field, origin, source)
    return OriginParts(source=source, tests=tests, strength=strength)


def _describe_preset(context: DecisionContext) -> tuple[str, ...]:
    """Return the name of the parametrization, and its source."""
    rules = context.decision.parametrization
    return (f"{rules}: {sources.PRESETS[rules.name]}",)


def _compare_with_runs(
    context: DecisionContext, field: Field, origin: Origin, source: ValueSource
) -> EvidenceStrength:
    """Return the strength of the evidence, by whether the runs used the same value.

    The evidence is `assumed` if all runs used the value, or if some of them used another. It has
    the kind of the field's origin if the value is no part of a run.
    """
    run_values = (
        [operator.attrgetter(origin.in_runs)(spec) for spec in context.specs]
        if origin.in_runs
        else []
    )
    if (
        all(value == field.value for value in run_values)
        if run_values
        else source.plan_keys[-1].key.startswith(_SECTIONS_OF_ALL_RUNS)
    ):
        return _describe_untested(context)
    if not run_values:
        return EvidenceStrength(
            kind=origin.strength_kind, text=origin.strength or "A choice. No proxy tests it"
        )
    values = ", ".join(sorted({format_value(value) for value in run_values}))
    population = f"the {notation.format_counted(len(run_values), 'run')} behind this config"
    text = f"{run_values.count(field.value)} of {population} used this value. Values used: {values}"
    extrapolation = int(str(field.value)) / max(run_values) if origin.axis else None
    return EvidenceStrength(kind="assumed", text=text, extrapolation=extrapolation)


def _describe_untested(context: DecisionContext) -> EvidenceStrength:
    """Return the evidence for a value that every run used, so that no run tests another value."""
    text = (
        f"All {notation.format_counted(len(context.specs), 'run')} behind this config used this "
        "value, so none tests another"
    )
    return EvidenceStrength(kind="assumed", num_runs=len(context.specs), text=text)


def _explain_stated(context: DecisionContext, field: Field, origin: Origin) -> OriginParts:
    """Explain a field that the corpus, other fields, or this version of forerun determine."""
    kind: Any = origin.kind
    plan_keys = tuple(context.get_plan_key(key) for key in origin.keys)
    source = ValueSource(
        kind=kind, text=origin.text, rules=origin.rules, fields=origin.fields, plan_keys=plan_keys
    )
    strength = EvidenceStrength(
        kind=origin.strength_kind, text=origin.strength, gates=context.select_gates(*origin.gates)
    )
    return OriginParts(source=source, strength=strength)


def _explain_verdict(context: DecisionContext, field: Field, origin: Origin) -> OriginParts:
    """Explain a number of a transfer rule."""
    rule = field.of
    assert isinstance(rule, TransferRule)
    tests = context.select_tests(
        lambda name, axis: (name, axis) == (rule.hyperparameter, rule.axis)
    )
    text = f"The verdict on {get_hyperparameter(rule.hyperparameter).label} over {rule.axis}. "
    exponent = "is measured" if rule.source == "measured" else "comes from the parametrization"
    text += (
        "The runs do not determine this number"
        if field.value is None
        else f"The exponent {exponent}"
    )
    if (
        rule.source == "measured"
        and rule.measured_power is not None
        and rule.power != round(rule.measured_power, 2)
    ):
        text += (
            f": {rule.power:+.2f} from base to target, {rule.measured_power:+.2f} over the "
            "sizes that were run"
        )
    runs = tuple(test.runs for test in tests)
    plan_keys = tuple(context.get_plan_key(key) for key in origin.keys)
    return OriginParts(
        source=ValueSource(kind="verdict", text=text, runs=runs, plan_keys=plan_keys), tests=tests
    )


def _describe_law(rules: Parametrization, group: ParameterGroup, name: str) -> str:
    """Describe the law that gives a number of a parameter group from the number at the base."""
    rates_by_shape = OPTIMIZERS[group.optimizer].rates_by_shape
    rule = make_kind_rule(rules, group.kind, by_shape=rates_by_shape)
    power = getattr(rule, name) if hasattr(rule, name) else get_scaling(rules, name, group.kind)
    base_text = (
        "1 - value" if get_hyperparameter(name).scale == "log2_complement" else "the base's value"
    )
    shape_note = ""
    if rates_by_shape and name in group.settings and depends_on_shape(name):
        source = sources.describe_answer("muon_rate", rules.muon_rate)
        shape_note = f", by the matrix's own shape ({source})"
    return (
        f"For {to_words(group.kind)} parameters: "
        f"{base_text}{'' if str(power) == '1' else f' times {power}'}{shape_note}"
    )


def _explain_rule(context: DecisionContext, field: Field, origin: Origin) -> OriginParts:
    """Explain a number of the parametrization: of a group, or a multiplier of the forward pass."""
    rules, name = context.decision.parametrization, field.key.rpartition(".")[2]
    text = (
        _describe_law(rules, field.of, name)
        if isinstance(field.of, ParameterGroup)
        else describe_forward_laws(rules)[name]
    )
    hyperparameter = find_hyperparameter(field.key)
    if hyperparameter is not None and _is_searched(context, hyperparameter):
        return _explain_by_search(
            context, hyperparameter, detail=text, rules=_describe_preset(context)
        )
    source = ValueSource(
        kind="rule",
        text=text,
        rules=_describe_preset(context),
        plan_keys=(context.get_plan_key("proxy.parametrization"),),
    )
    return OriginParts(source=source, keys=["proxy.parametrization"])


def _explain_hyperparameter(context: DecisionContext, field: Field, origin: Origin) -> OriginParts:
    """Explain a field that follows from a hyperparameter set at the base."""
    group, name, rules = field.of, field.key.rpartition(".")[2], context.decision.parametrization
    hyperparameter = str(find_hyperparameter(field.key))
    if isinstance(group, ParameterGroup):
        hyperparameter = RECIPES[context.decision.optimizer].get_hyperparameter_name(
            group.optimizer, hyperparameter
        )
    else:
        steps = context.decision.learning_rate.schedule.num_steps
        detail = (
            ""
            if name == hyperparameter
            else f"{format_value(field.value)} of {format_value(steps)} steps"
        )
        return _explain_by_search(context, hyperparameter, detail=detail)
    if field.value or not get_hyperparameter(name).can_be_off or has_decay(rules, group.kind):
        return _explain_by_search(
            context,
            hyperparameter,
            detail=_describe_law(rules, group, name) if field.value else "",
            rules=_describe_preset(context),
        )
    key = "proxy.rules.decayed"
    text = f"0 for {to_words(group.kind)} parameters, whatever the value of others"
    decay_rule = (
        f"decayed = {rules.decayed}: {sources.describe_answer('decayed', rules.decayed)}",
    )
    source = ValueSource(
        kind="rule", text=text, plan_keys=(context.get_plan_key(key),), rules=decay_rule
    )
    return OriginParts(source=source, strength=_describe_untested(context), keys=[key])


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
    context: DecisionContext, name: str, *, detail: str, rules: tuple[str, ...] = ()
) -> OriginParts:
    """Explain a field by the search, the loss basins and the verdicts of its hyperparameter.

    Args:
        context: Knowledge of the study.
        name: Name of the hyperparameter.
        detail: How the field follows from the hyperparameter; empty if the two are equal.
        rules: Rules of the parametrization that apply.
    """
    row = context.find_value_row(name)
    tests = context.select_tests(lambda tested_name, _: tested_name == name)
    searched = _is_searched(context, name)
    key = _find_plan_key(context, name)
    how = ". ".join(filter(None, (row.rule if row else "", detail)))
    if searched:
        kind, text, runs = _describe_value_source(context, name, row, tests)
        text = ". ".join(filter(None, (text, how)))
        source = ValueSource(
            kind=kind, text=text, plan_keys=(context.get_plan_key(key),), rules=rules, runs=runs
        )
    else:
        source = _build_plan_source(context, [key], how, rules)
    untested = join_names(row.untested) if row else ""
    if tests:
        outcome = row.outcome if row else tests[0].verdict.outcome
        prefaces = [f"Over all axes together: {to_words(outcome)}"] if len(tests) > 1 else []
        prefaces += [f"Over {untested}: assumed, not tested"] if untested else []
        strength = build_strength(
            tests, context.select_gates("transfer"), before=". ".join(prefaces), outcome=outcome
        )
    elif searched:
        scope = f" over {untested}" if untested else ""
        text = f"Searched at the base. That it stays the same{scope} is assumed, not tested"
        strength = EvidenceStrength(kind="assumed", text=text)
    else:
        strength = _describe_untested(context)
    return OriginParts(source=source, tests=tests, strength=strength, keys=[key])


def _describe_value_source(
    context: DecisionContext, name: str, row: TargetValue | None, tests: Sequence[TestEvidence]
) -> tuple[SourceKind, str, tuple[SourceRuns, ...]]:
    """Describe how a searched value was found, and return the runs behind it.

    The value is the fitted optimum at the base, or else the value of the search's best trial. `row`
    is the hyperparameter's row of the table of values, or None.
    """
    search, transfer = context.report.search, context.report.transfer
    assert search is not None and transfer is not None
    base = None if row is None else row.base_value
    for test in tests if transfer.at_base_optimum else ():
        verdict, runs = test.verdict, test.runs
        optimum = next(
            (
                candidate
                for candidate in verdict.optima
                if candidate.size == verdict.base_size
                # The base value was rounded to a few digits.
                and candidate.value
                and not isinstance(base, str)
                and math.isclose(base or 0.0, candidate.value, rel_tol=1e-3)
            ),
            None,
        )
        if optimum is None:
            continue
        size = format_axis_size(verdict.axis, verdict.base_size)
        text = f"The fitted optimum at {size}, {format_value(base)}"
        if (ends := optimum.interval_log2) is not None:
            bounds = (format_value(from_log2(verdict.hyperparameter, end)) for end in ends)
            text += f" [{', '.join(bounds)}]"
        runs_text = notation.format_counted(optimum.num_runs, "run")
        text += f" at level {verdict.level:g}, from {runs_text}"
        return "valley", text, (runs, context.search)
    best = next(trial for trial in search.trials if trial.index == search.best_trial)
    ties = (tie.searched for tie in search.ties if tie.hyperparameter == name)
    best_value = next(ties, search.best.get(name))
    trial = f"trial {best.index} with {notation.format_loss(best.loss_nats)} nats"
    trials = notation.format_counted(len(search.trials), "trial")
    text = f"The best of {trials} ({search.sampler}), {trial}, "
    text += f"has {get_hyperparameter(name).label} {format_value(best_value)}"
    if row is not None and base not in (None, best_value) and not row.tie:
        text += f". {format_value(base)} is used"
    return "search", text, (context.search,)


def _explain_fit(context: DecisionContext, field: Field, origin: Origin) -> OriginParts:
    """Explain a field that the ladder's fit decides: size, tokens, steps, or the expected loss."""
    fit, choice, expected = context.report.fit, context.report.choice, context.decision.predicted
    assert fit is not None and choice is not None
    best, backtest = choice.allocation, fit.backtest
    members = [
        f"{law.form} {notation.format_percent(law.weight)}" for law in fit.members if law.weight > 0
    ]
    laws = ", ".join(members) or fit.form
    text = (
        f"{origin.text}, by the fit of {notation.format_counted(fit.num_runs, 'ladder run')} "
        f"({laws}; {fit.status})"
    )
    if field.key.startswith("predicted."):
        if field.value in (None, []):
            text += ". The ladder has too few runs, or too few short ones, to determine it"
        spans: list[tuple[str, Interval | None]] = [
            ("Loss of one new run in nats:", (expected.low_nats, expected.high_nats))
        ]
    else:
        params, tokens = (format_short_size(round(size)) for size in (best.params, best.tokens))
        text += (
            f". Its optimum is {params} parameters on {tokens} tokens, for "
            f"{notation.format_flops(best.flops)} FLOPs"
        )
        spans = [
            ("Params at the optimum:", best.params_interval),
            ("Tokens at the optimum:", best.tokens_interval),
        ]
    backtest_text = "No rung was held out"
    if backtest:
        error = notation.format_percent(backtest.largest_error)
        backtest_text = f"Largest rungs held out: {backtest.num_held_out}, predicted within {error}"
    facts = [origin.strength, backtest_text]
    facts += [
        f"{label} {notation.format_interval(interval, '.4g')} at level {expected.level:g}"
        for label, interval in spans
        if interval
    ]
    strength = build_strength(
        (),
        context.select_gates(*origin.gates),
        before=". ".join(filter(None, facts)),
        num_runs=fit.num_runs,
        num_seeds=context.plan.ladder.num_seeds,
        extrapolation=expected.extrapolation,
    )
    plan_keys = tuple(context.get_plan_key(key) for key in origin.keys)
    source = ValueSource(
        kind="fit", text=text, plan_keys=plan_keys, runs=(context.ladder,), fields=origin.fields
    )
    return OriginParts(source=source, strength=strength)


_EXPLAINERS: dict[OriginKind, Callable[[DecisionContext, Field, Origin], OriginParts]] = {
    "plan": _explain_plan_key,
    "tuned": _explain_hyperparameter,
    "rule": _explain_rule,
    "fit": _explain_fit,
    "verdict": _explain_verdict,
    "corpus": _explain_stated,
    "derived": _explain_stated,
    "fixed": _explain_stated,
}
