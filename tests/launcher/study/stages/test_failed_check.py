"""Tests of a gate (a check that must pass before a config is frozen) that failed during a study:
`run` stops there until a person accepts the failure, and `status` shows it.
"""

import dataclasses

from tiny_study import copy_records, run_forerun, run_json, write_plan

from forerun._launcher.report.views import study_status
from forerun._launcher.study.stages import coordinate_checks, gates
from forerun._sweeps.store.ledger import Ledger


def test_run_stops_after_a_failed_check_until_it_is_accepted(tmp_path, monkeypatch):
    def judge_as_failed(checks, parametrization):
        return gates.Gate(
            name="coordinates", outcome="failed" if checks else "cannot_tell", reason="it shrinks"
        )

    # Both modules have the name. One that is imported only now would keep the patch forever.
    for module in (gates, study_status):
        monkeypatch.setattr(module, "judge_coordinates", judge_as_failed)
    plan, study = write_plan(tmp_path), tmp_path / "study"
    code, body = run_json("run", plan, "--study", study)
    assert (code, body["error"]) == (3, "GateError") and "it shrinks" in body["message"]
    assert f"forerun freeze {study} --accept coordinates --reason" in body["message"]
    assert Ledger.read(study).num_runs == 0, "no run is trained after it"

    code, out, _ = run_forerun("status", study)
    assert code == 0 and out.startswith("do not launch: gate coordinates failed")
    # `run` would stop there again, so it is not the advice.
    assert "forerun run " not in out.splitlines()[-1].partition(" or ")[0]

    # A gate that is not judged yet cannot be accepted.
    assert run_json("freeze", study, "--accept", "fit", "--reason", "why not")[0] == 2
    code, body = run_json(
        "freeze", study, "--accept", "coordinates", "--reason", "we know this layer"
    )
    assert (code, body["error"]) == (2, "StageMissingError")
    assert run_json("status", study)[1]["accepted"] == {"coordinates": "we know this layer"}
    code, body = run_json("run", plan, "--study", study, "--set", "cluster.max_runs=1")
    assert body["error"] == "BudgetSpent" and Ledger.read(study).num_runs == 1, "run continues"
    code, out, _ = run_forerun("status", study)
    assert "accepted failure: gate coordinates" in out


def test_status_shows_the_outcome_of_every_coordinate_check(tmp_path, monkeypatch):
    check = coordinate_checks.check_coordinates

    def judge_as_blowing_up(runs, *arguments, **options):
        result = check(runs, *arguments, **options)
        is_control = runs[0][0].parametrization.name == "sp"
        return dataclasses.replace(result, outcome="cannot_tell" if is_control else "blows_up")

    plan, study = write_plan(tmp_path), tmp_path / "study"
    limit = ("--set", "cluster.max_runs=1")
    monkeypatch.setattr(coordinate_checks, "check_coordinates", judge_as_blowing_up)
    assert run_json("run", plan, "--study", study, *limit)[1]["error"] == "GateError"
    status = run_json("status", study, "--brief")[1]["now"]["coordinates"]
    assert status == {
        "parametrization": "mup",
        "outcome": "failed",
        "checks": {"mup": "blows_up", "sp": "cannot_tell"},
    }
    for options in ([], ["--brief"], ["--full"]):
        assert (
            "coordinate check: failed (mup blows up; sp cannot tell)"
            in run_forerun("status", study, *options)[1]
        )
    assert run_json("status", study)[1]["now"]["coordinates"] == status

    passing = tmp_path / "passing"
    monkeypatch.setattr(
        coordinate_checks,
        "check_coordinates",
        lambda *arguments, **options: dataclasses.replace(
            check(*arguments, **options), outcome="passes", layers=()
        ),
    )
    assert run_json("sweep", plan, "--study", passing, *limit)[1]["error"] == "BudgetSpent"
    # `sweep` makes no coordinate check.
    assert run_json("status", passing, "--brief")[1]["now"]["coordinates"]["outcome"] is None
    assert "coordinate check" not in run_forerun("status", passing, "--brief")[1]
    assert run_json("check", plan, "--study", passing)[0] == 4, "the control passes too"
    assert (
        "coordinate check: cannot tell (mup passes; sp passes)" in run_forerun("status", passing)[1]
    )


def test_run_stops_before_the_ladder_when_a_value_drifts(
    finished_study_dir, findings, tmp_path, monkeypatch
):
    judge, study = gates.judge_transfer, tmp_path / "study"
    monkeypatch.setattr(
        gates,
        "judge_transfer",
        lambda verdicts: dataclasses.replace(judge(verdicts), outcome="failed"),
    )
    # A copy of the study as it was before its first rung (run of the ladder)
    rungs = {spec.id for spec in findings.ladder}
    first = min(
        record.seq
        for record in Ledger.read(finished_study_dir / "study").read_records()
        if record.key in rungs
    )
    copy_records(finished_study_dir / "study", study, lambda record: record.seq < first)
    spent = Ledger.read(study).num_runs
    for verb in ("run", "ladder"):
        code, body = run_json(verb, finished_study_dir / "plan.toml", "--study", study)
        assert (code, body["error"]) == (3, "GateError"), body
    assert f"forerun freeze {study} --accept transfer --reason" in body["message"]
    assert Ledger.read(study).num_runs == spent, "no rung is trained"
    code, out, _ = run_forerun("status", study)
    assert code == 0 and out.startswith("do not launch: gate transfer failed")

    code, body = run_json("freeze", study, "--accept", "transfer", "--reason", "a toy")
    assert (code, body["error"]) == (2, "StageMissingError")
    limit = f"cluster.max_runs={spent + 1}"
    code, body = run_json("run", finished_study_dir / "plan.toml", "--study", study, "--set", limit)
    assert body["error"] == "BudgetSpent" and Ledger.read(study).num_runs == spent + 1
    assert not run_forerun("status", study)[1].startswith("accepted failure"), "it has not ended"


def test_finished_study_is_reported_in_spite_of_a_failed_gate(
    finished_study_dir, study_copy, monkeypatch
):
    judge = gates.judge_transfer
    monkeypatch.setattr(
        gates,
        "judge_transfer",
        lambda verdicts: dataclasses.replace(judge(verdicts), outcome="failed"),
    )
    code, body = run_json("run", finished_study_dir / "plan.toml", "--study", study_copy)
    outcomes = {gate["name"]: gate["outcome"] for gate in body["gates"]}
    assert code == 0 and outcomes["transfer"] == "failed"
