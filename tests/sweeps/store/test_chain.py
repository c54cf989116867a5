"""Tests of the chain of hashes in a ledger, the SQLite database of a study's records.

- A ledger with a flipped byte or a cut end is refused or read unchanged. The fast tests take a
  sample of the bytes and lengths; the slow test takes all.
- Records that are changed by SQL are refused with an error that names the record.
- A ledger of another version of forerun is refused as such, not as corrupt.
"""

import random
import shutil
import sqlite3
import tempfile
from pathlib import Path

import pytest
from ledger_flips import MASKS, cut_all, find_memory_folder, flip_all, read_verdict, write_study

from forerun._sweeps.store import chain
from forerun._sweeps.store.errors import LedgerCorrupt, LedgerTooNew, LedgerTooOld
from forerun._sweeps.store.ledger import LEDGER_NAME, Ledger


@pytest.fixture(scope="module")
def written_ledger(tmp_path_factory):
    """Write a ledger of 15 records: plan, driver, a suggestion and a result of each of six runs,
    and a fit; return its bytes and records.
    """
    study = tmp_path_factory.mktemp("written")
    records = write_study(study, num_runs=6)
    return (study / LEDGER_NAME).read_bytes(), records


@pytest.fixture
def fast_study():
    """An empty folder, in memory if possible: these tests read a thousand files."""
    folder = Path(tempfile.mkdtemp(dir=find_memory_folder()))
    yield folder
    shutil.rmtree(folder)


PAGE_BYTES = 4096
"""Size of a page of SQLite's files."""


def sample_positions(size):
    """Return the positions of the file's header, of every page's header, and of 200 random bytes.

    A page's header has 8 bytes; in the first page, the file's header of 100 bytes precedes it.
    """
    header_positions = [
        start + offset
        for start in range(0, size, PAGE_BYTES)
        for offset in range(108 if start == 0 else 8)
    ]
    return sorted({*header_positions, *random.Random(0).sample(range(size), 200)})


@pytest.mark.parametrize("mask", MASKS)
def test_flipped_byte_is_refused_or_changes_nothing(fast_study, mask):
    """Bytes whose change is not refused lie in the free space of pages, which is more than half of
    this small ledger.
    """
    records = write_study(fast_study)
    verdicts, max_lost = flip_all(
        fast_study, records, mask, sample_positions((fast_study / LEDGER_NAME).stat().st_size)
    )
    assert verdicts["refused"] > 0.4 * sum(verdicts.values())
    assert max_lost == 1, "one flipped byte costs one record at most"


def test_every_cut_is_refused(fast_study):
    records = write_study(fast_study)
    size = (fast_study / LEDGER_NAME).stat().st_size
    lengths = {0, 1, size - 1, *range(0, size, 512), *random.Random(1).sample(range(size), 50)}
    assert cut_all(fast_study, records, lengths) == {"refused": len(lengths)}


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_flipped_byte_and_every_cut_is_refused_or_changes_nothing(fast_study):
    records = write_study(fast_study)
    size = (fast_study / LEDGER_NAME).stat().st_size
    for mask in MASKS:
        verdicts, max_lost = flip_all(fast_study, records, mask)
        assert sum(verdicts.values()) == size
        assert max_lost == 1
    assert cut_all(fast_study, records) == {"refused": size}


def test_altered_record_is_accepted_without_hashes(written_ledger, fast_study, monkeypatch):
    """Check that the tests above can fail: a changed record is read if hashes are not checked."""
    content, records = written_ledger
    monkeypatch.setattr(
        chain,
        "_verify_row",
        lambda row, *_: chain.Record(
            seq=row[0], kind=row[1], key=row[2], text=row[3], prev_hash=row[4], hash=row[5]
        ),
    )
    position = content.index(records[5].text.encode()) + 40  # somewhere inside the record
    broken = content[:position] + bytes([content[position] ^ 1]) + content[position + 1 :]
    (fast_study / LEDGER_NAME).write_bytes(broken)
    with pytest.raises(AssertionError, match="accepted, and different"):
        read_verdict(fast_study, records)


def tamper(study, content, *statements):
    """Write a ledger's bytes into the study, and change them by SQL."""
    path = study / LEDGER_NAME
    path.write_bytes(content)
    connection = sqlite3.connect(path)
    for statement in statements:
        connection.execute(statement)
    connection.commit()
    connection.close()


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        (
            "UPDATE records SET body = replace(body, '0.1', '0.2') WHERE seq = 4",
            "record 4 is not what was written",
        ),
        ("DELETE FROM records WHERE seq = 14", "record 14 is missing"),  # the last record
        ("UPDATE head SET seq = 12", "chain ends before its head"),
        ("DROP TABLE head", "schema"),
        ("PRAGMA application_id = 5", "not a forerun ledger"),
    ],
)
def test_error_names_the_tampering(written_ledger, tmp_path, statement, message):
    tamper(tmp_path, written_ledger[0], statement)
    with pytest.raises(LedgerCorrupt, match=message) as caught:
        Ledger.read(tmp_path)
    assert str(caught.value).startswith(f"{tmp_path / LEDGER_NAME}: ")
    assert f"`forerun repair {tmp_path}` copies the file" in str(caught.value)


def test_schema_of_another_version_is_not_called_corrupt(written_ledger, tmp_path):
    later = f"PRAGMA user_version = {chain.SCHEMA_VERSION + 1}"
    for error, *statements in (
        (LedgerTooNew, later, "ALTER TABLE head ADD COLUMN at TEXT"),
        (LedgerTooOld, "PRAGMA user_version = 1"),
    ):
        tamper(tmp_path, written_ledger[0], *statements)
        with pytest.raises(error):
            Ledger.read(tmp_path)
        with pytest.raises(error):
            Ledger.open(tmp_path, {"seed": 1}, create=False)


def test_version_that_contradicts_the_schema_is_called_corrupt(written_ledger, tmp_path):
    # Among them the next version, and this one with a flipped bit
    for version in (0, chain.SCHEMA_VERSION + 1, 4, -1, chain.SCHEMA_VERSION + 2**24):
        tamper(tmp_path, written_ledger[0], f"PRAGMA user_version = {version}")
        with pytest.raises(LedgerCorrupt, match="schema is not what was written"):
            Ledger.read(tmp_path)
