"""Test of runs that failed finally: they are named first, close a gate, and run again in a child
study.
"""

from kill_case import freeze_accepting_gates
from tiny_study import copy_records, run_forerun, run_json

from forerun._launcher.study.stages.gates import RUNS_ENDED, build_failed_runs_gate
from forerun._launcher.study.stages.study_findings import gather_findings
from forerun._proxies.core import canon
from forerun._proxies.core.spec import Run
from forerun._sweeps.run.retries import make_failed_result
from forerun._sweeps.store.ledger import Ledger


def test_failed_run_is_named_first_and_closes_a_gate(finished_study_dir, tmp_path):
    original = Ledger.read(finished_study_dir / "study")
    assert build_failed_runs_gate(original, finished_study_dir / "study") == ()
    victim = next(run for run in reversed(original.read_runs()) if run.spec.shape.width == 16)

    def edit(record):
        if record.kind != "result" or record.key != victim.spec.id:
            return record.body
        failed = make_failed_result(victim.spec.id, "lost 3 times, by itself")
        return canon.to_json(Run(spec=victim.spec, result=failed))

    copy = tmp_path / "copy"
    study, ledger = copy_records(
        finished_study_dir / "study", copy, lambda record: record.kind != "fit", edit
    )
    (gate,) = [gate for gate in gather_findings(study, ledger).gates if gate.name == RUNS_ENDED]
    assert gate.outcome == "cannot_tell"
    assert victim.spec.id[:12] in gate.reason and "lost 3 times, by itself" in gate.reason

    _, out, err = run_forerun("sweep", finished_study_dir / "plan.toml", "--study", copy)
    assert out.startswith(gate.reason), err
    code, body = run_json("freeze", copy)
    assert code in (3, 4) and RUNS_ENDED in body["message"]
    assert freeze_accepting_gates(copy), "like any gate it can be accepted by name"

    code, body = run_json(
        "run", finished_study_dir / "plan.toml", "--study", tmp_path / "child", "--fork", copy
    )
    child = Ledger.read(tmp_path / "child")
    assert child.get_results()[victim.spec.id].status == victim.result.status
    assert victim.spec.id not in child.read_imported_ids()
    assert len(child.read_imported_ids()) == len(original.get_results()) - 1
    assert RUNS_ENDED not in [gate["name"] for gate in body["gates"]]
