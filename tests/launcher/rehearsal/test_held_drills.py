"""What the verb makes of its drills, which are made up here: attested, added up, kept when interrupted, told."""

import json

import pytest
from main_run import tiny_decision
from tiny_study import forerun

from launcher.base import chronicle
from launcher.frozen.attestations import path_of, read_attestation
from launcher.frozen.launch_file import write_launch
from launcher.rehearsal import run
from launcher.rehearsal.registry import DRILLS, Drill, DrillResult, judged
from launcher.rehearsal.standing import rehearsal_of


@pytest.fixture
def held(corpus, tmp_path, monkeypatch):
    """A config that lies alone, and drills that write down that they were held."""
    return Held(corpus, tmp_path, monkeypatch)


class Held:
    """`outcomes` and `broken_off` say what the drills do."""

    def __init__(self, corpus, tmp_path, monkeypatch):
        self.decision = tiny_decision(corpus, num_ranks=2)
        self.folder, self.corpus = write_launch(tmp_path / "alone", self.decision).parent, corpus
        self.names, self.outcomes, self.broken_off = [], {}, set()
        monkeypatch.setattr(Drill, "hold", lambda drill, stage: self.hold(drill.name))

    def hold(self, name):
        if name in self.broken_off:
            raise KeyboardInterrupt
        self.names.append(name)
        if self.outcomes.get(name) == "skipped":
            return DrillResult(name=name, outcome="skipped", said="not here", seen={}, limit="", advice="elsewhere")
        return judged(name, self.outcomes.get(name) != "failed", f"it was {name}", {"at": name})

    def rehearse(self, *options):
        self.names.clear()
        return forerun("rehearse", self.folder, "--data", self.corpus, *options)

    @property
    def standing(self):
        return rehearsal_of(self.folder, self.decision.digest)


def test_all_passed_is_attested_for_this_config_and_no_other(held):
    code, out, _ = held.rehearse()
    assert code == 0
    assert held.names == list(DRILLS)
    assert held.standing.rehearsed
    assert held.standing.sentence.startswith("rehearsed: 15 of 15 drills passed on a scaled-down copy on a CPU, 20")
    path = path_of(held.folder, "rehearsal")
    content = json.loads(path.read_text())
    assert content["digest"] == content["body"]["copy"]["stands_for"] == held.decision.digest
    assert content["body"]["machine"]["code_sha256"] == run.machine()["code_sha256"]
    assert len(read_attestation(path, held.decision.digest)["drills"]) == 15
    other = rehearsal_of(held.folder, "1" * 64)
    assert not other.rehearsed
    assert "UNREHEARSED" in other.sentence and f"for the digest {held.decision.digest[:16]}" in other.sentence
    assert out.splitlines()[-1] == f"next: forerun launch {held.folder}"
    (event,) = [entry for entry in chronicle.entries(held.folder / "run") if entry.kind == "rehearsed"]
    assert (event.text, event.digest) == ("Rehearsed: passed, 15 drills", held.decision.digest)
    assert not (held.folder / "rehearsal").exists()


def test_one_that_fails_fails_the_rehearsal_and_says_what_to_do(held):
    held.outcomes["nan"] = "failed"
    code, out, _ = held.rehearse()
    assert code == 3
    lines = out.splitlines()
    at = next(number for number, line in enumerate(lines) if line.split()[:2] == ["failed", "nan"])
    assert lines[at].endswith("it was nan")
    told = [f"must: {DRILLS['nan'].limit}", f"do: {DRILLS['nan'].advice}"]
    assert [line.strip() for line in lines[at + 1 : at + 3]] == told
    assert lines[-1] == f"the runs are kept in {held.folder / 'rehearsal'}"
    assert not held.standing.rehearsed
    assert held.standing.sentence.startswith("UNREHEARSED: nan failed (14 of 15 drills passed")
    (event,) = chronicle.entries(held.folder / "run")
    assert event.text == "Rehearsed: failed, 15 drills; failed: nan"
    held.outcomes.clear()
    assert held.rehearse()[0] == 0
    assert held.names == list(DRILLS)  # anew: what was mended may have changed the others


def test_one_that_could_not_be_held_leaves_it_open(held):
    held.outcomes["hang"] = "skipped"
    code, out, _ = held.rehearse()
    assert code == 4
    assert "rehearsal cannot tell in " in out
    assert held.standing.sentence.startswith("UNREHEARSED in part: 14 of 15")
    assert not held.standing.rehearsed


def test_parts_add_up_and_sign_nothing_until_they_are_all(held, monkeypatch):
    code, out, _ = held.rehearse("--only", "nan", "--only", "hang")
    assert (code, held.names) == (0, ["hang", "nan"])
    assert "in part: launch and verify still say UNREHEARSED until all drills were held" in out
    assert "next: forerun launch" not in out
    assert not held.standing.rehearsed
    assert "UNREHEARSED in part: 2 of 2 drills passed" in held.standing.sentence
    (event,) = chronicle.entries(held.folder / "run")
    assert event.text == "Rehearsed, in part: passed, 2 drills"
    rest = [word for name in DRILLS if name not in ("nan", "hang") for word in ("--only", name)]
    assert held.rehearse(*rest)[0] == 0
    assert held.standing.rehearsed
    monkeypatch.setattr(run, "_code_sha256", lambda: "of a mended trainer")
    assert held.rehearse("--only", "nan")[0] == 0
    assert not held.standing.rehearsed
    assert "1 of 1 drills passed" in held.standing.sentence


def test_an_interrupted_one_goes_on_where_it_was(held):
    held.broken_off = {"resume"}
    code, _, err = held.rehearse()
    assert (code, held.names) == (130, ["echo", "two_ranks", "loss"])
    assert "interrupted; everything finished is recorded, the same command continues" in err
    assert held.standing.body is None
    held.broken_off = set()
    code, out, _ = held.rehearse("--json")
    assert (code, held.names) == (0, list(DRILLS)[3:])
    assert [drill["name"] for drill in json.loads(out)["drills"]] == list(DRILLS)
    assert held.standing.rehearsed


def test_with_other_code_an_interrupted_one_begins_anew(held, monkeypatch):
    held.broken_off = {"resume"}
    held.rehearse()
    left = held.folder / "rehearsal" / "reference"
    left.mkdir()
    held.broken_off = set()
    monkeypatch.setattr(run, "_code_sha256", lambda: "of a mended trainer")
    assert held.rehearse()[0] == 0
    assert held.names == list(DRILLS)
    assert not left.exists()


def test_one_drill_alone_keeps_what_an_interrupted_rehearsal_found(held):
    held.broken_off = {"resume"}
    held.rehearse()
    code, out, _ = held.rehearse("--only", "nan", "--json")
    assert (code, held.names) == (0, ["nan"])
    assert [drill["name"] for drill in json.loads(out)["drills"]] == ["echo", "two_ranks", "loss", "nan"]


def test_the_code_is_that_of_the_rooms_that_train():
    assert run._code_sha256.__wrapped__() == run.machine()["code_sha256"]
    assert len(run.machine()["code_sha256"]) == 64
