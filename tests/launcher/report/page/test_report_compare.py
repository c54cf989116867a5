"""Tests of `forerun report --compare`: differences of two studies, with intervals.

Values of studies that are not comparable must not be subtracted. In `compare.json`, the first study
is `a` and the second is `b`; every difference is b minus a.
"""

import copy
import json
import math

import pytest
from example_report import make_finished_body
from markupsafe import escape
from report_page import HOSTILE, extract_text, find_unknown_numbers, render_without_figures
from tiny_study import run_forerun, run_json

from forerun._launcher.report.page.compare import (
    compare_reports,
    describe_differences,
    judge_comparability,
    subtract_estimates,
)
from forerun._launcher.report.page.comparison import Comparison, Difference
from forerun._launcher.report.page.page import render_comparison
from forerun._launcher.report.views.report_model import to_report
from forerun._proxies.core import canon
from forerun._scaling_fits.forecast.conclusive import format_doubts

NAMES = ("first", "second")


@pytest.fixture
def first():
    """JSON of the first study's report."""
    return make_finished_body()


@pytest.fixture
def second():
    """JSON of the second study's report.

    The study has the same data, a lower forecast, and a higher optimum at width 128.
    """
    body = make_finished_body()
    body["ledger_head"] = "0" * 64
    body["question"]["search"]["seed"] = 4
    optimum = body["transfer"]["tests"][0]["verdict"]["optima"][-1]
    optimum["log2_value"] += 0.5
    optimum["interval_log2"] = [end + 0.5 for end in optimum["interval_log2"]]
    predicted = body["choice"]["prediction"]
    predicted["loss"] -= 0.02
    predicted["interval"] = [end - 0.02 for end in predicted["interval"]]
    return body


def compare(first, second, names=NAMES):
    """Compare two reports and return the JSON that the page is rendered from."""
    comparison = compare_reports(to_report(first), to_report(second), names)
    return canon.parse(canon.to_pretty_json(comparison.to_json()))


def describe(body):
    """Return the sentences about the differences."""
    return describe_differences(Comparison.model_validate(body))


def render_text(body):
    """Return the page's text without its figures."""
    return extract_text(render_without_figures(body, render_comparison))


def test_difference_adds_the_squares_of_the_interval_arms():
    difference = subtract_estimates((2.0, (1.7, 2.4)), (1.0, (0.6, 1.3)), same_level=True)
    assert difference.value == -1.0
    assert difference.interval == pytest.approx(
        (-1.0 - math.hypot(0.4, 0.4), -1.0 + math.hypot(0.3, 0.3))
    )
    assert difference.apart
    assert not subtract_estimates((2.0, (1.7, 2.4)), (1.9, (0.6, 2.3)), same_level=True).apart


def test_interval_of_a_difference_covers_the_truth_at_its_level():
    """The planted estimates are normal, with standard deviations of 1.0 and 0.3.

    The standard error of the share of covered draws is 0.007, and the seed is fixed.
    """
    import numpy as np

    rng = np.random.default_rng(0)
    z = 1.6449  # half width of a 90 % interval, in standard deviations
    true_difference = 0.7
    num_draws = 2000
    num_covered = 0
    for _ in range(num_draws):
        x, y = rng.normal(0.0, 1.0), rng.normal(true_difference, 0.3)
        estimates = (x, (x - z, x + z)), (y, (y - 0.3 * z, y + 0.3 * z))
        low, high = subtract_estimates(*estimates, same_level=True).interval
        num_covered += low <= true_difference <= high
    assert abs(num_covered / num_draws - 0.9) < 0.02


@pytest.mark.parametrize(
    ("first", "same_level", "value"),
    [((1.0, None), True, 1.0), ((1.0, (0.5, 1.5)), False, 1.0), (None, True, None)],
)
def test_difference_has_no_interval_without_two_intervals_of_one_level(first, same_level, value):
    difference = subtract_estimates(first, (2.0, (1.0, 3.0)), same_level=same_level)
    assert difference == Difference(value=value, interval=None, apart=None)


def test_page_begins_with_the_differences_and_their_intervals(first, second):
    body = compare(first, second)
    sentences = describe(body)
    forecast = body["forecast"]["difference_nats"]
    assert forecast["value"] == pytest.approx(-0.02) and not forecast["apart"]
    assert "-0.0200 nats [-0." in sentences[0]
    assert any(
        "width 128" in sentence and "+0.50 octaves [" in sentence for sentence in sentences
    ), sentences
    # `question` lists the plan keys in which the two studies differ.
    assert [row["key"] for row in body["question"]] == ["search.seed"]
    top = render_text(body).split("What can be compared")[0]
    for sentence in sentences:
        assert sentence[1:] in top, "the page may write the first letter as a capital"


def test_inconclusive_forecast_is_marked_before_its_number(first, second):
    (doubt,) = format_doubts(("the fit gate cannot tell",))
    second["choice"]["prediction"]["warnings"] = [doubt, "another"]
    body = compare(first, second)
    sentences = describe(body)
    assert sentences[0] == f"B: {doubt}" and "expected loss" in sentences[1]
    sections = render_text(body).split("The main runs")
    assert doubt in sections[0] and doubt in sections[-1].split("expected loss")[0]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"tokenizer": "gpt2"}, "tokenizers"),
        ({"vocab_size": 512}, "vocabularies"),
        ({}, "different texts"),
    ],
)
def test_losses_on_different_data_are_not_subtracted(first, second, change, reason):
    first["corpus"]["vocab_size"] = second["corpus"]["vocab_size"] = 256
    second["corpus"] |= {"data_id": "f" * 64, **change}
    body = compare(first, second)
    assert body["comparable"]["losses"]["comparable"] == "no"
    assert reason in body["comparable"]["losses"]["reasons"][0]
    assert body["forecast"]["difference_nats"] is None
    assert all(test["regret_nats"]["difference"] is None for test in body["tests"])
    assert reason in describe(body)[0]
    assert "not comparable" in extract_text(render_comparison(body))


@pytest.mark.parametrize(("key", "value"), [("base_width", 64), ("parametrization", "sp")])
def test_optima_of_different_bases_are_not_subtracted(first, second, key, value):
    second["question"]["proxy"][key] = value
    comparability = judge_comparability(to_report(first), to_report(second))
    assert comparability["values"].comparable == "no"
    assert comparability["losses"].comparable == "yes"
    for test in compare(first, second)["tests"]:
        assert all(row["difference_octaves"] is None for row in test["optima"])


def test_study_does_not_differ_from_itself(first):
    body = compare(first, copy.deepcopy(first))
    assert body["same_study"]
    difference = body["forecast"]["difference_nats"]
    assert (difference["value"], difference["apart"]) == (0.0, False)
    assert "not distinguished" in render_text(body)


def test_every_number_on_the_page_is_in_the_json(first, second):
    body = compare(first, second)
    # The comparison has no section `transfer`, which `find_unknown_numbers` reads.
    assert find_unknown_numbers(render_comparison(body), body | {"transfer": None}) == []
    planted = render_comparison(body).replace("</h1>", " 0.31337</h1>")
    assert find_unknown_numbers(planted, body | {"transfer": None}) == ["0.31337"]


def test_text_of_both_studies_is_escaped(first, second):
    second["question"]["note"] = HOSTILE
    second["corpus"]["tokenizer"] = HOSTILE
    source = render_without_figures(compare(first, second, (HOSTILE, "b")), render_comparison)
    assert "<script" not in source and source.count(str(escape(HOSTILE))) >= 3


def test_verb_compares_a_study_with_a_report(finished_study_dir, tmp_path, second):
    study = finished_study_dir / "study"
    second_report = tmp_path / "second" / "report.json"
    second_report.parent.mkdir()
    second_report.write_bytes(canon.to_pretty_json(second))
    code, body = run_json("report", "--compare", study, second_report, "--out", tmp_path / "out")
    assert code == 0
    assert json.loads((tmp_path / "out" / "compare.json").read_text()) == body
    names = [described["name"] for described in body["studies"].values()]
    assert names == ["study", "report.json"]
    report = json.loads((study / "report.json").read_text())
    assert body["studies"]["a"]["ledger_head"] == report["ledger_head"]
    assert body["comparable"]["losses"]["comparable"] == "no"
    code, out, _ = run_forerun(
        "report", "--compare", study / "report.json", study / "report.json", "--out", tmp_path
    )
    assert code == 0 and "nothing differs" in out and "compare.html" in out


@pytest.mark.parametrize(
    ("arguments", "messages"),
    [
        (("--compare", "none", "bad.json"), ("none: No such file", "bad.json: not JSON")),
        (("--compare", "empty", "half.json"), ("empty: No such file", "half.json: not a report")),
        (("study", "--compare", "a", "b"), ("leave out STUDY study",)),
        (("--out", "here"), ("--compare A B",)),
        (("--compare", "a"), ("--compare",)),
    ],
)
def test_verb_names_every_problem_and_writes_nothing(tmp_path, monkeypatch, arguments, messages):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    for name, text in (("bad.json", "{nan"), ("half.json", '{"schema_version": 1}')):
        (tmp_path / name).write_text(text)
    before = sorted(tmp_path.iterdir())
    code, out, err = run_forerun("report", *arguments)
    assert code == 2 and "Traceback" not in err
    for message in messages:
        assert message in err + out
    assert sorted(tmp_path.iterdir()) == before
