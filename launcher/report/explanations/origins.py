"""The origins of a frozen config's fields: for each field, what decides it.

An origin is a plan key, the fit, a rule, the corpus, or this version of forerun.
"""

from __future__ import annotations

import dataclasses
import fnmatch
from dataclasses import KW_ONLY, dataclass
from typing import Literal

from forerun._proxies.core.hyperparameters import HYPERPARAMETERS
from forerun._proxies.core.optimizers import RECIPES
from forerun._proxies.core.programs import PLACEHOLDERS

OriginKind = Literal["plan", "tuned", "rule", "fit", "verdict", "corpus", "derived", "fixed"]
"""Kind of an origin. `tuned`: a value that follows from a hyperparameter. `rule`: a rule of the
parametrization. The others are those of `field_provenance.SourceKind`."""
TARGET_KEYS = ("target.budget_flops", "target.width_multiple")
"""Plan keys that decide the size of the main run."""
_HYPERPARAMETER_RECORDS = ("", "groups", "forward", "learning_rate.schedule")
"""Records with fields that are named after the hyperparameter they come from."""


@dataclass(frozen=True, slots=True)
class Origin:
    """The origin of a field: what decides it, and what is known about it in every study."""

    kind: OriginKind
    text: str = ""
    """Reason for the value, or the way to compute it."""
    _: KW_ONLY
    keys: tuple[str, ...] = ()
    """Plan keys. The first that is not 0 or empty decides, or else the last. `{}` stands for the
    field's own name."""
    fields: tuple[str, ...] = ()
    """Other fields that the field follows from. `{}` stands for the name of the field's record."""
    practices: tuple[str, ...] = ()
    """Practices that the field follows, with their sources."""
    axis: str = ""
    """Axis along which the field is a size; transfer tests over that axis bear on it."""
    in_runs: str = ""
    """Path of the same value in a `RunSpec`, if runs may differ from the launch. `{}` stands for
    the field's own name."""
    gates: tuple[str, ...] = ()
    """Freezing gates that bear on the field."""


def _make_key_origin(
    *keys: str, text: str = "", axis: str = "", in_runs: str = "", gates: tuple[str, ...] = ()
) -> Origin:
    return Origin("plan", text, keys=keys, axis=axis, in_runs=in_runs, gates=gates)


def _make_choice_origin(*keys: str, gates: tuple[str, ...] = ()) -> Origin:
    """Make the origin of a choice of the parametrization."""
    return _make_key_origin(
        *keys, "proxy.parametrization", in_runs="parametrization.{}", gates=gates
    )


def _make_fixed_origin(text: str, *practices: str) -> Origin:
    return Origin("fixed", text, practices=practices)


def _make_corpus_origin(text: str, *gates: str) -> Origin:
    return Origin("corpus", f"From the manifest of the corpus: {text}", gates=gates)


def _make_derived_origin(text: str, *fields: str, keys: tuple[str, ...] = ()) -> Origin:
    return Origin("derived", text, fields=fields, keys=keys)


def _make_fit_origin(text: str, *fields: str, gates: tuple[str, ...] = ()) -> Origin:
    return Origin(
        "fit", text, keys=TARGET_KEYS, fields=fields, gates=("fit", "ladder_tuned", *gates)
    )


_VOCABULARY = _make_corpus_origin("its tokenizer's vocabulary")
_SPIKE = "Part of the definition of a spike and of the response to it"
_SCHEDULE = "learning_rate.schedule"

ORIGINS: dict[str, Origin] = {
    "schema_version": _make_fixed_origin("Version of the record's format. Readers need it"),
    "shape.width": _make_fit_origin("The best size for the budget, rounded"),
    "shape.num_layers": _make_key_origin(
        "target.num_layers", "model.num_layers", axis="depth", in_runs="shape.num_layers"
    ),
    "base_shape.width": _make_key_origin("proxy.base_width"),
    "*shape.vocab_size": _VOCABULARY,
    "*shape.num_heads": _make_derived_origin(
        "The width divided by the width of a head", "{}.width", keys=("model.head_dim",)
    ),
    "*shape.num_kv_heads": _make_derived_origin(
        "The heads divided by the query heads per KV head",
        "{}.num_heads",
        keys=("model.query_heads_per_kv_head",),
    ),
    "*shape.ffn_width": _make_derived_origin(
        "The width times the plan's ratio", "{}.width", keys=("model.ffn_ratio",)
    ),
    "*shape.*": _make_key_origin("model.{}"),
    **{
        f"parametrization.{choice}": _make_choice_origin(gates=("coordinates",))
        for choice in ("name", "width")
    },
    # The coordinate check can see these choices fail; in its few steps it sees no other choice.
    **{
        f"parametrization.{choice}": _make_choice_origin("proxy.rules.{}", gates=("coordinates",))
        for choice in ("attention", "output", "depth_alpha", "embedding_rate")
    },
    "parametrization.*": _make_choice_origin("proxy.rules.{}"),
    "transfer.*": Origin(
        "verdict",
        keys=("transfer.hyperparameters", "transfer.measured_rules", "transfer.level"),
        gates=("transfer",),
    ),
    **dict.fromkeys(("forward.*", "groups.init_std"), Origin("rule", gates=("coordinates",))),
    "multiplier_form": _make_fixed_origin(
        "As in the runs. Multipliers inside the weights would change the gradient norm"
    ),
    **dict.fromkeys(
        ("groups.kind", "groups.pattern"),
        _make_derived_origin(
            "Parameters that share a kind and their numbers. All layers are one pattern",
            "shape",
            "parametrization",
        ),
    ),
    "optimizer": _make_fixed_origin(
        "The proxies' optimizer",
        *(f"{recipe.label} ({recipe.main.source})" for recipe in RECIPES.values()),
    ),
    "groups.optimizer": _make_derived_origin(
        "The optimizer that the recipe has for parameters of this kind", "optimizer"
    ),
    "*_form": _make_fixed_origin("As in torch: a step multiplies a weight by 1 - lr(t) x decay"),
    f"{_SCHEDULE}.kind": _make_key_origin("proxy.schedule"),
    f"{_SCHEDULE}.num_steps": _make_fit_origin(
        "Steps that the budget leaves at this size", "num_tokens", "batch_tokens"
    ),
    f"{_SCHEDULE}.decay_steps": _make_key_origin(
        "proxy.decay_fraction", text="A share of the steps, for wsd only"
    ),
    f"{_SCHEDULE}.batch_warmup_steps": _make_key_origin(
        "proxy.batch_warmup_fraction", text="A share of the steps"
    ),
    f"{_SCHEDULE}.batch_warmup_stages": _make_key_origin(
        "proxy.batch_warmup_fraction", "proxy.batch_warmup_stages"
    ),
    f"{_SCHEDULE}.*": _make_key_origin("proxy.{}"),
    "learning_rate.step_convention": _make_fixed_origin(
        "Trainers count steps in different ways, so the way is frozen"
    ),
    "learning_rate.*": _make_derived_origin("Computed from the schedule at its steps", _SCHEDULE),
    "batch_tokens": _make_key_origin(
        "target.batch_tokens", "proxy.batch_tokens", axis="batch", in_runs="batch_tokens"
    ),
    "num_tokens": _make_fit_origin(
        "Tokens that the budget leaves at this size", "shape", "batch_tokens", gates=("data",)
    ),
    "data.data_id": _make_corpus_origin("hash of its shards and shares", "data"),
    "data.tokenizer": _make_corpus_origin("its tokenizer"),
    "data.vocab_size": _VOCABULARY,
    "data.num_train_tokens": _make_corpus_origin("unique tokens of its training part", "data"),
    "data.weights": _make_key_origin("data.weights"),
    "data.order": _make_fixed_origin("Every run reads the data in the same order"),
    "seed": _make_key_origin("launch.seed"),
    "precision": _make_key_origin("launch.precision", in_runs="numerics.dtype"),
    "compiled": _make_key_origin("launch.compiled", in_runs="numerics.compiled"),
    "parallelism.*": _make_key_origin("launch.{}"),
    "monitoring.*": _make_key_origin("launch.{}"),
    "checkpointing.every_steps": _make_key_origin("launch.checkpoint_every_steps"),
    "checkpointing.keep": _make_fixed_origin(
        "At least two are kept, because the newest may be corrupt"
    ),
    "spikes.max_rollbacks": _make_key_origin("launch.spike_rollbacks"),
    "spikes.rollback_steps": _make_fixed_origin(
        _SPIKE, "PaLM went back about 100 steps (arXiv 2204.02311, section 5.1)"
    ),
    "spikes.skip_batches": _make_fixed_origin(
        _SPIKE, "PaLM skipped 200 to 500 batches (arXiv 2204.02311, section 5.1)"
    ),
    "spikes.clip_share": _make_fixed_origin(
        _SPIKE, "OPT lowered its clip from 1.0 to 0.3 (arXiv 2205.01068, section 2.5)"
    ),
    "spikes.*": _make_fixed_origin(_SPIKE),
    "abort.train_loss_above_nats": _make_derived_origin(
        "ln(vocabulary) plus one nat, as for proxies", "shape.vocab_size"
    ),
    "abort.*": _make_fixed_origin("The run stops before a step on a gradient that is not finite"),
    "own.command.metrics_*": _make_key_origin("proxy.{}"),
    "own.command.*_key": _make_key_origin("proxy.metrics_{}"),
    "own.command.*_unit": _make_key_origin("proxy.metrics_{}"),
    "own.command.bytes_per_token": _make_key_origin("proxy.metrics_bytes_per_token"),
    "own.command.*": _make_key_origin("proxy.command"),
    "own.num_params": _make_key_origin("proxy.describe"),
    "own.resume": _make_key_origin("launch.resume_arguments"),
    "own.values*": _make_derived_origin(
        "What your own trainer gets", "shape", "learning_rate.schedule", "batch_tokens", "seed"
    ),
    "model.factory.dimensions": _make_key_origin("proxy.dimensions"),
    "model.factory.*": _make_key_origin("proxy.factory"),
    "model.values*": _make_derived_origin("A keyword of your own model", "shape"),
    "model.*": _make_derived_origin(
        "A property of your own model at this shape", "shape", "model.factory.target"
    ),
    "predicted.level": _make_key_origin("transfer.level"),
    "predicted.curve": _make_fit_origin(
        "A law of annealed loss curves (arXiv 2408.11029, with the size added), with a band that "
        "includes the error of such curves on the ladder's longest runs",
        "shape",
        "num_tokens",
    ),
    "predicted.memory_octaves": _make_fit_origin(
        "How fast the ladder's curves forget a deviation", "shape", "num_tokens"
    ),
    "predicted.*": _make_fit_origin(
        "The forecast for these tokens at this size", "shape", "num_tokens"
    ),
}
"""Origins of fields by pattern of `Field.key`; the first pattern that matches counts.

Fields that follow from a hyperparameter have no entry: they are known by its name."""


_USER_VALUES = "own.values"
"""Record of the values that a user's own trainer receives, by placeholder. It includes values that
the plan declares."""


def find_hyperparameter(key: str) -> str | None:
    """Return the hyperparameter that a field comes from; None if there is none.

    The field may have the hyperparameter's name, may be a number of steps that the hyperparameter
    gives as a share, or may be a forward multiplier that the hyperparameter is a factor of.
    """
    record, _, name = key.rpartition(".")
    if record == _USER_VALUES:
        names = {spec.placeholder_name: spec.name for spec in HYPERPARAMETERS.values()}
        return names.get(name, None if name in PLACEHOLDERS else name)
    if record not in _HYPERPARAMETER_RECORDS:
        return None
    for spec in HYPERPARAMETERS.values():
        if spec.name in (name, name.replace("_steps", "_fraction")):
            return spec.name
        if record == "forward" and spec.multiplies == name:
            return spec.name
    return None


def find_origin(key: str) -> Origin:
    """Return the origin of a field.

    Raises:
        KeyError: No pattern matches; a new field needs an entry in `ORIGINS`.
    """
    record, _, name = key.rpartition(".")
    if record != "forward" and find_hyperparameter(key) is not None:
        return Origin("tuned", gates=("transfer",))
    for pattern, origin in ORIGINS.items():
        if fnmatch.fnmatchcase(key, pattern):
            return dataclasses.replace(
                origin,
                keys=tuple(plan_key.replace("{}", name) for plan_key in origin.keys),
                in_runs=origin.in_runs.replace("{}", name),
                fields=tuple(field.replace("{}", record) for field in origin.fields),
            )
    raise KeyError(key)
