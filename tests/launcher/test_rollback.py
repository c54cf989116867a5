"""A run that goes back is held against the run that never met the spike's data, and against itself,
killed anywhere.
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
from care_case import NUM_STEPS, POLICY, care_decision, curve, events, poisoned_run
from main_run import QUIET_TORCH

from launcher.base import chronicle
from launcher.trainer import rollback
from launcher.trainer.checkpoints import CheckpointError, CorruptError
from launcher.trainer.rollback import Rollback
from launcher.trainer.training import Trainer
from proxies.core import canon

pytestmark = QUIET_TORCH


@pytest.fixture(scope="module")
def gone_back(one_rank, corpus, tmp_path_factory):
    """The run that meets the poison and goes back before it, uninterrupted: its folder and
    ending.
    """
    out = tmp_path_factory.mktemp("back")
    return out / "run", poisoned_run(care_decision(corpus), corpus, out)


def actions(run_dir):
    return [entry for entry in chronicle.entries(run_dir) if entry.kind == "rolled_back"]


def test_goes_back_skips_and_is_the_run_that_never_met_the_spike(gone_back, corpus, tmp_path):
    run_dir, ending = gone_back
    assert (ending.event, ending.step) == ("finished", NUM_STEPS)
    (recorded,) = rollback.read(run_dir, care_decision(corpus).digest)
    assert (recorded.at_step, recorded.to_step, recorded.skipped_sequences) == (22, 16, 80)
    assert recorded.clip_norm == 0.5  # the frozen one, the first time

    quiet = care_decision(corpus, policy=dataclasses.replace(POLICY, max_rollbacks=0))
    reference = poisoned_run(quiet, corpus, tmp_path, shift=80, from_sequence=16 * 8)
    assert curve(tmp_path / "run") == curve(run_dir)
    assert reference.validation_loss_nats == ending.validation_loss_nats
    assert not (tmp_path / "run" / rollback.ROLLBACKS_FILE).exists()


@pytest.mark.parametrize(
    "cut", [21, *(pytest.param(cut, marks=pytest.mark.slow) for cut in (18, 22, 24))]
)
def test_stopped_and_resumed_it_is_the_same_run(gone_back, corpus, tmp_path, cut):
    """At 21 and 22 within the spike: how long it has lasted is carried too."""
    decision = care_decision(corpus)
    poisoned_run(decision, corpus, tmp_path, stop_after=cut)
    assert poisoned_run(decision, corpus, tmp_path) == gone_back[1]
    assert curve(tmp_path / "run") == curve(gone_back[0])
    assert len(actions(tmp_path / "run")) == 1


class KilledError(Exception):
    """As if the process were gone."""


@pytest.mark.parametrize(
    "instant",
    [
        "launcher.trainer.rollback.write",  # before it is recorded
        pytest.param("launcher.trainer.assembly.build_optimizer", marks=pytest.mark.slow),  # after
        "launcher.trainer.checkpoints.read_tensors",  # stale checkpoints are gone
        pytest.param("launcher.base.chronicle.record", marks=pytest.mark.slow),
        "launcher.trainer.rollback.metrics.append",  # chronicled, and not yet in the metrics
    ],
)
def test_killed_at_any_instant_of_a_rollback_it_resumes_to_the_same_run(
    gone_back, corpus, tmp_path, monkeypatch, instant
):
    decision = care_decision(corpus)
    go_back = Trainer._go_back

    def killed(*_, **__):
        raise KilledError

    def die_within(self, step, back):
        self.saver.settle()  # a process that is killed has no thread that writes on
        with monkeypatch.context() as patch:
            patch.setattr(instant, killed)
            go_back(self, step, back)

    with monkeypatch.context() as patch, pytest.raises(KilledError):
        patch.setattr(Trainer, "_go_back", die_within)
        poisoned_run(decision, corpus, tmp_path)
    assert poisoned_run(decision, corpus, tmp_path) == gone_back[1]
    assert curve(tmp_path / "run") == curve(gone_back[0])
    assert len(actions(tmp_path / "run")) == len(events(tmp_path / "run", "rolled_back")) == 1
    assert len(rollback.read(tmp_path / "run", decision.digest)) == 1


KILLED = """
import os, signal, sys
from pathlib import Path
import torch.distributed as dist
from care_case import care_decision, poisoned_run
from launcher.trainer import rollback
corpus, out = map(Path, sys.argv[1:])
write = rollback.write
def write_and_die(*given):
    write(*given)
    os.kill(os.getpid(), signal.SIGKILL)
rollback.write = write_and_die
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
poisoned_run(care_decision(corpus), corpus, out)
"""


def test_a_real_kill_between_record_and_action(gone_back, corpus, tmp_path):
    here = str(Path(__file__).parent)
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            f"import sys; sys.path.insert(0, {here!r})\n{KILLED}",
            corpus,
            tmp_path,
        ],
        timeout=120,
        check=False,
        capture_output=True,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    assert max(curve(tmp_path / "run")) == 22 and not actions(tmp_path / "run")
    assert poisoned_run(care_decision(corpus), corpus, tmp_path) == gone_back[1]
    assert curve(tmp_path / "run") == curve(gone_back[0])


def test_a_full_disk_stops_the_run_before_it_goes_back(gone_back, corpus, tmp_path, monkeypatch):
    decision, write_atomic = care_decision(corpus), canon.write_atomic

    def full(path, content):
        if path.name == rollback.ROLLBACKS_FILE:
            raise OSError(errno.ENOSPC, "No space left on device")
        write_atomic(path, content)

    with monkeypatch.context() as patch:
        patch.setattr(canon, "write_atomic", full)
        ending = poisoned_run(decision, corpus, tmp_path)
    assert (ending.event, ending.exit_code, ending.step) == ("aborted", 3, 22)
    assert "rollbacks.json cannot be written (No space left on device)" in ending.reason
    assert poisoned_run(decision, corpus, tmp_path) == gone_back[1]


def test_spikes_that_come_again_lower_the_clip_and_are_bounded(one_rank, corpus, tmp_path, capsys):
    """All data from some point on is poison: two rollbacks, the second with a lower clip, then it
    runs on.
    """
    decision = care_decision(corpus)
    ending = poisoned_run(decision, corpus, tmp_path, poisoned=range(20 * 8, 10_000))
    assert (ending.event, ending.step) == ("finished", NUM_STEPS)
    first, second = rollback.read(tmp_path / "run", decision.digest)
    assert (first.to_step, first.clip_norm) == (16, 0.5)
    assert second.to_step == 16, "not before the last one's"
    assert second.clip_norm == pytest.approx(0.15)
    (alert,) = [entry for entry in chronicle.entries(tmp_path / "run") if entry.kind == "alert"]
    assert "all 2 rollbacks are used" in alert.text
    assert capsys.readouterr().err.count("rollbacks are used") == 1


def test_the_lowered_clip_is_what_the_update_is_made_with(one_rank, corpus, tmp_path):
    """Held against a run that had the lower clip frozen, from the same state on."""
    decision = care_decision(corpus, every_steps=8)
    poisoned_run(decision, corpus, tmp_path, stop_after=16)
    shutil.copytree(tmp_path / "run", tmp_path / "other" / "run")
    lowered = Rollback(
        at_step=16, to_step=16, skipped_sequences=0, clip_norm=0.01, reason="planted"
    )
    rollback.write(tmp_path / "run", decision.digest, (lowered,))
    poisoned_run(decision, corpus, tmp_path, stop_after=18)
    poisoned_run(decision, corpus, tmp_path / "other", stop_after=18)
    mine, other = curve(tmp_path / "run"), curve(tmp_path / "other" / "run")
    assert mine[17] == other[17], "the first loss is of before the update"
    assert mine[18][0] > other[18][0], "an update clipped fifty times shorter moves less"


ROLLBACKS = (
    Rollback(at_step=30, to_step=20, skipped_sequences=8, clip_norm=1.0, reason="a"),
    Rollback(at_step=60, to_step=50, skipped_sequences=16, clip_norm=None, reason="b"),
)


def test_the_record_is_read_back_and_another_one_refused(tmp_path):
    assert rollback.read(tmp_path, "a" * 64) == ()
    rollback.write(tmp_path, "a" * 64, ROLLBACKS)
    assert rollback.read(tmp_path, "a" * 64) == ROLLBACKS
    with pytest.raises(
        CheckpointError,
        match=r"belongs to the launch config aaaaaaaaaaaaaaaa\.\.\., this one is bbbb",
    ):
        rollback.read(tmp_path, "b" * 64)
    path = tmp_path / rollback.ROLLBACKS_FILE
    content = json.loads(path.read_text())
    content["rollbacks"][0]["to_step"] = -1
    for spoiled in (json.dumps(content), path.read_text()[:40]):
        path.write_text(spoiled)
        with pytest.raises(
            CorruptError, match="restore it: without it the run's data order is not known"
        ):
            rollback.read(tmp_path, "a" * 64)
