"""The main run's log over the expected curve, as the page shows it."""

import copy
import xml.etree.ElementTree as ET

import pytest
from example_report import finished_body
from test_report import text_of, unknown_numbers

from launcher.figures.main_run import BINS_PER_DECADE, binned
from launcher.frozen.frozen import CurvePoint
from launcher.report.page import report_page

CURVE = tuple(CurvePoint(step=step, loss_nats=3.0, low_nats=2.5, high_nats=3.5) for step in (100, 200, 400))


def log(num_steps, loss=lambda step: 3.0):
    steps = list(range(1, num_steps + 1))
    return steps, [loss(step) for step in steps]


@pytest.fixture
def body():
    body = copy.deepcopy(finished_body())
    keys = ("step", "loss_nats", "low_nats", "high_nats")
    body["decision"]["predicted"]["curve"] = [{key: getattr(point, key) for key in keys} for point in CURVE]
    body["decision"]["learning_rate"]["schedule"]["num_steps"] = 400
    return body


def shown(body, num_logged, loss=lambda step: 3.0):
    steps, losses = log(num_logged, loss)
    body["main_run"] = {"steps": steps, "train_loss_nats": losses, "validation_loss_nats": None, "event": None}
    source = report_page(body)
    assert unknown_numbers(source, body) == []
    section = source[source.index('<section id="main-run">') :]
    section = section[: section.index("</section>")]
    ET.fromstring(section[section.index("<svg") : section.index("</svg>") + 6])
    return " ".join(text_of(section).split())


def test_the_page_says_how_far_it_is(body):
    assert "has logged 250 of 400 steps" in shown(body, 250)


def test_losses_are_drawn_as_means():
    steps, losses = log(10_000, lambda step: float(step % 2))
    drawn = binned(steps, losses)
    assert len(drawn) <= 4 * BINS_PER_DECADE + 1
    assert drawn[-2][1] == pytest.approx(0.5, abs=0.01)
