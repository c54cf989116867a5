"""Every byte of a real ledger flipped (sampled), every length cut (sampled): refused or identical."""

import random
import shutil
import sqlite3
import tempfile
from pathlib import Path

import pytest
from sweep_fakes import make_specs, outcome

from sweeps import chain
from sweeps.errors import LedgerCorrupt, LedgerTooNew, SweepError
from sweeps.ledger import LEDGER_NAME, Ledger


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A study with 6 runs (no curve files): its ledger's bytes and records."""
    study = tmp_path_factory.mktemp("written")
    with Ledger.open(study, {"seed": 1}, create=True) as ledger:
        for index, spec in enumerate(make_specs(6)):
            ledger.append("suggestion", f"sweep/{index}", {"learning_rate": 0.1 * index})
            ledger.commit(spec, outcome(spec)[0])
        return (study / LEDGER_NAME).read_bytes(), ledger.records()


@pytest.fixture
def fast_study():
    """In memory where there is such a place: these tests write a thousand files."""
    root = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(dir=root if root.is_dir() else None))
    yield folder
    shutil.rmtree(folder)


def judge(study, content, records):
    """`refused` or `identical`; anything else fails."""
    (study / LEDGER_NAME).write_bytes(content)
    try:
        found = Ledger.read(study).records()
    except SweepError:
        return "refused"
    finally:
        (study / f"{LEDGER_NAME}-journal").unlink(missing_ok=True)
    assert found == records, "accepted, and different"
    return "identical"


def flip_positions(size, page=4096):
    """Both headers of every page, and a sample of the rest."""
    heads = [start + offset for start in range(0, size, page) for offset in range(108 if start == 0 else 8)]
    return sorted({*heads, *random.Random(0).sample(range(size), 300)})


@pytest.mark.parametrize("mask", [0x01, 0xFF])
def test_flipped_bytes(written, fast_study, mask):
    content, records = written
    verdicts = []
    for position in flip_positions(len(content)):
        broken = bytearray(content)
        broken[position] ^= mask
        verdicts.append(judge(fast_study, broken, records))
    assert verdicts.count("refused") > 0.4 * len(verdicts)  # the rest lies in free space of the pages


def test_cuts(written, fast_study):
    content, records = written
    lengths = {*range(0, len(content), 512), *random.Random(1).sample(range(len(content)), 50)}
    for length in lengths:
        assert judge(fast_study, content[:length], records) == "refused"


def test_the_flips_catch_a_missing_check(written, fast_study, monkeypatch):
    """The mutation check: without hashes, altered records are accepted."""
    content, records = written
    monkeypatch.setattr(chain, "_verified", lambda row, before: chain.Record(
        seq=row[0], kind=row[1], key=row[2], text=row[3], prev_hash=row[4], hash=row[5]))  # fmt: skip
    position = content.index(records[5].text.encode()) + 40
    broken = content[:position] + bytes([content[position] ^ 1]) + content[position + 1 :]
    with pytest.raises(AssertionError, match="accepted, and different"):
        judge(fast_study, broken, records)


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
        ("UPDATE records SET body = replace(body, '0.1', '0.2') WHERE seq = 4", "record 4 is not what was written"),
        ("UPDATE records SET key = 'sweep/77' WHERE seq = 6", "record 6 is not"),
        ("DELETE FROM records WHERE seq = 9", "record 9 is not"),
        ("DELETE FROM records WHERE seq = 13", "record 13 is missing"),
        ("UPDATE head SET seq = 12", "chain ends before its head"),
        ("DROP TABLE head", "schema"),
        ("CREATE TABLE more (a)", "schema"),
        ("PRAGMA application_id = 5", "no ledger of forerun"),
    ],
)
def test_tampering_is_named(written, tmp_path, statement, message):
    tamper(tmp_path, written[0], statement)
    with pytest.raises(LedgerCorrupt, match=message) as caught:
        Ledger.read(tmp_path)
    assert "copy the study folder" in str(caught.value)


def test_a_later_schema_is_not_corruption(written, tmp_path):
    tamper(tmp_path, written[0], "PRAGMA user_version = 2")
    with pytest.raises(LedgerTooNew, match="schema 2, this version knows 1"):
        Ledger.read(tmp_path)


def test_any_other_file_is_refused(tmp_path):
    (tmp_path / LEDGER_NAME).write_text("not a database, but long enough to be taken for one\n" * 20)
    with pytest.raises(LedgerCorrupt, match="cannot be read"):
        Ledger.read(tmp_path)
