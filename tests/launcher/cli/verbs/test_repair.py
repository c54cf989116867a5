"""Tests of `forerun repair`: a damaged study is repaired and comes to the same decision."""

import os

from tiny_study import run_forerun, run_json

from forerun._sweeps.store.ledger import LEDGER_NAME, Ledger
from forerun._sweeps.store.lock import DriverLock


def test_damaged_study_is_repaired_and_decides_the_same(finished_study_dir, study_copy):
    """A damaged result is found by its loss curve, and its run is trained again."""
    _, before = run_json("status", study_copy)
    digest = before["digest"]
    run = Ledger.read(study_copy).read_runs()[20]
    path = study_copy / LEDGER_NAME
    path.write_bytes(
        path.read_bytes().replace(f'"id":"{run.spec.id}"'.encode(), f'"id":"{0:064}"'.encode())
    )

    code, _, err = run_forerun("status", study_copy)
    assert code == 5
    assert f"`forerun repair {study_copy}`" in err
    with DriverLock(study_copy):
        assert run_json("repair", study_copy)[0] == 75
    code, body = run_json("repair", study_copy)
    assert code == 0
    assert body["lost"]["result"] == body["rerun"] == [run.spec.id]

    code, after = run_json("run", finished_study_dir / "plan.toml", "--study", study_copy)
    assert code == 0
    assert after["digest"] == digest
    assert after["spend"]["num_runs"] == before["spend"]["num_runs"]


def test_pipe_in_place_of_the_ledger_is_refused(study_copy):
    path = study_copy / LEDGER_NAME
    path.unlink()
    os.mkfifo(path)
    code, body = run_json("repair", study_copy)
    assert code == 2
    assert "is not a regular file" in body["message"]
