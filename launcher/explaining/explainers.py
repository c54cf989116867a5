"""Which explainer says what of which field: every field of a decision has one, and a test of the house asks for it."""

from __future__ import annotations

from launcher.explaining import fitted_fields as fitted
from launcher.explaining import other_fields as other
from launcher.explaining import plan_fields as plan
from launcher.explaining import rule_fields as rule
from launcher.explaining import tuned_fields as tuned
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
from launcher.explaining.plan_fields import Explainer, explained
from launcher.explaining.record import Explained, Interval, Source, Strength
from launcher.explaining.tuned_fields import cost_of
from launcher.plan.sources import CHOICES
from launcher.views.transfer import hyperparameter_name
from transfer.verdict.rules import TransferRule

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


_CHOICES: tuple[str, ...] = ("name", *CHOICES)
_RULE = (
    "hyperparameter", "axis", "power", "source", "outcome", "measured_power", "measured_low", "measured_high",
    "regret_nats", "regret_low_nats", "regret_high_nats", "level",
)  # fmt: skip
_SPIKES = ("rollback_steps", "skip_batches", "clip_share", "window_steps", "threshold", "least_nats", "patience_steps")
_HEADS, _KV_HEADS = ("model.head_dim",), ("model.head_dim", "model.query_heads_per_kv_head")


def _shapes() -> dict[str, Explainer]:
    """Of the launch's shape and the base's."""
    found: dict[str, Explainer] = {
        "shape.width": fitted.width,
        "shape.num_layers": plan.layers,
        "base_shape.width": other.shared("proxy.base_width", where=" at its base"),
        "base_shape.num_layers": other.shared("model.num_layers", where=" at its base"),
    }
    for of in ("shape", "base_shape"):
        found |= {f"{of}.{name}": plan.of_model for name in plan.MODEL}
        found[f"{of}.vocab_size"] = other.corpus("its tokenizer's vocabulary")
        found[f"{of}.num_heads"] = fitted.by_width(*_HEADS)
        found[f"{of}.num_kv_heads"] = fitted.by_width(*_KV_HEADS)
        found[f"{of}.ffn_width"] = fitted.by_width("model.ffn_ratio")
    return found


def _training() -> dict[str, Explainer]:
    """Of optimizer, schedule, batch and data."""
    at = "learning_rate.schedule"
    numbers = ("learning_rate", "weight_decay", "eps", "beta1", "beta2")
    return {
        **{f"groups.{name}": tuned.of_group(name) for name in numbers},
        "groups.init_std": rule.init_std,
        "groups.kind": rule.group_make,
        "groups.pattern": rule.group_make,
        "optimizer": other.fixed("AdamW (arXiv 1711.05101), the only one the proxies train with"),
        "weight_decay_form": other.decay_form,
        "multiplier_form": other.fixed("as when clip was searched: absorbed, gradients would have another norm"),
        f"{at}.kind": other.shared("proxy.schedule"),
        f"{at}.num_steps": fitted.duration,
        f"{at}.warmup_steps": other.warmup,
        f"{at}.decay_steps": other.shared("proxy.decay_fraction", of="used by wsd alone"),
        f"{at}.final_fraction": other.shared("proxy.final_fraction"),
        f"{at}.batch_warmup_steps": other.shared("proxy.batch_warmup_fraction", of="a share of the steps"),
        f"{at}.batch_warmup_stages": other.stages,
        "learning_rate.step_convention": other.fixed("trainers differ in it, so it is frozen"),
        "learning_rate.samples": other.table,
        "learning_rate.table_sha256": other.table,
        "clip_norm": tuned.tuned("clip_norm"),
        "batch_tokens": plan.batch,
        "num_tokens": fitted.duration,
        "data.data_id": other.corpus("hash of its shards and shares"),
        "data.tokenizer": other.corpus("its tokenizer"),
        "data.vocab_size": other.corpus("its tokenizer's vocabulary"),
        "data.num_train_tokens": other.corpus("unique tokens of its training part"),
        "data.weights": other.weights,
        "data.order": other.fixed("one order for every run"),
        "seed": plan.seed,
        "precision": plan.precision,
        "compiled": plan.compiled,
    }


def _care() -> dict[str, Explainer]:
    """Of the layout, and of what the run does about itself."""
    return {
        **{f"parallelism.{name}": plan.layout for name in plan.LAYOUT},
        **{f"monitoring.{name}": plan.care(f"launch.{name}") for name in plan.MONITORING},
        **{f"spikes.{name}": other.fixed("what a spike is, and what is done about it") for name in _SPIKES},
        "spikes.max_rollbacks": plan.care("launch.spike_rollbacks"),
        "checkpointing.every_steps": plan.care("launch.checkpoint_every_steps"),
        "checkpointing.keep": other.fixed("the newest may turn out corrupt, so two at least"),
        "abort.on_non_finite": other.fixed("whether the run stops before a step on a gradient that is not finite"),
        "abort.train_loss_above_nats": other.stop_above,
    }


def _forecast() -> dict[str, Explainer]:
    return {
        **{f"predicted.{name}": fitted.expected for name in ("loss_nats", "low_nats", "high_nats", "extrapolation")},
        "predicted.level": fitted.level,
        "predicted.curve": fitted.on_the_way,
        "predicted.memory_octaves": fitted.on_the_way,
    }


EXPLAINERS: dict[str, Explainer] = {
    "schema_version": other.fixed("the version of the record, by which it is read"),
    **_shapes(),
    **{f"parametrization.{name}": rule.choice(name) for name in _CHOICES},
    **{f"transfer.{name}": said_by for name in _RULE},
    **{f"forward.{name}": rule.forward(name) for name in ("embedding", "attention", "residual", "output")},
    **_training(),
    **_care(),
    **_forecast(),
}
"""By `Leaf.key`."""


def explain(known: Known, leaf: Leaf) -> Explained:
    """Everything the records say of one field."""
    return EXPLAINERS[leaf.key](known, leaf)
