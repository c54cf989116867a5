"""Logs that no trainer should leave, each watched as a user would: told in words, and never
fatal.
"""

import json
import os
import re

import pytest
from tiny_study import ask, forerun
from watched_case import NUM_STEPS, loss_at, write_events, write_lines, write_run

from launcher.base import chronicle
from launcher.trainer.rollback import ROLLBACKS_FILE
from proxies.core import canon
from proxies.external import metric_files


def look(frozen, where):
    """One look, as text too; its notes."""
    code, body = ask("watch", frozen, "--once", "--metrics", where)
    canon.canonical(body)
    text_code, text, said = forerun("watch", frozen, "--once", "--metrics", where)
    assert code == text_code, said
    assert "Traceback" not in said and "Warning" not in said
    return code, body, text


def plain(steps, **more):
    return [{"step": step, "loss": loss_at(step), **more} for step in steps]


def write_bytes(path, data):
    path.write_bytes(data)
    return path


ODD = {
    "empty": (lambda p: write_bytes(p, b""), 4, "there are no rows in log.jsonl yet"),
    "zeros": (lambda p: write_bytes(p, b"\0" * 5000 + b"\n"), 4, "1 line is not a JSON object"),
    "no UTF-8": (
        lambda p: write_bytes(p, b'{"step": 1, "loss": "\xff\xfe"}\n'),
        4,
        "1 training loss is not a number",
    ),
    "nested deep": (
        lambda p: write_lines(p, ["[" * 50_000, *plain(range(1, 101))]),
        0,
        "1 line is not a JSON object",
    ),
    "begins again at 0": (
        lambda p: write_lines(
            p, [{"step": 0, "loss": 5.0}, *plain(range(1, 200)), {"step": 0, "loss": 5.0}]
        ),
        0,
        "1 step was logged again: the last value counts",
    ),
    "out of order": (
        lambda p: write_lines(p, plain(range(300, 0, -1))),
        0,
        "",
    ),
    "huge": (
        lambda p: write_lines(p, plain(range(1, 101)) + [{"step": 101, "loss": 1e308}] * 3),
        3,
        "again",
    ),
    "no newline for ever": (lambda p: write_bytes(p, b"x" * 70_000), 4, "this is not a JSONL file"),
    "no W&B file": (
        lambda p: write_bytes(p.with_suffix(".wandb"), b"hello there"),
        4,
        "this is not a W&B run",
    ),
}


@pytest.mark.parametrize("what", ODD)
def test_what_is_odd_is_told_and_is_not_fatal(frozen, tmp_path, what, monkeypatch):
    monkeypatch.setattr(metric_files, "MAX_PENDING_BYTES", 2**16)  # in place of 64 MiB
    make, wanted, note = ODD[what]
    code, body, text = look(frozen, make(tmp_path / "log.jsonl"))
    assert code == wanted, text
    assert not note or any(note in said for said in body["notes"]), body["notes"]
    assert all(f"log: {said}" in text for said in body["notes"])


def test_what_is_no_plain_file_is_refused_and_not_waited_for(frozen, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (frozen / "run").mkdir()
    os.mkfifo(frozen / "run" / "metrics.jsonl")
    for options in (("--metrics", tmp_path / "pipe"), (), ("--metrics", "/dev/zero")):
        code, body = ask("watch", frozen, "--once", *options)
        assert code == 2
        assert re.search("it is a (pipe|device): must be a plain file", body["message"])


@pytest.mark.parametrize("value", [True, [2.0], {"value": 2.0}, "n/a"], ids=repr)
def test_what_is_no_number_is_no_loss(frozen, tmp_path, value):
    lines = [
        *plain(range(1, 200)),
        {"step": 200, "loss": value},
        {"step": NUM_STEPS, "val_loss": value},
    ]
    path = write_lines(tmp_path / "log.jsonl", lines)
    code, body, text = look(frozen, path)
    assert (code, body["figures"]["step"]) == (0, 199), text
    assert isinstance(value, dict) or any(
        "1 training loss is not a number" in note for note in body["notes"]
    )
    assert ask("watch", frozen, "--conclude", "--metrics", path)[0] == 4, "nor is it a final loss"


def test_a_run_that_loads_or_saves_is_not_stalled(decision, frozen):
    """Its log is silent for an hour; its folder says why."""
    path = write_run(frozen / "run", 300, digest=decision.digest)
    hour_ago = path.stat().st_mtime - 3000
    os.utime(path, (hour_ago, hour_ago))
    assert "stalled" in [alert["name"] for alert in ask("watch", frozen, "--once")[1]["alerts"]]
    folder = frozen / "run" / "checkpoints" / "step-00000300.tmp"
    folder.mkdir(parents=True)
    (folder / "rank-0").write_bytes(b"half")
    assert ask("watch", frozen, "--once")[0] == 0, "it saves"
    for each in (folder / "rank-0", folder, folder.parent):
        os.utime(each, (hour_ago, hour_ago))
    assert ask("watch", frozen, "--once")[0] == 3
    (frozen / "run" / ROLLBACKS_FILE).write_text("{}")
    assert ask("watch", frozen, "--once")[0] == 0, "it goes back"
    os.utime(frozen / "run" / ROLLBACKS_FILE, (hour_ago - 60, hour_ago - 60))
    chronicle.record(
        frozen / "run", "launched", "launched from step 300", step=300, digest="cd" * 32
    )
    assert ask("watch", frozen, "--once")[0] == 3, "another run's launch"
    chronicle.record(frozen / "run", "restarted", "restarting", step=300, digest=decision.digest)
    assert ask("watch", frozen, "--once")[0] == 0, "it loads"
    chronicle.record(
        frozen / "run", "ended", "failed at step 300: no memory", step=300, digest=decision.digest
    )
    code, body = ask("watch", frozen, "--once")
    assert code == 3
    assert "its supervisor has ended: failed at step 300: no memory" in body["alerts"][0]["seen"]


def test_a_validation_loss_in_a_file_of_its_own_is_of_the_run(frozen, tmp_path):
    write_events(
        tmp_path / "tb" / "train", [(s, {"lm loss": loss_at(s)}) for s in range(1, NUM_STEPS)]
    )
    write_events(tmp_path / "tb" / "valid", [(NUM_STEPS, {"lm loss validation": 2.15})])
    code, body = ask("watch", frozen, "--conclude", "--metrics", tmp_path / "tb")
    assert (code, body.get("actual_nats")) == (0, pytest.approx(2.15)), json.dumps(body)
