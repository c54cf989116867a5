"""The source of the packages, read once and parsed where a pattern occurs."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator

from forerun._proxies.core.canon import PACKAGE_DIR


@functools.cache
def read_sources() -> dict[str, str]:
    """Return the text of every module by its dotted name."""
    links = sorted(path for path in PACKAGE_DIR.iterdir() if path.is_symlink())
    return {
        ".".join(path.relative_to(PACKAGE_DIR.parent).with_suffix("").parts): path.read_text(
            encoding="utf-8"
        )
        for link in links
        for path in sorted(link.rglob("*.py"))
    }


def parse_modules(pattern: str) -> Iterator[tuple[str, ast.Module]]:
    """Yield name and syntax tree of each module whose text matches the pattern."""
    for name, text in read_sources().items():
        if re.search(pattern, text):
            yield name, ast.parse(text)
