"""What became of a decision in a trainer's files, field by field, and what is the same for every
trainer but ours.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, cast

from launcher.frozen.frozen import Decision, ParameterGroup, assign_groups, learning_rate_of
from proxies.core import canon
from proxies.core.errors import InputError
from proxies.core.hyperparameters import HYPERPARAMETERS

if TYPE_CHECKING:
    from launcher.frozen.frozen import Decision

# What is the same for every trainer but ours: some refusals, some judgements, the names of a
# group's parameters.

_LABEL: Judgement = (
    "equivalent",
    "a label: the trainer needs only its numbers; the files name the digest",
)
_OTHERWISE_ROUNDED = (
    "multiplies q . k in the attention kernel, forerun multiplies the query: rounding differs"
)
JUDGEMENTS: dict[str, Judgement] = {
    "schema_version": _LABEL,
    "shape": ("exact", ""),
    "base_shape": _LABEL,
    "parametrization": _LABEL,
    "transfer": ("equivalent", "evidence only: its numbers are in groups"),
    "forward": ("exact", ""),
    "forward.attention": ("equivalent", _OTHERWISE_ROUNDED),
    "multiplier_form": (
        "exact",
        "multipliers stay in the model, so the gradient norm is that of the search",
    ),
    "groups": ("exact", ""),
    "groups.kind": _LABEL,
    "groups.optimizer": ("exact", "a parameter group of that optimizer"),
    "groups.init_std": (
        "exact",
        "each initial value is drawn from (seed, name) as the embedded trainer draws it",
    ),
    "optimizer": (
        "exact",
        "torch.optim.AdamW, foreach; Muon: forerun's own, which the export carries",
    ),
    "weight_decay_form": ("exact", "the optimizer's own"),
    "batch_tokens": (
        "exact",
        "the loss is a mean over its tokens; accumulation over microbatches rounds differently",
    ),
    "num_tokens": ("exact", "follows from the schedule's steps"),
    "data": (
        "exact",
        "read by forerun's own reader, exported with it, which refuses another data_id",
    ),
    "predicted": (
        "equivalent",
        "the trainer does not read it: `forerun watch` compares the log with it",
    ),
    "spikes": ("equivalent", "the response is by hand"),
    "spikes.max_rollbacks": (
        "equivalent",
        "the trainer does not roll back by itself: `forerun watch` says when to",
    ),
    "monitoring": (
        "equivalent",
        "changes no number: the trainer logs its own metrics and replays no step",
    ),
    "compiled": ("equivalent", "the same up to rounding: turn on the trainer's own option"),
}
"""What holds for every such trainer; a trainer's own table goes over it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Expressible:
    """Optimizers and run-wide settings that an export can write, of those that the registries
    declare.
    """

    optimizers: Mapping[str, tuple[str, ...]]
    """Settings that the export writes, by optimizer."""
    run_wide: tuple[str, ...]
    """Run-wide settings that the export writes."""


ADAMW = ("learning_rate", "weight_decay", "eps", "beta1", "beta2")
MUON = ("learning_rate", "weight_decay", "momentum")
"""Settings of these optimizers, as exports write them."""


def refuse(
    trainer: str,
    decision: Decision,
    version: str,
    known: Sequence[str],
    fine: Mapping[str, bool],
    expressible: Expressible,
) -> None:
    """Check that a trainer other than ours can run a decision.

    Args:
        trainer: name of the trainer.
        decision: what it is to run.
        version: version of the trainer that was asked for.
        known: versions that the export is written for.
        fine: the trainer's own problems, each with whether it is absent.
        expressible: optimizers, settings, and run-wide settings that the export writes.

    Raises:
        ExportError: every problem at once.
    """
    checks = {
        f"version {version!r} is not supported: this export is written for {' and '.join(known)}": version  # noqa: E501
        in known,
        (
            f"launch.precision = {decision.precision}: must be float32 or bfloat16; or use the "
            "native "
            "trainer"
        ): (decision.precision != "float64"),
        (
            "this version's learning-rate table differs from the frozen one: export with the "
            "version "
            "that froze it"
        ): (learning_rate_of(decision.learning_rate.schedule) == decision.learning_rate),
        "own: your own trainer trains this config: use --to command": decision.own is None,
        "model: your own model, which this trainer does not know: `forerun launch` trains it": decision.model  # noqa: E501
        is None,
        (
            f"shape.family = {decision.shape.family!r}: this export writes llama-like models; use "
            "the "
            "native trainer"
        ): (decision.shape.family == "llama"),
        **dict.fromkeys(list_inexpressible(decision, expressible), False),
        **fine,
    }
    if problems := [problem for problem, absent in checks.items() if not absent]:
        raise ExportError(trainer, problems)


def list_inexpressible(decision: Decision, expressible: Expressible) -> list[str]:
    """Return the optimizers, their settings, and the run-wide settings of a decision that an export
    cannot write.
    """
    written = " and ".join(expressible.optimizers)
    problems: dict[str, None] = {}
    for group in decision.groups:
        if group.optimizer not in expressible.optimizers:
            problems[
                f"optimizer = {group.optimizer!r}: this export writes {written}; use another "
                "trainer"
            ] = None
            continue
        for name in group.settings.keys() - set(expressible.optimizers[group.optimizer]):
            problems[
                f"{name} of {group.optimizer}: this export does not write it; use another trainer"
            ] = None
    for name, value in decision.run_wide.items():
        if name not in expressible.run_wide and value != HYPERPARAMETERS[name].off:
            problems[f"{name} = {value}: this export cannot express it; use another trainer"] = None
    return list(problems)


def report(
    trainer: str,
    version: str,
    decision: Decision,
    own: Mapping[str, Judgement],
    expressible: Expressible,
) -> FidelityReport:
    """Return what became of each leaf field: a trainer's `own` judgements go over the common
    ones.
    """
    entries = judge_fields(decision, {**JUDGEMENTS, **own}, expressible)
    return FidelityReport(trainer=trainer, version=version, entries=entries)


def names_by_group(
    decision: Decision, names: Mapping[str, str]
) -> list[tuple[ParameterGroup, list[str]]]:
    """Each group and the trainer's names of what it claims; `names`: by ours.

    Raises:
        FrozenError: the groups do not fit the shape's parameters.
    """
    assigned = assign_groups(decision.groups, list(names))
    return [
        (group, [names[name] for name, claimed in assigned.items() if claimed == group])
        for group in decision.groups
    ]


def rank_sequences(decision: Decision) -> tuple[int, int]:
    """A rank's share of a batch's sequences, and how many of them go through the model at once."""
    share = decision.batch_tokens // decision.shape.seq_len // decision.parallelism.num_data_ranks
    return share, decision.parallelism.microbatch_sequences or share


def any_layer(name: str) -> tuple[str, str]:
    """The parts before and after the layer's number in a name; the name and nothing where there is
    none.
    """
    match = re.fullmatch(r"(\w+\.)\d+(\..+)", name)
    return (match[1], match[2]) if match else (name, "")


PLAN_REMEDIES: dict[str, str] = {
    "groups.eps": 'proxy.rules = { eps = "hidden" }',
    "groups.weight_decay": (
        'proxy.rules = { weight_decay = "unscaled", decayed = "two_dimensional" }'
    ),
    "groups.learning_rate": 'proxy.rules = { embedding_rate = "constant" }',
    "learning_rate": (
        "search.warmup_fraction = [0.0, 0.0], or a range in which the main run's "
        "warmup has 100 steps"
    ),
    "data.order": (
        "data.path with a corpus of at least the main run's tokens, or a smaller "
        "target.budget_flops"
    ),
}
"""Plan key and value that Megatron-LM can express, by field or prefix; Megatron-LM has one value
for all groups."""


def list_plan_remedies(fields: Sequence[str]) -> list[str]:
    """Return the plan keys to set, with values, so that these fields become expressible."""
    remedies = {
        field: text
        for field in fields
        for prefix, text in PLAN_REMEDIES.items()
        if field.startswith(prefix)
    }
    return list(dict.fromkeys(remedies.values()))


ANY_FIELD = "*"
"""In `KNOWN_FIELDS`, for a record whose fields have names of the user's own."""
_SETTINGS = "groups.settings"
"""Path of a group's settings, which reports show as fields of the group."""
Verdict = Literal["exact", "equivalent", "not_expressible"]
Judgement = tuple[Verdict, str]
"""A verdict with its note; every verdict but `exact` needs one."""
MODULES = {
    "native": "native",
    "torchtitan": "torchtitan",
    "huggingface": "huggingface",
    "megatron-lm": "megatron_lm",
    "olmo-core": "olmo_core",
    "command": "command",
}
"""Trainers by the name that users type, and the module of `trainers` that writes their files."""


class ExportError(InputError):
    """A version nobody knows, or a decision the trainer cannot run. `problems` lists all of it."""

    def __init__(self, trainer: str, problems: list[str]) -> None:
        self.problems = problems
        super().__init__(f"{trainer} export: " + "; ".join(problems))


@dataclass(frozen=True, kw_only=True, slots=True)
class FidelityEntry:
    """One field of the decision."""

    field: str
    """Its path, such as `learning_rate.schedule.kind`."""
    verdict: Verdict
    """The same number; another form of the same run, under the note's condition; or not in the
    trainer's language."""
    note: str


@dataclass(frozen=True, kw_only=True, slots=True)
class FidelityReport:
    """What the export of one decision to one trainer carries over."""

    trainer: str
    version: str
    entries: tuple[FidelityEntry, ...]

    @property
    def lost(self) -> tuple[FidelityEntry, ...]:
        """What of the decision the trainer cannot express."""
        return tuple(entry for entry in self.entries if entry.verdict == "not_expressible")


class Exporter(Protocol):
    """What a module of this folder offers."""

    VERSIONS: tuple[str, ...]
    """Versions of the trainer that it knows, the one written by default last."""

    def export(self, decision: Decision, out_dir: Path, version: str) -> FidelityReport:
        """Write the trainer's files; returns what became of every leaf field of the decision.

        Raises:
            ExportError: an unknown version, or what the trainer cannot run; every problem at once,
                nothing written.
            FrozenError: the groups do not fit the shape's parameters.
        """


def exporter(trainer: str) -> Exporter:
    """The module that writes files of `trainer`, a key of `MODULES`."""
    return cast(
        Exporter, importlib.import_module(f"launcher.exporters.trainers.{MODULES[trainer]}")
    )


_SHAPE_FIELDS = (
    "num_layers width num_heads num_kv_heads ffn_width vocab_size seq_len family tied qk_norm"
)
_FIELDS = {
    "": "schema_version transfer multiplier_form groups optimizer weight_decay_form batch_tokens "
    "num_tokens seed "
    "precision compiled own model",
    "shape": _SHAPE_FIELDS,
    "base_shape": _SHAPE_FIELDS,
    "parametrization": "name width attention output depth_alpha weight_decay decayed "
    "embedding_rate eps "
    "rate_batch_power rate_duration_power moments muon_rate muon_width_power",
    "transfer": "hyperparameter axis power source outcome measured_power measured_low "
    "measured_high regret_nats "
    "regret_low_nats regret_high_nats level",
    "forward": "embedding attention residual output",
    "groups": "pattern kind optimizer init_std",
    "learning_rate": "step_convention samples table_sha256",
    "learning_rate.schedule": "kind num_steps warmup_steps decay_steps final_fraction "
    "batch_warmup_steps "
    "batch_warmup_stages decay_shape",
    "data": "data_id tokenizer vocab_size num_train_tokens weights order",
    "parallelism": "data_parallel_shard data_parallel_replicate tensor pipeline context "
    "microbatch_sequences "
    "activation_checkpointing",
    "checkpointing": "every_steps keep",
    "predicted": "loss_nats low_nats high_nats level extrapolation curve memory_octaves",
    "predicted.curve": "step loss_nats low_nats high_nats",
    "abort": "on_non_finite train_loss_above_nats",
    "spikes": (
        "rollback_steps skip_batches clip_share max_rollbacks window_steps threshold "
        "least_nats patience_steps"
    ),
    "monitoring": "validate_every_steps layers_every_steps replay_every_steps",
    "own": "values resume num_params",
    "own.values": ANY_FIELD,
    "own.command": "template metrics_format metrics_path step_key train_loss_key "
    "validation_loss_key grad_norm_key own "
    "train_loss_unit validation_loss_unit bytes_per_token",
    "model": "values num_params blocks embeddings readouts",
    "model.values": ANY_FIELD,
    "model.factory": "target source_sha256 dimensions",
}
KNOWN_FIELDS: Mapping[str, tuple[str, ...]] = {
    record: tuple(names.split()) for record, names in _FIELDS.items()
}
"""Leaf fields that the judgements were written for, by record of a decision."""
UNKNOWN: Judgement = ("not_expressible", "this export does not know the field")


def judge_fields(
    decision: Decision, judgements: Mapping[str, Judgement], expressible: Expressible
) -> tuple[FidelityEntry, ...]:
    """Return an entry for each leaf field: the judgement of its nearest named ancestor.

    A field that nobody declared gets the verdict `not_expressible`, whatever its ancestor has: only
    those of `KNOWN_FIELDS`, and what the export says that it can express, were looked at when the
    judgements were written.
    """
    settings = {name for names in expressible.optimizers.values() for name in names}
    entries = []
    for leaf in dict.fromkeys(_leaves(canon.to_json(decision))):
        record, _, name = leaf.rpartition(".")
        declared = KNOWN_FIELDS.get(record, ())
        is_known = name in declared or ANY_FIELD in declared or leaf in expressible.run_wide
        is_known |= record == _SETTINGS and name in settings
        shown = leaf.replace(f"{_SETTINGS}.", "groups.")
        named = shown
        while "." in named and named not in judgements:
            named = named.rpartition(".")[0]
        verdict, note = judgements.get(named, UNKNOWN) if is_known else UNKNOWN
        entries.append(FidelityEntry(field=shown, verdict=verdict, note=note))
    return tuple(entries)


def _leaves(value: canon.Json, path: str = "") -> Iterator[str]:
    """Dotted names of the leaf fields; the records of a list share theirs."""
    if isinstance(value, dict):
        for key, child in value.items():
            yield from _leaves(child, f"{path}.{key}" if path else key)
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        for child in value:
            yield from _leaves(child, path)
    else:
        yield path
