"""The rooms' source, read once, and parsed where it matters."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

from launcher.doctor.findings import PACKAGES

ROOT = Path(__file__).parents[2]


@functools.cache
def sources() -> dict[str, str]:
    """Text of every module, by its dotted name."""
    found = {}
    for room in PACKAGES:
        for path in sorted((ROOT / room).rglob("*.py")):
            found[".".join(path.relative_to(ROOT).with_suffix("").parts)] = path.read_text(
                encoding="utf-8"
            )
    return found


def trees(pattern: str) -> Iterator[tuple[str, ast.Module]]:
    """Names and trees of the modules in whose text the pattern is found."""
    for name, text in sources().items():
        if re.search(pattern, text):
            yield name, ast.parse(text)
