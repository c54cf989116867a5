"""Tests of background saves.

A checkpoint must hold the weights of its step, and be complete or absent. Failures must be
reported.
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
from main_run import QUIET_TORCH, make_tiny_decision
from spike_case import train

from forerun._launcher.main_run.trainer import checkpoints, model_builder
from forerun._launcher.main_run.trainer.checkpoint_saver import SaveError, Saver
from forerun._launcher.main_run.trainer.checkpoints import Manifest
from forerun._launcher.main_run.trainer.model_builder import TrainedModel
from forerun._launcher.main_run.trainer.training import Trainer

pytestmark = [QUIET_TORCH, pytest.mark.usefixtures("one_rank")]
DIGEST = "d" * 64


@pytest.fixture
def live(corpus):
    """A model and its optimizer after one update, so that the optimizer has moments."""
    decision = make_tiny_decision(corpus)
    source = TrainedModel(decision)
    model = model_builder.build_sharded_model(source, decision.parallelism, "cpu")
    optimizer = model_builder.build_optimizer(model, decision)
    source.initialize(model)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return model, optimizer


@pytest.fixture
def release(monkeypatch):
    """An event for which the background write of tensors waits, because it is patched."""
    event, write_tensors = threading.Event(), checkpoints.write_tensors

    def wait_and_write(*args):
        assert event.wait(30)
        return write_tensors(*args)

    monkeypatch.setattr(checkpoints, "write_tensors", wait_and_write)
    yield event
    event.set()


@pytest.fixture
def small_disk():
    """Limit files to 20 kB, which fails like a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def copy_values(model, optimizer):
    """Return copies of all parameters, and of their first moments in the optimizer."""
    moments = [state["exp_avg"] for state in optimizer.state.values()]
    return [value.detach().clone() for value in (*model.parameters(), *moments)]


def test_save_holds_the_weights_of_its_step_while_training_goes_on(live, release, tmp_path):
    model, optimizer = live
    saved = []
    saver = Saver(tmp_path, keep=2, report=saved.append)
    before = copy_values(model, optimizer)
    saver.save(Manifest(digest=DIGEST, step=4, carried={"Hook": [1]}), model, optimizer)
    assert not (tmp_path / "step-00000004").exists() and not saved
    optimizer.step()  # The call of save() has returned before anything was written.
    assert not torch.equal(copy_values(model, optimizer)[0], before[0])
    release.set()
    saver.settle()
    (line,) = saved
    assert (line["event"], line["step"]) == ("saved", 4)
    assert 0 < line["wait_seconds"] < line["seconds"]
    manifest = checkpoints.find_newest_good(tmp_path, DIGEST)
    assert (manifest.step, manifest.carried) == (4, {"Hook": [1]})
    assert set(manifest.files) == {"__0_0.distcp", ".metadata"}
    checkpoints.read_tensors(tmp_path / "step-00000004", model, optimizer)
    after = copy_values(model, optimizer)
    assert all(torch.equal(now, then) for now, then in zip(after, before, strict=True))


def test_background_save_makes_no_cuda_call(live, tmp_path, monkeypatch):
    """A CUDA call in the saving thread would wait for the training.

    It could also use the wrong GPU: in a new thread, the current device of every rank is the first
    GPU.
    """
    saver, state = Saver(tmp_path, keep=2), checkpoints.stage_tensors(*live)

    def fail(*_):
        raise AssertionError("a GPU was asked")

    monkeypatch.setattr(checkpoints, "stage_tensors", lambda *_: state)
    monkeypatch.setattr(
        "forerun._launcher.main_run.trainer.ranks.get_local_device", lambda: torch.device("cpu")
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name in ("_lazy_init", "current_device", "current_stream", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, fail)
    saver.save(Manifest(digest=DIGEST, step=4), *live)
    saver.settle()
    assert checkpoints.find_newest_good(tmp_path, DIGEST).step == 4


def test_full_disk_is_reported_once_and_keeps_older_checkpoints(live, small_disk, tmp_path):
    saved = []
    saver = Saver(tmp_path, keep=2, report=saved.append)
    (tmp_path / "step-00000002").mkdir()
    saver.save(Manifest(digest=DIGEST, step=4), *live)
    deadline = time.monotonic() + 30
    while not saver.failed:
        assert time.monotonic() < deadline, "the save has neither failed nor been reported"
        time.sleep(0.01)
    with pytest.raises(
        SaveError, match=r"step 4 .*File too large.*; complete checkpoints on disk: step-00000002$"
    ):
        saver.settle()
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000002"]
    saver.settle()
    assert not saved


def test_aborted_run_completes_the_save_under_way(corpus, release, tmp_path, monkeypatch):
    decision = make_tiny_decision(corpus)
    # The run aborts at step 4, while that step's save is still being written. A reason that is not
    # empty aborts a run.
    monkeypatch.setattr(Trainer, "_find_trouble", lambda _, info: "enough" * (info.step == 4))
    threading.Timer(0.5, release.set).start()
    ending = train(decision, corpus, tmp_path)
    assert (ending.event, ending.reason, ending.step) == ("aborted", "enough", 4)
    assert checkpoints.find_newest_good(tmp_path / "run" / "checkpoints", decision.digest).step == 4


MOMENTS = {"__0_0.distcp": 4, "manifest.json": 4, "rename": 8, "retention": 12}
"""Moments at which a run is killed, each with the newest step whose checkpoint is then complete:
while the file of tensors is written, before the manifest is written, after the folder is renamed,
and while an old checkpoint is removed."""


@pytest.fixture(scope="module")
def killed_runs(corpus, tmp_path_factory):
    """Folder of runs that SIGKILL ended, one run for each of `MOMENTS`.

    The runs are forks of one process, because importing torch takes longer than the runs.
    """
    support = Path(__file__).parents[3] / "support" / "launcher"
    out = tmp_path_factory.mktemp("killed")
    code = (
        "import sys; sys.path[:0] = sys.argv[3:]; import test_checkpoint_saver; "
        "test_checkpoint_saver.fork_and_kill(*sys.argv[1:3])"
    )
    job = subprocess.run(
        [sys.executable, "-c", code, corpus, out, support, Path(__file__).parent],
        timeout=200,
        capture_output=True,
        check=False,
    )
    # Older versions of torch print lines of their own.
    exit_codes = [line for line in job.stdout.splitlines() if not line.startswith(b"[Gloo]")]
    assert exit_codes == [b"-9"] * len(MOMENTS), job.stderr.decode()
    return out


def fork_and_kill(corpus, out):
    """Start a run for each of `MOMENTS` in a fork, which kills itself, and print its exit code.

    `killed_runs` calls this function in a new process. A process that has computed before cannot
    train in a fork, because a fork lacks torch's threads.
    """
    for moment in MOMENTS:
        if not (child := os.fork()):
            try:
                save_until_killed(Path(corpus), Path(out) / moment, moment)
            finally:
                os._exit(1)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


@pytest.mark.parametrize("moment", MOMENTS)
def test_kill_at_any_moment_of_a_save_leaves_a_run_that_resumes(killed_runs, corpus, moment):
    """A real process is killed while it saves; an earlier checkpoint is complete by then."""
    out, decision = killed_runs / moment, make_tiny_decision(corpus)
    newest = checkpoints.find_newest_good(out / "run" / "checkpoints", decision.digest)
    assert newest.step == MOMENTS[moment]
    assert train(decision, corpus, out).event == "finished"
    names = sorted(path.name for path in (out / "run" / "checkpoints").iterdir())
    # No save follows the last step, so the remains of the interrupted deletion are still there.
    left_over = ["step-00000004.part"] if moment == "retention" else []
    assert names == [*left_over, "step-00000008", "step-00000012"]


def save_until_killed(corpus, out, moment):
    """Train in this process until it is killed during a save."""

    def kill_self(*_):
        os.kill(os.getpid(), signal.SIGKILL)

    if moment == "__0_0.distcp":  # After the first bytes of the tensors
        write_tensors = checkpoints.write_tensors

        def write_half(folder, state, group):
            files = write_tensors(folder, state, group)
            if folder.name == "step-00000008.part":
                os.truncate(folder / moment, 1000)
                kill_self()
            return files

        checkpoints.write_tensors = write_half
    elif moment == "manifest.json":
        complete = checkpoints.complete

        def complete_or_die(part, *args, **kwargs):
            return kill_self() if "08" in part.name else complete(part, *args, **kwargs)

        checkpoints.complete = complete_or_die
    elif moment == "rename":  # Right after the rename

        def die_if_renamed(folder):
            if (folder / "step-00000008").exists():
                kill_self()

        checkpoints.canon.sync_folder = die_if_renamed
    else:
        shutil.rmtree = kill_self
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    train(make_tiny_decision(corpus), corpus, out)
