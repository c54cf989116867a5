"""Completeness of the records of 10,000 trivial trials while workers and drivers are killed.

    python benchmarks/cpu/soak.py --json benchmarks/results/soak.json

Driver, ledger and processes are real. In the first study only workers are killed, so that one
driver sees all trials; its memory and its cost per trial are read at 1,000, 5,000 and 10,000
outcomes. In the second study drivers are killed too, 20 times at random. Afterward every trial is
checked: it has exactly one outcome, its own, and no reported outcome is lost or was reported twice.

The script prints both studies and writes them. The exit code is 1 if a fault was found. It takes
about 15 minutes of two cores; `--num-trials 1000` takes one minute.
"""

from __future__ import annotations

import os
import platform
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "support" / "sweeps"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from result_files import make_parser, write_result
from soak_case import count_faults, soak

NUM_WORKERS, NUM_DRIVER_KILLS, KILL_WORKER_EVERY = 4, 20, 15
"""Workers, kills of drivers in the second study, and mean number of outcomes between two kills of
workers."""
READING_SHARES = (0.1, 0.5, 1.0)
"""Shares of all trials at which the driver is measured."""
COST_SHARE = 0.05
"""Share of all trials over which the cost per trial is measured."""
EXPECTED_COUNTS = ("attempts_lost", "drivers")
"""Counts that are not faults."""


def make_row(
    readings: list[dict[str, Any]], num_outcomes: float, num_trials: float
) -> dict[str, Any]:
    """Return a driver's memory at a number of outcomes, and its cost per trial before that."""
    now = min(readings, key=lambda reading: abs(reading["done"] - num_outcomes))
    before = min(readings, key=lambda reading: abs(reading["done"] - num_outcomes + num_trials))
    num = now["done"] - before["done"]
    return {
        "outcomes": now["done"],
        "rss_mb": now["rss_bytes"] / 2**20,
        "cpu_ms_per_trial": 1e3 * (now["cpu_seconds"] - before["cpu_seconds"]) / num,
        "wall_ms_per_trial": 1e3 * (now["seconds"] - before["seconds"]) / num,
    }


def run_soaked_study(folder: Path, num_trials: int, num_driver_kills: int) -> dict[str, Any]:
    """Run one study with kills, and return its kills and its faults.

    If no driver was killed, the result also has readings of the driver.
    """
    soaked = soak(
        folder,
        num_trials=num_trials,
        num_workers=NUM_WORKERS,
        kill_worker_every=KILL_WORKER_EVERY,
        num_driver_kills=num_driver_kills,
        seed=11 + num_driver_kills,  # another one for each study
    )
    counted = count_faults(folder, num_trials)
    rows = (
        []
        if num_driver_kills
        else [
            make_row(soaked["looks"], share * num_trials, COST_SHARE * num_trials)
            for share in READING_SHARES
        ]
    )
    return {
        "num_trials": num_trials,
        "kills": soaked["kills"],
        "seconds": round(soaked["seconds"]),
        "longest_opening_seconds": max(look["opened_seconds"] for look in soaked["looks"]),
        "rows": rows,
        "faults": {name: count for name, count in counted.items() if name not in EXPECTED_COUNTS},
        **{name: counted[name] for name in EXPECTED_COUNTS},
    }


def print_study(name: str, study: dict[str, Any]) -> None:
    """Print one study."""
    kills = f"{study['kills']['workers']} workers and {study['kills']['drivers']} drivers killed"
    print(
        f"{name}: {study['num_trials']} trials in {study['seconds']} s, {kills}, "
        f"{study['attempts_lost']} executions lost, "
        f"{study['drivers']} drivers, longest opening {study['longest_opening_seconds']:.1f} s"
    )
    print(f"  faults: {', '.join(f'{name} {count}' for name, count in study['faults'].items())}")
    if study["rows"]:
        print(
            "  | outcomes | driver's memory (MB) | its processor time per trial (ms) | wall time "
            "per trial (ms) |"
        )
        print("  | --- | --- | --- | --- |")
    for row in study["rows"]:
        print(
            f"  | {row['outcomes']} | {row['rss_mb']:.0f} | {row['cpu_ms_per_trial']:.2f} | "
            f"{row['wall_ms_per_trial']:.1f} |",
            flush=True,
        )


def main() -> int:
    """Run, print and write both studies; return 1 if an outcome was lost or reported twice."""
    parser = make_parser(__doc__)
    parser.add_argument("--num-trials", type=int, default=10_000, help="Trials of each study.")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    studies = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, num_kills in (("one driver", 0), ("drivers killed", NUM_DRIVER_KILLS)):
            studies[name] = run_soaked_study(
                Path(folder) / str(num_kills), options.num_trials, num_kills
            )
            print_study(name, studies[name])
    machine = {"cores": os.cpu_count(), "python": platform.python_version()}
    write_result(options.json, {"studies": studies, "machine": machine})
    return (
        1 if any(count for study in studies.values() for count in study["faults"].values()) else 0
    )


if __name__ == "__main__":
    sys.exit(main())
