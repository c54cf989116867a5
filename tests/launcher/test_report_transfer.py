"""The report's sections on transfer: every test has one, whatever came out."""

import html

import pytest
from example_report import finished_body
from odd_transfer import NAMES, odd_body
from test_report import text_of

from launcher.report.transfer import transfer


@pytest.fixture
def body():
    return finished_body()


def test_every_test_has_a_section_with_its_outcome_and_reasons(body):
    source = transfer(body)
    shown = text_of(source)
    for heading, test in zip(
        ("Learning rate over width", "Learning rate over duration", "Clip norm over width",
         "Warmup fraction over width"), body["transfer"]["tests"], strict=True,
    ):  # fmt: skip
        part = shown.split(heading)[1]
        assert part.strip().startswith("holds")
        assert "; ".join(test["verdict"]["reasons"]).replace("−", "-") in part
    assert "What would decide it" not in shown


def test_the_values_say_what_they_rest_on(body):
    shown = text_of(transfer(body)).split("Values for the target")[1].split("Learning rate over width")[0]
    value = body["transfer"]["values"][0]
    for said in (f"{value['base_value']:.4g}", f"{value['target_value']:.4g}", "tested over width and duration",
                 "unchanged; tested over width, not over duration"):  # fmt: skip
        assert said in shown
    untested = text_of(transfer(odd_body("undecided"))).split("Values for the target")[1]
    assert "as it is; not tested" in untested


def test_what_would_decide_is_said_where_a_test_cannot_tell():
    source = transfer(odd_body("undecided"))
    assert "What would decide it" in source
    assert "run width 128 at 2^-5, 2^-4 (3 seeds each): " in source
    assert "flat within the noise at width 64" in source
    assert "best at the edge of the values tried at width 128" in source


def test_bounded_tests_say_what_they_are_held_against(body):
    shown = text_of(transfer(body)).split("Clip norm over width")[-1].split("Warmup fraction over width")[0]
    assert "the best of the values tried, [0.143, 2.29], not an optimum" in shown
    assert "The optimum against size" not in shown, "no drift to draw"


@pytest.mark.parametrize("name", NAMES)
def test_no_section_says_none(name):
    source = transfer(odd_body(name))
    assert "None" not in source and "nan " not in source
    assert source.count("<section") == 1 + len(odd_body(name)["transfer"]["tests"])


def test_a_study_with_width_only_has_one_test(body):
    body["transfer"]["tests"] = body["transfer"]["tests"][:1]
    source = transfer(body)
    assert source.count("<section") == 2
    assert "over duration" not in text_of(source).split("Learning rate over width")[1]


def test_before_its_runs_have_ended_the_section_says_how_to_run_them(body):
    body["transfer"] = None
    body["progress"]["transfer"] = [3, 40]
    assert "3 of 40 runs are done. forerun transfer PLAN" in " ".join(text_of(transfer(body)).split())


def test_reasons_are_escaped(body):
    body["transfer"]["tests"][2]["verdict"]["reasons"] = ["<b>&"]
    body["transfer"]["tests"][2]["verdict"]["what_to_run"] = [
        {"axis": "width", "hyperparameter": "clip_norm", "size": 64, "log2_value": 0.0, "num_seeds": 1,
         "reason": "<i>", "text": "run: <i>"}
    ]  # fmt: skip
    source = transfer(body)
    assert "<i>" not in source and html.escape("<i>") in source and html.escape("<b>&") in source
