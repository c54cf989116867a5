"""A damaged ledger, repaired: nothing that its hashes prove is lost, nothing else is believed."""

import random
import sqlite3
import subprocess
import sys
import textwrap

import pytest
from sweep_fakes import make_specs, outcome, pruned_outcome

from proxies.core.spec import Run
from sweeps.store import repair as repair_module
from sweeps.store.curves import store_curve
from sweeps.store.errors import DiskFull, LedgerCorrupt, LedgerTooNew
from sweeps.store.ledger import LEDGER_NAME, Ledger
from sweeps.store.repair import repair

PLAN = {"seed": 1}
SPECS = make_specs(12)
# plan, driver, a suggestion and a result of each run, a long fit
NUM_RECORDS = 2 + 2 * len(SPECS) + 1
LONG = {"draws": [index / 7 for index in range(2000)]}


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The bytes of a ledger with a record on overflow pages, and its records."""
    study = tmp_path_factory.mktemp("written")
    with Ledger.open(study, PLAN, create=True) as ledger:
        for index, spec in enumerate(SPECS):
            ledger.append("suggestion", f"sweep/{index}", {"learning_rate": 0.1 * index})
            ledger.commit(spec, outcome(spec)[0])
            if index == 5:
                ledger.append("fit", "ladder/x", LONG)
        return (study / LEDGER_NAME).read_bytes(), ledger.records()


@pytest.fixture
def study(written, tmp_path):
    (tmp_path / LEDGER_NAME).write_bytes(written[0])
    for spec in SPECS:
        store_curve(tmp_path, spec.id, outcome(spec)[1])
    return tmp_path


def damage(study, *edits):
    """Replace bytes: pairs of a position, or what is found there, and what comes in its place."""
    content = bytearray((study / LEDGER_NAME).read_bytes())
    for where, new in edits:
        at = where if isinstance(where, int) else content.index(where)
        content[at : at + len(new)] = new
    (study / LEDGER_NAME).write_bytes(content)
    return bytes(content)


def test_a_sound_ledger_is_left_alone(study, written):
    assert repair(study) is None
    assert (study / LEDGER_NAME).read_bytes() == written[0]
    assert sorted(path.name for path in study.iterdir()) == ["curves", "driver.lock", LEDGER_NAME]


def test_one_damaged_record_costs_itself_alone(study, written):
    """Results and suggestions beyond it come back; the fit, before which it lies, is made again
    from them.
    """
    spec = SPECS[3]
    broken = damage(study, (f'"id":"{spec.id}"'.encode(), b'"id":"0'))
    found = repair(study)
    assert (study / found.copy).read_bytes() == broken
    assert found.copy == "ledger.db.damaged-1"
    seq = next(record.seq for record in written[1] if record.key == spec.id)
    assert found.num_kept == seq
    assert found.num_put_back == NUM_RECORDS - 1 - seq - 1
    assert found.lost == {"result": [spec.id], "fit": ["ladder/x"]}
    assert found.rerun == (spec.id,)
    ledger = Ledger.read(study)
    assert ledger.records()[:seq] == written[1][:seq]
    assert dict(ledger.results()) == {s.id: outcome(s)[0] for s in SPECS if s is not spec}
    assert len(ledger.records("suggestion")) == len(SPECS)
    (note,) = ledger.records("repair")
    assert note.body["lost"] == found.lost
    assert note.seq == seq, "what was put back stands behind the note that says so"
    assert repair(study) is None
    with Ledger.open(study, PLAN, create=False) as again:
        again.commit(spec, outcome(spec)[0])


def test_whatever_was_paid_for_comes_back_from_beyond_the_damage(tmp_path):
    """Pruned, imported and calibrated; beside the copy of an earlier repair, which stays as
    it is.
    """
    with Ledger.open(tmp_path, PLAN, create=True) as ledger:
        ledger.append("note", "0", "to be lost")
        ledger.commit(SPECS[0], pruned_outcome(SPECS[0], 2)[0])
        ledger.append("imported", SPECS[1].id, Run(spec=SPECS[1], result=outcome(SPECS[1])[0]))
        ledger.append("calibration", "0", {"seconds": 1.0})
    damage(tmp_path, (b"to be lost", b"it is lost"))
    (tmp_path / "ledger.db.damaged-1").write_bytes(b"older")
    found = repair(tmp_path)
    assert (found.copy, found.num_put_back, found.lost) == (
        "ledger.db.damaged-2",
        3,
        {"note": ["0"]},
    )
    assert (tmp_path / "ledger.db.damaged-1").read_bytes() == b"older"
    kinds = [record.kind for record in Ledger.read(tmp_path).records()]
    assert kinds == ["plan", "driver", "repair", "pruned", "imported", "calibration"]


def test_half_of_the_file_keeps_what_it_proves(study, written):
    path = study / LEDGER_NAME
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    found = repair(study)
    assert 2 < found.num_kept < NUM_RECORDS
    assert Ledger.read(study).records()[: found.num_kept] == written[1][: found.num_kept]


@pytest.mark.parametrize(
    "edits",
    [
        [(0, bytes(100))],  # the header of the file
        [(0, bytes(4096))],  # with the schema
        [(b"sqlite_autoindex", b"\xff" * 8)],
        [(60, b"\xff")],  # the schema's version
        [(28, b"\xff" * 4)],  # the number of pages
    ],
)
def test_damage_outside_of_records_costs_none(study, written, edits):
    damage(study, *edits)
    found = repair(study)
    assert (found.num_kept, found.lost, found.rerun) == (NUM_RECORDS, {}, ())
    assert Ledger.read(study).records()[:NUM_RECORDS] == written[1]


def test_a_lost_plan_is_believed_if_the_chain_names_it(study):
    damage(study, (b'{"seed":1}', b"{'seed"))
    for guess in (None, {"seed": 2}):
        with pytest.raises(
            LedgerCorrupt, match="not even its first record, the plan, can be proven"
        ):
            repair(study, guess)
    assert repair(study, PLAN).num_kept == NUM_RECORDS
    assert Ledger.read(study).plan == PLAN


def test_what_is_left_of_a_damaged_journal(study, written):
    """A hot journal beside a damaged file: copied with it, and never played into the new one."""
    (study / f"{LEDGER_NAME}-journal").write_bytes(
        b"\xd9\xd5\x05\xf9\x20\xa1\x63\xd7" + bytes(500) + written[0]
    )
    damage(study, (0, bytes(4096)), (written[0].index(b'"seed":3'), b'"seed":4'))
    found = repair(study)
    assert (found.num_kept, found.lost) == (NUM_RECORDS, {}), "the journal's page had the record"
    assert (study / "ledger.db.damaged-1-journal").exists()
    assert not (study / f"{LEDGER_NAME}-journal").exists()


@pytest.mark.parametrize("how", ["missing", "empty", "another file"])
def test_where_nothing_can_be_proven(study, how):
    path = study / LEDGER_NAME
    path.unlink() if how == "missing" else path.write_bytes(
        b"" if how == "empty" else b"not a database\n" * 99
    )
    (study / "ledger.db.damaged-1").write_bytes(b"older")
    with pytest.raises(LedgerCorrupt) as caught:
        repair(study)
    said = str(caught.value)
    assert "restore it from a copy (an earlier repair left ledger.db.damaged-1)" in said
    assert "12 curves" in said
    assert not (study / "ledger.db.damaged-2").exists()


def test_a_later_versions_ledger_is_left_alone(study):
    connection = sqlite3.connect(study / LEDGER_NAME)
    connection.execute("ALTER TABLE head ADD COLUMN at TEXT")
    connection.execute("PRAGMA user_version = 3")
    connection.close()
    with pytest.raises(LedgerTooNew):
        repair(study)
    assert not (study / "ledger.db.damaged-1").exists()


def test_no_room_for_the_copy(study, monkeypatch):
    broken = damage(study, (0, bytes(100)))

    def full(path, content):
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr("proxies.core.canon.write_atomic", full)
    with pytest.raises(DiskFull, match="free some space and repair again"):
        repair(study)
    assert (study / LEDGER_NAME).read_bytes() == broken


def test_any_flipped_byte_costs_one_record_at_most(written):
    content, records = written
    whole = {record.seq: record for record in records}
    rng = random.Random(0)
    for _ in range(400):
        broken = bytearray(content)
        broken[rng.randrange(len(content))] ^= rng.choice((0x01, 0x80, 0xFF))
        rows = repair_module.rows_in(bytes(broken))
        intact, kept = repair_module.intact_records(rows), repair_module.longest_chain(rows)
        assert intact.items() <= whole.items(), "a record that never was"
        assert tuple(kept) == records[: len(kept)]
        assert len({*intact, *range(len(kept))}) >= len(records) - 1


def test_killed_anywhere_it_is_begun_again(study):
    """Real kills, at every step that changes the folder; the second try has the outcome of an
    uninterrupted one.
    """
    broken = damage(study, (b'"seed":3', b'"seed":4'), (0, bytes(100)))
    expected = repair(study)
    whole = Ledger.read(study).records()
    steps = 0
    for moment in range(40):
        for path in study.glob("ledger.db*"):
            path.unlink()
        (study / LEDGER_NAME).write_bytes(broken)
        script = f"""
            import os, sys
            from pathlib import Path
            left = [{moment}]
            def hook(event, arguments):
                if event in ("os.rename", "os.remove", "open", "sqlite3.connect") and "ledger.db" in str(arguments[0]):
                    left[0] -= 1
                    if left[0] < 0:
                        os.kill(os.getpid(), 9)
            from sweeps.store.repair import repair
            sys.addaudithook(hook)
            repair(Path({str(study)!r}))
        """  # noqa: E501
        done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=False)
        assert repair(study) in (expected, None), "None: the new ledger was in its place already"
        assert Ledger.read(study).records() == whole
        assert (study / "ledger.db.damaged-1").read_bytes() == broken
        if done.returncode == 0:
            break
        steps += 1
    assert 8 < steps < 40
