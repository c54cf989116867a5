"""Tests of the golden ledger, the records of a study that an earlier version of forerun finished:
every record is read, the study continues, and a change of its question is refused.

The files `ledger-2.db.gz` and `plan.toml` in tests/sweeps/goldens were written by four commands on
the study of `tiny_study`: `run`, `transfer --spend`, `run`, and `freeze --accept`. They have every
kind of record of such a study. A study's question is the part of its plan that decides what is
measured.

These tests fail if a run's spec or result gets a new field, or the question a new key: then ids
change, and a run that is not found by its id is trained twice. After the first release, a new
version must still read old ledgers. Before it, write both files again by the commands above, update
`HEAD` and `NUM_RECORDS`, and raise `SCHEMA_VERSION` of `forerun._sweeps.store.chain`.
"""

import gzip
import shutil
from pathlib import Path

import pytest
from tiny_study import run_json, write_corpus

from forerun._launcher.study.stages.study_folder import read_study
from forerun._proxies.core import canon
from forerun._sweeps.store import chain
from forerun._sweeps.store.errors import PlanChanged
from forerun._sweeps.store.ledger import LEDGER_NAME, Ledger

GOLDENS = Path(__file__).parents[2] / "sweeps" / "goldens"
HEAD = "acba142219c40caf251ef1428132c3fae84c538283508657120971788a882833"
"""Hash of the golden ledger's last record, which depends on every byte of all records."""
NUM_RECORDS = {
    "plan": 1,
    "driver": 4,
    "coordinates": 2,
    "suggestion": 4,
    "result": 133,
    "driven": 9,
    "fit": 2,
    "spend": 3,
    "spent": 1,
    "accepted": 4,
}
"""Number of records of the golden ledger, by kind."""


@pytest.fixture
def study(tmp_path):
    """The folder of a study with the golden ledger, next to its corpus. It has no loss curves."""
    write_corpus(tmp_path)
    folder = tmp_path / "study"
    folder.mkdir()
    (folder / LEDGER_NAME).write_bytes(gzip.decompress((GOLDENS / "ledger-2.db.gz").read_bytes()))
    shutil.copy(GOLDENS / "plan.toml", folder)
    return folder


def test_every_record_is_read_with_its_hash(study):
    ledger = Ledger.read(study)
    assert ledger.head_hash == HEAD
    assert {kind: len(ledger.read_records(kind)) for kind in NUM_RECORDS} == NUM_RECORDS
    assert len(ledger.read_records()) == sum(NUM_RECORDS.values()), "there is no other kind"
    previous_hash = chain.GENESIS
    for seq, record in enumerate(ledger.read_records()):
        assert record == chain.make_record(
            seq, record.kind, record.key, canon.to_canonical_json(record.body), previous_hash
        )
        previous_hash = record.hash
    assert all(
        run.spec.id == key
        for key, run in zip(ledger.get_results(), ledger.read_runs(), strict=True)
    )


def test_status_shows_the_recorded_study(study):
    code, body = run_json("status", study)
    assert code == 0
    assert body["progress"]["search"] == [4, 4]
    assert body["spend"]["num_runs"] == NUM_RECORDS["result"]
    assert body["ledger_head"] == HEAD


def test_run_continues_without_repeating_a_run(study):
    """The verdicts of this version may ask for further runs, but no finished run is repeated."""
    before = Ledger.read(study)
    code, _ = run_json("run", study / "plan.toml", "--study", study)
    assert code == 0
    after = Ledger.read(study)
    assert after.read_records()[: len(before.read_records())] == before.read_records()
    ids = [run.spec.id for run in after.read_runs()]
    assert len(set(ids)) == len(ids), "no run is trained twice"
    records = after.read_records()
    code, _ = run_json("run", study / "plan.toml", "--study", study)
    assert code == 0
    assert [record.kind for record in Ledger.read(study).read_records()[len(records) :]] == [
        "driver"
    ]


def list_leaves(value, prefix=""):
    """Return the dotted names of all leaves of a nested dictionary; an empty one is a leaf."""
    if not isinstance(value, dict) or not value:
        return [prefix]
    leaves = []
    for key, item in value.items():
        leaves += list_leaves(item, f"{prefix}.{key}" if prefix else key)
    return leaves


def change_value(value):
    """Return another value, of the same type if possible."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    return f"{value}x" if isinstance(value, str) else ["something else"]


def change_leaf(question, leaf):
    """Return the question with one leaf changed, and the leaf's old and new value."""
    copy = canon.parse(canon.to_canonical_json(question))
    *keys, last = leaf.split(".")
    holder = copy
    for key in keys:
        holder = holder[key]
    old, holder[last] = holder[last], change_value(holder[last])
    return copy, (canon.to_canonical_json(old), canon.to_canonical_json(holder[last]))


def test_change_of_any_field_of_the_question_is_refused(study):
    ledger = Ledger.read(study)
    question = read_study(study / "plan.toml", study).question
    ledger.check_plan(question)
    leaves = list_leaves(question)
    assert len(leaves) > 80, "all sections of the plan are there"
    for leaf in leaves:
        changed_question, values = change_leaf(question, leaf)
        with pytest.raises(PlanChanged) as caught:
            ledger.check_plan(changed_question)
        assert caught.value.changes == {leaf: values}
        assert f"  {leaf}: {values[0]} -> {values[1]}" in str(caught.value)
