"""The main run's log beside the expected curve: which points count as passed, and what the page says."""

import copy
import xml.etree.ElementTree as ET

import pytest
from example_report import finished_body
from test_report import text_of, unknown_numbers

from launcher.figures.main_run import BINS_PER_DECADE, binned
from launcher.frozen.frozen import CurvePoint
from launcher.report.main_run import beside_curve
from launcher.report.page import report_page

CURVE = tuple(CurvePoint(step=step, loss_nats=3.0, low_nats=2.5, high_nats=3.5) for step in (100, 200, 400))


def log(num_steps, loss=lambda step: 3.0):
    steps = list(range(1, num_steps + 1))
    return steps, [loss(step) for step in steps]


@pytest.mark.parametrize(("num_logged", "passed"), [(114, 0), (115, 1), (399, 2), (400, 3)])
def test_a_point_is_passed_once_its_whole_window_is_logged(num_logged, passed):
    found = beside_curve(*log(num_logged), CURVE, 400)
    assert (found["num_passed"], found["num_inside"], found["num_points"]) == (passed, passed, 3)


def test_the_mean_of_the_window_counts_and_not_a_single_step():
    spike = beside_curve(*log(400, lambda step: 9.0 if step == 100 else 3.0), CURVE, 400)
    assert [at["where"] for at in spike["passed"]] == ["inside"] * 3
    assert spike["passed"][0]["seen_nats"] == pytest.approx(3 + 6 / 31)
    apart = beside_curve(*log(400, lambda step: 4.0 if step < 150 else 2.0 if step > 300 else 3.0), CURVE, 400)
    assert [at["where"] for at in apart["passed"]] == ["above", "inside", "below"]
    assert apart["num_inside"] == 1


@pytest.fixture
def body():
    body = copy.deepcopy(finished_body())
    keys = ("step", "loss_nats", "low_nats", "high_nats")
    body["decision"]["predicted"]["curve"] = [{key: getattr(point, key) for key in keys} for point in CURVE]
    body["decision"]["learning_rate"]["schedule"]["num_steps"] = 400
    return body


def shown(body, num_logged, loss=lambda step: 3.0):
    steps, losses = log(num_logged, loss)
    body["main_run"] = {"steps": steps, "train_loss_nats": losses, "validation_loss_nats": None, "event": None,
                        "beside_curve": beside_curve(steps, losses, CURVE, 400)}  # fmt: skip
    source = report_page(body)
    assert unknown_numbers(source, body) == []
    section = source[source.index('<section id="main-run">') :]
    section = section[: section.index("</section>")]
    ET.fromstring(section[section.index("<svg") : section.index("</svg>") + 6])
    return " ".join(text_of(section).split())


def test_the_page_counts_the_points_inside_and_tells_of_the_last(body):
    told = shown(body, 250, lambda step: 3.0 if step < 150 else 4.0)
    assert "Training loss lay inside the expected 90 % band at 1 of the 2 points passed so far, of 3 in all" in told
    assert "at the last of them above it." in told


def test_losses_are_drawn_as_means():
    steps, losses = log(10_000, lambda step: float(step % 2))
    drawn = binned(steps, losses)
    assert len(drawn) <= 4 * BINS_PER_DECADE + 1
    assert drawn[-2][1] == pytest.approx(0.5, abs=0.01)
