"""A study by Muon: two rates searched and tested, frozen by group, explained, rehearsed in small;
what is refused.
"""

import pytest
from tiny_study import PLAN, ask, forerun, write_corpus, write_plan

from launcher.frozen.launch_file import read_launch
from launcher.rehearsal.scaled_config import _implied
from launcher.study.study_folder import recorded_study
from sweeps.store.ledger import Ledger
from sweeps.store.view import StudyView

RATE, BESIDE = "learning_rate", "adamw_learning_rate"
MUON = PLAN.replace(
    "[proxy]",
    '[proxy]\noptimizer = "muon"\nadamw_weight_decay = 0.1\nrules = { muon_rate = "unit_rms" }',
)
MUON = MUON.replace("[search]", f"[search]\naxes = {{ {BESIDE} = [0.002, 0.06] }}")
MUON = MUON.replace('{ clip_norm = ["width"] }', f'{{ {BESIDE} = ["width"] }}')
GATES = ("coordinates", "transfer", "fit", "data", "ladder_tuned")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A finished study, frozen."""
    here = tmp_path_factory.mktemp("muon")
    run = ("run", write_plan(here, MUON), "--study", here / "study")
    code, answer = ask(*run)
    # so small a study may drift, and a drift that nobody accepted ends it before the ladder
    if code == 3:
        ask("freeze", here / "study", "--accept", "transfer", "--reason", "planted")
        code, answer = ask(*run)
    assert code in (0, 3, 4), answer
    return here


@pytest.fixture(scope="module")
def config(folder):
    accepted = [part for gate in GATES for part in ("--accept", gate)]
    code, answer = ask("freeze", folder / "study", *accepted, "--reason", "planted")
    assert code == 0, answer
    (found,) = (folder / "study" / "frozen").iterdir()
    return found


def test_both_rates_are_searched_and_tested(folder):
    study, specs = (
        recorded_study(folder / "study"),
        [run.spec for run in Ledger.read(folder / "study").runs()],
    )
    assert {spec.optimizer for spec in specs} == {"muon"}
    assert {spec.parametrization.muon_rate for spec in specs} == {"unit_rms"}
    assert len({getattr(spec.hparams, BESIDE) for spec in specs}) > 4
    assert study.control.muon_width_power == 0.5
    _, body = ask("transfer", "--study", folder / "study", folder / "plan.toml")
    tested = {(test["hyperparameter"], test["axis"]) for test in body["tests"]}
    assert {(RATE, "width"), (RATE, "duration"), (BESIDE, "width")} == tested
    assert {RATE, BESIDE, "momentum", "adamw_weight_decay"} <= {
        row["hyperparameter"] for row in body["values"]
    }


def test_the_table_of_runs_has_its_hyperparameters_and_a_study_without_it_none(folder, finished):
    (muon, plain) = (StudyView(each / "study").table() for each in (folder, finished))
    assert set(muon["optimizer"].to_pylist()) == {"muon"}
    assert None not in muon[BESIDE].to_pylist()
    assert set(plain[BESIDE].to_pylist()) == set(plain["momentum"].to_pylist()) == {None}


def test_the_frozen_groups_are_stepped_by_the_one_or_the_other(config):
    decision = read_launch(config)
    muon = [group for group in decision.groups if group.optimizer == "muon"]
    assert {group.kind for group in muon} == {"hidden"}
    assert {group.kind for group in decision.groups if group.optimizer == "adamw"} >= {
        "embedding",
        "readout",
        "block_gain",
    }
    (readout,) = [group for group in decision.groups if group.kind == "readout"]
    assert readout.weight_decay == 0.1
    assert {group.weight_decay for group in muon} == {0.0}
    assert decision.optimizer == "muon"


def test_a_small_copy_has_the_studys_hyperparameters(config, folder):
    decision = read_launch(config)
    implied = _implied(decision)
    rates = {group.kind: group.learning_rate for group in decision.groups}
    assert implied.adamw_learning_rate == pytest.approx(rates["embedding"])
    square = next(g for g in decision.groups if g.optimizer == "muon" and "wq" in g.pattern)
    # unit_rms of a square matrix is 1
    assert implied.learning_rate == pytest.approx(square.learning_rate)
    assert (implied.momentum, implied.adamw_weight_decay) == (0.95, pytest.approx(0.1))


def test_explain_names_what_each_number_comes_from(config):
    code, body = ask("explain", config)
    assert code == 0
    told = {one["field"]: one for one in body["fields"]}
    keys = {name: [key["key"] for key in one["source"]["plan_keys"]] for name, one in told.items()}
    assert "search.learning_rate" in keys["groups.hidden.1.learning_rate"]
    assert f"search.axes.{BESIDE}" in keys["groups.embedding.learning_rate"]
    assert keys["groups.hidden.1.momentum"] == ["proxy.momentum"]
    assert keys["groups.readout.weight_decay"] == ["proxy.adamw_weight_decay"]
    assert "groups.hidden.1.beta2" not in told
    assert told["groups.hidden.1.optimizer"]["value"] == "muon"
    assert keys["parametrization.muon_rate"] == ["proxy.rules.muon_rate"]
    assert "groups.embedding.momentum" not in told


def test_the_law_of_its_rate_has_the_shape_and_the_depth(config):
    sets = ("--set", "muon_rate=unit_rms", "--set", "depth_alpha=0.5")
    _, body = ask("explain", "--parametrization", "completep", *sets)
    assert body["laws"]["hidden"]["learning_rate"] == "sqrt(r/c) m_L^-1/2"
    assert body["laws"]["hidden"]["weight_decay"] == "1 / (sqrt(r/c))"
    assert body["laws"]["hidden"]["weight_decay_share"] == "m_L^-1/2"


def test_a_trainer_that_has_none_refuses_it_by_name(config):
    code, _, error = forerun("export", config, "--to", "megatron-lm")
    assert code == 2
    assert "'muon'" in error


def test_init_writes_a_plan_for_it(tmp_path):
    write_corpus(tmp_path)
    plan = tmp_path / "plan.toml"
    assert ask("init", "--preset", "demo", "--optimizer", "muon", "--out", plan)[0] == 0
    code, body = ask("validate", plan)
    assert code == 0
    assert body["plan"]["proxy"]["optimizer"] == "muon"
    assert BESIDE in body["plan"]["search"]["axes"]
    assert body["plan"]["transfer"]["hyperparameters"][BESIDE] == ["width"]


@pytest.mark.parametrize(
    ("given", "key"),
    [
        (("proxy.momentum=0.9",), "proxy.momentum"),
        (('proxy.rules={muon_rate="original"}',), "proxy.rules.muon_rate"),
        ((f"search.axes={{{BESIDE}=[0.01, 0.1]}}",), f"search.axes.{BESIDE}"),
        (("proxy.optimizer=muon", 'proxy.rules={muon_rate="none"}'), "proxy.rules.muon_rate"),
        (("proxy.optimizer=muon", 'proxy.rules={weight_decay="root"}'), "proxy.rules"),
        (("proxy.optimizer=muon", "proxy.adamw_weight_decay=30"), "proxy.adamw_weight_decay"),
        (("proxy.optimizer=muon", "proxy.momentum=1"), "proxy.momentum"),
    ],
)
def test_what_does_not_fit_is_named_by_its_key(tmp_path, given, key):
    sets = [part for one in given for part in ("--set", one)]
    code, _, error = forerun("validate", write_plan(tmp_path), *sets)
    assert code == 2
    assert f"  {key}" in error
