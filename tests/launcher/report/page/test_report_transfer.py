"""Tests of the report's sections on transfer: the tests, the values, and the runs to decide."""

import pytest
from example_report import make_finished_body
from report_page import extract_text, render_section
from unusual_transfer import make_unusual_body


def render_transfer(body):
    """Return the text of the sections on transfer."""
    return extract_text(render_section("transfer", body))


@pytest.fixture
def body():
    return make_finished_body()


def test_every_test_has_a_section_with_its_outcome_and_reasons(body):
    text = render_transfer(body)
    headings = (
        "Learning rate over width",
        "Learning rate over duration",
        "Clip norm over width",
        "Warmup fraction over width",
    )
    for heading, test in zip(headings, body["transfer"]["tests"], strict=True):
        section = text.split(heading)[1]
        assert section.strip().startswith("holds")
        assert "; ".join(test["verdict"]["reasons"]).replace("−", "-") in section
    assert "What would decide it" not in text


def test_values_for_the_target_name_the_axes_of_their_tests(body):
    text = render_transfer(body).split("Values for the target")[1]
    section = text.split("Learning rate over width")[0]
    value = body["transfer"]["values"][0]
    for phrase in (
        f"{value['base_value']:.4g}",
        f"{value['target_value']:.4g}",
        "width, duration",
        "clip norm: unchanged. Not tested over duration",
    ):
        assert phrase in section
    untested = render_transfer(make_unusual_body("undecided")).split("Values for the target")[1]
    assert "weight decay 0.1 0.1 not tested" in untested
    assert "as it is. Not tested over width" in untested


def test_undecided_test_names_the_runs_that_would_decide_it():
    text = render_transfer(make_unusual_body("undecided"))
    assert "What would decide it" in text
    assert "run width 128 at 2^-5, 2^-4 (3 seeds each): " in text
    assert "64 – flat" in text and "128 – edge" in text and "128, control – edge" in text
