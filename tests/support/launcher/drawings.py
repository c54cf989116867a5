"""Checks of SVG figures: no text overlaps another one or leaves the canvas."""

import re
import xml.etree.ElementTree as ET

TEXT = re.compile(
    r'<text style="font-size:([\d.]+)px;(?:text-anchor:(\w+);)?[^"]*" x="([-\d.]+)" '
    r'y="([-\d.]+)">([^<]*)</text>'
)

LETTER_WIDTH = 0.55
"""Width of an average letter as a share of the font size."""


def find_texts(svg):
    """Return (text, left end, baseline, font size) of each text that is not rotated."""
    found_texts = []
    for size, anchor, x, y, text in TEXT.findall(svg):
        length = LETTER_WIDTH * float(size) * len(text)
        left = float(x) - {"middle": 0.5, "end": 1.0}.get(anchor, 0.0) * length
        found_texts.append((text, left, float(y), float(size)))
    return found_texts


def check_drawing(svg):
    """Assert that no text is cut off or overlaps, and that colors adapt to a dark page."""
    ET.fromstring(svg)
    assert not re.search(r"\bnan\b", svg)
    assert not re.search(r":#(?!fff)[0-9a-f]{6}", svg), "a color that a dark page cannot change"
    width, height = map(float, re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', svg).groups())
    boxes = [
        (text, x, x + LETTER_WIDTH * size * len(text), y - 0.7 * size, y)
        for text, x, y, size in find_texts(svg)
    ]
    assert len(boxes) > 5
    for text, left, right, _, bottom in boxes:
        assert left > -3 and right < width + 3 and 0 < bottom <= height, text
    for i, (text, left, right, top, bottom) in enumerate(boxes):
        for text_2, left_2, right_2, top_2, bottom_2 in boxes[:i]:
            apart = left >= right_2 - 1 or left_2 >= right - 1 or top >= bottom_2 or top_2 >= bottom
            assert apart, f"{text} on {text_2}"
