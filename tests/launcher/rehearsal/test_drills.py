"""Each drill passes on the embedded trainer, and fails on a trainer broken in the way that it looks
for.

On one rank in this process, but for what kills; the runs under torchrun are in test_rehearse.
"""

import dataclasses
import shutil

import pytest
from main_run import QUIET_TORCH, tiny_decision, write_corpus
from stage_case import HereStage, here

from launcher.base.run_files import CHECKPOINTS
from launcher.frozen.frozen import FrozenError
from launcher.rehearsal import faults, resume_drills
from launcher.rehearsal.fault_drills import disk_full, hang, killed_rank, nan, sigterm
from launcher.rehearsal.faults import Fault, FaultInjector, fired
from launcher.rehearsal.rank import arguments, parsed
from launcher.rehearsal.resume_drills import corrupt_all, corrupt_newest, loss, resume
from launcher.rehearsal.run import set_up
from launcher.rehearsal.stage import UnexpectedEndError, apart
from launcher.supervisor.launch import LaunchOutcome
from launcher.trainer import checkpoints, training
from launcher.trainer.checkpoints import folder_of, saved_tensors
from launcher.trainer.training import Trainer

pytestmark = QUIET_TORCH


@pytest.fixture(scope="module")
def sound(one_rank, corpus, tmp_path_factory):
    """A stage with the shared runs of a sound trainer."""
    stage = here(tmp_path_factory.mktemp("frozen"), tiny_decision(corpus), corpus)
    stage.reference()
    stage.cut()
    return stage


@pytest.fixture
def stage(sound, tmp_path):
    """The same, for one test to spoil."""
    folder = tmp_path / "rehearsal"
    shutil.copytree(sound.folder, folder)
    return dataclasses.replace(sound, folder=folder, corpus=folder / "corpus", frozen_dir=tmp_path)


DRILLS = (loss, resume, corrupt_newest, corrupt_all, nan, disk_full, sigterm)


@pytest.mark.parametrize("drill", DRILLS, ids=lambda drill: drill.__name__)
def test_a_sound_trainer_passes(sound, drill):
    found = drill(sound)
    assert found.outcome == "passed", found.said
    assert (found.name, found.advice) == (drill.__name__, "") and found.seen


def assert_fails(drill, stage, *words):
    found = drill(stage)
    assert found.outcome == "failed", found.said
    assert found.advice
    for word in words:
        assert word in found.said


@pytest.mark.parametrize("fault", ["drop_moments", "shift_batch"])
def test_a_wrong_resume_fails_the_drills_that_resume(stage, monkeypatch, fault):
    monkeypatch.setattr(resume_drills, "CONTROLS", {"shift_batch": "data off by one batch"})
    wrong = dataclasses.replace(stage, faults=[Fault(kind=fault, step=1)])
    shutil.rmtree(stage.path("cut"))
    assert_fails(resume, wrong, "tensors differ")
    if fault == "drop_moments":
        assert_fails(sigterm, wrong, "it does not end equal")
        assert_fails(disk_full, wrong, "it does not end equal")


def test_a_drill_that_sees_no_difference_fails(stage, monkeypatch):
    """Controls that end as the uninterrupted run would: the comparison, not the trainer, is
    broken.
    """
    monkeypatch.setattr(FaultInjector, "begin", lambda self, run, step, carried: None)
    assert_fails(resume, stage, "all 84 tensors", "no proof")


def test_checkpoints_that_are_not_verified_fail(stage, monkeypatch):
    monkeypatch.setattr(checkpoints, "_differing", lambda folder, files: [])
    assert_fails(corrupt_newest, stage, "0 set aside")
    assert_fails(corrupt_all, stage, "finished, exit 0")


def test_a_trainer_that_begins_anew_without_a_good_checkpoint_fails(stage, monkeypatch):
    monkeypatch.setattr(Trainer, "_newest_step", lambda self: 0)
    assert_fails(corrupt_newest, stage)
    assert_fails(corrupt_all, stage)


def test_stepping_on_nan_fails(stage, monkeypatch):
    monkeypatch.setattr(Trainer, "_trouble", lambda self, *_: "")
    assert_fails(nan, stage, "NaN in the forward pass of update 10: failed")


def test_a_deaf_trainer_fails(stage, monkeypatch):
    monkeypatch.setattr(faults, "SIGNAL_SECONDS", 0.0)
    gradients = Trainer.gradients
    monkeypatch.setattr(
        Trainer, "gradients", lambda self, step: (*gradients(self, step)[:2], False)
    )
    assert_fails(sigterm, stage, "finished, exit 0")


def test_a_disk_that_was_never_full_fails(stage, monkeypatch):
    monkeypatch.setattr(faults, "FULL_DISK_BYTES", 2**30)
    assert_fails(disk_full, stage, "finished")


@pytest.mark.parametrize("mutant", ["other rates", "other rows"])
def test_another_run_than_the_proxys_fails_the_loss(stage, monkeypatch, mutant):
    first, rates = Trainer.first_sequence, training.set_rates
    if mutant == "other rows":
        monkeypatch.setattr(Trainer, "first_sequence", lambda self, step: first(self, step) + 1)
    else:
        monkeypatch.setattr(
            training,
            "set_rates",
            lambda optimizer, groups, share: rates(optimizer, groups, 1.1 * share),
        )
    shutil.rmtree(stage.path("reference"))
    assert_fails(loss, stage)


def test_another_corpus_than_the_frozen_one_is_refused(corpus, tmp_path):
    write_corpus(tmp_path / "other", seed=1)
    with pytest.raises(FrozenError, match="must be"):
        set_up(tmp_path, tiny_decision(corpus), tmp_path / "other" / "tokens", full=False)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Ended(HereStage):
    """Every run ends as the uninterrupted one did, or nearly; what struck it is told."""

    num_restarts: int = 1
    is_struck: bool = True
    nudge: float = 0.0

    def run(self, name, *faults, **options):
        shutil.copytree(self.path("reference"), self.path(name))
        for fault in faults:
            if self.is_struck:
                fired(self.path(name), fault.kind).touch()
        return LaunchOutcome(
            event="finished",
            exit_code=0,
            step=16,
            reason="",
            validation_loss_nats=1.0,
            num_restarts=self.num_restarts,
        )

    def apart(self, one, other, step=None):
        tensors = saved_tensors(folder_of(self.path(one) / CHECKPOINTS, 16))
        nudged = dict(tensors)
        last = max(name for name in tensors if name.startswith("model."))
        nudged[last] = tensors[last] + self.nudge
        return apart(tensors, nudged)


@pytest.mark.parametrize("drill", [killed_rank, hang])
def test_a_rank_that_was_not_struck_or_not_restarted_once_fails(stage, drill):
    fields = {field.name: getattr(stage, field.name) for field in dataclasses.fields(stage)}
    assert drill(Ended(**fields)).outcome == "passed"
    assert_fails(drill, Ended(**fields, is_struck=False), "1 restart; at the end all 84 tensors")
    assert_fails(drill, Ended(**fields, num_restarts=0), "0 restart")
    assert_fails(drill, Ended(**fields, num_restarts=2), "2 restart")
    assert_fails(drill, Ended(**fields, nudge=1e-6), "1 of 84 tensors differ")


def test_a_run_without_a_fault_that_fails_leaves_nothing_to_compare(stage):
    shutil.rmtree(stage.path("reference"))
    broken = dataclasses.replace(stage, faults=[Fault(kind="nan", step=2)])
    with pytest.raises(UnexpectedEndError, match=r"'reference'.* aborted: loss nan"):
        broken.reference()


def test_faults_are_read_back_as_they_were_given():
    given = [Fault(kind="kill", step=10), Fault(kind="sigterm", step=9, supervisor_pid=77)]
    words = arguments(given)
    assert words == ["--fault", "kill:10:0", "--fault", "sigterm:9:77"]
    assert parsed(["--config", "x", *words, "--stop-after", "3"]) == (
        given,
        ["--config", "x", "--stop-after", "3"],
    )
