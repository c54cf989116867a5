"""Provenance as people read it: one field as a block, many as a table with a line each."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence

from launcher.explaining.fields import Field
from launcher.explaining.record import PlanKey, Provenance, Runs, Strength
from proxies.core.canon import Json

Told = Sequence[tuple[Field, Provenance]]
"""Fields, each with its record."""
MOST_IDS = 3
"""Ids named of one group of runs; `--json` has all."""
MOST_BLOCKS = 3
"""Fields shown whole; more become a table."""
MOST_VALUE = 24
"""Characters of a value in a table."""
NUM_INDENT = 12


def number(value: object) -> str:
    """A value as one says it: numbers to four digits, counts with commas."""
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "none"}[value]
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def shown(value: object) -> str:
    """A plan's value, in short."""
    if isinstance(value, list | tuple):
        return "[" + ", ".join(shown(item) for item in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {shown(item)}" for key, item in value.items()) + "}"
    return f'"{value}"' if isinstance(value, str) else number(value)


def key_words(key: PlanKey) -> str:
    """A plan key and whether somebody set it."""
    return f"{key.key} = {shown(key.value)} ({f'by default {shown(key.default)}' if key.is_set else 'the default'})"


def fields_text(told: Told, notes: Sequence[str], width: int) -> str:
    """Blocks of a few fields, a table of more; below, how the records stand to the study's."""
    blocks = len(told) <= MOST_BLOCKS
    body = "\n\n".join(block(field, record, width) for field, record in told) if blocks else table_text(told)
    return "\n".join([body, *(f"\nnote: {note}" for note in notes)])


def block(field: Field, record: Provenance, width: int) -> str:
    """Everything about one field."""
    source, strength = record.source, record.strength
    head = f"{field.path} = {value_text(field.value, 10 * MOST_VALUE)}"
    head += "" if field.written else "  (left out at its default)"
    rows = [("from", f"{source.kind}: {source.text}")]
    rows += [("", f"rule: {rule}") for rule in source.rules]
    rows += [("", f"runs: {runs_text(runs)}") for runs in source.runs]
    rows += [("", f"key: {key_words(key)}: {key.text}") for key in source.plan_keys]
    rows += [("", f"follows from {', '.join(source.fields)}")] if source.fields else []
    rows.append(("strength", f"{_how_known(strength)}: {strength.text}"))
    if strength.extrapolation is not None and strength.extrapolation > 1:
        rows.append(("", f"the launch lies {strength.extrapolation:.3g} times beyond what was run"))
    rows += [("change" if not index else "", said) for index, said in enumerate(record.change)]
    rows.append(("cost", record.cost or "not measured"))
    rows += [("unknown" if not index else "", said) for index, said in enumerate(record.unknown)]
    lines = [line for name, said in rows for line in _row(name, said, width)]
    return "\n".join(
        [*(line for said in record.warnings for line in textwrap.wrap(said, max(40, width))), head, *lines]
    )


def _row(name: str, said: str, width: int) -> list[str]:
    first, rest = f"  {name}".ljust(NUM_INDENT), " " * NUM_INDENT
    wrapped = textwrap.wrap(said, max(40, width - NUM_INDENT), break_long_words=False, break_on_hyphens=False)
    return [f"{first if not index else rest}{line}" for index, line in enumerate(wrapped or [""])]


def _of_seeds(num_seeds: int | None) -> str:
    return "" if num_seeds is None else f" of {num_seeds} seed{'s' * (num_seeds != 1)}"


def runs_text(runs: Runs) -> str:
    """How many, of how many seeds, and the first ids."""
    named = ", ".join(id[:12] for id in runs.ids[:MOST_IDS])
    more = f" and {len(runs.ids) - MOST_IDS} more" if len(runs.ids) > MOST_IDS else ""
    return f"{runs.what}: {runs.num_runs} runs{_of_seeds(runs.num_seeds)} ({named}{more})"


def value_text(value: Json, most: int) -> str:
    """A value in one line, cut where it is long."""
    if isinstance(value, str | int | None):
        text = number(value)
    elif isinstance(value, float):
        text = f"{value:.6g}"
    else:
        text = json.dumps(value, separators=(",", ":"))
    return text if len(text) <= most else f"{text[: most - 3]}..."


def table_text(told: Told) -> str:
    """A line a field: value, source, strength."""
    rows = [("field", "value", "from", "strength")]
    rows += [
        (field.path, value_text(field.value, MOST_VALUE), source_line(record), strength_line(record.strength))
        for field, record in told
    ]
    wide = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = ("  ".join([*(cell.ljust(w) for cell, w in zip(row, wide, strict=False)), row[3]]) for row in rows)
    starred = any(gate.accepted for _, record in told for gate in record.strength.gates)
    fields = ", ".join(record.field for _, record in told if record.warnings)
    warned = dict.fromkeys(f"{said} (it bears on {fields})" for _, record in told for said in record.warnings)
    return "\n".join([*warned, *(line.rstrip() for line in lines), *(["* accepted by hand"] if starred else [])])


def source_line(record: Provenance) -> str:
    """Where a value came from, in some words: its runs, the field it follows from, or the plan key."""
    source = record.source
    if source.runs:
        return f"{source.kind} of {source.runs[0].num_runs} runs"
    if source.kind == "derived":
        return f"{source.kind} from {source.fields[0]}"
    return " ".join([source.kind, *(key.key for key in source.plan_keys[-1:])])


def strength_line(strength: Strength) -> str:
    """How good the evidence is, in some words."""
    said = []
    if strength.outcome not in (None, "cannot_tell"):
        said.append(strength.outcome.replace("_", " "))
    if strength.num_runs is not None:
        alike = "alike in all " if strength.kind == "assumed" and strength.outcome is None else ""
        said.append(f"{alike}{strength.num_runs} runs{_of_seeds(strength.num_seeds)}")
    if strength.extrapolation is not None and strength.extrapolation > 1:
        said.append(f"{strength.extrapolation:.3g} times beyond them")
    gates = [f"{g.name} {g.outcome.replace('_', ' ')}{'*' * (g.accepted is not None)}" for g in strength.gates]
    said += [f"gates: {', '.join(gates)}"] if gates else []
    return f"{_how_known(strength)}: {'; '.join(said) or strength.text}"


def _how_known(strength: Strength) -> str:
    """The kind of evidence; what runs were made for and did not tell is not determined."""
    return "not determined" if strength.outcome == "cannot_tell" else strength.kind
