"""Tests of search axes that a plan declares for the user's trainer.

The planted trainer is best at muon_lr = 2^-4 at width 8 and half of that at twice the width, at
lr = 2^-6 at every width, with 3 experts and form "better". The study must recover these values,
and the verdict must say whether each rate transfers.
"""

import sys

import pytest
from tiny_study import run_json, write_plan_with

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


def run_study(folder, *, power, verb="transfer"):
    """Run a verb on a study whose plan scales muon_lr with this power of the width."""
    (folder / "trainer.py").write_text(TRAINER)
    plan = write_plan_with(folder, PLAN % (sys.executable, power))
    return run_json(verb, plan, "--study", folder / "study")


def get_verdict_over_width(body, name):
    """Return the verdict of a hyperparameter's transfer over width."""
    (verdict,) = [
        test["verdict"]
        for test in body["tests"]
        if test["hyperparameter"] == name and test["axis"] == "width"
    ]
    return verdict


@pytest.fixture(scope="module")
def scaled_study(tmp_path_factory):
    """Folder and answer of a study whose plan scales muon_lr as the planted optimum moves."""
    folder = tmp_path_factory.mktemp("scaled")
    code, body = run_study(folder, power=-1.0, verb="run")
    assert code == 0, body
    return folder, body


def test_search_and_transfer_recover_both_planted_rates(scaled_study):
    _, body = scaled_study
    best = body["search"]["best"]
    # A category is stored as its index: 0 stands for "better".
    assert best["experts"] in (2, 3, 4) and best["form"] == 0
    # The trainer's command takes no clip norm and no warmup, so neither is searched.
    assert best.keys() == {"learning_rate", "muon_lr", "experts", "form"}
    for name, planted_log2 in (("muon_lr", -4), ("learning_rate", -6)):
        verdict = get_verdict_over_width(body["transfer"], name)
        assert verdict["outcome"] == "holds", verdict
        for optimum in verdict["optima"]:
            assert abs(optimum["log2_value"] - planted_log2) < 0.5


def test_main_run_gets_values_scaled_to_its_width(scaled_study):
    folder, body = scaled_study
    width = body["choice"]["shape"]["width"]
    row = next(row for row in body["transfer"]["values"] if row["hyperparameter"] == "muon_lr")
    assert row["target_value"] == pytest.approx(row["base_value"] * 8 / width)
    line = body["own_run"]["line"]
    assert f"muon_lr={row['target_value']}" in line
    assert "form=better" in line and "experts=" in line
    page = (folder / "study" / "report.html").read_text()
    assert "muon lr" in page and ">better<" in page, "categories are shown by name"


def test_rate_without_its_scaling_rule_drifts(tmp_path):
    _, body = run_study(tmp_path, power=0.0)
    assert get_verdict_over_width(body, "muon_lr")["outcome"] == "drifts"
    assert get_verdict_over_width(body, "learning_rate")["outcome"] == "holds"


@pytest.mark.parametrize(
    ("axes", "phrase"),
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
def test_invalid_axis_is_refused(tmp_path, axes, phrase):
    (tmp_path / "trainer.py").write_text(TRAINER)
    plan = write_plan_with(tmp_path, PLAN % (sys.executable, 0.0))
    # Complete the table: the command needs all three axes, and only one of them may be wrong.
    all_axes = axes if "muon_lr" in axes else axes.replace("{", "{ muon_lr = [0.1, 0.2], ", 1)
    all_axes = all_axes.replace("{", "{ experts = [1, 2], form = [1, 2], ", 1)
    code, body = run_json(
        "transfer", plan, "--study", tmp_path / "study", "--set", f"search.axes={all_axes}"
    )
    assert code == 2
    assert any(phrase in problem for problem in body["problems"]), body


def test_unknown_axis_of_the_built_in_model_gets_a_suggestion(tmp_path):
    code, body = run_json(
        "estimate", write_plan_with(tmp_path, "[search]\naxes = { weight_decy = [0.1, 0.2] }\n")
    )
    assert code == 2
    assert any("weight_decay" in problem for problem in body["problems"]), body
