"""Provenance as text: a few fields as blocks, many fields as a table."""

from __future__ import annotations

import json
import re
import textwrap
from collections import Counter
from collections.abc import Sequence

from forerun._launcher.main_run.terminal_layout import format_table
from forerun._launcher.report.explanations.field_provenance import (
    EvidenceStrength,
    Field,
    PlanKey,
    Provenance,
)
from forerun._proxies.core.canon import Json
from forerun._proxies.core.hyperparameters import LEARNING_RATE, RUN_WIDE
from forerun._proxies.core.notation import format_counted, format_factor, format_number

ExplainedFields = Sequence[tuple[Field, Provenance]]
"""Fields, each with its record of provenance."""
MAX_FIELDS_IN_FULL = 3
"""Maximum number of fields that are shown in full; more become a table."""
MAX_VALUE_CHARACTERS = 24
"""Maximum number of characters of a value in a table."""
_RATE = re.compile(rf"groups\..+\.{LEARNING_RATE}")
_SUMMARY_FIELDS = (
    "shape.num_layers",
    "shape.width",
    "parametrization.name",
    f"{LEARNING_RATE}.schedule.num_steps",
    f"{LEARNING_RATE}.schedule.warmup_steps",
    *RUN_WIDE,
    "batch_tokens",
    "num_tokens",
    "predicted.loss_nats",
)
"""Fields of the table in a summary, in addition to the learning rates of the groups."""
_WIDTH, _INDENT = 120, 12
"""Characters per line of prose, and characters of its indent."""


def format_value(value: object) -> str:
    """Format a value: numbers to four digits, counts with commas."""
    if isinstance(value, bool) or value is None:
        return str(value).lower()
    if isinstance(value, float):
        return format_number(value)
    return f"{value:,}" if isinstance(value, int) else str(value)


def format_plan_key(key: PlanKey) -> str:
    """Format a plan key with its value and whether it is the default."""
    default = "the default" if key.value == key.default else f"by default {json.dumps(key.default)}"
    return f"{key.key} = {json.dumps(key.value)} ({default})"


def format_fields(explained: ExplainedFields) -> str:
    """Format a few fields as blocks, or more as a table."""
    if len(explained) > MAX_FIELDS_IN_FULL:
        return format_field_table(explained)
    return "\n\n".join(format_field(field, record) for field, record in explained)


def format_summary(explained: ExplainedFields) -> str:
    """Summarize the launch in a sentence, followed by a table of the most important fields.

    The sentence counts the fields by kind of evidence.
    """
    values = {field.path: format_value(field.value) for field, _ in explained}
    rates = dict.fromkeys(value for path, value in values.items() if _RATE.fullmatch(path))
    counts = Counter(_describe_evidence(record.strength) for _, record in explained)
    kinds = ", ".join(f"{count} {kind}" for kind, count in counts.most_common())
    main_fields = [
        (field, record)
        for field, record in explained
        if field.path in _SUMMARY_FIELDS or _RATE.fullmatch(field.path)
    ]
    return (
        f"learning rate {' and '.join(rates)} by group, width {values['shape.width']}, "
        f"{values['shape.num_layers']} layers, {values['num_tokens']} tokens, expected loss "
        f"{values['predicted.loss_nats']} nats; of {format_counted(len(explained), 'field')} "
        f"{kinds}\n\n{format_field_table(main_fields)}"
    )


def format_field(field: Field, record: Provenance) -> str:
    """Format everything about one field."""
    source, strength = record.source, record.strength
    source_lines = [f"{_name_source(record)}: {source.text}"]
    source_lines += [f"rule: {rule}" for rule in source.rules]
    source_lines += [
        f"runs: {runs.what}: {format_counted(runs.num_runs, 'run')} of "
        f"{format_counted(runs.num_seeds, 'seed')}"
        for runs in source.runs
    ]
    keys = map(format_plan_key, source.plan_keys)
    source_lines += [f"key: {key}" for key in keys if key not in source.text]
    if source.fields:
        source_lines.append(f"follows from {', '.join(source.fields)}")
    strength_lines = [f"{_describe_evidence(strength)}: {strength.text}"]
    if strength.extrapolation is not None and strength.extrapolation > 1:
        factor = format_factor(strength.extrapolation)
        strength_lines.append(f"the launch extrapolates {factor} times beyond the largest run")
    return "\n".join(
        [
            *record.warnings,
            f"{field.path} = {format_short_value(field.value, 10 * MAX_VALUE_CHARACTERS)}",
            *_format_paragraphs("from", source_lines),
            *_format_paragraphs("strength", strength_lines),
            *_format_paragraphs("change", record.change),
        ]
    )


def _format_paragraphs(name: str, paragraphs: Sequence[str]) -> list[str]:
    """Wrap paragraphs with an indent that shows their name once."""
    lines = []
    for index, paragraph in enumerate(paragraphs):
        lines += textwrap.wrap(
            paragraph,
            _WIDTH,
            initial_indent=("" if index else f"  {name}").ljust(_INDENT),
            subsequent_indent=" " * _INDENT,
            break_long_words=False,
            break_on_hyphens=False,
        )
    return lines


def format_short_value(value: Json, max_characters: int) -> str:
    """Format a value in one line, cut if it is too long."""
    is_table = isinstance(value, list | dict)
    text = json.dumps(value, separators=(",", ":")) if is_table else format_value(value)
    return text if len(text) <= max_characters else f"{text[: max_characters - 3]}..."


def format_field_table(explained: ExplainedFields) -> str:
    """Format a table with a line per field: value, source, and strength."""
    rows = [
        (
            field.path,
            format_short_value(field.value, MAX_VALUE_CHARACTERS),
            _name_source(record),
            _describe_evidence(record.strength),
        )
        for field, record in explained
    ]
    warnings = dict.fromkeys(warning for _, record in explained for warning in record.warnings)
    table = format_table(("field", "value", "from", "strength"), rows, left=range(4))
    return "\n".join([*warnings, table])


def _name_source(record: Provenance) -> str:
    """Return the kind of a field's source in words."""
    # Records call a loss basin by an older name.
    return "loss basin" if record.source.kind == "valley" else record.source.kind


def _describe_evidence(strength: EvidenceStrength) -> str:
    """Return the kind of evidence; "not determined" if the tests could not tell."""
    return "not determined" if strength.outcome == "cannot_tell" else strength.kind
