"""Tests of the JSON summary of a verdict."""

import json

import pytest
from planted_basins import list_cpu_points

from forerun._transfer.question import Question
from forerun._transfer.verdict.summary import summarize_verdict
from forerun._transfer.verdict.verdict import judge

QUESTION = Question(target_size=256, base_size=64)


def test_summary_is_json_with_the_documented_keys():
    mup, sp = list_cpu_points("mup", (32, 64, 128)), list_cpu_points("sp", (64, 128, 256))
    summary = summarize_verdict(judge(mup, QUESTION, control_points=sp))
    assert json.loads(json.dumps(summary, allow_nan=False)) == summary
    documented_keys = {
        "axis",
        "hyperparameter",
        "outcome",
        "drift_octaves_per_doubling",
        "offset_octaves",
        "regret_nats",
        "margin_nats",
        "level",
        "target_size",
        "base_size",
        "power",
        "power_is_measured",
        "transferred_value",
        "transferred_log2",
        "cost_of_2x_off_nats",
        "noise_nats",
        "optima",
        "values_tried",
        "control",
        "reasons",
        "what_to_run",
    }
    assert documented_keys <= summary.keys()
    assert summary["control"].keys() == summary.keys()
    first = summary["optima"][0]
    assert first["value"] == 2 ** first["log2_value"]
    lowest = min(first["curve"], key=lambda sample: sample[1])
    assert abs(lowest[0] - first["log2_value"]) < 0.2 and abs(lowest[1] - first["loss_nats"]) < 0.01


def test_suggestion_has_the_documented_keys():
    at_the_edge = [p for p in list_cpu_points("mup", (64, 128)) if p.log2_value <= -6]
    [suggestion, *_] = summarize_verdict(judge(at_the_edge, QUESTION))["what_to_run"]
    assert list(suggestion) == [
        "axis",
        "hyperparameter",
        "size",
        "log2_value",
        "num_seeds",
        "reason",
        "relative_cost",
        "value",
        "text",
    ]


def test_unknown_values_are_null():
    summary = summarize_verdict(judge(list_cpu_points("mup", (64,)), QUESTION))
    assert summary["drift_octaves_per_doubling"] == {"value": None, "interval": None}
    assert summary["regret_nats"] == {"value": None, "interval": None}


def test_power_includes_the_built_in_one_and_says_whether_it_was_measured():
    points = list_cpu_points("mup", (32, 64, 128, 256))
    plain = Question(target_size=512, base_size=64, axis="batch", built_in=0.5)
    summary = summarize_verdict(judge(points, plain))
    assert (summary["power"], summary["power_is_measured"]) == (0.5, False)
    measured = Question(target_size=512, base_size=64, axis="batch", built_in=0.5, power=None)
    summary = summarize_verdict(judge(points, measured))
    assert summary["power_is_measured"]
    assert summary["power"] == pytest.approx(
        0.5 + summary["drift_octaves_per_doubling"]["value"], abs=0.02
    )
