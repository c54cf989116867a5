"""Each drill passes on the embedded trainer, and fails on a trainer broken in the way that it looks for.

On one rank in this process, but for what kills; the runs under torchrun are in test_rehearse.
"""

import dataclasses
import json
import shutil

import pytest
from main_run import QUIET_TORCH, tiny_decision, write_corpus
from stage_case import HereStage, here

from launcher.base.checkpoint_folders import CHECKPOINTS
from launcher.base.policy import Monitoring
from launcher.frozen.frozen import Parallelism
from launcher.rehearsal import config_drills, faults, resume_drills
from launcher.rehearsal.config_drills import budget, echo, loss
from launcher.rehearsal.data_drill import data
from launcher.rehearsal.fault_drills import disk_full, hang, killed_rank, nan, sigterm
from launcher.rehearsal.faults import Fault, Injector, fired
from launcher.rehearsal.rank import arguments, parsed
from launcher.rehearsal.resume_drills import corrupt_all, corrupt_newest, resume, two_ranks, world_size
from launcher.rehearsal.stage import UnexpectedEndError, apart, checkpoint_folders
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
    stage.one_rank()
    stage.cut_thrice()
    return stage


@pytest.fixture
def stage(sound, tmp_path):
    """The same, for one test to spoil."""
    folder = tmp_path / "rehearsal"
    shutil.copytree(sound.folder, folder)
    return dataclasses.replace(sound, folder=folder, corpus=folder / "corpus", frozen_dir=tmp_path)


DRILLS = (two_ranks, resume, corrupt_newest, corrupt_all, world_size, nan, disk_full, sigterm, data, echo, loss)


@pytest.mark.parametrize("drill", DRILLS, ids=lambda drill: drill.__name__)
def test_a_sound_trainer_passes(sound, drill):
    found = drill(sound)
    assert found.outcome == "passed", found.said
    assert (found.name, found.advice, found.needed) == (drill.__name__, "", True)
    assert found.seen


VARIANTS = {
    "bfloat16": {"precision": "bfloat16"},
    "recomputed-in-passes": {
        "parallelism": Parallelism(data_parallel_shard=1, microbatch_sequences=3, activation_checkpointing="full")
    },
    "watched": {"monitoring": Monitoring(validate_every_steps=50, layers_every_steps=10, replay_every_steps=20)},
    "unclipped": {"clip_norm": None},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIANTS)
def test_copies_of_other_configs_pass(one_rank, corpus, tmp_path, name):
    stage = here(tmp_path, dataclasses.replace(tiny_decision(corpus), **VARIANTS[name]), corpus)
    for drill in (loss, echo, resume, data):
        found = drill(stage)
        assert found.outcome == "passed", found.said


def test_a_copy_in_other_arithmetic_is_still_the_proxys_run(one_rank, corpus, tmp_path):
    """In bfloat16, in passes and recomputed at once; the drills on each alone are among the slow ones."""
    changes = VARIANTS["bfloat16"] | VARIANTS["recomputed-in-passes"]
    stage = here(tmp_path, dataclasses.replace(tiny_decision(corpus), **changes), corpus)
    found = loss(stage)
    assert found.outcome == "passed", found.said
    assert found.seen["worst_apart_nats"] > 1e-6  # else it did not compute in bfloat16
    assert echo(stage).outcome == "passed"


def assert_fails(drill, stage, *words):
    found = drill(stage)
    assert found.outcome == "failed", found.said
    assert found.advice
    for word in words:
        assert word in found.said


WRONG_RESUMES = ("drop_moments", pytest.param("other_seed", marks=pytest.mark.slow), "shift_batch")


@pytest.mark.parametrize("fault", WRONG_RESUMES)
def test_a_wrong_resume_fails_the_drills_that_resume(stage, monkeypatch, fault):
    monkeypatch.setattr(resume_drills, "CONTROLS", {"shift_batch": "data off by one batch"})
    wrong = dataclasses.replace(stage, faults=[Fault(kind=fault, step=1)])
    shutil.rmtree(stage.path("cut-thrice"))
    assert_fails(resume, wrong, "tensors differ")
    if fault == "drop_moments":
        assert_fails(sigterm, wrong, "it does not come to the same end")
        assert_fails(disk_full, wrong, "it does not come to the same end")
    else:
        assert_fails(data, wrong, "cut-thrice: update 4 used other windows than the uninterrupted run's")
        assert_fails(two_ranks, wrong, "3 of 16 losses are bitwise equal")
        assert_fails(world_size, wrong, "1 to 2 ranks after step 8: losses within")


def test_a_drill_that_sees_no_difference_fails(stage, monkeypatch):
    """Controls that end as the uninterrupted run would: the comparison, not the trainer, is broken."""
    monkeypatch.setattr(Injector, "begin", lambda self, run, step, carried: None)
    assert_fails(resume, stage, "all 84 tensors", "the drill sees nothing")


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
    monkeypatch.setattr(Trainer, "gradients", lambda self, step: (*gradients(self, step)[:2], False))
    assert_fails(sigterm, stage, "finished, exit 0")


def test_a_disk_that_was_never_full_fails(stage, monkeypatch):
    monkeypatch.setattr(faults, "FULL_DISK_BYTES", 2**30)
    assert_fails(disk_full, stage, "finished")


def test_other_rates_fail_the_echo(stage, monkeypatch):
    rates = training.set_rates
    monkeypatch.setattr(training, "set_rates", lambda optimizer, groups, share: rates(optimizer, groups, share * 1.001))
    shutil.rmtree(stage.path("reference"))
    assert_fails(echo, stage, "update 1 of the copy ran at the rates")


def test_other_groups_of_the_real_model_fail_the_echo(stage, monkeypatch):
    monkeypatch.setattr(config_drills, "set_rates", lambda optimizer, groups, share: None)
    assert_fails(echo, stage, "step 0: ", "learning_rate is")


def test_a_table_of_another_version_fails_the_echo(stage):
    rate = dataclasses.replace(stage.real.learning_rate, table_sha256="0" * 64)
    assert_fails(echo, dataclasses.replace(stage, real=dataclasses.replace(stage.real, learning_rate=rate)), "table")


def test_another_function_than_the_proxies_fails_the_loss(stage):
    other = dataclasses.replace(stage.scaled.spec, seed=stage.scaled.spec.seed + 1)
    assert_fails(loss, dataclasses.replace(stage, scaled=dataclasses.replace(stage.scaled, spec=other)))


def test_a_validation_loss_that_is_made_up_fails_the_loss(stage, monkeypatch):
    monkeypatch.setattr(Trainer, "validation_loss", lambda self: 0.5)
    shutil.rmtree(stage.path("reference"))
    assert_fails(loss, stage, "0.500 nats")


def test_a_rank_that_trains_other_rows_fails(stage, monkeypatch):
    first = Trainer.first_sequence
    monkeypatch.setattr(Trainer, "first_sequence", lambda self, step: first(self, step) + 1)
    shutil.rmtree(stage.path("one-rank"))
    assert_fails(two_ranks, stage, "the same loss within")


def test_an_id_beyond_the_vocabulary_fails_the_data(stage, corpus, tmp_path):
    spoiled = tmp_path / "spoiled"
    shutil.copytree(corpus, spoiled)
    shard = stage.cut.sources[0].train[0]
    file = next(path for path in spoiled.glob("*.bin") if path.stat().st_size == shard.num_tokens * 2)
    content = bytearray(file.read_bytes())
    content[-2:] = (1000).to_bytes(2, "little")
    file.write_bytes(content)
    assert_fails(data, dataclasses.replace(stage, real_corpus=spoiled), "holds the id 1000")
    file.unlink()
    assert_fails(data, dataclasses.replace(stage, real_corpus=spoiled), "is missing")


def test_another_corpus_than_the_frozen_one_fails_the_data(stage, tmp_path):
    write_corpus(tmp_path / "other", seed=1)
    other = dataclasses.replace(stage, real_corpus=tmp_path / "other" / "tokens")
    assert_fails(data, other, "frozen is")


def test_a_reader_that_repeats_a_window_fails_the_data(stage):
    for name in ("reference", "cut-thrice"):
        file = stage.path(name) / "consumed-0.jsonl"
        first, *rest = file.read_text().splitlines()
        row = first.split('"rows":[[')[1].split("]")[0].split(",", 1)[1]
        later = rest[4].split('"rows":[[')[1].split("]")[0].split(",", 1)[1]
        rest[4] = rest[4].replace(later, row)
        file.write_text("\n".join([first, *rest]) + "\n")
    assert_fails(data, stage, "came twice within an epoch")


def test_a_reader_that_leaves_a_window_out_fails_the_data(stage):
    file = stage.path("cut-thrice") / "consumed-0.jsonl"
    lines = file.read_text().splitlines()
    at = next(number for number, line in enumerate(lines) if '"step":7' in line)
    value = json.loads(lines[at])
    value["rows"].pop()
    lines[at] = json.dumps(value)
    file.write_text("\n".join(lines) + "\n")
    assert_fails(data, stage, "cut-thrice: update 8 used the places 56 to 62, not 56 to 63")


def test_a_token_that_was_skipped_fails_the_data(stage):
    """Every run drew the same window a token late: only the shard's bytes tell."""
    for name in ("reference", "cut-thrice"):
        file = stage.path(name) / "consumed-0.jsonl"
        line = json.loads(file.read_text().splitlines()[2])
        place, _, window, sha = line["rows"][3]
        file.write_text(file.read_text().replace(sha, "0" * 64))
    assert_fails(data, stage, f"place {place}: window {window} of source 0 is not what lies in its shard")


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
        return LaunchOutcome(event="finished", exit_code=0, step=16, reason="", validation_loss_nats=1.0,
                             num_restarts=self.num_restarts)  # fmt: skip

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


def test_the_time_of_a_copys_step_is_not_compared(sound):
    found = budget(sound)
    assert (found.outcome, found.needed) == ("skipped", False)
    assert "not comparable" in found.said
    assert found.seen["step_seconds"] > 0
    assert "--full" in found.advice


def test_a_run_without_a_fault_that_fails_leaves_nothing_to_compare(stage):
    shutil.rmtree(stage.path("reference"))
    broken = dataclasses.replace(stage, faults=[Fault(kind="nan", step=2)])
    with pytest.raises(UnexpectedEndError, match="'reference' without a fault: aborted: loss nan"):
        broken.reference()


def test_the_reference_keeps_what_the_drills_begin_from(sound):
    steps = [folder.name for folder in checkpoint_folders(sound.path("reference"))]
    assert steps == ["step-00000008", "step-00000012", "step-00000016"]


def test_givenare_read_back_as_they_were_given():
    given = [Fault(kind="kill", step=10), Fault(kind="sigterm", step=9, supervisor_pid=77)]
    others = {"one": [], "two": [*given, Fault(kind="nan")]}
    words = arguments(given, others)
    assert words[:4] == ["--fault", "kill:10:0", "--fault", "sigterm:9:77"]
    assert parsed(["--config", "x", *words, "--stop-after", "3"]) == (
        given, others, ["--config", "x", "--stop-after", "3"],
    )  # fmt: skip
    with pytest.raises(SystemExit, match="one of kill, hang"):
        parsed(["--fault", "flood:1:0"])
