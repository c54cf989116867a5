"""Promises that simulated studies keep under all faults, and planted bugs that break them.

    python benchmarks/cpu/simulation.py [--seeds 2000] [--out benchmarks/results/simulation.json]

Disks, clocks, pools and failures are simulated. The script simulates one study of a list of runs
per seed and, with a quarter as many seeds, searches that prune. It checks that each study keeps its
promises, such as one outcome per run. Then it plants bugs, one after another, and looks for the
first seed at which the checks notice each of them.
tests/support/sweeps/simulation.py describes what is simulated and what is real. All randomness
comes from the seeds.

It prints how often each failure occurred and the first seed that caught each bug, and writes both.
The exit code is 1 if a promise was broken or a bug was not caught. `--seeds 20` takes seconds; the
default takes some minutes of one core.
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

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "support" / "sweeps"))

import driver_mutants
import simulation

MAX_MESSAGE_CHARS = 120
"""Characters kept of the message of the check that caught a bug."""


def run_seeds(num_seeds: int) -> tuple[Counter[str], list[str]]:
    """Return how often each failure occurred, and a line for each broken promise with its seed."""
    counts: Counter[str] = Counter()
    broken = []
    for seed in range(num_seeds):
        try:
            faults = driver_mutants.get_fault_likelihood(seed)
            counts += simulation.simulate(seed, faults=faults).counts
        except (simulation.BrokenPromiseError, ValueError) as error:
            broken.append(f"seed {seed}: {type(error).__name__}: {error}")
    for seed in range(num_seeds // 4):
        try:
            study = simulation.simulate(
                seed,
                # Few faults, because a search with a failed run cannot be compared
                faults=0.2 * driver_mutants.get_fault_likelihood(seed),
                make_source=driver_mutants.make_pruning_source,
            )
            counts += study.counts
            if driver_mutants.compare_with_calm_search(study.ledger) == "different":
                broken.append(
                    f"search {seed}: it took other decisions than the search without failures"
                )
        except (simulation.BrokenPromiseError, ValueError) as error:
            broken.append(f"search {seed}: {type(error).__name__}: {error}")
    return counts, broken


def catch_planted_bugs() -> dict[str, dict[str, object] | None]:
    """Return, for each planted bug, the first seed that caught it with the message of the check.

    A bug that no seed caught has None.
    """
    catches: dict[str, dict[str, object] | None] = {}
    for mutate in (*driver_mutants.MUTANTS, *driver_mutants.PRUNING_MUTANTS):
        catch = driver_mutants.find_first_caught(mutate)
        if catch is None:
            catches[mutate.__name__] = None
            continue
        seed, message = catch
        catches[mutate.__name__] = {
            "seed": seed,
            "said": message.replace(str(simulation.STUDY), "STUDY")[:MAX_MESSAGE_CHARS],
        }
    return catches


def main() -> int:
    """Simulate all seeds, print and write the result, and return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=2000, help="Studies to simulate.")
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parents[1] / "results" / "simulation.json"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, simulation.use_study_folder(Path(folder)):
        began_wall, began = time.perf_counter(), time.process_time()
        counts, broken = run_seeds(options.seeds)
        seconds, cpu_seconds = time.perf_counter() - began_wall, time.process_time() - began
        catches = catch_planted_bugs()
    print(f"{options.seeds} seeds, {cpu_seconds:.1f} s of one core ({seconds:.1f} s by the clock)")
    for failure, number in sorted(counts.items()):
        print(f"  {failure:24} {number:>8,}")
    print(f"promises broken: {len(broken)}", *broken, sep="\n  ")
    for name, catch in catches.items():
        print(
            f"  {name:24} "
            + ("NOT CAUGHT" if catch is None else f"seed {catch['seed']}: {catch['said']}")
        )
    result = {
        "seeds": options.seeds,
        "cpu_seconds": round(cpu_seconds, 1),
        "seconds": round(seconds, 1),
        "python": platform.python_version(),
        "struck": dict(sorted(counts.items())),
        "broken": broken,
        "planted_bugs": catches,
    }
    options.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 1 if broken or None in catches.values() else 0


if __name__ == "__main__":
    sys.exit(main())
