"""Explanations as people read them: one field as a block, many as a table with a line each."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence

from launcher.explaining.facts import key_words, number
from launcher.explaining.record import Explained, Runs, Strength
from proxies.core.canon import Json

MOST_IDS = 3
"""Ids named of one group of runs; `--json` has all."""
MOST_BLOCKS = 3
"""Fields shown whole; more become a table."""
MOST_VALUE = 24
"""Characters of a value in a table."""
NUM_INDENT = 12


def fields_text(found: Sequence[Explained], notes: Sequence[str], width: int) -> str:
    """Blocks of a few fields, a table of more; below, what these records cannot say."""
    body = "\n\n".join(block(one, width) for one in found) if len(found) <= MOST_BLOCKS else table_text(found)
    return "\n".join([body, *(f"\nnote: {note}" for note in notes)])


def block(one: Explained, width: int) -> str:
    """Everything about one field."""
    source, strength = one.source, one.strength
    head = f"{one.field} = {value_text(one.value, 10 * MOST_VALUE)}" + (
        "" if one.written else "  (left out at its default)"
    )
    rows = [("from", f"{source.kind}: {source.text}")]
    rows += [("", f"rule: {rule}") for rule in source.rules]
    rows += [("", f"runs: {runs_text(runs)}") for runs in source.runs]
    rows += [("", f"key: {key_words(key)}: {key.text}") for key in source.plan_keys]
    rows += [("", f"follows from {', '.join(source.fields)}")] if source.fields else []
    rows.append(("strength", f"{_how_known(strength)}: {strength.text}"))
    if strength.extrapolation is not None and strength.extrapolation > 1:
        rows.append(("", f"the launch lies {strength.extrapolation:.3g} times beyond what was run"))
    rows += [("change" if not index else "", said) for index, said in enumerate(one.change)]
    rows.append(("cost", one.cost or "not measured"))
    rows += [("unknown" if not index else "", said) for index, said in enumerate(one.unknown)]
    lines = [line for name, said in rows for line in _row(name, said, width)]
    return "\n".join([*(line for said in one.warnings for line in textwrap.wrap(said, max(40, width))), head, *lines])


def _row(name: str, said: str, width: int) -> list[str]:
    first, rest = f"  {name}".ljust(NUM_INDENT), " " * NUM_INDENT
    wrapped = textwrap.wrap(said, max(40, width - NUM_INDENT), break_long_words=False, break_on_hyphens=False)
    return [f"{first if not index else rest}{line}" for index, line in enumerate(wrapped or [""])]


def runs_text(runs: Runs) -> str:
    """How many, of how many seeds, and the first ids."""
    seeds = "" if runs.num_seeds is None else f" of {runs.num_seeds} seed{'s' if runs.num_seeds != 1 else ''}"
    named = ", ".join(id[:12] for id in runs.ids[:MOST_IDS])
    more = f" and {len(runs.ids) - MOST_IDS} more" if len(runs.ids) > MOST_IDS else ""
    return f"{runs.what}: {runs.num_runs} runs{seeds}" + (f" ({named}{more})" if named else "")


def value_text(value: Json, most: int) -> str:
    """A value in one line, cut where it is long."""
    if isinstance(value, str | int | None):
        text = number(value)
    elif isinstance(value, float):
        text = f"{value:.6g}"
    else:
        text = json.dumps(value, separators=(",", ":"))
    return text if len(text) <= most else f"{text[: most - 3]}..."


def table_text(found: Sequence[Explained]) -> str:
    """A line a field: value, source, strength."""
    rows = [("field", "value", "from", "strength")]
    rows += [(one.field, value_text(one.value, MOST_VALUE), source_line(one), strength_line(one)) for one in found]
    wide = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = ("  ".join([*(cell.ljust(w) for cell, w in zip(row, wide, strict=False)), row[3]]) for row in rows)
    starred = ["* accepted by hand"] if any(gate.accepted for one in found for gate in one.strength.gates) else []
    warned = dict.fromkeys(said for one in found for said in one.warnings)
    fields = ", ".join(one.field for one in found if one.warnings)
    first = [f"{said} (it bears on {fields})" for said in warned]
    return "\n".join([*first, *(line.rstrip() for line in lines), *starred])


def source_line(one: Explained) -> str:
    """Where a value came from, in some words."""
    source = one.source
    of = [key.key for key in source.plan_keys[-1:]]
    if source.kind in ("search", "valley", "fit", "verdict"):
        of = [f"of {source.runs[0].num_runs} runs"] if source.runs else []
    elif source.kind == "derived" and source.fields:
        of = [f"from {source.fields[0]}"]
    elif source.kind == "corpus":
        of = []
    return " ".join([source.kind, *of])


def strength_line(one: Explained) -> str:
    """How good the evidence is, in some words."""
    said, strength = [], one.strength
    if strength.outcome not in (None, "cannot_tell"):
        said.append(strength.outcome.replace("_", " "))
    if strength.num_runs is not None:
        seeds = "" if strength.num_seeds is None else f" of {strength.num_seeds} seed{'s' * (strength.num_seeds != 1)}"
        alike = "alike in all " if strength.kind == "assumed" and strength.outcome is None else ""
        said.append(f"{alike}{strength.num_runs} runs{seeds}")
    if strength.extrapolation is not None and strength.extrapolation > 1:
        said.append(f"{strength.extrapolation:.3g} times beyond them")
    gates = [f"{g.name} {g.outcome.replace('_', ' ')}{'*' * (g.accepted is not None)}" for g in strength.gates]
    said += [f"gates: {', '.join(gates)}"] if gates else []
    return f"{_how_known(strength)}: {'; '.join(said) or strength.text}"


def _how_known(strength: Strength) -> str:
    """The kind of evidence; what runs were made for and did not tell is not determined."""
    return "not determined" if strength.outcome == "cannot_tell" else strength.kind
