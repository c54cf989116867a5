"""Tests of `forerun run --fork`: the child study imports the runs that its parent has finished."""

from tiny_study import run_json


def test_fork_with_the_same_plan_runs_nothing_and_decides_the_same(finished_study_dir, tmp_path):
    parent = finished_study_dir / "study"
    _, before = run_json("status", parent)
    code, body = run_json(
        "run", finished_study_dir / "plan.toml", "--study", tmp_path / "twin", "--fork", parent
    )
    assert code == 0
    assert (body["spend"]["num_runs"], body["spend"]["num_imported"]) == (
        0,
        before["spend"]["num_runs"],
    )
    assert body["spend"]["flops_causal"] == 0
    assert body["decision"] == before["decision"]
    assert body["decision"] is not None, "the loss curves were imported too"


def test_refused_fork_leaves_no_folder(finished_study_dir, study_copy, tmp_path):
    plan, orphan = finished_study_dir / "plan.toml", tmp_path / "orphan"
    refusals = [
        (orphan, tmp_path / "nowhere", (2, "StudyMissing")),
        (orphan, orphan, (2, "StudyMissing")),
        (study_copy, study_copy, (2, "ForkRefused")),
    ]
    for study, parent, expected in refusals:
        code, body = run_json("run", plan, "--study", study, "--fork", parent)
        assert (code, body["error"]) == expected

    # A corrupt parent is refused with the exit code of corruption.
    path = study_copy / "ledger.db"
    path.write_bytes(path.read_bytes().replace(b'"seed":0', b'"seed":9', 1))
    code, body = run_json("run", plan, "--study", orphan, "--fork", study_copy)
    assert (code, body["error"]) == (5, "LedgerCorrupt")
    assert str(study_copy) in body["message"]
    assert not orphan.exists()
