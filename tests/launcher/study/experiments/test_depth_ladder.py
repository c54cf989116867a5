"""Tests of a ladder (the small runs that a scaling law is fitted to) whose depth follows a rule or
a grid, from the plan to the report, and of plans with conflicting keys.
"""

import pytest
from tiny_study import PLAN, run_forerun, run_json, write_corpus, write_plan

from forerun._launcher.study.experiments.ladder import build_ladder
from forerun._launcher.study.plan.file import load_plan
from forerun._launcher.study.stages.study_folder import read_study
from forerun._sweeps.store.ledger import Ledger

COMPLETEP = PLAN.replace("[proxy]", '[proxy]\nparametrization = "completep"').replace(
    "check_num_seeds = 2", "check_num_seeds = 2\ncheck_depths = []\n"
)
"""The tiny plan in a parametrization with a depth rule, without the coordinate check over depth."""
GRID = COMPLETEP.replace("[ladder]", "[ladder]\ndepths = [1, 2, 4]")
COMPLETEP_KEY = "proxy.parametrization=completep"
RULE = COMPLETEP.replace("[ladder]", "[ladder]\nwidth_per_layer = 8")


def build_rung_shapes(folder, text):
    """Return a plan's study and the widths and depths of its rungs."""
    study = read_study(write_plan(folder, text), folder / "study")
    rungs = build_ladder(study, {"learning_rate": 0.01, "clip_norm": 1.0, "warmup_fraction": 0.1})
    return study, {(spec.shape.width, spec.shape.num_layers) for spec in rungs}


def test_depths_of_the_rungs_follow_the_rule_or_the_grid(tmp_path):
    (tmp_path / "rule").mkdir()
    (tmp_path / "grid").mkdir()
    rule, by_rule = build_rung_shapes(tmp_path / "rule", RULE)
    grid, by_grid = build_rung_shapes(tmp_path / "grid", GRID)
    assert by_rule == {(8, 1), (16, 2), (24, 3)}
    assert by_grid == {(width, depth) for width in (8, 16, 24) for depth in (1, 2, 4)}
    for study in (rule, grid):
        # The transfer test gets a depth axis that the plan does not name.
        assert study.plan.tested_depths == (1, 2)
        guess = study.target_shape_guess
        assert guess.num_layers == max(1, round(guess.width / 8))


def test_question_of_a_plan_without_depths_is_unchanged(tmp_path):
    """A plan's question is the part that decides what is measured. With new keys in it, studies
    that began before these keys existed could not continue.
    """
    question = load_plan(write_plan(tmp_path)).to_question()
    assert not {"depths", "width_per_layer"} & set(question["ladder"])


@pytest.mark.parametrize(
    ("overrides", "word"),
    [
        (("ladder.depths=[1,2]",), "has no depth rule"),
        (
            (COMPLETEP_KEY, "ladder.depths=[1,2]", "ladder.width_per_layer=8"),
            "ladder.width_per_layer",
        ),
        ((COMPLETEP_KEY, "ladder.depths=[1,2]", "transfer.depths=[2,4]"), "transfer.depths"),
    ],
)
def test_keys_that_conflict_with_depths_are_named(tmp_path, overrides, word):
    sets = [part for override in overrides for part in ("--set", override)]
    code, _, error = run_forerun("validate", write_plan(tmp_path), *sets)
    assert code == 2
    assert word in error


@pytest.fixture(scope="module")
def study_dir(tmp_path_factory):
    """The folder of a finished study with a grid of widths and depths."""
    folder = tmp_path_factory.mktemp("grid")
    code, answer = run_json("run", write_plan(folder, GRID), "--study", folder / "study")
    assert code in (0, 3, 4), answer
    return folder / "study"


def test_report_of_a_grid_has_the_best_aspect_ratio(study_dir):
    code, body = run_json("report", study_dir)
    assert code == 0
    rungs = body["ladder"]["rungs"]
    assert {(rung["width"], rung["num_layers"]) for rung in rungs} >= {(8, 4), (24, 1)}
    tests = {(test["hyperparameter"], test["axis"]) for test in body["transfer"]["tests"]}
    assert ("learning_rate", "depth") in tests
    aspect, shape = body["choice"]["aspect"], body["choice"]["shape"]
    assert aspect["width_per_layer"] == shape["width"] / shape["num_layers"]
    assert len(aspect["points"]) == len([rung for rung in rungs if rung["loss_nats"] is not None])
    low, high = aspect["best_interval"]
    assert 2.0 <= low <= aspect["best"] <= high <= 24.0
    if aspect["ends"]:
        assert aspect["ends"][0]["width"] <= shape["width"] <= aspect["ends"][1]["width"]
    assert "aspect" in (study_dir / "report.html").read_text()


def test_rungs_use_the_depth_rule(study_dir):
    specs = [run.spec for run in Ledger.read(study_dir).read_runs()]
    deep = [spec for spec in specs if spec.shape.num_layers == 4]
    assert deep and {spec.parametrization.depth_alpha for spec in deep} == {1.0}
    assert {spec.ratios.depth for spec in deep} == {4.0}


def test_init_accepts_a_depth_rule(tmp_path):
    write_corpus(tmp_path)
    plan = tmp_path / "plan.toml"
    code, body = run_json(
        "init",
        "--preset",
        "demo",
        "--out",
        plan,
        "--set",
        "proxy.parametrization=completep",
        "--set",
        "ladder.width_per_layer=16",
    )
    assert code == 0
    assert body["comes_to"]["num_layers"] == max(1, round(body["comes_to"]["width"] / 16))
