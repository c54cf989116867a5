"""Tests of the report page in headless Chromium: phone and desktop, dark and light, and paper."""

import pytest
from browser import CHROMIUM, PAPER_PIXELS, measure_page
from example_report import make_finished_body

from forerun._launcher.report.page.page import render_report

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine")
FRAMES = {
    f"{width} {mode}": (width, mode) for width in (390, 1280) for mode in ("light", "dark")
} | {"paper": (PAPER_PIXELS[0], "paper")}
"""Width in pixels and color mode of each view of the page: phone and desktop, and print."""
MIN_CONTRAST = 4.5
"""Contrast ratio of text and its background by WCAG 2.1, level AA."""
MIN_LETTER_PIXELS = 8.0
"""Font size of the smallest letters of a figure."""


@pytest.fixture(scope="module")
def measurements(tmp_path_factory):
    """Measurements of the page by frame, and the lines of the browser's console."""
    return measure_page(
        render_report(make_finished_body()), tmp_path_factory.mktemp("browser"), FRAMES
    )


@pytest.fixture(scope="module")
def frames(measurements):
    """Measurements of the page by frame."""
    return measurements[0]


def test_page_fits_the_window(frames):
    for name, frame in frames.items():
        assert frame["page"] == frame["window"] == FRAMES[name][0], name
        assert frame["sideways"] == [], name


def test_page_has_no_error_and_fetches_nothing(measurements):
    frames, console = measurements
    assert console == []
    for frame in frames.values():
        assert frame["wrong"] == [] and frame["resources"] == 0


def test_text_has_enough_contrast_in_every_mode(frames):
    for name, frame in frames.items():
        assert frame["contrast"].keys() == {"text", "figures"}
        assert min(frame["contrast"].values()) >= MIN_CONTRAST, name
    backgrounds = {FRAMES[name][1]: frame["background"] for name, frame in frames.items()}
    assert backgrounds["dark"] != backgrounds["light"] == backgrounds["paper"], "paper is white"


def test_figures_are_complete_and_legible(frames):
    for name, frame in frames.items():
        assert frame["cut"] == [] and len(frame["figures"]) > 3, name
        assert frame["smallest_letter"] >= MIN_LETTER_PIXELS, name


def test_no_figure_or_table_is_cut_on_paper(frames):
    paper = frames["paper"]
    assert set(paper["breaks"]) == {"avoid"} and max(paper["figures"]) < PAPER_PIXELS[1]
    assert paper["cut_tables"] == []


def test_each_planted_mistake_is_measured(tmp_path):
    planted = (
        "<!doctype html><html><head><style>@media print{p{color:#777}}</style></head><body><main>"
        '<p style="width:500px">wide</p><p style="color:#ccc">pale</p><img '
        'src="http://example.com/x.png">'
        '<figure><svg viewBox="0 0 100 100" width="100" height="100"><title>drawn</title>'
        '<text x="90" y="50" style="font-size:6px">cut off</text></svg></figure>'
        '<div class="scroll" style="overflow:auto"><div style="width:900px">a table</div></div>'
        "<script>undefinedFunction()</script></main></body></html>"
    )
    frames, _ = measure_page(planted, tmp_path, {"phone": (390, "light")})
    frame = frames["phone"]
    assert frame["page"] > frame["window"] and "P" in frame["sideways"]
    assert frame["contrast"]["text"] < 2 and frame["cut"] == ["drawn: cut off"]
    assert frame["smallest_letter"] == 6 and frame["cut_tables"] == ["a table"]
    # The image cannot be fetched, and the script fails.
    assert len(frame["wrong"]) == 2
    assert any("undefinedFunction" in message for message in frame["wrong"])
