"""Tests of the parameter groups of a decision, in launch files and in exports.

Each group names its optimizer and the optimizer's settings. The parity check of the embedded
trainer must notice a wrong optimizer. An export must refuse settings that its trainer cannot
express. A launch file of version 5, whose groups had another form, must be refused.
"""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import torch
from export_case import make_wide_decision
from main_run import make_decision, make_muon_spec
from tiny_study import run_json, set_gates
from user_trainer_case import make_user_decision

from forerun._launcher.main_run.exporters import fidelity
from forerun._launcher.main_run.exporters.export_checks import (
    ADAMW_AND_MUON,
    ADAMW_SETTINGS,
    ExportError,
    Expressible,
    list_inexpressible,
)
from forerun._launcher.main_run.exporters.fidelity import judge_fields
from forerun._launcher.main_run.exporters.registry import EXPORTER_MODULES, load_exporter
from forerun._launcher.main_run.exporters.trainers import native, torchtitan
from forerun._launcher.main_run.frozen.frozen import SCHEMA_VERSION, FrozenError, TamperedError
from forerun._launcher.main_run.frozen.launch_file import read_launch, write_launch
from forerun._launcher.main_run.trainer import model_builder
from forerun._proxies.core import canon
from forerun._proxies.core.checks import SpecError
from forerun._proxies.core.hyperparameters import HYPERPARAMETERS
from forerun._proxies.core.optimizers import OPTIMIZERS, RECIPES
from forerun._proxies.data.tokens import read_manifest
from forerun._proxies.model.optimizer import IMPLEMENTATIONS

GOLDENS = Path(__file__).parents[3] / "launcher" / "goldens"
VERSION_5_FILE = GOLDENS / "launch-5.json"


@pytest.fixture(scope="module")
def muon(corpus):
    """A decision whose hidden matrices are updated by Muon."""
    return make_decision(make_muon_spec(corpus), read_manifest(corpus))


def build_adamw(recipe, groups, *, fused=False):
    """Build AdamW at the frozen settings for every group, unlike `build_torch_optimizer`."""
    return torch.optim.AdamW(
        [
            {
                "params": list(parameters),
                "lr": group.learning_rate,
                "weight_decay": group.weight_decay,
            }
            for group, parameters in groups
        ]
    )


def build_adamw_groups(recipe, groups, *, fused=False):
    """Build the recipe's optimizer, but let AdamW update the hidden matrices."""
    options = {"betas": (0.9, 0.95), "eps": 1e-8}
    return IMPLEMENTATIONS[recipe].kind(
        [
            {
                "params": list(parameters),
                "lr": group.learning_rate,
                "weight_decay": group.weight_decay,
                **options,
            }
            for group, parameters in groups
        ]
    )


def test_native_parity_detects_a_wrong_optimizer(muon, monkeypatch):
    assert native.find_mismatches(muon) == []
    monkeypatch.setattr(model_builder, "build_torch_optimizer", build_adamw)
    assert any("AdamW" in problem and "Muon" in problem for problem in native.find_mismatches(muon))
    monkeypatch.setattr(model_builder, "build_torch_optimizer", build_adamw_groups)
    mismatches = native.find_mismatches(muon)
    assert "layers.0.attention.wq.weight: optimizer is 'adamw', frozen as 'muon'" in mismatches
    assert not any("embedding" in problem and "optimizer" in problem for problem in mismatches)


def test_every_recipe_has_an_implementation_and_known_hyperparameters():
    assert IMPLEMENTATIONS.keys() == RECIPES.keys()
    for recipe in RECIPES.values():
        assert all(name in HYPERPARAMETERS for name in recipe.hyperparameters)
        assert {spec.name for spec in recipe.optimizers} <= OPTIMIZERS.keys()


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"optimizer": "sgd"}, "optimizer = 'sgd': must be one of adamw, muon"),
        ({"optimizer": "muon"}, "settings of muon: missing momentum"),
        (
            {"settings": {"learning_rate": 1.0}},
            "settings of adamw: missing weight_decay, eps, beta1, beta2",
        ),
        ({"kind": "embedding", "optimizer": "muon"}, "cannot step parameters of kind embedding"),
    ],
)
def test_group_without_the_settings_of_its_optimizer_is_refused(muon, changes, problem):
    group = next(group for group in muon.groups if group.optimizer == "adamw")
    with pytest.raises(SpecError) as caught:
        dataclasses.replace(group, **changes)
    assert problem in "; ".join(caught.value.problems)


def test_group_with_an_optimizer_that_the_recipe_lacks_is_refused(muon):
    with pytest.raises(SpecError, match="has optimizer = 'muon': adamw has none but adamw"):
        dataclasses.replace(muon, optimizer="adamw")


def test_inexpressible_settings_are_refused_by_name(muon, tmp_path, monkeypatch):
    both = Expressible(optimizers=ADAMW_AND_MUON, run_wide=("clip_norm",))
    assert list_inexpressible(muon, both) == []
    problems = list_inexpressible(
        muon, Expressible(optimizers={"adamw": ADAMW_SETTINGS}, run_wide=())
    )
    assert ["'muon'" in problem or "clip_norm = 0.5" in problem for problem in problems] == [
        True,
        True,
    ]
    without_momentum = {**ADAMW_AND_MUON, "muon": ("learning_rate", "weight_decay")}
    fewer = Expressible(optimizers=without_momentum, run_wide=("clip_norm",))
    assert [problem.partition(":")[0] for problem in list_inexpressible(muon, fewer)] == [
        "momentum of muon"
    ]
    monkeypatch.setattr(
        torchtitan,
        "EXPRESSIBLE",
        Expressible(optimizers={"adamw": ADAMW_SETTINGS}, run_wide=("clip_norm",)),
    )
    with pytest.raises(ExportError, match="optimizer = 'muon'"):
        torchtitan.export(muon, tmp_path / "out")
    assert not (tmp_path / "out").exists()


RECORDS = (
    "",
    "shape",
    "learning_rate",
    "learning_rate.schedule",
    "parallelism",
    "abort",
    "spikes",
    "forward",
)
"""Records of a decision to which a test adds a field that no exporter knows. The empty name stands
for the decision itself."""


EACH_TRAINER = pytest.mark.parametrize("trainer", sorted(EXPORTER_MODULES))


def make_decision_for(trainer, manifest):
    """Return a decision that the exporter of a trainer accepts."""
    return make_user_decision() if trainer == "command" else make_wide_decision(manifest)


@EACH_TRAINER
def test_field_that_no_exporter_knows_is_lost(trainer, manifest, tmp_path, monkeypatch):
    decision = make_decision_for(trainer, manifest)
    export = load_exporter(trainer).export
    before = export(decision, tmp_path / "before")
    assert not [entry for entry in before.lost if "qk_norm" in entry.field]
    known = tuple(name for name in fidelity.KNOWN_FIELDS["shape"] if name != "qk_norm")
    with monkeypatch.context() as patch:
        patch.setattr(fidelity, "KNOWN_FIELDS", {**fidelity.KNOWN_FIELDS, "shape": known})
        lost = [entry.field for entry in export(decision, tmp_path / "after").lost]
    assert "shape.qk_norm" in lost and "shape.width" not in lost


@EACH_TRAINER
def test_invented_field_of_any_record_is_not_expressible(trainer, manifest, monkeypatch):
    decision, to_json = make_decision_for(trainer, manifest), canon.to_json

    def to_json_with_invented_fields(value, path="$"):
        body = to_json(value, path)
        if value is decision:
            for record in RECORDS:
                holder = body
                for name in filter(None, record.split(".")):
                    holder = holder[name]
                holder["invented"] = 1
            for group in body["groups"]:
                group["settings"]["nesterov"] = 1.0
        return body

    monkeypatch.setattr(canon, "to_json", to_json_with_invented_fields)
    settings = {"groups.nesterov"} if decision.groups else set()
    judgements = dict.fromkeys(
        ("shape", "learning_rate", "parallelism", "abort", "groups"), ("exact", "")
    )
    entries = judge_fields(decision, judgements, load_exporter(trainer).EXPRESSIBLE)
    unknown = {
        entry.field for entry in entries if "invented" in entry.field or "nesterov" in entry.field
    }
    assert unknown == settings | {f"{record}.invented".removeprefix(".") for record in RECORDS}
    assert {entry.verdict for entry in entries if entry.field in unknown} == {"not_expressible"}
    assert {entry.verdict for entry in entries if entry.field == "shape.width"} == {"exact"}


def test_older_launch_file_is_refused_by_its_schema_version(tmp_path):
    assert SCHEMA_VERSION == 6
    with pytest.raises(FrozenError, match="schema_version = 5: this version reads 6") as caught:
        read_launch(VERSION_5_FILE)
    assert not isinstance(caught.value, TamperedError)
    digest = json.loads(VERSION_5_FILE.read_text())["digest"]
    folder = tmp_path / "frozen" / digest
    folder.mkdir(parents=True)
    shutil.copy(VERSION_5_FILE, folder / "launch.json")
    for command in (
        ("verify", folder),
        ("explain", folder),
        ("export", folder, "--to", "native", "--out", tmp_path / "x"),
    ):
        code, body = run_json(*command)
        assert code == 2 and "schema_version = 5" in body["message"], command


def downgrade_to_version_5(path):
    """Rewrite a launch file in version 5 of the schema and rename its folder; return the folder."""
    body = json.loads(path.read_text())["decision"]
    for group in body["groups"]:
        group.update(group.pop("settings"))
        del group["optimizer"]
    body["schema_version"] = 5
    digest = canon.compute_content_id(body)
    path.write_bytes(canon.to_pretty_json({"digest": digest, "decision": body}))
    return path.parent.rename(path.parents[1] / digest)


def test_study_with_an_older_config_is_read_and_frozen_again(frozen_study, tmp_path, monkeypatch):
    study = tmp_path / "study"
    shutil.copytree(frozen_study, study)
    (folder,) = (study / "frozen").iterdir()
    digest, old = folder.name, downgrade_to_version_5(folder / "launch.json")
    assert run_json("status", study)[0] == 0
    assert run_json("report", study)[0] == 0
    set_gates(monkeypatch)
    accept = [part for gate in ("coordinates", "transfer") for part in ("--accept", gate)]
    code, body = run_json("freeze", study, *accept, "--reason", "planted")
    assert (code, body["digest"]) == (0, digest), body
    assert {folder.name for folder in (study / "frozen").iterdir()} == {digest, old.name}
    code, body = run_json("verify", old)
    assert code == 2 and "schema_version = 5" in body["message"]


def test_version_5_body_with_the_new_version_number_is_refused(tmp_path):
    body = {**json.loads(VERSION_5_FILE.read_text())["decision"], "schema_version": SCHEMA_VERSION}
    path = tmp_path / "launch.json"
    path.write_text(json.dumps({"digest": canon.compute_content_id(body), "decision": body}))
    with pytest.raises(FrozenError, match="groups"):
        read_launch(path)


def test_setting_written_as_an_integer_is_refused(muon, tmp_path):
    """The decision has a float there, and its digest is that of the float."""
    path = write_launch(tmp_path, muon)
    content = json.loads(path.read_text())
    content["decision"]["groups"][0]["settings"]["weight_decay"] = 0
    content["digest"] = canon.compute_content_id(content["decision"])
    forged = tmp_path / "forged.json"
    forged.write_text(json.dumps(content))
    with pytest.raises(TamperedError, match="not in the form"):
        read_launch(forged)
