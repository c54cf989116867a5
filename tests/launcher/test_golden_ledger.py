"""A finished study's ledger, kept in tests/sweeps/goldens: read whole, and gone on with.

`ledger-2.db.gz` and `plan.toml` are `tiny_study` through run, transfer --spend, run and freeze
--accept, so that every kind of record is in it. Whoever adds a field to a run's spec or result, or
a key to the question, gives runs other ids and questions other answers: a run that is no longer
found by its id is paid for twice. From the first release on such a change has to read what was;
before it, both files are made anew, and `SCHEMA_VERSION` of `sweeps.store.chain` rises.
"""

import gzip
import shutil
from pathlib import Path

import pytest
from tiny_study import ask, write_corpus

from launcher.study.study_folder import plan_study
from proxies.core import canon
from sweeps.store import chain
from sweeps.store.errors import PlanChanged
from sweeps.store.ledger import LEDGER_NAME, Ledger

GOLDENS = Path(__file__).parents[1] / "sweeps" / "goldens"
HEAD = "acba142219c40caf251ef1428132c3fae84c538283508657120971788a882833"
KINDS = {
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


@pytest.fixture
def study(tmp_path):
    """The golden as a study folder, its corpus beside it; its curves are not kept."""
    write_corpus(tmp_path)
    folder = tmp_path / "study"
    folder.mkdir()
    (folder / LEDGER_NAME).write_bytes(gzip.decompress((GOLDENS / "ledger-2.db.gz").read_bytes()))
    shutil.copy(GOLDENS / "plan.toml", folder)
    return folder


def test_every_record_is_there_with_its_hash(study):
    ledger = Ledger.read(study)
    assert ledger.head_hash == HEAD
    assert {kind: len(ledger.records(kind)) for kind in KINDS} == KINDS
    assert len(ledger.records()) == sum(KINDS.values())
    before = chain.GENESIS
    for seq, record in enumerate(ledger.records()):
        assert record == chain.link(
            seq, record.kind, record.key, canon.canonical(record.body), before
        )
        before = record.hash
    assert all(run.spec.id == key for key, run in zip(ledger.results(), ledger.runs(), strict=True))


def test_status_reads_what_it_holds(study):
    code, body = ask("status", study)
    assert code == 0
    assert body["progress"]["search"] == [4, 4]
    assert body["spend"]["num_runs"] == KINDS["result"]
    assert body["ledger_head"] == HEAD


def test_run_goes_on_with_it_and_runs_nothing_again(study):
    """Today's verdicts ask for some other runs than those of its version: what has ended is
    used.
    """
    before = Ledger.read(study)
    code, _ = ask("run", study / "plan.toml", "--study", study)
    assert code == 0
    after = Ledger.read(study)
    assert after.records()[: len(before.records())] == before.records()
    ids = [run.spec.id for run in after.runs()]
    assert len(set(ids)) == len(ids), "no run twice"
    records = after.records()
    code, _ = ask("run", study / "plan.toml", "--study", study)
    assert code == 0
    assert [record.kind for record in Ledger.read(study).records()[len(records) :]] == ["driver"]


def leaves(value, prefix=""):
    if isinstance(value, dict) and value:
        return [
            leaf
            for key, item in value.items()
            for leaf in leaves(item, f"{prefix}.{key}" if prefix else key)
        ]
    return [prefix]


def changed(value):
    """Another value in its place, of the same kind where that is possible."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    return f"{value}x" if isinstance(value, str) else ["something else"]


def replaced(question, leaf):
    """The question with one leaf changed, and that leaf's two values."""
    copy = canon.parse(canon.canonical(question))
    *path, last = leaf.split(".")
    place = copy
    for key in path:
        place = place[key]
    old, place[last] = place[last], changed(place[last])
    return copy, (canon.canonical(old), canon.canonical(place[last]))


def test_every_field_of_the_question_is_held_one_by_one(study):
    ledger = Ledger.read(study)
    question = plan_study(study / "plan.toml", study).question
    ledger.check_plan(question)
    names = leaves(question)
    assert len(names) > 80
    for leaf in names:
        asked_now, values = replaced(question, leaf)
        with pytest.raises(PlanChanged) as caught:
            ledger.check_plan(asked_now)
        assert caught.value.changes == {leaf: values}
        assert f"  {leaf}: {values[0]} -> {values[1]}" in str(caught.value)
