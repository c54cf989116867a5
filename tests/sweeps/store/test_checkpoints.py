"""Tests of how the checkpoints of ended runs are removed."""

import pytest

from forerun._sweeps.store.checkpoints import (
    drop_checkpoints,
    drop_stale_checkpoints,
    get_checkpoint_dir,
)

RUN_ID, OTHER_RUN_ID = "1" * 64, "2" * 64


@pytest.fixture
def study(tmp_path):
    """A study with checkpoints of two runs."""
    for run_id in (RUN_ID, OTHER_RUN_ID):
        get_checkpoint_dir(tmp_path, run_id).mkdir(parents=True)
        (get_checkpoint_dir(tmp_path, run_id) / "step").write_text("")
    return tmp_path


@pytest.mark.parametrize("name", ["", "..", "../" + RUN_ID, RUN_ID[:-1], RUN_ID + "/..", "G" * 64])
def test_invalid_run_id_is_refused(tmp_path, name):
    with pytest.raises(ValueError, match="64 hex digits"):
        get_checkpoint_dir(tmp_path, name)


def test_checkpoints_of_an_ended_run_are_removed(study):
    drop_checkpoints(study, RUN_ID)
    drop_checkpoints(study, RUN_ID)
    assert [path.name for path in (study / "checkpoints").iterdir()] == [OTHER_RUN_ID]


def test_stale_checkpoints_are_removed(study, tmp_path):
    (study / "checkpoints" / "notes").mkdir()
    drop_stale_checkpoints(study, {OTHER_RUN_ID, "notes" * 3})
    assert sorted(path.name for path in (study / "checkpoints").iterdir()) == [RUN_ID, "notes"]
    drop_stale_checkpoints(tmp_path / "nowhere", {RUN_ID})
