"""The verbs around a study: what they write, refuse and answer. Their keys are a contract."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
from tiny_study import GATES, ask, forerun, set_gates

from launcher.exporters import proof
from launcher.exporters.fidelity import FidelityEntry, FidelityReport
from launcher.exporters.trainers import native
from launcher.frozen.launch_file import attest, read_attestation
from launcher.plan.file import load_plan
from launcher.report.body import accepted
from launcher.study.gates import Gate
from launcher.study.study_folder import recorded_study
from sweeps.store.ledger import Ledger


@pytest.fixture
def shut(monkeypatch):
    """Two gates shut, one of each kind, whatever the tiny study found."""
    set_gates(monkeypatch)


@pytest.fixture
def frozen(frozen_once, copied, shut):
    """A copy of the frozen study, in place of the copied one, to be written into."""
    shutil.rmtree(copied)
    shutil.copytree(frozen_once, copied)
    (folder,) = (copied / "frozen").iterdir()
    return folder


def test_freeze_refuses_a_shut_gate_and_lists_every_one(copied, shut):
    code, body = ask("freeze", copied)
    assert (code, body["error"]) == (3, "GateError")
    assert (
        f"forerun freeze {copied} --accept coordinates --accept transfer --reason TEXT"
        in body["message"]
    )
    assert "coordinates says" in body["message"] and "transfer says" in body["message"]
    assert not (copied / "frozen").exists()


def test_one_accepted_gate_does_not_open_another(copied, shut):
    assert ask("freeze", copied, "--accept", "coordinates", "--reason", "planted")[0] == 4
    assert ask("freeze", copied, "--accept", "transfer", "--reason", "planted")[0] == 3, (
        "nothing was put on record"
    )


def test_an_accepted_gate_is_told_wherever_the_config_is(frozen, copied):
    given = {"coordinates": "planted", "transfer": "planted"}
    attestation = json.loads((frozen / "attestations" / "evidence.json").read_text())
    assert attestation["digest"] == frozen.name
    assert attestation["body"]["accepted"] == given
    assert len(attestation["body"]["run_ids"]) == attestation["body"]["spend"]["num_runs"]
    assert json.loads((copied / "report.json").read_text())["accepted"] == given
    assert ask("status", copied)[1]["accepted"] == given


def test_an_acceptance_outlives_other_words_but_not_other_evidence(frozen, copied):
    study = recorded_study(copied)
    reworded = tuple(
        Gate(name=name, outcome=outcome, reason="as a later version says")
        for name, outcome in GATES.items()
    )
    assert set(accepted(Ledger.read(copied), reworded)) == {"coordinates", "transfer"}
    other = tuple(dataclasses.replace(gate, outcome="cannot_tell") for gate in reworded)
    assert set(accepted(Ledger.read(copied), other)) == {"transfer"}
    with Ledger.open(copied, study.question, create=False) as ledger:
        ledger.append("spend", "more runs follow", {})
        assert accepted(ledger, reworded) == {}


def test_the_digest_knows_nothing_of_gates(frozen, finished, tmp_path, monkeypatch):
    shutil.copytree(finished / "study", tmp_path / "other")
    set_gates(monkeypatch, dict.fromkeys(GATES, "passed"))
    code, body = ask("freeze", tmp_path / "other")
    assert (code, body["accepted"], body["digest"]) == (0, {}, frozen.name)
    launch = tmp_path / "other" / "frozen" / body["digest"] / "launch.json"
    assert launch.read_bytes() == (frozen / "launch.json").read_bytes()


def test_verify_a_config_and_its_export(frozen):
    assert ask("export", frozen, "--to", "native")[0] == 0
    code, body = ask("verify", frozen)
    assert code == 0
    assert body["verified"][0] == f"digest {frozen.name}"
    assert {"attestation evidence", "attestation export-native"} <= set(body["verified"])
    assert any(line.startswith("files of native: ") for line in body["verified"])


EDITS = {
    "launch.json": ('"seed": 1000', '"seed": 1001'),
    "attestations/evidence.json": ("planted", "a better reason"),
    "exports/native/fidelity.json": ("exact", "fine"),
}


@pytest.mark.parametrize("name", EDITS)
def test_verify_catches_an_edit(frozen, name):
    assert ask("export", frozen, "--to", "native")[0] == 0
    path, (before, after) = frozen / name, EDITS[name]
    content = path.read_text()
    assert before in content
    path.write_text(content.replace(before, after, 1))
    code, body = ask("verify", frozen)
    assert (code, body["error"]) == (5, "TamperedError")
    path.write_text(content)
    assert ask("verify", frozen)[0] == 0


def test_verify_catches_what_is_hidden_or_added(frozen):
    assert ask("export", frozen, "--to", "native")[0] == 0
    added = frozen / "exports" / "native" / "sitecustomize.py"
    added.write_text("")
    assert ask("verify", frozen)[1]["problems"][0] == "sitecustomize.py was added"
    added.unlink()
    attestations = frozen / "attestations"
    hidden = (attestations / "export-native.json").rename(attestations / "aside")
    assert ask("verify", frozen)[1]["problems"] == [
        "no attestation names it: `forerun export` writes it again"
    ]
    shutil.copy(attestations / "evidence.json", attestations / "export-native.json")
    assert ask("verify", frozen)[1]["problems"][0].startswith(
        "attestations/export-native.json: its kind is 'evidence'"
    )
    hidden.rename(attestations / "export-native.json")
    assert ask("verify", frozen)[0] == 0


def test_an_export_onto_the_config_itself_is_refused(frozen):
    assert ask("export", frozen, "--to", "native", "--out", frozen)[0] == 2
    assert ask("export", frozen, "--to", "native", "--out", frozen.parent)[0] == 2
    launched = attest(frozen, "launch", frozen.name, {"planted": True}).read_bytes()
    for elsewhere in (
        "attestations",
        "exports",
        "exports/torchtitan",
        "exports/native/inner",
        "run",
    ):
        code, body = ask("export", frozen, "--to", "native", "--out", frozen / elsewhere)
        assert (code, "folder elsewhere" in body["message"]) == (2, True)
    assert (frozen / "attestations" / "launch.json").read_bytes() == launched
    assert ask("verify", frozen)[0] == 0


def test_an_export_writes_over_no_other_files(frozen, tmp_path):
    out = tmp_path / "frozen" / "mine"
    out.mkdir(parents=True)
    arguments = ("export", frozen, "--to", "native", "--out", out)
    (out / "run.sh").write_text("my own")
    code, body = ask(*arguments)
    assert (code, "that no export wrote: run.sh; choose an empty folder" in body["message"]) == (
        2,
        True,
    )
    assert (out / "run.sh").read_text() == "my own"
    (out / "run.sh").unlink()
    assert [ask(*arguments)[0] for _ in range(2)] == [0, 2], "elsewhere a folder must be empty"


def test_an_export_beside_the_config_takes_away_what_an_earlier_one_left(frozen):
    assert ask("export", frozen, "--to", "native")[0] == 0
    own = frozen / "exports" / "native"
    (own.parent / ".native.part").mkdir()  # of an export that was killed
    (own / "of_another_version.py").write_text("")
    assert (
        "that no export wrote: of_another_version.py"
        in ask("export", frozen, "--to", "native")[1]["message"]
    )
    body = read_attestation(frozen / "attestations" / "export-native.json", frozen.name)
    attest(
        frozen,
        "export-native",
        frozen.name,
        {**body, "files": {**body["files"], "of_another_version.py": ""}},
    )
    assert ask("export", frozen, "--to", "native")[0] == 0
    assert {path.name for path in own.iterdir()} == {"fidelity.json", "launch.json", "run.sh"}
    assert [path.name for path in own.parent.iterdir()] == ["native"]
    assert ask("verify", frozen)[0] == 0


def test_an_export_that_finds_no_room_leaves_nothing(frozen, tmp_path, monkeypatch):
    before = sorted(frozen.rglob("*"))

    def full(decision, out, version):
        (out / "run.sh").write_text("half")
        raise OSError(28, "No space left on device", str(out / "launch.json"))

    monkeypatch.setattr(native, "export", full)
    for where in ((), ("--out", tmp_path / "made" / "out")):
        code, body = ask("export", frozen, "--to", "native", *where)
        assert (code, body["message"].endswith("launch.json: No space left on device")) == (2, True)
    assert sorted(frozen.rglob("*")) == before
    assert not (tmp_path / "made").exists()
    (tmp_path / "file").write_text("")
    assert (
        "must be a folder"
        in ask("export", frozen, "--to", "native", "--out", tmp_path / "file")[1]["message"]
    )


def test_broken_parity_is_a_failed_gate(frozen, monkeypatch):
    monkeypatch.setattr(native, "parity", lambda *_: ["lm_head.weight: lr 1, not 2"])
    code, body = ask("verify", frozen)
    assert (code, body["error"]) == (3, "GateError")
    assert "lm_head.weight: lr 1, not 2" in body["message"]


def test_a_lossy_export_answers_once_and_fails(frozen, monkeypatch, tmp_path):
    lost = FidelityEntry(field="clip_norm", verdict="not_expressible", note="planted")
    report = FidelityReport(trainer="native", version="0", entries=(lost,))

    def lossy(decision, out, version):
        out.mkdir(exist_ok=True)
        return report

    monkeypatch.setattr(native, "export", lossy)
    arguments = ("export", frozen, "--to", "native", "--out", tmp_path / "lossy")
    code, body = ask(*arguments)
    assert (code, body["entries"][0]["verdict"]) == (3, "not_expressible")
    assert body["out"] is None
    assert not (tmp_path / "lossy").exists()
    assert "native cannot express clip_norm" in forerun(*arguments)[2]
    assert ask(*arguments, "--allow-lossy")[0] == 0
    assert (tmp_path / "lossy" / "fidelity.json").is_file()


def test_report_writes_what_status_answers(copied):
    (copied / "report.json").unlink()
    assert forerun("report", copied)[0] == 0
    told = ask("status", copied)[1]
    assert told.pop("now")["num_runs"]["finished"] > 0
    assert json.loads((copied / "report.json").read_text()) == told


def test_each_stage_answers_from_its_records(finished, copied):
    plan, study = finished / "plan.toml", ("--study", copied)
    code, body = ask("check", plan, *study)
    assert code == {"passed": 0, "failed": 3, "cannot_tell": 4}[body["outcome"]]
    assert set(body) == {"coordinates", "outcome", "reason"}
    assert set(ask("sweep", plan, *study)[1]) == {
        "trials",
        "best",
        "best_trial",
        "sampler",
        "ranges",
        "can_be_off",
        "growth",
        "open_edges",
        "stopped",
        "replicates",
        "pruner",
        "replays",
        "ties",
    }
    code, body = ask("transfer", plan, *study)
    assert code == {"holds": 0, "drifts": 3, "cannot_tell": 4}[body["outcome"]]
    code, body = ask("ladder", plan, *study)
    assert (code, set(body)) == (0, {"ladder", "fit"})


def test_a_new_plan_is_valid_and_an_old_one_left_alone(tmp_path, finished):
    plan = tmp_path / "new" / "plan.toml"
    code, body = ask(
        "init", "--data", finished / "corpus", "--budget-flops", "1.5e13", "--out", plan
    )
    assert (code, body["plan"], body["schema"]) == (
        0,
        str(plan),
        str(plan.with_name("plan.schema.json")),
    )
    code, body = ask("validate", plan)
    assert (code, body["valid"], body["plan"]["target"]["budget_flops"]) == (0, True, 1.5e13)
    assert json.loads(plan.with_name("plan.schema.json").read_text())["type"] == "object"
    content = plan.read_bytes()
    proxy = load_plan(plan).proxy
    assert (proxy.num_slots, proxy.compiled, proxy.matmul_precision) == ("auto", "auto", "highest")
    assert ask("init", "--out", plan)[0] == 2
    assert plan.read_bytes() == content
    bad = tmp_path / "bad.toml"
    assert ask("init", "--budget-flops", "nan", "--out", bad)[0] == 2
    assert ask("init", "--set", "proxy.num_slot=4", "--out", bad)[0] == 2
    assert not bad.exists()
    pinned = tmp_path / "pinned.toml"
    assert (
        ask(
            "init",
            "--set",
            "proxy.num_slots=4",
            "--set",
            "search.max_extensions=0",
            "--out",
            pinned,
        )[0]
        == 0
    )
    made = load_plan(pinned)
    assert (made.proxy.num_slots, made.proxy.compiled, made.search.max_extensions) == (4, "auto", 0)


@pytest.fixture
def exported(frozen):
    """With an export to a trainer whose interpreter is not asked for."""
    assert ask("export", frozen, "--to", "torchtitan")[0] == 0
    return frozen


def test_verify_says_what_nobody_could_be_asked_about(exported, monkeypatch):
    monkeypatch.setattr(proof, "interpreter", lambda trainer: None)
    code, body = ask("verify", exported)
    (said,) = body["not_proven"]
    assert (
        code == 0
        and said.startswith("parity of torchtitan 0.3.0: ")
        and "FORERUN_TORCHTITAN_PYTHON" in said
    )


@pytest.mark.parametrize(
    ("problems", "code"), [([], 0), (["lm_head.weight: eps is 1.0, frozen as 1e-08"], 3)]
)
def test_verify_asks_the_trainer_and_keeps_its_answer(exported, monkeypatch, problems, code):
    asked = []

    def prove(decision, trainer, version, python, lying):
        asked.append((decision.digest, trainer, version, str(python), lying))
        return problems

    monkeypatch.setattr(proof, "interpreter", lambda trainer: Path("/a/python"))
    monkeypatch.setattr(proof, "prove", prove)
    given, body = ask("verify", exported)
    assert given == code
    assert asked == [
        (exported.name, "torchtitan", "0.3.0", "/a/python", exported / "exports" / "torchtitan")
    ]
    kept = read_attestation(exported / "attestations" / "parity-torchtitan.json", exported.name)
    assert kept["problems"] == problems
    if problems:
        assert "or the files are stale:\nlm_head.weight: eps is 1.0" in body["message"]
    else:
        assert body["not_proven"] == []
        assert body["verified"][-1].startswith(
            "parity of torchtitan 0.3.0: every parameter's numbers"
        )
