"""A drawing as SVG that lives inside a page: no ids that clash, colours that follow the page, a
title.
"""

from __future__ import annotations

import html
import re

INK = "#1b1f24"
"""Drawn with this, a line or a text takes the page's text colour."""

SEQUENCE = ("#c97700", "#c9552f", "#b4326b", "#852a93", "#4b2f9e", "#12246e")
"""Ordered things, narrow to wide: hue and lightness both move, so order survives colour blindness
and grey print."""
_SEQUENCE_DARK = ("#9a7bea", "#c272d4", "#e0709f", "#f28b6e", "#f7b24d", "#f8e67a")

KINDS = ("#0072b2", "#bf5000", "#007a5a", "#8f5f00", "#6b7280", "#9a3fa5")
"""Unordered things: after Okabe and Ito's palette for colour-blind readers, dark enough on white
for names in them."""
_KINDS_DARK = ("#56b4e9", "#f08a4b", "#35c99b", "#f0b93a", "#a3abb8", "#d48fe0")


def _variables(sequence: tuple[str, ...], kinds: tuple[str, ...]) -> str:
    named = [(f"--s{i}", c) for i, c in enumerate(sequence)] + [
        (f"--k{i}", c) for i, c in enumerate(kinds)
    ]
    return ";".join(f"{name}:{colour}" for name, colour in named)


LIGHT_VARIABLES = _variables(SEQUENCE, KINDS)
DARK_VARIABLES = _variables(_SEQUENCE_DARK, _KINDS_DARK)
"""CSS declarations of the palette, for the page to set; a drawing outside such a page keeps the
light colours."""


_SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
_NUMBER = re.compile(r"-?\d+\.\d{3,}")
_PLACED = re.compile(r'\b(?:d|x|y|width|height|transform)="[^"]*"')


def raised(base: int, exponent: int) -> str:
    """A power as plain text, the exponent in superscript digits."""
    return f"{base}{str(exponent).translate(_SUPERSCRIPT)}"


def shade(rank: int, count: int) -> str:
    """The colour of the `rank`-th of `count` ordered things: the whole range is used, the last is
    the strongest.
    """
    last = len(SEQUENCE) - 1
    return SEQUENCE[last if count <= 1 else round(rank * last / (count - 1))]


def finish(drawn: str, name: str, title: str) -> str:
    """What matplotlib wrote, made fit to stand inline in HTML beside others of its kind.

    Args:
        drawn: a whole SVG document, its text left as text.
        name: unique on the page; prefixes every id.
        title: what a screen reader says.
    """
    text = drawn[drawn.index("<svg") :]
    text = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>", "", text, flags=re.DOTALL)
    text = re.sub(r'<g id="[xy]tick_\d+">', '<g class="tick">', text)
    text = re.sub(r'<g id="[^"]*">', "<g>", text)
    text = _own_ids(text, name)
    text = re.sub(r"font-family: [^;\"]*;? ?", "", text)
    text = _coloured(text)
    text = re.sub(r"\s*\n\s*", " ", text).replace("> <", "><").strip()
    text = _PLACED.sub(lambda found: _NUMBER.sub(_hundredths, found.group()), text)
    text = re.sub(r' transform="rotate\(-?0 [^"]*"', "", text)
    text = re.sub(
        r'style="([^"]*)"', lambda found: found.group().replace(": ", ":").replace("; ", ";"), text
    )
    size = re.search(r'viewBox="[^"]*"', text)
    assert size is not None
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size.group()} role="img" '
        f'aria-labelledby="{name}-title" '
        f'stroke-linejoin="round"><title id="{name}-title">{html.escape(title)}</title>'
    )
    return head + text[text.index(">") + 1 :]


def _hundredths(number: re.Match[str]) -> str:
    return f"{float(number.group()):.2f}".rstrip("0").rstrip(".")


def _own_ids(text: str, name: str) -> str:
    """Short ids that begin with the name."""
    ids = {
        id: f"{name}-{number}"
        for number, id in enumerate(dict.fromkeys(re.findall(r'\bid="([^"]*)"', text)))
    }
    text = re.sub(r'\bid="([^"]*)"', lambda found: f'id="{ids[found[1]]}"', text)
    text = re.sub(r'xlink:href="#([^"]*)"', lambda found: f'href="#{ids[found[1]]}"', text)
    return re.sub(r"url\(#([^)]*)\)", lambda found: f"url(#{ids[found[1]]})", text)


def _coloured(text: str) -> str:
    for prefix, palette in (("s", SEQUENCE), ("k", KINDS)):
        for i, colour in enumerate(palette):
            text = text.replace(f": {colour}", f": var(--{prefix}{i}, {colour})")
    # A text whose colour is the default black carries no colour at all, and would stay black on a
    # dark page.
    text = re.sub(r'<text style="(?![^"]*fill:)', '<text style="fill: currentColor; ', text)
    return text.replace(f": {INK}", ": currentColor")
