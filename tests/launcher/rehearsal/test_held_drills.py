"""What the verb makes of its drills, which are made up here: attested, told, and signed only when
all were held.
"""

import json

import pytest
from main_run import tiny_decision, write_attested
from tiny_study import forerun

from launcher.base import chronicle
from launcher.frozen.launch_file import path_of, read_attestation
from launcher.rehearsal.registry import DRILLS, Drill, judged
from launcher.rehearsal.status import rehearsal_of


@pytest.fixture
def held(corpus, tmp_path, monkeypatch):
    """A config that lies alone, and drills that write down that they were held."""
    return Held(corpus, tmp_path, monkeypatch)


class Held:
    """`outcomes` and `broken_off` say what the drills do."""

    def __init__(self, corpus, tmp_path, monkeypatch):
        self.decision = tiny_decision(corpus, num_ranks=2)
        self.folder, self.corpus = write_attested(tmp_path / "alone", self.decision).parent, corpus
        self.names, self.outcomes, self.broken_off = [], {}, set()
        monkeypatch.setattr(Drill, "hold", lambda drill, stage: self.hold(drill.name))

    def hold(self, name):
        if name in self.broken_off:
            raise KeyboardInterrupt
        self.names.append(name)
        return judged(name, self.outcomes.get(name) != "failed", f"it was {name}", {"at": name})

    def rehearse(self, *options):
        self.names.clear()
        return forerun("rehearse", self.folder, "--data", self.corpus, *options)

    @property
    def standing(self):
        return rehearsal_of(self.folder, self.decision.digest)


def test_all_passed_is_attested_for_this_config_and_no_other(held):
    assert held.rehearse()[0] == 0
    assert held.names == list(DRILLS)
    assert held.standing.rehearsed and "9 of 9 drills passed" in held.standing.sentence
    path = path_of(held.folder, "rehearsal")
    content = json.loads(path.read_text())
    assert content["digest"] == content["body"]["copy"]["stands_for"] == held.decision.digest
    assert len(read_attestation(path, held.decision.digest)["drills"]) == 9
    other = rehearsal_of(held.folder, "1" * 64)
    assert not other.rehearsed and f"for the digest {held.decision.digest[:16]}" in other.sentence
    (event,) = [
        entry for entry in chronicle.entries(held.folder / "run") if entry.kind == "rehearsed"
    ]
    assert event.digest == held.decision.digest
    assert not (held.folder / "rehearsal").exists()


def test_one_that_fails_fails_the_rehearsal_and_says_what_to_do(held):
    held.outcomes["nan"] = "failed"
    code, out, _ = held.rehearse()
    assert code == 3
    assert (
        DRILLS["nan"].limit in out
        and DRILLS["nan"].advice in out
        and str(held.folder / "rehearsal") in out
    )
    assert not held.standing.rehearsed and held.standing.body["failed"] == ["nan"]
    held.outcomes.clear()
    assert held.rehearse()[0] == 0
    assert held.names == list(DRILLS)  # anew: what was mended may have changed the others


def test_a_drill_alone_signs_nothing(held):
    code, out, _ = held.rehearse("--only", "nan", "--only", "hang")
    assert (code, held.names) == (0, ["hang", "nan"])
    assert "next: forerun launch" not in out
    assert held.standing.body is None
    assert chronicle.entries(held.folder / "run") == []


def test_an_interrupted_one_begins_anew(held):
    held.broken_off = {"killed_rank"}
    assert (held.rehearse()[0], held.names) == (130, ["loss", "resume"])
    assert held.standing.body is None
    left = held.folder / "rehearsal" / "reference"
    left.mkdir()
    held.broken_off = set()
    assert (held.rehearse()[0], held.names) == (0, list(DRILLS))
    assert held.standing.rehearsed and not left.exists()
