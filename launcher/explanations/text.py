"""Provenance as text: a few fields as blocks, many as a table with a line each."""

from __future__ import annotations

import json
import re
import textwrap
from collections import Counter
from collections.abc import Sequence

from launcher.cli.options import table
from launcher.explanations.record import EvidenceStrength, Field, PlanKey, Provenance
from proxies.core.canon import Json
from proxies.core.hyperparameters import LEARNING_RATE, RUN_WIDE
from proxies.core.notation import counted, format_factor, format_number

Told = Sequence[tuple[Field, Provenance]]
"""Fields, each with its record of provenance."""
MOST_BLOCKS = 3
"""Maximum number of fields that are shown in full; more become a table."""
MAX_VALUE_CHARACTERS = 24
"""Maximum number of characters of a value in a table."""
MAX_VALUES_SHOWN = 4
"""Maximum number of different values of one name that are listed in a line."""
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
"""Fields of the short table, which also has the learning rates."""
_SOURCES = {"valley": "loss basin"}
"""Other words for some kinds of sources."""
_WIDTH, _INDENT = 120, 12
"""Characters per line of prose, and characters of its indent."""


def number(value: object) -> str:
    """Format a value: numbers to four digits, counts with commas."""
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "none"}[value]
    if isinstance(value, float):
        return format_number(value)
    return f"{value:,}" if isinstance(value, int) else str(value)


def key_words(key: PlanKey) -> str:
    """Format a plan key with its value and whether it is the default."""
    default = "the default" if key.value == key.default else f"by default {json.dumps(key.default)}"
    return f"{key.key} = {json.dumps(key.value)} ({default})"


def fields_text(explained: Told, name: str) -> str:
    """Format a few fields as blocks, or more as a table below a line with their values."""
    if len(explained) <= MOST_BLOCKS:
        return "\n\n".join(block(field, record) for field, record in explained)
    return f"{_format_values(explained, name)}\n\n{table_text(explained)}"


def _format_values(explained: Told, name: str) -> str:
    """List the values of a name, each with its groups: `eps: 1e-08 (embedding), ...`."""
    fields: dict[str, list[str]] = {}
    for field, _ in explained:
        parts = field.path.split(".")
        fields.setdefault(value_text(field.value, MAX_VALUE_CHARACTERS), []).append(
            ".".join(parts[1:-1]) or field.path
        )
    if len(fields) > MAX_VALUES_SHOWN:
        return f"{name}: {counted(len(explained), 'field')}"
    return f"{name}: " + ", ".join(
        f"{value} ({', '.join(dict.fromkeys(group_names))})"
        for value, group_names in fields.items()
    )


def summary_text(explained: Told) -> str:
    """Summarize the launch in a sentence, followed by a table of the most important fields.

    The sentence counts the fields by kind of evidence.
    """
    values = {field.path: field.value for field, _ in explained}
    counts = Counter(_describe_evidence(record.strength) for _, record in explained)
    rates = dict.fromkeys(number(values[path]) for path in values if _RATE.fullmatch(path))
    head = (
        f"learning rate {' and '.join(rates)} by group, width {number(values['shape.width'])}, "
        f"{number(values['shape.num_layers'])} layers, {number(values['num_tokens'])} tokens, "
        f"expected loss {number(values['predicted.loss_nats'])} nats; of "
        f"{counted(len(explained), 'field')} "
        + ", ".join(f"{times} {how}" for how, times in counts.most_common())
    )
    short = [
        (field, record)
        for field, record in explained
        if field.path in _SUMMARY_FIELDS or _RATE.fullmatch(field.path)
    ]
    return f"{head}\n\n{table_text(short)}"


def block(field: Field, record: Provenance) -> str:
    """Format everything about one field."""
    source, strength = record.source, record.strength
    rows = [("from", f"{_SOURCES.get(source.kind, source.kind)}: {source.text}")]
    rows += [("", f"rule: {rule}") for rule in source.rules]
    rows += [
        (
            "",
            (
                f"runs: {runs.what}: {counted(runs.num_runs, 'run')} of "
                f"{counted(runs.num_seeds, 'seed')}"
            ),
        )
        for runs in source.runs
    ]
    rows += [
        ("", f"key: {key_words(key)}")
        for key in source.plan_keys
        if key_words(key) not in source.text
    ]
    rows += [("", f"follows from {', '.join(source.fields)}")] if source.fields else []
    rows.append(("strength", f"{_describe_evidence(strength)}: {strength.text}"))
    if strength.extrapolation is not None and strength.extrapolation > 1:
        rows.append(
            (
                "",
                (
                    f"the launch extrapolates {format_factor(strength.extrapolation)} times beyond "
                    "the largest run"
                ),
            )
        )
    rows += [("change" if not index else "", text) for index, text in enumerate(record.change)]
    lines = [line for name, text in rows for line in _wrap_row(name, text)]
    return "\n".join(
        [
            *record.warnings,
            f"{field.path} = {value_text(field.value, 10 * MAX_VALUE_CHARACTERS)}",
            *lines,
        ]
    )


def _wrap_row(name: str, text: str) -> list[str]:
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=f"  {name}".ljust(_INDENT),
        subsequent_indent=" " * _INDENT,
        break_long_words=False,
        break_on_hyphens=False,
    )


def value_text(value: Json, max_characters: int) -> str:
    """Format a value in one line, cut if it is too long."""
    if isinstance(value, list | dict):
        text = json.dumps(value, separators=(",", ":"))
    else:
        text = number(value)
    return text if len(text) <= max_characters else f"{text[: max_characters - 3]}..."


def table_text(explained: Told) -> str:
    """Format a table with a line per field: value, source, and strength."""
    rows = [
        (
            field.path,
            value_text(field.value, MAX_VALUE_CHARACTERS),
            _SOURCES.get(record.source.kind, record.source.kind),
            _describe_evidence(record.strength),
        )
        for field, record in explained
    ]
    warnings = dict.fromkeys(warning for _, record in explained for warning in record.warnings)
    return "\n".join(
        [*warnings, table(("field", "value", "from", "strength"), rows, left=range(4))]
    )


def _describe_evidence(strength: EvidenceStrength) -> str:
    """Return the kind of evidence; "not determined" if the tests could not tell."""
    return "not determined" if strength.outcome == "cannot_tell" else strength.kind
