"""A trial costs the driver as much at the end of a long search as at its beginning: calls are
counted, not seconds; and what it leaves in memory is bounded.
"""

import cProfile
import gc
import tracemalloc
from collections import deque

from soak_case import TrivialHost
from spaces import SPACE
from sweep_fakes import bank_key, finished, make_run, make_spec, num_slots

from proxies.core import canon
from proxies.core.spec import RunSpec
from sweeps.run.crew import Crew
from sweeps.run.driver import drive
from sweeps.run.pool import InlinePool, Report
from sweeps.search import samplers
from sweeps.search.source import Search, SearchSource, StaticSource
from sweeps.store.ledger import Ledger


def calls(study_dir, num_trials):
    """Function calls that a search of so many trials takes, from the plan to the last outcome."""
    profile = cProfile.Profile()
    with Ledger.open(study_dir, {}, create=True) as ledger:
        search = Search(SPACE, 1, 3, num_startup=4)
        source = SearchSource(search, make_run, ledger, stage="s", num_trials=num_trials)
        profile.enable()
        drive(
            source,
            InlinePool(TrivialHost),
            ledger,
            study_dir,
            num_slots_for=num_slots,
            bank_key_for=bank_key,
        )
        profile.disable()
    return sum(entry.callcount for entry in profile.getstats())


def test_a_search_of_twice_the_trials_takes_twice_the_calls(tmp_path, monkeypatch):
    monkeypatch.setattr("sweeps.search.past_trials.NUM_BEST", 3)
    monkeypatch.setattr(samplers, "MOST_SHOWN", 8)
    calls(tmp_path / "first", 6)  # imports and caches
    first, second, third = (calls(tmp_path / str(number), number) for number in (15, 30, 60))
    assert (third - second) / (second - first) < 2.2, (
        "2 where each trial costs the same, 4 where each looks at all"
    )


def test_it_would_be_noticed(tmp_path, monkeypatch):
    """The mutation check: TPE without its bound looks at all."""
    calls(tmp_path / "first", 6)
    first, second, third = (calls(tmp_path / str(number), number) for number in (15, 30, 60))
    assert (third - second) / (second - first) > 2.2


class Turns:
    """Workers of one slot whose calls end one by one, in turn; a run takes ten."""

    calls_ahead = 1

    def __init__(self, num_workers):
        self.num_workers, self.num_reports, self.calls = num_workers, 0, deque()
        self.runs, self.may_go_on = {}, {}

    def start(self, worker, call):
        if call.admit:
            self.runs[worker] = [canon.decode(RunSpec, call.admit[0][1]), 0]
        self.calls.append((worker, call))

    def wait(self, timeout_seconds):
        worker, call = self.calls.popleft()
        held, ended = self.runs.get(worker), ()
        skipped = call.ahead and not self.may_go_on[worker]
        if held and not skipped:
            held[1] += 1
            if held[1] == 10:
                ended = (finished(0, self.runs.pop(worker)[0]),)
        self.may_go_on[worker] = not ended
        self.num_reports += 1
        return [
            Report(
                worker=worker,
                finished=ended,
                steps={0: held[1]} if held and not ended else {},
                skipped=skipped,
            )
        ]


def calls_a_report(study_dir, num_workers):
    """Function calls of the driver, two runs a worker."""
    pool, profile = Turns(num_workers), cProfile.Profile()
    specs = [make_spec(seed=seed, num_steps=10, num_slots=1) for seed in range(2 * num_workers)]
    with Ledger.open(study_dir, {}, create=True) as ledger:
        profile.enable()
        drive(
            StaticSource(specs, bank_key),
            pool,
            ledger,
            study_dir,
            num_slots_for=num_slots,
            bank_key_for=bank_key,
            clock=lambda: 0.0,
        )
        profile.disable()
        assert len(ledger.runs()) == len(specs)
    return sum(entry.callcount for entry in profile.getstats()) / pool.num_reports


def test_a_report_costs_as_many_calls_whatever_the_number_of_workers(tmp_path):
    calls_a_report(tmp_path / "first", 2)
    few, many = (calls_a_report(tmp_path / str(number), number) for number in (8, 128))
    assert many < 1.05 * few


def test_a_driver_that_looks_at_all_its_workers_would_be_noticed(tmp_path, monkeypatch):
    """The mutation check."""
    monkeypatch.setattr(
        Crew,
        "busy",
        property(lambda self: sum(len(w.kind) for w in self.workers if w.num_calls) > 0),
    )
    few, many = (calls_a_report(tmp_path / str(number), number) for number in (8, 128))
    assert many > 1.05 * few


def kept_bytes(study_dir, num_trials):
    """What a search of so many trials has in memory when its last has ended: as it ran, and as it
    is opened again.
    """
    held = []
    for _ in range(2):
        gc.collect()
        tracemalloc.start()
        with Ledger.open(study_dir, {}, create=True) as ledger:
            search = Search(SPACE, 1, 3, sampler="random")
            source = SearchSource(search, make_run, ledger, stage="s", num_trials=num_trials)
            drive(
                source,
                InlinePool(TrivialHost),
                ledger,
                study_dir,
                num_slots_for=num_slots,
                bank_key_for=bank_key,
            )
            gc.collect()
            # Python's table of interned names grows by megabytes at once, in whatever trial that
            # is.
            held.append(
                sum(
                    trace.size for trace in tracemalloc.take_snapshot().traces if trace.size < 2**20
                )
            )
            tracemalloc.stop()
            assert len(ledger.results()) == num_trials
    return held


def test_a_trial_leaves_its_result_in_memory_and_no_more(tmp_path):
    """Not its records, its spec or a dictionary of its point: 480 bytes, also where the search is
    opened again.
    """
    kept_bytes(tmp_path / "first", 6)
    few, many = (kept_bytes(tmp_path / str(number), number) for number in (50, 200))
    assert max((more - less) / 150 for less, more in zip(few, many, strict=True)) < 750
