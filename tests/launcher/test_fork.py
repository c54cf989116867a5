"""`forerun run --fork`: a child study pays only for what its parent has not run."""

from tiny_study import ask


def test_the_same_question_costs_nothing_and_decides_the_same(finished, tmp_path):
    parent = finished / "study"
    _, before = ask("status", parent)
    code, body = ask("run", finished / "plan.toml", "--study", tmp_path / "twin", "--fork", parent)
    assert code == 0
    assert (body["spend"]["num_runs"], body["spend"]["num_imported"]) == (
        0,
        before["spend"]["num_runs"],
    )
    assert body["spend"]["flops_causal"] == 0
    assert body["decision"] == before["decision"]
    assert body["decision"] is not None, "the curves came along"


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
