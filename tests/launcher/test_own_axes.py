"""Axes that a plan declares for its own trainer: searched, tested for transfer, refused where they
cannot be.
"""

import sys

import pytest
from tiny_study import ask, plan_with

# Best at muon_lr = 2^-4 at width 8 and half of it at twice the width, at lr = 2^-6 at every width,
# with 3 experts.
TRAINER = """
import json, math, os, sys
values = dict(pair.split("=") for pair in sys.argv[2:])
width, steps, seed = int(values["width"]), int(values["steps"]), int(values["seed"])
muon = math.log2(float(values["muon_lr"])) + 4 + math.log2(width / 8)
lr, experts = math.log2(float(values["lr"])) + 6, int(values["experts"])
loss = 1 + 8 / width + 3 / steps ** 0.5 + 0.05 * (lr * lr + muon * muon) + 0.02 * (experts - 3) ** 2
loss += 1e-4 * math.sin(1000 * seed + 77 * lr + 13 * muon) + 0.1 * (values["form"] == "worse")
with open(os.path.join(sys.argv[1], "metrics.jsonl"), "w") as out:
    for step in range(1, steps + 1):
        print(json.dumps({"step": step, "train_loss": loss + 1 / step}), file=out)
    print(json.dumps({"step": steps, "val_loss": loss}), file=out)
"""
PLAN = '''
[data]
path = ""
external = "planted"
vocab_size = 256
[proxy]
command = """%s -S trainer.py {run_dir} lr={lr} width={width} steps={num_steps} seed={seed}
  muon_lr={muon_lr} experts={experts} form={form}"""
[search]
num_trials = 24
num_startup = 16
axes = { muon_lr = { range = [0.01, 0.25], width = %s }, experts = { range = [1, 5], scale = "integer" }, \
form = { values = ["better", "worse"], scale = "categorical" } }
[transfer]
margin_nats = 0.015
widths = [8, 16, 32]
hyperparameters = { muon_lr = ["width"] }
hyperparameter_offsets_octaves = [-2.0, -1.0, 0.0, 1.0]
[target]
budget_flops = 1e10
'''  # noqa: E501


def study(folder, power, verb="transfer"):
    (folder / "trainer.py").write_text(TRAINER)
    plan = plan_with(folder, PLAN % (sys.executable, power))
    return ask(verb, plan, "--study", folder / "study")


def over_width(body, name):
    return next(
        t["verdict"] for t in body["tests"] if t["hyperparameter"] == name and t["axis"] == "width"
    )


@pytest.fixture(scope="module")
def scaled(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scaled")
    code, body = study(folder, -1.0, "run")
    assert code == 0, body
    return folder, body


def test_two_rates_are_searched_and_tested_together(scaled):
    _, body = scaled
    best = body["search"]["best"]
    assert best["experts"] in (2, 3, 4) and best["form"] == 0
    # the trainer gets no clip and no warmup
    assert best.keys() == {"learning_rate", "muon_lr", "experts", "form"}
    for name, place in (("muon_lr", -4), ("learning_rate", -6)):
        verdict = over_width(body["transfer"], name)
        assert verdict["outcome"] == "holds", verdict
        assert all(abs(optimum["log2_value"] - place) < 0.5 for optimum in verdict["optima"])
    (pair,) = body["transfer"]["pairs"]
    assert pair["hyperparameters"] == ["learning_rate", "muon_lr"] and pair["outcome"] == "holds", (
        pair
    )
    low, high = pair["correlation"]["interval"]
    assert low < 0 < high and high - low < 0.1, "neither moves the other's optimum"


def test_the_main_run_gets_values_at_its_own_size(scaled):
    folder, body = scaled
    width = body["choice"]["shape"]["width"]
    row = next(row for row in body["transfer"]["values"] if row["hyperparameter"] == "muon_lr")
    assert row["target_value"] == pytest.approx(row["base_value"] * 8 / width)
    line = body["own_run"]["line"]
    assert f"muon_lr={row['target_value']}" in line
    assert "form=better" in line and "experts=" in line
    page = (folder / "study" / "report.html").read_text()
    assert "muon lr" in page and ">better<" in page, "words are shown as words"


def test_rates_that_move_each_other_s_optimum_are_judged_as_a_pair(tmp_path):
    """r = 0.8: what is off at another width costs up to five times what the tests of each see."""
    global_trainer = TRAINER.replace(
        "lr * lr + muon * muon", "lr * lr + muon * muon + 1.6 * lr * muon"
    )
    (tmp_path / "trainer.py").write_text(global_trainer)
    _, body = ask(
        "transfer",
        plan_with(tmp_path, PLAN % (sys.executable, -1.0)),
        "--study",
        tmp_path / "study",
    )
    (pair,) = body["pairs"]
    assert pair["correlation"]["value"] == pytest.approx(0.8, abs=0.1), pair


def test_a_value_that_does_not_transfer_is_seen(tmp_path):
    _, body = study(tmp_path, 0.0)
    assert over_width(body, "muon_lr")["outcome"] == "drifts"
    assert over_width(body, "learning_rate")["outcome"] == "holds"


@pytest.mark.parametrize(
    ("axes", "named"),
    [
        ('{ muon_lr = { range = [0, 1], scale = "log" } }', "above 0"),
        ('{ muon_lr = { range = [0.5, 4], scale = "integer" } }', "whole"),
        ('{ muon_lr = { values = ["a"], scale = "categorical" } }', "two"),
        ("{ muon_lr = { range = [1, 2], values = [1, 2] } }", "categorical"),
        ("{ lr = [0.1, 0.2] }", "learning_rate"),
        ("{ width = [8, 16] }", "{width}"),
        ("{ learning_rate = [0.1, 0.2] }", "[search]"),
        ("{ weight_decay = { range = [0.1, 0.2] } }", "scale"),
        ("{ Muon = [0.1, 0.2] }", "lower case"),
        ("{ sigma = [0.1, 0.2] }", "{sigma}"),
    ],
)
def test_an_axis_that_cannot_be_is_refused(tmp_path, axes, named):
    (tmp_path / "trainer.py").write_text(TRAINER)
    plan = plan_with(tmp_path, PLAN % (sys.executable, 0.0))
    whole = axes if "muon_lr" in axes else axes.replace("{", "{ muon_lr = [0.1, 0.2], ", 1)
    whole = whole.replace("{", "{ experts = [1, 2], form = [1, 2], ", 1)
    code, body = ask(
        "transfer", plan, "--study", tmp_path / "study", "--set", f"search.axes={whole}"
    )
    assert code == 2
    assert any(named in problem for problem in body["problems"]), body


def test_forerun_s_own_model_knows_no_other_names(tmp_path):
    code, body = ask(
        "estimate", plan_with(tmp_path, "[search]\naxes = { weight_decy = [0.1, 0.2] }\n")
    )
    assert code == 2
    assert any("weight_decay" in problem for problem in body["problems"]), body
