"""Processor time of the driver at 64 to 4,000 workers, and how busy it keeps them.

    python benchmarks/cpu/thousand_workers.py --json benchmarks/results/thousand_workers.json

It takes about 4 minutes of one core.

`sweeps.run.driver`, its crew, ledger and curve files are real, on a file system in memory.
Stand-ins are the workers, of 4 slots each, which train 100 steps a second in calls of two seconds
with one ahead, and the clock: it moves by the processor time that the driver really takes, by what
its writes would take on a file system, and to the next report where nobody has anything to do. Runs
of 30 to 90 s end at any time, each with a curve of 1,000 steps.

1. The driver alone (writes take no time): processor time a call, its share of a core, and how busy
  the workers are.
2. The same where each operation on a file that must reach the server takes what Amazon EFS
   publishes for a write, 2.7 ms, and each lock what it publishes for a read, 0.25 ms ("EFS
   performance", Regional). An outcome takes as many as a trace of the system calls of one has
   (`*_WRITES`): those of several curves overlap, the ledger's are shared.
3. What the workers' own saves ask of the file system, by arithmetic: bytes and operations a second
   against its published limits. And actors: Ray's own release test starts 389 a second (10,000 on
   64 nodes, release log of 1.12.0).
4. Real Ray: eight actors that do no work, calls a second by our pool and driver's crew beside a
   loop of Ray alone, in turns (`--only ray`).
5. Memory: a random search of 1,000 and of 30,000 trials, each in a process of its own (`--only
  memory`, 4 minutes).
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import heapq
import json
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

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "sweeps"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from process_tree import machine, own_peak_mb
from sweep_fakes import bank_key, make_spec, num_slots

from proxies.core import canon
from proxies.core.canon import Json
from proxies.core.hyperparameters import Hparams
from proxies.core.schedule import whole_warmup
from proxies.core.spec import Curve, RunResult, RunSpec
from sweeps.run import driver
from sweeps.run.crew import AdaptiveTimeouts, Crew
from sweeps.run.pool import Finished, HostAnswer, HostCall, Report
from sweeps.search.source import Search, SearchSource, StaticSource
from sweeps.search.space import Axis, Params, SearchSpace
from sweeps.store.curves import store_curves
from sweeps.store.ledger import Ledger

NUM_WORKERS = (64, 256, 1_000, 4_000)
MEMORY_TRIALS, MEMORY_WORKERS, MEMORY_CURVES = (1_000, 30_000), 64, 1_000
MEMORY_AXES = {
    "learning_rate": (2.0**-12, 2.0**-6),
    "warmup_fraction": (0.02, 0.5),
    "clip_norm": (0.25, 4.0),
}
NUM_SLOTS, STEPS_PER_SECOND, CURVE_STEPS = 4, 100, 1_000
RUN_SECONDS = (30.0, 90.0)
WARM_SECONDS, SECONDS = 40.0, 60.0
"""Of the simulated time: before anything is counted, and counted."""
EFS_WRITE_SECONDS, EFS_READ_SECONDS = 2.7e-3, 0.25e-3
EFS_WRITES_PER_SECOND, EFS_WRITE_BYTES_PER_SECOND = 25_000, 3 * 2**30
"""Limits of a Regional file system, provisioned throughput (the same page)."""
CURVE_WRITES, LEDGER_WRITES, LEDGER_LOCKS, CHECKPOINT_WRITES = 5, 6, 9, 3
"""Calls that change a name or wait for the disk, by `strace -f -e
trace=%file,fsync,fdatasync,ftruncate,fcntl` of a driver: of one curve, of one transaction of the
ledger, of one folder of checkpoints.
"""
WRITERS = 8
"""Curves that are written at once (`sweeps.store.curves`)."""
SAVE_SECONDS, SAVE_OPERATIONS = 30.0, 6
"""Between two saves of a slot; write, sync, rename, sync the folder, list it, remove the one before
the last."""
BYTES_PER_WEIGHT = 12
RAY_ACTORS_PER_SECOND = 389


@dataclasses.dataclass(slots=True)
class Standin:
    """One worker."""

    slots: dict[int, list[Any]] = dataclasses.field(default_factory=dict)
    """Slot -> [run id, steps done, steps in all]."""
    calls: deque[bool] = dataclasses.field(default_factory=deque)
    """Of each that it was asked for, whether it was sent ahead."""
    may_go_on: bool = False
    busy_seconds: float = 0.0


class StandinPool:
    """Workers that cost nothing, and the clock of it all."""

    calls_ahead = 1

    def __init__(self, num_workers: int) -> None:
        self.num_workers = num_workers
        self.now = 0.0
        self._random = random.Random(0)
        self._workers = [Standin() for _ in range(num_workers)]
        self._events: list[tuple[float, int, Report]] = []
        self._since = time.process_time()
        self.driver_seconds = 0.0
        self.num_calls = self.num_ended = 0
        self._curve = Curve(
            steps=tuple(range(1, CURVE_STEPS + 1)),
            train_loss_nats=tuple(3 + 1 / step for step in range(1, CURVE_STEPS + 1)),
            grad_norm=(1.0,) * CURVE_STEPS,
        )
        self._curve_body: dict[str, Json] = canon.to_json(self._curve)  # type: ignore[assignment]
        self._curve_id = canon.content_id(self._curve)

    def clock(self) -> float:
        return self.now

    def spend(self, seconds: float) -> None:
        """The driver waits for a disk."""
        self.now += seconds

    def _enter(self) -> None:
        spent = time.process_time() - self._since
        self.now += spent
        self.driver_seconds += spent

    def _leave(self) -> None:
        self._since = time.process_time()

    def busy_seconds(self) -> float:
        """Of training so far: of calls under way, what has passed."""
        left = sum(max(0.0, at - self.now) for at, _, _ in self._events)
        return sum(worker.busy_seconds for worker in self._workers) - left

    def start(self, index: int, call: HostCall) -> None:
        self._enter()
        worker = self._workers[index]
        for slot, data in call.admit:
            num_steps = int(STEPS_PER_SECOND * self._random.uniform(*RUN_SECONDS))
            worker.slots[slot] = [canon.content_id(data), 0, num_steps]
        worker.calls.append(call.ahead)
        if len(worker.calls) == 1:
            self._begin(index, self.now)
        self._leave()

    def _begin(self, index: int, now: float) -> None:
        worker = self._workers[index]
        seconds = 2.0 * self._random.uniform(0.98, 1.02)
        steps = int(seconds * STEPS_PER_SECOND)
        if worker.calls[0] and not worker.may_go_on:
            steps = 0
        skipped = not steps
        steps = min([steps, *(total - done for _, done, total in worker.slots.values())])
        worker.busy_seconds += steps / STEPS_PER_SECOND
        ended = []
        for slot, held in list(worker.slots.items()):
            held[1] += steps
            if held[1] >= held[2]:
                ended.append(self._ended(slot, held[0]))
                del worker.slots[slot]
        report = Report(
            worker=index,
            finished=tuple(ended),
            skipped=skipped,
            steps={slot: held[1] for slot, held in worker.slots.items()},
        )
        worker.may_go_on = steps > 0 and not ended
        heapq.heappush(self._events, (now + steps / STEPS_PER_SECOND, self.num_calls, report))
        self.num_calls += 1
        self.num_ended += len(ended)

    def _ended(self, slot: int, run_id: str) -> Finished:
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
        body = json.loads(canon.canonical(result))  # as from another process: nothing is shared
        return Finished(slot=slot, result=body, curve=self._curve_body)

    def wait(self, timeout_seconds: float) -> list[Report]:
        self._enter()
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
                self._begin(report.worker, at)  # whatever the driver does: it was queued
        self._leave()
        return reports

    def restart(self, worker: int) -> None:
        raise AssertionError("no stand-in fails")

    def close(self) -> None:
        return


class EnoughError(Exception):
    """The simulated time is over."""


def driven(num_workers: int, write_seconds: float) -> dict[str, Any]:
    """A drive of so many workers, each write of it taking so long."""
    num_runs = int(num_workers * NUM_SLOTS * (1 + (WARM_SECONDS + SECONDS) / RUN_SECONDS[0]))
    specs = [
        make_spec(seed=seed, num_steps=CURVE_STEPS, num_slots=NUM_SLOTS) for seed in range(num_runs)
    ]
    pool = StandinPool(num_workers)
    marks: list[tuple[float, float, float, int, int]] = []

    def mark() -> None:
        marks.append(
            (pool.now, pool.driver_seconds, pool.busy_seconds(), pool.num_calls, pool.num_ended)
        )

    def should_stop() -> bool:
        if not marks and pool.now >= WARM_SECONDS:
            mark()
        if pool.now >= WARM_SECONDS + SECONDS:
            mark()
            raise EnoughError
        return False

    store = driver.store_curves

    def stored(study_dir: Path, curves: Any) -> None:
        if write_seconds:
            pool.spend(commit_seconds(len(curves)))
        store(study_dir, curves)

    with (
        tempfile.TemporaryDirectory(dir=in_memory()) as name,
        Ledger.open(Path(name), {}, create=True) as ledger,
        mock.patch.object(driver, "store_curves", stored),
        contextlib.suppress(EnoughError),
    ):
        pool._leave()
        driver.drive(
            StaticSource(specs, bank_key),
            pool,
            ledger,
            Path(name),
            num_slots_for=num_slots,
            bank_key_for=bank_key,
            should_stop=should_stop,
            clock=pool.clock,
        )
    (began, cpu, busy, calls, ended), (end, cpu_end, busy_end, calls_end, ended_end) = marks
    seconds = end - began
    return {
        "num_workers": num_workers,
        "write_seconds": write_seconds,
        "calls_per_second": (calls_end - calls) / seconds,
        "outcomes_per_second": (ended_end - ended) / seconds,
        "cpu_ms_per_call": 1e3 * (cpu_end - cpu) / (calls_end - calls),
        "share_of_a_core": (cpu_end - cpu) / seconds,
        "busy_share": (busy_end - busy) / seconds / num_workers,
        "peak_mb": own_peak_mb(),
    }


def searched(num_trials: int, study_dir: Path) -> float:
    """The most megabytes that a driver takes from a random search of so many trials, or from what
    is left of it.

    In a process of its own: the peak is the process's. Curves beyond `MEMORY_CURVES` are not
    written, for room.
    """
    axes = tuple(Axis(name=name, range=ends) for name, ends in MEMORY_AXES.items())

    def make_run(point: Params) -> RunSpec:
        spec: RunSpec = make_spec(num_steps=CURVE_STEPS, num_slots=NUM_SLOTS)
        warmup_steps = whole_warmup(point["warmup_fraction"], CURVE_STEPS, 0)
        schedule = dataclasses.replace(spec.schedule, warmup_steps=warmup_steps)
        return dataclasses.replace(spec, hparams=Hparams.at(point, {}), schedule=schedule)

    num_curves = 0

    def stored(study_dir: Path, curves: Any) -> None:
        nonlocal num_curves
        if num_curves < MEMORY_CURVES:
            store_curves(study_dir, curves)
        num_curves += len(curves)

    search = Search(SearchSpace(axes=axes), 1, MEMORY_WORKERS * NUM_SLOTS, sampler="random")
    pool = StandinPool(MEMORY_WORKERS)
    with (
        mock.patch.object(driver, "store_curves", stored),
        Ledger.open(study_dir, {}, create=True) as ledger,
    ):
        driver.drive(
            SearchSource(search, make_run, ledger, stage="s", num_trials=num_trials),
            pool,
            ledger,
            study_dir,
            num_slots_for=num_slots,
            bank_key_for=bank_key,
            clock=pool.clock,
        )
        return own_peak_mb()


def memory() -> dict[str, Any]:
    """Searches as they run, and as an ended one is opened again: megabytes, and bytes a trial."""
    rows = []
    for num_trials in MEMORY_TRIALS:
        peaks = []
        with tempfile.TemporaryDirectory(dir=in_memory()) as name:
            for _ in range(2):
                with ProcessPoolExecutor(
                    1, mp_context=multiprocessing.get_context("spawn")
                ) as alone:
                    peaks.append(alone.submit(searched, num_trials, Path(name)).result())
        rows.append({"num_trials": num_trials, "peak_mb": peaks[0], "reopened_peak_mb": peaks[1]})
    few, many = rows[0], rows[-1]
    grown = {
        name: 2**20 * (many[name] - few[name]) / (many["num_trials"] - few["num_trials"])
        for name in few
    }
    return {
        "searches": rows,
        "ratio": many["peak_mb"] / few["peak_mb"],
        "bytes_per_trial": grown["peak_mb"],
        "reopened_bytes_per_trial": grown["reopened_peak_mb"],
    }


def in_memory() -> str | None:
    """A folder on a file system in memory, if there is one."""
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


def commit_seconds(num_outcomes: int) -> float:
    """What so many outcomes that came in at once wait for the file system."""
    rounds = -(-num_outcomes // WRITERS)
    writes = rounds * CURVE_WRITES + LEDGER_WRITES + num_outcomes * CHECKPOINT_WRITES
    return writes * EFS_WRITE_SECONDS + LEDGER_LOCKS * EFS_READ_SECONDS


def file_system() -> dict[str, Any]:
    """At how many workers each of a file system's limits is reached, by arithmetic."""
    mean_seconds = sum(RUN_SECONDS) / 2
    most = {number: number / commit_seconds(number) for number in (1, WRITERS)}

    def by_bytes(weights: float) -> float:
        return EFS_WRITE_BYTES_PER_SECOND * SAVE_SECONDS / (weights * BYTES_PER_WEIGHT * NUM_SLOTS)

    return {
        "outcomes_per_second": {f"{number} at once": rate for number, rate in most.items()},
        "workers_by_outcomes": {
            f"runs of {seconds:g} s, {number} at once": rate * seconds / NUM_SLOTS
            for seconds in (mean_seconds, 600.0)
            for number, rate in most.items()
        },
        "workers_by_saved_bytes": {
            f"{weights / 1e6:g}M weights": by_bytes(weights) for weights in (1e6, 10e6, 40e6)
        },
        "workers_by_save_operations": EFS_WRITES_PER_SECOND
        * SAVE_SECONDS
        / (SAVE_OPERATIONS * NUM_SLOTS),
        "ray_start_seconds_of_1000": 1_000 / RAY_ACTORS_PER_SECOND,
    }


class Idle:
    """A host that has always just trained."""

    def advance(self, call: HostCall) -> HostAnswer:
        return HostAnswer(steps=dict.fromkeys(call.hold, 1) or {0: 1})


RAY_WORKERS, RAY_CALLS, RAY_ROUNDS = 8, 2_000, 5


def by_us(pool: Any) -> float:
    """Calls a second of our crew, one ahead."""
    crew = Crew(pool, num_slots, AdaptiveTimeouts(600.0), time.monotonic)
    held = driver.Attempt(spec=make_spec(num_steps=10**6), run_id="", bank_key="one")
    for worker in crew.workers:
        worker.bank_key, worker.slots[0] = "one", held
    began, done = time.monotonic(), 0
    while done < RAY_CALLS:
        for index, _ in crew.training():
            crew.go_on(index)
        for index, _ in crew.idle():
            crew.start(index, {})
        done += len(crew.wait(1.0))
    rate = done / (time.monotonic() - began)
    while crew.busy:
        crew.wait(1.0)
    return rate


def by_ray(pool: Any) -> float:
    """Calls a second of the plainest loop over the same actors, two in flight each."""
    ray, actors = pool._ray, pool._actors
    call = HostCall(bank_key="one", num_slots=3, admit=(), seconds=2.0)
    pending = {actor.advance.remote(i, call): i for _ in range(2) for i, actor in enumerate(actors)}
    began, done = time.monotonic(), 0
    while done < RAY_CALLS:
        ready, _ = ray.wait(list(pending), num_returns=1)
        for reference in ready:
            ray.get(reference)
            index = pending.pop(reference)
            pending[actors[index].advance.remote(index, call)] = index
            done += 1
    rate = done / (time.monotonic() - began)
    ray.get(list(pending))
    return rate


def beside_ray() -> dict[str, Any]:
    """Both, in turns, over the same eight actors."""
    from sweeps.ray.nodes import WorkerPlacement
    from sweeps.ray.pool import RayPool

    pool = RayPool(RAY_WORKERS, Idle, place=WorkerPlacement(worker_cpus=0.1))
    try:
        by_us(pool), by_ray(pool)  # warm
        rounds = [(by_us(pool), by_ray(pool)) for _ in range(RAY_ROUNDS)]
    finally:
        pool.close()
    return {
        "num_actors": RAY_WORKERS,
        "ours_calls_per_second": statistics.median(ours for ours, _ in rounds),
        "ray_calls_per_second": statistics.median(plain for _, plain in rounds),
        "ratio": statistics.median(ours / plain for ours, plain in rounds),
        "ratios": [ours / plain for ours, plain in rounds],
    }


def main() -> None:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument(
        "--only", choices=("driver", "ray", "memory"), help="what else the JSON has stays as it is"
    )
    parser.add_argument("--workers", help="for the driver alone, e.g. 64,1000")
    options = parser.parse_args()
    body: dict[str, Any] = {"machine": machine()}
    if options.only and options.json and options.json.is_file():
        body = json.loads(options.json.read_text(encoding="utf-8"))
    sizes = tuple(map(int, options.workers.split(","))) if options.workers else NUM_WORKERS
    if options.only in (None, "driver"):
        driven(64, 0.0)  # imports, caches
        body["driver"] = [driven(number, 0.0) for number in sizes]
        body["driver_on_efs"] = [driven(number, EFS_WRITE_SECONDS) for number in sizes]
        body["file_system"] = file_system()
        for name in ("driver", "driver_on_efs"):
            print(f"{name}:\n  workers   calls/s  ends/s  CPU ms a call  of a core   busy")
            for row in body[name]:
                print(
                    f"  {row['num_workers']:7,} {row['calls_per_second']:9.1f} "
                    f"{row['outcomes_per_second']:7.1f} "
                    f"{row['cpu_ms_per_call']:14.3f} {row['share_of_a_core']:10.3f} "
                    f"{row['busy_share']:6.1%}"
                )
        print(json.dumps(body["file_system"], indent=2))
    if options.only in (None, "memory"):
        body["memory"] = memory()
        print(json.dumps(body["memory"], indent=2))
    if options.only in (None, "ray"):
        body["ray"] = beside_ray()
        print(json.dumps(body["ray"], indent=2))
    if options.json:
        options.json.write_text(json.dumps(body, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
