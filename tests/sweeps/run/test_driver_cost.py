"""Tests that a trial costs the driver as much at the end of a long search as at its beginning.

Function calls are counted, because seconds vary; the memory that a trial leaves is bounded.
"""

import cProfile
import gc
import tracemalloc
from collections import deque

from soak_case import TrivialHost
from spaces import SPACE
from sweep_fakes import get_bank_key, make_ended_run, make_run, make_spec

from forerun._proxies.core import canon
from forerun._proxies.core.spec import RunSpec
from forerun._sweeps.run.driver import drive
from forerun._sweeps.run.pool import InlinePool, Report
from forerun._sweeps.run.worker_states import WorkerStates
from forerun._sweeps.search import samplers
from forerun._sweeps.search.source import Search, SearchSource, StaticSource
from forerun._sweeps.store.ledger import Ledger

MAX_GROWTH = 2.2
"""Maximum growth of the calls (`measure_growth`). The growth is 2 if all trials cost the same, and
4 if each trial reads all earlier trials."""
MAX_GROWTH_BY_WORKERS = 1.05
"""Maximum ratio of the calls per report with 64 workers to the calls with 8 workers."""
MAX_BYTES_PER_TRIAL = 750
"""Maximum memory that a trial leaves; a result takes 480 bytes, and a record would exceed this."""


def count_calls(study_dir, num_trials):
    """Return the function calls of a search, from the plan to the last outcome."""
    profile = cProfile.Profile()
    with Ledger.open(study_dir, {}, create=True) as ledger:
        search = Search(SPACE, 1, 3, num_startup=4)
        source = SearchSource(search, make_run, ledger, stage="s", num_trials=num_trials)
        profile.enable()
        drive(source, InlinePool(TrivialHost), ledger, study_dir, bank_key_for=get_bank_key)
        profile.disable()
    return sum(entry.callcount for entry in profile.getstats())


def measure_growth(folder):
    """Return the ratio of two numbers of calls: those that trials 30 to 60 add to a search, over
    those that trials 15 to 30 add.
    """
    count_calls(folder / "warm-up", 6)  # imports and caches
    calls_15, calls_30, calls_60 = (count_calls(folder / str(n), n) for n in (15, 30, 60))
    return (calls_60 - calls_30) / (calls_30 - calls_15)


def test_twice_the_trials_take_twice_the_calls(tmp_path, monkeypatch):
    monkeypatch.setattr("forerun._sweeps.search.past_trials.NUM_BEST_TRIALS", 3)
    monkeypatch.setattr(samplers, "MAX_TRIALS_SHOWN", 8)
    assert measure_growth(tmp_path) < MAX_GROWTH


def test_calls_grow_faster_without_the_bound_of_the_sampler(tmp_path):
    """Check that the test above can fail: TPE without its bound reads all trials."""
    assert measure_growth(tmp_path) > MAX_GROWTH


class RoundRobinPool:
    """Workers with one slot whose calls end one by one, in turn; a run takes ten calls."""

    calls_ahead = 1

    def __init__(self, num_workers):
        self.num_workers, self.num_reports, self.calls = num_workers, 0, deque()
        self.runs = {}  # worker -> [spec, steps done]
        self.may_continue = {}  # worker -> whether its last call ended no run

    def start(self, worker, call):
        if call.admit:
            self.runs[worker] = [canon.decode(RunSpec, call.admit[0][1]), 0]
        self.calls.append((worker, call))

    def wait(self, timeout_seconds):
        worker, call = self.calls.popleft()
        run, ended = self.runs.get(worker), ()
        skipped = call.is_ahead and not self.may_continue[worker]
        if run and not skipped:
            run[1] += 1
            if run[1] == 10:
                ended = (make_ended_run(0, self.runs.pop(worker)[0]),)
        self.may_continue[worker] = not ended
        self.num_reports += 1
        return [
            Report(
                worker=worker,
                finished=ended,
                steps={0: run[1]} if run and not ended else {},
                skipped=skipped,
            )
        ]


def count_calls_per_report(study_dir, num_workers):
    """Return the driver's function calls per report, for two runs per worker."""
    pool, profile = RoundRobinPool(num_workers), cProfile.Profile()
    specs = [make_spec(seed=seed, num_steps=10, num_slots=1) for seed in range(2 * num_workers)]
    with Ledger.open(study_dir, {}, create=True) as ledger:
        profile.enable()
        drive(
            StaticSource(specs, get_bank_key),
            pool,
            ledger,
            study_dir,
            bank_key_for=get_bank_key,
            clock=lambda: 0.0,
        )
        profile.disable()
        assert len(ledger.read_runs()) == len(specs)
    return sum(entry.callcount for entry in profile.getstats()) / pool.num_reports


def test_cost_of_a_report_does_not_grow_with_the_workers(tmp_path):
    count_calls_per_report(tmp_path / "first", 2)
    few, many = (count_calls_per_report(tmp_path / str(number), number) for number in (8, 64))
    assert many < MAX_GROWTH_BY_WORKERS * few


def test_cost_grows_for_a_driver_that_reads_all_workers(tmp_path, monkeypatch):
    """Check that the test above can fail."""
    monkeypatch.setattr(
        WorkerStates,
        "is_busy",
        property(
            lambda self: sum(len(worker.kind) for worker in self.workers if worker.num_calls) > 0
        ),
    )
    few, many = (count_calls_per_report(tmp_path / str(number), number) for number in (8, 64))
    assert many > MAX_GROWTH_BY_WORKERS * few


def measure_memory(study_dir, num_trials):
    """Return the bytes in memory after a search, as it ran and as it is opened again."""
    num_bytes = []
    for _ in range(2):
        gc.collect()
        tracemalloc.start()
        with Ledger.open(study_dir, {}, create=True) as ledger:
            search = Search(SPACE, 1, 3, sampler="random")
            source = SearchSource(search, make_run, ledger, stage="s", num_trials=num_trials)
            drive(source, InlinePool(TrivialHost), ledger, study_dir, bank_key_for=get_bank_key)
            gc.collect()
            # Without Python's table of interned names, which grows by megabytes at some trial
            num_bytes.append(
                sum(
                    trace.size for trace in tracemalloc.take_snapshot().traces if trace.size < 2**20
                )
            )
            tracemalloc.stop()
            assert len(ledger.get_results()) == num_trials
    return num_bytes


def test_trial_leaves_only_its_result_in_memory(tmp_path):
    """The result takes 480 bytes, also when the search is opened again; a record, a spec or a point
    would take more.
    """
    measure_memory(tmp_path / "first", 6)
    few, many = (measure_memory(tmp_path / str(number), number) for number in (40, 120))
    bytes_per_trial = [(more - less) / (120 - 40) for less, more in zip(few, many, strict=True)]
    assert max(bytes_per_trial) < MAX_BYTES_PER_TRIAL
