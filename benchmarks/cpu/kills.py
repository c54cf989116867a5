"""Recovery of a real `forerun run` on real Ray after its parts are killed.

    python benchmarks/cpu/kills.py --json benchmarks/results/kills.json

The tiny study of the tests (about 80 short runs) is run once without a kill and frozen. Then it is
run again and again with one kill each: a part is killed at a given number of outcomes, the study is
resumed if it stopped, and it is frozen. The columns are: seconds until the driver reported the kill
or was gone, and from then until none of its processes was left; the driver's exit code; the number
of drivers; executions that started more than once per run; and whether the frozen digest is the
same. It takes about 15 minutes of two cores; `--quick` kills each part once.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "launcher"))

from kill_case import frozen_digest, kill
from tiny_study import ask, write_plan

KILLS = ("worker", "driver", "raylet", "gcs_server", "SIGTERM", "SIGINT", "SIGINT twice", "SIGSTOP")
MOMENTS = (30, 2)


def row_of(folder: Path, what: str, at_outcomes: int, whole: str) -> dict[str, Any]:
    """One kill in a study of its own; what it did, and whether the digest is that of `whole`."""
    study = folder / f"{what.replace(' ', '-')}-{at_outcomes}"
    row = kill(folder / "plan.toml", study, what, at_outcomes)
    row.pop("said")
    return {**row, "digest_equal": frozen_digest(study) == whole}


def line_of(row: dict[str, Any]) -> str:
    """A row of the table, as Markdown."""
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
    """Print the table, write it, and fail if a digest differs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true")
    asked = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    began, rows = time.monotonic(), []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        code, _ = ask("run", write_plan(folder), "--study", folder / "whole")
        assert code == 0
        whole = frozen_digest(folder / "whole")
        print(
            "| killed | after outcomes | noticed (s) | gone (s) | exit | drivers | repeated | same "
            "digest |"
        )
        print("|" + " --- |" * 8)
        for what in KILLS:
            for moment in MOMENTS[: 1 if asked.quick else None]:
                rows.append(row_of(folder, what, moment, whole))
                print(line_of(rows[-1]), flush=True)
    if asked.json:
        body = {
            "rows": rows,
            "seconds": round(time.monotonic() - began),
            "machine": {"cores": os.cpu_count(), "python": platform.python_version()},
        }
        asked.json.write_text(json.dumps(body, indent=1, sort_keys=True) + "\n")
    return 0 if all(row["digest_equal"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
