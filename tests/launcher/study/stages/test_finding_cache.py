"""Tests of the cache of a study's findings, which `status` and `report` compute from its records:
answers are the same bytes with and without the cache, and a damaged cache is not used.
"""

import json
import random
import re
import shutil

import pytest
from tiny_study import copy_records, run_forerun, run_json

from forerun._launcher.report.page import report_builder as report
from forerun._launcher.study.stages.finding_cache import FINDINGS_FILE
from forerun._proxies.core import canon
from forerun._sweeps.store.ledger import LEDGER_NAME


@pytest.fixture
def computed_studies(monkeypatch):
    """Names of the studies whose findings were computed, in order."""
    names, gather = [], report.gather_findings

    def record_and_gather(study, ledger):
        names.append(study.study_dir.name)
        return gather(study, ledger)

    monkeypatch.setattr(report, "gather_findings", record_and_gather)
    return names


def read_answers(study):
    """Return the output of `status` and `report`, as text and JSON, and the written reports."""
    outputs = [
        run_forerun(verb, study, *options)
        for verb in ("status", "report")
        for options in ((), ("--json",))
    ]
    assert all(code == 0 for code, _, _ in outputs)
    return outputs, [(study / name).read_bytes() for name in ("report.json", "report.html")]


def test_answers_with_and_without_the_cache_are_equal(study_copy, computed_studies):
    (study_copy / FINDINGS_FILE).unlink(missing_ok=True)
    status_without_cache = (
        run_forerun("status", study_copy),
        run_forerun("status", study_copy, "--json"),
    )
    assert len(computed_studies) == 1
    (study_copy / FINDINGS_FILE).unlink()
    outputs, reports = read_answers(study_copy)
    assert len(computed_studies) == 2
    assert read_answers(study_copy) == (outputs, reports)
    assert tuple(outputs[:2]) == status_without_cache
    assert len(computed_studies) == 2, "the later answers came from the cache"


def edit_one_number(path):
    """Edit the cache without renewing its hash."""
    entry = json.loads(path.read_text())
    entry["findings"]["report"]["spend"]["num_runs"] += 1
    path.write_text(json.dumps(entry))


def make_edit_with_new_hash(**changed):
    """Return a function that replaces keys of the cache's entry and renews its hash."""

    def damage(path):
        entry = {**json.loads(path.read_text()), **changed}
        del entry["sha256"]
        path.write_text(json.dumps({"sha256": canon.compute_content_id(entry), **entry}))

    return damage


DAMAGE = {
    "empty": lambda path: path.write_bytes(b""),
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-7]),
    "no JSON": lambda path: path.write_bytes(b"\xff" + path.read_bytes()),
    "another shape": lambda path: path.write_text("[1]"),
    "edited": edit_one_number,
    "with another key": lambda path: path.write_bytes(
        path.read_bytes().replace(b'"key": "', b'"key": "0', 1)
    ),
    "no findings, new hash": make_edit_with_new_hash(findings=None),
    "deeply nested": lambda path: path.write_text("[" * 100_000),
}
"""Functions that damage the cache file, by the kind of damage."""


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_cache_is_computed_and_written_again(study_copy, computed_studies, damage):
    before = run_json("status", study_copy)
    computed_studies.clear()
    DAMAGE[damage](study_copy / FINDINGS_FILE)
    assert run_json("status", study_copy) == before
    assert len(computed_studies) == 1
    assert run_json("status", study_copy) == before


def test_cache_that_cannot_be_written_is_no_error(study_copy, monkeypatch):
    def raise_full_disk(path, content):
        raise OSError(28, "No space left on device", str(path))

    before = run_json("status", study_copy)
    (study_copy / FINDINGS_FILE).unlink()
    monkeypatch.setattr(
        "forerun._launcher.study.stages.finding_cache.canon.write_atomic", raise_full_disk
    )
    assert run_json("status", study_copy) == before
    assert not (study_copy / FINDINGS_FILE).exists()


def test_changed_plan_moved_study_or_other_ledger_is_computed_again(
    finished_study_dir, study_copy, computed_studies
):
    before = run_json("status", study_copy)[1]
    plan = study_copy / "plan.toml"
    text = plan.read_text()
    plan.write_text(re.sub(r"\[launch\][^\n]*", r"\g<0>\ncheckpoint_every_steps = 7", text))
    assert run_json("status", study_copy)[1]["decision"]["checkpointing"]["every_steps"] == 7
    plan.write_text(text)
    assert len(computed_studies) == 2
    shutil.copytree(study_copy, study_copy.with_name("moved"))
    assert run_json("status", study_copy.with_name("moved"))[1]["digest"] == before["digest"]
    assert computed_studies[2:] == ["moved"]

    half = study_copy.with_name("half")
    copy_records(finished_study_dir / "study", half, lambda record: record.seq < 30)
    shutil.copy(study_copy / FINDINGS_FILE, half)
    assert run_json("status", half)[1]["spend"]["num_runs"] < before["spend"]["num_runs"]
    assert computed_studies[3:] == ["half"]


def test_damaged_ledger_is_noticed_in_spite_of_the_cache(study_copy, computed_studies):
    """One flipped byte of the ledger is either noticed, or it is in an unused part of the file and
    changes no answer.
    """
    before = run_json("status", study_copy)
    computed_studies.clear()
    path, refused = study_copy / LEDGER_NAME, 0
    content = path.read_bytes()
    for position in random.Random(0).sample(range(len(content)), 24):
        path.write_bytes(
            content[:position] + bytes([content[position] ^ 0xFF]) + content[position + 1 :]
        )
        code, body = run_json("status", study_copy)
        assert code == 5 or (code, body) == before
        refused += code == 5
    assert refused > 12, "most bytes of the file hold records"
    assert computed_studies == [], "every answer came from the cache"


def test_freeze_writes_the_cache(study_copy, computed_studies, monkeypatch):
    from tiny_study import set_gates

    set_gates(monkeypatch)
    run_json("status", study_copy)
    accept = ("--accept", "coordinates", "--accept", "transfer", "--reason", "planted")
    code, frozen = run_json("freeze", study_copy, *accept)
    assert code == 0
    computed_studies.clear()
    code, body = run_json("report", study_copy)
    assert (code, body["digest"], computed_studies) == (0, frozen["digest"], [])
    assert set(body["accepted"]) == {"coordinates", "transfer"}
