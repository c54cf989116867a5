"""Fields that a hyperparameter set at the base becomes: rates, warmup, clip, weight decay, betas, eps, multipliers."""

from __future__ import annotations

from typing import Any

from launcher.explaining.facts import (
    NOT_HERE,
    Tested,
    alike,
    change_keys,
    decisive,
    ends,
    from_plan,
    gate_words,
    intervals_of,
    lost,
    nats,
    number,
    tests_of,
)
from launcher.explaining.known import Known
from launcher.explaining.leaves import Leaf
from launcher.explaining.plan_fields import Explainer, explained
from launcher.explaining.record import Explained, Runs, Source, Strength
from launcher.explaining.scaling import factor_words, rules_of
from launcher.frozen.frozen import ParameterGroup
from launcher.views.transfer import hyperparameter_name, size_name
from proxies.core.hyperparameters import WITH_OPTIMUM
from proxies.core.rules import decays
from transfer.question import from_log2

NOT_TRIED = "no run of this study tries it"
_ALWAYS_SEARCHED = ("learning_rate", "warmup_fraction", "clip_norm")


def tuned(name: str, by: str = "") -> Explainer:
    """A field that is the value of one hyperparameter; `by` says how it follows, where that is no rule of scale."""

    def said(known: Known, leaf: Leaf) -> Explained:
        return tuned_field(known, leaf, name, by=by)

    return said


def of_group(name: str) -> Explainer:
    """A number of a group of parameters."""

    def said(known: Known, leaf: Leaf) -> Explained:
        group, rules = leaf.of, known.decision.parametrization
        assert isinstance(group, ParameterGroup)
        said_of = rules_of(rules, group.kind, name)
        if name == "weight_decay" and group.weight_decay == 0 and not decays(rules, group.kind):
            return _never_decays(known, leaf, group.kind, said_of)
        return tuned_field(known, leaf, name, by=factor_words(known, group, name), rules=said_of)

    return said


def _never_decays(known: Known, leaf: Leaf, kind: str, rules: tuple[str, ...]) -> Explained:
    """A decay of 0 that no value of the hyperparameter would change."""
    what = kind.replace("_", " ")
    text = f"a {what} does not decay, whatever the weight decay of others"
    source = Source(kind="rule", text=text, plan_keys=(known.asked("proxy.rules.decayed"),), rules=rules)
    strength, change = alike(known, f"no decay of a {what}"), change_keys(known, "proxy.rules.decayed")
    return explained(leaf, source, strength, change, unknown=(f"what a decay of it would do: {NOT_TRIED}",))


def key_of(known: Known, name: str) -> str:
    """The plan key that a hyperparameter is searched by, or set."""
    for key in (f"search.choices.{name}", f"search.axes.{name}"):
        if known.value_of(key) is not None:
            return key
    if name.endswith("_multiplier"):  # 1 where it is not searched
        return f"search.axes.{name}"
    return f"search.{name}" if name in _ALWAYS_SEARCHED else f"proxy.{name}"


def tuned_field(known: Known, leaf: Leaf, name: str, *, by: str = "", rules: tuple[str, ...] = ()) -> Explained:
    """What search, valleys and verdicts say of a hyperparameter, for the field it became."""
    tests = tests_of(known, name)
    return explained(
        leaf, _source(known, name, by, rules), strength_of(known, name, tests), _change(known, name, tests),
        cost=cost_of(tests), unknown=_unknown(known, name, tests),
    )  # fmt: skip


def _row(known: Known, name: str) -> Any:
    """The row of the table of values; None where there is none."""
    return next((row for row in known.transfer.get("values", ()) if row["hyperparameter"] == name), None)


def is_searched(known: Known, name: str) -> bool:
    """Whether the search varied it: by its ranges, or, where they are not here, by what every search varies."""
    search = known.provenance.get("search")
    if not search:
        return name in _ALWAYS_SEARCHED or name.endswith("_multiplier")
    return len(set(search["ranges"].get(name, ()))) > 1 or name in known.value_of("search.can_be_off")


def _source(known: Known, name: str, by: str, rules: tuple[str, ...]) -> Source:
    row = _row(known, name)
    carried = f"; {row['rule']}" if row else ""
    how = f"{carried}; {by}" if by else carried
    if not is_searched(known, name):
        base = None if row is None else row["base_value"]
        source = from_plan(known, base, key_of(known, name), by=how.removeprefix("; "))
        return Source(kind=source.kind, text=source.text, plan_keys=source.plan_keys, rules=rules)
    asked = (known.asked(key_of(known, name)),)
    search = known.provenance.get("search")
    if row is None or not search:
        text = f"searched within {asked[0].key}, set at the base and carried to the launch; {NOT_HERE} by which trial"
        return Source(kind="search", text=f"{text}{how}", plan_keys=asked, rules=rules)
    runs = (_search_runs(known, search),)
    valley = _valley(known) if name == "learning_rate" else None
    if valley is not None:
        text, of_base = valley
        return Source(kind="valley", text=f"{text}{how}", plan_keys=asked, rules=rules, runs=(of_base, *runs))
    own = search["best"].get(name)
    own = next((tie["searched"] for tie in search.get("ties", ()) if tie["hyperparameter"] == name), own)
    found = (
        f"the best of {search['num_trials']} trials ({search['sampler']}), trial {search['best_trial']} with "
        f"{nats(search['best_loss_nats'])} nats, has {hyperparameter_name(name)} {number(own)}"
    )
    if row["base_value"] != own:
        found += f"; {number(row['base_value'])} is used"
    return Source(kind="search", text=f"{found}{how}", plan_keys=asked, rules=rules, runs=runs)


def _search_runs(known: Known, search: Any) -> Runs:
    ids = tuple(known.provenance["runs"]["search"])
    seed = known.value_of("search.seed")
    return Runs(what=f"search, seed {seed}", num_runs=search["num_trials"], num_seeds=1, ids=ids)


def _valley(known: Known) -> tuple[str, Runs] | None:
    """The base's fitted optimum over width, in words, and its runs; None where none was found there."""
    test = next((one for one in tests_of(known, "learning_rate") if one.test["axis"] == "width"), None)
    if test is None or not known.transfer.get("at_base_optimum"):
        return None
    base = test.verdict["base_size"]
    optimum = next((o for o in test.verdict["optima"] if o["size"] == base and o["value"] is not None), None)
    if optimum is None:
        return None
    interval = optimum["interval_log2"]
    told = "" if interval is None else f" {ends([from_log2('learning_rate', end) for end in interval])}"
    text = (
        f"the fitted optimum at {size_name('width', base)}, {number(known.transfer['learning_rate'])}{told} at level "
        f"{test.verdict['level']:g}, of {optimum['num_runs']} runs"
    )
    return text, test.runs


def strength_of(known: Known, name: str, tests: tuple[Tested, ...]) -> Strength:
    """What the verdicts say of it; where there is none, that it is taken over as it is."""
    row, gates = _row(known, name), known.gate("transfer")
    if tests:
        worst = row["outcome"] if row else tests[0].verdict["outcome"]
        said = [one.words() for one in tests]
        if name == "learning_rate" and len(tests) > 1:
            said.insert(0, f"over all axes together: {worst.replace('_', ' ')}")
        if row and row["untested"]:
            said.append(f"over {', '.join(row['untested'])}: not tested, assumed")
        said += [gate_words(gates)] if gates else []
        return Strength(
            kind="measured", outcome=worst, text="; ".join(said), gates=gates, intervals=intervals_of(tests),
            num_runs=len({id for one in tests for id in one.ids}) or max(one.runs.num_runs for one in tests),
            num_seeds=max(one.num_seeds for one in tests), extrapolation=max(one.reach for one in tests),
        )  # fmt: skip
    rules = [rule for rule in known.decision.transfer if rule.hyperparameter == name]
    if rules:  # of the config itself, where the evidence is not here
        said = [f"{name} over {rule.axis}: {rule.outcome.replace('_', ' ')}" for rule in rules]
        order = ("holds", "cannot_tell", "drifts")
        worst = max((rule.outcome for rule in rules), key=order.index)
        return Strength(kind="measured", outcome=worst, text=f"{'; '.join(said)}; {NOT_HERE} by which runs")
    if not is_searched(known, name) and known.evidence:
        return alike(known, f"the same {hyperparameter_name(name)} at the base")
    over = ", ".join(row["untested"]) if row else ""
    text = f"searched at the base; that it stays put{f' over {over}' if over else ''} is assumed: no test was made"
    if not known.evidence:
        text = f"no transfer test of it is in the config; {NOT_HERE}"
    return Strength(kind="assumed" if known.evidence else "unknown", text=text)


def cost_of(tests: tuple[Tested, ...]) -> str | None:
    """What a value off by a factor of two loses, and other exponents, where that was measured."""
    said = []
    for one in tests:
        verdict = one.verdict
        twice = verdict["cost_of_2x_off_nats"]
        if twice is not None:
            estimate = {"value": twice, "interval": verdict["cost_of_2x_off_interval"]}
            said.append(
                f"over {one.test['axis']}, a value off by a factor of two, to the worse side, loses {lost(estimate)} "
                "nats at the largest size that tells it"
            )
        others = [
            f"{other['power']:+g} ({other['source']}) {lost(other['regret_nats'])}"
            for other in verdict["alternatives"]
            if other["regret_nats"]["value"] is not None
        ]
        if others:
            said.append(f"nats lost with other exponents over {one.test['axis']}: {'; '.join(others)}")
    return "; ".join(said) or None


def _change(known: Known, name: str, tests: tuple[Tested, ...]) -> tuple[str, ...]:
    """Runs that would decide it, an end of the range that the best is near, and the keys."""
    said = decisive(known, tests)
    search = known.provenance.get("search") or {}
    said += [
        f"the best trials lie at the {edge['side']} end of its range: search.max_extensions lets it grow"
        for edge in search.get("open_edges", ())
        if edge["axis"] == name
    ]
    if not tests and name in WITH_OPTIMUM:
        said.append(f'plan key transfer.hyperparameters: {{ {name} = ["width"] }} tests whether it stays put')
    return (*said, *change_keys(known, key_of(known, name)))


def _unknown(known: Known, name: str, tests: tuple[Tested, ...]) -> tuple[str, ...]:
    said = []
    if not known.evidence:
        said.append(f"runs, intervals and costs: {NOT_HERE}")
    elif not any(one.verdict["cost_of_2x_off_nats"] is not None for one in tests):
        said.append(f"what another {hyperparameter_name(name)} would cost: no valley of it was measured")
    if tests and any(one.reach > 1 for one in tests):
        far = max(tests, key=lambda one: one.reach)
        said.append(
            f"whether the rule goes on beyond the largest {far.test['axis']} that was run: the launch is "
            f"{far.reach:.3g} times larger"
        )
    return tuple(said)
