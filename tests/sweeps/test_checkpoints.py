import pytest

from sweeps.store.checkpoints import checkpoint_dir, drop_checkpoints, drop_stale_checkpoints

ONE, OTHER = "1" * 64, "2" * 64


@pytest.fixture
def study(tmp_path):
    for run_id in (ONE, OTHER):
        checkpoint_dir(tmp_path, run_id).mkdir(parents=True)
        (checkpoint_dir(tmp_path, run_id) / "step").write_text("")
    return tmp_path


@pytest.mark.parametrize("name", ["", "..", "../" + ONE, ONE[:-1], ONE + "/..", "G" * 64])
def test_a_folder_is_a_runs_and_no_other(tmp_path, name):
    with pytest.raises(ValueError, match="64 hex digits"):
        checkpoint_dir(tmp_path, name)


def test_what_is_settled_is_removed(study):
    drop_checkpoints(study, ONE)
    drop_checkpoints(study, ONE)
    assert [path.name for path in (study / "checkpoints").iterdir()] == [OTHER]


def test_what_was_left_behind_is_removed_later(study, tmp_path):
    (study / "checkpoints" / "notes").mkdir()
    drop_stale_checkpoints(study, {OTHER, "notes" * 3})
    assert sorted(path.name for path in (study / "checkpoints").iterdir()) == [ONE, "notes"]
    drop_stale_checkpoints(tmp_path / "nowhere", {ONE})
