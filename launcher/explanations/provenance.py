"""The provenance of every field, written at the freeze.

Each kind of origin (`launcher.explanations.origins`) has a function that states the source, the
strength of the evidence, and what would change the field.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from launcher.explanations.context import DecisionContext, TestEvidence, build_strength
from launcher.explanations.origins import Origin, OriginKind, hyperparameter_of, origin_of
from launcher.explanations.parametrizations import forward_laws
from launcher.explanations.record import (
    EvidenceStrength,
    Field,
    Provenance,
    SourceKind,
    SourceRuns,
    ValueSource,
    fields_of,
)
from launcher.explanations.text import key_words, number
from launcher.frozen.frozen import ParameterGroup
from launcher.plan import sources
from launcher.study.gates import forecast_warnings
from launcher.views.numbers import listed, words
from launcher.views.transfer import short_size, size_name, wanted
from proxies.core import notation
from proxies.core.hyperparameters import hyperparameter_named
from proxies.core.optimizers import OPTIMIZERS, RECIPES
from proxies.core.rules import Parametrization, decays, follows_shape, kind_rule, scaling
from transfer.question import from_log2
from transfer.verdict.rules import TransferRule

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
    """Sentences on what would change it, besides tests, gates and plan keys."""
    keys: Sequence[str] = ()
    """Plan keys that would change it; empty for those of the field's origin."""


def records_of(known: DecisionContext) -> list[Provenance]:
    """Build a record for every field of the decision."""
    return [
        _build_record(known, field, origin_of(field.key)) for field in fields_of(known.decision)
    ]


def _build_record(known: DecisionContext, field: Field, origin: Origin) -> Provenance:
    """Build the record of a field from its origin, its tests, and its gates."""
    parts = _EXPLAINERS[origin.kind](known, field, origin)
    strength = parts.strength or build_strength(
        parts.tests, known.gates(*origin.gates), before=origin.strength
    )
    change = [
        f"gate {gate.name}: {gate.reason}" for gate in strength.gates if gate.outcome != "passed"
    ]
    change += [sentence for test in parts.tests for sentence in wanted(test.verdict)]
    if any(test.verdict["outcome"] == "cannot_tell" for test in parts.tests):
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
            *known.change_keys(parts.keys or origin.keys),
            *origin.change,
        ),
        warnings=forecast_warnings(strength.gates),
    )


def _build_plan_source(
    known: DecisionContext, keys: Sequence[str], text: str = "", rules: tuple[str, ...] = ()
) -> ValueSource:
    """Build the source of a field that a plan key decides.

    The first key that is not 0 or empty decides, or else the last.
    """
    plan_keys = [known.key(key) for key in keys]
    plan_keys = plan_keys[
        : 1
        + next(
            (index for index, plan_key in enumerate(plan_keys) if plan_key.value),
            len(plan_keys) - 1,
        )
    ]
    *unset, deciding = plan_keys
    sentence = f"Plan key {key_words(deciding)}"
    sentence += (
        f", because {listed([key_words(key) for key in unset])} leaves it open" if unset else ""
    )
    kind: SourceKind = "default" if deciding.value == deciding.default else "plan"
    return ValueSource(
        kind=kind,
        text=". ".join(filter(None, (sentence, text))),
        plan_keys=tuple(plan_keys),
        rules=rules,
    )


def _explain_plan_key(known: DecisionContext, field: Field, origin: Origin) -> OriginParts:
    """Explain a field that a plan key decides.

    Transfer tests along its axis bear on it; otherwise all runs used its value, or it is a choice.
    """
    record, _, name = field.key.rpartition(".")
    rules: tuple[str, ...] = ()
    if record == "parametrization" and name != "name":
        rules = (f"{name} = {field.value}: {sources.answer_in_words(name, field.value)}",)
    tests = known.tests_on(lambda _, axis: axis == origin.axis)
    source = _build_plan_source(
        known,
        origin.keys,
        origin.text,
        rules or _describe_preset(known) if record == "parametrization" else (),
    )
    strength = None if tests or origin.gates else _compare_with_runs(known, field, origin, source)
    return OriginParts(source=source, tests=tests, strength=strength)


def _describe_preset(known: DecisionContext) -> tuple[str, ...]:
    """Return the name of the parametrization, and its source."""
    rules = known.decision.parametrization
    return (f"{rules}: {sources.PRESETS[rules.name]}",)


def _compare_with_runs(
    known: DecisionContext, field: Field, origin: Origin, source: ValueSource
) -> EvidenceStrength:
    """Return the strength of evidence, by whether the runs used the same value."""
    run_values = (
        [operator.attrgetter(origin.in_runs)(spec) for spec in known.specs]
        if origin.in_runs
        else []
    )
    if (
        all(value == field.value for value in run_values)
        if run_values
        else source.plan_keys[-1].key.startswith(_SECTIONS_OF_ALL_RUNS)
    ):
        return _describe_untested(known)
    if not run_values:
        return EvidenceStrength(
            kind=origin.sure, text=origin.strength or "A choice. No proxy tests it"
        )
    values = ", ".join(sorted({number(value) for value in run_values}))
    population = f"the {notation.counted(len(run_values), 'run')} behind this config"
    text = f"{run_values.count(field.value)} of {population} used this value. Values used: {values}"
    extrapolation = int(str(field.value)) / max(run_values) if origin.axis else None
    return EvidenceStrength(kind="assumed", text=text, extrapolation=extrapolation)


def _describe_untested(known: DecisionContext) -> EvidenceStrength:
    """Return the strength of a value that every run used, so that no run compares another."""
    text = (
        f"All {notation.counted(len(known.specs), 'run')} behind this config used this value, "
        "so none tests another"
    )
    return EvidenceStrength(kind="assumed", num_runs=len(known.specs), text=text)


def _explain_stated(known: DecisionContext, field: Field, origin: Origin) -> OriginParts:
    """Explain a field that the corpus, other fields, or this version of forerun determine."""
    kind: Any = origin.kind
    plan_keys = tuple(known.key(key) for key in origin.keys)
    source = ValueSource(
        kind=kind, text=origin.text, rules=origin.rules, fields=origin.fields, plan_keys=plan_keys
    )
    strength = EvidenceStrength(
        kind=origin.sure, text=origin.strength, gates=known.gates(*origin.gates)
    )
    return OriginParts(source=source, strength=strength)


def _explain_verdict(known: DecisionContext, field: Field, origin: Origin) -> OriginParts:
    """Explain a number of a transfer rule."""
    rule = field.of
    assert isinstance(rule, TransferRule)
    tests = known.tests_on(lambda *question: question == (rule.hyperparameter, rule.axis))
    text = f"The verdict on {hyperparameter_named(rule.hyperparameter).label} over {rule.axis}. "
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
    runs, plan_keys = (
        tuple(test.runs for test in tests),
        tuple(known.key(key) for key in origin.keys),
    )
    return OriginParts(
        source=ValueSource(kind="verdict", text=text, runs=runs, plan_keys=plan_keys), tests=tests
    )


def _describe_law(rules: Parametrization, group: ParameterGroup, name: str) -> str:
    """Describe the law that gives a group's number from the base's."""
    rates_by_shape = OPTIMIZERS[group.optimizer].rates_by_shape
    rule = kind_rule(rules, group.kind, by_shape=rates_by_shape)
    power = getattr(rule, name) if hasattr(rule, name) else scaling(rules, name, group.kind)
    base_text = (
        "1 - value" if hyperparameter_named(name).scale == "log2_complement" else "the base's value"
    )
    by_shape = rates_by_shape and name in group.settings and follows_shape(name)
    shape_note = (
        f", by the matrix's own shape ({sources.answer_in_words('muon_rate', rules.muon_rate)})"
        if by_shape
        else ""
    )
    return (
        f"For {words(group.kind)} parameters: "
        f"{base_text}{'' if str(power) == '1' else f' times {power}'}{shape_note}"
    )


def _explain_rule(known: DecisionContext, field: Field, origin: Origin) -> OriginParts:
    """Explain a number of the parametrization: of a group, or a multiplier of the forward pass."""
    rules, name = known.decision.parametrization, field.key.rpartition(".")[2]
    text = (
        _describe_law(rules, field.of, name)
        if isinstance(field.of, ParameterGroup)
        else forward_laws(rules)[name]
    )
    hyperparameter = hyperparameter_of(field.key)
    if hyperparameter is not None and _is_searched(known, hyperparameter):
        return _explain_by_search(known, hyperparameter, detail=text, rules=_describe_preset(known))
    source = ValueSource(
        kind="rule",
        text=text,
        rules=_describe_preset(known),
        plan_keys=(known.key("proxy.parametrization"),),
    )
    return OriginParts(source=source, keys=["proxy.parametrization"])


def _explain_hyperparameter(known: DecisionContext, field: Field, origin: Origin) -> OriginParts:
    """Explain a field that follows from a hyperparameter set at the base."""
    group, name, rules = field.of, field.key.rpartition(".")[2], known.decision.parametrization
    hyperparameter = str(hyperparameter_of(field.key))
    if isinstance(group, ParameterGroup):
        hyperparameter = RECIPES[known.decision.optimizer].hyperparameter_for(
            group.optimizer, hyperparameter
        )
    else:
        steps = known.decision.learning_rate.schedule.num_steps
        detail = "" if name == hyperparameter else f"{number(field.value)} of {number(steps)} steps"
        return _explain_by_search(known, hyperparameter, detail=detail)
    if field.value or not hyperparameter_named(name).can_be_off or decays(rules, group.kind):
        return _explain_by_search(
            known,
            hyperparameter,
            detail=_describe_law(rules, group, name) * bool(field.value),
            rules=_describe_preset(known),
        )
    key, text = (
        "proxy.rules.decayed",
        f"0 for {words(group.kind)} parameters, whatever the value of others",
    )
    decay_rule = (
        f"decayed = {rules.decayed}: {sources.answer_in_words('decayed', rules.decayed)}",
    )
    source = ValueSource(kind="rule", text=text, plan_keys=(known.key(key),), rules=decay_rule)
    return OriginParts(source=source, strength=_describe_untested(known), keys=[key])


def _is_searched(known: DecisionContext, name: str) -> bool:
    search = known.body["search"]
    return len(set(search["ranges"].get(name, ()))) > 1 or name in search["can_be_off"]


def _find_plan_key(known: DecisionContext, name: str) -> str:
    """Return the plan key by which a hyperparameter is searched, or set."""
    search, set_by = known.plan.search, hyperparameter_named(name).set_by
    for key, section in (("search.choices", search.choices), ("search.axes", search.axes)):
        if name in section:
            return f"{key}.{name}"
    return f"search.axes.{name}" if set_by == "axes" else f"{set_by}.{name}"


def _explain_by_search(
    known: DecisionContext, name: str, *, detail: str, rules: tuple[str, ...] = ()
) -> OriginParts:
    """Explain a field by what search, loss basins and verdicts say about its hyperparameter.

    Args:
        known: Knowledge of the study.
        name: Name of the hyperparameter.
        detail: How the field follows from it; empty if it is the same.
        rules: Rules of the parametrization that apply.
    """
    row, tests, searched = (
        known.row(name),
        known.tests_on(lambda tested_name, _: tested_name == name),
        _is_searched(known, name),
    )
    key, how = (
        _find_plan_key(known, name),
        ". ".join(part for part in (row and row["rule"], detail) if part),
    )
    if searched:
        kind, text, runs = _describe_value_source(known, name, row, tests)
        text = ". ".join(filter(None, (text, how)))
        source = ValueSource(
            kind=kind, text=text, plan_keys=(known.key(key),), rules=rules, runs=runs
        )
    else:
        source = _build_plan_source(known, [key], how, rules)
    untested = listed(row["untested"]) if row else ""
    if tests:
        outcome = row["outcome"] if row else tests[0].verdict["outcome"]
        preface = f"Over all axes together: {words(outcome)}" if len(tests) > 1 else ""
        preface += f"{preface and '. '}Over {untested}: assumed, not tested" if untested else ""
        strength = build_strength(tests, known.gates("transfer"), before=preface, outcome=outcome)
    elif searched:
        text = (
            f"Searched at the base. That it stays the same{untested and f' over {untested}'} "
            "is assumed, not tested"
        )
        strength = EvidenceStrength(kind="assumed", text=text)
    else:
        strength = _describe_untested(known)
    return OriginParts(source=source, tests=tests, strength=strength, keys=[key])


def _describe_value_source(
    known: DecisionContext, name: str, row: Any, tests: Sequence[TestEvidence]
) -> tuple[SourceKind, str, tuple[SourceRuns, ...]]:
    """Describe how a searched value was found, and return the runs behind it.

    It is the fitted optimum at the base, or else the value of the search's best trial.
    """
    search, base = known.body["search"], None if row is None else row["base_value"]
    for verdict, runs in (
        (test.verdict, test.runs) for test in tests if known.body["transfer"]["at_base_optimum"]
    ):
        optimum = next(
            (
                candidate
                for candidate in verdict["optima"]
                if candidate["size"] == verdict["base_size"] and candidate["value"]
            ),
            None,
        )
        # The base value was rounded to a few digits.
        if optimum is None or not math.isclose(base or 0.0, optimum["value"], rel_tol=1e-3):
            continue
        text = (
            f"The fitted optimum at {size_name(verdict['axis'], verdict['base_size'])}, "
            f"{number(base)}"
        )
        if (ends := optimum["interval_log2"]) is not None:
            text += (
                f" [{', '.join(number(from_log2(verdict['hyperparameter'], end)) for end in ends)}]"
            )
        text += (
            f" at level {verdict['level']:g}, from {notation.counted(optimum['num_runs'], 'run')}"
        )
        return "valley", text, (runs, known.search)
    best = next(trial for trial in search["trials"] if trial["index"] == search["best_trial"])
    ties = (tie["searched"] for tie in search["ties"] if tie["hyperparameter"] == name)
    best_value = next(ties, search["best"].get(name))
    trial = f"trial {best['index']} with {notation.format_loss(best['loss_nats'])} nats"
    text = (
        f"The best of {notation.counted(len(search['trials']), 'trial')} ({search['sampler']}), "
        f"{trial}, "
    )
    text += f"has {hyperparameter_named(name).label} {number(best_value)}"
    text += f". {number(base)} is used" if base not in (None, best_value) and not row["tie"] else ""
    return "search", text, (known.search,)


def _explain_fit(known: DecisionContext, field: Field, origin: Origin) -> OriginParts:
    """Explain a field that the ladder's fit decides: size, tokens, steps, or the expected loss."""
    fit, choice, expected = known.body["fit"], known.body["choice"], known.decision.predicted
    best, backtest = choice["allocation"], fit["backtest"]
    members = [
        f"{law['form']} {notation.format_percent(law['weight'])}"
        for law in fit["members"]
        if law["weight"] > 0
    ]
    laws = ", ".join(members) or fit["form"]
    text = (
        f"{origin.text}, by the fit of {notation.counted(fit['num_runs'], 'ladder run')} "
        f"({laws}; {fit['status']})"
    )
    if field.key.startswith("predicted."):
        if field.value in (None, []):
            text += ". The ladder has too few runs, or too few short ones, to determine it"
        spans = [("Loss of one new run in nats:", (expected.low_nats, expected.high_nats))]
    else:
        params, tokens = (short_size(round(best[quantity])) for quantity in ("params", "tokens"))
        text += (
            f". Its optimum is {params} parameters on {tokens} tokens, for "
            f"{notation.format_flops(best['flops'])} FLOPs"
        )
        spans = [
            (f"{quantity.capitalize()} at the optimum:", best[f"{quantity}_interval"])
            for quantity in ("params", "tokens")
        ]
    facts = [origin.strength, "No rung was held out"]
    if backtest:
        error = notation.format_percent(backtest["largest_error"])
        facts[1] = f"Largest rungs held out: {backtest['num_held_out']}, predicted within {error}"
    facts += [
        f"{label} {notation.format_interval(end, '.4g')} at level {expected.level:g}"
        for label, end in spans
        if end
    ]
    strength = build_strength(
        (),
        known.gates(*origin.gates),
        before=". ".join(filter(None, facts)),
        num_runs=fit["num_runs"],
        num_seeds=known.plan.ladder.num_seeds,
        extrapolation=expected.extrapolation,
    )
    plan_keys = tuple(known.key(key) for key in origin.keys)
    source = ValueSource(
        kind="fit", text=text, plan_keys=plan_keys, runs=(known.ladder,), fields=origin.fields
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
