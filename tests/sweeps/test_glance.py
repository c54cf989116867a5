"""A glance counts what the whole ledger holds, checks the chain's end, and leaves what lies before to who reads all."""

import dataclasses
import sqlite3

import pytest
from sweep_fakes import make_specs, outcome, pruned_outcome

from proxies.core.spec import Run
from sweeps.store import glance
from sweeps.store.errors import LedgerCorrupt, StudyMissing
from sweeps.store.glance import Checked, Glance, check_end
from sweeps.store.ledger import LEDGER_NAME, Ledger

NUM_CHECKED = 3


@pytest.fixture
def study(tmp_path, monkeypatch):
    """Nine records, of every kind that is counted; 2 and 3 are results, and the last 3 are checked."""
    monkeypatch.setattr(glance, "MOST_CHECKED", NUM_CHECKED)
    finished, diverged, whole, imported = make_specs(4, num_steps=4)
    diverged = dataclasses.replace(diverged, hparams=dataclasses.replace(diverged.hparams, learning_rate=0.5))
    with Ledger.open(tmp_path, {}, create=True) as ledger:
        for spec in (finished, diverged):
            ledger.commit(spec, outcome(spec)[0])
        ledger.commit(whole, pruned_outcome(whole, 2)[0])
        ledger.append("imported", imported.id, Run(spec=imported, result=outcome(imported)[0]))
        ledger.append("driven", "0/0", {"seconds": 3.0, "device_seconds": 6.0})
        ledger.append("lost", "one", {"cause": "error"})
        ledger.commit(whole, outcome(whole)[0])
    return tmp_path


def change(study, statement, *values):
    with sqlite3.connect(study / LEDGER_NAME) as connection:
        assert connection.execute(statement, values).rowcount == 1
    connection.close()


def test_a_glance_sees_what_the_whole_ledger_says(study):
    seen, whole = Glance.at(study), Glance.of(Ledger.read(study))
    assert seen.checked == check_end(study) == Checked(num_records=9, num_checked=NUM_CHECKED)
    assert dataclasses.replace(seen, checked=whole.checked) == whole
    assert [run.status for run in whole.outcomes] == ["finished", "diverged", "pruned", "finished", "finished"]
    assert [run.imported for run in whole.outcomes] == [False, False, False, True, False]
    assert (whole.num_lost, len(whole.driven), whole.checked.num_checked) == (1, 1, 9)


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE records SET body = replace(body, '0.5', '0.6') WHERE seq = 8",
        "UPDATE records SET kind = 'other' WHERE seq = 7",
        "UPDATE records SET prev_hash = hash WHERE seq = 7",
        "UPDATE records SET body = '{\"device_seconds\":6.0,\"seconds\":4.0}' WHERE kind = 'driven'",
        "UPDATE records SET seq = 10 WHERE seq = 8",
        "UPDATE head SET hash = replace(hash, 'a', 'b')",
        "DELETE FROM records WHERE seq = 8",
        "DELETE FROM records WHERE seq = 2",
        "DELETE FROM head",
    ],
)
def test_a_damaged_end_is_refused(study, damage):
    change(study, damage)
    for reader in (Glance.at, check_end, Ledger.read):
        with pytest.raises(LedgerCorrupt, match="forerun repair"):
            reader(study)


def test_damage_before_the_end_is_left_to_who_reads_all(study):
    change(study, "UPDATE records SET body = replace(body, '\"seconds\":0.5', '\"seconds\":9.5') WHERE seq = 2")
    assert Glance.at(study).checked == check_end(study) == Checked(num_records=9, num_checked=NUM_CHECKED)
    with pytest.raises(LedgerCorrupt, match="record 2 is not what was written"):
        Ledger.read(study)


@pytest.mark.parametrize(
    ("was", "is_now"),
    [
        ('"status":"finished"', '"status":"done"'), ('"width":32', '"width":"32"'), ('"width":32', '"wisth":32'),
        ('"flops":1.0', '"flops":1e999'), ('"flops":1.0', '"flops":null'), ('"loss_nats":', '"loss_nats":[],"x":'),
        ('"flops"', '"flops'),
    ],
)  # fmt: skip
def test_what_is_no_outcome_is_refused_wherever_it_lies(study, was, is_now):
    change(study, "UPDATE records SET body = replace(body, ?, ?) WHERE seq = 2", was, is_now)
    with pytest.raises(LedgerCorrupt, match="forerun repair"):
        Glance.at(study)


def test_a_record_of_hours_is_proven_wherever_it_lies(study, monkeypatch):
    monkeypatch.setattr(glance, "MOST_CHECKED", 1)
    change(study, "UPDATE records SET body = replace(body, '3.0', '4.0') WHERE kind = 'driven'")
    with pytest.raises(LedgerCorrupt, match="record 6 is not what was written"):
        Glance.at(study)


@pytest.mark.parametrize("text", [b"lostone", b"driven0/0"])
def test_a_flip_in_the_index_is_refused_or_changes_nothing(study, monkeypatch, text):
    monkeypatch.setattr(glance, "MOST_CHECKED", 1000)
    path = study / LEDGER_NAME
    before, content = Glance.at(study), path.read_bytes()
    places = [at for at in range(len(content)) if content.startswith(text, at)]
    assert len(places) == 2, "in the table and in its index"
    outcomes = []
    for at in places:
        path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        try:
            outcomes.append(Glance.at(study) == before)
        except LedgerCorrupt:
            outcomes.append(None)
    assert sorted(outcomes, key=str) == [None, True]


def test_where_there_is_no_study(tmp_path):
    for reader in (Glance.at, check_end):
        with pytest.raises(StudyMissing):
            reader(tmp_path)
