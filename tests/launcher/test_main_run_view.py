"""The main run's log over the expected curve, as the page shows it."""

import xml.etree.ElementTree as ET

import pytest
from example_report import finished_body
from test_report import text_of, unknown_numbers

from launcher.figures.fits import BINS_PER_DECADE, binned
from launcher.report.page import report_page

CURVE = [{"step": step, "loss_nats": 3.0, "low_nats": 2.5, "high_nats": 3.5} for step in (100, 200, 400)]


@pytest.fixture
def body():
    body = finished_body()
    body["decision"]["predicted"]["curve"] = CURVE
    body["decision"]["learning_rate"]["schedule"]["num_steps"] = 400
    return body


def test_the_page_says_how_far_it_is(body):
    body["main_run"] = {"steps": list(range(1, 251)), "train_loss_nats": [3.0] * 250, "validation_loss_nats": None,
                        "event": None}  # fmt: skip
    source = report_page(body)
    assert unknown_numbers(source, body) == []
    section = source[source.index('<section id="main-run">') :]
    section = section[: section.index("</section>")]
    ET.fromstring(section[section.index("<svg") : section.index("</svg>") + 6])
    assert "has logged 250 of 400 steps" in text_of(section)


def test_losses_are_drawn_as_means():
    steps = range(1, 10_001)
    drawn = binned(steps, [float(step % 2) for step in steps])
    assert len(drawn) <= 4 * BINS_PER_DECADE + 1
    assert drawn[-2][1] == pytest.approx(0.5, abs=0.01)
