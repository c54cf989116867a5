"""The table of what decides which field of a decision: plan keys, the fit, a rule, the corpus, this version.

A row is a pattern of `Field.key` and the first that matches counts. Fields that a hyperparameter becomes have no row:
they are known by its name. `provenance.py` has what each kind of origin means for source, strength and change.
"""

from __future__ import annotations

import dataclasses
import fnmatch
from dataclasses import dataclass
from typing import Literal

from launcher.explaining.record import StrengthKind
from proxies.core.hyperparameters import HYPERPARAMETERS
from proxies.core.optimizers import OPTIMIZERS

OriginKind = Literal["plan", "tuned", "rule", "fit", "verdict", "corpus", "derived", "fixed"]
"""tuned: what a hyperparameter becomes; rule: of the parametrization; the others as in `record.SourceKind`."""
TARGET = ("target.budget_flops", "target.width_multiple")
_TUNED_IN = ("", "groups", "forward", "learning_rate.schedule")
"""Records some of whose fields are named for the hyperparameter that they come from."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """What decides a field, and what is known of it whatever the study."""

    kind: OriginKind
    keys: tuple[str, ...] = ()
    """Plan keys: the first that is not 0 or empty decides, else the last. `{}` is the field's own name."""
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
    """The same in words, or what is said before what they say."""
    change: tuple[str, ...] = ()
    """Beside what its plan keys, tests and gates would."""


def _plan(*keys: str, **more: object) -> Origin:
    return Origin(kind="plan", keys=keys, **more)  # type: ignore[arg-type]


def _choice(*keys: str, gates: tuple[str, ...] = ("coordinates",)) -> Origin:
    return _plan(*keys, "proxy.parametrization", in_runs="parametrization.{}", gates=gates)


def _fixed(text: str, *rules: str) -> Origin:
    return Origin(
        kind="fixed", text=text, rules=rules, sure="assumed" if rules else "chosen",
        strength="others' practice; no run of this study tries it" if rules else "a convention; no run tries another",
        change=("no plan key sets it: another version of forerun might freeze another",),
    )  # fmt: skip


def _corpus(text: str, *gates: str) -> Origin:
    return Origin(
        kind="corpus", text=f"the manifest of the corpus: {text}", gates=gates, sure="exact",
        strength="read from the manifest of its shards",
        change=("`forerun tokenize SOURCE --out DIR` makes another corpus: other data make other runs",),
    )  # fmt: skip


def _derived(text: str, *fields: str, keys: tuple[str, ...] = ()) -> Origin:
    return Origin(
        kind="derived", text=text, fields=fields, keys=keys, sure="exact", strength="follows from other fields",
        change=(f"what changes {fields[0]}: `forerun explain FROZEN {fields[0]}`",),
    )  # fmt: skip


def _fit(text: str, *fields: str, gates: tuple[str, ...] = (), strength: str = "") -> Origin:
    return Origin(
        kind="fit", keys=TARGET, text=text, fields=fields, gates=("fit", "ladder_tuned", *gates), strength=strength
    )  # fmt: skip


_DRILLS = ("`forerun rehearse FROZEN`: the drills of the launch",)
_DEGREES = _plan(
    "launch.{}",
    strength="a choice; the real shape was sharded so, over a fake group of all ranks, before it was frozen",
    change=("`forerun estimate FROZEN`: what a rank holds, time and money of these degrees",),
)  # fmt: skip
_GROUP = _derived(
    "parameters of the model that share kind and numbers, layers as one pattern", "shape", "parametrization"
)
_RULE = Origin(kind="rule", gates=("coordinates",), strength="a rule of size, by which the proxies had theirs")
_VOCABULARY = _corpus("its tokenizer's vocabulary")
_SPIKE = "what a spike is, and what is done about it"
_SCHEDULE = "learning_rate.schedule"

ORIGINS: dict[str, Origin] = {
    "schema_version": _fixed("the version of the record, by which it is read"),
    "shape.width": _fit("the best size for the budget, made whole"),
    "shape.num_layers": _plan("target.num_layers", "model.num_layers", axis="depth", in_runs="shape.num_layers"),
    "base_shape.width": _plan("proxy.base_width"),
    "*shape.vocab_size": _VOCABULARY,
    "*shape.num_heads": _derived("heads of one width", "{}.width", keys=("model.head_dim",)),
    "*shape.num_kv_heads": _derived("as the heads", "{}.num_heads", keys=("model.query_heads_per_kv_head",)),
    "*shape.ffn_width": _derived("in proportion to the width", "{}.width", keys=("model.ffn_ratio",)),
    "*shape.*": _plan("model.{}"),
    **{f"parametrization.{choice}": _choice() for choice in ("name", "width")},
    # What the coordinate check would see go wrong; in its few steps it sees no other choice.
    **{
        f"parametrization.{choice}": _choice("proxy.rules.{}")
        for choice in ("attention", "output", "depth_alpha", "embedding_rate")
    },
    "parametrization.*": _choice("proxy.rules.{}", gates=()),
    "transfer.*": Origin(
        kind="verdict", keys=("transfer.hyperparameters", "transfer.measured_rules", "transfer.level"),
        gates=("transfer",),
    ),
    "forward.*": _RULE,
    "multiplier_form": _fixed("as in the runs: absorbed in the weights, gradients would have another norm"),
    "groups.init_std": _RULE,
    "groups.kind": _GROUP,
    "groups.pattern": _GROUP,
    "optimizer": _fixed("as the proxies", *(f"{one.label} ({one.source})" for one in OPTIMIZERS.values())),
    "*_form": _fixed("as in torch: a step multiplies a weight by 1 - lr(t) x decay"),
    f"{_SCHEDULE}.kind": _plan("proxy.schedule"),
    f"{_SCHEDULE}.num_steps": _fit("what the budget leaves at the chosen size", "num_tokens", "batch_tokens"),
    f"{_SCHEDULE}.decay_steps": _plan("proxy.decay_fraction", text="a share of the steps; wsd alone uses it"),
    f"{_SCHEDULE}.batch_warmup_steps": _plan("proxy.batch_warmup_fraction", text="a share of the steps"),
    f"{_SCHEDULE}.batch_warmup_stages": _plan("proxy.batch_warmup_fraction", "proxy.batch_warmup_stages"),
    f"{_SCHEDULE}.*": _plan("proxy.{}"),
    "learning_rate.step_convention": _fixed("trainers differ in it, so it is frozen"),
    "learning_rate.*": _derived("computed from the schedule at its steps", _SCHEDULE),
    "batch_tokens": _plan("target.batch_tokens", "proxy.batch_tokens", axis="batch", in_runs="batch_tokens"),
    "num_tokens": _fit("what the budget leaves at the chosen size, in whole steps", "shape", "batch_tokens",
                       gates=("data",)),
    "data.data_id": _corpus("hash of its shards and shares", "data"),
    "data.tokenizer": _corpus("its tokenizer"),
    "data.vocab_size": _VOCABULARY,
    "data.num_train_tokens": _corpus("unique tokens of its training part", "data"),
    "data.weights": _plan("data.weights"),
    "data.order": _fixed("one order for every run"),
    "seed": _plan("launch.seed"),
    "precision": _plan("launch.precision", in_runs="numerics.dtype", change=_DRILLS),
    "compiled": _plan("launch.compiled", in_runs="numerics.compiled", change=_DRILLS),
    "parallelism.*": _DEGREES,
    "monitoring.*": _plan("launch.{}", change=_DRILLS),
    "checkpointing.every_steps": _plan("launch.checkpoint_every_steps", change=_DRILLS),
    "checkpointing.keep": _fixed("the newest may turn out corrupt, so two at least"),
    "spikes.max_rollbacks": _plan("launch.spike_rollbacks"),
    "spikes.rollback_steps": _fixed(_SPIKE, "PaLM went back about 100 steps (arXiv 2204.02311, section 5.1)"),
    "spikes.skip_batches": _fixed(_SPIKE, "PaLM skipped 200 to 500 batches (arXiv 2204.02311, section 5.1)"),
    "spikes.clip_share": _fixed(_SPIKE, "OPT lowered its clip from 1.0 to 0.3 (arXiv 2205.01068, section 2.5)"),
    "spikes.*": _fixed(_SPIKE),
    "abort.train_loss_above_nats": _derived("ln(vocabulary) and a nat, as of proxies", "shape.vocab_size"),
    "abort.*": _fixed("whether the run stops before a step on a gradient that is not finite"),
    "predicted.level": _plan("transfer.level"),
    "predicted.curve": _fit(
        "the ladder's own loss curves over their ends, regressed on size and tokens (arXiv 2507.02119)", "shape",
        "num_tokens", strength="its band counts how far such curves missed the ladder's longest runs",
    ),
    "predicted.memory_octaves": _fit(
        "how fast the ladder's own loss curves forget a departure from their common course", "shape", "num_tokens"
    ),
    "predicted.*": _fit("predicted for these tokens at this size", "shape", "num_tokens"),
}  # fmt: skip
"""By pattern of `Field.key`."""


def hyperparameter_of(key: str) -> str | None:
    """The hyperparameter that a field comes from: of its name, a share of the steps, or a part of a multiplier."""
    record, _, name = key.rpartition(".")
    spelled = (name, name.replace("_steps", "_fraction"))
    return next(
        (
            one.name
            for one in HYPERPARAMETERS.values()
            if record in _TUNED_IN and (one.name in spelled or (record == "forward" and one.multiplies == name))
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
    found = next((origin for pattern, origin in ORIGINS.items() if fnmatch.fnmatchcase(key, pattern)), None)
    if found is None:
        raise KeyError(key)
    return dataclasses.replace(
        found, keys=tuple(key.replace("{}", name) for key in found.keys), in_runs=found.in_runs.replace("{}", name),
        fields=tuple(field.replace("{}", record) for field in found.fields),
        change=tuple(said.replace("{}", record) for said in found.change),
    )  # fmt: skip
