"""Many trivial trials through the real driver, ledger and processes, while workers and drivers are
killed at random.

As a program it is the driver, `python soak_case.py drive STUDY NUM_TRIALS NUM_WORKERS`, or one of
its workers, `python soak_case.py work FD`.
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

from sweep_fakes import finished, make_spec

from sweeps.run.pool import HostAnswer, Report, carry_out

EVERY = 5
"""Outcomes between two looks at the driver."""
LOOKS, ACKNOWLEDGED = "looks.jsonl", "acknowledged.txt"
MAX_ATTEMPTS = 20
"""So many kills may hit one run by chance; with three, some of 10,000 would be given up, as they
should."""


class ProcessPool:
    """Workers as processes of their own, behind `sweeps.run.pool.Pool`: a killed one is a
    lost one.
    """

    def __init__(self, num_workers):
        self.num_workers, self.calls_ahead = num_workers, 0
        self._processes, self._pipes = [None] * num_workers, [None] * num_workers
        self._in_flight = set()

    def start(self, worker, call):
        self._in_flight.add(worker)
        if self._processes[worker] is None:
            self._pipes[worker], theirs = Pipe()
            command = [sys.executable, __file__, "work", str(theirs.fileno())]
            self._processes[worker] = subprocess.Popen(command, pass_fds=[theirs.fileno()])
            theirs.close()
        # it may be dead already: its end of the pipe says so when waited for
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
    """Every run ends in the call it is admitted in."""

    def advance(self, call):
        from proxies.core import canon
        from proxies.core.spec import RunSpec

        ended = [finished(slot, canon.decode(RunSpec, data)) for slot, data in call.admit]
        return HostAnswer(finished=tuple(ended))


def work(descriptor):
    """A worker: until nobody asks any more."""
    pipe, host = Connection(descriptor), functools.cache(TrivialHost)
    try:
        while True:
            pipe.send(carry_out(0, pipe.recv(), host))
    except (EOFError, OSError):
        return


def resident_bytes():
    """Memory that this process holds."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def make_run(point):
    return make_spec(log2_lr=math.log2(point["learning_rate"]), num_slots=4)


def drive_study(study_dir, num_trials, num_workers):
    """A driver: the search from where it stands, until it is done. What was told is noted, and what
    it took.
    """
    from sweeps.run.driver import drive
    from sweeps.search.source import Search, SearchSource
    from sweeps.search.space import search_space
    from sweeps.store.ledger import Ledger

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
        search = Search(search_space(ranges=ranges), 7, 4 * num_workers, sampler="random")
        source = SearchSource(search, make_run, ledger, stage="sweep", num_trials=num_trials)
        next_look = 0

        def progress(event):
            nonlocal next_look
            for outcome in event.outcomes:
                acknowledged.write(f"{outcome.spec.id}\n")
            done = len(ledger.results())
            if done >= next_look:
                next_look = done + EVERY
                row = {
                    "pid": os.getpid(),
                    "done": done,
                    "rss_bytes": resident_bytes(),
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
                num_slots_for=lambda spec: spec.numerics.num_slots,
                bank_key_for=lambda spec: "one",
                max_attempts=MAX_ATTEMPTS,
                progress=progress,
            )
        finally:
            pool.close()


def looks_of(study_dir):
    """What the drivers noted; a line that a kill cut short is left out."""
    path = study_dir / LOOKS
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def soak(study_dir, *, num_trials, num_workers, kill_worker_every, num_driver_kills, seed):
    """Drive a study to its end through kills; how many there were, and every look that was taken.

    Both are killed at random numbers of recorded outcomes: workers after `kill_worker_every` on
    average.
    """
    rng = random.Random(seed)
    study_dir.mkdir(parents=True, exist_ok=True)
    moments = sorted(rng.randrange(num_trials // 20, num_trials) for _ in range(num_driver_kills))
    kills, next_kill = {"workers": 0, "drivers": 0}, rng.expovariate(1 / kill_worker_every)
    began = time.monotonic()
    while True:
        driver = subprocess.Popen(
            [sys.executable, __file__, "drive", str(study_dir), str(num_trials), str(num_workers)]
        )
        while driver.poll() is None:
            time.sleep(0.02)
            done = last_look(study_dir)
            if moments and done >= moments[0]:
                time.sleep(rng.random() * 0.3)
                driver.kill()
                driver.wait()
                kills["drivers"] += 1
                moments.pop(0)
                break
            if done > next_kill and kill_one_of(driver.pid, rng):
                next_kill = done + rng.expovariate(1 / kill_worker_every)
                kills["workers"] += 1
        else:
            if driver.returncode:
                raise AssertionError(f"a driver ended with code {driver.returncode}")
            return {
                "kills": kills,
                "seconds": time.monotonic() - began,
                "looks": looks_of(study_dir),
            }
        assert_prefix_holds(study_dir)


def last_look(study_dir):
    """Outcomes at the last look."""
    path = study_dir / LOOKS
    if not path.exists():
        return 0
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 1000))
        lines = [
            line for line in file.read().decode().splitlines(keepends=True) if line.endswith("\n")
        ]
    return json.loads(lines[-1])["done"] if lines else 0


def kill_one_of(driver_pid, rng):
    """Kill a worker of this driver; whether there was one."""
    try:
        children = Path(f"/proc/{driver_pid}/task/{driver_pid}/children").read_text().split()
        if children:
            os.kill(int(rng.choice(children)), signal.SIGKILL)
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return bool(children)


def acknowledged(study_dir):
    """Run ids that drivers said were recorded, in the order they said so."""
    return [
        line.strip()
        for line in (study_dir / ACKNOWLEDGED).read_text().splitlines(keepends=True)
        if "\n" in line
    ]


def assert_prefix_holds(study_dir):
    """After a kill: the ledger is sound, and all that was acknowledged is in it."""
    from sweeps.store.ledger import Ledger

    missing = set(acknowledged(study_dir)) - set(Ledger.read(study_dir).results())
    assert not missing, f"{len(missing)} acknowledged outcomes are gone"


def faults_of(study_dir, num_trials):
    """What is wrong with a finished study: trials without an outcome, outcomes told twice, not the
    run's, or lost.
    """
    from sweep_fakes import outcome

    from sweeps.store.curves import load_curve
    from sweeps.store.ledger import Ledger

    ledger = Ledger.read(study_dir)
    runs, said = ledger.runs(), acknowledged(study_dir)
    points = [ledger.find("suggestion", f"sweep/{index}") for index in range(num_trials)]
    asked = {make_run(point.body).id for point in points if point is not None}
    broken = sum(outcome(run.spec)[0] != run.result for run in runs)
    curves = sum(
        load_curve(study_dir, run.result) != outcome(run.spec)[1]
        for run in runs[:: max(1, num_trials // 30)]
    )
    return {
        "suggestions_missing": sum(point is None for point in points),
        "outcomes_missing": len(asked - {run.spec.id for run in runs}),
        "outcomes_nobody_asked_for": len({run.spec.id for run in runs} - asked),
        "outcomes_twice": len(runs)
        - len({run.spec.id for run in runs})
        + max(0, len(runs) - num_trials),
        "told_twice": len(said) - len(set(said)),
        "told_and_gone": len(set(said) - set(ledger.results())),
        "outcomes_altered": broken,
        "curves_altered": curves,
        "attempts_lost": len(ledger.records("lost")),
        "drivers": len(ledger.records("driver")),
    }


if __name__ == "__main__":
    if sys.argv[1] == "work":
        work(int(sys.argv[2]))
    else:
        drive_study(Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
