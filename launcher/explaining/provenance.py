"""The provenance of every field, written at the freeze: what each kind of origin means for source and strength."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from launcher.explaining.record import Field, fields_of
from launcher.explaining.known import Known, Tested, measured
from launcher.explaining.origins import Origin, OriginKind, hyperparameter_of, origin_of
from launcher.explaining.parametrizations import forward_laws
from launcher.explaining.record import Provenance, Runs, Source, SourceKind, Strength
from launcher.explaining.text import key_words, number
from launcher.frozen.frozen import ParameterGroup
from launcher.plan import sources
from launcher.study.gates import forecast_warnings
from launcher.views.numbers import words
from launcher.views.transfer import short_size, size_name, wanted
from proxies.core.hyperparameters import HYPERPARAMETERS
from proxies.core.optimizers import GROUP_NUMBERS
from proxies.core.rules import Parametrization, decays, kind_rule, scaling
from transfer.question import from_log2
from transfer.verdict.rules import TransferRule

_OF_EVERY_RUN = ("data", "model", "proxy")
"""Sections of the plan that every run follows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """What one kind of origin says of a field."""

    source: Source
    tests: Sequence[Tested] = ()
    """That bear on it."""
    strength: Strength | None = None
    """None: what tests and gates say."""
    change: Sequence[str] = ()
    """Beside what tests, gates and plan keys would."""
    keys: Sequence[str] = ()
    """Plan keys that would change it; empty: those of the field's row."""


def records_of(known: Known) -> list[Provenance]:
    """A record for every field of the decision."""
    return [_record(known, field, origin_of(field.key)) for field in fields_of(known.decision)]


def _record(known: Known, field: Field, origin: Origin) -> Provenance:
    """What the field's row says of it, what its kind of origin does, and tests and gates."""
    found = _KINDS[origin.kind](known, field, origin)
    strength = found.strength or measured(found.tests, known.gates(*origin.gates), before=origin.strength)
    change = [f"gate {gate.name}: {gate.reason}" for gate in strength.gates if gate.outcome != "passed"]
    change += [sentence for one in found.tests for sentence in wanted(one.verdict)]
    if any(one.verdict["outcome"] == "cannot_tell" for one in found.tests):
        change.append("`forerun transfer PLAN --study STUDY --spend` runs what a verdict still wants")
    return Provenance(
        field=field.path, source=found.source, strength=strength,
        change=(*change, *found.change, *known.change_keys(found.keys or origin.keys), *origin.change),
        warnings=forecast_warnings(strength.gates),
    )  # fmt: skip


def _from_plan(known: Known, keys: Sequence[str], text: str = "", rules: tuple[str, ...] = ()) -> Source:
    """That a plan key decides it: the first that is not 0 or empty, else the last."""
    asked = [known.key(key) for key in keys]
    asked = asked[: 1 + next((index for index, one in enumerate(asked) if one.value), len(asked) - 1)]
    said = "; ".join([*(key_words(one) for one in asked), *([text] if text else [])])
    kind: SourceKind = "default" if asked[-1].value == asked[-1].default else "plan"
    return Source(kind=kind, text=said, plan_keys=tuple(asked), rules=rules)


def _plan(known: Known, field: Field, origin: Origin) -> Parts:
    """A plan key: tests along its axis bear on it; or all runs had it so; or it is a wish."""
    record, _, name = field.key.rpartition(".")
    rules: tuple[str, ...] = ()
    if record == "parametrization" and name != "name":
        rules = (f"{name} = {field.value}: {sources.answer_in_words(name, field.value)}",)
    tests = known.tests_on(lambda _, axis: axis == origin.axis)
    source = _from_plan(known, origin.keys, origin.text, rules or _preset(known) if record == "parametrization" else ())
    strength = None if tests or origin.gates else _had(known, field, origin, source)
    return Parts(source=source, tests=tests, strength=strength)


def _preset(known: Known) -> tuple[str, ...]:
    """The parametrization by name, and whose it is."""
    rules = known.decision.parametrization
    return (f"{rules}: {sources.PRESETS[rules.name]}",)


def _had(known: Known, field: Field, origin: Origin, source: Source) -> Strength:
    """Whether the runs had the same."""
    had = [operator.attrgetter(origin.in_runs)(spec) for spec in known.specs] if origin.in_runs else []
    if all(value == field.value for value in had) if had else source.plan_keys[-1].key.startswith(_OF_EVERY_RUN):
        return _alike(known)
    if not had:
        return Strength(kind=origin.sure, text=origin.strength or "a choice, which no proxy tries")
    values = ", ".join(sorted({number(value) for value in had}))
    text = f"{had.count(field.value)} of {len(had)} runs that this config rests on had it so; they had {values}"
    beyond = int(str(field.value)) / max(had) if origin.axis else None
    return Strength(kind="assumed", text=text, extrapolation=beyond)


def _alike(known: Known) -> Strength:
    """That every run had it, so that none compares."""
    text = f"all {len(known.specs)} runs that this config rests on had it so: none says what another would do"
    return Strength(kind="assumed", num_runs=len(known.specs), text=text)


def _stated(known: Known, field: Field, origin: Origin) -> Parts:
    """What the corpus, other fields or this version of forerun settle."""
    kind: Any = origin.kind
    asked = tuple(known.key(key) for key in origin.keys)
    source = Source(kind=kind, text=origin.text, rules=origin.rules, fields=origin.fields, plan_keys=asked)
    strength = Strength(kind=origin.sure, text=origin.strength, gates=known.gates(*origin.gates))
    return Parts(source=source, strength=strength)


def _verdict(known: Known, field: Field, origin: Origin) -> Parts:
    """A number of a transfer rule."""
    rule = field.of
    assert isinstance(rule, TransferRule)
    tests = known.tests_on(lambda *question: question == (rule.hyperparameter, rule.axis))
    text = f"the verdict on {HYPERPARAMETERS[rule.hyperparameter].label} over {rule.axis}"
    text += ": the runs do not say" if field.value is None else f"; the exponent used: {rule.source}"
    runs, asked = tuple(one.runs for one in tests), tuple(known.key(key) for key in origin.keys)
    return Parts(source=Source(kind="verdict", text=text, runs=runs, plan_keys=asked), tests=tests)


def _law(rules: Parametrization, group: ParameterGroup, name: str) -> str:
    """By which power of the ratios a group's number follows from the base's."""
    power = scaling(rules, name, group.kind) if name in GROUP_NUMBERS else getattr(kind_rule(rules, group.kind), name)
    what = "1 - value" if name in HYPERPARAMETERS and HYPERPARAMETERS[name].scale == "log2_complement" else "the base's"
    return f"{words(group.kind)}: {what} times {power}"


def _rule(known: Known, field: Field, origin: Origin) -> Parts:
    """A number that the parametrization makes: of a group, or a multiplier of the forward pass."""
    rules, name = known.decision.parametrization, field.key.rpartition(".")[2]
    text = _law(rules, field.of, name) if isinstance(field.of, ParameterGroup) else forward_laws(rules)[name]
    hyperparameter = hyperparameter_of(field.key)
    if hyperparameter is not None and _is_searched(known, hyperparameter):
        return _tuned_by(known, hyperparameter, by=text, rules=_preset(known))
    source = Source(kind="rule", text=text, rules=_preset(known), plan_keys=(known.key("proxy.parametrization"),))
    return Parts(source=source, keys=["proxy.parametrization"])


def _tuned(known: Known, field: Field, origin: Origin) -> Parts:
    """What a hyperparameter set at the base becomes."""
    group, name, rules = field.of, field.key.rpartition(".")[2], known.decision.parametrization
    hyperparameter = str(hyperparameter_of(field.key))
    if not isinstance(group, ParameterGroup):
        steps = known.decision.learning_rate.schedule.num_steps
        by = "" if name == hyperparameter else f"{number(field.value)} of {number(steps)} steps"
        return _tuned_by(known, hyperparameter, by=by)
    if field.value or not HYPERPARAMETERS[name].can_be_off or decays(rules, group.kind):
        return _tuned_by(known, hyperparameter, by=_law(rules, group, name), rules=_preset(known))
    key, text = "proxy.rules.decayed", f"0 for a {words(group.kind)}, whatever it is for others"
    told = (f"decayed = {rules.decayed}: {sources.answer_in_words('decayed', rules.decayed)}",)
    source = Source(kind="rule", text=text, plan_keys=(known.key(key),), rules=told)
    return Parts(source=source, strength=_alike(known), keys=[key])


def _is_searched(known: Known, name: str) -> bool:
    search = known.body["search"]
    return len(set(search["ranges"].get(name, ()))) > 1 or name in search["can_be_off"]


def _key_of(known: Known, name: str) -> str:
    """The plan key that a hyperparameter is searched by, or set."""
    search, set_by = known.plan.search, HYPERPARAMETERS[name].set_by
    for key, held in (("search.choices", search.choices), ("search.axes", search.axes)):
        if name in held:
            return f"{key}.{name}"
    return f"search.axes.{name}" if set_by == "axes" else f"{set_by}.{name}"


def _tuned_by(known: Known, name: str, *, by: str, rules: tuple[str, ...] = ()) -> Parts:
    """What search, loss basins and verdicts say of a hyperparameter, for a field that it became."""
    row, tests, searched = known.row(name), known.tests_on(lambda of, _: of == name), _is_searched(known, name)
    key, how = _key_of(known, name), "; ".join(said for said in (row and row["rule"], by) if said)
    if searched:
        kind, text, runs = _found(known, name, row, tests)
        text = "; ".join(filter(None, (text, how)))
        source = Source(kind=kind, text=text, plan_keys=(known.key(key),), rules=rules, runs=runs)
    else:
        source = _from_plan(known, [key], how, rules)
    over = ", ".join(row["untested"]) if row else ""
    if tests:
        outcome = row["outcome"] if row else tests[0].verdict["outcome"]
        before = f"over all axes together: {words(outcome)}" if len(tests) > 1 else ""
        before += f"{before and '; '}over {over}: not tested, assumed" if over else ""
        strength = measured(tests, known.gates("transfer"), before=before, outcome=outcome)
    elif searched:
        text = f"searched at the base; that it stays put{over and f' over {over}'} is assumed: no test was made"
        strength = Strength(kind="assumed", text=text)
    else:
        strength = _alike(known)
    return Parts(source=source, tests=tests, strength=strength, keys=[key])


def _found(
    known: Known, name: str, row: Any, tests: Sequence[Tested]
) -> tuple[SourceKind, str, tuple[Runs, ...]]:  # fmt: skip
    """By what a searched value was found: the fitted optimum at the base, or the search's best trial; and its runs."""
    search, base = known.body["search"], None if row is None else row["base_value"]
    for verdict, runs in ((one.verdict, one.runs) for one in tests if known.body["transfer"]["at_base_optimum"]):
        optimum = next((o for o in verdict["optima"] if o["size"] == verdict["base_size"] and o["value"]), None)
        if optimum is None or not math.isclose(base or 0.0, optimum["value"], rel_tol=1e-3):  # kept to some digits
            continue
        text = f"the fitted optimum at {size_name(verdict['axis'], verdict['base_size'])}, {number(base)}"
        if (ends := optimum["interval_log2"]) is not None:
            text += f" [{', '.join(number(from_log2(verdict['hyperparameter'], end)) for end in ends)}]"
        return "valley", f"{text} at level {verdict['level']:g}, of {optimum['num_runs']} runs", (runs, known.search)
    best = next(trial for trial in search["trials"] if trial["index"] == search["best_trial"])
    ties = (tie["searched"] for tie in search["ties"] if tie["hyperparameter"] == name)
    own = next(ties, search["best"].get(name))
    text = (
        f"the best of {len(search['trials'])} trials ({search['sampler']}), trial {best['index']} with "
        f"{best['loss_nats']:.4f} nats, has {HYPERPARAMETERS[name].label} {number(own)}"
    )
    text += f"; {number(base)} is used" if base not in (None, own) else ""
    return "search", text, (known.search,)


def _fit(known: Known, field: Field, origin: Origin) -> Parts:
    """What the ladder's fit decides: size, tokens, steps, and the loss that is expected."""
    fit, choice, expected = known.body["fit"], known.body["choice"], known.decision.predicted
    best, backtest = choice["allocation"], fit["backtest"]
    laws = ", ".join(f"{m['form']} {m['weight']:.0%}" for m in fit["members"] if m["weight"] > 0) or fit["form"]
    text = f"{origin.text}, by the fit of {fit['num_runs']} ladder runs ({laws}; {fit['status']})"
    if field.key.startswith("predicted."):
        text += "; the ladder has too few runs, or too few shorter ones, to say" if field.value in (None, []) else ""
        spans = [("nats, for one new run", (expected.low_nats, expected.high_nats))]
    else:
        params, tokens = (short_size(round(best[what])) for what in ("params", "tokens"))
        text += f": {params} parameters and {tokens} tokens at {number(best['flops'])} FLOPs"
        spans = [(f"{what} at the optimum", best[f"{what}_interval"]) for what in ("params", "tokens")]
    held_out = "no rung was held out" if not backtest else (
        f"the largest rungs held out ({backtest['num_held_out']}) were predicted within {backtest['largest_error']:.2%}"
    )  # fmt: skip
    said = [f"{of} [{number(end[0])}, {number(end[1])}] at level {expected.level:g}" for of, end in spans if end]
    strength = measured(
        (), known.gates(*origin.gates), before="; ".join(filter(None, (origin.strength, held_out, *said))),
        num_runs=fit["num_runs"], num_seeds=known.plan.ladder.num_seeds, extrapolation=expected.extrapolation,
    )  # fmt: skip
    asked = tuple(known.key(key) for key in origin.keys)
    source = Source(kind="fit", text=text, plan_keys=asked, runs=(known.ladder,), fields=origin.fields)
    return Parts(source=source, strength=strength)


_KINDS: dict[OriginKind, Callable[[Known, Field, Origin], Parts]] = {
    "plan": _plan, "tuned": _tuned, "rule": _rule, "fit": _fit, "verdict": _verdict,
    "corpus": _stated, "derived": _stated, "fixed": _stated,
}  # fmt: skip
