"""`run` stops after a gate that failed, until somebody accepts the failure."""

import dataclasses

from tiny_study import ask, forerun, replay, write_plan

from launcher.study import coordinate_checks, gates
from sweeps.store.ledger import Ledger


def test_run_stops_after_a_failed_check_until_it_is_accepted(tmp_path, monkeypatch):
    def fail(checks, parametrization):
        return gates.Gate(name="coordinates", outcome="failed" if checks else "cannot_tell", reason="it shrinks")

    monkeypatch.setattr(gates, "coordinate_gate", fail)
    plan, study = write_plan(tmp_path), tmp_path / "study"
    code, body = ask("run", plan, "--study", study)
    assert (code, body["error"]) == (3, "GateError") and "it shrinks" in body["message"]
    assert f"forerun freeze {study} --accept coordinates --reason" in body["message"]
    assert Ledger.read(study).num_runs == 0, "nothing is spent after it"

    code, out, _ = forerun("status", study)
    assert code == 0 and out.startswith("do not launch: gate coordinates failed")
    assert "forerun run " not in out.splitlines()[-1].partition(" or ")[0], "run would stop there again"

    assert ask("freeze", study, "--accept", "fit", "--reason", "why not")[0] == 2, "nothing is known of it yet"
    code, body = ask("freeze", study, "--accept", "coordinates", "--reason", "we know this layer")
    assert (code, body["error"]) == (2, "StageMissingError")
    assert ask("status", study)[1]["accepted"] == {"coordinates": "we know this layer"}
    code, body = ask("run", plan, "--study", study, "--set", "cluster.max_runs=1")
    assert body["error"] == "BudgetSpent" and Ledger.read(study).num_runs == 1, "it goes on"
    code, out, _ = forerun("status", study)
    assert "accepted failure: gate coordinates" in out


def test_status_shows_the_outcome_of_every_coordinate_check(tmp_path, monkeypatch):
    check = coordinate_checks.check_coordinates

    def blow_up(runs, *arguments, **options):
        found = check(runs, *arguments, **options)
        is_control = runs[0][0].parametrization.name == "sp"
        return dataclasses.replace(found, outcome="cannot_tell" if is_control else "blows_up")

    plan, study = write_plan(tmp_path), tmp_path / "study"
    limit = ("--set", "cluster.max_runs=1")
    monkeypatch.setattr(coordinate_checks, "check_coordinates", blow_up)
    assert ask("run", plan, "--study", study, *limit)[1]["error"] == "GateError"
    found = ask("status", study, "--brief")[1]["now"]["coordinates"]
    assert found == {
        "parametrization": "mup",
        "outcome": "failed",
        "checks": {"mup": "blows_up", "sp": "cannot_tell"},
    }
    for options in ([], ["--brief"], ["--full"]):
        assert "coordinate check: failed (mup blows up; sp cannot tell)" in forerun("status", study, *options)[1]
    assert ask("status", study)[1]["now"]["coordinates"] == found

    passing = tmp_path / "passing"
    monkeypatch.setattr(
        coordinate_checks,
        "check_coordinates",
        lambda *arguments, **options: dataclasses.replace(check(*arguments, **options), outcome="passes", layers=()),
    )
    assert ask("sweep", plan, "--study", passing, *limit)[1]["error"] == "BudgetSpent"
    assert ask("status", passing, "--brief")[1]["now"]["coordinates"]["outcome"] is None, "sweep makes none"
    assert "coordinate check" not in forerun("status", passing, "--brief")[1]
    assert ask("check", plan, "--study", passing)[0] == 4, "the control passes too"
    assert "coordinate check: cannot tell (mup passes; sp passes)" in forerun("status", passing)[1]


def test_run_stops_before_the_ladder_when_a_value_drifts(finished, found, tmp_path, monkeypatch):
    judge, study = gates.transfer_gate, tmp_path / "study"
    monkeypatch.setattr(gates, "transfer_gate", lambda verdicts: dataclasses.replace(judge(verdicts), outcome="failed"))
    rungs = {spec.id for spec in found.ladder}
    first = min(r.seq for r in Ledger.read(finished / "study").records() if r.key in rungs)
    replay(finished / "study", study, lambda record: record.seq < first)
    spent = Ledger.read(study).num_runs
    for verb in ("run", "ladder"):
        code, body = ask(verb, finished / "plan.toml", "--study", study)
        assert (code, body["error"]) == (3, "GateError"), body
    assert f"forerun freeze {study} --accept transfer --reason" in body["message"]
    assert Ledger.read(study).num_runs == spent, "no rung is trained"
    code, out, _ = forerun("status", study)
    assert code == 0 and out.startswith("do not launch: gate transfer failed")

    code, body = ask("freeze", study, "--accept", "transfer", "--reason", "a toy")
    assert (code, body["error"]) == (2, "StageMissingError")
    limit = f"cluster.max_runs={spent + 1}"
    code, body = ask("run", finished / "plan.toml", "--study", study, "--set", limit)
    assert body["error"] == "BudgetSpent" and Ledger.read(study).num_runs == spent + 1, "it goes on"
    assert forerun("status", study)[1].startswith("accepted failure") is False, "it has not ended"


def test_a_study_that_has_ended_is_reported_whatever_failed(finished, copied, monkeypatch):
    judge = gates.transfer_gate
    monkeypatch.setattr(gates, "transfer_gate", lambda verdicts: dataclasses.replace(judge(verdicts), outcome="failed"))
    code, body = ask("run", finished / "plan.toml", "--study", copied)
    assert (
        code == 0
        and {"transfer": "failed"}.items() <= {gate["name"]: gate["outcome"] for gate in body["gates"]}.items()
    )
