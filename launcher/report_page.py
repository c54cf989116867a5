"""A whole page of a report: its head, its parts, and its drawings in few characters. Standard library only."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable

from launcher.report_style import CSS

_DRAWING = re.compile(r"<svg .*?</svg>", re.DOTALL)
_STYLE = re.compile(r' style="([^"]*)"')
_ID = re.compile(r'\bid="([^"]*-\d+)"')
_REFERENCE = re.compile(r'(?<=url\(#)[^)]*|(?<=\bhref="#)[^"]*|(?<=\bid=")[^"]*')
_RULE = re.compile(r"\.(d\d+)\{([^}]*)\}")


def whole_page(title: str, parts: Iterable[str]) -> str:
    """One HTML document.

    What its drawings say again and again is said once: a style is a class of the page, and an id is a number.

    Args:
        title: of the browser's tab.
        parts: HTML of the page's sections; drawings as `launcher.svg.finish` makes them.
    """
    body = "".join(parts)
    drawn = "".join(_DRAWING.findall(body))
    ids = {long: f"i{number}" for number, long in enumerate(dict.fromkeys(_ID.findall(drawn)))}
    classes = {style: f"d{number}" for number, style in enumerate(dict.fromkeys(_STYLE.findall(drawn)))}

    def said_once(drawing: re.Match[str]) -> str:
        short = _REFERENCE.sub(lambda found: ids.get(found.group(), found.group()), drawing.group())
        return _STYLE.sub(lambda found: f' class="{classes[found[1]]}"', short)

    rules = "".join(f".{name}{{{style}}}" for style, name in classes.items())
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><meta name="color-scheme" '
        f'content="light dark"><title>{html.escape(title)}</title><style>{CSS}{rules}</style></head>'
        f"<body><main>{_DRAWING.sub(said_once, body)}</main></body></html>\n"
    )


def rules_of(page: str, drawing: str) -> str:
    """The style rules of a page that one of its drawings needs to stand alone."""
    used = set(re.findall(r'class="(d\d+)"', drawing))
    return "".join(found.group() for found in _RULE.finditer(page) if found[1] in used)
