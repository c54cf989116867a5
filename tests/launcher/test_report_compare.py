"""Two studies side by side: what differs is said with intervals, what cannot be compared is not
subtracted.
"""

import copy
import json
import math

import pytest
from example_report import finished_body
from markupsafe import escape
from test_report import HOSTILE, text_of, undrawn, unknown_numbers
from tiny_study import ask, forerun

from launcher.report.compare import comparability, compare_body, difference, sentences
from launcher.report.page import compare_page
from proxies.core import canon
from scaling_fits.forecast.conclusive import inconclusive

NAMES = ("first", "second")


@pytest.fixture
def a():
    return finished_body()


@pytest.fixture
def b():
    """Another study of the same data: its ladder lies lower, its widest optimum half an octave
    higher.
    """
    body = finished_body()
    body["ledger_head"] = "0" * 64
    body["question"]["search"]["seed"] = 4
    optimum = body["transfer"]["tests"][0]["verdict"]["optima"][-1]
    optimum["log2_value"] += 0.5
    optimum["interval_log2"] = [end + 0.5 for end in optimum["interval_log2"]]
    predicted = body["choice"]["prediction"]
    predicted["loss"] -= 0.02
    predicted["interval"] = [end - 0.02 for end in predicted["interval"]]
    return body


def compared(a, b):
    """As the page gets it: through JSON."""
    return canon.parse(canon.pretty(compare_body(a, b, NAMES)))


def shown_of(body):
    """What a reader reads, without the drawings."""
    return text_of(undrawn(body, compare_page))


def estimates(values, intervals):
    return [
        {"value": value, "interval": ends} for value, ends in zip(values, intervals, strict=True)
    ]


def test_a_difference_adds_the_arms_as_squares():
    found = difference(estimates((2.0, 1.0), ((1.7, 2.4), (0.6, 1.3))), (0.9, 0.9))
    assert found["value"] == -1.0
    assert found["interval"] == pytest.approx(
        [-1.0 - math.hypot(0.4, 0.4), -1.0 + math.hypot(0.3, 0.3)]
    )
    assert found["apart"]
    assert not difference(estimates((2.0, 1.9), ((1.7, 2.4), (0.6, 2.3))), (0.9, 0.9))["apart"]


def test_coverage_of_the_difference():
    """Nine of ten intervals hold the truth, for normal estimates with unlike errors."""
    import numpy as np

    rng, held, num_draws, z = np.random.default_rng(0), 0, 2000, 1.6449
    for _ in range(num_draws):
        x, y = rng.normal(0.0, 1.0), rng.normal(0.7, 0.3)
        both = estimates((x, y), ((x - z, x + z), (y - 0.3 * z, y + 0.3 * z)))
        low, high = difference(both, (0.9, 0.9))["interval"]
        held += low <= 0.7 <= high
    assert abs(held / num_draws - 0.9) < 0.02


@pytest.mark.parametrize(
    ("values", "intervals", "levels"),
    [
        ((1.0, 2.0), (None, (1.0, 3.0)), (0.9, 0.9)),
        ((1.0, 2.0), ((0.5, 1.5), (1.0, 3.0)), (0.9, 0.8)),
        ((None, 2.0), (None, (1.0, 3.0)), (0.9, 0.9)),
    ],
)
def test_what_lacks_an_interval_or_has_another_level_gets_none(values, intervals, levels):
    found = difference(estimates(values, intervals), levels)
    assert found["interval"] is None and found["apart"] is None
    assert found["value"] == (None if None in values else 1.0)


def test_differences_stand_on_top_with_their_intervals(a, b):
    body = compared(a, b)
    said = sentences(body)
    forecast = body["forecast"]["difference_nats"]
    assert forecast["value"] == pytest.approx(-0.02) and not forecast["apart"]
    assert "-0.0200 nats [-0." in said[0]
    assert any("width 128" in one and "+0.50 octaves [" in one for one in said), said
    assert [row["key"] for row in body["question"]] == ["search.seed"]
    top = shown_of(body).split("What can be compared")[0]
    for one in said:
        assert one[1:] in top


def test_an_inconclusive_forecast_is_said_to_be_so_before_its_number(a, b):
    (doubt,) = inconclusive(("the fit gate cannot tell",))
    b["choice"]["prediction"]["warnings"] = [doubt, "another"]
    body = compared(a, b)
    said = sentences(body)
    assert said[0] == f"B: {doubt}" and "expected loss" in said[1]
    top, forecast = (
        shown_of(body).split("The main runs")[0],
        shown_of(body).split("The main runs")[-1],
    )
    assert doubt in top and doubt in forecast.split("expected loss")[0]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"tokenizer": "gpt2"}, "tokenizers"),
        ({"vocab_size": 512}, "vocabularies"),
        ({}, "different texts"),
    ],
)
def test_losses_of_other_data_are_not_subtracted(a, b, change, why):
    a["corpus"]["vocab_size"] = b["corpus"]["vocab_size"] = 256
    b["corpus"] |= {"data_id": "f" * 64, **change}
    body = compared(a, b)
    assert body["comparable"]["losses"]["comparable"] == "no"
    assert why in body["comparable"]["losses"]["reasons"][0]
    assert body["forecast"]["difference_nats"] is None
    assert all(test["regret_nats"]["difference"] is None for test in body["tests"])
    assert why in sentences(body)[0]
    assert "not comparable" in text_of(compare_page(body))


@pytest.mark.parametrize(("key", "value"), [("base_width", 64), ("parametrization", "sp")])
def test_values_of_another_base_are_not_subtracted(a, b, key, value):
    found = comparability(
        a, b | {"question": b["question"] | {"proxy": b["question"]["proxy"] | {key: value}}}
    )
    assert found["values"]["comparable"] == "no" and found["losses"]["comparable"] == "yes"
    b["question"]["proxy"][key] = value
    assert all(
        row["difference_octaves"] is None
        for test in compared(a, b)["tests"]
        for row in test["optima"]
    )


def test_a_study_beside_itself_differs_in_nothing(a):
    body = compared(a, copy.deepcopy(a))
    assert body["same_study"]
    found = body["forecast"]["difference_nats"]
    assert (found["value"], found["apart"]) == (0.0, False)
    assert "not distinguished" in shown_of(body), "and it has a page"


def test_every_number_on_the_page_is_in_the_json(a, b):
    body = compared(a, b)
    # Ends of an optimum's interval are drawn from their octaves; the page's captions name the
    # sides.
    assert unknown_numbers(compare_page(body), body | {"transfer": None}) == []
    planted = compare_page(body).replace("</h1>", " 0.31337</h1>")
    assert unknown_numbers(planted, body | {"transfer": None}) == ["0.31337"]


def test_what_studies_say_is_escaped(a, b):
    b["question"]["note"] = HOSTILE
    b["corpus"]["tokenizer"] = HOSTILE
    source = undrawn(canon.parse(canon.pretty(compare_body(a, b, (HOSTILE, "b")))), compare_page)
    assert "<script" not in source and source.count(str(escape(HOSTILE))) >= 3


def test_the_verb_compares_a_study_with_a_report(finished, tmp_path, b):
    study = finished / "study"
    other = tmp_path / "other"
    other.mkdir()
    (other / "report.json").write_bytes(canon.pretty(b))
    code, body = ask("report", "--compare", study, other / "report.json", "--out", tmp_path / "out")
    assert code == 0
    assert json.loads((tmp_path / "out" / "compare.json").read_text()) == body
    assert [of["name"] for of in body["studies"].values()] == ["study", "report.json"]
    report = json.loads((study / "report.json").read_text())
    assert body["studies"]["a"]["ledger_head"] == report["ledger_head"]
    assert body["comparable"]["losses"]["comparable"] == "no"
    code, out, _ = forerun(
        "report", "--compare", study / "report.json", study / "report.json", "--out", tmp_path
    )
    assert code == 0 and "nothing differs" in out and "compare.html" in out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--compare", "none", "bad.json"), ("none: No such file", "bad.json: not JSON")),
        (("--compare", "empty", "half.json"), ("empty: No such file", "half.json: not a report")),
        (("study", "--compare", "a", "b"), ("leave out STUDY study",)),
        (("--out", "here"), ("--compare A B",)),
        (("--compare", "a"), ("--compare",)),
    ],
)
def test_the_verb_names_every_problem(tmp_path, monkeypatch, arguments, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    for name, text in (("bad.json", "{nan"), ("half.json", '{"schema_version": 1}')):
        (tmp_path / name).write_text(text)
    before = sorted(tmp_path.iterdir())
    code, out, err = forerun("report", *arguments)
    assert code == 2 and "Traceback" not in err
    for one in said:
        assert one in err + out
    assert sorted(tmp_path.iterdir()) == before, "nothing was written"
