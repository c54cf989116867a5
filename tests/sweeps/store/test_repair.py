"""Tests of the repair of a damaged ledger, the database of a study's records: every record that its
hashes prove is kept, and no other record is.
"""

import random
import sqlite3
import subprocess
import sys
import textwrap

import pytest
from sweep_fakes import make_outcome, make_pruned_outcome, make_specs

from forerun._proxies.core.spec import Run
from forerun._sweeps.store import repair as repair_module
from forerun._sweeps.store.curves import store_curve
from forerun._sweeps.store.errors import DiskFull, LedgerCorrupt, LedgerTooNew
from forerun._sweeps.store.ledger import LEDGER_NAME, Ledger
from forerun._sweeps.store.repair import repair

PLAN = {"seed": 1}
SPECS = make_specs(12)
# Plan, driver, a suggestion and a result of each run, and a long fit
NUM_RECORDS = 2 + 2 * len(SPECS) + 1
LONG_FIT = {"draws": [index / 7 for index in range(2000)]}


@pytest.fixture(scope="module")
def written_ledger(tmp_path_factory):
    """Write a ledger; return its bytes and records.

    The fit is longer than a page of SQLite's file, so its record continues on overflow pages.
    """
    study = tmp_path_factory.mktemp("written")
    with Ledger.open(study, PLAN, create=True) as ledger:
        for index, spec in enumerate(SPECS):
            ledger.append("suggestion", f"sweep/{index}", {"learning_rate": 0.1 * index})
            ledger.commit(spec, make_outcome(spec)[0])
            if index == 5:
                ledger.append("fit", "ladder/x", LONG_FIT)
        return (study / LEDGER_NAME).read_bytes(), ledger.read_records()


@pytest.fixture
def study(written_ledger, tmp_path):
    """Make a study with this ledger and the curves of its runs; return its folder."""
    (tmp_path / LEDGER_NAME).write_bytes(written_ledger[0])
    for spec in SPECS:
        store_curve(tmp_path, spec.id, make_outcome(spec)[1])
    return tmp_path


def damage(study, *edits):
    """Overwrite bytes of the ledger, and return its new content.

    Args:
        study: the study folder.
        edits: (place, new bytes) of each change; the place is a position, or bytes that begin
            there.
    """
    content = bytearray((study / LEDGER_NAME).read_bytes())
    for place, new_bytes in edits:
        position = place if isinstance(place, int) else content.index(place)
        content[position : position + len(new_bytes)] = new_bytes
    (study / LEDGER_NAME).write_bytes(content)
    return bytes(content)


def test_intact_ledger_is_unchanged(study, written_ledger):
    assert repair(study) is None
    assert (study / LEDGER_NAME).read_bytes() == written_ledger[0]
    assert sorted(path.name for path in study.iterdir()) == ["curves", "driver.lock", LEDGER_NAME]


def test_damaged_record_costs_only_itself(study, written_ledger):
    """Results and suggestions after the damaged record are restored. The fit is lost, because it
    was made from results that include the damaged one.
    """
    spec = SPECS[3]
    broken = damage(study, (f'"id":"{spec.id}"'.encode(), b'"id":"0'))
    repaired = repair(study)
    assert (study / repaired.copy).read_bytes() == broken
    assert repaired.copy == "ledger.db.damaged-1"
    seq = next(record.seq for record in written_ledger[1] if record.key == spec.id)
    assert repaired.num_kept == seq
    # All records after the damaged one, except the fit
    assert repaired.num_put_back == NUM_RECORDS - (seq + 1) - 1
    assert repaired.lost == {"result": [spec.id], "fit": ["ladder/x"]}
    assert repaired.rerun == (spec.id,)
    ledger = Ledger.read(study)
    assert ledger.read_records()[:seq] == written_ledger[1][:seq]
    assert dict(ledger.get_results()) == {
        kept_spec.id: make_outcome(kept_spec)[0] for kept_spec in SPECS if kept_spec is not spec
    }
    assert len(ledger.read_records("suggestion")) == len(SPECS)
    (note,) = ledger.read_records("repair")
    assert note.body["lost"] == repaired.lost
    assert note.seq == seq, "restored records follow the record of the repair"
    assert repair(study) is None
    with Ledger.open(study, PLAN, create=False) as reopened:
        reopened.commit(spec, make_outcome(spec)[0])


def test_results_that_cost_training_are_restored_after_the_damage(tmp_path):
    """The records are a pruned run, an imported run, and a calibration. The copy of an earlier
    repair is kept.
    """
    with Ledger.open(tmp_path, PLAN, create=True) as ledger:
        ledger.append("note", "0", "to be lost")
        ledger.commit(SPECS[0], make_pruned_outcome(SPECS[0], 2)[0])
        ledger.append("imported", SPECS[1].id, Run(spec=SPECS[1], result=make_outcome(SPECS[1])[0]))
        ledger.append("calibration", "0", {"seconds": 1.0})
    damage(tmp_path, (b"to be lost", b"it is lost"))
    (tmp_path / "ledger.db.damaged-1").write_bytes(b"older")
    repaired = repair(tmp_path)
    assert (repaired.copy, repaired.num_put_back, repaired.lost) == (
        "ledger.db.damaged-2",
        3,
        {"note": ["0"]},
    )
    assert (tmp_path / "ledger.db.damaged-1").read_bytes() == b"older"
    kinds = [record.kind for record in Ledger.read(tmp_path).read_records()]
    assert kinds == ["plan", "driver", "repair", "pruned", "imported", "calibration"]


def test_truncated_file_keeps_its_proven_records(study, written_ledger):
    path = study / LEDGER_NAME
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    repaired = repair(study)
    assert 2 < repaired.num_kept < NUM_RECORDS
    assert (
        Ledger.read(study).read_records()[: repaired.num_kept]
        == written_ledger[1][: repaired.num_kept]
    )


@pytest.mark.parametrize(
    "edits",
    [
        # The header of the file
        [(0, bytes(100))],
        # The first page, with the schema
        [(0, bytes(4096))],
        [(b"sqlite_autoindex", b"\xff" * 8)],
        # The schema's version
        [(60, b"\xff")],
        # The number of pages
        [(28, b"\xff" * 4)],
    ],
)
def test_damage_outside_of_records_costs_no_record(study, written_ledger, edits):
    damage(study, *edits)
    repaired = repair(study)
    assert (repaired.num_kept, repaired.lost, repaired.rerun) == (NUM_RECORDS, {}, ())
    assert Ledger.read(study).read_records()[:NUM_RECORDS] == written_ledger[1]


def test_given_plan_replaces_a_lost_one_if_the_chain_proves_it(study):
    damage(study, (b'{"seed":1}', b"{'seed"))
    for guess in (None, {"seed": 2}):
        with pytest.raises(
            LedgerCorrupt, match="not even its first record, the plan, can be proven"
        ):
            repair(study, guess)
    assert repair(study, PLAN).num_kept == NUM_RECORDS
    assert Ledger.read(study).plan == PLAN


def test_journal_next_to_a_damaged_ledger_is_used_and_copied(study, written_ledger):
    """The journal is copied with the damaged file and is never applied to the new one."""
    # SQLite's magic number of a journal, and an empty header of the usual size
    journal_header = b"\xd9\xd5\x05\xf9\x20\xa1\x63\xd7" + bytes(500)
    (study / f"{LEDGER_NAME}-journal").write_bytes(journal_header + written_ledger[0])
    damage(study, (0, bytes(4096)), (written_ledger[0].index(b'"seed":3'), b'"seed":4'))
    repaired = repair(study)
    assert (repaired.num_kept, repaired.lost) == (NUM_RECORDS, {}), (
        "the journal's page had the record"
    )
    assert (study / "ledger.db.damaged-1-journal").exists()
    assert not (study / f"{LEDGER_NAME}-journal").exists()


@pytest.mark.parametrize("how", ["missing", "empty", "another file"])
def test_repair_without_proven_records_is_refused(study, how):
    path = study / LEDGER_NAME
    path.unlink() if how == "missing" else path.write_bytes(
        b"" if how == "empty" else b"not a database\n" * 99
    )
    (study / "ledger.db.damaged-1").write_bytes(b"older")
    with pytest.raises(LedgerCorrupt) as caught:
        repair(study)
    message = str(caught.value)
    assert "restore it from a copy (an earlier repair left ledger.db.damaged-1)" in message
    assert "12 curves" in message
    assert not (study / "ledger.db.damaged-2").exists()


def test_ledger_of_a_later_version_is_unchanged(study):
    connection = sqlite3.connect(study / LEDGER_NAME)
    connection.execute("ALTER TABLE head ADD COLUMN at TEXT")
    connection.execute("PRAGMA user_version = 3")
    connection.close()
    with pytest.raises(LedgerTooNew):
        repair(study)
    assert not (study / "ledger.db.damaged-1").exists()


def test_repair_without_room_for_the_copy_changes_nothing(study, monkeypatch):
    broken = damage(study, (0, bytes(100)))

    def raise_disk_full(path, content):
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr("forerun._proxies.core.canon.write_atomic", raise_disk_full)
    with pytest.raises(DiskFull, match="free some space and repair again"):
        repair(study)
    assert (study / LEDGER_NAME).read_bytes() == broken


def test_flipped_byte_costs_one_record_at_most(written_ledger):
    content, records = written_ledger
    original = {record.seq: record for record in records}
    rng = random.Random(0)
    for _ in range(400):
        broken = bytearray(content)
        broken[rng.randrange(len(content))] ^= rng.choice((0x01, 0x80, 0xFF))
        rows = repair_module.find_rows(bytes(broken))
        intact, kept = (
            repair_module.find_intact_records(rows),
            repair_module.find_longest_chain(rows),
        )
        assert intact.items() <= original.items(), "a record that was never written"
        assert tuple(kept) == records[: len(kept)]
        assert len({*intact, *range(len(kept))}) >= len(records) - 1


def test_killed_repair_is_completed_by_the_next_one(study):
    """A process is killed at every step that changes the folder. The next repair gives the result
    of an uninterrupted one.
    """
    broken = damage(study, (b'"seed":3', b'"seed":4'), (0, bytes(100)))
    expected = repair(study)
    repaired_records = Ledger.read(study).read_records()
    num_kills = 0
    for moment in range(40):  # more than a repair has steps
        for path in study.glob("ledger.db*"):
            path.unlink()
        (study / LEDGER_NAME).write_bytes(broken)
        script = f"""
            import os, sys
            from pathlib import Path
            num_events_left = {moment}
            def hook(event, arguments):
                global num_events_left
                changes_files = event in ("os.rename", "os.remove", "open", "sqlite3.connect")
                if changes_files and "ledger.db" in str(arguments[0]):
                    num_events_left -= 1
                    if num_events_left < 0:
                        os.kill(os.getpid(), 9)
            from forerun._sweeps.store.repair import repair
            sys.addaudithook(hook)
            repair(Path({str(study)!r}))
        """
        done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=False)
        assert repair(study) in (expected, None), "None if the new ledger was already in place"
        assert Ledger.read(study).read_records() == repaired_records
        assert (study / "ledger.db.damaged-1").read_bytes() == broken
        if done.returncode == 0:
            break
        num_kills += 1
    assert 8 < num_kills < 40, "too few steps were interrupted, or no repair came to its end"
