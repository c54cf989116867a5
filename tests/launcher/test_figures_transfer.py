"""The transfer tests' figures show what the runs say: nothing dropped, nothing overlapping,
whatever was run.
"""

import re
import xml.etree.ElementTree as ET

import pytest
from example_report import finished_body
from odd_transfer import NAMES, odd_body

from launcher.figures import plots
from launcher.figures.panel import svg_of


@pytest.fixture
def body():
    return finished_body()


@pytest.fixture
def tests(body):
    return body["transfer"]["tests"]


def basins(body, test, arm):
    return svg_of(plots.basins(body, test["hyperparameter"], test["axis"], arm))


def drift(body, test):
    return svg_of(plots.drift(body, test["hyperparameter"], test["axis"]))


TEXT = re.compile(
    r'<text style="font-size:([\d.]+)px;(?:text-anchor:(\w+);)?[^"]*" x="([-\d.]+)" '
    r'y="([-\d.]+)">([^<]*)</text>'
)
LETTER = 0.55
"""Width of a usual letter, as a share of the font's size."""


def texts(svg):
    """(text, left end, baseline, font size) of what is not turned."""
    found = []
    for size, anchor, x, y, said in TEXT.findall(svg):
        length = LETTER * float(size) * len(said)
        found.append(
            (
                said,
                float(x) - {"middle": 0.5, "end": 1.0}.get(anchor, 0.0) * length,
                float(y),
                float(size),
            )
        )
    return found


def test_a_diverged_run_is_marked(body, tests):
    before = basins(body, tests[0], "mup")
    for run in tests[0]["runs"]:
        if run["log2_value"] == -9 and run["arm"] == "mup":
            run |= {"loss_nats": None, "status": "diverged"}
    after = basins(body, tests[0], "mup")
    assert after.count("<use") == before.count("<use"), "moved to the edge, not dropped"
    assert after != before


def test_optima_outside_their_own_intervals_are_drawn(tests, body):
    """In every figure that has them; the mark where the optimum is, the bar where the
    interval is.
    """
    before = basins(body, tests[0], "mup")
    for optimum in tests[0]["verdict"]["optima"]:
        low, high = optimum["interval_log2"]
        optimum["interval_log2"] = [high + 0.1, 2 * high - low + 0.1]
    offset = tests[0]["verdict"]["offset_octaves"]
    offset["interval"] = [offset["value"] - 2.0, offset["value"] - 1.0]
    after = basins(body, tests[0], "mup")
    for svg in (after, drift(body, tests[0])):
        ET.fromstring(svg)
    assert after.count("<use") == before.count("<use")


def every_figure(body):
    for test in body["transfer"]["tests"]:
        arms = ("mup", "sp") if test["verdict"]["control"] else ("mup",)
        yield from (basins(body, test, arm) for arm in arms)
        yield drift(body, test)


def check_drawing(svg):
    """Nothing in it is cut off, or lies on other text, or keeps its colour on a dark page."""
    ET.fromstring(svg)
    assert not re.search(r"\bnan\b", svg)
    assert not re.search(r":#(?!fff)[0-9a-f]{6}", svg), "a colour that a dark page cannot change"
    width, height = map(float, re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', svg).groups())
    boxes = [
        (said, x, x + LETTER * size * len(said), y - 0.7 * size, y)
        for said, x, y, size in texts(svg)
    ]
    assert len(boxes) > 5
    for said, left, right, _, bottom in boxes:
        assert left > -3 and right < width + 3 and 0 < bottom <= height, said
    for i, (said, left, right, top, bottom) in enumerate(boxes):
        for other, left_2, right_2, top_2, bottom_2 in boxes[:i]:
            apart = left >= right_2 - 1 or left_2 >= right - 1 or top >= bottom_2 or top_2 >= bottom
            assert apart, f"{said} on {other}"


@pytest.mark.parametrize("name", NAMES)
def test_whatever_was_run_nothing_is_cut_off_or_lies_on_other_text(name):
    for svg in every_figure(odd_body(name)):
        check_drawing(svg)
