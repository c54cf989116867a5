import json

import pytest
from planted_valleys import cpu_grid

from transfer.question import Question
from transfer.verdict.summary import verdict_summary
from transfer.verdict.verdict import judge

QUESTION = Question(target_size=256, base_size=64)


def test_the_summary_is_json_with_the_promised_keys():
    mup, sp = cpu_grid("mup", (32, 64, 128)), cpu_grid("sp", (64, 128, 256))
    found = verdict_summary(judge(mup, QUESTION, control_points=sp))
    json.dumps(found, allow_nan=False)
    promised = {
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
    assert promised <= found.keys()
    assert found["control"].keys() == found.keys()
    first = found["optima"][0]
    assert first["value"] == 2 ** first["log2_value"]
    lowest = min(first["curve"], key=lambda sample: sample[1])
    assert abs(lowest[0] - first["log2_value"]) < 0.2 and abs(lowest[1] - first["loss_nats"]) < 0.01


def test_what_is_not_known_is_null():
    found = verdict_summary(judge(cpu_grid("mup", (64,)), QUESTION))
    assert found["drift_octaves_per_doubling"] == {"value": None, "interval": None}
    assert found["regret_nats"] == {"value": None, "interval": None}


def test_powers_are_absolute_and_say_whether_they_were_measured():
    points = cpu_grid("mup", (32, 64, 128, 256))
    plain = Question(target_size=512, base_size=64, axis="batch", built_in=0.5)
    found = verdict_summary(judge(points, plain))
    assert (found["power"], found["power_is_measured"]) == (0.5, False)
    measured = Question(target_size=512, base_size=64, axis="batch", built_in=0.5, power=None)
    found = verdict_summary(judge(points, measured))
    assert found["power_is_measured"]
    assert found["power"] == pytest.approx(
        0.5 + found["drift_octaves_per_doubling"]["value"], abs=0.02
    )
