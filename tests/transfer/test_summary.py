import json

from planted_valleys import cpu_grid

from transfer.summary import verdict_summary
from transfer.verdict import judge


def test_the_summary_is_json_with_the_promised_keys():
    mup, sp = cpu_grid("mup", (32, 64, 128)), cpu_grid("sp", (64, 128, 256))
    found = verdict_summary(judge(mup, target_width=256, base_width=64, control_points=sp))
    json.dumps(found, allow_nan=False)
    promised = {
        "outcome", "drift_octaves_per_doubling", "regret_nats", "margin_nats", "level", "target_width", "base_width",
        "transferred_lr", "cost_of_2x_off_nats", "optima", "control", "reasons", "what_to_run",
    }  # fmt: skip
    assert promised <= found.keys()
    assert found["control"].keys() == found.keys()
    first = found["optima"][0]
    assert first["lr"] == 2 ** first["log2_lr"]
    lowest = min(first["curve"], key=lambda sample: sample[1])
    assert abs(lowest[0] - first["log2_lr"]) < 0.2 and abs(lowest[1] - first["loss_nats"]) < 1e-3


def test_what_is_not_known_is_null():
    found = verdict_summary(judge(cpu_grid("mup", (64,)), target_width=256, base_width=64))
    assert found["drift_octaves_per_doubling"] == {"value": None, "interval": None}
    assert found["regret_nats"] == {"value": None, "interval": None}
