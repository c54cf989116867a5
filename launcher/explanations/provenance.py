"""The provenance of every field, written at the freeze: what each kind of origin means for source
and strength.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from launcher.explanations.context import DecisionContext, TestEvidence, measured
from launcher.explanations.parametrizations import forward_laws
from launcher.explanations.record import (
    EvidenceStrength,
    Field,
    Provenance,
    SourceKind,
    SourceRuns,
    StrengthKind,
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
from proxies.core.hyperparameters import HYPERPARAMETERS, hyperparameter_named
from proxies.core.optimizers import OPTIMIZERS, RECIPES
from proxies.core.programs import PLACEHOLDERS
from proxies.core.rules import Parametrization, decays, follows_shape, kind_rule, scaling
from transfer.question import from_log2
from transfer.verdict.rules import TransferRule

# The table of what decides which field of a decision: plan keys, the fit, a rule, the corpus, this
# version. A row is a pattern of `Field.key`, and the first that matches counts. Fields that a
# hyperparameter becomes have no row: they are known by its name. What each kind of origin means for
# source, strength and change stands below the table.
OriginKind = Literal["plan", "tuned", "rule", "fit", "verdict", "corpus", "derived", "fixed"]
"""tuned: what a hyperparameter becomes; rule: of the parametrization; the others as in
`record.SourceKind`."""
TARGET = ("target.budget_flops", "target.width_multiple")
_TUNED_IN = ("", "groups", "forward", "learning_rate.schedule")
"""Records some of whose fields are named for the hyperparameter that they come from."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """What decides a field, and what is known of it whatever the study."""

    kind: OriginKind
    keys: tuple[str, ...] = ()
    """Plan keys: the first that is not 0 or empty decides, else the last. `{}` is the field's own
    name."""
    text: str = ""
    """Why it is so, or how it follows."""
    fields: tuple[str, ...] = ()
    """Other fields that it follows from. `{}` is the record that it is of."""
    rules: tuple[str, ...] = ()
    """Whose practice it is."""
    axis: str = ""
    """Along which it is a size: transfer tests over that axis bear on it."""
    in_runs: str = ""
    """The same of a `RunSpec`, where runs may have had another than the launch."""
    gates: tuple[str, ...] = ()
    """The gates of freezing that bear on it."""
    sure: StrengthKind = "chosen"
    """How sure it is, where neither runs nor gates bear on it."""
    strength: str = ""
    """The same in words, or the words before those of tests and gates."""
    change: tuple[str, ...] = ()
    """In addition to what its plan keys, tests and gates would."""


def _from_key(*keys: str, **more: object) -> Origin:
    return Origin(kind="plan", keys=keys, **more)  # type: ignore[arg-type]


def _choice(*keys: str, gates: tuple[str, ...] = ("coordinates",)) -> Origin:
    return _from_key(*keys, "proxy.parametrization", in_runs="parametrization.{}", gates=gates)


def _fixed(text: str, *rules: str) -> Origin:
    return Origin(
        kind="fixed",
        text=text,
        rules=rules,
        sure="assumed" if rules else "chosen",
        strength="Common practice. No run of this study tests it"
        if rules
        else "A convention. No run tests another",
        change=("No plan key sets it. Only another version of forerun may freeze another value",),
    )


def _corpus(text: str, *gates: str) -> Origin:
    return Origin(
        kind="corpus",
        text=f"From the manifest of the corpus: {text}",
        gates=gates,
        sure="exact",
        strength="The manifest states it",
        change=(
            "`forerun tokenize SOURCE --out DIR` makes another corpus. Other data need new runs",
        ),
    )


def _derived(text: str, *fields: str, keys: tuple[str, ...] = ()) -> Origin:
    return Origin(
        kind="derived",
        text=text,
        fields=fields,
        keys=keys,
        sure="exact",
        strength="Follows from other fields",
        change=(f"It changes with {fields[0]}: see `forerun explain FROZEN {fields[0]}`",),
    )


def _from_fit(text: str, *fields: str, gates: tuple[str, ...] = (), strength: str = "") -> Origin:
    return Origin(
        kind="fit",
        keys=TARGET,
        text=text,
        fields=fields,
        gates=("fit", "ladder_tuned", *gates),
        strength=strength,
    )


_DRILLS = ("`forerun rehearse FROZEN` tests it in the drills of the launch",)
_DEGREES = _from_key(
    "launch.{}",
    strength="A choice. The real shape was sharded this way over a fake process group of all ranks",
    change=("`forerun estimate FROZEN` shows memory per rank, time and cost with these degrees",),
)
_GROUP = _derived(
    "Parameters that share a kind and their numbers. All layers are one pattern",
    "shape",
    "parametrization",
)
_RULE = Origin(
    kind="rule", gates=("coordinates",), strength="The same scaling rule set it in the proxies"
)
_VOCABULARY = _corpus("its tokenizer's vocabulary")
_SPIKE = "Part of the definition of a spike and of the response to it"
_SCHEDULE = "learning_rate.schedule"

ORIGINS: dict[str, Origin] = {
    "schema_version": _fixed("Version of the record's format. Readers need it"),
    "shape.width": _from_fit("The best size for the budget, rounded"),
    "shape.num_layers": _from_key(
        "target.num_layers", "model.num_layers", axis="depth", in_runs="shape.num_layers"
    ),
    "base_shape.width": _from_key("proxy.base_width"),
    "*shape.vocab_size": _VOCABULARY,
    "*shape.num_heads": _derived(
        "The width divided by the width of a head", "{}.width", keys=("model.head_dim",)
    ),
    "*shape.num_kv_heads": _derived(
        "The heads divided by the query heads per KV head",
        "{}.num_heads",
        keys=("model.query_heads_per_kv_head",),
    ),
    "*shape.ffn_width": _derived(
        "The width times the plan's ratio", "{}.width", keys=("model.ffn_ratio",)
    ),
    "*shape.*": _from_key("model.{}"),
    **{f"parametrization.{choice}": _choice() for choice in ("name", "width")},
    # What the coordinate check would see go wrong; in its few steps it sees no other choice.
    **{
        f"parametrization.{choice}": _choice("proxy.rules.{}")
        for choice in ("attention", "output", "depth_alpha", "embedding_rate")
    },
    "parametrization.*": _choice("proxy.rules.{}", gates=()),
    "transfer.*": Origin(
        kind="verdict",
        keys=("transfer.hyperparameters", "transfer.measured_rules", "transfer.level"),
        gates=("transfer",),
    ),
    **dict.fromkeys(("forward.*", "groups.init_std"), _RULE),
    "multiplier_form": _fixed(
        "As in the runs. Multipliers inside the weights would change the gradient norm"
    ),
    **dict.fromkeys(("groups.kind", "groups.pattern"), _GROUP),
    "optimizer": _fixed(
        "The proxies' optimizer",
        *(f"{recipe.label} ({recipe.main.source})" for recipe in RECIPES.values()),
    ),
    "groups.optimizer": _derived(
        "The optimizer that the recipe has for parameters of this kind", "optimizer"
    ),
    "*_form": _fixed("As in torch: a step multiplies a weight by 1 - lr(t) x decay"),
    f"{_SCHEDULE}.kind": _from_key("proxy.schedule"),
    f"{_SCHEDULE}.num_steps": _from_fit(
        "Steps that the budget leaves at this size", "num_tokens", "batch_tokens"
    ),
    f"{_SCHEDULE}.decay_steps": _from_key(
        "proxy.decay_fraction", text="A share of the steps, for wsd only"
    ),
    f"{_SCHEDULE}.batch_warmup_steps": _from_key(
        "proxy.batch_warmup_fraction", text="A share of the steps"
    ),
    f"{_SCHEDULE}.batch_warmup_stages": _from_key(
        "proxy.batch_warmup_fraction", "proxy.batch_warmup_stages"
    ),
    f"{_SCHEDULE}.*": _from_key("proxy.{}"),
    "learning_rate.step_convention": _fixed(
        "Trainers count steps in different ways, so the way is frozen"
    ),
    "learning_rate.*": _derived("Computed from the schedule at its steps", _SCHEDULE),
    "batch_tokens": _from_key(
        "target.batch_tokens", "proxy.batch_tokens", axis="batch", in_runs="batch_tokens"
    ),
    "num_tokens": _from_fit(
        "Tokens that the budget leaves at this size", "shape", "batch_tokens", gates=("data",)
    ),
    "data.data_id": _corpus("hash of its shards and shares", "data"),
    "data.tokenizer": _corpus("its tokenizer"),
    "data.vocab_size": _VOCABULARY,
    "data.num_train_tokens": _corpus("unique tokens of its training part", "data"),
    "data.weights": _from_key("data.weights"),
    "data.order": _fixed("Every run reads the data in the same order"),
    "seed": _from_key("launch.seed"),
    "precision": _from_key("launch.precision", in_runs="numerics.dtype", change=_DRILLS),
    "compiled": _from_key("launch.compiled", in_runs="numerics.compiled", change=_DRILLS),
    "parallelism.*": _DEGREES,
    "monitoring.*": _from_key("launch.{}", change=_DRILLS),
    "checkpointing.every_steps": _from_key("launch.checkpoint_every_steps", change=_DRILLS),
    "checkpointing.keep": _fixed("At least two are kept, because the newest may be corrupt"),
    "spikes.max_rollbacks": _from_key("launch.spike_rollbacks"),
    "spikes.rollback_steps": _fixed(
        _SPIKE, "PaLM went back about 100 steps (arXiv 2204.02311, section 5.1)"
    ),
    "spikes.skip_batches": _fixed(
        _SPIKE, "PaLM skipped 200 to 500 batches (arXiv 2204.02311, section 5.1)"
    ),
    "spikes.clip_share": _fixed(
        _SPIKE, "OPT lowered its clip from 1.0 to 0.3 (arXiv 2205.01068, section 2.5)"
    ),
    "spikes.*": _fixed(_SPIKE),
    "abort.train_loss_above_nats": _derived(
        "ln(vocabulary) plus one nat, as for proxies", "shape.vocab_size"
    ),
    "abort.*": _fixed("The run stops before a step on a gradient that is not finite"),
    "own.command.metrics_*": _from_key("proxy.{}"),
    "own.command.*_key": _from_key("proxy.metrics_{}"),
    "own.command.*_unit": _from_key("proxy.metrics_{}"),
    "own.command.bytes_per_token": _from_key("proxy.metrics_bytes_per_token"),
    "own.command.*": _from_key("proxy.command"),
    "own.num_params": _from_key("proxy.describe"),
    "own.resume": _from_key("launch.resume_arguments"),
    "own.values*": _derived(
        "What your own trainer gets", "shape", "learning_rate.schedule", "batch_tokens", "seed"
    ),
    "model.factory.dimensions": _from_key("proxy.dimensions"),
    "model.factory.*": _from_key("proxy.factory"),
    "model.values*": _derived("A keyword of your own model", "shape"),
    "model.*": _derived(
        "A property of your own model at this shape", "shape", "model.factory.target"
    ),
    "predicted.level": _from_key("transfer.level"),
    "predicted.curve": _from_fit(
        "A law of annealed loss curves (arXiv 2408.11029, with the size added)",
        "shape",
        "num_tokens",
        strength="Its band includes the error of such curves on the ladder's longest runs",
    ),
    "predicted.memory_octaves": _from_fit(
        "How fast the ladder's curves forget a deviation", "shape", "num_tokens"
    ),
    "predicted.*": _from_fit("The forecast for these tokens at this size", "shape", "num_tokens"),
}
"""By pattern of `Field.key`."""


_OWN = "own.values"
"""What a user's own trainer gets: by placeholder, those that the plan declares among them."""


def hyperparameter_of(key: str) -> str | None:
    """The hyperparameter that a field comes from: of its name, a share of the steps, or a part of a
    multiplier.
    """
    record, _, name = key.rpartition(".")
    spelled = (name, name.replace("_steps", "_fraction"))
    if record == _OWN:
        told = {one.told_as: one.name for one in HYPERPARAMETERS.values()}
        return told.get(name, None if name in PLACEHOLDERS else name)
    return next(
        (
            one.name
            for one in HYPERPARAMETERS.values()
            if record in _TUNED_IN
            and (one.name in spelled or (record == "forward" and one.multiplies == name))
        ),
        None,
    )


def origin_of(key: str) -> Origin:
    """What decides the field of that key.

    Raises:
        KeyError: nothing says; a new field needs a row.
    """
    record, _, name = key.rpartition(".")
    if record != "forward" and hyperparameter_of(key) is not None:
        return Origin(kind="tuned", gates=("transfer",))
    found = next(
        (origin for pattern, origin in ORIGINS.items() if fnmatch.fnmatchcase(key, pattern)), None
    )
    if found is None:
        raise KeyError(key)
    return dataclasses.replace(
        found,
        keys=tuple(key.replace("{}", name) for key in found.keys),
        in_runs=found.in_runs.replace("{}", name),
        fields=tuple(field.replace("{}", record) for field in found.fields),
        change=tuple(said.replace("{}", record) for said in found.change),
    )


_OF_EVERY_RUN = ("data", "model", "proxy")
"""Sections of the plan that every run follows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OriginParts:
    """What one kind of origin says of a field."""

    source: ValueSource
    tests: Sequence[TestEvidence] = ()
    """That bear on it."""
    strength: EvidenceStrength | None = None
    """None: what tests and gates say."""
    change: Sequence[str] = ()
    """In addition to what tests, gates and plan keys would."""
    keys: Sequence[str] = ()
    """Plan keys that would change it; empty: those of the field's row."""


def records_of(known: DecisionContext) -> list[Provenance]:
    """A record for every field of the decision."""
    return [_record(known, field, origin_of(field.key)) for field in fields_of(known.decision)]


def _record(known: DecisionContext, field: Field, origin: Origin) -> Provenance:
    """What the field's row says of it, what its kind of origin does, and tests and gates."""
    found = _KINDS[origin.kind](known, field, origin)
    strength = found.strength or measured(
        found.tests, known.gates(*origin.gates), before=origin.strength
    )
    change = [
        f"gate {gate.name}: {gate.reason}" for gate in strength.gates if gate.outcome != "passed"
    ]
    change += [sentence for one in found.tests for sentence in wanted(one.verdict)]
    if any(one.verdict["outcome"] == "cannot_tell" for one in found.tests):
        change.append(
            "`forerun transfer PLAN --study STUDY --spend` adds the runs that a verdict still needs"
        )
    return Provenance(
        field=field.path,
        source=found.source,
        strength=strength,
        change=(
            *change,
            *found.change,
            *known.change_keys(found.keys or origin.keys),
            *origin.change,
        ),
        warnings=forecast_warnings(strength.gates),
    )


def _from_plan(
    known: DecisionContext, keys: Sequence[str], text: str = "", rules: tuple[str, ...] = ()
) -> ValueSource:
    """That a plan key decides it: the first that is not 0 or empty, else the last."""
    asked = [known.key(key) for key in keys]
    asked = asked[
        : 1 + next((index for index, one in enumerate(asked) if one.value), len(asked) - 1)
    ]
    *unset, deciding = asked
    said = f"Plan key {key_words(deciding)}"
    said += f", because {listed([key_words(key) for key in unset])} leaves it open" if unset else ""
    kind: SourceKind = "default" if deciding.value == deciding.default else "plan"
    return ValueSource(
        kind=kind, text=". ".join(filter(None, (said, text))), plan_keys=tuple(asked), rules=rules
    )


def _plan(known: DecisionContext, field: Field, origin: Origin) -> OriginParts:
    """A plan key: tests along its axis bear on it, or all runs used the value, or it is a
    choice.
    """
    record, _, name = field.key.rpartition(".")
    rules: tuple[str, ...] = ()
    if record == "parametrization" and name != "name":
        rules = (f"{name} = {field.value}: {sources.answer_in_words(name, field.value)}",)
    tests = known.tests_on(lambda _, axis: axis == origin.axis)
    source = _from_plan(
        known,
        origin.keys,
        origin.text,
        rules or _preset(known) if record == "parametrization" else (),
    )
    strength = None if tests or origin.gates else _had(known, field, origin, source)
    return OriginParts(source=source, tests=tests, strength=strength)


def _preset(known: DecisionContext) -> tuple[str, ...]:
    """The parametrization by name, and whose it is."""
    rules = known.decision.parametrization
    return (f"{rules}: {sources.PRESETS[rules.name]}",)


def _had(
    known: DecisionContext, field: Field, origin: Origin, source: ValueSource
) -> EvidenceStrength:
    """Whether the runs had the same."""
    had = (
        [operator.attrgetter(origin.in_runs)(spec) for spec in known.specs]
        if origin.in_runs
        else []
    )
    if (
        all(value == field.value for value in had)
        if had
        else source.plan_keys[-1].key.startswith(_OF_EVERY_RUN)
    ):
        return _alike(known)
    if not had:
        return EvidenceStrength(
            kind=origin.sure, text=origin.strength or "A choice. No proxy tests it"
        )
    values = ", ".join(sorted({number(value) for value in had}))
    behind = f"the {notation.counted(len(had), 'run')} behind this config"
    text = f"{had.count(field.value)} of {behind} used this value. Values used: {values}"
    beyond = int(str(field.value)) / max(had) if origin.axis else None
    return EvidenceStrength(kind="assumed", text=text, extrapolation=beyond)


def _alike(known: DecisionContext) -> EvidenceStrength:
    """Every run used the value, so none compares."""
    text = (
        f"All {notation.counted(len(known.specs), 'run')} behind this config used this value, "
        "so none tests another"
    )
    return EvidenceStrength(kind="assumed", num_runs=len(known.specs), text=text)


def _stated(known: DecisionContext, field: Field, origin: Origin) -> OriginParts:
    """What the corpus, other fields or this version of forerun settle."""
    kind: Any = origin.kind
    asked = tuple(known.key(key) for key in origin.keys)
    source = ValueSource(
        kind=kind, text=origin.text, rules=origin.rules, fields=origin.fields, plan_keys=asked
    )
    strength = EvidenceStrength(
        kind=origin.sure, text=origin.strength, gates=known.gates(*origin.gates)
    )
    return OriginParts(source=source, strength=strength)


def _verdict(known: DecisionContext, field: Field, origin: Origin) -> OriginParts:
    """A number of a transfer rule."""
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
    runs, asked = tuple(one.runs for one in tests), tuple(known.key(key) for key in origin.keys)
    return OriginParts(
        source=ValueSource(kind="verdict", text=text, runs=runs, plan_keys=asked), tests=tests
    )


def _law(rules: Parametrization, group: ParameterGroup, name: str) -> str:
    """By which power of the ratios a group's number follows from the base's."""
    rates_by_shape = OPTIMIZERS[group.optimizer].rates_by_shape
    rule = kind_rule(rules, group.kind, by_shape=rates_by_shape)
    power = getattr(rule, name) if hasattr(rule, name) else scaling(rules, name, group.kind)
    what = (
        "1 - value" if hyperparameter_named(name).scale == "log2_complement" else "the base's value"
    )
    by_shape = rates_by_shape and name in group.settings and follows_shape(name)
    said = (
        f", by the matrix's own shape ({sources.answer_in_words('muon_rate', rules.muon_rate)})"
        if by_shape
        else ""
    )
    return (
        f"For {words(group.kind)} parameters: "
        f"{what}{'' if str(power) == '1' else f' times {power}'}{said}"
    )


def _rule(known: DecisionContext, field: Field, origin: Origin) -> OriginParts:
    """A number that the parametrization makes: of a group, or a multiplier of the forward pass."""
    rules, name = known.decision.parametrization, field.key.rpartition(".")[2]
    text = (
        _law(rules, field.of, name)
        if isinstance(field.of, ParameterGroup)
        else forward_laws(rules)[name]
    )
    hyperparameter = hyperparameter_of(field.key)
    if hyperparameter is not None and _is_searched(known, hyperparameter):
        return _tuned_by(known, hyperparameter, by=text, rules=_preset(known))
    source = ValueSource(
        kind="rule",
        text=text,
        rules=_preset(known),
        plan_keys=(known.key("proxy.parametrization"),),
    )
    return OriginParts(source=source, keys=["proxy.parametrization"])


def _tuned(known: DecisionContext, field: Field, origin: Origin) -> OriginParts:
    """What a hyperparameter set at the base becomes."""
    group, name, rules = field.of, field.key.rpartition(".")[2], known.decision.parametrization
    hyperparameter = str(hyperparameter_of(field.key))
    if isinstance(group, ParameterGroup):
        hyperparameter = RECIPES[known.decision.optimizer].hyperparameter_for(
            group.optimizer, hyperparameter
        )
    else:
        steps = known.decision.learning_rate.schedule.num_steps
        by = "" if name == hyperparameter else f"{number(field.value)} of {number(steps)} steps"
        return _tuned_by(known, hyperparameter, by=by)
    if field.value or not hyperparameter_named(name).can_be_off or decays(rules, group.kind):
        return _tuned_by(
            known,
            hyperparameter,
            by=_law(rules, group, name) * bool(field.value),
            rules=_preset(known),
        )
    key, text = (
        "proxy.rules.decayed",
        f"0 for {words(group.kind)} parameters, whatever the value of others",
    )
    told = (f"decayed = {rules.decayed}: {sources.answer_in_words('decayed', rules.decayed)}",)
    source = ValueSource(kind="rule", text=text, plan_keys=(known.key(key),), rules=told)
    return OriginParts(source=source, strength=_alike(known), keys=[key])


def _is_searched(known: DecisionContext, name: str) -> bool:
    search = known.body["search"]
    return len(set(search["ranges"].get(name, ()))) > 1 or name in search["can_be_off"]


def _key_of(known: DecisionContext, name: str) -> str:
    """The plan key that a hyperparameter is searched by, or set."""
    search, set_by = known.plan.search, hyperparameter_named(name).set_by
    for key, held in (("search.choices", search.choices), ("search.axes", search.axes)):
        if name in held:
            return f"{key}.{name}"
    return f"search.axes.{name}" if set_by == "axes" else f"{set_by}.{name}"


def _tuned_by(
    known: DecisionContext, name: str, *, by: str, rules: tuple[str, ...] = ()
) -> OriginParts:
    """What search, loss basins and verdicts say of a hyperparameter, for a field that it became."""
    row, tests, searched = (
        known.row(name),
        known.tests_on(lambda of, _: of == name),
        _is_searched(known, name),
    )
    key, how = _key_of(known, name), ". ".join(said for said in (row and row["rule"], by) if said)
    if searched:
        kind, text, runs = _found(known, name, row, tests)
        text = ". ".join(filter(None, (text, how)))
        source = ValueSource(
            kind=kind, text=text, plan_keys=(known.key(key),), rules=rules, runs=runs
        )
    else:
        source = _from_plan(known, [key], how, rules)
    over = listed(row["untested"]) if row else ""
    if tests:
        outcome = row["outcome"] if row else tests[0].verdict["outcome"]
        before = f"Over all axes together: {words(outcome)}" if len(tests) > 1 else ""
        before += f"{before and '. '}Over {over}: assumed, not tested" if over else ""
        strength = measured(tests, known.gates("transfer"), before=before, outcome=outcome)
    elif searched:
        text = (
            f"Searched at the base. That it stays the same{over and f' over {over}'} is "
            "assumed, not tested"
        )
        strength = EvidenceStrength(kind="assumed", text=text)
    else:
        strength = _alike(known)
    return OriginParts(source=source, tests=tests, strength=strength, keys=[key])


def _found(
    known: DecisionContext, name: str, row: Any, tests: Sequence[TestEvidence]
) -> tuple[SourceKind, str, tuple[SourceRuns, ...]]:
    """By what a searched value was found: the fitted optimum at the base, or the search's best
    trial; and its runs.
    """
    search, base = known.body["search"], None if row is None else row["base_value"]
    for verdict, runs in (
        (one.verdict, one.runs) for one in tests if known.body["transfer"]["at_base_optimum"]
    ):
        optimum = next(
            (o for o in verdict["optima"] if o["size"] == verdict["base_size"] and o["value"]), None
        )
        # kept to some digits
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
    own = next(ties, search["best"].get(name))
    trial = f"trial {best['index']} with {notation.format_loss(best['loss_nats'])} nats"
    text = (
        f"The best of {notation.counted(len(search['trials']), 'trial')} ({search['sampler']}), "
        f"{trial}, "
    )
    text += f"has {hyperparameter_named(name).label} {number(own)}"
    text += f". {number(base)} is used" if base not in (None, own) and not row["tie"] else ""
    return "search", text, (known.search,)


def _fit(known: DecisionContext, field: Field, origin: Origin) -> OriginParts:
    """What the ladder's fit decides: size, tokens, steps, and the loss that is expected."""
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
        params, tokens = (short_size(round(best[what])) for what in ("params", "tokens"))
        text += (
            f". Its optimum is {params} parameters on {tokens} tokens, for "
            f"{notation.format_flops(best['flops'])} FLOPs"
        )
        spans = [
            (f"{what.capitalize()} at the optimum:", best[f"{what}_interval"])
            for what in ("params", "tokens")
        ]
    facts = [origin.strength, "No rung was held out"]
    if backtest:
        error = notation.format_percent(backtest["largest_error"])
        facts[1] = f"Largest rungs held out: {backtest['num_held_out']}, predicted within {error}"
    facts += [
        f"{of} {notation.format_interval(end, '.4g')} at level {expected.level:g}"
        for of, end in spans
        if end
    ]
    strength = measured(
        (),
        known.gates(*origin.gates),
        before=". ".join(filter(None, facts)),
        num_runs=fit["num_runs"],
        num_seeds=known.plan.ladder.num_seeds,
        extrapolation=expected.extrapolation,
    )
    asked = tuple(known.key(key) for key in origin.keys)
    source = ValueSource(
        kind="fit", text=text, plan_keys=asked, runs=(known.ladder,), fields=origin.fields
    )
    return OriginParts(source=source, strength=strength)


_KINDS: dict[OriginKind, Callable[[DecisionContext, Field, Origin], OriginParts]] = {
    "plan": _plan,
    "tuned": _tuned,
    "rule": _rule,
    "fit": _fit,
    "verdict": _verdict,
    "corpus": _stated,
    "derived": _stated,
    "fixed": _stated,
}
