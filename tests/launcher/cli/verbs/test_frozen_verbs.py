"""Tests of the verbs that write, export, and check a frozen config: freeze, export, and verify."""

import dataclasses
import errno
import json
import shutil
from pathlib import Path

import pytest
from tiny_study import GATES, run_forerun, run_json, set_gates

from forerun._launcher.main_run.exporters import proof
from forerun._launcher.main_run.exporters.fidelity import FidelityEntry, FidelityReport
from forerun._launcher.main_run.exporters.trainers import native
from forerun._launcher.main_run.frozen.launch_file import attest, read_attestation
from forerun._launcher.report.page.report_builder import list_accepted_gates
from forerun._launcher.study.stages.gates import Gate
from forerun._launcher.study.stages.study_folder import read_recorded_study
from forerun._sweeps.store.ledger import Ledger


@pytest.fixture
def closed_gates(monkeypatch):
    """Gates of which one failed and one cannot tell, whatever the tiny study measured."""
    set_gates(monkeypatch)


@pytest.fixture
def frozen(frozen_study, study_copy, closed_gates):
    """Folder of a frozen config that the test may change; its study is in `study_copy`."""
    shutil.rmtree(study_copy)
    shutil.copytree(frozen_study, study_copy)
    (folder,) = (study_copy / "frozen").iterdir()
    return folder


def test_freeze_refuses_closed_gates_and_lists_all(study_copy, closed_gates):
    code, body = run_json("freeze", study_copy)
    assert (code, body["error"]) == (3, "GateError")
    assert (
        f"forerun freeze {study_copy} --accept coordinates --accept transfer --reason TEXT"
        in body["message"]
    )
    assert "coordinates says" in body["message"] and "transfer says" in body["message"]
    assert not (study_copy / "frozen").exists()


def test_accepting_one_gate_does_not_open_the_other(study_copy, closed_gates):
    assert run_json("freeze", study_copy, "--accept", "coordinates", "--reason", "planted")[0] == 4
    code, _ = run_json("freeze", study_copy, "--accept", "transfer", "--reason", "planted")
    assert code == 3, "a refused freeze records no acceptance"


def test_accepted_gates_are_recorded_with_config_report_and_status(frozen, study_copy):
    accepted = {"coordinates": "planted", "transfer": "planted"}
    attestation = json.loads((frozen / "attestations" / "evidence.json").read_text())
    assert attestation["digest"] == frozen.name
    assert attestation["body"]["accepted"] == accepted
    assert len(attestation["body"]["run_ids"]) == attestation["body"]["spend"]["num_runs"]
    assert json.loads((study_copy / "report.json").read_text())["accepted"] == accepted
    assert run_json("status", study_copy)[1]["accepted"] == accepted


def test_acceptance_ends_with_new_evidence_and_outlasts_reworded_gates(frozen, study_copy):
    """New evidence is another outcome of the gate, or more runs of the study."""
    study = read_recorded_study(study_copy)
    reworded = tuple(
        Gate(name=name, outcome=outcome, reason="words of a later version")
        for name, outcome in GATES.items()
    )
    assert set(list_accepted_gates(Ledger.read(study_copy), reworded)) == {
        "coordinates",
        "transfer",
    }
    undecided = tuple(dataclasses.replace(gate, outcome="cannot_tell") for gate in reworded)
    assert set(list_accepted_gates(Ledger.read(study_copy), undecided)) == {"transfer"}
    with Ledger.open(study_copy, study.question, create=False) as ledger:
        ledger.append("spend", "more runs follow", {})
        assert list_accepted_gates(ledger, reworded) == {}


def test_digest_does_not_depend_on_the_gates(frozen, finished_study_dir, tmp_path, monkeypatch):
    shutil.copytree(finished_study_dir / "study", tmp_path / "other")
    set_gates(monkeypatch, dict.fromkeys(GATES, "passed"))
    code, body = run_json("freeze", tmp_path / "other")
    assert (code, body["accepted"], body["digest"]) == (0, {}, frozen.name)
    launch = tmp_path / "other" / "frozen" / body["digest"] / "launch.json"
    assert launch.read_bytes() == (frozen / "launch.json").read_bytes()


def test_verify_lists_what_it_verified(frozen):
    assert run_json("export", frozen, "--to", "native")[0] == 0
    code, body = run_json("verify", frozen)
    assert code == 0
    assert body["verified"][0] == f"digest {frozen.name}"
    assert {"attestation evidence", "attestation export-native"} <= set(body["verified"])
    assert any(line.startswith("files of native: ") for line in body["verified"])


EDITS = {
    "launch.json": ('"seed": 1000', '"seed": 1001'),
    "attestations/evidence.json": ("planted", "a better reason"),
    "exports/native/fidelity.json": ("exact", "fine"),
}
"""Text in a file of a frozen config, and its replacement, by the file's name."""


@pytest.mark.parametrize("name", EDITS)
def test_verify_catches_an_edit(frozen, name):
    assert run_json("export", frozen, "--to", "native")[0] == 0
    path, (before, after) = frozen / name, EDITS[name]
    content = path.read_text()
    assert before in content
    path.write_text(content.replace(before, after, 1))
    code, body = run_json("verify", frozen)
    assert (code, body["error"]) == (5, "TamperedError")
    path.write_text(content)
    assert run_json("verify", frozen)[0] == 0


def test_verify_catches_added_and_hidden_files(frozen):
    assert run_json("export", frozen, "--to", "native")[0] == 0
    added = frozen / "exports" / "native" / "sitecustomize.py"
    added.write_text("")
    assert run_json("verify", frozen)[1]["problems"][0] == "sitecustomize.py was added"
    added.unlink()

    # An export whose attestation is hidden, or replaced by one of another kind.
    attestations = frozen / "attestations"
    hidden = (attestations / "export-native.json").rename(attestations / "aside")
    assert run_json("verify", frozen)[1]["problems"] == [
        "no attestation names it: `forerun export` writes it again"
    ]
    shutil.copy(attestations / "evidence.json", attestations / "export-native.json")
    assert run_json("verify", frozen)[1]["problems"][0].startswith(
        "attestations/export-native.json: its kind is 'evidence'"
    )
    hidden.rename(attestations / "export-native.json")
    assert run_json("verify", frozen)[0] == 0


def test_export_of_weights_refuses_options_of_other_exports(frozen):
    options = ("--to", "huggingface", "--weights", "checkpoint", "--allow-lossy")
    code, body = run_json("export", frozen, *options)
    assert (code, body["message"]) == (2, "--full and --allow-lossy: only without --weights")


def test_export_into_the_config_is_refused(frozen):
    assert run_json("export", frozen, "--to", "native", "--out", frozen)[0] == 2
    assert run_json("export", frozen, "--to", "native", "--out", frozen.parent)[0] == 2
    launched = attest(frozen, "launch", frozen.name, {"planted": True}).read_bytes()
    for subfolder in (
        "attestations",
        "exports",
        "exports/torchtitan",
        "exports/native/inner",
        "run",
    ):
        code, body = run_json("export", frozen, "--to", "native", "--out", frozen / subfolder)
        assert (code, "folder elsewhere" in body["message"]) == (2, True)
    assert (frozen / "attestations" / "launch.json").read_bytes() == launched
    assert run_json("verify", frozen)[0] == 0


def test_export_does_not_overwrite_other_files(frozen, tmp_path):
    out = tmp_path / "frozen" / "mine"
    out.mkdir(parents=True)
    arguments = ("export", frozen, "--to", "native", "--out", out)
    (out / "run.sh").write_text("my own")
    code, body = run_json(*arguments)
    assert code == 2
    assert "that no export wrote: run.sh; choose an empty folder" in body["message"]
    assert (out / "run.sh").read_text() == "my own"
    (out / "run.sh").unlink()
    assert run_json(*arguments)[0] == 0
    assert run_json(*arguments)[0] == 2, "a folder outside the config must be empty"


def test_export_into_its_default_folder_replaces_an_earlier_one(frozen):
    assert run_json("export", frozen, "--to", "native")[0] == 0
    export = frozen / "exports" / "native"
    (export.parent / ".native.part").mkdir()  # left by an export that was killed
    (export / "of_another_version.py").write_text("")
    message = run_json("export", frozen, "--to", "native")[1]["message"]
    assert "that no export wrote: of_another_version.py" in message

    # A file that an earlier export attested is removed.
    body = read_attestation(frozen / "attestations" / "export-native.json", frozen.name)
    attest(
        frozen,
        "export-native",
        frozen.name,
        {**body, "files": {**body["files"], "of_another_version.py": ""}},
    )
    assert run_json("export", frozen, "--to", "native")[0] == 0
    assert {path.name for path in export.iterdir()} == {"fidelity.json", "launch.json", "run.sh"}
    assert [path.name for path in export.parent.iterdir()] == ["native"]
    assert run_json("verify", frozen)[0] == 0


def test_export_to_a_full_disk_leaves_no_file(frozen, tmp_path, monkeypatch):
    before = sorted(frozen.rglob("*"))

    def fill_disk(decision, out, version):
        (out / "run.sh").write_text("half")
        raise OSError(errno.ENOSPC, "No space left on device", str(out / "launch.json"))

    monkeypatch.setattr(native, "export", fill_disk)
    for out_option in ((), ("--out", tmp_path / "made" / "out")):
        code, body = run_json("export", frozen, "--to", "native", *out_option)
        assert (code, body["message"].endswith("launch.json: No space left on device")) == (2, True)
    assert sorted(frozen.rglob("*")) == before
    assert not (tmp_path / "made").exists()
    (tmp_path / "file").write_text("")
    code, body = run_json("export", frozen, "--to", "native", "--out", tmp_path / "file")
    assert code == 2 and "must be a folder" in body["message"]


def test_broken_parity_fails_verify(frozen, monkeypatch):
    monkeypatch.setattr(native, "find_mismatches", lambda *_: ["lm_head.weight: lr 1, not 2"])
    code, body = run_json("verify", frozen)
    assert (code, body["error"]) == (3, "GateError")
    assert "lm_head.weight: lr 1, not 2" in body["message"]


def test_lossy_export_is_refused_unless_allowed(frozen, monkeypatch, tmp_path):
    entry = FidelityEntry(field="clip_norm", verdict="not_expressible", note="planted")
    report = FidelityReport(trainer="native", version="0", entries=(entry,))

    def export_lossily(decision, out, version):
        out.mkdir(exist_ok=True)
        return report

    monkeypatch.setattr(native, "export", export_lossily)
    arguments = ("export", frozen, "--to", "native", "--out", tmp_path / "lossy")
    code, body = run_json(*arguments)
    assert (code, body["entries"][0]["verdict"]) == (3, "not_expressible")
    assert body["out"] is None
    assert not (tmp_path / "lossy").exists()
    assert "native cannot express clip_norm" in run_forerun(*arguments)[2]
    assert run_json(*arguments, "--allow-lossy")[0] == 0
    assert (tmp_path / "lossy" / "fidelity.json").is_file()


@pytest.fixture
def exported_config(frozen):
    """A frozen config with an export to torchtitan."""
    assert run_json("export", frozen, "--to", "torchtitan")[0] == 0
    return frozen


def test_verify_names_a_trainer_whose_interpreter_is_missing(exported_config, monkeypatch):
    monkeypatch.setattr(proof, "find_interpreter", lambda trainer: None)
    code, body = run_json("verify", exported_config)
    (sentence,) = body["not_proven"]
    assert code == 0 and sentence.startswith("parity of torchtitan 0.3.0: ")
    assert "FORERUN_TORCHTITAN_PYTHON" in sentence


@pytest.mark.parametrize(
    ("problems", "code"), [([], 0), (["lm_head.weight: eps is 1.0, frozen as 1e-08"], 3)]
)
def test_verify_proves_parity_in_the_trainer_and_attests_it(
    exported_config, monkeypatch, problems, code
):
    calls = []

    def prove(decision, trainer, version, python, export_dir):
        calls.append((decision.digest, trainer, version, str(python), export_dir))
        return problems

    monkeypatch.setattr(proof, "find_interpreter", lambda trainer: Path("/a/python"))
    monkeypatch.setattr(proof, "prove", prove)
    exit_code, body = run_json("verify", exported_config)
    assert exit_code == code
    export_dir = exported_config / "exports" / "torchtitan"
    assert calls == [(exported_config.name, "torchtitan", "0.3.0", "/a/python", export_dir)]
    path = exported_config / "attestations" / "parity-torchtitan.json"
    assert read_attestation(path, exported_config.name)["problems"] == problems
    if problems:
        assert "or the files are stale:\nlm_head.weight: eps is 1.0" in body["message"]
    else:
        assert body["not_proven"] == []
        assert body["verified"][-1].startswith(
            "parity of torchtitan 0.3.0: every parameter's numbers"
        )
