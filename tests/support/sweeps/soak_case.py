"""Many trivial trials through the real driver, ledger and processes, while workers and drivers are
killed at random.

As a program it is the driver (`python soak_case.py drive STUDY NUM_TRIALS NUM_WORKERS`) or one of
its workers (`python soak_case.py work FD`).
"""

import contextlib
import dataclasses
import functools
import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path

from sweep_fakes import make_ended_run, make_spec

from forerun._sweeps.run.pool import Report, execute_call

NUM_OUTCOMES_PER_LOOK = 5
"""Outcomes between two measurements of the driver."""
LOOKS, ACKNOWLEDGED = "looks.jsonl", "acknowledged.txt"
"""Files of a study. The first has looks: measurements of the driver's memory and time. The second
has the ids of the runs whose results the driver acknowledged (reported as recorded)."""
MAX_ATTEMPTS = 20
"""Attempts of a run before it fails. With the usual three attempts, random kills would fail some of
10,000 runs.
"""


class ProcessPool:
    """Workers in their own processes, behind `forerun._sweeps.run.pool.Pool`; a killed one counts
    as lost.
    """

    def __init__(self, num_workers):
        self.num_workers, self.calls_ahead = num_workers, 0
        self._processes, self._pipes = [None] * num_workers, [None] * num_workers
        self._in_flight = set()

    def start(self, worker, call):
        self._in_flight.add(worker)
        if self._processes[worker] is None:
            self._pipes[worker], worker_end = Pipe()
            command = [sys.executable, __file__, "work", str(worker_end.fileno())]
            self._processes[worker] = subprocess.Popen(command, pass_fds=[worker_end.fileno()])
            worker_end.close()
        # The worker may be dead already; then waiting for its pipe shows it.
        with contextlib.suppress(OSError):
            self._pipes[worker].send(call)

    def wait(self, timeout_seconds):
        pipes = {self._pipes[worker]: worker for worker in self._in_flight}
        reports = []
        for pipe in wait(list(pipes), timeout_seconds):
            worker = pipes[pipe]
            self._in_flight.discard(worker)
            try:
                reports.append(dataclasses.replace(pipe.recv(), worker=worker))
            except (EOFError, OSError):
                reports.append(
                    Report(worker=worker, error="its process was killed", cause="lost_worker")
                )
        return reports

    def restart(self, worker):
        self._in_flight.discard(worker)
        process, pipe = self._processes[worker], self._pipes[worker]
        self._processes[worker] = self._pipes[worker] = None
        if process is not None:
            pipe.close()
            process.kill()
            process.wait()

    def close(self):
        for worker in range(self.num_workers):
            self.restart(worker)


@dataclasses.dataclass
class TrivialHost:
    """A host whose runs end in the call that admits them."""

    def advance(self, call):
        from forerun._proxies.core import canon
        from forerun._proxies.core.spec import RunSpec

        ended = [make_ended_run(slot, canon.decode(RunSpec, data)) for slot, data in call.admit]
        return Report(finished=tuple(ended))


def run_worker(descriptor):
    """Answer calls until the driver closes the pipe."""
    pipe, host = Connection(descriptor), functools.cache(TrivialHost)
    try:
        while True:
            pipe.send(execute_call(0, pipe.recv(), host))
    except (EOFError, OSError):
        return


def get_resident_bytes():
    """Return the memory that this process holds."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def make_run(point):
    """Return the run of a search's point."""
    return make_spec(log2_lr=math.log2(point["learning_rate"]), num_slots=4)


def drive_study(study_dir, num_trials, num_workers):
    """Continue the search to its end, as a driver.

    Note each acknowledged outcome, and the driver's memory and time.
    """
    from forerun._sweeps.run.driver import drive
    from forerun._sweeps.search.source import Search, SearchSource
    from forerun._sweeps.search.space import build_search_space
    from forerun._sweeps.store.ledger import Ledger

    ranges = {
        "learning_rate": (2**-12, 2**-2),
        "warmup_fraction": (0.0, 0.3),
        "clip_norm": (0.25, 4.0),
    }
    opening = time.monotonic()
    with (
        Ledger.open(study_dir, {"seed": 7}, create=True) as ledger,
        (study_dir / ACKNOWLEDGED).open("a", buffering=1) as acknowledged,
        (study_dir / LOOKS).open("a", buffering=1) as looks,
    ):
        opened_seconds = time.monotonic() - opening
        search = Search(build_search_space(ranges=ranges), 7, 4 * num_workers, sampler="random")
        source = SearchSource(search, make_run, ledger, stage="sweep", num_trials=num_trials)
        next_look = 0

        def progress(event):
            nonlocal next_look
            for outcome in event.outcomes:
                acknowledged.write(f"{outcome.spec.id}\n")
            done = len(ledger.get_results())
            if done >= next_look:
                next_look = done + NUM_OUTCOMES_PER_LOOK
                row = {
                    "pid": os.getpid(),
                    "done": done,
                    "rss_bytes": get_resident_bytes(),
                    "seconds": time.monotonic(),
                    "cpu_seconds": time.process_time(),
                    "opened_seconds": opened_seconds,
                }
                looks.write(json.dumps(row) + "\n")

        pool = ProcessPool(num_workers)
        try:
            drive(
                source,
                pool,
                ledger,
                study_dir,
                bank_key_for=lambda spec: "one",
                max_attempts=MAX_ATTEMPTS,
                progress=progress,
            )
        finally:
            pool.close()


def read_looks(study_dir):
    """Return the drivers' measurements; a line that a kill cut off is left out."""
    path = study_dir / LOOKS
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def soak(study_dir, *, num_trials, num_workers, kill_worker_every, num_driver_kills, seed):
    """Drive a study to its end through kills; return the number of kills and all measurements.

    Workers and drivers are killed at random numbers of recorded outcomes. A worker is killed after
    every `kill_worker_every` outcomes on average.
    """
    rng = random.Random(seed)
    study_dir.mkdir(parents=True, exist_ok=True)
    # Numbers of outcomes at which a driver is killed
    moments = sorted(rng.randrange(num_trials // 20, num_trials) for _ in range(num_driver_kills))
    kills, next_kill = {"workers": 0, "drivers": 0}, rng.expovariate(1 / kill_worker_every)
    began = time.monotonic()
    while True:
        driver = subprocess.Popen(
            [sys.executable, __file__, "drive", str(study_dir), str(num_trials), str(num_workers)]
        )
        while driver.poll() is None:
            time.sleep(0.02)
            done = read_num_done(study_dir)
            if moments and done >= moments[0]:
                time.sleep(rng.random() * 0.3)
                driver.kill()
                driver.wait()
                kills["drivers"] += 1
                moments.pop(0)
                break
            if done > next_kill and kill_worker(driver.pid, rng):
                next_kill = done + rng.expovariate(1 / kill_worker_every)
                kills["workers"] += 1
        else:
            if driver.returncode:
                raise AssertionError(f"a driver ended with code {driver.returncode}")
            return {
                "kills": kills,
                "seconds": time.monotonic() - began,
                "looks": read_looks(study_dir),
            }
        check_after_kill(study_dir)


def read_num_done(study_dir):
    """Return the number of outcomes at the last measurement."""
    path = study_dir / LOOKS
    if not path.exists():
        return 0
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 1000))
        lines = [
            line for line in file.read().decode().splitlines(keepends=True) if line.endswith("\n")
        ]
    return json.loads(lines[-1])["done"] if lines else 0


def kill_worker(driver_pid, rng):
    """Kill a random worker of this driver; return whether there was one."""
    try:
        children = Path(f"/proc/{driver_pid}/task/{driver_pid}/children").read_text().split()
        if children:
            os.kill(int(rng.choice(children)), signal.SIGKILL)
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return bool(children)


def read_acknowledged(study_dir):
    """Return the ids of the runs that drivers reported as recorded, in that order."""
    return [
        line.strip()
        for line in (study_dir / ACKNOWLEDGED).read_text().splitlines(keepends=True)
        if "\n" in line
    ]


def check_after_kill(study_dir):
    """Check after a kill that the ledger is sound and holds all acknowledged outcomes."""
    from forerun._sweeps.store.ledger import Ledger

    missing = set(read_acknowledged(study_dir)) - set(Ledger.read(study_dir).get_results())
    assert not missing, f"{len(missing)} acknowledged outcomes are gone"


def count_faults(study_dir, num_trials):
    """Count what is wrong with a finished study: outcomes that are missing, repeated, altered or
    lost.
    """
    from sweep_fakes import make_outcome

    from forerun._sweeps.store.curves import load_curve
    from forerun._sweeps.store.ledger import Ledger

    ledger = Ledger.read(study_dir)
    runs = ledger.read_runs()
    acknowledged = read_acknowledged(study_dir)
    points = [ledger.find("suggestion", f"sweep/{index}") for index in range(num_trials)]
    suggested_ids = {make_run(point.body).id for point in points if point is not None}
    num_altered = sum(make_outcome(run.spec)[0] != run.result for run in runs)
    # A sample of about 30 curves
    num_curves_altered = sum(
        load_curve(study_dir, run.result) != make_outcome(run.spec)[1]
        for run in runs[:: max(1, num_trials // 30)]
    )
    return {
        "suggestions_missing": sum(point is None for point in points),
        "outcomes_missing": len(suggested_ids - {run.spec.id for run in runs}),
        "outcomes_nobody_asked_for": len({run.spec.id for run in runs} - suggested_ids),
        "outcomes_twice": len(runs)
        - len({run.spec.id for run in runs})
        + max(0, len(runs) - num_trials),
        "told_twice": len(acknowledged) - len(set(acknowledged)),
        "told_and_gone": len(set(acknowledged) - set(ledger.get_results())),
        "outcomes_altered": num_altered,
        "curves_altered": num_curves_altered,
        "attempts_lost": len(ledger.read_records("lost")),
        "drivers": len(ledger.read_records("driver")),
    }


if __name__ == "__main__":
    if sys.argv[1] == "work":
        run_worker(int(sys.argv[2]))
    else:
        drive_study(Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
