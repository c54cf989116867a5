"""Checkpoints as folders: complete or absent, hashed, the newest good one wins, the only good one stays."""

from __future__ import annotations

import json

import pytest

from launcher import checkpoints
from launcher.checkpoints import CheckpointError, CorruptError, begin, complete, newest_good

DIGEST = "d" * 64


def save(root, step, *, keep=2, digest=DIGEST, content=b"tensors"):
    part = begin(root, step)
    (part / "__0_0.distcp").write_bytes(content)
    (part / ".metadata").write_bytes(b"index")
    return complete(part, digest=digest, step=step, keep=keep)


def names(root):
    return sorted(p.name for p in root.iterdir())


def test_newest_complete_wins(tmp_path):
    save(tmp_path, 4)
    save(tmp_path, 12)
    manifest = newest_good(tmp_path, DIGEST, [])
    assert manifest.step == 12
    assert set(manifest.files) == {"__0_0.distcp", ".metadata"}


def test_no_checkpoint_is_a_start_from_nothing(tmp_path):
    assert newest_good(tmp_path, DIGEST, []) is None
    assert newest_good(tmp_path / "absent", DIGEST, []) is None


def test_an_unfinished_save_is_no_checkpoint_and_is_cleared_by_the_next(tmp_path):
    save(tmp_path, 4)
    (begin(tmp_path, 8) / "__0_0.distcp").write_bytes(b"half")
    assert newest_good(tmp_path, DIGEST, []).step == 4
    save(tmp_path, 8)
    assert names(tmp_path) == ["step-00000004", "step-00000008"]


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_keeps_so_many(tmp_path, keep):
    for step in (4, 8, 12, 16):
        save(tmp_path, step, keep=keep)
    assert names(tmp_path) == [f"step-{step:08d}" for step in (4, 8, 12, 16)[-keep:]]


@pytest.mark.parametrize("keep", [0, -1])
def test_never_deletes_the_only_good_one(tmp_path, keep):
    save(tmp_path, 4, keep=keep)
    assert newest_good(tmp_path, DIGEST, []).step == 4


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "manifest.json"])
@pytest.mark.parametrize("harm", ["flip", "truncate", "remove"])
def test_any_harm_to_any_file_is_found_and_set_aside(tmp_path, name, harm):
    save(tmp_path, 4)
    path = save(tmp_path, 8) / name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    if harm == "remove":
        path.unlink()
    else:
        path.write_bytes(bytes(content) if harm == "flip" else path.read_bytes()[:-3])
    warnings = []
    assert newest_good(tmp_path, DIGEST, warnings).step == 4
    assert names(tmp_path) == ["step-00000004", "step-00000008.corrupt"]
    (warning,) = warnings
    assert "step-00000008 is corrupt" in warning and "kept as step-00000008.corrupt" in warning


def test_every_bit_of_the_manifest_counts(tmp_path):
    folder = save(tmp_path, 4)
    path = folder / checkpoints.MANIFEST
    whole = path.read_bytes()
    for edit in ({"step": 5}, {"digest": "e" * 64}, {"schema_version": 2}, {"files": {}}):
        value = json.loads(whole)
        value["manifest"].update(edit)
        path.write_text(json.dumps(value))
        with pytest.raises(CorruptError):
            newest_good(tmp_path, DIGEST, [])
        (tmp_path / "step-00000004.corrupt").rename(folder)
    path.write_bytes(whole)
    assert newest_good(tmp_path, DIGEST, []).step == 4


def test_a_checkpoint_under_another_steps_name_is_corrupt(tmp_path):
    save(tmp_path, 4).rename(tmp_path / "step-00000008")
    with pytest.raises(CorruptError):
        newest_good(tmp_path, DIGEST, [])


def test_all_corrupt_is_refused_now_and_ever_after(tmp_path):
    """A second start must not take the emptied folder for a new run and train from step 0."""
    for step in (4, 8):
        (save(tmp_path, step) / ".metadata").unlink()
    for _ in range(2):
        with pytest.raises(CorruptError, match=r"only step-00000004\.corrupt, step-00000008\.corrupt: restore"):
            newest_good(tmp_path, DIGEST, [])


def test_the_same_step_can_be_corrupt_twice(tmp_path):
    save(tmp_path, 4)
    for _ in range(2):
        (save(tmp_path, 8) / ".metadata").unlink()
        assert newest_good(tmp_path, DIGEST, []).step == 4
    assert names(tmp_path) == ["step-00000004", "step-00000008.corrupt", "step-00000008.corrupt2"]


def test_refuses_another_configs(tmp_path):
    save(tmp_path, 4, digest="e" * 64)
    with pytest.raises(CheckpointError, match=r"is of the launch config eeeeeeeeeeeeeeee\.\.\., this is dddd"):
        newest_good(tmp_path, DIGEST, [])
    assert names(tmp_path) == ["step-00000004"]


def test_a_complete_checkpoint_is_never_overwritten(tmp_path):
    save(tmp_path, 4, content=b"first")
    with pytest.raises(OSError):
        save(tmp_path, 4, content=b"second")
    assert (tmp_path / "step-00000004" / "__0_0.distcp").read_bytes() == b"first"
    assert newest_good(tmp_path, DIGEST, []).step == 4
