"""The pages in a real browser: a phone, a desk, dark and light, and paper."""

import pytest
from browser import CHROMIUM, PAPER_PIXELS, windows
from example_report import finished_body

from launcher.report.page import report_page

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine")
FRAMES = {
    f"{width} {mode}": (width, mode) for width in (390, 1280) for mode in ("light", "dark")
} | {"paper": (PAPER_PIXELS[0], "paper")}
LEAST_CONTRAST = 4.5
"""The contrast of text and what is behind it: WCAG 2.1, level AA."""
LEAST_LETTERS = 8.0
"""Pixels, of a figure's smallest letters on a phone and on paper."""


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    return windows(report_page(finished_body()), tmp_path_factory.mktemp("browser"), FRAMES)


def test_nothing_goes_beyond_the_window(seen):
    for name, of in seen[0].items():
        assert of["page"] == of["window"] == FRAMES[name][0], name
        assert of["sideways"] == [], name


def test_no_error_and_nothing_fetched(seen):
    found, console = seen
    assert console == []
    for of in found.values():
        assert of["wrong"] == [] and of["resources"] == 0


def test_text_reads_on_what_is_behind_it_dark_and_light(seen):
    for name, of in seen[0].items():
        assert of["contrast"].keys() == {"text", "figures"}
        assert min(of["contrast"].values()) >= LEAST_CONTRAST, name
    grounds = {FRAMES[name][1]: of["background"] for name, of in seen[0].items()}
    assert grounds["dark"] != grounds["light"] == grounds["paper"], (
        "paper is white, whatever the screen is"
    )


def test_figures_are_whole_and_legible(seen):
    for name, of in seen[0].items():
        assert of["cut"] == [] and len(of["figures"]) > 3, name
        assert of["smallest_letter"] >= LEAST_LETTERS, name


def test_on_paper_no_figure_is_cut_and_no_table(seen):
    paper = seen[0]["paper"]
    assert set(paper["breaks"]) == {"avoid"} and max(paper["figures"]) < PAPER_PIXELS[1]
    assert paper["cut_tables"] == []


def test_the_measuring_notices(tmp_path):
    """Mistakes planted in a page are found, each by what should find it."""
    planted = (
        "<!doctype html><html><head><style>@media print{p{color:#777}}</style></head><body><main>"
        '<p style="width:500px">wide</p><p style="color:#ccc">pale</p><img '
        'src="http://example.com/x.png">'
        '<figure><svg viewBox="0 0 100 100" width="100" height="100"><title>drawn</title>'
        '<text x="90" y="50" style="font-size:6px">cut off</text></svg></figure>'
        '<div class="scroll" style="overflow:auto"><div style="width:900px">a table</div></div>'
        "<script>undefinedFunction()</script></main></body></html>"
    )
    of = windows(planted, tmp_path, {"phone": (390, "light")})[0]["phone"]
    assert of["page"] > of["window"] and "P" in of["sideways"]
    assert of["contrast"]["text"] < 2 and of["cut"] == ["drawn: cut off"]
    assert of["smallest_letter"] == 6 and of["cut_tables"] == ["a table"]
    assert len(of["wrong"]) == 2 and any("undefinedFunction" in said for said in of["wrong"])
