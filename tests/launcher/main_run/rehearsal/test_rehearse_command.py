"""Tests of `forerun rehearse` with fake drills.

The result must be printed. It must be written to the config's attestations only if all drills were
run.
"""

import json

import pytest
from main_run import make_tiny_decision, write_attested
from tiny_study import run_forerun

from forerun._launcher.main_run import event_log
from forerun._launcher.main_run.frozen.launch_file import get_attestation_path, read_attestation
from forerun._launcher.main_run.rehearsal.registry import DRILLS, Drill, Observation
from forerun._launcher.main_run.rehearsal.status import read_rehearsal_status


@pytest.fixture
def rehearsal(corpus, tmp_path, monkeypatch):
    """A frozen config outside a study, and fake drills."""
    return FakeRehearsal(corpus, tmp_path, monkeypatch)


class FakeRehearsal:
    """Fake drills that record their names.

    A drill passes unless it is in `failing_drills`. A drill in `interrupted_drills` ends as if by
    Ctrl-C.
    """

    def __init__(self, corpus, tmp_path, monkeypatch):
        self.decision = make_tiny_decision(corpus, num_ranks=2)
        self.folder = write_attested(tmp_path / "alone", self.decision).parent
        self.corpus = corpus
        self.names, self.failing_drills, self.interrupted_drills = [], set(), set()
        monkeypatch.setattr(Drill, "run", lambda drill, stage: self.record_drill(drill.name))

    def record_drill(self, name):
        """Record the drill's name, and return what it observed."""
        if name in self.interrupted_drills:
            raise KeyboardInterrupt
        self.names.append(name)
        passed = name not in self.failing_drills
        return Observation(passed, f"it was {name}", {"at": name})

    def rehearse(self, *options):
        """Run the command; return exit code, output, and messages."""
        self.names.clear()
        return run_forerun("rehearse", self.folder, "--data", self.corpus, *options)

    @property
    def status(self):
        """Status of the config's rehearsal."""
        return read_rehearsal_status(self.folder, self.decision.digest)


def test_passed_rehearsal_is_attested_for_this_config_only(rehearsal):
    assert rehearsal.rehearse()[0] == 0
    assert rehearsal.names == list(DRILLS)
    assert (
        rehearsal.status.rehearsed
        and f"{len(DRILLS)} of {len(DRILLS)} drills passed" in rehearsal.status.sentence
    )
    path = get_attestation_path(rehearsal.folder, "rehearsal")
    content = json.loads(path.read_text())
    assert content["digest"] == content["body"]["copy"]["stands_for"] == rehearsal.decision.digest
    drills = read_attestation(path, rehearsal.decision.digest)["drills"]
    assert [(drill["name"], drill["advice"]) for drill in drills] == [(name, "") for name in DRILLS]
    status = read_rehearsal_status(rehearsal.folder, "1" * 64)
    assert not status.rehearsed
    assert f"for the digest {rehearsal.decision.digest[:16]}" in status.sentence
    (event,) = [
        entry
        for entry in event_log.read_events(rehearsal.folder / "run")
        if entry.kind == "rehearsed"
    ]
    assert event.digest == rehearsal.decision.digest
    assert not (rehearsal.folder / "rehearsal").exists()


def test_failed_drill_fails_the_rehearsal_with_advice(rehearsal):
    rehearsal.failing_drills = {"nan"}
    code, out, _ = rehearsal.rehearse()
    assert code == 3
    assert (
        DRILLS["nan"].limit in out
        and DRILLS["nan"].advice in out
        and str(rehearsal.folder / "rehearsal") in out
    )
    assert not rehearsal.status.rehearsed and rehearsal.status.body["failed"] == ["nan"]
    rehearsal.failing_drills = set()
    assert rehearsal.rehearse()[0] == 0
    assert rehearsal.names == list(DRILLS), "all again: the fix may have changed other drills"


def test_single_drills_are_not_attested(rehearsal):
    code, out, _ = rehearsal.rehearse("--only", "nan", "--only", "hang")
    assert (code, rehearsal.names) == (0, ["hang", "nan"])
    assert "next: forerun launch" not in out
    assert rehearsal.status.body is None
    assert event_log.read_events(rehearsal.folder / "run") == []


def test_interrupted_rehearsal_starts_again(rehearsal):
    rehearsal.interrupted_drills = {"killed_rank"}
    assert (rehearsal.rehearse()[0], rehearsal.names) == (130, ["loss", "resume"])
    assert rehearsal.status.body is None
    leftover = rehearsal.folder / "rehearsal" / "reference"
    leftover.mkdir()
    rehearsal.interrupted_drills = set()
    assert (rehearsal.rehearse()[0], rehearsal.names) == (0, list(DRILLS))
    assert rehearsal.status.rehearsed and not leftover.exists()
