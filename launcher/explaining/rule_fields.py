"""Fields that a parametrization's rules decide: its choices, the forward multipliers, what groups there are, init."""

from __future__ import annotations

import math

from launcher.explaining.facts import (
    NOT_HERE,
    alike,
    change_keys,
    gate_change,
    gate_words,
    intervals_of,
    lost,
    tests_of,
)
from launcher.explaining.known import Known
from launcher.explaining.leaves import Leaf
from launcher.explaining.plan_fields import Explainer, explained
from launcher.explaining.record import Explained, Source, SourceKind, Strength
from launcher.explaining.scaling import CLOSE, choice_words, ratios_of, rules_of
from launcher.explaining.tuned_fields import tuned_field
from launcher.frozen.frozen import ParameterGroup
from launcher.plan.sources import PRESETS
from proxies.core.powers import Powers
from proxies.core.rules import forward_rule, kind_rule

FORWARD = {"attention": ("attention", "width"), "residual": ("depth_alpha",), "output": ("output", "width")}
"""Choices that decide a forward multiplier."""
BEARING = {
    "name": ("learning_rate", "width", True),
    "width": ("learning_rate", "width", True),
    "attention": ("", "", True),
    "output": ("learning_rate", "width", True),
    "depth_alpha": ("learning_rate", "depth", True),
    "weight_decay": ("weight_decay", "width", False),
    "embedding_rate": ("learning_rate", "width", True),
    "rate_batch_power": ("learning_rate", "batch", False),
    "rate_duration_power": ("learning_rate", "duration", False),
}
"""Of a choice: which hyperparameter's test over what bears on it, and whether the coordinate check does."""
_LABEL = "a label: what counts is the numbers in groups and forward"


def choice(name: str) -> Explainer:
    """One answer of the parametrization."""

    def said(known: Known, leaf: Leaf) -> Explained:
        rules = known.decision.parametrization
        if name == "name":
            key, told = "proxy.parametrization", (PRESETS[rules.name],)
        else:
            key, told = f"proxy.rules.{name}", (choice_words(rules, name),)
        if name == "width":  # no key of its own: it is what the parametrization is named for
            key = "proxy.parametrization"
        asked = known.asked(key)
        own = name == "name" or name not in rules.changed
        text = f"{asked.key}: " + ("the named source's own answer" if own else "another answer than the source's")
        if name == "name":
            text = f"{asked.key} = {rules.name}"
        is_set = rules.name != known.asked("proxy.parametrization").default or not own
        source = Source(kind="plan" if is_set else "default", text=text, plan_keys=(asked,), rules=told)
        change = (
            f"`forerun explain --parametrization {rules.name}` lists the answers and whose they are",
            *change_keys(known, key),
        )
        strength = _checked(known, _LABEL, name)
        return explained(leaf, source, strength, (*gate_change(strength.gates), *change), cost=_control(known, name))

    return said


def _checked(known: Known, before: str, choice: str) -> Strength:
    """What bears on a choice: the coordinate check, and a hyperparameter's test over what the choice scales with."""
    hyperparameter, axis, coordinates = BEARING.get(choice, ("", "", False))
    gates = known.gate("coordinates") if coordinates else ()
    tests = [one for one in tests_of(known, hyperparameter) if one.test["axis"] == axis]
    said = [before, *(one.words() for one in tests), *([gate_words(gates)] if gates else [])]
    if not known.evidence:
        return Strength(kind="unknown", text=f"{before}; {NOT_HERE}")
    if not (gates or tests):
        return Strength(kind="assumed", text=f"{before}; no test of this study bears on it")
    return Strength(
        kind="measured", text="; ".join(said), gates=gates,
        outcome=tests[0].verdict["outcome"] if tests else None, num_runs=tests[0].num_runs if tests else None,
        num_seeds=tests[0].num_seeds if tests else None, extrapolation=tests[0].reach if tests else None,
        intervals=intervals_of(tests),
    )  # fmt: skip


def _control(known: Known, choice: str) -> str | None:
    """What the standard form, run beside, would lose at the target; None where that was not measured."""
    if choice not in ("name", "width"):
        return None
    for one in tests_of(known, "learning_rate"):
        control = one.verdict["control"]
        if control and control["regret_nats"]["value"] is not None:
            return (
                f"the standard form, run beside over {one.test['axis']}, its rate carried as it is, loses "
                f"{lost(control['regret_nats'])} nats at the target"
            )
    return None


def forward(name: str) -> Explainer:
    """A forward multiplier: a rule of size, times a hyperparameter where one is searched."""

    def said(known: Known, leaf: Leaf) -> Explained:
        rules = known.decision.parametrization
        told_by = FORWARD.get(name, ("",))
        told = tuple(choice_words(rules, one) for one in told_by if one)
        by = _forward_words(known, name)
        tuned = f"{name}_multiplier"
        ranges = (known.provenance.get("search") or {}).get("ranges", {})
        searched = name in ("embedding", "output") and len(set(ranges.get(tuned, ()))) > 1
        if searched or (name == "embedding" and leaf.value != 1.0):
            return tuned_field(known, leaf, tuned, by=by, rules=told)
        keys = tuple(f"proxy.rules.{one}" for one in FORWARD.get(name, ()) if one != "width")
        change = change_keys(known, *keys, *((f"search.axes.{tuned}",) if name in ("embedding", "output") else ()))
        strength = _checked(known, "a rule of size, by which the proxies had theirs", told_by[0])
        kind: SourceKind = "rule"
        if not told:
            kind, strength = "fixed", alike(known, "no multiplier of the embeddings")
        return explained(
            leaf, Source(kind=kind, text=by, rules=told, plan_keys=tuple(known.asked(key) for key in keys)),
            strength, (*gate_change(strength.gates), *change), unknown=(_NOT_COMPARED,),
        )  # fmt: skip

    return said


_NOT_COMPARED = "what another one would cost: no run compares it"


def _forward_words(known: Known, name: str) -> str:
    """The law, and the number by it; where the frozen one is another, that."""
    d = known.decision
    frozen, rules = getattr(d.forward, name), d.parametrization
    if name == "embedding":
        return "the embeddings' output is multiplied by it; 1 where nothing is searched"
    if name == "attention":
        here, base = d.shape.head_dim, d.base_shape.head_dim
        inverse = rules.attention == "inverse_head_dim"
        law = f"sqrt({base}) / {here}, of the base's head dim and this one's" if inverse else f"1 / sqrt({here})"
        expected = math.sqrt(base) / here if inverse else 1 / math.sqrt(here)
        return _held(law, expected, frozen)
    power: Powers = forward_rule(rules)["residual" if name == "residual" else "output"]
    ratios = ratios_of(known)
    return f"the law is {power}" if ratios is None else _held(str(power), power.at(ratios), frozen)


def _held(law: str, expected: float, frozen: float) -> str:
    if math.isclose(expected, frozen, rel_tol=CLOSE):
        return f"{law} = {frozen:.6g}"
    return f"{law} = {expected:.6g}, times {frozen / expected:.6g}"


def init_std(known: Known, leaf: Leaf) -> Explained:
    """Spread of a group's initial weights: never searched, a rule of size."""
    group, d = leaf.of, known.decision
    assert isinstance(group, ParameterGroup)
    rules, power = d.parametrization, kind_rule(d.parametrization, group.kind).init_std
    ratios = ratios_of(known)
    if group.kind.endswith(("gain", "bias")):
        text = (
            f"a {group.kind.replace('_', ' ')} starts at {'one' if group.kind.endswith('gain') else 'zero'}: no spread"
        )
    elif ratios is None:
        text = f"the base's, times {power}"
    else:
        text = f"{group.init_std / power.at(ratios):.6g} at the base{_fan_in(known, group)}, times {power}"
    strength = _checked(known, "a rule of size; no other spread was tried", "width")
    change = (*gate_change(strength.gates), *change_keys(known, "proxy.parametrization"))
    source = Source(kind="rule", text=text, rules=rules_of(rules, group.kind, "init_std"))
    return explained(leaf, source, strength, change, unknown=(_NOT_COMPARED,))


def _fan_in(known: Known, group: ParameterGroup) -> str:
    """Of which fan-in of the base's it is the inverse root, if of one."""
    ratios = ratios_of(known)
    assert ratios is not None
    at_base = group.init_std / kind_rule(known.decision.parametrization, group.kind).init_std.at(ratios)
    base = known.decision.base_shape
    for name, size in (("width", base.width), ("feed-forward width", base.ffn_width)):
        if math.isclose(at_base, 1 / math.sqrt(size), rel_tol=CLOSE):
            return f", 1/sqrt of its {name} {size}"
    return ""


def group_make(known: Known, leaf: Leaf) -> Explained:
    """Which parameters a group holds, and their kind: by the shape's names."""
    of = known.decision.shape.family
    text = f"parameters of the {of} model that share kind and numbers, layers as one pattern"
    source = Source(kind="derived", text=text, fields=("shape", "parametrization"))
    exact = f"`forerun verify {known.folder}` proves that each parameter is in one group"
    change = change_keys(known, "model.family", "proxy.parametrization")
    return explained(leaf, source, Strength(kind="exact", text=exact), change)
