"""The report's drawings, each as a page of its own, as W&B shows it in a frame. Standard library only."""

from __future__ import annotations

import html
import re

from launcher.report_page import rules_of
from launcher.svg import INK, LIGHT_VARIABLES

_DRAWING = re.compile(r'<svg [^>]*aria-labelledby="(?P<name>[^"]+)-title".*?</svg>', re.DOTALL)
_TITLE = re.compile(r"<title[^>]*>(.*?)</title>", re.DOTALL)


def pictures(page: str) -> dict[str, str]:
    """The drawings of a report, by name, each as a page of its own on white: W&B shows it in a frame, in its own theme.

    Args:
        page: HTML as `launcher.report.page` writes it, its drawings as `launcher.svg.finish` does.
    """
    return {
        found["name"]: _standing_alone(found.group(), rules_of(page, found.group()))
        for found in _DRAWING.finditer(page)
    }


def _standing_alone(svg: str, rules: str) -> str:
    said = _TITLE.search(svg)
    title = html.unescape(said.group(1)) if said else ""
    style = (
        f":root{{color-scheme:light;{LIGHT_VARIABLES}}}"
        f"body{{margin:1rem;background:#fff;color:{INK};font:15px/1.45 system-ui,sans-serif}}"
        "p{margin:0 0 .6rem}svg{display:block;width:100%;max-width:46rem;height:auto;font-family:inherit}"
        f"{rules}"
    )
    shown = html.escape(title)
    head = f'<head><meta charset="utf-8"><title>{shown}</title><style>{style}</style></head>'
    return f'<!doctype html><html lang="en">{head}<body><p>{shown}</p>{svg}</body></html>\n'
