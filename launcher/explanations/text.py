"""Provenance as people read it: a few fields as blocks, many as a table with a line each."""

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
"""Fields, each with its record."""
MOST_BLOCKS = 3
"""Fields shown whole; more become a table."""
MOST_VALUE = 24
"""Characters of a value in a table."""
MOST_SHOWN = 4
"""Values of one name in one line."""
_RATE = re.compile(rf"groups\..+\.{LEARNING_RATE}")
_FIRST = (
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
"""Fields of the short table, beside the learning rates."""
_SOURCES = {"valley": "loss basin"}
"""Kinds of sources that people read in other words."""
_WIDTH, _INDENT = 120, 12
"""Characters of a line of prose."""


def number(value: object) -> str:
    """A value for people: numbers to four digits, counts with commas."""
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "none"}[value]
    if isinstance(value, float):
        return format_number(value)
    return f"{value:,}" if isinstance(value, int) else str(value)


def key_words(key: PlanKey) -> str:
    """A plan key and whether somebody set it."""
    default = "the default" if key.value == key.default else f"by default {json.dumps(key.default)}"
    return f"{key.key} = {json.dumps(key.value)} ({default})"


def fields_text(told: Told, name: str) -> str:
    """Blocks of a few fields; of more a table, below a line with the values that go by that
    name.
    """
    if len(told) <= MOST_BLOCKS:
        return "\n\n".join(block(field, record) for field, record in told)
    return f"{_values_line(told, name)}\n\n{table_text(told)}"


def _values_line(told: Told, name: str) -> str:
    """Each value that fields of a name have, with the fields: `eps: 1e-08 (embedding), ...`."""
    fields: dict[str, list[str]] = {}
    for field, _ in told:
        parts = field.path.split(".")
        fields.setdefault(value_text(field.value, MOST_VALUE), []).append(
            ".".join(parts[1:-1]) or field.path
        )
    if len(fields) > MOST_SHOWN:
        return f"{name}: {counted(len(told), 'field')}"
    return f"{name}: " + ", ".join(
        f"{value} ({', '.join(dict.fromkeys(of))})" for value, of in fields.items()
    )


def summary_text(told: Told) -> str:
    """What is launched in a sentence with how well its numbers are known, and the fields that
    people ask for first.
    """
    values = {field.path: field.value for field, _ in told}
    known = Counter(_how_known(record.strength) for _, record in told)
    rates = dict.fromkeys(number(values[path]) for path in values if _RATE.fullmatch(path))
    head = (
        f"learning rate {' and '.join(rates)} by group, width {number(values['shape.width'])}, "
        f"{number(values['shape.num_layers'])} layers, {number(values['num_tokens'])} tokens, "
        "expected loss "
        f"{number(values['predicted.loss_nats'])} nats; of {counted(len(told), 'field')} "
        + ", ".join(f"{times} {how}" for how, times in known.most_common())
    )
    short = [
        (field, record)
        for field, record in told
        if field.path in _FIRST or _RATE.fullmatch(field.path)
    ]
    return f"{head}\n\n{table_text(short)}"


def block(field: Field, record: Provenance) -> str:
    """Everything about one field."""
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
    rows.append(("strength", f"{_how_known(strength)}: {strength.text}"))
    if strength.extrapolation is not None and strength.extrapolation > 1:
        rows.append(
            (
                "",
                (
                    f"the launch extrapolates {format_factor(strength.extrapolation)} times beyond "
                    "the "
                    "largest run"
                ),
            )
        )
    rows += [("change" if not index else "", said) for index, said in enumerate(record.change)]
    lines = [line for name, said in rows for line in _row(name, said)]
    return "\n".join(
        [*record.warnings, f"{field.path} = {value_text(field.value, 10 * MOST_VALUE)}", *lines]
    )


def _row(name: str, said: str) -> list[str]:
    return textwrap.wrap(
        said,
        _WIDTH,
        initial_indent=f"  {name}".ljust(_INDENT),
        subsequent_indent=" " * _INDENT,
        break_long_words=False,
        break_on_hyphens=False,
    )


def value_text(value: Json, most: int) -> str:
    """A value in one line, cut where it is long."""
    if isinstance(value, list | dict):
        text = json.dumps(value, separators=(",", ":"))
    else:
        text = number(value)
    return text if len(text) <= most else f"{text[: most - 3]}..."


def table_text(told: Told) -> str:
    """A line a field: value, source, strength."""
    rows = [
        (
            field.path,
            value_text(field.value, MOST_VALUE),
            _SOURCES.get(record.source.kind, record.source.kind),
            _how_known(record.strength),
        )
        for field, record in told
    ]
    warned = dict.fromkeys(said for _, record in told for said in record.warnings)
    return "\n".join([*warned, table(("field", "value", "from", "strength"), rows, left=range(4))])


def _how_known(strength: EvidenceStrength) -> str:
    """The kind of evidence; what tests left open is not determined."""
    return "not determined" if strength.outcome == "cannot_tell" else strength.kind
