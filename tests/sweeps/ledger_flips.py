"""A real ledger with a byte flipped, or cut short: what reading it gives, and what a repair would
save.
"""

import os
from collections import Counter
from pathlib import Path

from sweep_fakes import make_specs, outcome

from sweeps.store import repair
from sweeps.store.curves import store_curve
from sweeps.store.errors import LedgerCorrupt
from sweeps.store.ledger import LEDGER_NAME, Ledger

MASKS = (0x01, 0x80, 0xFF)


def write_study(study, num_runs=3):
    """Some runs with their curves, suggestions, and a record on overflow pages; the records."""
    with Ledger.open(study, {"seed": 1}, create=True) as ledger:
        for index, spec in enumerate(make_specs(num_runs)):
            ledger.append("suggestion", f"sweep/{index}", {"learning_rate": 0.1 * index})
            store_curve(study, spec.id, outcome(spec)[1])
            ledger.commit(spec, outcome(spec)[0])
        ledger.append("fit", "ladder/x", {"draws": [index / 7 for index in range(400)]})
        return ledger.records()


def read(study, records):
    """`refused` or `identical`; anything else fails."""
    try:
        found = Ledger.read(study).records()
    except LedgerCorrupt:
        return "refused"
    finally:
        (study / f"{LEDGER_NAME}-journal").unlink(missing_ok=True)
    assert found == records, "accepted, and different"
    return "identical"


def flip_all(study, records, mask, positions=None):
    """Count verdicts over flips of every byte (or those at `positions`), and records that a repair
    would lose.
    """
    path = study / LEDGER_NAME
    content = path.read_bytes()
    verdicts, whole, most_lost = Counter(), {record.seq: record for record in records}, 0
    with path.open("r+b", buffering=0) as file:
        for position in range(len(content)) if positions is None else positions:
            os.pwrite(file.fileno(), bytes([content[position] ^ mask]), position)
            verdict = read(study, records)
            verdicts[verdict] += 1
            if verdict == "refused":
                rows = repair.rows_in(path.read_bytes())
                saved = repair.intact_records(rows) | dict(enumerate(repair.longest_chain(rows)))
                assert saved.items() <= whole.items(), "saved a record that never was"
                most_lost = max(most_lost, len(records) - len(saved))
            os.pwrite(file.fileno(), content[position : position + 1], position)
    assert path.read_bytes() == content
    return dict(verdicts), most_lost


def cut_all(study, records, lengths=None):
    """Count verdicts over cuts at every length below the whole (or at `lengths`)."""
    path = study / LEDGER_NAME
    content, verdicts = path.read_bytes(), Counter()
    for length in (
        reversed(range(len(content))) if lengths is None else sorted(lengths, reverse=True)
    ):
        os.truncate(path, length)
        verdicts[read(study, records)] += 1
    path.write_bytes(content)
    return dict(verdicts)


def in_memory():
    """Where files cost least."""
    return Path("/dev/shm") if Path("/dev/shm").is_dir() else None
