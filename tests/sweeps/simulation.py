"""A whole study under one seed: driver and ledger as they are, over a fake disk, fake clocks and a
fake pool.

What is ours is real: `drive`, its crew, leases and losses, `Ledger`, `chain` with its SQL. What is
fake:

- the disk: SQLite runs in memory, and a commit is durable only if the connection has asked for full
  synchronisation; when the power goes, any commits since the last durable one may be gone. SQLite's
  own journal is believed, and so are the renames of curve files and checkpoints, which other tests
  cut at every system call;
- the clocks: a monotonic one, and a wall clock that jumps by hours;
- the pool: workers finish in any order, die, hang, run out of memory, are pre-empted, report twice,
  late or nonsense; their slots go on from checkpoints, some of which are damaged, wait where they
  are to be looked at, and are given up;
- the rule by which a search prunes, and what its files say of a curve;
- the driver's fate: it is told to stop, killed, or left for dead while another takes the study
  over.

Every promise that can be seen from outside is asserted as it goes: `BrokenPromiseError`.
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
from unittest import mock

from sweep_fakes import bank_key, make_spec, num_slots, outcome, pruned_outcome

from proxies.core import canon
from proxies.core.spec import RunSpec
from sweeps.run import driver
from sweeps.run import driver as driver_module
from sweeps.run.driver import drive
from sweeps.run.lost_runs import MOST_IN_A_ROW, Loss
from sweeps.run.pool import Finished, Report
from sweeps.search import pruning as pruner_module
from sweeps.search.source import StaticSource
from sweeps.store import chain
from sweeps.store import ledger as ledger_module
from sweeps.store.errors import RunsFail, StaleDriver
from sweeps.store.ledger import Ledger

NUM_STEPS = 6
HANG_SECONDS = 150.0
MAX_ATTEMPTS = 4
NUM_WORKERS = 2
MAX_LIVES = 60
SPECS = [
    make_spec(seed=seed, width=width, num_steps=NUM_STEPS)
    for width in (32, 64)
    for seed in range(2)
]
SPECS.append(make_spec(log2_lr=-1, num_steps=NUM_STEPS))
IDS = [spec.id for spec in SPECS]
KNOWN_IDS = {id(spec): spec.id for spec in SPECS}
RUNS = dict(zip(IDS, SPECS, strict=True))
"""By id, every run that a worker has seen."""
POISON, HOG = IDS[1], IDS[3]
"""In some seeds: the run that kills every worker that holds it, and the one that fits in 4 parts
alone."""


class BrokenPromiseError(AssertionError):
    """What must not happen has happened."""


class PowerLossError(BaseException):
    """The machine is gone."""


class KilledError(BaseException):
    """The driver's process is gone; what it had written is with the kernel."""


@dataclasses.dataclass
class World:
    """What outlives a driver."""

    seed: int
    faults: float
    """How likely each kind of fault is, at each opportunity: 0, none; 1, often."""
    make_source: Callable
    """From a ledger to what is to be run."""
    counts: Counter = dataclasses.field(default_factory=Counter)

    def __post_init__(self):
        self.random = random.Random(self.seed)
        self.calm = self.faults == 0
        self.poisoned = self.seed % 3 == 0
        self.hungry = self.seed % 5 == 0
        self.now, self.wall = 0.0, 1e9
        self.disk = Disk(self)
        self.told: dict[str, object] = {}
        self.late: list[Finished] = []
        self.nested = False

    def happens(self, share, what):
        """Whether a fault strikes now."""
        strikes = not self.calm and self.random.random() < share * self.faults
        self.counts[what] += strikes
        return strikes


def in_memory():
    """A database that whichever thread collects the garbage may close."""
    return sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)


class Disk:
    """One SQLite file and the curves and checkpoints beside it."""

    def __init__(self, world):
        self.world = world
        self.live = in_memory()
        self.images = [b""]
        """The durable state, and the commits since then that are not."""
        self.curves: set[tuple[str, bool]] = set()
        """By run, and whether of the whole run or of one that was pruned."""
        self.checkpoints: dict[str, list] = {}
        """By run: [step, good], the newest first."""
        self.num_connections = self.last_writer = 0

    def __del__(self):
        self.live.close()

    def connect(self, *_, **__):
        self.num_connections += 1
        return Connection(self, self.num_connections)

    def committed(self, number, durable):
        if number < self.last_writer:
            raise BrokenPromiseError("a driver that was taken over has written")
        self.last_writer = number
        image = self.live.serialize()
        self.images = [image] if durable else [*self.images, image]

    def strike(self):
        """A moment at which the power may go, or the process."""
        if self.world.happens(0.01, "power losses"):
            raise PowerLossError
        if self.world.happens(0.005, "drivers killed"):
            raise KilledError

    def reopen(self, power_lost):
        """After a crash; a killed process loses nothing that was written."""
        if power_lost:
            self.images = [self.world.random.choice(self.images)]
        image = self.images[-1]
        self.live.close()
        self.live = in_memory()
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
        kept = self.checkpoints.get(run_id, [])
        if not kept or kept[0][0] < step:
            self.strike()
            good = not self.world.happens(0.3, "checkpoints damaged")
            self.checkpoints[run_id] = [[step, good], *kept][:2]

    def newest(self, run_id):
        return next((step for step, good in self.checkpoints.get(run_id, []) if good), 0)


class Connection:
    """What `chain` sees of the disk."""

    def __init__(self, disk, number):
        self.disk, self.number, self.synced, self.writes = disk, number, False, False

    def execute(self, sql, parameters=()):
        live = self.disk.live
        if sql.startswith("PRAGMA synchronous"):
            self.synced = sql.rpartition("=")[2].strip() in ("FULL", "EXTRA")
        self.writes |= sql.startswith(("INSERT", "UPDATE", "CREATE"))
        if sql != "COMMIT" or not self.writes:
            return live.execute(sql, parameters)
        self.writes = False
        self.disk.strike()  # before anything is written
        cursor = live.execute(sql)
        self.disk.committed(self.number, self.synced)
        self.disk.strike()  # written, and nobody has heard of it
        return cursor

    @property
    def in_transaction(self):
        return self.disk.live.in_transaction

    def close(self):
        pass


class Lock:
    """The lock of a filesystem on which advisory locks are worth nothing."""

    holder = {"host": "simulated", "pid": 1}  # noqa: RUF012

    def __init__(self, study_dir):
        pass

    def close(self):
        pass


class SimPool:
    """The workers of one driver."""

    num_workers = NUM_WORKERS
    calls_ahead = 1

    def __init__(self, world, ledger):
        self.world, self.random, self.disk, self.ledger = world, world.random, world.disk, ledger
        self.settled = set(ledger.first_results())
        self.events: list = []  # heap of (time, tie, generation, report)
        # slot -> [run id, step]
        self.slots: list[dict[int, list]] = [{} for _ in range(NUM_WORKERS)]
        self.keys, self.generation = [""] * NUM_WORKERS, [0] * NUM_WORKERS
        self.flight: list[tuple[bool, float] | None] = [None] * NUM_WORKERS  # (will report, since)
        self.waiting: list[object] = [None] * NUM_WORKERS  # the call behind the one under way
        self.last: list[object] = [None] * NUM_WORKERS
        self.may_go_on = [False] * NUM_WORKERS
        self.unsaved: set[int] = set()
        self.spoiled: set[str] = set()
        """Runs of which a worker has said nonsense while they waited."""
        self.suspended = False

    def clock(self):
        return self.world.now

    def wall(self):
        return self.world.wall + self.world.now

    def start(self, worker, call):
        if self.flight[worker] is None:
            self._begin(worker, call)
        elif self.waiting[worker] is None and call.ahead:
            self.waiting[worker] = call
        else:
            raise BrokenPromiseError(
                "more calls than may wait, or one that was made without the answer before it"
            )

    def _begin(self, worker, call):
        slots, world = self.slots[worker], self.world
        if call.ahead:
            if not self.may_go_on[worker]:
                self.flight[worker] = (True, world.now)
                steps = {slot: step for slot, (_, step) in slots.items()}
                self._push(world.now, worker, Report(worker=worker, steps=steps, skipped=True))
                return
            world.counts["went on"] += 1
            call = dataclasses.replace(self.last[worker], admit=())
        self.last[worker], self.may_go_on[worker] = call, False
        if call.bank_key != self.keys[worker]:
            self.keys[worker] = call.bank_key
            slots.clear()
        self._keep(slots, call)
        for slot, data in call.admit:
            run_id = _run_id(_key(data))
            self._check_admission(slots, slot, run_id, call)
            slots[slot] = [run_id, self.disk.newest(run_id)]
            world.counts["resumed"] += slots[slot][1] > 0
        world.counts["calls"] += 1
        ready = world.now + self.random.expovariate(1.0)
        hangs = world.happens(0.2, "workers hung")
        self.flight[worker] = (not hangs, world.now)
        self.unsaved.add(worker)
        if not hangs:
            trouble = self._trouble(worker, call)
            report = trouble or self._train(worker, call)
            self.may_go_on[worker] = not trouble and not report.needs_reply and call.seconds > 0
            self._push(ready, worker, report)
            if trouble:
                slots.clear()

    def _keep(self, slots, call):
        """Give up what is not held any more."""
        first = self.ledger.first_results()
        for slot in slots.keys() - call.hold.keys() | {
            slot for slot, _ in call.admit if slot in slots
        }:
            run_id = slots.pop(slot)[0]
            self.world.counts["given up"] += 1
            if run_id not in first and run_id not in self.spoiled:
                raise BrokenPromiseError("a run was given up without an outcome")
        if any(
            run_id in first and first[run_id].status == "pruned" for run_id, _ in slots.values()
        ):
            raise BrokenPromiseError("a run that was pruned goes on")

    def _check_admission(self, slots, slot, run_id, call):
        if slot in slots or slot >= call.num_slots or slot not in call.hold:
            raise BrokenPromiseError("admitted into an occupied slot, or into one that is not held")
        if run_id in self.settled:
            raise BrokenPromiseError("a run that had ended was run again")
        if (
            any(run_id == held for worker in self.slots for held, _ in worker.values())
            and run_id not in self.spoiled
        ):
            raise BrokenPromiseError("one run in two slots")
        self.world.counts["executions"] += 1

    def _trouble(self, worker, call):
        """A report of the worker's end, if it ends."""
        held = [run_id for run_id, _ in self.slots[worker].values()]
        if self.world.poisoned and POISON in held:
            return Report(worker=worker, error="Segmentation fault", cause="crashed")
        if self.world.hungry and HOG in held and call.num_microbatches < 2:
            return Report(worker=worker, error="can't allocate memory", cause="out_of_memory")
        for cause, share in (
            ("lost_worker", 0.5),
            ("preempted", 0.2),
            ("out_of_memory", 0.1),
            ("user_code", 0.1),
        ):
            if self.world.happens(share, cause):
                held = self.slots[worker].items()
                ends = [
                    self._finished(slot, run_id)
                    for slot, (run_id, _) in held
                    if call.hold[slot] is None
                ]
                # ended, but never reported
                self.world.late += [end for end in ends if self.random.random() < 0.5]
                return Report(worker=worker, error="gone", cause=cause)
        return None

    def _train(self, worker, call):
        slots, done = self.slots[worker], []
        for slot, held in sorted(slots.items()):
            pause, ahead = (
                call.hold[slot],
                held[1] + (self.random.randint(1, 3) if call.seconds else 0),
            )
            held[1] = ahead if pause is None else max(held[1], min(pause, ahead))
            if held[1] >= NUM_STEPS:
                del slots[slot]
                done.append(self._end(slot, held[0]))
        if call.save or self.random.random() < 0.3:
            for run_id, step in slots.values():
                if step:
                    self.disk.save(run_id, step)
            self.unsaved.discard(worker)
        # what still runs here is not reported as ended
        running = {run_id for run_id, _ in slots.values()}
        late = [end for end in self.world.late if end.result["id"] not in running]
        if late and self.world.happens(1.0, "late or double reports"):
            done.append(self.random.choice(late))
        self.random.shuffle(done)
        steps = {slot: step for slot, (_, step) in slots.items()}
        there = [
            (slot, *held)
            for slot, held in slots.items()
            if held[1] >= (call.hold[slot] or NUM_STEPS)
        ]
        paused = [self._paused(slot, run_id, step, call.hold[slot]) for slot, run_id, step in there]
        return Report(worker=worker, finished=tuple(done), steps=steps, paused=tuple(paused))

    def _paused(self, slot, run_id, step, pause):
        """What came of a run so far: at its pause, but for an engine that tells of where it is now,
        or nonsense.
        """
        self.world.counts["paused"] += 1
        uncut = self.world.happens(0.5, "curves not cut") if step > pause else False
        result, curve = json_pruned(run_id, step if uncut else pause)
        if self.world.happens(0.1, "pauses that are none"):
            result = result | {"num_steps": pause - 1}
        if result["num_steps"] != pause:
            self.spoiled.add(run_id)
        return Finished(slot=slot, result=result, curve=curve)

    def _end(self, slot, run_id):
        end = self._finished(slot, run_id)
        if self.world.happens(0.2, "results that are none"):
            return dataclasses.replace(end, result=end.result | {"loss_nats": float("nan")})
        self.world.late.append(end)
        return end

    def _finished(self, slot, run_id):
        result, curve = json_outcome(run_id)
        return Finished(slot=slot, result=result, curve=curve)

    def _push(self, at, worker, report):
        heapq.heappush(self.events, (at, self.random.random(), self.generation[worker], report))

    def wait(self, timeout_seconds):
        for flight in self.flight:
            if flight is not None and self.world.now - flight[1] > HANG_SECONDS + 7:
                raise BrokenPromiseError("a hung worker was not given up")
        if self.events:  # long waits for nobody would else always end in a crash
            self.world.disk.strike()
        if self.world.happens(0.02, "clock jumps"):
            self.world.wall += self.random.choice((-3600.0, 3600.0))
        if not self.world.nested and self.world.happens(0.02, "takeovers"):
            self._taken_over()
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
                self._next(report)
        if not reports:
            # a lazy clock: nobody is due
            self.world.now = deadline if self.events else deadline + 4.5
        return reports

    def _next(self, report):
        """The call that waited begins; behind one that failed, it is given up."""
        worker = report.worker
        self.flight[worker], call, self.waiting[worker] = None, self.waiting[worker], None
        if call is not None and report.error is None:
            self._begin(worker, call)

    def _taken_over(self):
        """This driver is as if dead for a while, and another one opens the study."""
        self.world.nested = self.suspended = True
        began = self.world.now
        try:
            with contextlib.suppress(KilledError, RunsFail):
                live(self.world, should_stop=self.random.random() < 0.5)
        finally:
            self.world.nested = False
        # nobody could notice a silence meanwhile, nor in the look that follows
        away = self.world.now - began + 5.0
        self.flight = [flight and (flight[0], flight[1] + away) for flight in self.flight]

    def restart(self, worker):
        flight, self.flight[worker], self.waiting[worker] = self.flight[worker], None, None
        if flight is not None and flight[0]:
            raise BrokenPromiseError("a live worker was given up")
        self.generation[worker] += 1
        self.slots[worker].clear()
        self.keys[worker] = ""

    def close(self):
        pass

    def check_stopped(self):
        """After an orderly stop: whoever could answer has saved what it holds."""
        for worker in self.unsaved:
            known = self.ledger.first_results().keys() | self.spoiled
            left = [step for run_id, step in self.slots[worker].values() if run_id not in known]
            if self.flight[worker] is None and any(left):
                raise BrokenPromiseError("a stop left a worker unsaved")


@functools.lru_cache(maxsize=64)
def json_outcome(run_id):
    result, curve = outcome(RUNS[run_id])
    return canon.to_json(result), canon.to_json(curve)


@functools.lru_cache(maxsize=256)
def json_pruned(run_id, num_steps):
    result, curve = pruned_outcome(RUNS[run_id], num_steps)
    return canon.to_json(result), canon.to_json(curve)


RUNGS = (2, 4)
NUM_STARTUP = 3


def rungs(num_steps):
    return RUNGS


def verdict(*, point, losses_nats, seen, num_startup, **_):
    """Worse than the better half of those that came as far; its words name everything that it was
    shown.
    """
    step = len(losses_nats)
    others = sorted(trial.losses_nats[step - 1] for trial in seen if len(trial.losses_nats) >= step)
    if len(seen) < num_startup or losses_nats[-1] <= others[len(others) // 2]:
        return ""
    return f"trial at {sorted(point.items())} lost at step {step} among {len(seen)}"


def told_nats(space, point, losses_nats, seen):
    return losses_nats[-1] + 0.01 * len(seen)


def load_curve(study_dir, result):
    return (pruned_outcome if result.status == "pruned" else outcome)(
        RUNS[result.id], *_cut(result)
    )[1]


def _cut(result):
    return (result.num_steps,) if result.status == "pruned" else ()


_decode, _content_id = canon.decode, canon.content_id


def _key(value):
    return json.dumps(value, sort_keys=True)


@functools.lru_cache(maxsize=4096)
def _decoded(kind, text):
    return _decode(kind, json.loads(text))


@functools.lru_cache(maxsize=256)
def _run_id(text):
    """The id of a run as a worker gets it; its spec is kept."""
    spec = _decoded(RunSpec, text)
    RUNS[spec.id] = spec
    return spec.id


def remembered_decode(kind, value):
    """`canon.decode`, a pure function, with a memory."""
    return _decoded(kind, _key(value))


def remembered_id(value):
    """`canon.content_id`, the same, for the runs there are."""
    return KNOWN_IDS.get(id(value)) or _content_id(value)


@contextlib.contextmanager
def faked(world):
    """The driver's ways to the disk lead to the fake one."""
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
            (driver, "drop_stale_checkpoints", disk.drop_stale_checkpoints),
            (driver_module, "saved_step", lambda _, run_id: disk.newest(run_id)),
            (driver_module, "oom_kills", lambda: 0),
            (pruner_module, "rungs", rungs),
            (pruner_module, "verdict", verdict),
            (pruner_module, "told_nats", told_nats),
            (pruner_module, "load_curve", load_curve),
            (canon, "decode", remembered_decode),
            (canon, "content_id", remembered_id),
        ):
            stack.enter_context(mock.patch.object(module, name, fake))
        yield


def static_source(_):
    return StaticSource(SPECS, bank_key)


def live(world, *, should_stop=False):
    """One driver, from opening the study to its end; returns whether it got to the end of the
    work.
    """
    with contextlib.closing(Ledger.open(STUDY, {"seed": world.seed}, create=True)) as ledger:
        if set(world.told) - set(ledger.first_results()):
            raise BrokenPromiseError("an outcome that was reported is gone")
        if (
            not {(run.spec.id, run.result.status == "pruned") for run in ledger.runs()}
            <= world.disk.curves
        ):
            raise BrokenPromiseError("an outcome without its curve")
        pool = SimPool(world, ledger)
        left = [world.random.randrange(1, 20) if should_stop else 0]

        def told(event):
            for result in (run.result for run in event.outcomes):
                if result.id in world.told:
                    raise BrokenPromiseError("told twice")
                world.told[result.id] = result

        def stop():
            left[0] -= 1
            return should_stop and left[0] <= 0

        drive(
            world.make_source(ledger),
            pool,
            ledger,
            STUDY,
            num_slots_for=num_slots,
            bank_key_for=bank_key,
            max_attempts=MAX_ATTEMPTS,
            hang_seconds=HANG_SECONDS,
            clock=pool.clock,
            progress=told,
            should_stop=stop,
        )
        stopped = should_stop and left[0] <= 0
        if stopped and not pool.suspended:
            pool.check_stopped()
        return not stopped


STUDY = Path()
"""A folder with an empty `ledger.db`: its name is asked for, its bytes never."""


@contextlib.contextmanager
def study_folder(folder):
    """Where `simulate` may look whether there is a file."""
    global STUDY
    before, STUDY = STUDY, folder
    (folder / ledger_module.LEDGER_NAME).touch()
    try:
        yield
    finally:
        STUDY = before


def simulate(seed, *, faults=1.0, make_source=static_source):
    """Drive one study to its end, through whatever the seed has in store.

    Returns:
        What struck how often, and the ledger as it is read in the end.
    """
    world = World(seed=seed, faults=faults, make_source=make_source)
    with faked(world):
        for number in range(MAX_LIVES):
            world.calm = world.calm or number > MAX_LIVES // 2
            world.counts["drivers"] += 1
            try:
                if live(world, should_stop=world.happens(0.3, "orderly stops")):
                    break
            except (PowerLossError, KilledError) as crash:
                world.disk.reopen(isinstance(crash, PowerLossError))
            except StaleDriver:
                world.counts["stale drivers refused"] += 1
            except RunsFail:
                world.counts["studies refused"] += 1
        else:
            raise BrokenPromiseError("the study never got to its end")
        world.calm, before = True, world.counts["calls"]
        live(world)
        if world.counts["calls"] > before:
            raise BrokenPromiseError("a study that is done ran something")
        ledger = Ledger.read(STUDY)
        records = ledger.records()  # for those who ask once the fake disk is gone
        ledger.records = lambda kind=None: [
            record for record in records if kind in (None, record.kind)
        ]
        check(world, ledger)
    return world.counts, ledger


def check(world, ledger):
    """What must hold in the end, whatever has happened."""
    for spec, result in ((run.spec, run.result) for run in ledger.runs()):
        if result.status == "pruned":
            if (
                result.num_steps not in RUNGS
                or result != pruned_outcome(spec, result.num_steps, result.reason)[0]
            ):
                raise BrokenPromiseError("another result of a run that was pruned")
        elif result.status != "failed":
            if result != outcome(spec)[0]:
                raise BrokenPromiseError("another result")
        elif world.faults == 0 and spec.id != POISON:
            raise BrokenPromiseError(f"failed: {result.reason}")
        else:
            check_failed(ledger, spec.id)
    if world.make_source is static_source and set(ledger.results()) != set(IDS):
        raise BrokenPromiseError("a run has no outcome")
    if world.disk.checkpoints:
        raise BrokenPromiseError("a checkpoint was left behind")
    for run_id in IDS:
        own, in_a_row, _ = since_it_got_on(ledger, run_id)
        if own > MAX_ATTEMPTS or in_a_row > MOST_IN_A_ROW:
            raise BrokenPromiseError("tried more often than it may be")


def since_it_got_on(ledger, run_id):
    """A run's losses since it was last saved further on: those of its own, all, and whether it was
    alone at last.
    """
    pardoned = max((record.seq for record in ledger.records("pardon")), default=-1)
    own, in_a_row, step, alone, alone_in_a_row, parts = 0, 0, 0, False, False, 1
    for record in ledger.records("lost"):
        if record.key.partition("/")[0] == run_id and record.seq > pardoned:
            loss = canon.decode(Loss, record.body)
            own, in_a_row, step = (0, 0, loss.step) if loss.step > step else (own, in_a_row, step)
            fits_in_more = loss.cause == "out_of_memory" and parts == 1  # a batch has two sequences
            parts += fits_in_more
            if fits_in_more or loss.cause == "preempted":
                continue
            in_a_row, alone_in_a_row = in_a_row + 1, loss.alone
            if loss.cause != "lost_worker":
                own, alone = own + 1, loss.alone
    return own, in_a_row, alone if own >= MAX_ATTEMPTS else alone_in_a_row


def check_failed(ledger, run_id):
    """A run that failed was lost as often as it may be, for its own reasons or without end, and
    alone at the last.
    """
    own, in_a_row, alone = since_it_got_on(ledger, run_id)
    if not alone or (own < MAX_ATTEMPTS and in_a_row < MOST_IN_A_ROW):
        raise BrokenPromiseError(
            f"failed after {own} losses of its own, {in_a_row} in a row, alone: {alone}"
        )
