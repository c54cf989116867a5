"""Processor time of the driver at 64 to 4,000 workers, and the share of time that they are busy.

    python benchmarks/cpu/thousand_workers.py --json benchmarks/results/thousand_workers.json

`forerun._sweeps.run.driver`, its worker states, ledger and curve files are real, on a file system
in memory. The workers and the clock are simulated. A worker has 4 slots and trains 100 steps a
second, in calls of two seconds, with one call queued. The clock advances by the processor time that
the driver really takes, by the time that its writes would take on a file system, and to the next
report when the driver waits. Runs of 30 to 90 s end at any time, each with a curve of 1,000 steps.

1. `driver`: processor time per call, its share of a core, and the share of time that the workers
   are busy, if writes take no time.
2. `driver_on_efs`: the same if each file operation that must reach the server takes 2.7 ms and each
   lock 0.25 ms, which Amazon publishes for a write and a read on EFS ("EFS performance", Regional).
   The number of operations per outcome is from a trace of system calls (`*_WRITES`). Several curves
   are written at once, and outcomes that arrive together share the ledger's operations.
3. `file_system`: bytes and operations that the workers' own saves need per second, computed and
   compared with EFS's published limits; and the start of actors at the rate of Ray's own release
   test, 389 a second (10,000 on 64 nodes, release log of 1.12.0).
4. `ray`: calls per second of eight real Ray actors that do no work, by forerun's pool and worker
   states and by a plain loop, in turns (`--only ray`).
5. `memory`: peak memory of a random search of 1,000 and of 30,000 trials, each in its own process
   (`--only memory`, 4 minutes).

The script prints each part and writes all of them. Parts 1 to 3 take about 4 minutes of one core.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import heapq
import json
import math
import multiprocessing
import random
import statistics
import sys
import tempfile
import time
from collections import deque
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "support" / "sweeps"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from process_tree import read_peak_memory_mb
from result_files import describe_machine, make_parser
from sweep_fakes import get_bank_key, make_spec

from forerun._proxies.core import canon
from forerun._proxies.core.hyperparameters import Hparams
from forerun._proxies.core.schedule import compute_warmup_steps
from forerun._proxies.core.spec import Curve, EndedRun, RunResult, RunSpec
from forerun._sweeps.run import driver
from forerun._sweeps.run.pool import HostCall, Report
from forerun._sweeps.run.worker_states import AdaptiveTimeouts, WorkerStates
from forerun._sweeps.search.source import Search, SearchSource, StaticSource
from forerun._sweeps.search.space import Axis, Params, SearchSpace
from forerun._sweeps.store.curves import store_curves
from forerun._sweeps.store.ledger import Ledger

NUM_WORKERS = (64, 256, 1_000, 4_000)
MEMORY_TRIALS, MEMORY_WORKERS, MEMORY_CURVES = (1_000, 30_000), 64, 1_000
MEMORY_AXES = {
    "learning_rate": (2.0**-12, 2.0**-6),
    "warmup_fraction": (0.02, 0.5),
    "clip_norm": (0.25, 4.0),
}
NUM_SLOTS, STEPS_PER_SECOND, CURVE_STEPS = 4, 100, 1_000
"""Runs that a worker trains at once, its steps per second, and steps of a stored curve."""
CALL_SECONDS = 2.0
"""Seconds for which a call asks a worker to train."""
RUN_SECONDS = (30.0, 90.0)
"""Minimum and maximum simulated duration of a run."""
WARMUP_SECONDS, COUNTED_SECONDS = 40.0, 60.0
"""Simulated seconds before anything is counted, and simulated seconds that are counted."""
EFS_WRITE_SECONDS, EFS_READ_SECONDS = 2.7e-3, 0.25e-3
"""Seconds of an operation that must reach the server, and of a lock."""
EFS_WRITES_PER_SECOND, EFS_WRITE_BYTES_PER_SECOND = 25_000, 3 * 2**30
"""Limits of a Regional file system with provisioned throughput (from the same page)."""
CURVE_WRITES, LEDGER_WRITES, LEDGER_LOCKS, CHECKPOINT_WRITES = 5, 6, 9, 3
"""System calls that change a name or wait for the disk, by `strace -f -e
trace=%file,fsync,fdatasync,ftruncate,fcntl` of a driver: for one curve, one transaction of the
ledger, its locks, and one folder of checkpoints.
"""
WRITERS = 8
"""Curves that are written at once (`forerun._sweeps.store.curves`)."""
SAVE_SECONDS, SAVE_OPERATIONS = 30.0, 6
"""Seconds between two saves of a slot, and operations of a save: write, sync, rename, sync the
folder, list it, remove the save before the last.
"""
BYTES_PER_WEIGHT = 12
"""Bytes that a save takes per weight: the weight and AdamW's two moments, in float32."""
RAY_ACTORS_PER_SECOND = 389
"""Actors that start per second in Ray's release test (see the module's docstring)."""


@dataclasses.dataclass(slots=True)
class SimulatedWorker:
    """A simulated worker."""

    slots: dict[int, list[Any]] = dataclasses.field(default_factory=dict)
    """Run id, steps done and steps of the run, by slot."""
    calls: deque[bool] = dataclasses.field(default_factory=deque)
    """True for each queued call that was sent ahead of its turn."""
    may_continue: bool = False
    """True if a call that was sent ahead may train."""
    busy_seconds: float = 0.0
    """Simulated seconds of training."""


class SimulatedPool:
    """A pool of simulated workers, which also has the simulated clock."""

    calls_ahead = 1

    def __init__(self, num_workers: int) -> None:
        self.num_workers = num_workers
        self.now = 0.0
        self._random = random.Random(0)
        self._workers = [SimulatedWorker() for _ in range(num_workers)]
        self._events: list[tuple[float, int, Report]] = []
        self._since = time.process_time()
        self.driver_seconds = 0.0
        self.num_calls = self.num_ended = 0
        self._curve = Curve(
            steps=tuple(range(1, CURVE_STEPS + 1)),
            train_loss_nats=tuple(3 + 1 / step for step in range(1, CURVE_STEPS + 1)),
            grad_norm=(1.0,) * CURVE_STEPS,
        )
        self._curve_id = canon.compute_content_id(self._curve)

    def read_clock(self) -> float:
        """Return the simulated time in seconds."""
        return self.now

    def spend(self, seconds: float) -> None:
        """Advance the clock by seconds that the driver waits for a disk."""
        self.now += seconds

    def _charge_driver_time(self) -> None:
        """Advance the clock by the processor time that the driver has used."""
        spent = time.process_time() - self._since
        self.now += spent
        self.driver_seconds += spent

    def _restart_driver_timer(self) -> None:
        """Count the driver's processor time from now on."""
        self._since = time.process_time()

    def compute_busy_seconds(self) -> float:
        """Return the seconds of training so far, with the elapsed part of calls in progress."""
        remaining = sum(max(0.0, at - self.now) for at, _, _ in self._events)
        return sum(worker.busy_seconds for worker in self._workers) - remaining

    def start(self, index: int, call: HostCall) -> None:
        """Queue a call of a worker."""
        self._charge_driver_time()
        worker = self._workers[index]
        for slot, data in call.admit:
            num_steps = int(STEPS_PER_SECOND * self._random.uniform(*RUN_SECONDS))
            worker.slots[slot] = [canon.compute_content_id(data), 0, num_steps]
        worker.calls.append(call.is_ahead)
        if len(worker.calls) == 1:
            self._train_first_call(index, self.now)
        self._restart_driver_timer()

    def _train_first_call(self, index: int, now: float) -> None:
        """Train the first call in a worker's queue and schedule its report."""
        worker = self._workers[index]
        seconds = CALL_SECONDS * self._random.uniform(0.98, 1.02)
        steps = int(seconds * STEPS_PER_SECOND)
        if worker.calls[0] and not worker.may_continue:
            steps = 0
        skipped = not steps
        steps = min([steps, *(total - done for _, done, total in worker.slots.values())])
        worker.busy_seconds += steps / STEPS_PER_SECOND
        outcomes = []
        for slot, progress in list(worker.slots.items()):
            progress[1] += steps
            if progress[1] >= progress[2]:
                outcomes.append(self._make_outcome(slot, progress[0]))
                del worker.slots[slot]
        report = Report(
            worker=index,
            finished=tuple(outcomes),
            skipped=skipped,
            steps={slot: progress[1] for slot, progress in worker.slots.items()},
        )
        worker.may_continue = steps > 0 and not outcomes
        heapq.heappush(self._events, (now + steps / STEPS_PER_SECOND, self.num_calls, report))
        self.num_calls += 1
        self.num_ended += len(outcomes)

    def _make_outcome(self, slot: int, run_id: str) -> EndedRun:
        """Return the outcome of a finished run."""
        result = RunResult(
            id=run_id,
            status="finished",
            loss_nats=3 + self._random.random(),
            num_steps=CURVE_STEPS,
            last_train_loss_nats=3.001,
            curve_id=self._curve_id,
            flops=1e9,
            tokens=10**9,
            seconds=60 * self._random.random(),
            environment={"device": "stand-in"},
            reason="",
        )
        # As from another process: no shared objects
        return EndedRun(slot, *copy.deepcopy((result, self._curve)))

    def wait(self, timeout_seconds: float) -> list[Report]:
        """Advance the clock to the next reports and return them."""
        self._charge_driver_time()
        if not self._events or self._events[0][0] > self.now:
            until = self.now + timeout_seconds
            self.now = min(until, self._events[0][0]) if self._events else until
        reports = []
        while self._events and self._events[0][0] <= self.now:
            at, _, report = heapq.heappop(self._events)
            worker = self._workers[report.worker]
            worker.calls.popleft()
            reports.append(report)
            if worker.calls:
                self._train_first_call(
                    report.worker, at
                )  # the call was queued, so it needs no driver
        self._restart_driver_timer()
        return reports

    def restart(self, worker: int) -> None:
        """Fail, because simulated workers do not fail."""
        raise AssertionError("a simulated worker was restarted, but none fails")

    def close(self) -> None:
        """Do nothing."""
        return


Reading = tuple[float, float, float, int, int]
"""Simulated time, driver's processor seconds, workers' busy seconds, calls, and outcomes so far."""


class TimeUpError(Exception):
    """The simulated time is over."""


def measure_driver(num_workers: int, write_seconds: float) -> dict[str, Any]:
    """Return the costs of a driver of this many workers.

    Args:
        num_workers: Simulated workers.
        write_seconds: Seconds of a write; writes take no time if 0.
    """
    num_runs = int(
        num_workers * NUM_SLOTS * (1 + (WARMUP_SECONDS + COUNTED_SECONDS) / RUN_SECONDS[0])
    )
    specs = [
        make_spec(seed=seed, num_steps=CURVE_STEPS, num_slots=NUM_SLOTS) for seed in range(num_runs)
    ]
    pool = SimulatedPool(num_workers)
    readings: list[Reading] = []

    def record_reading() -> None:
        readings.append(
            (
                pool.now,
                pool.driver_seconds,
                pool.compute_busy_seconds(),
                pool.num_calls,
                pool.num_ended,
            )
        )

    def should_stop() -> bool:
        if not readings and pool.now >= WARMUP_SECONDS:
            record_reading()
        if pool.now >= WARMUP_SECONDS + COUNTED_SECONDS:
            record_reading()
            raise TimeUpError
        return False

    store_curves = driver.store_curves

    def store_and_wait(study_dir: Path, curves: Any) -> None:
        if write_seconds:
            pool.spend(compute_commit_seconds(len(curves)))
        store_curves(study_dir, curves)

    with (
        tempfile.TemporaryDirectory(dir=find_memory_folder()) as name,
        Ledger.open(Path(name), {}, create=True) as ledger,
        mock.patch.object(driver, "store_curves", store_and_wait),
        contextlib.suppress(TimeUpError),
    ):
        pool._restart_driver_timer()
        driver.drive(
            StaticSource(specs, get_bank_key),
            pool,
            ledger,
            Path(name),
            bank_key_for=get_bank_key,
            should_stop=should_stop,
            clock=pool.read_clock,
        )
    return {
        "num_workers": num_workers,
        "write_seconds": write_seconds,
        **compute_costs(readings, num_workers),
        "peak_mb": read_peak_memory_mb(),
    }


def compute_costs(readings: list[Reading], num_workers: int) -> dict[str, float]:
    """Return the costs between two readings, per second and per call."""
    (began, cpu, busy, calls, ended), (end, cpu_end, busy_end, calls_end, ended_end) = readings
    seconds = end - began
    return {
        "calls_per_second": (calls_end - calls) / seconds,
        "outcomes_per_second": (ended_end - ended) / seconds,
        "cpu_ms_per_call": 1e3 * (cpu_end - cpu) / (calls_end - calls),
        "share_of_a_core": (cpu_end - cpu) / seconds,
        "busy_share": (busy_end - busy) / seconds / num_workers,
    }


def measure_search_memory(num_trials: int, study_dir: Path) -> float:
    """Return the peak memory in MB of a driver that runs a random search, or that opens a search
    which has all its trials already.

    Run this in its own process, because the peak is that of the process. Only the first
    `MEMORY_CURVES` curves are written, to save space.
    """
    axes = tuple(Axis(name=name, range=ends) for name, ends in MEMORY_AXES.items())

    def make_run(point: Params) -> RunSpec:
        spec: RunSpec = make_spec(num_steps=CURVE_STEPS, num_slots=NUM_SLOTS)
        warmup_steps = compute_warmup_steps(point["warmup_fraction"], CURVE_STEPS, 0)
        schedule = dataclasses.replace(spec.schedule, warmup_steps=warmup_steps)
        return dataclasses.replace(spec, hparams=Hparams.from_point(point, {}), schedule=schedule)

    num_curves = 0

    def store_some(study_dir: Path, curves: Any) -> None:
        nonlocal num_curves
        if num_curves < MEMORY_CURVES:
            store_curves(study_dir, curves)
        num_curves += len(curves)

    search = Search(SearchSpace(axes=axes), 1, MEMORY_WORKERS * NUM_SLOTS, sampler="random")
    pool = SimulatedPool(MEMORY_WORKERS)
    with (
        mock.patch.object(driver, "store_curves", store_some),
        Ledger.open(study_dir, {}, create=True) as ledger,
    ):
        driver.drive(
            SearchSource(search, make_run, ledger, stage="s", num_trials=num_trials),
            pool,
            ledger,
            study_dir,
            bank_key_for=get_bank_key,
            clock=pool.read_clock,
        )
        return read_peak_memory_mb()


def measure_memory() -> dict[str, Any]:
    """Return the peak memory of searches while they run and when they are opened again.

    The result also has the growth of both in bytes per trial.
    """
    rows = []
    for num_trials in MEMORY_TRIALS:
        peaks = []
        with tempfile.TemporaryDirectory(dir=find_memory_folder()) as name:
            for _ in range(2):
                with ProcessPoolExecutor(
                    1, mp_context=multiprocessing.get_context("spawn")
                ) as executor:
                    peaks.append(
                        executor.submit(measure_search_memory, num_trials, Path(name)).result()
                    )
        rows.append({"num_trials": num_trials, "peak_mb": peaks[0], "reopened_peak_mb": peaks[1]})
    few, many = rows[0], rows[-1]
    growth = {
        name: 2**20 * (many[name] - few[name]) / (many["num_trials"] - few["num_trials"])
        for name in few
    }
    return {
        "searches": rows,
        "ratio": many["peak_mb"] / few["peak_mb"],
        "bytes_per_trial": growth["peak_mb"],
        "reopened_bytes_per_trial": growth["reopened_peak_mb"],
    }


def find_memory_folder() -> str | None:
    """Return a folder on a file system in memory, or None."""
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


def compute_commit_seconds(num_outcomes: int) -> float:
    """Return the seconds that outcomes that arrive together wait for the file system."""
    rounds = math.ceil(num_outcomes / WRITERS)
    writes = rounds * CURVE_WRITES + LEDGER_WRITES + num_outcomes * CHECKPOINT_WRITES
    return writes * EFS_WRITE_SECONDS + LEDGER_LOCKS * EFS_READ_SECONDS


def compute_file_system_limits() -> dict[str, Any]:
    """Return the number of workers at which each limit of the file system is reached."""
    mean_seconds = sum(RUN_SECONDS) / 2
    rates = {number: number / compute_commit_seconds(number) for number in (1, WRITERS)}

    def count_workers(weights: float) -> float:
        return EFS_WRITE_BYTES_PER_SECOND * SAVE_SECONDS / (weights * BYTES_PER_WEIGHT * NUM_SLOTS)

    return {
        "outcomes_per_second": {f"{number} at once": rate for number, rate in rates.items()},
        "workers_by_outcomes": {
            f"runs of {seconds:g} s, {number} at once": rate * seconds / NUM_SLOTS
            for seconds in (mean_seconds, 600.0)
            for number, rate in rates.items()
        },
        "workers_by_saved_bytes": {
            f"{weights / 1e6:g}M weights": count_workers(weights) for weights in (1e6, 10e6, 40e6)
        },
        "workers_by_save_operations": EFS_WRITES_PER_SECOND
        * SAVE_SECONDS
        / (SAVE_OPERATIONS * NUM_SLOTS),
        "ray_start_seconds_of_1000": 1_000 / RAY_ACTORS_PER_SECOND,
    }


class IdleHost:
    """A worker host that returns at once, as if it had trained."""

    def advance(self, call: HostCall) -> Report:
        """Return one step for each slot."""
        return Report(steps=dict.fromkeys(call.hold, 1) or {0: 1})


RAY_WORKERS, RAY_CALLS, RAY_ROUNDS = 8, 2_000, 5
"""Actors, calls of one measurement, and rounds of part 4."""


def measure_worker_states(pool: Any) -> float:
    """Return the calls per second of forerun's worker states, with one call queued per worker."""
    states = WorkerStates(pool, AdaptiveTimeouts(600.0), time.monotonic)
    open_run = driver.OpenRun(spec=make_spec(num_steps=10**6), run_id="", bank_key="one")
    for worker in states.workers:
        worker.bank_key, worker.slots[0] = "one", open_run
    began, num_calls = time.monotonic(), 0
    while num_calls < RAY_CALLS:
        for index, _ in states.take_training():
            states.queue_continuation(index)
        for index, _ in states.list_idle():
            states.start(index, {})
        num_calls += len(states.wait(1.0))
    rate = num_calls / (time.monotonic() - began)
    while states.is_busy:
        states.wait(1.0)
    return rate


def measure_plain_loop(pool: Any) -> float:
    """Return the calls per second of a plain loop over the same actors.

    Each actor has two calls in flight.
    """
    ray, actors = pool._ray, pool._actors
    call = HostCall(bank_key="one", num_slots=3, admit=(), seconds=CALL_SECONDS)
    pending = {
        actor.advance.remote(index, call): index
        for _ in range(2)
        for index, actor in enumerate(actors)
    }
    began, num_calls = time.monotonic(), 0
    while num_calls < RAY_CALLS:
        ready, _ = ray.wait(list(pending), num_returns=1)
        for reference in ready:
            ray.get(reference)
            index = pending.pop(reference)
            pending[actors[index].advance.remote(index, call)] = index
            num_calls += 1
    rate = num_calls / (time.monotonic() - began)
    ray.get(list(pending))
    return rate


def compare_with_ray() -> dict[str, Any]:
    """Measure both in turns over the same eight actors."""
    from forerun._sweeps.ray.nodes import WorkerPlacement
    from forerun._sweeps.ray.pool import RayPool

    pool = RayPool(RAY_WORKERS, IdleHost, place=WorkerPlacement(worker_cpus=0.1))
    try:
        measure_worker_states(pool), measure_plain_loop(pool)  # warm-up
        rounds = [
            (measure_worker_states(pool), measure_plain_loop(pool)) for _ in range(RAY_ROUNDS)
        ]
    finally:
        pool.close()
    return {
        "num_actors": RAY_WORKERS,
        "ours_calls_per_second": statistics.median(forerun_rate for forerun_rate, _ in rounds),
        "ray_calls_per_second": statistics.median(plain_rate for _, plain_rate in rounds),
        "ratio": statistics.median(
            forerun_rate / plain_rate for forerun_rate, plain_rate in rounds
        ),
        "ratios": [forerun_rate / plain_rate for forerun_rate, plain_rate in rounds],
    }


def main() -> None:
    """Measure the chosen parts, print them, and write the result."""
    parser = make_parser(__doc__)
    parser.add_argument(
        "--only",
        choices=("driver", "ray", "memory"),
        help="Measure one part, and keep the other parts of the file.",
    )
    parser.add_argument("--workers", help="Numbers of workers, such as 64,1000.")
    options = parser.parse_args()
    result: dict[str, Any] = {"machine": describe_machine()}
    if options.only and options.json and options.json.is_file():
        result = json.loads(options.json.read_text(encoding="utf-8"))
    sizes = tuple(map(int, options.workers.split(","))) if options.workers else NUM_WORKERS
    if options.only in (None, "driver"):
        measure_driver(64, 0.0)  # warm-up: imports and caches
        result["driver"] = [measure_driver(number, 0.0) for number in sizes]
        result["driver_on_efs"] = [measure_driver(number, EFS_WRITE_SECONDS) for number in sizes]
        result["file_system"] = compute_file_system_limits()
        for name in ("driver", "driver_on_efs"):
            print(f"{name}:\n  workers   calls/s  ends/s  CPU ms a call  of a core   busy")
            for row in result[name]:
                print(
                    f"  {row['num_workers']:7,} {row['calls_per_second']:9.1f} "
                    f"{row['outcomes_per_second']:7.1f} "
                    f"{row['cpu_ms_per_call']:14.3f} {row['share_of_a_core']:10.3f} "
                    f"{row['busy_share']:6.1%}"
                )
        print(json.dumps(result["file_system"], indent=2))
    if options.only in (None, "memory"):
        result["memory"] = measure_memory()
        print(json.dumps(result["memory"], indent=2))
    if options.only in (None, "ray"):
        result["ray"] = compare_with_ray()
        print(json.dumps(result["ray"], indent=2))
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
