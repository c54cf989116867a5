"""Damage to a real ledger: flipped bytes and cut ends.

After each damage, the functions check that the ledger is refused or read unchanged. They also check
that a repair would find no record in the raw bytes that was never written.
"""

import os
from collections import Counter
from pathlib import Path

from sweep_fakes import make_outcome, make_specs

from forerun._sweeps.store import repair
from forerun._sweeps.store.curves import store_curve
from forerun._sweeps.store.errors import LedgerCorrupt
from forerun._sweeps.store.ledger import LEDGER_NAME, Ledger

MASKS = (0x01, 0x80, 0xFF)
"""Bits of a byte that are flipped: the lowest, the highest, or all."""


def write_study(study, num_runs=3):
    """Write a study with some runs, their curves, suggestions, and a long record; return its
    records.

    SQLite stores a record that is longer than a page on further pages, called overflow pages.
    """
    with Ledger.open(study, {"seed": 1}, create=True) as ledger:
        for index, spec in enumerate(make_specs(num_runs)):
            ledger.append("suggestion", f"sweep/{index}", {"learning_rate": 0.1 * index})
            store_curve(study, spec.id, make_outcome(spec)[1])
            ledger.commit(spec, make_outcome(spec)[0])
        ledger.append("fit", "ladder/x", {"draws": [index / 7 for index in range(400)]})
        return ledger.read_records()


def read_verdict(study, records):
    """Read the ledger; return "refused", or "identical" if it has the given records.

    Raises:
        AssertionError: the ledger is accepted with other records.
    """
    try:
        accepted = Ledger.read(study).read_records()
    except LedgerCorrupt:
        return "refused"
    assert accepted == records, "accepted, and different"
    return "identical"


def flip_all(study, records, mask, positions=None):
    """Flip each byte (or those at `positions`) in turn, and restore it before the next.

    Return the counts of the verdicts of `read_verdict`, and the largest number of records that a
    repair would lose.
    """
    path = study / LEDGER_NAME
    content = path.read_bytes()
    verdicts = Counter()
    original = {record.seq: record for record in records}
    max_lost = 0
    with path.open("r+b", buffering=0) as file:
        for position in range(len(content)) if positions is None else positions:
            os.pwrite(file.fileno(), bytes([content[position] ^ mask]), position)
            verdict = read_verdict(study, records)
            verdicts[verdict] += 1
            if verdict == "refused":
                rows = repair.find_rows(path.read_bytes())
                saved = repair.find_intact_records(rows) | dict(
                    enumerate(repair.find_longest_chain(rows))
                )
                assert saved.items() <= original.items(), "saved a record that never was"
                max_lost = max(max_lost, len(records) - len(saved))
            os.pwrite(file.fileno(), content[position : position + 1], position)
    assert path.read_bytes() == content
    return dict(verdicts), max_lost


def cut_all(study, records, lengths=None):
    """Cut the file to each shorter length (or to `lengths`), and restore it at the end.

    Return the counts of the verdicts of `read_verdict`.
    """
    path = study / LEDGER_NAME
    content, verdicts = path.read_bytes(), Counter()
    for length in (
        reversed(range(len(content))) if lengths is None else sorted(lengths, reverse=True)
    ):
        os.truncate(path, length)
        verdicts[read_verdict(study, records)] += 1
    path.write_bytes(content)
    return dict(verdicts)


def find_memory_folder():
    """Return a folder in memory, where files are fast; None if there is none."""
    return Path("/dev/shm") if Path("/dev/shm").is_dir() else None
