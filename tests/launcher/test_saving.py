"""Saves in the background: the weights of their step, whole or not there, and told where they
fail.
"""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from care_case import train
from main_run import QUIET_TORCH, tiny_decision

from launcher.trainer import assembly, checkpoints
from launcher.trainer.checkpoint_saver import SaveError, Saver
from launcher.trainer.trained_model import OurModel
from launcher.trainer.training import Trainer

pytestmark = [QUIET_TORCH, pytest.mark.usefixtures("one_rank")]
DIGEST = "d" * 64


@pytest.fixture
def live(corpus):
    """A model and its optimizer after one update, so that there are moments."""
    decision = tiny_decision(corpus)
    model = assembly.sharded_model(OurModel(decision), decision.parallelism, "cpu")
    optimizer = assembly.build_optimizer(model, decision.groups, decision.optimizer)
    assembly.initialize(model, decision.groups, decision.seed)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return model, optimizer


@pytest.fixture
def held(monkeypatch):
    """The background's writing waits until it is let go."""
    go, whole = threading.Event(), checkpoints.write_tensors

    def waiting(*args):
        assert go.wait(30)
        return whole(*args)

    monkeypatch.setattr(checkpoints, "write_tensors", waiting)
    yield go
    go.set()


@pytest.fixture
def small_disk():
    """Files beyond 20 kB cannot be written, as on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def values(model, optimizer):
    moments = [value for state in optimizer.state.values() for value in (state["exp_avg"],)]
    return [parameter.detach().clone() for parameter in model.parameters()] + [
        m.clone() for m in moments
    ]


def test_the_weights_saved_are_those_of_the_step_though_training_goes_on(live, held, tmp_path):
    model, optimizer = live
    saver = Saver(tmp_path, DIGEST, keep=2)
    before = values(model, optimizer)
    saver.save(4, model, optimizer, {"Hook": [1]}, 0)
    assert not (tmp_path / "step-00000004").exists() and saver.finished() == []
    optimizer.step()  # returned before anything was written
    assert not torch.equal(values(model, optimizer)[0], before[0])
    held.set()
    saver.settle()
    (saved,) = saver.finished()
    assert saved.step == 4 and 0 < saved.wait_seconds < saved.seconds
    manifest = checkpoints.newest_good(tmp_path, DIGEST, [])
    assert (manifest.step, manifest.carried) == (4, {"Hook": [1]})
    assert set(manifest.files) == {"__0_0.distcp", ".metadata"}
    checkpoints.read_tensors(tmp_path / "step-00000004", model, optimizer)
    assert all(
        torch.equal(now, then) for now, then in zip(values(model, optimizer), before, strict=True)
    )


def test_a_save_asks_nothing_of_a_gpu_that_trains_on(live, tmp_path, monkeypatch):
    """It would wait for the training, and in a thread the current device of every rank is the first
    one.
    """
    saver, state = Saver(tmp_path, DIGEST, keep=2), checkpoints.staged(*live)

    def asked(*_):
        raise AssertionError("a GPU was asked")

    monkeypatch.setattr(checkpoints, "staged", lambda *_: state)
    monkeypatch.setattr("launcher.trainer.ranks.device", lambda: torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name in ("_lazy_init", "current_device", "current_stream", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, asked)
    saver.save(4, *live, {}, 0)
    saver.settle()
    assert checkpoints.newest_good(tmp_path, DIGEST, []).step == 4


def test_a_full_disk_is_told_once_and_leaves_the_older_ones(live, small_disk, tmp_path):
    saver = Saver(tmp_path, DIGEST, keep=2)
    (tmp_path / "step-00000002").mkdir()
    saver.save(4, *live, {}, 0)
    while not saver.failed:
        time.sleep(0.01)
    with pytest.raises(
        SaveError, match=r"step 4 .*File too large.*; complete checkpoints on disk: step-00000002$"
    ):
        saver.settle()
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000002"]
    saver.settle()
    assert saver.finished() == []


def test_a_run_that_its_brake_stops_completes_the_save_under_way(
    corpus, held, tmp_path, monkeypatch
):
    decision = tiny_decision(corpus)
    monkeypatch.setattr(Trainer, "_trouble", lambda self, step, *_: "enough" if step == 4 else "")
    threading.Timer(0.5, held.set).start()
    ending = train(decision, corpus, tmp_path)
    assert (ending.event, ending.reason, ending.step) == ("aborted", "enough", 4)
    assert checkpoints.newest_good(tmp_path / "run" / "checkpoints", decision.digest, []).step == 4


MOMENTS = {"__0_0.distcp": 4, "manifest.json": 4, "rename": 8, "retention": 12}
"""Where a save is cut, and the newest step that is whole then."""


@pytest.fixture(scope="module")
def killed(corpus, tmp_path_factory):
    """Folders of runs that SIGKILL ended at each moment: forks of one process, as torch takes
    longer to import.
    """
    here, out = Path(__file__).parent, tmp_path_factory.mktemp("killed")
    code = (
        "import sys; sys.path[:0] = sys.argv[3:]; import test_saving; "
        "test_saving.be_killed(*sys.argv[1:3])"
    )
    job = subprocess.run(
        [sys.executable, "-c", code, corpus, out, here, here.parents[1]],
        timeout=200,
        capture_output=True,
        check=False,
    )
    # an older torch talks here too
    ends = [line for line in job.stdout.splitlines() if not line.startswith(b"[Gloo]")]
    assert ends == [b"-9"] * len(MOMENTS), job.stderr.decode()
    return out


def be_killed(corpus, out):
    """In a process that has not computed yet: a fork of one that has would lack its threads."""
    for moment in MOMENTS:
        if not (child := os.fork()):
            try:
                save_until_killed(Path(corpus), Path(out) / moment, moment)
            finally:
                os._exit(1)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_kill_at_any_moment_of_a_save_leaves_a_folder_to_go_on_from(killed, corpus, moment):
    """SIGKILL of a real process: its second save, with the first one beside it, is cut where
    `moment` says.
    """
    out, decision = killed / moment, tiny_decision(corpus)
    newest = checkpoints.newest_good(out / "run" / "checkpoints", decision.digest, [])
    assert newest.step == MOMENTS[moment]
    assert train(decision, corpus, out).event == "finished"
    names = sorted(path.name for path in (out / "run" / "checkpoints").iterdir())
    # Nothing is saved after the last step, so what its deletion left lies there still.
    left_over = ["step-00000004.part"] if moment == "retention" else []
    assert names == [*left_over, "step-00000008", "step-00000012"]


def save_until_killed(corpus, out, moment):
    """In a process of its own: train, and be killed amid a save."""

    def killed(*_):
        os.kill(os.getpid(), signal.SIGKILL)

    if moment == "__0_0.distcp":  # after its first bytes
        whole = checkpoints.write_tensors

        def half(folder, state, group):
            files = whole(folder, state, group)
            if folder.name == "step-00000008.part":
                os.truncate(folder / moment, 1000)
                killed()
            return files

        checkpoints.write_tensors = half
    elif moment == "manifest.json":
        complete = checkpoints.complete
        checkpoints.complete = lambda part, *rest, **named: (
            killed() if "08" in part.name else complete(part, *rest, **named)
        )
    elif moment == "rename":  # done, and nothing after it
        checkpoints.canon.sync_folder = lambda folder: (
            killed() if (folder / "step-00000008").exists() else None
        )
    else:
        shutil.rmtree = killed
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    train(tiny_decision(corpus), corpus, out)
