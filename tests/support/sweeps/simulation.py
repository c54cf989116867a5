"""A whole study under one seed: the real driver and ledger over a fake disk, fake clocks and a fake
pool.

`drive` is real, with its workers' states, timeouts and retries; so are `Ledger` and `chain`, with
their SQL. These parts are fake:

- the disk: SQLite runs in memory, and a commit is durable only if the connection asked for full
  synchronization. When the power fails, commits since the last durable one may be gone. SQLite's
  own journal and the renames of curves and checkpoints are trusted here; `ledger_faults.py`
  interrupts them at every system call.
- the clocks: a monotonic one, and a wall clock that jumps by hours.
- the pool: workers finish in any order, die, hang, run out of memory, and are preempted. Their
  reports may come late or twice, or be invalid. A worker trains several runs, each in a slot. The
  run of a slot continues from a checkpoint, which may be damaged; it waits while the pruner judges
  it; and it may be evicted.
- the rule by which a search prunes trials (stops them early), and the curves that it reads.
- the driver's end: it is stopped, killed, or suspended while another driver takes the study over.

`simulate` runs one study. It checks every promise that can be checked from outside, on the way and
at the end, and raises `BrokenPromiseError` at a broken one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import heapq
import json
import random
import sqlite3
import types
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple
from unittest import mock

from sweep_fakes import (
    get_bank_key,
    make_outcome,
    make_pruned_outcome,
    make_spec,
    spoil_loss,
)

from forerun._proxies.core import canon
from forerun._proxies.core.spec import EndedRun, RunSpec
from forerun._sweeps.run import driver as driver_module
from forerun._sweeps.run.driver import drive
from forerun._sweeps.run.pool import Report
from forerun._sweeps.run.retries import MAX_FAILURES_IN_A_ROW, FailedAttempt
from forerun._sweeps.search import pruning as pruner_module
from forerun._sweeps.search.source import StaticSource
from forerun._sweeps.store import chain
from forerun._sweeps.store import ledger as ledger_module
from forerun._sweeps.store.errors import RunsFail, StaleDriver
from forerun._sweeps.store.ledger import Ledger

NUM_STEPS = 6
HANG_SECONDS = 150.0
MAX_ATTEMPTS = 4
NUM_WORKERS = 2
MAX_LIVES = 60
"""Maximum number of drivers, one after another, within which the study must end."""
MAX_CLOCK_DELAY_SECONDS = 4.5
"""Delay of the clock when nothing is due; below `MAX_DRIVER_PAUSE_SECONDS`, from which on the
driver discounts it."""
POLL_SECONDS = 0.5
"""Time between two polls of the driver."""
SPECS = [
    make_spec(seed=seed, width=width, num_steps=NUM_STEPS)
    for width in (32, 64)
    for seed in range(2)
]
SPECS.append(make_spec(log2_lr=-1, num_steps=NUM_STEPS))
IDS = [spec.id for spec in SPECS]
KNOWN_IDS = {id(spec): spec.id for spec in SPECS}
RUNS = dict(zip(IDS, SPECS, strict=True))
"""Every run that a worker has seen, by id."""
POISON, HOG = IDS[1], IDS[3]
"""Runs that cause failures in some seeds: `POISON` kills every worker that holds it, and `HOG` runs
out of memory unless its batch is split."""


class BrokenPromiseError(AssertionError):
    """A promise of the driver or the ledger was broken."""


class PowerLossError(BaseException):
    """The machine has lost power."""


class KilledError(BaseException):
    """The driver's process was killed; the kernel has what it wrote."""


@dataclasses.dataclass
class World:
    """State that outlives a driver: disk, clocks, random numbers, and what was reported."""

    seed: int
    faults: float
    """Likelihood of each kind of fault at each opportunity, from 0 (none) to 1 (often)."""
    make_source: Callable
    """A function from a ledger to the source of runs."""
    counts: Counter = dataclasses.field(default_factory=Counter)
    """Numbers of faults that struck and of other events, by name."""

    def __post_init__(self):
        self.random = random.Random(self.seed)
        self.calm = self.faults == 0
        """Whether no more faults strike."""
        self.has_poison = self.seed % 3 == 0
        """Whether the run `POISON` kills its workers."""
        self.has_hog = self.seed % 5 == 0
        """Whether the run `HOG` runs out of memory."""
        self.now, self.wall = 0.0, 1e9
        """Monotonic clock, and offset of the wall clock from it, in seconds."""
        self.disk = Disk(self)
        self.reported: dict[str, object] = {}
        """Results that any driver has reported, by run id."""
        self.late: list[EndedRun] = []
        """Results that workers may report late, or a second time."""
        self.nested = False
        """Whether a second driver runs while the first is suspended."""

    def strikes(self, share, fault):
        """Return whether a fault strikes now, and count it. `share` is its relative frequency."""
        has_struck = not self.calm and self.random.random() < share * self.faults
        self.counts[fault] += has_struck
        return has_struck


def open_in_memory():
    """Open a database in memory. Any thread may close it, because the garbage collector runs in any
    thread.
    """
    return sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)


class Disk:
    """One SQLite file, with the curves and checkpoints next to it."""

    def __init__(self, world):
        self.world = world
        self.live = open_in_memory()
        self.images = [b""]
        """States of the file: the durable one, then one for each later commit that is not
        durable."""
        self.curves: set[tuple[str, bool]] = set()
        """Stored curves: run id, and whether the run was pruned."""
        self.checkpoints: dict[str, list] = {}
        """Checkpoints by run id: [step, whether it is intact], newest first."""
        self.num_connections = self.last_writer = 0

    def __del__(self):
        self.live.close()

    def connect(self, *_, **__):
        """Return a connection to the file, as `sqlite3.connect` would."""
        self.num_connections += 1
        return Connection(self, self.num_connections)

    def record_commit(self, number, durable):
        """Keep the state after a commit; only the newest driver's connection may commit."""
        if number < self.last_writer:
            raise BrokenPromiseError("a driver that was taken over has written")
        self.last_writer = number
        image = self.live.serialize()
        self.images = [image] if durable else [*self.images, image]

    def strike(self):
        """Lose power or kill the process, perhaps."""
        if self.world.strikes(0.01, "power losses"):
            raise PowerLossError
        if self.world.strikes(0.005, "drivers killed"):
            raise KilledError

    def reopen(self, power_lost):
        """Reopen the file after a crash; a killed process loses nothing that it wrote."""
        if power_lost:
            self.images = [self.world.random.choice(self.images)]
        image = self.images[-1]
        self.live.close()
        self.live = open_in_memory()
        if image:
            self.live.deserialize(image)

    def store_curve(self, study_dir, run_id, curve, *, pruned=False):
        self.strike()
        self.curves.add((run_id, pruned))
        self.strike()

    def store_curves(self, study_dir, curves):
        for result, curve in curves:
            self.store_curve(study_dir, result.id, curve, pruned=result.status == "pruned")

    def drop_checkpoints(self, study_dir, run_id):
        sql = "SELECT count(*) FROM records WHERE kind IN ('result', 'pruned') AND key = ?"
        if not self.live.execute(sql, (run_id,)).fetchone()[0]:
            raise BrokenPromiseError("a checkpoint was removed before its run had an outcome")
        self.strike()
        self.checkpoints.pop(run_id, None)

    def drop_stale_checkpoints(self, study_dir, settled):
        for run_id in [run_id for run_id in self.checkpoints if run_id in settled]:
            self.drop_checkpoints(study_dir, run_id)

    def save(self, run_id, step):
        """Save a run's state at a step, unless a later one is saved; the file may get damaged."""
        saved = self.checkpoints.get(run_id, [])
        if not saved or saved[0][0] < step:
            self.strike()
            good = not self.world.strikes(0.3, "checkpoints damaged")
            self.checkpoints[run_id] = [[step, good], *saved][:2]

    def find_newest_step(self, run_id):
        return next((step for step, good in self.checkpoints.get(run_id, []) if good), 0)


class Connection:
    """The part of an SQLite connection that `chain` uses."""

    def __init__(self, disk, number):
        self.disk, self.number, self.synced, self.writes = disk, number, False, False

    def execute(self, sql, parameters=()):
        database = self.disk.live
        if sql.startswith("PRAGMA synchronous"):
            self.synced = sql.rpartition("=")[2].strip() in ("FULL", "EXTRA")
        self.writes |= sql.startswith(("INSERT", "UPDATE", "CREATE"))
        if sql != "COMMIT" or not self.writes:
            return database.execute(sql, parameters)
        self.writes = False
        # Crash before anything is written
        self.disk.strike()
        cursor = database.execute(sql)
        self.disk.record_commit(self.number, self.synced)
        # Crash after the write and before the driver reports it
        self.disk.strike()
        return cursor

    @property
    def in_transaction(self):
        return self.disk.live.in_transaction

    def close(self):
        pass


class Lock:
    """A lock that keeps nobody out, as on a file system whose advisory locks do not work."""

    holder = {"host": "simulated", "pid": 1}  # noqa: RUF012

    def __init__(self, study_dir):
        pass

    def close(self):
        pass


class SimulatedPool:
    """The workers of one driver."""

    num_workers = NUM_WORKERS
    calls_ahead = 1

    def __init__(self, world, ledger):
        self.world, self.random, self.disk, self.ledger = world, world.random, world.disk, ledger
        self.settled = set(ledger.get_first_results())
        # A heap of (time, tie breaker, generation, report)
        self.events: list = []
        # By worker, then slot: [run id, step]
        self.slots: list[dict[int, list]] = [{} for _ in range(NUM_WORKERS)]
        # By worker: key of its bank, and number of its restarts (events of an earlier generation
        # are dropped)
        self.keys, self.generation = [""] * NUM_WORKERS, [0] * NUM_WORKERS
        # By worker: whether the call in flight will be answered, and its start
        self.flight: list[tuple[bool, float] | None] = [None] * NUM_WORKERS
        # By worker: the call queued behind the one in flight
        self.waiting: list[object] = [None] * NUM_WORKERS
        # By worker: its last call that said what to do, and whether a call ahead may continue it
        self.last: list[object] = [None] * NUM_WORKERS
        self.may_continue = [False] * NUM_WORKERS
        # Workers that have trained since they last saved
        self.unsaved: set[int] = set()
        # Runs for which a worker reported an invalid pause
        self.spoiled: set[str] = set()
        self.suspended = False

    def clock(self):
        return self.world.now

    def wall(self):
        return self.world.wall + self.world.now

    def start(self, worker, call):
        if self.flight[worker] is None:
            self._begin(worker, call)
        elif self.waiting[worker] is None and call.is_ahead:
            self.waiting[worker] = call
        else:
            raise BrokenPromiseError(
                "more calls than may be queued, or a call before the last call was answered"
            )

    def _begin(self, worker, call):
        """Begin a call: admit its runs, draw a fault, train, and schedule the report."""
        slots, world = self.slots[worker], self.world
        if call.is_ahead:
            if not self.may_continue[worker]:
                self.flight[worker] = (True, world.now)
                steps = {slot: step for slot, (_, step) in slots.items()}
                self._push(world.now, worker, Report(worker=worker, steps=steps, skipped=True))
                return
            world.counts["calls continued"] += 1
            call = dataclasses.replace(self.last[worker], admit=())
        self.last[worker], self.may_continue[worker] = call, False
        if call.bank_key != self.keys[worker]:
            self.keys[worker] = call.bank_key
            slots.clear()
        self._evict_dropped_runs(slots, call)
        for slot, data in call.admit:
            run_id = _register_run(_to_text(data))
            self._check_admission(slots, slot, run_id, call)
            slots[slot] = [run_id, self.disk.find_newest_step(run_id)]
            world.counts["resumed"] += slots[slot][1] > 0
        world.counts["calls"] += 1
        ready = world.now + self.random.expovariate(1.0)
        hangs = world.strikes(0.2, "workers hung")
        self.flight[worker] = (not hangs, world.now)
        self.unsaved.add(worker)
        if not hangs:
            failure = self._draw_failure(worker, call)
            report = failure or self._train(worker, call)
            self.may_continue[worker] = not failure and not report.needs_reply and call.seconds > 0
            self._push(ready, worker, report)
            if failure:
                slots.clear()

    def _evict_dropped_runs(self, slots, call):
        """Empty the slots that the call no longer holds."""
        first_results = self.ledger.get_first_results()
        for slot in slots.keys() - call.hold.keys() | {
            slot for slot, _ in call.admit if slot in slots
        }:
            run_id = slots.pop(slot)[0]
            self.world.counts["slots emptied"] += 1
            if run_id not in first_results and run_id not in self.spoiled:
                raise BrokenPromiseError("a run was evicted without an outcome")
        if any(
            run_id in first_results and first_results[run_id].status == "pruned"
            for run_id, _ in slots.values()
        ):
            raise BrokenPromiseError("a pruned run continues")

    def _check_admission(self, slots, slot, run_id, call):
        """Check that the driver may start this run in this slot."""
        if slot in slots or slot >= call.num_slots or slot not in call.hold:
            raise BrokenPromiseError("admitted into an occupied slot, or into one that is not held")
        if run_id in self.settled:
            raise BrokenPromiseError("a run that had ended was trained again")
        if (
            any(run_id == held for worker in self.slots for held, _ in worker.values())
            and run_id not in self.spoiled
        ):
            raise BrokenPromiseError("one run in two slots")
        self.world.counts["executions"] += 1

    def _draw_failure(self, worker, call):
        """Return the report of a worker that fails in this call, or None if it does not fail."""
        held = [run_id for run_id, _ in self.slots[worker].values()]
        if self.world.has_poison and POISON in held:
            return Report(worker=worker, error="Segmentation fault", cause="crashed")
        if self.world.has_hog and HOG in held and call.num_microbatches < 2:
            return Report(worker=worker, error="can't allocate memory", cause="out_of_memory")
        # Random causes, with their relative frequencies
        for cause, share in (
            ("lost_worker", 0.5),
            ("preempted", 0.2),
            ("out_of_memory", 0.1),
            ("user_code", 0.1),
        ):
            if self.world.strikes(share, cause):
                held = self.slots[worker].items()
                outcomes = [
                    self._make_outcome(slot, run_id)
                    for slot, (run_id, _) in held
                    if call.hold[slot] is None
                ]
                # Some runs have ended, but the worker dies before it reports them.
                self.world.late += [outcome for outcome in outcomes if self.random.random() < 0.5]
                return Report(worker=worker, error="gone", cause=cause)
        return None

    def _train(self, worker, call):
        """Train a worker's runs by some steps each, and return the report."""
        slots, done = self.slots[worker], []
        for slot, held in sorted(slots.items()):
            pause = call.hold[slot]
            next_step = held[1] + (self.random.randint(1, 3) if call.seconds else 0)
            held[1] = next_step if pause is None else max(held[1], min(pause, next_step))
            if held[1] >= NUM_STEPS:
                del slots[slot]
                done.append(self._make_final_outcome(slot, held[0]))
        if call.save or self.random.random() < 0.3:
            for run_id, step in slots.values():
                if step:
                    self.disk.save(run_id, step)
            self.unsaved.discard(worker)
        # A run that is still in a slot is not reported as ended.
        running = {run_id for run_id, _ in slots.values()}
        late = [end for end in self.world.late if end.result.id not in running]
        if late and self.world.strikes(1.0, "late or double reports"):
            done.append(self.random.choice(late))
        self.random.shuffle(done)
        steps = {slot: step for slot, (_, step) in slots.items()}
        waiting = [
            (slot, *held)
            for slot, held in slots.items()
            if held[1] >= (call.hold[slot] or NUM_STEPS)
        ]
        paused = [
            self._make_paused_outcome(slot, run_id, step, call.hold[slot])
            for slot, run_id, step in waiting
        ]
        return Report(worker=worker, finished=tuple(done), steps=steps, paused=tuple(paused))

    def _make_paused_outcome(self, slot, run_id, step, pause):
        """Return the report of a run at its pause.

        Some faults change it: the curve is not cut at the pause, or the pause is invalid.
        """
        self.world.counts["paused"] += 1
        uncut = self.world.strikes(0.5, "curves not cut") if step > pause else False
        result, curve = get_pruned_outcome(run_id, step if uncut else pause)
        if self.world.strikes(0.1, "invalid pauses"):
            result = dataclasses.replace(result, num_steps=pause - 1)
        if result.num_steps != pause:
            self.spoiled.add(run_id)
        return EndedRun(slot, result, curve)

    def _make_final_outcome(self, slot, run_id):
        """Return the outcome of a run that is done, or an invalid result."""
        ended = self._make_outcome(slot, run_id)
        if self.world.strikes(0.2, "invalid results"):
            return spoil_loss(ended)
        self.world.late.append(ended)
        return ended

    def _make_outcome(self, slot, run_id):
        return EndedRun(slot, *get_outcome(run_id))

    def _push(self, at, worker, report):
        heapq.heappush(self.events, (at, self.random.random(), self.generation[worker], report))

    def wait(self, timeout_seconds):
        for flight in self.flight:
            # The driver notices at a poll, and the clock may run late before it
            max_seconds = HANG_SECONDS + MAX_CLOCK_DELAY_SECONDS + 5 * POLL_SECONDS
            if flight is not None and self.world.now - flight[1] > max_seconds:
                raise BrokenPromiseError("a hung worker was not restarted")
        # Without this condition, a long wait for nobody would always end in a crash.
        if self.events:
            self.world.disk.strike()
        if self.world.strikes(0.02, "clock jumps"):
            self.world.wall += self.random.choice((-3600.0, 3600.0))
        if not self.world.nested and self.world.strikes(0.02, "takeovers"):
            self._take_over()
        deadline, reports = self.world.now + timeout_seconds, []
        while (
            self.events
            and self.events[0][0] <= deadline
            and (not reports or self.random.random() < 0.3)
        ):
            at, _, generation, report = heapq.heappop(self.events)
            self.world.now = max(self.world.now, at)
            if generation == self.generation[report.worker]:
                reports.append(report)
                self._start_waiting_call(report)
        if not reports:
            # Nothing is due: let the clock run late
            self.world.now = deadline if self.events else deadline + MAX_CLOCK_DELAY_SECONDS
        return reports

    def _start_waiting_call(self, report):
        """Start the call that waits, unless the one before it failed."""
        worker = report.worker
        self.flight[worker], call, self.waiting[worker] = None, self.waiting[worker], None
        if call is not None and report.error is None:
            self._begin(worker, call)

    def _take_over(self):
        """Suspend this driver while another one opens the study."""
        self.world.nested = self.suspended = True
        began = self.world.now
        try:
            with contextlib.suppress(KilledError, RunsFail):
                run_driver(self.world, should_stop=self.random.random() < 0.5)
        finally:
            self.world.nested = False
        # Neither a suspended driver nor its next poll can notice a silent worker
        seconds_away = self.world.now - began + POLL_SECONDS + MAX_CLOCK_DELAY_SECONDS
        self.flight = [flight and (flight[0], flight[1] + seconds_away) for flight in self.flight]

    def restart(self, worker):
        flight, self.flight[worker], self.waiting[worker] = self.flight[worker], None, None
        if flight is not None and flight[0]:
            raise BrokenPromiseError("a live worker was restarted")
        self.generation[worker] += 1
        self.slots[worker].clear()
        self.keys[worker] = ""

    def close(self):
        pass

    def check_saved(self):
        """Check after an orderly stop that every worker that could answer has saved its runs."""
        for worker in self.unsaved:
            ended = self.ledger.get_first_results().keys() | self.spoiled
            unsaved_steps = [
                step for run_id, step in self.slots[worker].values() if run_id not in ended
            ]
            if self.flight[worker] is None and any(unsaved_steps):
                raise BrokenPromiseError("a stop left a worker unsaved")


@functools.lru_cache(maxsize=64)
def get_outcome(run_id):
    return make_outcome(RUNS[run_id])


@functools.lru_cache(maxsize=256)
def get_pruned_outcome(run_id, num_steps):
    return make_pruned_outcome(RUNS[run_id], num_steps)


RUNGS = (2, 4)
NUM_STARTUP = 3


def list_rungs(num_steps):
    """Return the fake rule's rungs."""
    return RUNGS


def judge_by_median(*, point, losses_nats, earlier_trials, num_startup, **_):
    """Prune a trial whose loss is above the median of the trials that came as far."""
    step = len(losses_nats)
    losses = sorted(
        trial.losses_nats[step - 1] for trial in earlier_trials if len(trial.losses_nats) >= step
    )
    if len(earlier_trials) < num_startup or losses_nats[-1] <= losses[len(losses) // 2]:
        return ""
    # The reason names everything that was compared, so that two searches can be compared by it
    return f"trial at {sorted(point.items())} lost at step {step} among {len(earlier_trials)}"


def compute_sampler_loss(space, point, losses_nats, earlier_trials):
    """Return a loss for the sampler that depends on all that the pruner has seen."""
    return losses_nats[-1] + 0.01 * len(earlier_trials)


def load_curve(study_dir, result):
    """Return the curve of a result, as if it were read from the disk."""
    spec = RUNS[result.id]
    if result.status == "pruned":
        return make_pruned_outcome(spec, result.num_steps)[1]
    return make_outcome(spec)[1]


_decode, _content_id = canon.decode, canon.compute_content_id


def _to_text(value):
    """Return JSON text that serves as a key of a cache."""
    return json.dumps(value, sort_keys=True)


@functools.lru_cache(maxsize=4096)
def _decode_cached(kind, text):
    return _decode(kind, json.loads(text))


@functools.lru_cache(maxsize=256)
def _register_run(text):
    """Return the id of a run as a worker receives it, and keep its spec."""
    spec = _decode_cached(RunSpec, text)
    RUNS[spec.id] = spec
    return spec.id


def decode_cached(kind, value):
    """Decode as `canon.decode`, a pure function, with a cache."""
    return _decode_cached(kind, _to_text(value))


def compute_cached_id(value):
    """Return the content id as `canon.compute_content_id`, with a cache for the known runs."""
    return KNOWN_IDS.get(id(value)) or _content_id(value)


@contextlib.contextmanager
def replace_disk(world):
    """Replace the driver's access to the disk by the fake disk."""
    disk = world.disk
    sql = types.SimpleNamespace(
        **{name: getattr(sqlite3, name) for name in dir(sqlite3)} | {"connect": disk.connect}
    )
    with contextlib.ExitStack() as stack:
        for module, name, fake in (
            (chain, "sqlite3", sql),
            (ledger_module, "DriverLock", Lock),
            (driver_module, "store_curves", disk.store_curves),
            (driver_module, "drop_checkpoints", disk.drop_checkpoints),
            (driver_module, "drop_stale_checkpoints", disk.drop_stale_checkpoints),
            (driver_module, "find_saved_step", lambda _, run_id: disk.find_newest_step(run_id)),
            (driver_module, "count_oom_kills", lambda: 0),
            (pruner_module, "list_rungs", list_rungs),
            (pruner_module, "judge_trial", judge_by_median),
            (pruner_module, "compute_sampler_loss", compute_sampler_loss),
            (pruner_module, "load_curve", load_curve),
            (canon, "decode", decode_cached),
            (canon, "compute_content_id", compute_cached_id),
        ):
            stack.enter_context(mock.patch.object(module, name, fake))
        yield


def make_static_source(_):
    """Return the source of the list `SPECS`."""
    return StaticSource(SPECS, get_bank_key)


def run_driver(world, *, should_stop=False):
    """Run one driver from opening the study to its end; return whether the work is complete."""
    with contextlib.closing(Ledger.open(STUDY, {"seed": world.seed}, create=True)) as ledger:
        if set(world.reported) - set(ledger.get_first_results()):
            raise BrokenPromiseError("an outcome that was reported is gone")
        if (
            not {(run.spec.id, run.result.status == "pruned") for run in ledger.read_runs()}
            <= world.disk.curves
        ):
            raise BrokenPromiseError("an outcome without its curve")
        pool = SimulatedPool(world, ledger)
        num_polls_left = world.random.randrange(1, 20) if should_stop else 0

        def record_progress(event):
            for result in (run.result for run in event.outcomes):
                if result.id in world.reported:
                    raise BrokenPromiseError("an outcome was reported twice")
                world.reported[result.id] = result

        def should_stop_now():
            nonlocal num_polls_left
            num_polls_left -= 1
            return should_stop and num_polls_left <= 0

        drive(
            world.make_source(ledger),
            pool,
            ledger,
            STUDY,
            bank_key_for=get_bank_key,
            max_attempts=MAX_ATTEMPTS,
            hang_seconds=HANG_SECONDS,
            clock=pool.clock,
            progress=record_progress,
            should_stop=should_stop_now,
        )
        stopped = should_stop and num_polls_left <= 0
        if stopped and not pool.suspended:
            pool.check_saved()
        return not stopped


STUDY = Path()
"""Folder of the simulated study, which `use_study_folder` sets. It has an empty `ledger.db`, which
is never read: the fake disk has its content."""


@contextlib.contextmanager
def use_study_folder(folder):
    """Set the folder in which `simulate` finds an empty ledger file."""
    global STUDY
    previous, STUDY = STUDY, folder
    (folder / ledger_module.LEDGER_NAME).touch()
    try:
        yield
    finally:
        STUDY = previous


class SimulatedStudy(NamedTuple):
    """A study that `simulate` has driven to its end."""

    counts: Counter
    """Numbers of faults that struck and of other events, by name."""
    ledger: Ledger


def simulate(seed, *, faults=1.0, make_source=make_static_source):
    """Drive one study to its end through all faults of the seed, and check every promise.

    Args:
        seed: seed of the faults and of the order of events.
        faults: likelihood of each kind of fault, from 0 (none) to 1 (often).
        make_source: function from a ledger to the source of runs.

    Raises:
        BrokenPromiseError: the driver or the ledger broke a promise.
    """
    world = World(seed=seed, faults=faults, make_source=make_source)
    with replace_disk(world):
        for number in range(MAX_LIVES):
            world.calm = world.calm or number > MAX_LIVES // 2
            world.counts["drivers"] += 1
            try:
                if run_driver(world, should_stop=world.strikes(0.3, "orderly stops")):
                    break
            except (PowerLossError, KilledError) as crash:
                world.disk.reopen(isinstance(crash, PowerLossError))
            except StaleDriver:
                world.counts["stale drivers refused"] += 1
            except RunsFail:
                world.counts["studies ended by failures"] += 1
        else:
            raise BrokenPromiseError("the study did not end")
        world.calm, num_calls = True, world.counts["calls"]
        run_driver(world)
        if world.counts["calls"] > num_calls:
            raise BrokenPromiseError("a complete study trained a run")
        ledger = Ledger.read(STUDY)
        # Callers read the records after the fake disk is gone.
        records = ledger.read_records()
        ledger.read_records = lambda kind=None: [
            record for record in records if kind in (None, record.kind)
        ]
        check_result(world, ledger)
    return SimulatedStudy(world.counts, ledger)


def check_result(world, ledger):
    """Check what must hold in the end after any faults."""
    for spec, result in ((run.spec, run.result) for run in ledger.read_runs()):
        if result.status == "pruned":
            if (
                result.num_steps not in RUNGS
                or result != make_pruned_outcome(spec, result.num_steps, result.reason)[0]
            ):
                raise BrokenPromiseError("a pruned run has another result")
        elif result.status != "failed":
            if result != make_outcome(spec)[0]:
                raise BrokenPromiseError("a run has another result")
        elif world.faults == 0 and spec.id != POISON:
            raise BrokenPromiseError(f"failed: {result.reason}")
        else:
            check_failed(ledger, spec.id)
    if world.make_source is make_static_source and set(ledger.get_results()) != set(IDS):
        raise BrokenPromiseError("a run has no outcome")
    if world.disk.checkpoints:
        raise BrokenPromiseError("a checkpoint was left behind")
    for run_id in IDS:
        num_own, num_in_a_row, _ = count_failures_since_progress(ledger, run_id)
        if num_own > MAX_ATTEMPTS or num_in_a_row > MAX_FAILURES_IN_A_ROW:
            raise BrokenPromiseError("a run was tried too often")


def count_failures_since_progress(ledger, run_id):
    """Return two counts of a run's failures since it last saved a later step, and whether it was
    alone on its worker at the last failure of the count that decides.

    The first count has the failures that may be the run's own fault; the second has all of them
    except preemptions and those that split its batch.
    """
    pardoned = max((record.seq for record in ledger.read_records("pardon")), default=-1)
    num_own, num_in_a_row, step = 0, 0, 0
    alone, alone_in_a_row = False, False
    num_microbatches = 1
    for record in ledger.read_records("lost"):
        if record.key.partition("/")[0] == run_id and record.seq > pardoned:
            failure = canon.decode(FailedAttempt, record.body)
            if failure.step > step:
                num_own, num_in_a_row, step = 0, 0, failure.step
            # A batch has two sequences, so it can be split once.
            can_split = failure.cause == "out_of_memory" and num_microbatches == 1
            num_microbatches += can_split
            if can_split or failure.cause == "preempted":
                continue
            num_in_a_row, alone_in_a_row = num_in_a_row + 1, failure.alone
            if failure.cause != "lost_worker":
                num_own, alone = num_own + 1, failure.alone
    return num_own, num_in_a_row, alone if num_own >= MAX_ATTEMPTS else alone_in_a_row


def check_failed(ledger, run_id):
    """Check that a failed run failed as often as it may, through its own fault or in a row, and was
    alone at the last failure.
    """
    num_own, num_in_a_row, alone = count_failures_since_progress(ledger, run_id)
    if not alone or (num_own < MAX_ATTEMPTS and num_in_a_row < MAX_FAILURES_IN_A_ROW):
        raise BrokenPromiseError(
            f"given up after {num_own} failures of its own, {num_in_a_row} in a row, alone: {alone}"
        )
