"""Tests of `LogSink`, which mirrors a main run's metrics to W&B while it trains.

Each step is logged once, also after the metrics file is rewound by a resume or a rollback. The
logged runs are read back with `wandb_case.read_run`.
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
from main_run import make_tiny_decision
from wandb_case import Server, read_run

from forerun._launcher.main_run import metrics_file
from forerun._launcher.report.dashboards import log_sink, wandb_writer
from forerun._launcher.report.dashboards.log_sink import LogSink
from forerun._launcher.report.dashboards.main_run import MetricsLog
from forerun._proxies.external import wandb_run

KEY = "5ec7e7" * 6 + "0000"
"""API key of the user."""
SUPPORT = Path(__file__).parents[3] / "support" / "launcher"


def make_line(step, loss=None, **more):
    """Return a line of the metrics file."""
    return {
        "step": step,
        "train_loss_nats": loss or 3 - 0.1 * step,
        "seconds": 0.5,
        "tokens": 256 * step,
        **more,
    }


def rewind_and_append(run_dir, to_step, *lines):
    """Rewind the metrics file as a resumed run does, then append its new lines."""
    metrics_file.rewind_metrics(run_dir, to_step)
    for record in lines:
        metrics_file.append_line(run_dir, record)


def make_rollback(to_step, start, number=1):
    """Return the line of a rollback that was decided in an attempt which began at `start`."""
    return {
        "event": "rolled_back",
        "step": start,
        "to_step": to_step,
        "skipped_sequences": 8,
        "clip_norm": 0.3,
        "reason": f"spike {number}",
    }


LOGGED_ROLLBACK_KEYS = ("to_step", "skipped_sequences", "clip_norm")
STARTED = {"event": "started", "step": 0, "digest": "ab" * 32, "num_ranks": 2}
FULL_LINE = make_line(
    1,
    rank_seconds=[0.25, 0.5],
    layers={
        "layers.0": {"weight_rms": 0.02, "param_norm": 4.0, "grad_norm": 1.5, "update_ratio": 1e-3}
    },
    validation_loss_nats=2.5,
    mfu=0.41,
)
FLAT_COLUMNS = {
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


# ---- Rows of the metrics file ----


def list_steps(rows):
    """Return (step, take) of each row; a rollback begins a new take."""
    return [(row["step"], row["take"]) for row in rows]


def test_resumed_steps_are_logged_once(tmp_path):
    rows = MetricsLog(tmp_path)
    metrics_file.append_line(tmp_path, STARTED)
    for step in range(1, 7):
        metrics_file.append_line(tmp_path, make_line(step))
    assert list_steps(rows.read()) == [(step, 1) for step in range(1, 7)]
    rewind_and_append(tmp_path, 4, {**STARTED, "step": 4}, make_line(5), make_line(6), make_line(7))
    assert list_steps(rows.read()) == [(7, 1)]
    rewind_and_append(tmp_path, 4, make_line(5))
    assert rows.read() == []
    for step in (6, 7, 8):
        metrics_file.append_line(tmp_path, make_line(step))
    assert list_steps(rows.read()) == [(8, 1)]


def test_rolled_back_steps_are_logged_again_as_a_new_take(tmp_path):
    rows = MetricsLog(tmp_path)
    for step in range(1, 11):
        metrics_file.append_line(tmp_path, make_line(step))
    rows.read()
    rewind_and_append(
        tmp_path,
        4,
        make_rollback(to_step=6, start=4),
        *(make_line(step, 1.0 + step) for step in range(5, 12)),
    )
    new_rows = rows.read()
    assert list_steps(new_rows) == [(step, 2) for step in range(6, 12)]
    event = make_rollback(to_step=6, start=4)
    assert new_rows[0] == {
        "step": 6,
        "take": 2,
        **{f"rolled_back/{key}": event[key] for key in LOGGED_ROLLBACK_KEYS},
    }
    assert new_rows[1]["train_loss_nats"] == 8.0

    # The run is killed, resumes from step 3, and decides the same rollback again there.
    rewind_and_append(
        tmp_path,
        3,
        make_rollback(to_step=6, start=3),
        *(make_line(step, 1.0 + step) for step in range(4, 13)),
    )
    assert list_steps(rows.read()) == [(12, 2)]
    rewind_and_append(
        tmp_path, 8, make_rollback(to_step=9, start=8, number=2), make_line(9), make_line(10)
    )
    assert list_steps(rows.read()) == [(9, 3), (10, 3)]


# ---- W&B during a run ----


@pytest.fixture
def decision(corpus):
    return make_tiny_decision(corpus)


def read_logged_run(run_dir):
    """Return config, summary, and rows of the run that was logged offline."""
    (path,) = (run_dir / "wandb").glob("offline-run-*")
    return read_run(path)


def test_running_main_run_is_logged_over_a_rollback(decision, tmp_path):
    metrics_file.append_line(tmp_path, STARTED)
    metrics_file.append_line(tmp_path, FULL_LINE)
    sink = LogSink(tmp_path, decision, "offline")
    with sink:
        for step in range(2, 9):
            metrics_file.append_line(tmp_path, make_line(step))
        await_wandb(tmp_path)
        rewind_and_append(
            tmp_path,
            4,
            make_rollback(to_step=5, start=4),
            *(make_line(step, 7.0) for step in range(5, 8)),
        )
        metrics_file.append_line(tmp_path, make_line(8, 7.5))
    # Eight steps, the rollback, and three more steps
    assert (sink.outcome.whole, sink.outcome.num_rows) == (True, 12)
    config, _, history = read_logged_run(tmp_path)
    assert config["digest"] == decision.digest
    assert config["predicted_loss_nats"] == decision.predicted.loss_nats
    assert [(row["step"], row["take"]) for row in history] == [
        *((step, 1) for step in range(1, 9)),
        (5, 2),
        (6, 2),
        (7, 2),
        (8, 2),
    ]
    assert {name: history[0][name] for name in FLAT_COLUMNS} == FLAT_COLUMNS
    assert (history[8]["rolled_back/to_step"], history[-1]["train_loss_nats"]) == (5, 7.5)


def await_wandb(run_dir):
    """Wait until the sink has read the present lines of the metrics.

    The log of wandb shows that its process has started. The test does not wait for the file of the
    run, which wandb writes only every 15 s.
    """
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        logs = (run_dir / "wandb").glob("offline-run-*/logs/debug.log")
        if any("run started, returning control" in path.read_text() for path in logs):
            time.sleep(2.5 * log_sink.POLL_SECONDS)  # The sink reads the metrics at least twice.
            return
        time.sleep(0.1)
    raise AssertionError("wandb did not start")


def test_killed_wandb_process_is_reported_and_the_run_continues(decision, tmp_path, capsys):
    sink = LogSink(tmp_path, decision, "offline")
    with sink:
        os.kill(await_wandb_process(), signal.SIGKILL)
        metrics_file.append_line(tmp_path, make_line(1))
        deadline = time.monotonic() + 30
        message = ""
        while "logging to wandb ended early" not in message and time.monotonic() < deadline:
            time.sleep(0.1)
            message = capsys.readouterr().err
        assert "wandb exited with code -9" in message
    assert not sink.outcome.whole and "wandb exited with code -9" in sink.outcome.text


def await_wandb_process():
    """Wait until this process has a child that logs to W&B, and return its process id."""
    module = b"forerun._launcher.report.dashboards.wandb_process"
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                words = path.read_bytes().split(b"\0")
                parent = (path.parent / "stat").read_text().split()[3]
            except OSError:
                continue
            if module in words and int(parent) == os.getpid():
                return int(path.parent.name)
        time.sleep(0.02)
    raise AssertionError("no process logs to wandb")


def test_rows_missing_from_wandb_are_counted(decision, tmp_path, monkeypatch):
    """The rows are read back, because wandb may report more than it wrote."""

    class IncompleteRun(wandb_run.WandbRun):
        def read(self, max_bytes):
            return [row for row in super().read(max_bytes) if row["_step"] != 1]

    for step in (1, 2, 3):
        metrics_file.append_line(tmp_path, make_line(step))
    monkeypatch.setattr(wandb_run, "WandbRun", IncompleteRun)
    monkeypatch.setattr(wandb_writer, "FLUSH_SECONDS", 2.0)
    sink = LogSink(tmp_path, decision, "offline")
    with sink:
        pass
    assert not sink.outcome.whole and "1 of 3 rows" in sink.outcome.text
    assert len(read_logged_run(tmp_path)[2]) == 3, "the written rows stay"


def test_rows_are_sent_online_with_the_users_login(decision, tmp_path, monkeypatch):
    run_dir = tmp_path
    for step in (1, 2):
        metrics_file.append_line(run_dir, make_line(step))
    with Server() as server:
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        monkeypatch.setenv("WANDB_API_KEY", KEY)
        sink = LogSink(run_dir, decision, "online")
        with sink:
            pass
    assert sink.outcome.whole, sink.outcome.text
    assert sink.outcome.url is not None
    sent = [
        json.loads(row)
        for body in server.streamed
        for name, part in body.get("files", {}).items()
        if name.endswith("history.jsonl")
        for row in part["content"]
    ]
    assert [(row["step"], row["train_loss_nats"]) for row in sent] == [(1, 2.9), (2, 2.8)]


def test_wandb_process_that_hangs_is_killed(decision, tmp_path, monkeypatch):
    monkeypatch.setattr(log_sink, "FINISH_SECONDS", 1.0)
    sink = LogSink(tmp_path, decision, "offline")
    with sink:
        pid = await_wandb_process()
        os.kill(pid, signal.SIGSTOP)
    assert not sink.outcome.whole and "within 1 s" in sink.outcome.text
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_killed_supervisor_leaves_its_logged_rows_and_no_process(corpus, decision, tmp_path):
    run_dir = tmp_path
    metrics_file.append_line(run_dir, make_line(1))
    code = (
        f"import sys, time; sys.path.insert(0, {str(SUPPORT)!r})\n"
        "from pathlib import Path; from main_run import make_tiny_decision\n"
        "from forerun._launcher.report.dashboards.log_sink import LogSink\n"
        "with LogSink(Path(sys.argv[1]), make_tiny_decision(Path(sys.argv[2])), 'offline'):\n"
        "    time.sleep(600)"
    )
    job = subprocess.Popen([sys.executable, "-c", code, run_dir, corpus])
    await_wandb(run_dir)
    job.kill()
    job.wait()
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and find_open_files(run_dir):
        time.sleep(0.1)
    assert find_open_files(run_dir) == []
    assert [row["step"] for row in read_logged_run(run_dir)[2]] == [1]


def find_open_files(folder):
    """Return the descriptors, of any process, that are open on a file below a folder."""
    descriptors = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # the process has ended
            for link in (process / "fd").iterdir():
                with contextlib.suppress(OSError):  # the file was closed
                    if str(link.readlink()).startswith(str(folder)):
                        descriptors.append(link)
    return descriptors
