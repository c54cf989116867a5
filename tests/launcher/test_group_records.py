"""Groups that name their optimizer: what is proven, what an export refuses, what a report does not
know, old files."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import torch
from export_case import wide_decision
from main_run import by_muon, decision_of
from test_hook import own_decision
from tiny_study import ask, set_gates

from launcher.exporters import fidelity
from launcher.exporters.fidelity import (
    ADAMW,
    MUON,
    ExportError,
    Expressible,
    judge_fields,
    list_inexpressible,
)
from launcher.exporters.trainers import native, torchtitan
from launcher.frozen.frozen import SCHEMA_VERSION, FrozenError, TamperedError
from launcher.frozen.launch_file import read_launch, write_launch
from launcher.trainer import assembly
from proxies.core import canon
from proxies.core.checks import SpecError
from proxies.core.hyperparameters import HYPERPARAMETERS
from proxies.core.optimizers import OPTIMIZERS, RECIPES
from proxies.data.tokens import read_manifest
from proxies.model.optimizer import IMPLEMENTATIONS

GOLDENS = Path(__file__).parent / "goldens"
OLD = GOLDENS / "launch-5.json"


@pytest.fixture(scope="module")
def muon(corpus):
    return decision_of(by_muon(corpus), read_manifest(corpus))


def build_adamw(recipe, groups, *, fused=False):
    """A mutant of `torch_optimizer`: AdamW for every group, at the frozen rates and decays."""
    return torch.optim.AdamW(
        [
            {"params": list(p), "lr": g.learning_rate, "weight_decay": g.weight_decay}
            for g, p in groups
        ]
    )


def build_adamw_groups(recipe, groups, *, fused=False):
    """A mutant that builds the recipe's own class, and has it step the hidden matrices by AdamW."""
    options = {"betas": (0.9, 0.95), "eps": 1e-8}
    return IMPLEMENTATIONS[recipe].build(
        [
            {"params": list(p), "lr": g.learning_rate, "weight_decay": g.weight_decay, **options}
            for g, p in groups
        ]
    )


def test_native_parity_proves_a_muon_config_with_muon(muon, monkeypatch):
    assert native.parity(muon) == []
    monkeypatch.setattr(assembly, "torch_optimizer", build_adamw)
    assert any("AdamW" in problem and "Muon" in problem for problem in native.parity(muon))
    monkeypatch.setattr(assembly, "torch_optimizer", build_adamw_groups)
    wrong = native.parity(muon)
    assert "layers.0.attention.wq.weight: optimizer is 'adamw', frozen as 'muon'" in wrong
    assert not [problem for problem in wrong if "embedding" in problem and "optimizer" in problem]


def test_every_recipe_has_an_implementation_that_steps_by_its_optimizers():
    assert IMPLEMENTATIONS.keys() == RECIPES.keys()
    for recipe in RECIPES.values():
        assert all(name in HYPERPARAMETERS for name in recipe.hyperparameters)
        assert {spec.name for spec in recipe.optimizers} <= OPTIMIZERS.keys()


@pytest.mark.parametrize(
    ("changes", "said"),
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
def test_a_group_has_the_settings_of_its_optimizer_and_no_others(muon, changes, said):
    group = next(group for group in muon.groups if group.optimizer == "adamw")
    with pytest.raises(SpecError) as caught:
        dataclasses.replace(group, **changes)
    assert said in "; ".join(caught.value.problems)


def test_a_decision_has_no_group_of_an_optimizer_that_its_recipe_lacks(muon):
    with pytest.raises(SpecError, match="has optimizer = 'muon': adamw has none but adamw"):
        dataclasses.replace(muon, optimizer="adamw")


def test_what_an_export_does_not_list_is_refused_by_name(muon, tmp_path, monkeypatch):
    both = {"adamw": ADAMW, "muon": MUON}
    assert list_inexpressible(muon, Expressible(optimizers=both, run_wide=("clip_norm",))) == []
    told = list_inexpressible(muon, Expressible(optimizers={"adamw": ADAMW}, run_wide=()))
    assert ["'muon'" in problem or "clip_norm = 0.5" in problem for problem in told] == [True, True]
    fewer = Expressible(optimizers={**both, "muon": MUON[:2]}, run_wide=("clip_norm",))
    assert [problem.partition(":")[0] for problem in list_inexpressible(muon, fewer)] == [
        "momentum of muon"
    ]
    monkeypatch.setattr(
        torchtitan, "EXPRESSIBLE", Expressible(optimizers={"adamw": ADAMW}, run_wide=("clip_norm",))
    )
    with pytest.raises(ExportError, match="optimizer = 'muon'"):
        torchtitan.export(muon, tmp_path / "out")
    assert not (tmp_path / "out").exists()


NEW = (
    "",
    "shape",
    "learning_rate",
    "learning_rate.schedule",
    "parallelism",
    "abort",
    "spikes",
    "forward",
)
"""Records that get a field more."""


@pytest.mark.parametrize("trainer", sorted(fidelity.MODULES))
def test_a_field_that_no_judgement_was_written_for_is_not_expressible(
    trainer, manifest, tmp_path, monkeypatch
):
    decision = own_decision() if trainer == "command" else wide_decision(manifest)
    export = fidelity.exporter(trainer).export
    before = export(decision, tmp_path / "before")
    assert not [entry for entry in before.lost if "qk_norm" in entry.field]
    fewer = tuple(name for name in fidelity.KNOWN_FIELDS["shape"] if name != "qk_norm")
    with monkeypatch.context() as patch:
        patch.setattr(fidelity, "KNOWN_FIELDS", {**fidelity.KNOWN_FIELDS, "shape": fewer})
        lost = [entry.field for entry in export(decision, tmp_path / "after").lost]
    assert "shape.qk_norm" in lost and "shape.width" not in lost
    plain = canon.to_json

    def with_more_fields(value, path="$"):
        body = plain(value, path)
        if value is decision:
            for record in NEW:
                there = body
                for name in filter(None, record.split(".")):
                    there = there[name]
                there["invented"] = 1
            for group in body["groups"]:
                group["settings"]["nesterov"] = 1.0
        return body

    monkeypatch.setattr(canon, "to_json", with_more_fields)
    settings = {"groups.nesterov"} if decision.groups else set()
    judgements = dict.fromkeys(
        ("shape", "learning_rate", "parallelism", "abort", "groups"), ("exact", "")
    )
    entries = judge_fields(decision, judgements, fidelity.exporter(trainer).EXPRESSIBLE)
    unknown = {
        entry.field for entry in entries if "invented" in entry.field or "nesterov" in entry.field
    }
    assert unknown == settings | {f"{record}.invented".removeprefix(".") for record in NEW}
    assert {entry.verdict for entry in entries if entry.field in unknown} == {"not_expressible"}
    assert {entry.verdict for entry in entries if entry.field == "shape.width"} == {"exact"}


def test_an_older_config_is_refused_by_its_schema_version(tmp_path):
    assert SCHEMA_VERSION == 6
    with pytest.raises(FrozenError, match="schema_version = 5: this version reads 6") as caught:
        read_launch(OLD)
    assert not isinstance(caught.value, TamperedError)
    digest = json.loads(OLD.read_text())["digest"]
    folder = tmp_path / "frozen" / digest
    folder.mkdir(parents=True)
    shutil.copy(OLD, folder / "launch.json")
    for words in (
        ("verify", folder),
        ("explain", folder),
        ("export", folder, "--to", "native", "--out", tmp_path / "x"),
    ):
        code, body = ask(*words)
        assert code == 2 and "schema_version = 5" in body["message"], words


def as_version_5(path):
    """Rewrite a launch file, and name its folder, as version 5 of the schema had them."""
    body = json.loads(path.read_text())["decision"]
    for group in body["groups"]:
        group.update(group.pop("settings"))
        del group["optimizer"]
    body["schema_version"] = 5
    digest = canon.content_id(body)
    path.write_bytes(canon.pretty({"digest": digest, "decision": body}))
    return path.parent.rename(path.parents[1] / digest)


def test_a_study_with_an_older_config_is_read_and_frozen_anew(frozen_once, tmp_path, monkeypatch):
    study = tmp_path / "study"
    shutil.copytree(frozen_once, study)
    (there,) = (study / "frozen").iterdir()
    digest, old = there.name, as_version_5(there / "launch.json")
    assert ask("status", study)[0] == 0
    assert ask("report", study)[0] == 0
    set_gates(monkeypatch)
    accept = [part for gate in ("coordinates", "transfer") for part in ("--accept", gate)]
    code, body = ask("freeze", study, *accept, "--reason", "planted")
    assert (code, body["digest"]) == (0, digest), body
    assert {folder.name for folder in (study / "frozen").iterdir()} == {digest, old.name}
    code, body = ask("verify", old)
    assert code == 2 and "schema_version = 5" in body["message"]


def test_an_old_body_that_claims_the_new_version_is_refused(tmp_path):
    body = {**json.loads(OLD.read_text())["decision"], "schema_version": SCHEMA_VERSION}
    path = tmp_path / "launch.json"
    path.write_text(json.dumps({"digest": canon.content_id(body), "decision": body}))
    with pytest.raises(FrozenError, match="groups"):
        read_launch(path)


def test_a_setting_written_as_a_whole_number_is_another_decision(muon, tmp_path):
    """Read as a float it would have another digest than the file."""
    path = write_launch(tmp_path, muon)
    whole = json.loads(path.read_text())
    whole["decision"]["groups"][0]["settings"]["weight_decay"] = 0
    whole["digest"] = canon.content_id(whole["decision"])
    forged = tmp_path / "forged.json"
    forged.write_text(json.dumps(whole))
    with pytest.raises(TamperedError, match="not in the form"):
        read_launch(forged)
