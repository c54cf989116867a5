"""Tests of `forerun watch` on unusual logs: logs that no trainer should write, logs of
runs that are loading or saving, and losses in several files.

A fault of a log that spoils a number must become a note in the output. Only a log that is not a
file ends the watch with an error.
"""

import json
import os
import re

import pytest
from tiny_study import run_forerun, run_json
from watched_case import NUM_STEPS, compute_loss_at, write_events, write_lines, write_run

from forerun._launcher.main_run import event_log
from forerun._launcher.main_run.trainer.rollback import ROLLBACKS_FILE
from forerun._proxies.core import canon
from forerun._proxies.external import metric_files


def look_once(frozen, log):
    """Watch a log once as JSON and once as text; return exit code, body and text."""
    code, body = run_json("watch", frozen, "--once", "--metrics", log)
    canon.to_canonical_json(body)  # The call fails on NaN.
    text_code, text, err = run_forerun("watch", frozen, "--once", "--metrics", log)
    assert code == text_code, err
    assert "Traceback" not in err and "Warning" not in err
    return code, body, text


def make_rows(steps, **more):
    """Return a row with a falling loss for each step."""
    return [{"step": step, "loss": compute_loss_at(step), **more} for step in steps]


def write_bytes(path, data):
    """Write a file, and return its path."""
    path.write_bytes(data)
    return path


ODD = {
    "empty": (lambda path: write_bytes(path, b""), 4, "there are no rows in log.jsonl yet"),
    "zeros": (
        lambda path: write_bytes(path, b"\0" * 5000 + b"\n"),
        4,
        "1 line is not a JSON object",
    ),
    "no UTF-8": (
        lambda path: write_bytes(path, b'{"step": 1, "loss": "\xff\xfe"}\n'),
        4,
        "1 training loss that is not a number",
    ),
    "nested deep": (
        lambda path: write_lines(path, ["[" * 50_000, *make_rows(range(1, 101))]),
        0,
        "1 line is not a JSON object",
    ),
    "begins again at 0": (
        lambda path: write_lines(
            path, [{"step": 0, "loss": 5.0}, *make_rows(range(1, 200)), {"step": 0, "loss": 5.0}]
        ),
        0,
        "1 step logged again: the last value counts",
    ),
    "out of order": (
        lambda path: write_lines(path, make_rows(range(300, 0, -1))),
        0,
        "",
    ),
    "huge": (
        lambda path: write_lines(
            path, make_rows(range(1, 101)) + [{"step": 101, "loss": 1e308}] * 3
        ),
        3,
        "again",
    ),
    "no newline": (lambda path: write_bytes(path, b"x" * 70_000), 4, "this is not a JSONL file"),
    "no W&B file": (
        lambda path: write_bytes(path.with_suffix(".wandb"), b"hello there"),
        4,
        "this is not a W&B run",
    ),
}
"""Odd logs by name: a function that writes the log, the expected exit code, and words of a note."""


@pytest.mark.parametrize("oddity", ODD)
def test_odd_log_gets_a_note_and_is_not_fatal(frozen, tmp_path, oddity, monkeypatch):
    monkeypatch.setattr(metric_files, "MAX_PENDING_BYTES", 2**16)  # the default is 64 MiB
    write_log, expected_code, words = ODD[oddity]
    code, body, text = look_once(frozen, write_log(tmp_path / "log.jsonl"))
    assert code == expected_code, text
    assert not words or any(words in note for note in body["notes"]), body["notes"]
    assert all(f"log: {note}" in text for note in body["notes"])


def test_pipe_or_device_is_refused_without_waiting(frozen, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (frozen / "run").mkdir()
    os.mkfifo(frozen / "run" / "metrics.jsonl")
    # Without options the run's own log is read, which is a pipe here.
    for options in (("--metrics", tmp_path / "pipe"), (), ("--metrics", "/dev/zero")):
        code, body = run_json("watch", frozen, "--once", *options)
        assert code == 2
        assert re.search("it is a (pipe|device): must be a plain file", body["message"])


@pytest.mark.parametrize("value", [True, [2.0], {"value": 2.0}, "n/a"], ids=repr)
def test_loss_that_is_no_number_is_ignored(frozen, tmp_path, value):
    lines = [
        *make_rows(range(1, 200)),
        {"step": 200, "loss": value},
        {"step": NUM_STEPS, "val_loss": value},
    ]
    path = write_lines(tmp_path / "log.jsonl", lines)
    code, body, text = look_once(frozen, path)
    assert (code, body["figures"]["step"]) == (0, 199), text
    # An object is read as columns with a dot in their names, so it is no bad loss.
    if not isinstance(value, dict):
        assert any("1 training loss that is not a number" in note for note in body["notes"])
    code, _ = run_json("watch", frozen, "--conclude", "--metrics", path)
    assert code == 4, "the value is no final loss either"


def test_run_that_loads_or_saves_is_not_stalled(decision, frozen):
    """The log is silent for 50 minutes; files in the run's folder show what the run is doing."""
    path = write_run(frozen / "run", 300, digest=decision.digest)
    long_ago = path.stat().st_mtime - 3000
    os.utime(path, (long_ago, long_ago))
    assert "stalled" in [
        alert["name"] for alert in run_json("watch", frozen, "--once")[1]["alerts"]
    ]
    folder = frozen / "run" / "checkpoints" / "step-00000300.tmp"
    folder.mkdir(parents=True)
    (folder / "rank-0").write_bytes(b"half")
    assert run_json("watch", frozen, "--once")[0] == 0, "a save is being written"
    for path in (folder / "rank-0", folder, folder.parent):
        os.utime(path, (long_ago, long_ago))
    assert run_json("watch", frozen, "--once")[0] == 3
    (frozen / "run" / ROLLBACKS_FILE).write_text("{}")
    assert run_json("watch", frozen, "--once")[0] == 0, "the run is rolling back"
    os.utime(frozen / "run" / ROLLBACKS_FILE, (long_ago - 60, long_ago - 60))
    event_log.append_event(
        frozen / "run", "launched", "launched from step 300", step=300, digest="cd" * 32
    )
    assert run_json("watch", frozen, "--once")[0] == 3, "the launch belongs to another run"
    event_log.append_event(
        frozen / "run", "restarted", "restarting", step=300, digest=decision.digest
    )
    assert run_json("watch", frozen, "--once")[0] == 0, "the restarted run is loading"
    event_log.append_event(
        frozen / "run", "ended", "failed at step 300: no memory", step=300, digest=decision.digest
    )
    code, body = run_json("watch", frozen, "--once")
    assert code == 3
    assert "its supervisor has ended: failed at step 300: no memory" in body["alerts"][0]["seen"]


def test_validation_loss_in_a_separate_file_belongs_to_the_run(frozen, tmp_path):
    write_events(
        tmp_path / "tb" / "train",
        [(s, {"lm loss": compute_loss_at(s)}) for s in range(1, NUM_STEPS)],
    )
    write_events(tmp_path / "tb" / "valid", [(NUM_STEPS, {"lm loss validation": 2.15})])
    code, body = run_json("watch", frozen, "--conclude", "--metrics", tmp_path / "tb")
    assert (code, body.get("actual_nats")) == (0, pytest.approx(2.15)), json.dumps(body)
