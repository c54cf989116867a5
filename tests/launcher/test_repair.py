"""`forerun repair`: from a damaged study back to the same decision."""

import os

from tiny_study import ask, forerun

from sweeps.store.ledger import LEDGER_NAME, Ledger
from sweeps.store.lock import DriverLock


def test_a_damaged_study_is_repaired_and_decides_the_same(finished, copied):
    """A result in the middle is lost; its curve tells; it runs again, and the decision is the one
    that was made.
    """
    _, before = ask("status", copied)
    digest = before["digest"]
    run = Ledger.read(copied).runs()[20]
    path = copied / LEDGER_NAME
    path.write_bytes(
        path.read_bytes().replace(f'"id":"{run.spec.id}"'.encode(), f'"id":"{0:064}"'.encode())
    )

    code, _, err = forerun("status", copied)
    assert code == 5
    assert f"`forerun repair {copied}`" in err
    with DriverLock(copied):
        assert ask("repair", copied)[0] == 75
    code, body = ask("repair", copied)
    assert code == 0
    assert body["lost"]["result"] == body["rerun"] == [run.spec.id]

    code, after = ask("run", finished / "plan.toml", "--study", copied)
    assert code == 0
    assert after["digest"] == digest
    assert after["spend"]["num_runs"] == before["spend"]["num_runs"]


def test_a_pipe_in_the_ledgers_place_keeps_nobody_waiting(copied):
    path = copied / LEDGER_NAME
    path.unlink()
    os.mkfifo(path)
    code, body = ask("repair", copied)
    assert code == 2
    assert "is not a regular file" in body["message"]
