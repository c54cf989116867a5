"""Tests of the drills of a rehearsal, each of which injects one fault into a small run.

A drill passes on the embedded trainer, and fails on a trainer that does not survive its fault.
These tests train one rank in this process; test_interrupted_rehearsal.py uses torchrun.
"""

import dataclasses
import shutil

import pytest
from main_run import QUIET_TORCH, make_tiny_decision, write_corpus
from stage_case import InProcessStage, make_in_process_stage

from forerun._launcher.main_run.checkpoint_folders import CHECKPOINTS
from forerun._launcher.main_run.frozen.frozen import FrozenError
from forerun._launcher.main_run.rehearsal import faults, resume_drills
from forerun._launcher.main_run.rehearsal.fault_drills import (
    fill_disk,
    hang_rank,
    inject_nan,
    kill_rank,
    send_sigterm,
)
from forerun._launcher.main_run.rehearsal.faults import Fault, FaultInjector, get_mark_path
from forerun._launcher.main_run.rehearsal.rank import format_fault_options, parse_faults
from forerun._launcher.main_run.rehearsal.registry import DRILLS
from forerun._launcher.main_run.rehearsal.rehearsal_folder import (
    UnexpectedEndError,
    compare_tensors,
)
from forerun._launcher.main_run.rehearsal.resume_drills import (
    compare_loss,
    corrupt_all,
    corrupt_newest,
    cut_and_resume,
)
from forerun._launcher.main_run.rehearsal.run import set_up_rehearsal
from forerun._launcher.main_run.supervisor.launch import LaunchOutcome
from forerun._launcher.main_run.trainer import checkpoints, training
from forerun._launcher.main_run.trainer.checkpoints import get_checkpoint_folder, read_saved_tensors
from forerun._launcher.main_run.trainer.rollback import RollbackHistory
from forerun._launcher.main_run.trainer.training import Trainer

pytestmark = QUIET_TORCH


@pytest.fixture(scope="module")
def sound(one_rank, corpus, tmp_path_factory):
    """A rehearsal of a sound trainer, with two runs that several drills compare with.

    One run is uninterrupted, and the other is stopped and resumed.
    """
    stage = make_in_process_stage(
        tmp_path_factory.mktemp("frozen"), make_tiny_decision(corpus), corpus
    )
    stage.train_reference()
    stage.train_cut_run()
    return stage


@pytest.fixture
def stage(sound, tmp_path):
    """A copy of the sound rehearsal that a test may change."""
    folder = tmp_path / "rehearsal"
    shutil.copytree(sound.folder, folder)
    return dataclasses.replace(sound, folder=folder, corpus=folder / "corpus", frozen_dir=tmp_path)


IN_PROCESS_DRILLS = (
    "loss",
    "resume",
    "corrupt_newest",
    "corrupt_all",
    "nan",
    "disk_full",
    "sigterm",
)


@pytest.mark.parametrize("name", IN_PROCESS_DRILLS)
def test_sound_trainer_passes(sound, name):
    observation = DRILLS[name].run(sound)
    assert observation.passed, observation.sentence
    assert observation.seen


def assert_fails(drill, stage, *words):
    """Assert that a drill fails, and that its message contains the words."""
    observation = drill(stage)
    assert not observation.passed, observation.sentence
    for word in words:
        assert word in observation.sentence


@pytest.mark.parametrize("fault", ["drop_moments", "shift_batch"])
def test_wrong_resume_fails_the_drills_that_resume(stage, monkeypatch, fault):
    monkeypatch.setattr(resume_drills, "CONTROLS", {"shift_batch": "data off by one batch"})
    wrong = dataclasses.replace(stage, faults=[Fault(kind=fault, step=1)])
    shutil.rmtree(stage.folder / "cut")
    assert_fails(cut_and_resume, wrong, "tensors differ")
    if fault == "drop_moments":
        assert_fails(send_sigterm, wrong, "it does not end equal")
        assert_fails(fill_disk, wrong, "it does not end equal")


def test_drill_whose_controls_show_no_difference_fails(stage, monkeypatch):
    """A control is a run with a wrong resume, which must end differently.

    If it ends like the uninterrupted run, the comparison notices nothing and proves nothing.
    """
    for method in ("begin", "before_update"):
        monkeypatch.setattr(FaultInjector, method, lambda *_: None)
    # A checkpoint of the tiny run has 84 tensors.
    assert_fails(cut_and_resume, stage, "all 84 tensors", "proves nothing")


def test_trainer_that_does_not_verify_checkpoints_fails(stage, monkeypatch):
    monkeypatch.setattr(checkpoints, "_check_files", lambda folder, manifest: None)
    assert_fails(corrupt_newest, stage, "0 set aside")
    assert_fails(corrupt_all, stage, "finished, exit 0")


def test_trainer_that_restarts_without_a_good_checkpoint_fails(stage, monkeypatch):
    monkeypatch.setattr(
        RollbackHistory,
        "find_checkpoint",
        lambda history, *_: checkpoints.Manifest(digest=history.digest, step=0),
    )
    assert_fails(corrupt_newest, stage)
    assert_fails(corrupt_all, stage)


def test_trainer_that_steps_on_nan_fails(stage, monkeypatch):
    monkeypatch.setattr(Trainer, "_find_trouble", lambda self, info: "")
    assert_fails(inject_nan, stage, "NaN in the forward pass of update 10: failed")


def test_trainer_that_ignores_sigterm_fails(stage, monkeypatch):
    monkeypatch.setattr(faults, "SIGNAL_SECONDS", 0.0)
    compute = Trainer.compute_gradients
    monkeypatch.setattr(
        Trainer, "compute_gradients", lambda self, step: (*compute(self, step)[:2], False)
    )
    assert_fails(send_sigterm, stage, "finished, exit 0")


def test_drill_whose_disk_never_fills_fails(stage, monkeypatch):
    monkeypatch.setattr(faults, "FULL_DISK_BYTES", 2**30)
    assert_fails(fill_disk, stage, "finished")


@pytest.mark.parametrize("mutant", ["other rates", "other rows"])
def test_trainer_that_differs_from_the_proxy_fails_the_loss_drill(stage, monkeypatch, mutant):
    first, set_rates = Trainer.find_first_sequence, training.set_rates
    if mutant == "other rows":
        monkeypatch.setattr(
            Trainer, "find_first_sequence", lambda self, step: first(self, step) + 1
        )
    else:
        monkeypatch.setattr(
            training,
            "set_rates",
            lambda optimizer, groups, share: set_rates(optimizer, groups, 1.1 * share),
        )
    shutil.rmtree(stage.folder / "reference")
    assert_fails(compare_loss, stage)


def test_wrong_corpus_is_refused(corpus, tmp_path):
    write_corpus(tmp_path / "other", seed=1)
    with pytest.raises(FrozenError, match="must be"):
        set_up_rehearsal(
            tmp_path, make_tiny_decision(corpus), tmp_path / "other" / "tokens", full=False
        )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class FinishedStage(InProcessStage):
    """A rehearsal whose runs do not train: each is a copy of the uninterrupted run."""

    num_restarts: int = 1
    """Restarts that each run reports."""
    is_struck: bool = True
    """Whether the faults seem to have happened."""
    nudge: float = 0.0
    """Difference of one weight from that of the uninterrupted run."""

    def run(self, run_dir, *faults, **options):
        shutil.copytree(self.folder / "reference", run_dir)
        for fault in faults:
            if self.is_struck:
                get_mark_path(run_dir, fault.kind).touch()
        return LaunchOutcome(
            event="finished",
            exit_code=0,
            step=16,
            reason="",
            validation_loss_nats=1.0,
            num_restarts=self.num_restarts,
        )

    def compare(self, first, second, step=None):
        tensors = read_saved_tensors(get_checkpoint_folder(first / CHECKPOINTS, 16))
        nudged = dict(tensors)
        last = max(name for name in tensors if name.startswith("model."))
        nudged[last] = tensors[last] + self.nudge
        return compare_tensors(tensors, nudged)


@pytest.mark.parametrize("drill", [kill_rank, hang_rank])
def test_drill_fails_unless_its_rank_is_struck_and_restarted_once(stage, drill):
    fields = {field.name: getattr(stage, field.name) for field in dataclasses.fields(stage)}
    assert drill(FinishedStage(**fields)).passed
    assert_fails(
        drill, FinishedStage(**fields, is_struck=False), "1 restart; at the end all 84 tensors"
    )
    assert_fails(drill, FinishedStage(**fields, num_restarts=0), "0 restart")
    assert_fails(drill, FinishedStage(**fields, num_restarts=2), "2 restart")
    assert_fails(drill, FinishedStage(**fields, nudge=1e-6), "1 of 84 tensors differ")


def test_failure_of_the_uninterrupted_run_is_an_error(stage):
    shutil.rmtree(stage.folder / "reference")
    broken = dataclasses.replace(stage, faults=[Fault(kind="nan", step=2)])
    with pytest.raises(UnexpectedEndError, match=r"'reference'.* aborted: loss nan"):
        broken.train_reference()


def test_faults_survive_the_command_line():
    faults_given = [Fault(kind="kill", step=10), Fault(kind="sigterm", step=9, supervisor_pid=77)]
    words = format_fault_options(faults_given)
    assert words == ["--fault", "kill:10:0", "--fault", "sigterm:9:77"]
    assert parse_faults(["--config", "x", *words, "--stop-after", "3"]) == (
        faults_given,
        ["--config", "x", "--stop-after", "3"],
    )
