"""Every byte of a real ledger flipped (sampled), every length cut (sampled): refused or
identical.
"""

import random
import shutil
import sqlite3
import tempfile
from pathlib import Path

import pytest
from ledger_flips import MASKS, cut_all, flip_all, in_memory, read, write_study

from sweeps.store import chain
from sweeps.store.errors import LedgerCorrupt, LedgerTooNew, LedgerTooOld
from sweeps.store.ledger import LEDGER_NAME, Ledger


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The bytes and records of a study's ledger."""
    study = tmp_path_factory.mktemp("written")
    records = write_study(study, num_runs=6)
    return (study / LEDGER_NAME).read_bytes(), records


@pytest.fixture
def fast_study():
    """In memory where there is such a place: these tests read a thousand files."""
    folder = Path(tempfile.mkdtemp(dir=in_memory()))
    yield folder
    shutil.rmtree(folder)


def sample(size, page=4096):
    """Both headers of every page, and some of the rest."""
    heads = [
        start + offset
        for start in range(0, size, page)
        for offset in range(108 if start == 0 else 8)
    ]
    return sorted({*heads, *random.Random(0).sample(range(size), 200)})


@pytest.mark.parametrize("mask", MASKS)
def test_flipped_bytes(fast_study, mask):
    """The rest of them lies in free space of the pages, where it changes nothing."""
    records = write_study(fast_study)
    verdicts, most_lost = flip_all(
        fast_study, records, mask, sample((fast_study / LEDGER_NAME).stat().st_size)
    )
    assert verdicts["refused"] > 0.4 * sum(verdicts.values())
    assert most_lost == 1, "one flipped byte costs one record at most"


def test_cuts(fast_study):
    records = write_study(fast_study)
    size = (fast_study / LEDGER_NAME).stat().st_size
    lengths = {0, 1, size - 1, *range(0, size, 512), *random.Random(1).sample(range(size), 50)}
    assert cut_all(fast_study, records, lengths) == {"refused": len(lengths)}


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_byte_and_every_length(fast_study):
    records = write_study(fast_study)
    size = (fast_study / LEDGER_NAME).stat().st_size
    for mask in MASKS:
        verdicts, most_lost = flip_all(fast_study, records, mask)
        assert sum(verdicts.values()) == size
        assert most_lost == 1
    assert cut_all(fast_study, records) == {"refused": size}


def test_the_flips_catch_a_missing_check(written, fast_study, monkeypatch):
    """The mutation check: without hashes, altered records are accepted."""
    content, records = written
    monkeypatch.setattr(
        chain,
        "_verify_row",
        lambda row, *_: chain.Record(
            seq=row[0], kind=row[1], key=row[2], text=row[3], prev_hash=row[4], hash=row[5]
        ),
    )
    position = content.index(records[5].text.encode()) + 40
    broken = content[:position] + bytes([content[position] ^ 1]) + content[position + 1 :]
    (fast_study / LEDGER_NAME).write_bytes(broken)
    with pytest.raises(AssertionError, match="accepted, and different"):
        read(fast_study, records)


def tamper(study, content, *statements):
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
        ("DELETE FROM records WHERE seq = 14", "record 14 is missing"),
        ("UPDATE head SET seq = 12", "chain ends before its head"),
        ("DROP TABLE head", "schema"),
        ("PRAGMA application_id = 5", "not a forerun ledger"),
    ],
)
def test_tampering_is_named(written, tmp_path, statement, message):
    tamper(tmp_path, written[0], statement)
    with pytest.raises(LedgerCorrupt, match=message) as caught:
        Ledger.read(tmp_path)
    assert str(caught.value).startswith(f"{tmp_path / LEDGER_NAME}: ")
    assert f"`forerun repair {tmp_path}` copies the file" in str(caught.value)


def test_another_versions_schema_is_not_corruption(written, tmp_path):
    later = f"PRAGMA user_version = {chain.SCHEMA_VERSION + 1}"
    for named, *statements in (
        (LedgerTooNew, later, "ALTER TABLE head ADD COLUMN at TEXT"),
        (LedgerTooOld, "PRAGMA user_version = 1"),
    ):
        tamper(tmp_path, written[0], *statements)
        for reads in (
            lambda: Ledger.read(tmp_path),
            lambda: Ledger.open(tmp_path, {"seed": 1}, create=False),
        ):
            with pytest.raises(named):
                reads()


def test_a_version_that_no_schema_bears_out_is_corruption(written, tmp_path):
    for version in (0, 3, 4, -1, 2 + 2**24):
        tamper(tmp_path, written[0], f"PRAGMA user_version = {version}")
        with pytest.raises(LedgerCorrupt, match="schema is not what was written"):
            Ledger.read(tmp_path)
