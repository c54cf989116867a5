"""Markdown that the pages of docs/reference share."""

from __future__ import annotations


def format_cell(text: str) -> str:
    """Return a text as one cell of a table: one line, with `|` and `<` escaped."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")
