"""Recovery of a real `forerun run` on real Ray after kills at random times inside its trials.

    python benchmarks/cpu/kills_inside.py --json benchmarks/results/kills_inside.json

A study of about a hundred runs of 200 to 900 steps, with two workers and banks of four, is run once
without a kill and frozen. Then it is run several times, each with its own seed: every 5 to 15 s a
SIGKILL hits a busy worker (7 times of 10), the driver (2), or the raylet or the head (1). A driver
that is gone is started again. The columns are: kills by target; drivers; lost executions; failed
runs; executions that started before the run's newest state; the share of steps that were repeated;
drivers that left processes behind; and whether the frozen digest is the same. It takes about 25
minutes of two cores; `--quick` makes five kills in one study.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "launcher"))

from kill_case import PARTS, RAY, Driver, frozen_digest
from tiny_study import plan_with, write_corpus

from sweeps.store.ledger import Ledger

NUM_STUDIES, NUM_KILLS = 3, 17
"""Of each study."""
EVERY_SECONDS = (5.0, 15.0)
TARGETS = {"worker": 7, "driver": 2, "raylet": 0.5, "gcs_server": 0.5}
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


def whole(folder: Path, plan: Path) -> tuple[str, float]:
    """The study without a kill: the digest it freezes, and the seconds it took."""
    began = time.monotonic()
    driver = Driver(plan, folder / "whole", *RAY)
    try:
        code, _ = driver.end(seconds=1800)
        assert code == 0, driver.said()
    finally:
        driver.sweep_up()
    return frozen_digest(folder / "whole"), time.monotonic() - began


def killed(folder: Path, plan: Path, seed: int, num_kills: int, digest: str) -> dict[str, Any]:
    """The study with so many kills; a row of the table."""
    rng, study, hits, left_over, drivers = (
        random.Random(seed),
        folder / f"killed-{seed}",
        Counter[str](),
        0,
        0,
    )
    steps, began, code = folder / f"steps-{seed}", time.monotonic(), None
    while code != 0:
        drivers += 1
        driver = Driver(plan, study, *RAY, environment={"FORERUN_TEST_STEPS": str(steps)})
        try:
            while sum(hits.values()) < num_kills and driver.process.poll() is None:
                what = strike(driver, rng)
                hits[what] += bool(what)
                if what in ("driver", "raylet", "gcs_server"):
                    break
            code, _ = driver.end(seconds=1800)
            assert code in (0, 2, -9), driver.said()
            try:
                driver.gone_within(20.0)
            except TimeoutError as error:
                print(error, file=sys.stderr)
                left_over += 1
        finally:
            driver.sweep_up()
    hits.pop("", None)
    ledger = Ledger.read(study)
    return {
        "seed": seed,
        "kills": sum(hits.values()),
        **{f"of_{part}": hits[part] for part in TARGETS},
        "drivers": drivers,
        "lost": len(ledger.records("lost")),
        "failed": sum(result.status == "failed" for result in ledger.results().values()),
        **repeated(steps, sum(run.result.num_steps for run in ledger.runs())),
        "left_over": left_over,
        "seconds": round(time.monotonic() - began),
        "digest_equal": frozen_digest(study) == digest,
    }


def strike(driver: Driver, rng: random.Random) -> str:
    """Wait some seconds, then kill a part while trials run; which, or nothing if the driver has
    ended by itself.
    """
    until = time.monotonic() + rng.uniform(*EVERY_SECONDS)
    driver.wait_for(lambda: time.monotonic() > until)
    what = rng.choices(list(TARGETS), list(TARGETS.values()))[0]
    pids: list[int] = []
    driver.wait_for(lambda: pids.extend(driver.pids("worker")) or pids, seconds=900.0)  # trials run
    if driver.process.poll() is not None:
        return ""
    if what == "driver":
        driver.process.kill()
        return what
    found = pids if what == "worker" else driver.pids(what)
    if not found:
        return ""
    try:
        os.kill(rng.choice(found), 9)
    except ProcessLookupError:
        return ""
    return what


def repeated(steps: Path, num_steps: int) -> dict[str, float]:
    """From what workers noted: executions that did not begin at the newest state, and the share of
    steps made again.
    """
    saved, at, behind, again = dict[str, int](), dict[str, int](), 0, 0
    for line in steps.read_text().splitlines():
        what, run_id, step = line.split()
        if what == "begin":
            behind += int(step) < saved.get(run_id, 0)
            again += max(0, at.get(run_id, 0) - int(step))
        elif what == "saved":
            saved[run_id] = int(step)
        else:
            at[run_id] = int(step)
    return {"behind_their_state": behind, "steps_again_share": round(again / num_steps, 4)}


def line_of(row: dict[str, Any]) -> str:
    """A row of the table, as Markdown."""
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
    """Print the table, write it, and fail if a digest differs, a run failed, or something is
    left.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true")
    asked = parser.parse_args()
    assert set(TARGETS) <= {"driver", *PARTS}
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_corpus(folder)
        plan = plan_with(folder, PLAN)
        digest, seconds = whole(folder, plan)
        num_runs = len(Ledger.read(folder / "whole").runs())
        print(f"{num_runs} runs, {seconds:.0f} s without a kill\n")
        print(
            "| seed | kills (worker / driver / raylet / head) | drivers | lost | failed | behind | "
            "steps again "
            "| left over | seconds | same digest |"
        )
        print("|" + " --- |" * 10)
        for seed in range(1 if asked.quick else NUM_STUDIES):
            rows.append(killed(folder, plan, seed, 5 if asked.quick else NUM_KILLS, digest))
            print(line_of(rows[-1]), flush=True)
    if asked.json:
        body = {
            "rows": rows,
            "num_runs": num_runs,
            "seconds_without": round(seconds),
            "machine": {"cores": os.cpu_count(), "python": platform.python_version()},
        }
        asked.json.write_text(json.dumps(body, indent=1, sort_keys=True) + "\n")
    good = all(
        row["digest_equal"] and not row["failed"] + row["left_over"] + row["behind_their_state"]
        for row in rows
    )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
