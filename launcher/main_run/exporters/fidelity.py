"""The fidelity of an export: how a trainer's files express each field of a decision.

A judgement says whether a trainer's files express a field, exactly or in another form. The
judgements were written for the fields that a decision had at that time (`KNOWN_FIELDS`). A field
that is added later counts as not expressible until somebody judges it and adds it there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from forerun._launcher.main_run.exporters.export_checks import Expressible
from forerun._launcher.main_run.frozen.frozen import Decision
from forerun._proxies.core import canon

Verdict = Literal["exact", "equivalent", "not_expressible"]
"""`exact`: the trainer gets the same number. `equivalent`: the trainer gets it in another form, or
under the note's condition. `not_expressible`: the trainer's files cannot hold it."""
Judgement = tuple[Verdict, str]
"""A verdict and its note, which is empty only if the field is exact."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FidelityEntry:
    """The fidelity of one field of the decision."""

    field: str
    """Path of the field, such as `learning_rate.schedule.kind`."""
    verdict: Verdict
    note: str


@dataclass(frozen=True, kw_only=True, slots=True)
class FidelityReport:
    """The fidelity of the export of one decision to one trainer."""

    trainer: str
    version: str
    entries: tuple[FidelityEntry, ...]

    @property
    def lost(self) -> tuple[FidelityEntry, ...]:
        """Fields that the trainer cannot express."""
        return tuple(entry for entry in self.entries if entry.verdict == "not_expressible")


_LABEL: Judgement = (
    "equivalent",
    "a label: the trainer needs only its numbers; the files name the digest",
)
_ROUNDED_DIFFERENTLY = (
    "multiplies q . k in the attention kernel, forerun multiplies the query: rounding differs"
)
COMMON_JUDGEMENTS: dict[str, Judgement] = {
    "schema_version": _LABEL,
    "shape": ("exact", ""),
    "base_shape": _LABEL,
    "parametrization": _LABEL,
    "transfer": ("equivalent", "evidence only: its numbers are in groups"),
    "forward": ("exact", ""),
    "forward.attention": ("equivalent", _ROUNDED_DIFFERENTLY),
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
"""Judgements for every third-party trainer; an exporter's own judgements take precedence."""
ANY_FIELD = "*"
"""Entry of `KNOWN_FIELDS` for a record whose fields are named by the user."""
_SETTINGS = "groups.settings"
"""Path of a group's settings, which reports show as fields of the group."""
_SHAPE_FIELDS = (
    "num_layers width num_heads num_kv_heads ffn_width vocab_size seq_len family tied qk_norm"
)
_FIELDS = {
    "": "schema_version transfer multiplier_form groups optimizer weight_decay_form batch_tokens "
    "num_tokens seed precision compiled own model",
    "shape": _SHAPE_FIELDS,
    "base_shape": _SHAPE_FIELDS,
    "parametrization": "name width attention output depth_alpha weight_decay decayed "
    "embedding_rate eps rate_batch_power rate_duration_power moments muon_rate muon_width_power",
    "transfer": "hyperparameter axis power source outcome measured_power measured_low "
    "measured_high regret_nats regret_low_nats regret_high_nats level",
    "forward": "embedding attention residual output",
    "groups": "pattern kind optimizer init_std",
    "learning_rate": "step_convention samples table_sha256",
    "learning_rate.schedule": "kind num_steps warmup_steps decay_steps final_fraction "
    "batch_warmup_steps batch_warmup_stages decay_shape",
    "data": "data_id tokenizer vocab_size num_train_tokens weights order",
    "parallelism": "data_parallel_shard data_parallel_replicate tensor pipeline context "
    "microbatch_sequences activation_checkpointing",
    "checkpointing": "every_steps keep",
    "predicted": "loss_nats low_nats high_nats level extrapolation curve memory_octaves",
    "predicted.curve": "step loss_nats low_nats high_nats",
    "abort": "on_non_finite train_loss_above_nats",
    "spikes": (
        "rollback_steps skip_batches clip_share max_rollbacks window_steps threshold least_nats "
        "patience_steps"
    ),
    "monitoring": "validate_every_steps layers_every_steps replay_every_steps",
    "own": "values resume num_params",
    "own.values": ANY_FIELD,
    "own.command": "template metrics_format metrics_path step_key train_loss_key "
    "validation_loss_key grad_norm_key own train_loss_unit validation_loss_unit bytes_per_token",
    "model": "values num_params blocks embeddings readouts",
    "model.values": ANY_FIELD,
    "model.factory": "target source_sha256 dimensions",
}
KNOWN_FIELDS: Mapping[str, tuple[str, ...]] = {
    record: tuple(names.split()) for record, names in _FIELDS.items()
}
"""Leaf fields that the judgements were written for, by record of a decision."""
UNKNOWN_FIELD: Judgement = ("not_expressible", "this export does not know the field")


def build_report(
    trainer: str,
    version: str,
    decision: Decision,
    trainer_judgements: Mapping[str, Judgement],
    expressible: Expressible,
) -> FidelityReport:
    """Return the report of an export to a third-party trainer.

    Args:
        trainer: Name of the trainer.
        version: Version of the trainer.
        decision: The decision.
        trainer_judgements: Judgements by field that take precedence over the common ones.
        expressible: Optimizers, settings, and run-wide settings that the export writes.
    """
    entries = judge_fields(decision, {**COMMON_JUDGEMENTS, **trainer_judgements}, expressible)
    return FidelityReport(trainer=trainer, version=version, entries=entries)


def judge_fields(
    decision: Decision, judgements: Mapping[str, Judgement], expressible: Expressible
) -> tuple[FidelityEntry, ...]:
    """Return an entry for each leaf field: the judgement of its nearest ancestor that has one.

    A field that is neither in `KNOWN_FIELDS` nor in `expressible` is not expressible, whatever its
    ancestors are.
    """
    settings = {name for names in expressible.optimizers.values() for name in names}
    entries = []
    for leaf in dict.fromkeys(_list_leaves(canon.to_json(decision))):
        record, _, name = leaf.rpartition(".")
        declared = KNOWN_FIELDS.get(record, ())
        is_known = name in declared or ANY_FIELD in declared or leaf in expressible.run_wide
        is_known |= record == _SETTINGS and name in settings
        shown = leaf.replace(f"{_SETTINGS}.", "groups.")
        ancestor = shown
        while "." in ancestor and ancestor not in judgements:
            ancestor = ancestor.rpartition(".")[0]
        verdict, note = judgements.get(ancestor, UNKNOWN_FIELD) if is_known else UNKNOWN_FIELD
        entries.append(FidelityEntry(field=shown, verdict=verdict, note=note))
    return tuple(entries)


def _list_leaves(value: canon.Json, path: str = "") -> Iterator[str]:
    """Yield the dotted names of the leaf fields. The name of a field in a list of records has no
    index, so it may come several times.
    """
    if isinstance(value, dict):
        for key, child in value.items():
            yield from _list_leaves(child, f"{path}.{key}" if path else key)
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        for child in value:
            yield from _list_leaves(child, path)
    else:
        yield path
