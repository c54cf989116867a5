"""The report's sections on transfer: every test has one, whatever came out."""

import pytest
from example_report import finished_body
from odd_transfer import odd_body
from test_report import part_of, text_of


def transfer(body):
    return part_of("transfer", body)


@pytest.fixture
def body():
    return finished_body()


def test_every_test_has_a_section_with_its_outcome_and_reasons(body):
    source = transfer(body)
    shown = text_of(source)
    for heading, test in zip(
        (
            "Learning rate over width",
            "Learning rate over duration",
            "Clip norm over width",
            "Warmup fraction over width",
        ),
        body["transfer"]["tests"],
        strict=True,
    ):
        part = shown.split(heading)[1]
        assert part.strip().startswith("holds")
        assert "; ".join(test["verdict"]["reasons"]).replace("−", "-") in part
    assert "What would decide it" not in shown


def test_the_values_say_what_they_rest_on(body):
    shown = (
        text_of(transfer(body))
        .split("Values for the target")[1]
        .split("Learning rate over width")[0]
    )
    value = body["transfer"]["values"][0]
    for said in (
        f"{value['base_value']:.4g}",
        f"{value['target_value']:.4g}",
        "width, duration",
        "clip norm: unchanged. Not tested over duration",
    ):
        assert said in shown
    untested = text_of(transfer(odd_body("undecided"))).split("Values for the target")[1]
    assert (
        "weight decay 0.1 0.1 not tested" in untested
        and "as it is. Not tested over width" in untested
    )


def test_what_would_decide_is_said_where_a_test_cannot_tell():
    shown = text_of(transfer(odd_body("undecided")))
    assert "What would decide it" in shown
    assert "run width 128 at 2^-5, 2^-4 (3 seeds each): " in shown
    assert "64 – flat" in shown and "128 – edge" in shown and "128, control – edge" in shown
