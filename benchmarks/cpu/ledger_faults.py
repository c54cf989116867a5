"""Recovery of a ledger after a fault at any system call, any flipped byte, or a cut at any length.

    python benchmarks/cpu/ledger_faults.py --out benchmarks/results/ledger_faults.json

The first part fails one system call of a study at a time, and checks that no acknowledged record is
lost. It needs a C compiler (`tests/support/sweeps/fault_shim.c` is preloaded before libc) and is
left out without one. The second part flips each byte of a ledger and cuts the ledger at each
length, and counts what is noticed and what a repair loses.

The script prints a line for each kind of fault and writes all counts. `--every 20` injects a fault
at every 20th call, flips every 20th byte and cuts at every 20th length, in half a minute; all of
them take some minutes.
"""

from __future__ import annotations

import argparse
import platform
import sqlite3
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "support" / "sweeps"))

from ledger_faults import compile_shim, make_fault_table
from ledger_flips import MASKS, cut_all, find_memory_folder, flip_all, write_study

from forerun._proxies.core import canon
from forerun._sweeps.store.ledger import LEDGER_NAME


def inject_call_faults(every: int) -> dict[str, Any] | None:
    """Inject faults at system calls, print the table and return it; None without a C compiler."""
    with tempfile.TemporaryDirectory() as folder:
        shim = compile_shim(folder)
        if shim is None:
            print(
                "no C compiler builds fault_shim.c: the faults at system calls are left out",
                flush=True,
            )
            return None
        table = make_fault_table(shim, every=every)
    print(
        f"{'work':<8}{'fault':<24}{'points':>8}{'killed':>8}{'refused':>9}{'absorbed':>10}{'violations':>12}"
    )
    for row in table["rows"]:
        print(
            f"{row['work']:<8}{row['fault']:<24}{row['points']:>8}{row['killed']:>8}{row['refused']:>9}"
            f"{row['absorbed']:>10}{row['violation']:>12}",
            flush=True,
        )
    for violation in table["violations"]:
        print(violation)
    return dict(table)


def damage_contents(every: int) -> dict[str, Any]:
    """Flip bytes of a ledger, cut it, print the counts and return them."""
    flips = []
    with tempfile.TemporaryDirectory(dir=find_memory_folder()) as folder:
        study = Path(folder)
        records = write_study(study)
        size = (study / LEDGER_NAME).stat().st_size
        print(f"a ledger of {len(records)} records, {size} bytes")
        for mask in MASKS:
            verdicts, max_lost = flip_all(study, records, mask, range(0, size, every))
            flips.append({"mask": mask, **verdicts, "most_records_lost_by_repair": max_lost})
            print(
                f"flips by 0x{mask:02x}: {verdicts}; a repair loses {max_lost} record at most",
                flush=True,
            )
        cuts = cut_all(study, records, range(0, size, every))
        print(f"cuts: {cuts}", flush=True)
    return {"num_records": len(records), "num_bytes": size, "flips": flips, "cuts": cuts}


def main() -> None:
    """Run both parts, print the seconds, and write the result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="Result file.")
    parser.add_argument(
        "--every", type=int, default=1, help="Step between calls, bytes and lengths."
    )
    options = parser.parse_args()
    began = time.monotonic()
    result = {
        "every": options.every,
        "calls": inject_call_faults(options.every),
        "contents": damage_contents(options.every),
        "seconds": round(time.monotonic() - began, 1),
        "environment": {
            "machine": platform.machine(),
            "python": platform.python_version(),
            "sqlite": sqlite3.sqlite_version,
        },
    }
    print(f"{result['seconds']} s")
    if options.out:
        canon.write_atomic(options.out, canon.to_pretty_json(result))


if __name__ == "__main__":
    main()
