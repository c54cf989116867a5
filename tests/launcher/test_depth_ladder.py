"""A ladder whose depth grows: by a rule and by a grid, from the plan to the report; what is
refused.
"""

import pytest
from tiny_study import PLAN, ask, forerun, write_corpus, write_plan

from launcher.experiments.ladder import ladder_runs
from launcher.plan.file import load_plan
from launcher.study.study_folder import plan_study
from sweeps.store.ledger import Ledger

COMPLETEP = PLAN.replace("[proxy]", '[proxy]\nparametrization = "completep"').replace(
    "check_num_seeds = 2", "check_num_seeds = 2\ncheck_depths = []\n"
)
GRID = COMPLETEP.replace("[ladder]", "[ladder]\ndepths = [1, 2, 4]")
RULED = "proxy.parametrization=completep"
RULE = COMPLETEP.replace("[ladder]", "[ladder]\nwidth_per_layer = 8")


def shapes(folder, text):
    study = plan_study(write_plan(folder, text), folder / "study")
    rungs = ladder_runs(study, {"learning_rate": 0.01, "clip_norm": 1.0, "warmup_fraction": 0.1})
    return study, {(spec.shape.width, spec.shape.num_layers) for spec in rungs}


def test_a_rule_and_a_grid_make_the_rungs(tmp_path):
    (tmp_path / "rule").mkdir()
    (tmp_path / "grid").mkdir()
    rule, by_rule = shapes(tmp_path / "rule", RULE)
    grid, by_grid = shapes(tmp_path / "grid", GRID)
    assert by_rule == {(8, 1), (16, 2), (24, 3)}
    assert by_grid == {(width, depth) for width in (8, 16, 24) for depth in (1, 2, 4)}
    for study in (rule, grid):
        # the transfer test has a depth axis, which the plan did not name
        assert study.plan.tested_depths == (1, 2)
        guess = study.target_shape_guess
        assert guess.num_layers == max(1, round(guess.width / 8))


def test_a_plan_that_names_neither_asks_what_it_asked(tmp_path):
    question = load_plan(write_plan(tmp_path)).question()
    assert not {"depths", "width_per_layer"} & set(question["ladder"])


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("ladder.depths=[1,2]",), "has no depth rule"),
        (
            ("proxy.parametrization=completep", "ladder.depths=[1,2]", "ladder.width_per_layer=8"),
            "ladder.width_per_layer",
        ),
        (
            ("proxy.parametrization=completep", "ladder.depths=[1,2]", "transfer.depths=[2,4]"),
            "transfer.depths",
        ),
    ],
)
def test_what_does_not_fit_is_named(tmp_path, given, said):
    sets = [part for one in given for part in ("--set", one)]
    code, _, error = forerun("validate", write_plan(tmp_path), *sets)
    assert code == 2
    assert said in error


@pytest.fixture(scope="module")
def study_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("grid")
    code, answer = ask("run", write_plan(folder, GRID), "--study", folder / "study")
    assert code in (0, 3, 4), answer
    return folder / "study"


def test_the_grids_study_chooses_width_and_depth_and_says_what_others_cost(study_dir):
    code, body = ask("report", study_dir)
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
    assert (
        'id="aspect"' in (study_dir / "report.html").read_text()
        or "aspect" in (study_dir / "report.html").read_text()
    )


def test_rates_are_carried_over_depth_by_the_rule(study_dir):
    specs = [run.spec for run in Ledger.read(study_dir).runs()]
    deep = [spec for spec in specs if spec.shape.num_layers == 4]
    assert deep and {spec.parametrization.depth_alpha for spec in deep} == {1.0}
    assert {spec.ratios.depth for spec in deep} == {4.0}


def test_init_needs_no_corpus_for_it(tmp_path):
    write_corpus(tmp_path)
    plan = tmp_path / "plan.toml"
    code, body = ask(
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
