"""Checkpoints as folders: complete or absent, hashed, the newest good one wins, the only good one
stays.
"""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from launcher.base import chronicle
from launcher.base.run_files import RefusedCheckpoint, expected, tell
from launcher.trainer import checkpoints
from launcher.trainer.checkpoints import (
    CheckpointError,
    CorruptError,
    Manifest,
    begin,
    complete,
    kept_steps,
    newest_good,
)
from proxies.core import canon, plain_files

DIGEST = "d" * 64


def save(root, step, *, keep=2, reach_steps=0, digest=DIGEST, content=b"tensors", **later):
    part = begin(root, step)
    (part / "__0_0.distcp").write_bytes(content)
    (part / ".metadata").write_bytes(b"index")
    files = {file.name: canon.file_sha256(file) for file in part.iterdir()}
    manifest = Manifest(schema_version=1, digest=digest, step=step, files=files, **later)
    return complete(part, manifest, keep=keep, reach_steps=reach_steps)


def names(root):
    return sorted(p.name for p in root.iterdir())


@pytest.mark.parametrize(
    ("name", "harm"),
    [
        ("__0_0.distcp", "flip"),
        ("__0_0.distcp", "remove"),
        (".metadata", "truncate"),
        ("manifest.json", "remove"),
    ],
)
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
    assert (warning.step, warning.corrupt) == (8, True)
    assert "step-00000008.corrupt" in warning.text


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


def test_all_corrupt_is_refused_now_and_ever_after(tmp_path):
    """A second start must not take the emptied folder for a new run and train from step 0."""
    for step in (4, 8):
        (save(tmp_path, step) / ".metadata").unlink()
    for _ in range(2):
        with pytest.raises(
            CorruptError, match=r"only step-00000004\.corrupt, step-00000008\.corrupt: restore"
        ):
            newest_good(tmp_path, DIGEST, [])


@pytest.mark.parametrize("name", ["manifest.json", ".metadata"])
def test_what_cannot_be_read_is_not_corrupt(tmp_path, monkeypatch, name):
    """A stale handle of a network file system: nothing is renamed, and the next try finds
    everything as it was.
    """
    save(tmp_path, 4)
    broken = save(tmp_path, 8) / name
    opened = plain_files._open_without_waiting

    def stale(path, flags):
        if Path(path) == broken:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
        return opened(path, flags)

    monkeypatch.setattr(plain_files, "_open_without_waiting", stale)
    with pytest.raises(CheckpointError, match=f"{name} cannot be read .*no checkpoint was changed"):
        newest_good(tmp_path, DIGEST, [])
    assert names(tmp_path) == ["step-00000004", "step-00000008"]
    monkeypatch.undo()
    assert newest_good(tmp_path, DIGEST, []).step == 8


@pytest.mark.parametrize("evidence", ["chronicle", "metrics"])
def test_an_emptied_folder_is_no_new_run(tmp_path, evidence):
    assert expected(tmp_path, DIGEST) == ""
    saved = '{"event": "saved", "step": 400}\n' if evidence == "metrics" else ""
    (tmp_path / "metrics.jsonl").write_text('{"step": 423}\n' + saved)
    chronicle.record(tmp_path, "launched", "...", step=0, digest=DIGEST)
    chronicle.record(tmp_path, "launched", "...", step=700, digest="e" * 64)
    if evidence == "chronicle":
        assert expected(tmp_path, DIGEST) == ""
        chronicle.record(tmp_path, "restarted", "...", step=400, digest=DIGEST)
    why = expected(tmp_path, DIGEST)
    with pytest.raises(CheckpointError, match=r"holds no checkpoint, although .*step 400"):
        newest_good(tmp_path / "checkpoints", DIGEST, [], expected=why)


def test_refuses_another_configs(tmp_path):
    save(tmp_path, 4, digest="e" * 64)
    with pytest.raises(
        CheckpointError,
        match=r"belongs to the launch config eeeeeeeeeeeeeeee\.\.\., this one is dddd",
    ):
        newest_good(tmp_path, DIGEST, [])
    assert names(tmp_path) == ["step-00000004"]


def test_a_complete_checkpoint_is_never_overwritten(tmp_path):
    save(tmp_path, 4, content=b"first")
    with pytest.raises(OSError):
        save(tmp_path, 4, content=b"second")
    assert (tmp_path / "step-00000004" / "__0_0.distcp").read_bytes() == b"first"
    assert newest_good(tmp_path, DIGEST, []).step == 4


def test_a_checkpoint_that_is_not_usable_makes_room_for_the_new_one(tmp_path):
    for step in (4, 8, 12):
        save(tmp_path, step, keep=3, num_rollbacks=int(step == 4))
    warnings = []
    manifest = newest_good(tmp_path, DIGEST, warnings, usable=lambda m: m.num_rollbacks == 1)
    assert (manifest.step, names(tmp_path)) == (4, ["step-00000004"])
    assert [(warning.step, warning.corrupt) for warning in warnings] == [(12, False), (8, False)]
    save(tmp_path, 8, num_rollbacks=1)


def test_where_nothing_usable_is_left_the_run_does_not_begin_anew_unasked(tmp_path):
    save(tmp_path, 8)
    with pytest.raises(CheckpointError, match="only step-00000008: restore one from a backup"):
        newest_good(tmp_path, DIGEST, [], usable=lambda m: False, may_begin=False)
    assert names(tmp_path) == ["step-00000008"]
    assert newest_good(tmp_path, DIGEST, [], usable=lambda m: False) is None
    assert names(tmp_path) == []


def test_a_run_that_may_go_back_keeps_one_between_once_and_twice_as_old():
    steps, seen = [], []
    for step in range(10, 2001, 10):
        kept = kept_steps([step, *steps], 2, 100)
        steps = sorted(kept, reverse=True)
        assert steps[:2] == [step, step - 10][: len(steps)] and len(steps) <= 4
        if step >= 200:
            seen.append(min(step - old for old in steps if step - old >= 100))
    assert min(seen) == 100 and max(seen) < 200
    assert kept_steps([30, 20, 10], 2, 0) == {30, 20}
    assert kept_steps([30, 20, 10], 1, 100) == {30, 10}


ROTTEN = RefusedCheckpoint(step=8, text="checkpoint step-00000008 is corrupt", corrupt=True)
LEFT = RefusedCheckpoint(
    step=12,
    text="checkpoint step-00000012 is of the part that a rollback undid: deleted",
    corrupt=False,
)


def test_corrupt_ones_are_chronicled_and_all_are_said(tmp_path, capsys):
    tell(tmp_path, DIGEST, [ROTTEN, LEFT])
    assert capsys.readouterr().err == f"{ROTTEN.text}\n{LEFT.text}\n"
    (entry,) = chronicle.entries(tmp_path)
    assert (entry.kind, entry.step, entry.digest, entry.text) == ("corrupt", 8, DIGEST, ROTTEN.text)


def test_a_run_goes_on_where_the_chronicle_cannot_be_written(tmp_path, capsys):
    (tmp_path / chronicle.CHRONICLE_FILE).symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        chronicle.record(tmp_path, "note", "x")
    tell(tmp_path, DIGEST, [ROTTEN])
    assert "chronicle.jsonl: No space left on device; not recorded" in capsys.readouterr().err
