"""The main run's log over the expected curve, as the page shows it."""

import xml.etree.ElementTree as ET

import pytest
from example_report import finished_body
from test_report import text_of, undrawn, unknown_numbers

from launcher.answers.outcome import outcome_line
from launcher.figures.fits import BINS_PER_DECADE, bin_losses
from launcher.report.page import report_page

CURVE = [
    {"step": step, "loss_nats": 3.0, "low_nats": 2.5, "high_nats": 3.5} for step in (100, 200, 400)
]


@pytest.fixture
def body():
    body = finished_body()
    body["decision"]["predicted"]["curve"] = CURVE
    body["decision"]["learning_rate"]["schedule"]["num_steps"] = 400
    return body


def test_the_page_says_how_far_it_is(body):
    body["main_run"] = {
        "steps": list(range(1, 251)),
        "train_loss_nats": [3.0] * 250,
        "validation_loss_nats": None,
        "event": None,
    }
    source = report_page(body)
    assert unknown_numbers(source, body) == []
    section = source[source.index('<section id="main-run">') :]
    section = section[: section.index("</section>")]
    ET.fromstring(section[section.index("<svg") : section.index("</svg>") + 6])
    assert "has logged 250 of 400 steps" in text_of(section)


def test_losses_are_drawn_as_means():
    steps = range(1, 10_001)
    drawn = bin_losses(steps, [float(step % 2) for step in steps])
    assert len(drawn) <= 4 * BINS_PER_DECADE + 1
    assert drawn[-2][1] == pytest.approx(0.5, abs=0.01)


def finish(body, measured, **more):
    return body | {
        "main_run": {
            "steps": [],
            "train_loss_nats": [],
            "validation_loss_nats": measured,
            "event": "finished",
        }
        | more
    }


def test_a_finished_run_is_shown_beside_its_forecast(body):
    predicted = body["decision"]["predicted"]
    body["gates"][2] |= {"outcome": "cannot_tell", "reason": "at_bound"}
    body["accepted"] = {"fit": "we know"}
    assert "cannot be predicted yet" in undrawn(body)
    for measured, place in (
        (predicted["loss_nats"], "inside"),
        (predicted["high_nats"] + 0.1, "outside"),
    ):
        source = undrawn(finish(body, measured))
        top = text_of(source).split("What is not known")[0]
        assert (
            "cannot be predicted" not in source
            and "eady to launch" not in top
            and "no run checks" not in source
        )
        assert f"Validation loss of the main run {measured:.3f} nats per token" in top
        assert f"{place} the predicted interval" in top and f"is {place} that interval" in top
        assert "The forecast was inconclusive" in top
        assert outcome_line(finish(body, measured), None).startswith(
            "the main run has finished: validation loss"
        )
        assert unknown_numbers(source, finish(body, measured)) == []
    steps = {"steps": [1, 2], "train_loss_nats": [3.0, 3.0]}
    running = undrawn(finish(body, None, event=None, **steps))
    assert "cannot be predicted yet" in running and "Validation loss of the main run" not in running


def test_an_accepted_failure_keeps_its_name_after_the_run(body):
    body["gates"][1] |= {"outcome": "failed", "reason": "it drifts"}
    finished = finish(body, 1.0)
    assert outcome_line(finished, None).startswith(
        "not accepted: gate transfer failed; the main run has finished"
    )
    finished["accepted"] = {"transfer": "the cost is small"}
    assert outcome_line(finished, None).startswith(
        "accepted failure: gate transfer failed; the main run has finished"
    )
    assert "<h1>Accepted failure: transfer failed; the main run has finished" in undrawn(finished)


def test_a_study_that_stopped_at_a_gate_says_so(body):
    body |= dict.fromkeys(
        ("search", "transfer", "ladder", "fit", "frontier", "choice", "decision", "digest")
    )
    body["gates"] = [{"name": "coordinates", "outcome": "failed", "reason": "the readout blows up"}]
    shown = text_of(undrawn(body))
    assert "Do not launch yet: coordinates failed" in shown and "the readout blows up" in shown
    body["accepted"] = {"coordinates": "a toy"}
    shown = text_of(undrawn(body))
    assert "Nothing to launch yet" in shown and "Accepted failure: a toy" in shown
