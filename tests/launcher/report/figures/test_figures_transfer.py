"""Tests of the figures of the transfer tests: every run is drawn, and no text overlaps."""

import xml.etree.ElementTree as ET

import pytest
from drawings import check_drawing
from example_report import make_finished_body
from unusual_transfer import NAMES, make_unusual_body

from forerun._launcher.report.figures import plots
from forerun._launcher.report.figures.panel import render_svg


@pytest.fixture
def body():
    """JSON of a finished study's report, which a test may change."""
    return make_finished_body()


@pytest.fixture
def tests(body):
    """Transfer tests of the report `body`; changes of them change the report."""
    return body["transfer"]["tests"]


def draw_basins(body, test, arm):
    """Return the SVG of a test's loss basins."""
    return render_svg(plots.basins(body, test["hyperparameter"], test["axis"], arm))


def draw_drift(body, test):
    """Return the SVG of the optima of a test over its axis."""
    return render_svg(plots.drift(body, test["hyperparameter"], test["axis"]))


def test_diverged_run_is_drawn_at_the_edge(body, tests):
    # Each mark is a `<use>` element.
    before = draw_basins(body, tests[0], "mup")
    for run in tests[0]["runs"]:
        if run["log2_value"] == -9 and run["arm"] == "mup":
            run |= {"loss_nats": None, "status": "diverged"}
    after = draw_basins(body, tests[0], "mup")
    assert after.count("<use") == before.count("<use"), "the mark is moved, not dropped"
    assert after != before


def test_optima_outside_their_intervals_are_drawn(tests, body):
    before = draw_basins(body, tests[0], "mup")
    for optimum in tests[0]["verdict"]["optima"]:
        low, high = optimum["interval_log2"]
        optimum["interval_log2"] = [high + 0.1, 2 * high - low + 0.1]
    offset = tests[0]["verdict"]["offset_octaves"]
    offset["interval"] = [offset["value"] - 2.0, offset["value"] - 1.0]
    after = draw_basins(body, tests[0], "mup")
    for svg in (after, draw_drift(body, tests[0])):
        ET.fromstring(svg)
    assert after.count("<use") == before.count("<use")


def draw_every_figure(body):
    """Yield the SVG of every figure of the report's transfer tests."""
    for test in body["transfer"]["tests"]:
        arms = ("mup", "sp") if test["verdict"]["control"] else ("mup",)
        yield from (draw_basins(body, test, arm) for arm in arms)
        yield draw_drift(body, test)


@pytest.mark.parametrize("name", NAMES)
def test_no_text_is_cut_off_or_overlaps_in_unusual_reports(name):
    for svg in draw_every_figure(make_unusual_body(name)):
        check_drawing(svg)
