"""`forerun run --fork`: a child study pays only for what its parent has not run."""

import pytest
from tiny_study import ask, forerun

from sweeps.store.ledger import Ledger


def test_the_same_question_costs_nothing_and_decides_the_same(finished, tmp_path):
    parent = finished / "study"
    _, before = ask("status", parent)
    code, body = ask("run", finished / "plan.toml", "--study", tmp_path / "twin", "--fork", parent)
    assert code == 0
    assert (body["spend"]["num_runs"], body["spend"]["num_imported"]) == (0, before["spend"]["num_runs"])
    assert body["spend"]["flops_causal"] == 0
    assert body["decision"] == before["decision"]
    assert body["decision"] is not None, "the curves came along"


@pytest.mark.slow
def test_another_question_pays_for_what_is_new(finished, copied, tmp_path):
    changed = ("--set", "ladder.num_steps=[4, 8, 16, 24]")
    code, _, err = forerun("run", finished / "plan.toml", "--study", copied, *changed)
    assert code == 2
    assert f"forerun run PLAN --study ANOTHER --fork {copied}" in err
    code, body = ask("run", finished / "plan.toml", "--study", tmp_path / "child", "--fork", copied, *changed)
    assert code == 0
    parent, child = Ledger.read(copied), Ledger.read(tmp_path / "child")
    assert child.imported() == set(parent.results())
    assert body["spend"]["num_imported"] == len(parent.results())
    assert 0 < body["spend"]["num_runs"] < 0.2 * len(parent.results())
    assert 24 in {run.spec.schedule.num_steps for run in child.runs()[len(parent.results()) :]}


def test_refusals_leave_no_folder(finished, copied, tmp_path):
    plan, orphan = finished / "plan.toml", tmp_path / "orphan"
    refused = [
        (orphan, tmp_path / "nowhere", (2, "StudyMissing")),
        (orphan, orphan, (2, "StudyMissing")),
        (copied, copied, (2, "ForkRefused")),
    ]
    for study, parent, answer in refused:
        code, body = ask("run", plan, "--study", study, "--fork", parent)
        assert (code, body["error"]) == answer
    path = copied / "ledger.db"
    path.write_bytes(path.read_bytes().replace(b'"seed":0', b'"seed":9', 1))
    code, body = ask("run", plan, "--study", orphan, "--fork", copied)
    assert (code, body["error"]) == (5, "LedgerCorrupt")
    assert str(copied) in body["message"]
    assert not orphan.exists()
