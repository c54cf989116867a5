"""Run 10,000 trivial trials while workers and drivers are killed, and check every record.

    python benchmarks/cpu/soak.py --json benchmarks/results/soak.json

Driver, ledger and processes are real. In the first study only workers are killed, so that one
driver sees all trials; its memory and its cost per trial are read at 1,000, 5,000 and 10,000
outcomes. In the second study drivers are killed too, 20 times at random. Afterward every trial is
checked: it has exactly one outcome, its own, and no reported outcome is lost or was reported twice.
It takes about 15 minutes of two cores; `--num-trials 1000` takes one.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "sweeps"))

from soak_case import faults_of, soak

NUM_WORKERS, NUM_DRIVER_KILLS, KILL_WORKER_EVERY = 4, 20, 15
MOMENTS = (0.1, 0.5, 1.0)
"""Shares of all trials at which the driver is measured."""
SPAN = 0.05
"""Share of all trials over which the cost per trial is measured."""
FREE = ("attempts_lost", "drivers")
"""Counts that are not faults."""


def row_at(looks: list[dict[str, Any]], done: float, span: float) -> dict[str, Any]:
    """Return a driver's memory at a number of outcomes, and its cost per trial before that."""
    here = min(looks, key=lambda look: abs(look["done"] - done))
    before = min(looks, key=lambda look: abs(look["done"] - done + span))
    num = here["done"] - before["done"]
    return {
        "outcomes": here["done"],
        "rss_mb": here["rss_bytes"] / 2**20,
        "cpu_ms_per_trial": 1e3 * (here["cpu_seconds"] - before["cpu_seconds"]) / num,
        "wall_ms_per_trial": 1e3 * (here["seconds"] - before["seconds"]) / num,
    }


def study(folder: Path, num_trials: int, num_driver_kills: int) -> dict[str, Any]:
    """One soaked study: kills, looks at the driver if it was never killed, and what was found
    wrong.
    """
    found = soak(
        folder,
        num_trials=num_trials,
        num_workers=NUM_WORKERS,
        kill_worker_every=KILL_WORKER_EVERY,
        num_driver_kills=num_driver_kills,
        seed=11 + num_driver_kills,
    )
    counted = faults_of(folder, num_trials)
    rows = (
        []
        if num_driver_kills
        else [row_at(found["looks"], share * num_trials, SPAN * num_trials) for share in MOMENTS]
    )
    return {
        "num_trials": num_trials,
        "kills": found["kills"],
        "seconds": round(found["seconds"]),
        "longest_opening_seconds": max(look["opened_seconds"] for look in found["looks"]),
        "rows": rows,
        "faults": {name: count for name, count in counted.items() if name not in FREE},
        **{name: counted[name] for name in FREE},
    }


def say(name: str, of: dict[str, Any]) -> None:
    """One study as text."""
    kills = f"{of['kills']['workers']} workers and {of['kills']['drivers']} drivers killed"
    print(
        f"{name}: {of['num_trials']} trials in {of['seconds']} s, {kills}, {of['attempts_lost']} "
        "executions lost, "
        f"{of['drivers']} drivers, longest opening {of['longest_opening_seconds']:.1f} s"
    )
    print(f"  faults: {', '.join(f'{name} {count}' for name, count in of['faults'].items())}")
    if of["rows"]:
        print(
            "  | outcomes | driver's memory (MB) | its processor time per trial (ms) | wall time "
            "per trial (ms) |"
        )
        print("  | --- | --- | --- | --- |")
    for row in of["rows"]:
        print(
            f"  | {row['outcomes']} | {row['rss_mb']:.0f} | {row['cpu_ms_per_trial']:.2f} | "
            f"{row['wall_ms_per_trial']:.1f} |",
            flush=True,
        )


def main() -> int:
    """Print both studies, write them, and fail if anything was lost or told twice."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--num-trials", type=int, default=10_000)
    asked = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    studies = {}
    with tempfile.TemporaryDirectory() as name:
        for what, num_kills in (("one driver", 0), ("drivers killed", NUM_DRIVER_KILLS)):
            studies[what] = study(Path(name) / str(num_kills), asked.num_trials, num_kills)
            say(what, studies[what])
    if asked.json:
        machine = {"cores": os.cpu_count(), "python": platform.python_version()}
        asked.json.write_text(
            json.dumps({"studies": studies, "machine": machine}, indent=1, sort_keys=True) + "\n"
        )
    return 1 if any(count for of in studies.values() for count in of["faults"].values()) else 0


if __name__ == "__main__":
    sys.exit(main())
