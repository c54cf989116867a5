"""Run whole studies with simulated disks, clocks, pools and failures, and catch planted bugs.

    python benchmarks/cpu/simulation.py [--seeds 2000] [--out benchmarks/results/simulation.json]

It prints two tables. The first has how often each failure occurred while no promise was broken, for
lists of runs and, with a quarter as many seeds, for searches that prune. The second has the first
seed at which each planted bug was caught. The exit code is 1 if a promise was broken or a bug was
not caught. tests/sweeps/simulation.py describes what is simulated and what is real. Randomness
comes from the seeds only.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "sweeps"))

import simulation
import test_drive_simulation as planted


def run_seeds(num_seeds: int) -> tuple[Counter[str], list[str]]:
    """What struck how often, and the promises that were broken, with their seeds."""
    counts: Counter[str] = Counter()
    broken = []
    for seed in range(num_seeds):
        try:
            counts += simulation.simulate(seed, faults=planted.faults(seed))[0]
        except (simulation.BrokenPromiseError, ValueError) as error:
            broken.append(f"seed {seed}: {type(error).__name__}: {error}")
    calm = planted.calm_search()
    for seed in range(num_seeds // 4):
        try:
            struck, ledger = simulation.simulate(
                seed, faults=0.2 * planted.faults(seed), make_source=planted.pruning_source
            )
            counts += struck
            broken += (
                [f"search {seed}: it went another way"]
                if planted.decided_otherwise(ledger, calm)
                else []
            )
        except (simulation.BrokenPromiseError, ValueError) as error:
            broken.append(f"search {seed}: {type(error).__name__}: {error}")
    return counts, broken


def catch_planted() -> dict[str, dict[str, object] | None]:
    """By bug: the first seed that catches it, and what was said."""
    found: dict[str, dict[str, object] | None] = {}
    for plant in (*planted.MUTANTS, *planted.PRUNING_MUTANTS):
        caught = planted.first_caught(plant)
        found[plant.__name__] = caught and {
            "seed": caught[0],
            "said": caught[1].replace(str(simulation.STUDY), "STUDY")[:120],
        }
    return found


def main() -> int:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=2000)
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parents[1] / "results" / "simulation.json"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, simulation.study_folder(Path(folder)):
        began_wall, began = time.perf_counter(), time.process_time()
        counts, broken = run_seeds(options.seeds)
        seconds, cpu_seconds = time.perf_counter() - began_wall, time.process_time() - began
        caught = catch_planted()
    print(f"{options.seeds} seeds, {cpu_seconds:.1f} s of one core ({seconds:.1f} s by the clock)")
    for what, number in sorted(counts.items()):
        print(f"  {what:24} {number:>8,}")
    print(f"promises broken: {len(broken)}", *broken, sep="\n  ")
    for name, found in caught.items():
        print(
            f"  {name:24} "
            + ("NOT CAUGHT" if found is None else f"seed {found['seed']}: {found['said']}")
        )
    body = {
        "seeds": options.seeds,
        "cpu_seconds": round(cpu_seconds, 1),
        "seconds": round(seconds, 1),
        "python": platform.python_version(),
        "struck": dict(sorted(counts.items())),
        "broken": broken,
        "planted_bugs": caught,
    }
    options.out.write_text(json.dumps(body, indent=2) + "\n", encoding="utf-8")
    return 1 if broken or None in caught.values() else 0


if __name__ == "__main__":
    sys.exit(main())
