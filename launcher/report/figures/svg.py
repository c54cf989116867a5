"""Inline SVG for a page: ids that do not clash, colors that follow the page, and a title."""

from __future__ import annotations

import html
import re

INK = "#1b1f24"
"""Color that becomes the page's text color."""

SEQUENCE = ("#c97700", "#c9552f", "#b4326b", "#852a93", "#4b2f9e", "#12246e")
"""Colors of ordered series, from the narrowest model to the widest. Hue and lightness both change,
so that the order survives color blindness and gray print."""
_SEQUENCE_DARK = ("#9a7bea", "#c272d4", "#e0709f", "#f28b6e", "#f7b24d", "#f8e67a")

KINDS = ("#0072b2", "#bf5000", "#007a5a", "#8f5f00", "#6b7280", "#9a3fa5")
"""Colors of unordered series, after Okabe and Ito's palette for color-blind readers, dark enough
for text on white."""
_KINDS_DARK = ("#56b4e9", "#f08a4b", "#35c99b", "#f0b93a", "#a3abb8", "#d48fe0")


def _declare_variables(sequence: tuple[str, ...], kinds: tuple[str, ...]) -> str:
    """Return CSS declarations of a palette: `--s0` and so on, then `--k0` and so on."""
    return ";".join(
        f"--{prefix}{index}:{color}"
        for prefix, palette in (("s", sequence), ("k", kinds))
        for index, color in enumerate(palette)
    )


LIGHT_VARIABLES = _declare_variables(SEQUENCE, KINDS)
DARK_VARIABLES = _declare_variables(_SEQUENCE_DARK, _KINDS_DARK)
"""CSS declarations of the palettes in light and dark mode, which the page sets. A drawing outside
the page keeps the light colors."""


_TO_SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
_NUMBER_PATTERN = re.compile(r"-?\d+\.\d{3,}")
_GEOMETRY_PATTERN = re.compile(r'\b(?:d|x|y|width|height|transform)="[^"]*"')
"""Attributes whose numbers are rounded to two digits."""


def format_power(base: int, exponent: int) -> str:
    """Format a power as plain text, with the exponent in superscript digits."""
    return f"{base}{str(exponent).translate(_TO_SUPERSCRIPT)}"


def choose_shade(rank: int, count: int) -> str:
    """Return the color of one of several ordered series.

    Args:
        rank: Position in the order, from 0; the last has the strongest color.
        count: Number of ordered series, over which the whole palette is spread.
    """
    last = len(SEQUENCE) - 1
    return SEQUENCE[last if count <= 1 else round(rank * last / (count - 1))]


def convert_svg(document: str, name: str, title: str) -> str:
    """Convert an SVG document of matplotlib for use inline in HTML, next to others.

    Args:
        document: A whole SVG document, with its text kept as text.
        name: Name that is unique on the page; it prefixes every id.
        title: Title for screen readers.
    """
    text = document[document.index("<svg") :]
    # Remove the document's style, and ids that would clash with those of other figures
    text = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>", "", text, flags=re.DOTALL)
    text = re.sub(r'<g id="[xy]tick_\d+">', '<g class="tick">', text)
    text = re.sub(r'<g id="[^"]*">', "<g>", text)
    text = _prefix_ids(text, name)
    # Take font and colors from the page
    text = re.sub(r"font-family: [^;\"]*;? ?", "", text)
    text = _use_page_colors(text)
    # Save bytes: less space, fewer digits, no rotation by 0 degrees
    text = re.sub(r"\s*\n\s*", " ", text).replace("> <", "><").strip()
    text = _GEOMETRY_PATTERN.sub(
        lambda match: _NUMBER_PATTERN.sub(
            lambda number: f"{float(number.group()):.2f}".rstrip("0").rstrip("."), match.group()
        ),
        text,
    )
    text = re.sub(r' transform="rotate\(-?0 [^"]*"', "", text)
    text = re.sub(
        r'style="([^"]*)"', lambda match: match.group().replace(": ", ":").replace("; ", ";"), text
    )
    # Write a new head, which has a title and no fixed size
    size = re.search(r'viewBox="[^"]*"', text)
    assert size is not None
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size.group()} role="img" '
        f'aria-labelledby="{name}-title" '
        f'stroke-linejoin="round"><title id="{name}-title">{html.escape(title)}</title>'
    )
    return head + text[text.index(">") + 1 :]


def _prefix_ids(text: str, name: str) -> str:
    """Replace ids by short ones that begin with the name, also where they are referred to."""
    ids = {
        old_id: f"{name}-{number}"
        for number, old_id in enumerate(dict.fromkeys(re.findall(r'\bid="([^"]*)"', text)))
    }
    text = re.sub(r'\bid="([^"]*)"', lambda match: f'id="{ids[match[1]]}"', text)
    text = re.sub(r'xlink:href="#([^"]*)"', lambda match: f'href="#{ids[match[1]]}"', text)
    return re.sub(r"url\(#([^)]*)\)", lambda match: f"url(#{ids[match[1]]})", text)


def _use_page_colors(text: str) -> str:
    """Replace the palettes' colors by the page's variables, and ink by the text color."""
    for prefix, palette in (("s", SEQUENCE), ("k", KINDS)):
        for index, color in enumerate(palette):
            text = text.replace(f": {color}", f": var(--{prefix}{index}, {color})")
    # Text in the default black has no color of its own, and would stay black on a dark page.
    text = re.sub(r'<text style="(?![^"]*fill:)', '<text style="fill: currentColor; ', text)
    return text.replace(f": {INK}", ": currentColor")
