"""What is kept of a study's findings: the same bytes as worked out anew, and never trusted."""

import json
import random
import re
import shutil

import pytest
from tiny_study import ask, forerun, replay

from launcher.report import body as report
from launcher.study.finding_cache import FINDINGS_FILE
from proxies.core import canon
from sweeps.store.ledger import LEDGER_NAME


@pytest.fixture
def worked(monkeypatch):
    """Names of the studies whose findings were worked out, in order."""
    names, gather = [], report.gather

    def counted(study, ledger):
        names.append(study.study_dir.name)
        return gather(study, ledger)

    monkeypatch.setattr(report, "gather", counted)
    return names


def answers(study):
    """All that `status` and `report` say of a study and write, but for what it does this moment."""
    said = [
        forerun(verb, study, *more) for verb in ("status", "report") for more in ((), ("--json",))
    ]
    assert all(code == 0 for code, _, _ in said)
    return said, [(study / name).read_bytes() for name in ("report.json", "report.html")]


def test_cold_and_warm_are_the_same_bytes(copied, worked):
    (copied / FINDINGS_FILE).unlink(missing_ok=True)
    cold = forerun("status", copied), forerun("status", copied, "--json")
    assert len(worked) == 1
    (copied / FINDINGS_FILE).unlink()
    first = answers(copied)
    assert len(worked) == 2
    assert answers(copied) == first
    assert tuple(first[0][:2]) == cold
    assert len(worked) == 2


def one_number(path):
    entry = json.loads(path.read_text())
    entry["findings"]["spend"]["num_runs"] += 1
    path.write_text(json.dumps(entry))


def resealed(**changed):
    def damage(path):
        entry = {**json.loads(path.read_text()), **changed}
        del entry["sha256"]
        path.write_text(json.dumps({"sha256": canon.content_id(entry), **entry}))

    return damage


DAMAGE = {
    "empty": lambda path: path.write_bytes(b""),
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-7]),
    "no JSON": lambda path: path.write_bytes(b"\xff" + path.read_bytes()),
    "another shape": lambda path: path.write_text("[1]"),
    "edited": one_number,
    "of another key": lambda path: path.write_bytes(
        path.read_bytes().replace(b'"key": "', b'"key": "0', 1)
    ),
    "resealed, no findings": resealed(findings=None),
    "resealed, files a list": resealed(files=[]),
    "deeply nested": lambda path: path.write_text("[" * 100_000),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_worked_out_and_written_anew(copied, worked, damage):
    before = ask("status", copied)
    worked.clear()
    DAMAGE[damage](copied / FINDINGS_FILE)
    assert ask("status", copied) == before
    assert len(worked) == 1
    assert ask("status", copied) == before


def test_where_nothing_can_be_written_nothing_fails(copied, worked, monkeypatch):
    def full(path, content):
        raise OSError(28, "No space left on device", str(path))

    before = ask("status", copied)
    (copied / FINDINGS_FILE).unlink()
    monkeypatch.setattr("launcher.study.finding_cache.canon.write_atomic", full)
    assert ask("status", copied) == before
    assert not (copied / FINDINGS_FILE).exists()


def test_more_records_another_plan_and_another_place_are_worked_out(finished, copied, worked):
    before = ask("status", copied)[1]
    plan = copied / "plan.toml"
    text = plan.read_text()
    plan.write_text(re.sub(r"\[launch\][^\n]*", r"\g<0>\ncheckpoint_every_steps = 7", text))
    assert ask("status", copied)[1]["decision"]["checkpointing"]["every_steps"] == 7
    plan.write_text(text)
    assert len(worked) == 2
    shutil.copytree(copied, copied.with_name("moved"))
    assert ask("status", copied.with_name("moved"))[1]["digest"] == before["digest"]
    assert worked[2:] == ["moved"]

    half = copied.with_name("half")
    replay(finished / "study", half, lambda record: record.seq < 30)
    shutil.copy(copied / FINDINGS_FILE, half)
    assert ask("status", half)[1]["spend"]["num_runs"] < before["spend"]["num_runs"]
    assert worked[3:] == ["half"]


def test_bytes_of_the_ledger_that_flip_are_seen_with_findings_at_hand(copied, worked):
    """As without: refused, or the same."""
    before = ask("status", copied)
    worked.clear()
    path, refused = copied / LEDGER_NAME, 0
    content = path.read_bytes()
    for position in random.Random(0).sample(range(len(content)), 24):
        path.write_bytes(
            content[:position] + bytes([content[position] ^ 0xFF]) + content[position + 1 :]
        )
        code, body = ask("status", copied)
        assert code == 5 or (code, body) == before
        refused += code == 5
    assert refused > 12
    assert worked == [], "all that was answered came from what was kept"


def test_freeze_works_out_what_it_freezes_and_keeps_it(copied, worked, monkeypatch):
    from tiny_study import set_gates

    set_gates(monkeypatch)
    ask("status", copied)
    accept = ("--accept", "coordinates", "--accept", "transfer", "--reason", "planted")
    code, frozen = ask("freeze", copied, *accept)
    assert code == 0
    worked.clear()
    code, told = ask("report", copied)
    assert (code, told["digest"], worked) == (0, frozen["digest"], [])
    assert set(told["accepted"]) == {"coordinates", "transfer"}
