"""Runs that failed for good are named first, close a gate, and run again in a child study."""

from kill_case import frozen_digest
from tiny_study import ask, forerun, replay

from launcher.study.evidence import gather
from launcher.study.gates import RUNS_ENDED, failed_gates
from proxies.core import canon
from proxies.core.spec import Run
from sweeps.run.lost_runs import failed_result
from sweeps.store.ledger import Ledger


def test_a_failed_run_is_named_before_verdicts_and_closes_a_gate(finished, tmp_path):
    whole = Ledger.read(finished / "study")
    assert failed_gates(whole, finished / "study") == ()
    victim = next(run for run in reversed(whole.runs()) if run.spec.shape.width == 16)

    def edit(record):
        if record.kind != "result" or record.key != victim.spec.id:
            return record.body
        return canon.to_json(
            Run(spec=victim.spec, result=failed_result(victim.spec.id, "lost 3 times, by itself"))
        )

    copy = tmp_path / "copy"
    study, ledger = replay(finished / "study", copy, lambda record: record.kind != "fit", edit)
    (gate,) = [gate for gate in gather(study, ledger).gates if gate.name == RUNS_ENDED]
    assert gate.outcome == "cannot_tell"
    assert victim.spec.id[:12] in gate.reason and "lost 3 times, by itself" in gate.reason

    _, out, err = forerun("sweep", finished / "plan.toml", "--study", copy)
    assert out.startswith(gate.reason), err
    code, body = ask("freeze", copy)
    assert code in (3, 4) and RUNS_ENDED in body["message"]
    assert frozen_digest(copy), "like any gate, it can be accepted by name"

    code, body = ask("run", finished / "plan.toml", "--study", tmp_path / "child", "--fork", copy)
    again = Ledger.read(tmp_path / "child")
    assert again.results()[victim.spec.id].status == victim.result.status
    assert (
        victim.spec.id not in again.imported() and len(again.imported()) == len(whole.results()) - 1
    )
    assert RUNS_ENDED not in [gate["name"] for gate in body["gates"]]
