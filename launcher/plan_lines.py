"""Where in a plan's file a key stands, so that what is wrong with it is told with its line. Standard library only."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

_HEADER = re.compile(r"\s*\[{1,2}\s*([^\]]+?)\s*\]{1,2}\s*(?:#.*)?")
_KEY = re.compile(r"\s*([\w\s.\"'-]+?)\s*=")
_QUOTES = re.compile(r"\"{3}|'{3}")
_NAME = re.compile(r"[A-Za-z_][\w-]*(?:\.[\w-]+)*")


def key_lines(text: str, raw: Mapping[str, Any]) -> dict[str, int]:
    """Line, from 1, of every section and key of a document that was read as `raw`, by dotted name."""
    lines: dict[str, int] = {}
    section: tuple[str, ...] = ()
    inside = ""  # of a text over several lines, whose end is wanted
    for number, line in enumerate(text.split("\n"), start=1):
        begins, inside = not inside, _inside(line, inside)
        if not begins:
            continue
        if header := _HEADER.fullmatch(line.rstrip("\r")):
            path = section = _parts(header[1])
        elif key := _KEY.match(line):
            path = (*section, *_parts(key[1]))
        else:
            continue
        if _is_in(raw, path):
            for end in range(1, len(path) + 1):
                lines.setdefault(".".join(path[:end]), number)
    for name, table in raw.items():  # an inline table's keys are on its own line
        if name in lines and isinstance(table, Mapping):
            lines = {f"{name}.{key}": lines[name] for key in table} | lines
    return lines


def with_line(problem: str, lines: Mapping[str, int], elsewhere: Collection[str] = ()) -> str:
    """A problem with the line of the first key it names that is in the file, or of its section.

    `elsewhere`: keys that are given by `--set`: what the file says of them is not what is wrong.
    """
    names = _NAME.findall(problem)
    for name in names:
        parts = name.split(".")
        for end in range(len(parts), 1, -1):
            known = ".".join(parts[:end])
            if known in elsewhere:
                return problem
            if known in lines:
                return f"{problem} (line {lines[known]})"
    section = names[0].partition(".")[0] if names else ""
    whole = problem.startswith((f"{section} ", f"{section}:"))  # else a key at its default, which is on no line
    return f"{problem} (line {lines[section]})" if whole and section in lines else problem


def _inside(line: str, inside: str) -> str:
    """The quotes that will end the text that is open at the end of the line; empty: none is."""
    for quotes in _QUOTES.findall(line):
        if not inside:
            inside = quotes
        elif quotes == inside:
            inside = ""
    return inside


def _parts(dotted: str) -> tuple[str, ...]:
    return tuple(part.strip().strip("\"'") for part in dotted.split("."))


def _is_in(raw: Any, path: tuple[str, ...]) -> bool:
    for part in path:
        raw = raw[-1] if isinstance(raw, list) and raw else raw
        if not isinstance(raw, Mapping) or part not in raw:
            return False
        raw = raw[part]
    return True
