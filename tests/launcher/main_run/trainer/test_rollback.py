"""Tests of rollbacks: after a spike of its loss, a run goes back to a checkpoint and skips data.

A run that was rolled back must equal a run that read the later data from the start. This must hold
also if the run is killed and resumed.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from main_run import QUIET_TORCH
from spike_case import (
    NUM_STEPS,
    POLICY,
    make_spike_decision,
    read_curve,
    read_events,
    train_poisoned,
)

from forerun._launcher.main_run import event_log
from forerun._launcher.main_run.checkpoint_folders import CheckpointError, CorruptError
from forerun._launcher.main_run.trainer import rollback
from forerun._launcher.main_run.trainer.rollback import Rollback, RollbackHistory
from forerun._launcher.main_run.trainer.training import Trainer
from forerun._proxies.core import canon

pytestmark = QUIET_TORCH


@pytest.fixture(scope="module")
def rolled_back(one_rank, corpus, tmp_path_factory):
    """Folder and ending of an uninterrupted run that rolls back after a spike on poisoned data."""
    out = tmp_path_factory.mktemp("back")
    return out / "run", train_poisoned(make_spike_decision(corpus), corpus, out)


def read_rollbacks(run_dir, digest):
    return RollbackHistory.read(run_dir, digest).rollbacks


def list_rollback_events(run_dir):
    """Return the rollbacks in the event log of a run."""
    return [entry for entry in event_log.read_events(run_dir) if entry.kind == "rolled_back"]


def test_rollback_equals_a_run_that_skips_the_poisoned_data(rolled_back, corpus, tmp_path):
    run_dir, ending = rolled_back
    assert (ending.event, ending.step) == ("finished", NUM_STEPS)
    (recorded,) = read_rollbacks(run_dir, make_spike_decision(corpus).digest)
    assert (recorded.at_step, recorded.to_step, recorded.skipped_sequences) == (22, 16, 80)
    assert recorded.clip_norm == 0.5, "the first rollback keeps the frozen clip norm"

    quiet = make_spike_decision(corpus, policy=dataclasses.replace(POLICY, max_rollbacks=0))
    reference = train_poisoned(quiet, corpus, tmp_path, shift=80, from_sequence=16 * 8)
    assert read_curve(tmp_path / "run") == read_curve(run_dir)
    assert reference.validation_loss_nats == ending.validation_loss_nats
    assert not (tmp_path / "run" / rollback.ROLLBACKS_FILE).exists()


@pytest.mark.parametrize(
    "stop_step", [21, *(pytest.param(step, marks=pytest.mark.slow) for step in (18, 22, 24))]
)
def test_stopped_and_resumed_run_rolls_back_to_the_same_losses(
    rolled_back, corpus, tmp_path, stop_step
):
    """The spike has begun by steps 21 and 22, so the count of high losses must survive the stop."""
    decision = make_spike_decision(corpus)
    train_poisoned(decision, corpus, tmp_path, stop_after=stop_step)
    assert train_poisoned(decision, corpus, tmp_path) == rolled_back[1]
    assert read_curve(tmp_path / "run") == read_curve(rolled_back[0])
    assert len(list_rollback_events(tmp_path / "run")) == 1


class KilledError(Exception):
    """Raised in place of the process's death."""


@pytest.mark.parametrize(
    "function",
    [
        pytest.param(
            "forerun._launcher.main_run.trainer.rollback.RollbackHistory.write",
            id="before the rollback is recorded",
        ),
        pytest.param(
            "forerun._launcher.main_run.trainer.model_builder.build_optimizer",
            marks=pytest.mark.slow,
            id="after the rollback is recorded",
        ),
        pytest.param(
            "forerun._launcher.main_run.trainer.checkpoints.read_tensors",
            id="after the stale checkpoints are removed",
        ),
        pytest.param(
            "forerun._launcher.main_run.event_log.append_event",
            marks=pytest.mark.slow,
            id="before the rollback is in the event log",
        ),
        pytest.param(
            "forerun._launcher.main_run.trainer.rollback.metrics_file.append_line",
            id="before the rollback is in the metrics",
        ),
    ],
)
def test_run_killed_during_a_rollback_resumes_to_the_same_losses(
    rolled_back, corpus, tmp_path, monkeypatch, function
):
    """An error in place of a function's call stands for the kill."""
    decision = make_spike_decision(corpus)
    go_back = Trainer._go_back

    def raise_killed(*_, **__):
        raise KilledError

    def die_within(self, decided):
        self.saver.settle()  # A killed process has no thread that could still write.
        with monkeypatch.context() as patch:
            patch.setattr(function, raise_killed)
            go_back(self, decided)

    with monkeypatch.context() as patch, pytest.raises(KilledError):
        patch.setattr(Trainer, "_go_back", die_within)
        train_poisoned(decision, corpus, tmp_path)
    assert train_poisoned(decision, corpus, tmp_path) == rolled_back[1]
    assert read_curve(tmp_path / "run") == read_curve(rolled_back[0])
    assert (
        len(list_rollback_events(tmp_path / "run"))
        == len(read_events(tmp_path / "run", "rolled_back"))
        == 1
    )
    assert len(read_rollbacks(tmp_path / "run", decision.digest)) == 1


KILLED = """
import os, signal, sys
from pathlib import Path
import torch.distributed as dist
from spike_case import make_spike_decision, train_poisoned
from forerun._launcher.main_run.trainer.rollback import RollbackHistory
corpus, out = map(Path, sys.argv[1:])
write = RollbackHistory.write
def write_and_die(*args):
    write(*args)
    os.kill(os.getpid(), signal.SIGKILL)
RollbackHistory.write = write_and_die
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
train_poisoned(make_spike_decision(corpus), corpus, out)
"""


def test_real_kill_after_the_record_resumes_to_the_same_losses(rolled_back, corpus, tmp_path):
    support = str(Path(__file__).parents[3] / "support" / "launcher")
    program = f"import sys; sys.path.insert(0, {support!r})\n{KILLED}"
    process = subprocess.run(
        [sys.executable, "-c", program, corpus, tmp_path],
        timeout=120,
        check=False,
        capture_output=True,
    )
    assert process.returncode == -signal.SIGKILL, process.stderr.decode()
    assert max(read_curve(tmp_path / "run")) == 22 and not list_rollback_events(tmp_path / "run")
    assert train_poisoned(make_spike_decision(corpus), corpus, tmp_path) == rolled_back[1]
    assert read_curve(tmp_path / "run") == read_curve(rolled_back[0])


def test_full_disk_stops_the_run_before_it_rolls_back(rolled_back, corpus, tmp_path, monkeypatch):
    decision, write_atomic = make_spike_decision(corpus), canon.write_atomic

    def write_or_fail(path, content):
        if path.name == rollback.ROLLBACKS_FILE:
            raise OSError(errno.ENOSPC, "No space left on device")
        write_atomic(path, content)

    with monkeypatch.context() as patch:
        patch.setattr(canon, "write_atomic", write_or_fail)
        ending = train_poisoned(decision, corpus, tmp_path)
    assert (ending.event, ending.exit_code, ending.step) == ("aborted", 3, 22)
    assert "rollbacks.json cannot be written (No space left on device)" in ending.reason
    assert train_poisoned(decision, corpus, tmp_path) == rolled_back[1]


def test_repeated_spikes_lower_the_clip_norm_and_are_limited(one_rank, corpus, tmp_path, capsys):
    """All data after some point is poisoned, so the run rolls back as often as it may: twice.

    The second rollback lowers the clip norm. After the third spike, the run continues.
    """
    decision = make_spike_decision(corpus)
    ending = train_poisoned(decision, corpus, tmp_path, poisoned=range(20 * 8, 10_000))
    assert (ending.event, ending.step) == ("finished", NUM_STEPS)
    first, second = read_rollbacks(tmp_path / "run", decision.digest)
    assert (first.to_step, first.clip_norm) == (16, 0.5)
    assert second.to_step == 16, "not before the step of the first rollback"
    assert second.clip_norm == pytest.approx(0.15)
    (alert,) = [entry for entry in event_log.read_events(tmp_path / "run") if entry.kind == "alert"]
    assert "all 2 rollbacks are used" in alert.text
    assert capsys.readouterr().err.count("rollbacks are used") == 1


def test_lowered_clip_norm_applies_to_updates(one_rank, corpus, tmp_path):
    """A run with a planted rollback moves less than a run with the frozen clip norm.

    Both runs begin from one state.
    """
    decision = make_spike_decision(corpus, every_steps=8)
    train_poisoned(decision, corpus, tmp_path, stop_after=16)
    shutil.copytree(tmp_path / "run", tmp_path / "frozen clip" / "run")
    lowered = Rollback(
        at_step=16, to_step=16, skipped_sequences=0, clip_norm=0.01, reason="planted"
    )
    RollbackHistory(digest=decision.digest, rollbacks=(lowered,)).write(tmp_path / "run")
    train_poisoned(decision, corpus, tmp_path, stop_after=18)
    train_poisoned(decision, corpus, tmp_path / "frozen clip", stop_after=18)
    lowered_curve = read_curve(tmp_path / "run")
    frozen_curve = read_curve(tmp_path / "frozen clip" / "run")
    assert lowered_curve[17] == frozen_curve[17], "this loss is from before the update"
    assert lowered_curve[18][0] > frozen_curve[18][0], "a clip norm fifty times lower moves less"


ROLLBACKS = (
    Rollback(at_step=30, to_step=20, skipped_sequences=8, clip_norm=1.0, reason="a"),
    Rollback(at_step=60, to_step=50, skipped_sequences=16, clip_norm=None, reason="b"),
)


def test_record_round_trips_and_a_wrong_one_is_refused(tmp_path):
    assert read_rollbacks(tmp_path, "a" * 64) == ()
    RollbackHistory(digest="a" * 64, rollbacks=ROLLBACKS).write(tmp_path)
    assert read_rollbacks(tmp_path, "a" * 64) == ROLLBACKS
    with pytest.raises(
        CheckpointError,
        match=r"belongs to the launch config aaaaaaaaaaaaaaaa\.\.\., this one is bbbb",
    ):
        read_rollbacks(tmp_path, "b" * 64)
    path = tmp_path / rollback.ROLLBACKS_FILE
    content = json.loads(path.read_text())
    content["rollbacks"][0]["to_step"] = -1
    for spoiled in (json.dumps(content), path.read_text()[:40]):
        path.write_text(spoiled)
        with pytest.raises(
            CorruptError, match="restore it: without it the run's data order is not known"
        ):
            read_rollbacks(tmp_path, "a" * 64)
