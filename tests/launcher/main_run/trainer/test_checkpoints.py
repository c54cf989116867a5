"""Tests of checkpoint folders.

A checkpoint must be complete and hashed, or absent. A run must use the newest good checkpoint, and
never remove the only good one.
"""

from __future__ import annotations

import errno
import json
import os
import pickle
from pathlib import Path

import pytest

from forerun._launcher.main_run import event_log
from forerun._launcher.main_run.checkpoint_folders import (
    CheckpointError,
    CorruptError,
    RefusedCheckpoint,
    explain_expected_checkpoint,
    report_refused_checkpoint,
)
from forerun._launcher.main_run.trainer import checkpoints
from forerun._launcher.main_run.trainer.checkpoints import (
    Manifest,
    begin,
    choose_kept_steps,
    complete,
    find_newest_good,
)
from forerun._proxies.core import canon, plain_files

DIGEST = "d" * 64


def save(root, step, *, keep=2, digest=DIGEST, content=b"tensors", **manifest_fields):
    """Save a complete checkpoint of made-up tensors; return its folder."""
    part = begin(root, step)
    (part / "__0_0.distcp").write_bytes(content)
    (part / ".metadata").write_bytes(pickle.dumps(None))
    files = {file.name: canon.hash_file(file) for file in part.iterdir()}
    manifest = Manifest(schema_version=1, digest=digest, step=step, files=files, **manifest_fields)
    return complete(part, manifest, keep=keep)


def list_names(root):
    """Return the sorted names of all files and folders in a folder."""
    return sorted(path.name for path in root.iterdir())


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("__0_0.distcp", "flip"),
        ("__0_0.distcp", "remove"),
        (".metadata", "truncate"),
        ("manifest.json", "remove"),
    ],
)
def test_damage_to_any_file_is_found_and_set_aside(tmp_path, name, damage):
    save(tmp_path, 4)
    path = save(tmp_path, 8) / name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    if damage == "remove":
        path.unlink()
    else:
        path.write_bytes(bytes(content) if damage == "flip" else path.read_bytes()[:-3])
    warnings = []
    assert find_newest_good(tmp_path, DIGEST, warnings.append).step == 4
    assert list_names(tmp_path) == ["step-00000004", "step-00000008.corrupt"]
    (warning,) = warnings
    assert (warning.step, warning.corrupt) == (8, True)
    assert "step-00000008.corrupt" in warning.text


def test_edit_of_any_field_of_the_manifest_is_found(tmp_path):
    folder = save(tmp_path, 4)
    path = folder / checkpoints.MANIFEST
    content = path.read_bytes()
    for edit in ({"step": 5}, {"digest": "e" * 64}, {"schema_version": 2}, {"files": {}}):
        value = json.loads(content)
        value["manifest"].update(edit)
        path.write_text(json.dumps(value))
        with pytest.raises(CorruptError):
            find_newest_good(tmp_path, DIGEST)
        (tmp_path / "step-00000004.corrupt").rename(folder)
    path.write_bytes(content)
    assert find_newest_good(tmp_path, DIGEST).step == 4


def test_only_corrupt_checkpoints_are_refused_at_every_start(tmp_path):
    """A second start must not treat the folder as a new run and train from step 0."""
    for step in (4, 8):
        (save(tmp_path, step) / ".metadata").unlink()
    for _ in range(2):
        with pytest.raises(
            CorruptError, match=r"only step-00000004\.corrupt, step-00000008\.corrupt: restore"
        ):
            find_newest_good(tmp_path, DIGEST)


@pytest.mark.parametrize("name", ["manifest.json", ".metadata"])
def test_unreadable_checkpoint_is_not_corrupt(tmp_path, monkeypatch, name):
    """If a network file system has a stale handle, no checkpoint is renamed.

    The next start finds every checkpoint.
    """
    save(tmp_path, 4)
    broken = save(tmp_path, 8) / name
    open_without_waiting = plain_files._open_without_waiting

    def open_or_fail(path, flags):
        if Path(path) == broken:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
        return open_without_waiting(path, flags)

    monkeypatch.setattr(plain_files, "_open_without_waiting", open_or_fail)
    with pytest.raises(CheckpointError, match=f"{name} cannot be read .*no checkpoint was changed"):
        find_newest_good(tmp_path, DIGEST)
    assert list_names(tmp_path) == ["step-00000004", "step-00000008"]
    monkeypatch.undo()
    assert find_newest_good(tmp_path, DIGEST).step == 8


@pytest.mark.parametrize("evidence", ["event log", "metrics"])
def test_folder_that_lost_its_checkpoints_is_no_new_run(tmp_path, evidence):
    assert explain_expected_checkpoint(tmp_path, DIGEST) == ""
    saved = '{"event": "saved", "step": 400}\n' if evidence == "metrics" else ""
    (tmp_path / "metrics.jsonl").write_text('{"step": 423}\n' + saved)
    event_log.append_event(tmp_path, "launched", "...", step=0, digest=DIGEST)
    event_log.append_event(tmp_path, "launched", "...", step=700, digest="e" * 64)
    if evidence == "event log":
        assert explain_expected_checkpoint(tmp_path, DIGEST) == ""
        event_log.append_event(tmp_path, "restarted", "...", step=400, digest=DIGEST)
    with pytest.raises(CheckpointError, match=r"holds no checkpoint, although .*step 400"):
        find_newest_good(tmp_path / "checkpoints", DIGEST, may_begin=False)


def test_checkpoint_of_another_config_is_refused(tmp_path):
    save(tmp_path, 4, digest="e" * 64)
    with pytest.raises(
        CheckpointError,
        match=r"belongs to the launch config eeeeeeeeeeeeeeee\.\.\., this one is dddd",
    ):
        find_newest_good(tmp_path, DIGEST)
    assert list_names(tmp_path) == ["step-00000004"]


def test_complete_checkpoint_is_never_overwritten(tmp_path):
    save(tmp_path, 4, content=b"first")
    with pytest.raises(OSError):
        save(tmp_path, 4, content=b"second")
    assert (tmp_path / "step-00000004" / "__0_0.distcp").read_bytes() == b"first"
    assert find_newest_good(tmp_path, DIGEST).step == 4


def test_unusable_checkpoints_are_removed(tmp_path):
    for step in (4, 8, 12):
        save(tmp_path, step, keep=3, num_rollbacks=int(step == 4))
    warnings = []
    manifest = find_newest_good(
        tmp_path, DIGEST, warnings.append, usable=lambda m: m.num_rollbacks == 1
    )
    assert (manifest.step, list_names(tmp_path)) == (4, ["step-00000004"])
    assert [(warning.step, warning.corrupt) for warning in warnings] == [(12, False), (8, False)]
    save(tmp_path, 8, num_rollbacks=1)


def test_run_without_a_usable_checkpoint_restarts_only_if_allowed(tmp_path):
    save(tmp_path, 8)
    with pytest.raises(CheckpointError, match="only step-00000008: restore one from a backup"):
        find_newest_good(tmp_path, DIGEST, usable=lambda m: False, may_begin=False)
    assert list_names(tmp_path) == ["step-00000008"]
    assert find_newest_good(tmp_path, DIGEST, usable=lambda m: False) is None
    assert list_names(tmp_path) == []


def test_one_checkpoint_is_kept_for_rollbacks():
    """A checkpoint is saved every 10 steps, and a rollback may go back 100 steps."""
    reach_steps = 100
    steps, ages = [], []
    for step in range(10, 2001, 10):
        kept = choose_kept_steps([step, *steps], keep=2, reach_steps=reach_steps)
        steps = sorted(kept, reverse=True)
        # The first step has no earlier checkpoint.
        assert steps[:2] == [step, step - 10][: len(steps)] and len(steps) <= 4
        if step >= 200:
            ages.append(min(step - old for old in steps if step - old >= reach_steps))
    # There is always a checkpoint between once and twice as old as a rollback may reach.
    assert min(ages) == reach_steps and max(ages) < 2 * reach_steps
    assert choose_kept_steps([30, 20, 10], keep=2, reach_steps=0) == {30, 20}
    assert choose_kept_steps([30, 20, 10], keep=1, reach_steps=100) == {30, 10}


CORRUPT = RefusedCheckpoint(step=8, text="checkpoint step-00000008 is corrupt", corrupt=True)
UNDONE = RefusedCheckpoint(
    step=12,
    text="checkpoint step-00000012 is of the part that a rollback undid: deleted",
    corrupt=False,
)


def test_refused_checkpoints_are_printed_and_corrupt_ones_recorded(tmp_path, capsys):
    for refused in (CORRUPT, UNDONE):
        report_refused_checkpoint(tmp_path, DIGEST, refused)
    assert capsys.readouterr().err == f"{CORRUPT.text}\n{UNDONE.text}\n"
    (entry,) = event_log.read_events(tmp_path)
    assert (entry.kind, entry.step, entry.digest, entry.text) == (
        "corrupt",
        8,
        DIGEST,
        CORRUPT.text,
    )


def test_event_log_that_cannot_be_written_is_no_error(tmp_path, capsys):
    (tmp_path / event_log.EVENT_LOG_FILE).symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        event_log.append_event(tmp_path, "note", "x")
    report_refused_checkpoint(tmp_path, DIGEST, CORRUPT)
    assert "chronicle.jsonl: No space left on device; not recorded" in capsys.readouterr().err
