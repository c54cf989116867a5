"""Tests of the main run on the report's page and in the terminal: progress, loss, and outcome.

The gates of the example report are coordinates, transfer, fit, and data, in this order.
"""

import xml.etree.ElementTree as ET

import pytest
from example_report import make_finished_body
from report_page import extract_text, find_unknown_numbers, render_without_figures

from forerun._launcher.report.answers.outcome import format_outcome
from forerun._launcher.report.figures.ladder import BINS_PER_DECADE, bin_losses
from forerun._launcher.report.page.page import render_report
from forerun._launcher.report.views.report_model import to_report

CURVE = [
    {"step": step, "loss_nats": 3.0, "low_nats": 2.5, "high_nats": 3.5} for step in (100, 200, 400)
]


@pytest.fixture
def body():
    """Report of a study whose main run has 400 steps."""
    body = make_finished_body()
    body["decision"]["predicted"]["curve"] = CURVE
    body["decision"]["learning_rate"]["schedule"]["num_steps"] = 400
    return body


def test_page_shows_the_progress_of_the_main_run(body):
    body["main_run"] = {
        "steps": list(range(1, 251)),
        "train_loss_nats": [3.0] * 250,
        "validation_loss_nats": None,
        "event": None,
    }
    source = render_report(body)
    assert find_unknown_numbers(source, body) == []
    section = source[source.index('<section id="main-run">') :]
    section = section[: section.index("</section>")]
    ET.fromstring(section[section.index("<svg") : section.index("</svg>") + 6])
    assert "has logged 250 of 400 steps" in extract_text(section)


def test_losses_are_drawn_as_means():
    steps = range(1, 10_001)
    bins = bin_losses(steps, [float(step % 2) for step in steps])
    assert len(bins) <= 4 * BINS_PER_DECADE + 1
    # The last bin has a single step.
    assert bins[-2][1] == pytest.approx(0.5, abs=0.01)


def finish(body, loss_nats, **more):
    """Return the report with a finished main run of this validation loss."""
    return body | {
        "main_run": {
            "steps": [],
            "train_loss_nats": [],
            "validation_loss_nats": loss_nats,
            "event": "finished",
        }
        | more
    }


def test_finished_run_is_compared_with_its_forecast(body):
    predicted = body["decision"]["predicted"]
    body["gates"][2] |= {"outcome": "cannot_tell", "reason": "at_bound"}
    body["accepted"] = {"fit": "we know"}
    assert "cannot be predicted yet" in render_without_figures(body)
    for loss_nats, place in (
        (predicted["loss_nats"], "inside"),
        (predicted["high_nats"] + 0.1, "outside"),
    ):
        finished = finish(body, loss_nats)
        source = render_without_figures(finished)
        top = extract_text(source).split("What is not known")[0]
        assert "cannot be predicted" not in source and "no run checks" not in source
        # The phrase may begin with a capital or not.
        assert "eady to launch" not in top
        assert f"Validation loss of the main run {loss_nats:.3f} nats per token" in top
        assert f"{place} the predicted interval" in top and f"is {place} that interval" in top
        assert "The forecast was inconclusive" in top
        outcome = format_outcome(to_report(finished), None)
        assert outcome.startswith("the main run has finished: validation loss")
        assert find_unknown_numbers(source, finished) == []
    steps = {"steps": [1, 2], "train_loss_nats": [3.0, 3.0]}
    running = render_without_figures(finish(body, None, event=None, **steps))
    assert "cannot be predicted yet" in running and "Validation loss of the main run" not in running


def test_accepted_failure_is_still_named_after_the_run(body):
    body["gates"][1] |= {"outcome": "failed", "reason": "it drifts"}
    finished = finish(body, 1.0)
    assert format_outcome(to_report(finished), None).startswith(
        "not accepted: gate transfer failed; the main run has finished"
    )
    finished["accepted"] = {"transfer": "the cost is small"}
    assert format_outcome(to_report(finished), None).startswith(
        "accepted failure: gate transfer failed; the main run has finished"
    )
    assert (
        "<h1>Accepted failure: transfer failed; the main run has finished"
        in render_without_figures(finished)
    )


def test_study_that_stopped_at_a_gate_names_the_gate(body):
    body |= dict.fromkeys(
        ("search", "transfer", "ladder", "fit", "frontier", "choice", "decision", "digest")
    )
    body["gates"] = [{"name": "coordinates", "outcome": "failed", "reason": "the readout blows up"}]
    text = extract_text(render_without_figures(body))
    assert "Do not launch yet: coordinates failed" in text and "the readout blows up" in text
    body["accepted"] = {"coordinates": "a toy"}
    text = extract_text(render_without_figures(body))
    assert "Nothing to launch yet" in text and "Accepted failure: a toy" in text
