"""The fields of `transfer`: what a verdict found of one hyperparameter along one axis, and the rule that is used."""

from __future__ import annotations

from launcher.explaining.facts import (
    NOT_HERE,
    change_keys,
    decisive,
    gate_change,
    gate_words,
    intervals_of,
    tests_of,
)
from launcher.explaining.known import Known
from launcher.explaining.leaves import Leaf
from launcher.explaining.plan_fields import explained
from launcher.explaining.record import Explained, Interval, Source, Strength
from launcher.explaining.tuned_fields import cost_of
from launcher.transfer_view import hyperparameter_name
from transfer.rules import TransferRule

_ASKS = {"level": ("transfer.level",), "hyperparameter": ("transfer.hyperparameters",), "axis": ()}
_SIZES = {"width": "transfer.widths", "depth": "transfer.depths", "batch": "transfer.batches",
          "duration": "transfer.durations"}  # fmt: skip


def said_by(known: Known, leaf: Leaf) -> Explained:
    """Any field of a rule: evidence, where the groups hold the numbers."""
    rule, name = leaf.of, leaf.path.rpartition(".")[2]
    assert isinstance(rule, TransferRule)
    tests = tuple(one for one in tests_of(known, rule.hyperparameter) if one.test["axis"] == rule.axis)
    gates = known.gate("transfer")
    over = f"{hyperparameter_name(rule.hyperparameter)} over {rule.axis}"
    text = f"the verdict on {over}"
    if name in ("power", "source"):
        text += ": the exponent is " + (
            "the measured one" if rule.source == "measured" else "the parametrization's own, beside what a kind has"
        )
    if leaf.value is None:
        text += ": the runs do not say"
    sizes = _SIZES.get(rule.axis)
    keys = [key for key in (*_ASKS.get(name, ()), sizes) if key]
    if name in ("power", "source") and rule.axis in ("duration", "batch"):
        keys.append("transfer.measured_rules")
    source = Source(
        kind="verdict", text=text, plan_keys=tuple(known.asked(key) for key in keys),
        runs=tuple(one.runs for one in tests),
    )  # fmt: skip
    change = (*decisive(known, tests), *gate_change(gates), *change_keys(known, *keys))
    return explained(
        leaf, source, _strength(known, rule), change, cost=cost_of(tests),
        unknown=() if tests else (f"its runs and reasons: {NOT_HERE}",),
    )  # fmt: skip


def _strength(known: Known, rule: TransferRule) -> Strength:
    tests = tuple(one for one in tests_of(known, rule.hyperparameter) if one.test["axis"] == rule.axis)
    gates = known.gate("transfer")
    said = [one.words() for one in tests] or [f"{rule.outcome.replace('_', ' ')}; {NOT_HERE} why"]
    if rule.regret_nats is None and not tests:
        said.append("no cost could be estimated")
    said += [gate_words(gates)] if gates else []
    return Strength(
        kind="measured", outcome=rule.outcome, text="; ".join(said), gates=gates,
        intervals=intervals_of(tests) or _own_intervals(rule),
        num_runs=tests[0].runs.num_runs if tests else None, num_seeds=tests[0].num_seeds if tests else None,
        extrapolation=tests[0].reach if tests else None,
    )  # fmt: skip


def _own_intervals(rule: TransferRule) -> tuple[Interval, ...]:
    """Those that the config itself has."""
    found = (
        ("nats lost at the target", rule.regret_low_nats, rule.regret_high_nats),
        ("octaves a doubling, all in all", rule.measured_low, rule.measured_high),
    )
    return tuple(
        Interval(of=of, low=low, high=high, level=rule.level)
        for of, low, high in found
        if low is not None and high is not None
    )
