"""Texts in a plan: it is kept, copied and shown, so that no secret may stand in it, nor what no path can hold."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from sweeps.redaction import secret_in


def text_problems(raw: Mapping[str, Any]) -> list[str]:
    """What is wrong with the texts of a plan, by key; never the text itself."""
    problems = []
    for key, text in _texts(raw, ""):
        if said := secret_in(text):
            problems.append(
                f"{key} holds what looks like {said}: a plan is kept and shown. Put it into the environment, which a "
                "command inherits, or into a file that only you can read"
            )
        if "\0" in text:
            problems.append(f"{key} holds a zero byte, which no path and no command can")
    return problems


def _texts(value: Any, key: str) -> Iterator[tuple[str, str]]:
    """Every text below a value, with its dotted key; of a table also the names."""
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            yield key or "a section's name", name
            yield from _texts(inner, f"{key}.{name}" if key else name)
    elif isinstance(value, list):
        for inner in value:
            yield from _texts(inner, key)
