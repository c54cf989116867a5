"""The mirror of a main run: every step once, over rewinds and rollbacks, read back by a reader of
its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from main_run import tiny_decision
from wandb_case import Server, read_run

from launcher.base import metrics
from launcher.dashboards import log_sink, wandb_writer
from launcher.dashboards.log_sink import LogSink
from launcher.dashboards.main_run import MetricsLog
from proxies.external import wandb_run

KEY = "5ec7e7" * 6 + "0000"


def line(step, loss=None, **more):
    return {
        "step": step,
        "train_loss_nats": loss or 3 - 0.1 * step,
        "seconds": 0.5,
        "tokens": 256 * step,
        **more,
    }


def rewound(run_dir, to_step, *then):
    metrics.rewind(run_dir, to_step)
    for record in then:
        metrics.append(run_dir, record)


def rollback(to_step, start, number=1):
    return {
        "event": "rolled_back",
        "step": start,
        "to_step": to_step,
        "skipped_sequences": 8,
        "clip_norm": 0.3,
        "reason": f"spike {number}",
    }


GONE_BACK = ("to_step", "skipped_sequences", "clip_norm")
STARTED = {"event": "started", "step": 0, "digest": "ab" * 32, "num_ranks": 2}
FULL = line(
    1,
    rank_seconds=[0.25, 0.5],
    layers={
        "layers.0": {"weight_rms": 0.02, "param_norm": 4.0, "grad_norm": 1.5, "update_ratio": 1e-3}
    },
    validation_loss_nats=2.5,
    mfu=0.41,
)
FLAT = {
    "step": 1,
    "train_loss_nats": 2.9,
    "seconds": 0.5,
    "tokens": 256,
    "rank_seconds/0": 0.25,
    "rank_seconds/1": 0.5,
    "layers/layers.0/weight_rms": 0.02,
    "layers/layers.0/param_norm": 4.0,
    "layers/layers.0/grad_norm": 1.5,
    "layers/layers.0/update_ratio": 1e-3,
    "validation_loss_nats": 2.5,
    "mfu": 0.41,
}


# Rows


def steps_of(rows):
    return [(row["step"], row["take"]) for row in rows]


def columns_of(row):
    return {name: value for name, value in row.items() if name not in ("step", "take")}


def test_resumed_steps_are_told_once(tmp_path):
    rows = MetricsLog(tmp_path)
    metrics.append(tmp_path, STARTED)
    for step in range(1, 7):
        metrics.append(tmp_path, line(step))
    assert steps_of(rows.read()) == [(step, 1) for step in range(1, 7)]
    rewound(tmp_path, 4, {**STARTED, "step": 4}, line(5), line(6), line(7))
    assert steps_of(rows.read()) == [(7, 1)]
    rewound(tmp_path, 4, line(5))
    assert rows.read() == []
    for step in (6, 7, 8):
        metrics.append(tmp_path, line(step))
    assert steps_of(rows.read()) == [(8, 1)]


def test_rolled_back_steps_are_told_again(tmp_path):
    rows = MetricsLog(tmp_path)
    for step in range(1, 11):
        metrics.append(tmp_path, line(step))
    rows.read()
    rewound(
        tmp_path,
        4,
        rollback(to_step=6, start=4),
        *(line(step, 1.0 + step) for step in range(5, 12)),
    )
    told = rows.read()
    assert steps_of(told) == [(step, 2) for step in range(6, 12)]
    assert columns_of(told[0]) == {
        f"rolled_back/{k}": v for k, v in rollback(6, 4).items() if k in GONE_BACK
    }
    assert told[1]["train_loss_nats"] == 8.0
    # Killed, and resumed from before the rollback, which is said again at another step.
    rewound(
        tmp_path,
        3,
        rollback(to_step=6, start=3),
        *(line(step, 1.0 + step) for step in range(4, 13)),
    )
    assert steps_of(rows.read()) == [(12, 2)]
    rewound(tmp_path, 8, rollback(to_step=9, start=8, number=2), line(9), line(10))
    assert steps_of(rows.read()) == [(9, 3), (10, 3)]


# Beside a run


@pytest.fixture
def decision(corpus):
    return tiny_decision(corpus)


def logged(run_dir):
    (path,) = (run_dir / "wandb").glob("offline-run-*")
    return read_run(path)


def test_it_shows_a_run_while_it_grows_rewinds_and_goes_back(decision, tmp_path):
    metrics.append(tmp_path, STARTED)
    metrics.append(tmp_path, FULL)
    with (shown := LogSink(tmp_path, decision, "offline")):
        for step in range(2, 9):
            metrics.append(tmp_path, line(step))
        await_wandb(tmp_path)
        rewound(
            tmp_path, 4, rollback(to_step=5, start=4), *(line(step, 7.0) for step in range(5, 8))
        )
        metrics.append(tmp_path, line(8, 7.5))
    assert (shown.outcome.whole, shown.outcome.num_rows) == (True, 12)
    config, _, history = logged(tmp_path)
    assert config["digest"] == decision.digest
    assert config["predicted_loss_nats"] == decision.predicted.loss_nats
    assert [(row["step"], row["take"]) for row in history] == [
        *((step, 1) for step in range(1, 9)),
        (5, 2),
        (6, 2),
        (7, 2),
        (8, 2),
    ]
    assert {name: history[0][name] for name in FLAT} == FLAT
    assert (history[8]["rolled_back/to_step"], history[-1]["train_loss_nats"]) == (5, 7.5)


def await_wandb(run_dir):
    """Until W&B's own process has taken what was there: it writes every 15 s, so its file may tell
    less.
    """
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        logs = (run_dir / "wandb").glob("offline-run-*/logs/debug.log")
        if any("run started, returning control" in path.read_text() for path in logs):
            time.sleep(2.5)  # two looks
            return
        time.sleep(0.1)
    raise AssertionError("wandb did not begin")


def test_one_that_dies_is_told_and_the_run_goes_on(decision, tmp_path, capsys):
    with (shown := LogSink(tmp_path, decision, "offline")):
        await_child("launcher.dashboards.wandb_process", tmp_path, kill=True)
        metrics.append(tmp_path, line(1))
        deadline = time.monotonic() + 30
        while (
            "logging to wandb ended early" not in (said := capsys.readouterr().err)
            and time.monotonic() < deadline
        ):
            time.sleep(0.1)
        assert "wandb exited with code -9" in said
    assert not shown.outcome.whole and "wandb exited with code -9" in shown.outcome.text


def await_child(module, run_dir, *, kill):
    """The mirror of this process, once it is up; its pid."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                words, parent = (
                    path.read_bytes().split(b"\0"),
                    (path.parent / "stat").read_text().split()[3],
                )
            except OSError:
                continue
            if module.encode() in words and int(parent) == os.getpid():
                if kill:
                    os.kill(int(path.parent.name), signal.SIGKILL)
                return int(path.parent.name)
        time.sleep(0.02)
    raise AssertionError(f"no {module} for {run_dir}")


def test_what_wandb_says_it_wrote_is_read_back_and_counted(decision, tmp_path, monkeypatch):
    class Short(wandb_run.WandbRun):
        def read(self, max_bytes):
            return [row for row in super().read(max_bytes) if row["_step"] != 1]

    for step in (1, 2, 3):
        metrics.append(tmp_path, line(step))
    monkeypatch.setattr(wandb_run, "WandbRun", Short)
    monkeypatch.setattr(wandb_writer, "FLUSH_SECONDS", 2.0)
    with (shown := LogSink(tmp_path, decision, "offline")):
        pass
    assert not shown.outcome.whole and "1 of 3 rows" in shown.outcome.text
    assert len(logged(tmp_path)[2]) == 3, "what is there stays"


def test_rows_go_online_with_the_users_own_login(decision, tmp_path, monkeypatch):
    run_dir = tmp_path
    for step in (1, 2):
        metrics.append(run_dir, line(step))
    with Server() as server:
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        monkeypatch.setenv("WANDB_API_KEY", KEY)
        with (shown := LogSink(run_dir, decision, "online")):
            pass
    assert shown.outcome.whole, shown.outcome.text
    assert shown.outcome.url is not None
    sent = [
        json.loads(row)
        for body in server.streamed
        for name, part in body.get("files", {}).items()
        if name.endswith("history.jsonl")
        for row in part["content"]
    ]
    assert [(row["step"], row["train_loss_nats"]) for row in sent] == [(1, 2.9), (2, 2.8)]


def test_one_that_does_not_end_is_ended(decision, tmp_path, monkeypatch):
    monkeypatch.setattr(log_sink, "FINISH_SECONDS", 1.0)
    with (shown := LogSink(tmp_path, decision, "offline")):
        pid = await_child("launcher.dashboards.wandb_process", tmp_path, kill=False)
        os.kill(pid, signal.SIGSTOP)
    assert not shown.outcome.whole and "within 1 s" in shown.outcome.text
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_killed_supervisor_leaves_what_was_told_and_no_process(corpus, decision, tmp_path):
    run_dir = tmp_path
    metrics.append(run_dir, line(1))
    code = (
        f"import sys, time; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from pathlib import Path; from main_run import tiny_decision\n"
        "from launcher.dashboards.log_sink import LogSink\n"
        "with LogSink(Path(sys.argv[1]), tiny_decision(Path(sys.argv[2])), 'offline'):\n"
        "    time.sleep(600)"
    )
    job = subprocess.Popen([sys.executable, "-c", code, run_dir, corpus])
    await_wandb(run_dir)
    job.kill()
    job.wait()
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and writers(run_dir):
        time.sleep(0.1)
    assert writers(run_dir) == []
    assert [row["step"] for row in logged(run_dir)[2]] == [1]


def writers(folder):
    """Processes that hold a file below a folder open."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            for link in (process / "fd").iterdir():
                with contextlib.suppress(OSError):  # that file was closed
                    found += [link] * str(link.readlink()).startswith(str(folder))
    return found
