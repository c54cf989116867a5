"""Tests of a study with Muon: both learning rates are searched and tested, frozen by group,
explained, and scaled down for a rehearsal; wrong plans are refused.
"""

import pytest
from tiny_study import PLAN, run_forerun, run_json, write_corpus, write_plan

from forerun._launcher.main_run.frozen.launch_file import read_launch
from forerun._launcher.main_run.rehearsal.scaled_config import _infer_hparams
from forerun._launcher.study.stages.study_folder import read_recorded_study
from forerun._sweeps.store.ledger import Ledger
from forerun._sweeps.store.view import StudyView

RATE, ADAMW_RATE = "learning_rate", "adamw_learning_rate"
"""Muon's learning rate for hidden matrices, and AdamW's for all other parameters."""
MUON = PLAN.replace(
    "[proxy]",
    '[proxy]\noptimizer = "muon"\nadamw_weight_decay = 0.1\nrules = { muon_rate = "unit_rms" }',
)
MUON = MUON.replace("[search]", f"[search]\naxes = {{ {ADAMW_RATE} = [0.002, 0.06] }}")
MUON = MUON.replace('{ clip_norm = ["width"] }', f'{{ {ADAMW_RATE} = ["width"] }}')
GATES = ("coordinates", "transfer", "fit", "data", "ladder_tuned")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folder of a finished study."""
    folder = tmp_path_factory.mktemp("muon")
    run = ("run", write_plan(folder, MUON), "--study", folder / "study")
    code, answer = run_json(*run)
    # So small a study may drift; a drift that is not accepted ends it before the ladder.
    if code == 3:
        run_json("freeze", folder / "study", "--accept", "transfer", "--reason", "planted")
        code, answer = run_json(*run)
    assert code in (0, 3, 4), answer
    return folder


@pytest.fixture(scope="module")
def config(folder):
    """The folder of the study's frozen config."""
    accepted = [part for gate in GATES for part in ("--accept", gate)]
    code, answer = run_json("freeze", folder / "study", *accepted, "--reason", "planted")
    assert code == 0, answer
    (frozen,) = (folder / "study" / "frozen").iterdir()
    return frozen


def test_both_rates_are_searched_and_tested(folder):
    study = read_recorded_study(folder / "study")
    specs = [run.spec for run in Ledger.read(folder / "study").read_runs()]
    assert {spec.optimizer for spec in specs} == {"muon"}
    assert {spec.parametrization.muon_rate for spec in specs} == {"unit_rms"}
    assert len({getattr(spec.hparams, ADAMW_RATE) for spec in specs}) > 4
    assert study.control.muon_width_power == 0.5
    _, body = run_json("transfer", "--study", folder / "study", folder / "plan.toml")
    tested = {(test["hyperparameter"], test["axis"]) for test in body["tests"]}
    assert {(RATE, "width"), (RATE, "duration"), (ADAMW_RATE, "width")} == tested
    assert {RATE, ADAMW_RATE, "momentum", "adamw_weight_decay"} <= {
        row["hyperparameter"] for row in body["values"]
    }


def test_table_of_runs_has_muons_hyperparameters_only_with_muon(folder, finished_study_dir):
    muon, plain = (StudyView(study / "study").table() for study in (folder, finished_study_dir))
    assert set(muon["optimizer"].to_pylist()) == {"muon"}
    assert None not in muon[ADAMW_RATE].to_pylist()
    assert set(plain[ADAMW_RATE].to_pylist()) == set(plain["momentum"].to_pylist()) == {None}


def test_frozen_groups_name_muon_or_adamw(config):
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


def test_hyperparameters_inferred_for_a_rehearsal_equal_the_studys(config):
    decision = read_launch(config)
    inferred = _infer_hparams(decision)
    rates = {group.kind: group.learning_rate for group in decision.groups}
    assert inferred.adamw_learning_rate == pytest.approx(rates["embedding"])
    square = next(g for g in decision.groups if g.optimizer == "muon" and "wq" in g.pattern)
    # The factor of unit_rms is 1 for a square matrix.
    assert inferred.learning_rate == pytest.approx(square.learning_rate)
    assert (inferred.momentum, inferred.adamw_weight_decay) == (0.95, pytest.approx(0.1))


def test_explain_names_the_plan_keys_of_each_number(config):
    code, body = run_json("explain", config)
    assert code == 0
    fields = {field["field"]: field for field in body["fields"]}
    keys = {
        name: [key["key"] for key in field["source"]["plan_keys"]] for name, field in fields.items()
    }
    assert "search.learning_rate" in keys["groups.hidden.1.learning_rate"]
    assert f"search.axes.{ADAMW_RATE}" in keys["groups.embedding.learning_rate"]
    assert keys["groups.hidden.1.momentum"] == ["proxy.momentum"]
    assert keys["groups.readout.weight_decay"] == ["proxy.adamw_weight_decay"]
    assert "groups.hidden.1.beta2" not in fields
    assert fields["groups.hidden.1.optimizer"]["value"] == "muon"
    assert keys["parametrization.muon_rate"] == ["proxy.rules.muon_rate"]
    assert "groups.embedding.momentum" not in fields


def test_explained_law_of_muons_rate_names_shape_and_depth():
    sets = ("--set", "muon_rate=unit_rms", "--set", "depth_alpha=0.5")
    _, body = run_json("explain", "--parametrization", "completep", *sets)
    assert body["laws"]["hidden"]["learning_rate"] == "sqrt(r/c) m_L^-1/2"
    assert body["laws"]["hidden"]["weight_decay"] == "1 / (sqrt(r/c))"
    assert body["laws"]["hidden"]["weight_decay_share"] == "m_L^-1/2"


def test_export_to_a_trainer_without_muon_is_refused(config):
    code, _, error = run_forerun("export", config, "--to", "megatron-lm")
    assert code == 2
    assert "'muon'" in error


def test_init_writes_a_plan_with_muon(tmp_path):
    write_corpus(tmp_path)
    plan = tmp_path / "plan.toml"
    assert run_json("init", "--preset", "demo", "--optimizer", "muon", "--out", plan)[0] == 0
    code, body = run_json("validate", plan)
    assert code == 0
    assert body["plan"]["proxy"]["optimizer"] == "muon"
    assert ADAMW_RATE in body["plan"]["search"]["axes"]
    assert body["plan"]["transfer"]["hyperparameters"][ADAMW_RATE] == ["width"]


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (("proxy.momentum=0.9",), "proxy.momentum"),
        (('proxy.rules={muon_rate="original"}',), "proxy.rules.muon_rate"),
        ((f"search.axes={{{ADAMW_RATE}=[0.01, 0.1]}}",), f"search.axes.{ADAMW_RATE}"),
        (("proxy.optimizer=muon", 'proxy.rules={muon_rate="none"}'), "proxy.rules.muon_rate"),
        (("proxy.optimizer=muon", 'proxy.rules={weight_decay="root"}'), "proxy.rules"),
        (("proxy.optimizer=muon", "proxy.adamw_weight_decay=30"), "proxy.adamw_weight_decay"),
        (("proxy.optimizer=muon", "proxy.momentum=1"), "proxy.momentum"),
    ],
)
def test_key_that_does_not_fit_the_optimizer_is_named(tmp_path, overrides, key):
    sets = [word for override in overrides for word in ("--set", override)]
    code, _, error = run_forerun("validate", write_plan(tmp_path), *sets)
    assert code == 2
    assert f"  {key}" in error
