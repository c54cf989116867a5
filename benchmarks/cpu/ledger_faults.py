"""Inject a fault at every system call of a study, flip every byte of a ledger, cut every length.

    python benchmarks/cpu/ledger_faults.py --out benchmarks/results/ledger_faults.json

The first part needs a C compiler (`tests/sweeps/fault_shim.c` is preloaded before libc) and is left
out without one. `--every 20` injects a fault at every 20th call, flips every 20th byte and cuts at
every 20th length, in half a minute.
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

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "sweeps"))

from ledger_faults import compiled, table_of
from ledger_flips import MASKS, cut_all, flip_all, in_memory, write_study

from proxies.core import canon
from sweeps.store.ledger import LEDGER_NAME


def calls(every: int) -> dict[str, Any] | None:
    with tempfile.TemporaryDirectory() as folder:
        shim = compiled(folder)
        if shim is None:
            print(
                "no C compiler that builds fault_shim.c: faults at every call are left out",
                flush=True,
            )
            return None
        found = table_of(shim, every=every)
    print(
        f"{'work':<8}{'fault':<24}{'points':>8}{'killed':>8}{'refused':>9}{'absorbed':>10}{'violations':>12}"
    )
    for row in found["rows"]:
        print(
            f"{row['work']:<8}{row['fault']:<24}{row['points']:>8}{row['killed']:>8}{row['refused']:>9}"
            f"{row['absorbed']:>10}{row['violation']:>12}",
            flush=True,
        )
    for violation in found["violations"]:
        print(violation)
    return dict(found)


def contents(every: int) -> dict[str, Any]:
    flips = []
    with tempfile.TemporaryDirectory(dir=in_memory()) as folder:
        study = Path(folder)
        records = write_study(study)
        size = (study / LEDGER_NAME).stat().st_size
        print(f"a ledger of {len(records)} records, {size} bytes")
        for mask in MASKS:
            verdicts, most_lost = flip_all(study, records, mask, range(0, size, every))
            flips.append({"mask": mask, **verdicts, "most_records_lost_by_repair": most_lost})
            print(
                f"flips by 0x{mask:02x}: {verdicts}; a repair loses {most_lost} record at most",
                flush=True,
            )
        cuts = cut_all(study, records, range(0, size, every))
        print(f"cuts: {cuts}", flush=True)
    return {"num_records": len(records), "num_bytes": size, "flips": flips, "cuts": cuts}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--every", type=int, default=1)
    arguments = parser.parse_args()
    started = time.monotonic()
    body = {
        "every": arguments.every,
        "calls": calls(arguments.every),
        "contents": contents(arguments.every),
        "seconds": round(time.monotonic() - started, 1),
        "environment": {
            "machine": platform.machine(),
            "python": platform.python_version(),
            "sqlite": sqlite3.sqlite_version,
        },
    }
    print(f"{body['seconds']} s")
    if arguments.out:
        canon.write_atomic(arguments.out, canon.pretty(body))


if __name__ == "__main__":
    main()
