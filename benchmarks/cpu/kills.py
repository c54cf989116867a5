"""Recovery of a real `forerun run` on real Ray after one of its processes is killed.

    python benchmarks/cpu/kills.py --json benchmarks/results/kills.json

The tiny study of the tests (about 80 short runs) is run once without a kill and frozen. Then it is
run again and again with one kill each: a process is killed after a given number of outcomes, the
study is resumed if it stopped, and it is frozen.

The script prints and writes a table with one row per kill. Its columns are: seconds until the
driver reported the kill or was gone; seconds from then until none of its processes was left; the
driver's exit code; the number of drivers; executions beyond one per run; and whether the frozen
digest is that of the study without a kill. The exit code is 1 if a digest differs.

It takes about 15 minutes of two cores; `--quick` kills each process once.
"""

from __future__ import annotations

import os
import platform
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "support" / "launcher"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from kill_case import freeze_accepting_gates, kill
from result_files import make_parser, write_result
from tiny_study import run_json, write_plan

KILLS = ("worker", "driver", "raylet", "gcs_server", "SIGTERM", "SIGINT", "SIGINT twice", "SIGSTOP")
"""Processes to kill, and signals to send to the driver."""
MOMENTS = (30, 2)
"""Numbers of outcomes after which the kill happens."""


def run_with_kill(folder: Path, target: str, at_outcomes: int, digest: str) -> dict[str, Any]:
    """Run one study with one kill and return its row."""
    study = folder / f"{target.replace(' ', '-')}-{at_outcomes}"
    row = kill(folder / "plan.toml", study, target, at_outcomes)
    row.pop("said")
    return {**row, "digest_equal": freeze_accepting_gates(study) == digest}


def format_row(row: dict[str, Any]) -> str:
    """Return a row of the table as Markdown."""
    cells = [
        row["what"],
        row["at_outcomes"],
        f"{row['notice_seconds']:.1f}",
        f"{row['orphans_gone_seconds']:.1f}",
        row["exit_code"],
        row["drivers"],
        row["num_repeated"],
        "yes" if row["digest_equal"] else "NO",
    ]
    return f"| {' | '.join(map(str, cells))} |"


def main() -> int:
    """Print the table, write it, and return 1 if a digest differs."""
    parser = make_parser(__doc__, quick="Kill each process once.")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    began, rows = time.monotonic(), []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        code, _ = run_json("run", write_plan(folder), "--study", folder / "whole")
        assert code == 0
        digest = freeze_accepting_gates(folder / "whole")
        print(
            "| killed | after outcomes | noticed (s) | gone (s) | exit | drivers | repeated | same "
            "digest |"
        )
        print("|" + " --- |" * 8)
        for target in KILLS:
            for at_outcomes in MOMENTS[: 1 if options.quick else None]:
                rows.append(run_with_kill(folder, target, at_outcomes, digest))
                print(format_row(rows[-1]), flush=True)
    result = {
        "rows": rows,
        "seconds": round(time.monotonic() - began),
        "machine": {"cores": os.cpu_count(), "python": platform.python_version()},
    }
    write_result(options.json, result)
    return 0 if all(row["digest_equal"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
