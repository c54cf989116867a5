"""Recovery of a real `forerun run` on real Ray after kills at random times during its trials.

    python benchmarks/cpu/random_kills.py --json benchmarks/results/random_kills.json

A study of about a hundred runs of 200 to 900 steps is run once without a kill and frozen. It has
two workers, each of which trains up to four runs as one batched model (a bank). Then it is run
three times, each time with its own seed: every 5 to 15 s a SIGKILL hits a busy worker (7 times of
10), the driver (2), or the raylet or the head (1). A driver that is gone is started again.

The script prints and writes a table with one row per study. Its columns are: kills by target;
drivers; lost executions; failed runs; executions that did not start from the run's newest saved
state; the share of steps that were repeated; drivers that left processes behind; and whether the
frozen digest is that of the study without a kill. The exit code is 1 if a digest differs, a run
failed, an execution started from an old state, or processes were left.

It takes about 25 minutes of two cores; `--quick` makes five kills in one study.
"""

from __future__ import annotations

import os
import platform
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "support" / "launcher"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from kill_case import PARTS, RAY, Driver, freeze_accepting_gates
from result_files import make_parser, write_result
from tiny_study import write_corpus, write_plan_with

from forerun._sweeps.store.ledger import Ledger

NUM_STUDIES = 3
NUM_KILLS = 17
"""Kills in each study."""
KILL_INTERVAL_SECONDS = (5.0, 15.0)
"""Minimum and maximum seconds between two kills."""
TARGETS = {"worker": 7, "driver": 2, "raylet": 0.5, "gcs_server": 0.5}
"""Processes to kill, with their weights when one is drawn."""
PLAN = """
[model]
num_layers = 2
head_dim = 16
seq_len = 32
[proxy]
base_width = 32
batch_tokens = 256
num_steps = 300
[search]
num_trials = 8
parallelism = 8
num_startup = 4
[transfer]
widths = [32, 64]
control_widths = [64]
check_widths = [32, 64]
[ladder]
widths = [32, 48, 64]
num_steps = [200, 400, 800]
"""


def run_without_kills(folder: Path, plan: Path) -> tuple[str, float]:
    """Run the study without a kill; return the digest that it freezes and its seconds."""
    began = time.monotonic()
    driver = Driver(plan, folder / "without-kills", *RAY)
    try:
        code, _ = driver.wait_for_end(seconds=1800)
        assert code == 0, driver.read_stderr()
    finally:
        driver.sweep_up()
    return freeze_accepting_gates(folder / "without-kills"), time.monotonic() - began


def run_with_kills(
    folder: Path, plan: Path, seed: int, num_kills: int, digest: str
) -> dict[str, Any]:
    """Run the study with this number of kills and return its row."""
    rng, study, steps = random.Random(seed), folder / f"killed-{seed}", folder / f"steps-{seed}"
    num_hits_by_target: Counter[str] = Counter()
    num_left_over = num_drivers = 0
    began, code = time.monotonic(), None
    while code != 0:
        num_drivers += 1
        driver = Driver(plan, study, *RAY, environment={"FORERUN_TEST_STEPS": str(steps)})
        try:
            while sum(num_hits_by_target.values()) < num_kills and driver.process.poll() is None:
                target = kill_part(driver, rng)
                num_hits_by_target[target] += bool(target)  # no target: nothing was killed
                if target in ("driver", "raylet", "gcs_server"):
                    break
            code, _ = driver.wait_for_end(seconds=1800)
            # Finished, Ray is gone, or the driver itself was killed
            assert code in (0, 2, -9), driver.read_stderr()
            try:
                driver.wait_until_gone(20.0)
            except TimeoutError as error:
                print(error, file=sys.stderr)
                num_left_over += 1
        finally:
            driver.sweep_up()
    num_hits_by_target.pop("", None)
    ledger = Ledger.read(study)
    return {
        "seed": seed,
        "kills": sum(num_hits_by_target.values()),
        **{f"of_{part}": num_hits_by_target[part] for part in TARGETS},
        "drivers": num_drivers,
        "lost": len(ledger.read_records("lost")),
        "failed": sum(result.status == "failed" for result in ledger.get_results().values()),
        **count_repeated_steps(steps, sum(run.result.num_steps for run in ledger.read_runs())),
        "left_over": num_left_over,
        "seconds": round(time.monotonic() - began),
        "digest_equal": freeze_accepting_gates(study) == digest,
    }


def kill_part(driver: Driver, rng: random.Random) -> str:
    """Wait some seconds, then kill a part while trials run.

    Return its name, or an empty string if nothing was killed.
    """
    until = time.monotonic() + rng.uniform(*KILL_INTERVAL_SECONDS)
    driver.wait_for(lambda: time.monotonic() > until)
    target = rng.choices(list(TARGETS), list(TARGETS.values()))[0]
    pids: list[int] = []
    # Wait until a worker is training. The function returns the ids that it adds to the list.
    driver.wait_for(lambda: pids.extend(driver.list_pids("worker")) or pids, seconds=900.0)
    if driver.process.poll() is not None:
        return ""
    if target == "driver":
        driver.process.kill()
        return target
    candidates = pids if target == "worker" else driver.list_pids(target)
    if not candidates:
        return ""
    try:
        os.kill(rng.choice(candidates), 9)
    except ProcessLookupError:
        return ""
    return target


def count_repeated_steps(steps: Path, num_steps: int) -> dict[str, float]:
    """Return how many executions did not start at the newest saved state of their run.

    The second value is the share of steps that were repeated.

    Args:
        steps: File in which the workers note what they begin, train and save.
        num_steps: Steps of all runs together.
    """
    saved_steps, last_steps, num_behind, num_repeated = dict[str, int](), dict[str, int](), 0, 0
    for line in steps.read_text().splitlines():
        event, run_id, step = line.split()
        if event == "begin":
            num_behind += int(step) < saved_steps.get(run_id, 0)
            num_repeated += max(0, last_steps.get(run_id, 0) - int(step))
        elif event == "saved":
            saved_steps[run_id] = int(step)
        else:
            last_steps[run_id] = int(step)
    return {
        "behind_their_state": num_behind,
        "steps_again_share": round(num_repeated / num_steps, 4),
    }


def format_row(row: dict[str, Any]) -> str:
    """Return a row of the table as Markdown."""
    kills = " / ".join(str(row[f"of_{part}"]) for part in TARGETS)
    cells = [
        row["seed"],
        f"{row['kills']} ({kills})",
        row["drivers"],
        row["lost"],
        row["failed"],
        row["behind_their_state"],
        f"{row['steps_again_share']:.1%}",
        row["left_over"],
        row["seconds"],
        "yes" if row["digest_equal"] else "NO",
    ]
    return f"| {' | '.join(map(str, cells))} |"


def main() -> int:
    """Print the table, write it, and return 1 if something went wrong."""
    parser = make_parser(__doc__, quick="Make five kills in one study.")
    options = parser.parse_args()
    assert set(TARGETS) <= {"driver", *PARTS}
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_corpus(folder)
        plan = write_plan_with(folder, PLAN)
        digest, seconds = run_without_kills(folder, plan)
        num_runs = len(Ledger.read(folder / "without-kills").read_runs())
        print(f"{num_runs} runs, {seconds:.0f} s without a kill\n")
        print(
            "| seed | kills (worker / driver / raylet / head) | drivers | lost | failed | behind | "
            "steps again "
            "| left over | seconds | same digest |"
        )
        print("|" + " --- |" * 10)
        for seed in range(1 if options.quick else NUM_STUDIES):
            rows.append(
                run_with_kills(folder, plan, seed, 5 if options.quick else NUM_KILLS, digest)
            )
            print(format_row(rows[-1]), flush=True)
    result = {
        "rows": rows,
        "num_runs": num_runs,
        "seconds_without": round(seconds),
        "machine": {"cores": os.cpu_count(), "python": platform.python_version()},
    }
    write_result(options.json, result)
    is_good = all(
        row["digest_equal"] and not row["failed"] + row["left_over"] + row["behind_their_state"]
        for row in rows
    )
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
