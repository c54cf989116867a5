"""`run` stops after a failed coordinate check, until somebody accepts the failure."""

from tiny_study import ask, forerun, write_plan

from launcher.study import gates
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
