"""The spike drill passes on a trainer that goes back as frozen, and on no other.

Its two runs, the sound one and the control, are trained once; wrong trainers' runs are made of them.
"""

import dataclasses
import json
import shutil

import pytest
from main_run import tiny_decision
from stage_case import HereStage, here

from launcher.base import chronicle, metrics
from launcher.base.policy import SpikePolicy
from launcher.rehearsal.fault_drills import spike
from launcher.rehearsal.faults import spike_nats
from launcher.trainer import rollback
from launcher.trainer.spikes import SpikeWatch

pytestmark = pytest.mark.filterwarnings(
    "ignore::FutureWarning:torch", "ignore::DeprecationWarning:torch", "ignore::UserWarning:torch"
)


@pytest.fixture(scope="module")
def sound(one_rank, corpus, tmp_path_factory):
    """A stage on which the drill was held, and what it found."""
    decision = dataclasses.replace(tiny_decision(corpus), spikes=SpikePolicy(max_rollbacks=1))
    stage = here(tmp_path_factory.mktemp("frozen"), decision, corpus)
    return stage, spike(stage)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Trained(HereStage):
    """The runs are there: the drill looks at them again."""

    def fresh(self, name):
        return name

    def run_in_turn(self, runs, num_ranks=None):
        assert list(runs) == ["control-keep-data", "spike"]


@pytest.fixture
def stage(sound, tmp_path):
    """The same, for one test to spoil."""
    folder = tmp_path / "rehearsal"
    shutil.copytree(sound[0].folder, folder)
    fields = {field.name: getattr(sound[0], field.name) for field in dataclasses.fields(sound[0])}
    return Trained(**{**fields, "folder": folder, "corpus": folder / "corpus", "frozen_dir": tmp_path})


def with_policy(stage, **changes):
    """The stage of a config with another policy."""

    def other(decision):
        return dataclasses.replace(decision, spikes=dataclasses.replace(decision.spikes, **changes))

    copy = dataclasses.replace(stage.scaled, decision=other(stage.decision))
    return dataclasses.replace(stage, real=other(stage.real), scaled=copy)


def assert_fails(stage, *words):
    found = spike(stage)
    assert found.outcome == "failed", found.said
    assert found.advice
    for word in words:
        assert word in found.said


def without_lines(file, word):
    kept = [line for line in file.read_text().splitlines() if word not in line]
    file.write_text("\n".join(kept) + "\n")


def test_a_sound_trainer_passes(sound):
    stage, found = sound
    assert found.outcome == "passed", found.said
    assert "a loss of 6.2" in found.said
    assert "went back to step 6, skipped 200 batches as frozen" in found.said
    seen = {name: found.seen[name] for name in ("num_rollbacks", "control_noticed", "to_step", "skipped_sequences")}
    assert seen == {"num_rollbacks": 1, "control_noticed": True, "to_step": 6, "skipped_sequences": 1600}
    assert spike_nats(stage.decision) < stage.decision.abort.train_loss_above_nats


def test_looked_at_again_it_passes(stage):
    assert spike(stage).outcome == "passed"


def test_without_rollbacks_in_the_policy_it_is_skipped(stage):
    found = spike(with_policy(stage, max_rollbacks=0))
    assert (found.outcome, found.needed) == ("skipped", False)
    assert "launch.spike_rollbacks is 0" in found.said


def test_a_trainer_that_does_not_see_it_fails(sound, tmp_path, monkeypatch):
    folder = tmp_path / "rehearsal"
    shutil.copytree(sound[0].folder, folder)
    monkeypatch.setattr(SpikeWatch, "before_update", lambda self, seen: None)
    deaf = dataclasses.replace(sound[0], folder=folder)
    assert_fails(deaf, "rollbacks (at, to, sequences skipped, clip) [], must be [(10, 6, 1600, 0.5)]")


def test_a_trainer_that_skips_nothing_fails(stage):
    shutil.rmtree(stage.path("spike"))
    shutil.copytree(stage.path("control-keep-data"), stage.path("spike"))
    assert_fails(stage, "update 7 did not use the 8 windows from place 1648 on")


def test_a_control_that_is_not_told_apart_fails(stage):
    shutil.rmtree(stage.path("control-keep-data"))
    shutil.copytree(stage.path("spike"), stage.path("control-keep-data"))
    assert_fails(stage, "the drill sees nothing")


def test_one_sequence_too_few_fails(stage):
    file = stage.path("spike") / rollback.ROLLBACKS_FILE
    file.write_text(file.read_text().replace("1600", "1599"))
    assert_fails(stage, "[(10, 6, 1599, 0.5)], must be [(10, 6, 1600, 0.5)]")


def test_another_clip_than_frozen_fails(stage):
    file = stage.path("spike") / rollback.ROLLBACKS_FILE
    file.write_text(file.read_text().replace('"clip_norm": 0.5', '"clip_norm": 0.15'))
    assert_fails(stage, "[(10, 6, 1600, 0.15)]")


def test_a_rollback_that_nobody_is_told_of_fails(stage):
    without_lines(stage.path("spike") / chronicle.CHRONICLE_FILE, '"kind":"rolled_back"')
    assert_fails(stage, "told of 0 times in the chronicle, 1 in the metrics")
    without_lines(stage.path("spike") / metrics.METRICS_FILE, '"event":"rolled_back"')
    assert_fails(stage, "told of 0 times in the chronicle, 0 in the metrics")


def test_another_run_before_the_rollback_fails(stage):
    file = stage.path("spike") / metrics.METRICS_FILE
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    (second,) = (line for line in lines if line["step"] == 2 and "train_loss_nats" in line)
    second["train_loss_nats"] += 1e-6
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert_fails(stage, "before the rollback, steps [2] are not the uninterrupted run's")


def test_one_that_does_not_end_fails(stage):
    (stage.path("spike") / metrics.ENDING_FILE).unlink()
    assert_fails(stage, "the run did not end: its job died")


def test_a_skip_that_is_shorter_than_the_way_back_fails(stage):
    """The copy, which goes back less far, would not meet the data again; the real run would."""
    wrong = dataclasses.replace(stage, real=with_policy(stage, skip_batches=107).real)
    assert_fails(wrong, "goes back 108 steps from where it speaks and skips 107 batches")
