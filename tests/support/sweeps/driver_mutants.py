"""Mutants of the driver, the pruner and the ledger, and the search for a simulated study that
catches each.

A mutant is a function that plants one bug; its docstring says which. `simulate` of `simulation.py`
must notice the bug, in a study with a list of runs or in a search that prunes trials.
"""

import dataclasses
import functools
import math
import re

import pytest
import simulation
import sweep_fakes
from simulation import BrokenPromiseError, KilledError, PowerLossError, simulate
from spaces import SPACE

from forerun._proxies.core.spec import Run
from forerun._sweeps.run import driver as driver_module
from forerun._sweeps.run import pool, retries
from forerun._sweeps.run.worker_states import WorkerStates
from forerun._sweeps.search.pruning import SearchPruner
from forerun._sweeps.search.source import Search, SearchSource
from forerun._sweeps.store import chain
from forerun._sweeps.store.errors import SweepError
from forerun._sweeps.store.ledger import Ledger


def get_fault_likelihood(seed):
    """Return the likelihood of faults for a seed.

    Every fourth study has no random faults. It may still contain a run that kills its workers, or
    one that is too large for them.
    """
    return float(seed % 4 > 0)


make_run = functools.partial(sweep_fakes.make_run, num_steps=simulation.NUM_STEPS)


def make_pruning_source(ledger):
    """Return the source of a search that prunes."""
    search = Search(SPACE, 1, 4, sampler="random", num_startup=simulation.NUM_STARTUP)
    pruner = SearchPruner(search, simulation.STUDY, num_steps=simulation.NUM_STEPS)
    return SearchSource(search, make_run, ledger, stage="sweep", num_trials=16, pruner=pruner)


def list_decisions(ledger):
    """Return a search's points and the result of each, with the reason for pruning."""
    points = [record.body for record in ledger.read_records("suggestion")]
    return points, [ledger.get_first_results()[make_run(point).id] for point in points]


@functools.cache
def run_calm_search():
    """Return the decisions of a pruning search without faults."""
    return list_decisions(simulate(1, faults=0.0, make_source=make_pruning_source).ledger)


def compare_with_calm_search(ledger):
    """Return whether a pruning search has decided as the one without faults: "same" or "different".

    Return "not comparable" if a run has failed: then the sampler got other outcomes.
    """
    if any(result.status == "failed" for result in ledger.get_results().values()):
        return "not comparable"
    return "same" if list_decisions(ledger) == run_calm_search() else "different"


def skip_fsync(patch):
    """Leave commits to the kernel."""
    execute = simulation.Connection.execute

    def execute_unsynced(self, sql, parameters=()):
        return execute(self, re.sub(r"(PRAGMA synchronous =) \w+", r"\1 OFF", sql), parameters)

    patch.setattr(simulation.Connection, "execute", execute_unsynced)


def skip_fencing(patch):
    """Add a record at the end of the chain, even if another driver wrote the last one."""
    write = chain.write

    def write_at_end(connection, *records):
        seq, digest = connection.execute("SELECT seq, hash FROM head WHERE one = 1").fetchone()
        for record in records:
            linked = chain.make_record(seq + 1, record.kind, record.key, record.text, digest)
            write(connection, linked)
            seq, digest = linked.seq, linked.hash

    patch.setattr(chain, "write", write_at_end)


def report_twice(patch):
    """Report every result that comes in, even if its run has one already."""
    handle_finished = driver_module.Driver._handle_finished

    def mutant(self, index, finished):
        known = [run for run in self._ledger.iterate_runs() if run.result.id == finished.result.id]
        handle_finished(self, index, finished)
        self._outcomes += known

    patch.setattr(driver_module.Driver, "_handle_finished", mutant)


def forget_attempts(patch):
    """Make a new driver count attempts from zero."""
    init = retries.FailureLog.__init__

    def mutant(self, ledger):
        init(self, ledger)
        self._failures.clear()

    patch.setattr(retries.FailureLog, "__init__", mutant)


def use_wall_clock_for_timeouts(patch):
    """Measure timeouts by the wall clock."""
    patch.setattr(simulation.SimulatedPool, "clock", simulation.SimulatedPool.wall)


def call_before_reply(patch):
    """Count a worker as idle after each report, even while its next call is in flight."""
    update_worker = WorkerStates._update_worker

    def mutant(self, report, now):
        update_worker(self, report, now)
        self._idle.add(report.worker)

    patch.setattr(WorkerStates, "_update_worker", mutant)


def remove_timeouts(patch):
    """Give calls no timeout."""
    patch.setattr(
        "forerun._sweeps.run.worker_states.AdaptiveTimeouts.get_timeout",
        lambda self, bank_key: math.inf,
    )


def blame_own_absence(patch):
    """Make a suspended driver take its own absence for its workers' silence."""
    patch.setattr(
        "forerun._sweeps.run.worker_states.WorkerStates._discount_absence",
        lambda self, away_seconds: None,
    )


def forget_failed_attempts(patch):
    """Do not queue a run again whose attempt failed."""
    patch.setattr(driver_module.Driver, "_fail_attempt", lambda self, open_run, failure: None)


def forget_results(patch):
    """Make a new driver ignore the results that are recorded."""
    queue_runs = driver_module.Driver.queue_runs

    def mutant(self):
        settled, self.settled = self.settled, {}
        try:
            queue_runs(self)
        finally:
            self.settled = settled

    patch.setattr(driver_module.Driver, "queue_runs", mutant)


def commit_with_late_curves(self):
    """Commit as `Driver._commit` does, with the curves after the records."""
    ended, self._ended = self._ended, []
    if ended:
        runs = [run for run, _ in ended]
        self._ledger.commit_all(runs)
        driver_module.store_curves(self._study_dir, [(run.result, curve) for run, curve in ended])
        for run in runs:
            driver_module.drop_checkpoints(self._study_dir, run.result.id)
        self._outcomes += runs


def store_curve_after_result(patch):
    """Store curves after the records of their runs."""
    patch.setattr(driver_module.Driver, "_commit", commit_with_late_curves)


def drop_checkpoint_first(patch):
    """Remove a checkpoint before the run's result is recorded."""
    keep_outcome = driver_module.Driver._keep_outcome

    def mutant(self, open_run, result, curve):
        driver_module.drop_checkpoints(self._study_dir, result.id)
        keep_outcome(self, open_run, result, curve)

    patch.setattr(driver_module.Driver, "_keep_outcome", mutant)


def record_first_of_several(patch):
    """Record only one of several outcomes that come in at once."""
    commit_all = Ledger.commit_all

    def mutant(self, runs):
        commit_all(self, runs[:1])

    patch.setattr(Ledger, "commit_all", mutant)


def leave_checkpoints(patch):
    """Leave the checkpoints of ended runs behind."""
    patch.setattr(driver_module, "drop_stale_checkpoints", lambda *_: None)
    patch.setattr(simulation, "replace_disk", keep_checkpoints(simulation.replace_disk))


def keep_checkpoints(replace_disk):
    """Return a `replace_disk` whose fake disk drops no stale checkpoints."""

    def replace_disk_without_dropping(world):
        world.disk.drop_stale_checkpoints = lambda *_: None
        return replace_disk(world)

    return replace_disk_without_dropping


def stop_without_saving(patch):
    """Stop without asking workers to save."""
    patch.setattr(driver_module.Driver, "stop_workers", lambda self, grace_seconds: iter(()))


def never_retry_alone(patch):
    """Never retry a run alone, and blame it for failures that it shared."""
    patch.setattr(
        driver_module,
        "FailedAttempt",
        lambda **fields: retries.FailedAttempt(**fields | {"alone": True}),
    )
    plan_retry = retries.FailureLog.plan_retry
    patch.setattr(
        retries.FailureLog,
        "plan_retry",
        lambda *arguments: dataclasses.replace(plan_retry(*arguments), needs_own_worker=False),
    )


def blame_kills(patch):
    """Give up a run after few kills from outside, as if they were its own failures."""
    patch.setattr(retries, "MAX_FAILURES_IN_A_ROW", simulation.MAX_ATTEMPTS)


def forget_memory_failures(patch):
    """Retry a run that ran out of memory without splitting its batch."""
    plan_retry = retries.FailureLog.plan_retry

    def mutant(self, run_id, spec, max_attempts):
        return dataclasses.replace(
            plan_retry(self, run_id, spec, max_attempts), num_microbatches={}
        )

    patch.setattr(retries.FailureLog, "plan_retry", mutant)


MUTANTS = (
    skip_fsync,
    skip_fencing,
    report_twice,
    forget_attempts,
    use_wall_clock_for_timeouts,
    remove_timeouts,
    blame_own_absence,
    forget_failed_attempts,
    forget_results,
    store_curve_after_result,
    drop_checkpoint_first,
    leave_checkpoints,
    stop_without_saving,
    never_retry_alone,
    forget_memory_failures,
    blame_kills,
    call_before_reply,
    record_first_of_several,
)


def judge_by_later_trials(patch):
    """Judge a trial by every trial known so far, including later ones."""
    begin = SearchPruner.begin
    patch.setattr(
        SearchPruner,
        "begin",
        lambda self, *args, **more: begin(self, *args, **(more | {"num_seen": 10**6})),
    )


def keep_pruned_slot(patch):
    """Record the outcome of a pruned run, but let it continue in its slot."""
    handle_paused = driver_module.Driver._handle_paused

    def mutant(self, index, paused):
        run = self._states.workers[index].slots.get(paused.slot)
        handle_paused(self, index, paused)
        if run is not None:
            self._states.workers[index].slots[paused.slot] = run

    patch.setattr(driver_module.Driver, "_handle_paused", mutant)


def free_slot_without_recording(patch):
    """Free the slot of a pruned run without recording its outcome."""
    keep_outcome = driver_module.Driver._keep_outcome

    def mutant(self, open_run, result, curve):
        if result.status != "pruned":
            keep_outcome(self, open_run, result, curve)

    patch.setattr(driver_module.Driver, "_keep_outcome", mutant)


def report_pruned_twice(patch):
    """Report pruned runs twice."""
    keep_outcome = driver_module.Driver._keep_outcome

    def mutant(self, open_run, result, curve):
        keep_outcome(self, open_run, result, curve)
        self._outcomes += (
            [Run(spec=open_run.spec, result=result)] if result.status == "pruned" else []
        )

    patch.setattr(driver_module.Driver, "_keep_outcome", mutant)


def accept_uncut_curve(patch):
    """Accept the curve of a paused run as it is, although the run made steps after its pause."""
    patch.setattr(
        driver_module,
        "validate_paused",
        lambda paused, run_id, num_steps: pool.validate_finished(paused),
    )


def forget_pruned_runs(patch):
    """Make a new driver count only finished runs as ended."""
    patch.setattr(
        "forerun._sweeps.store.ledger.Ledger.get_first_results", lambda self: self.get_results()
    )


def store_pruned_curve_after_record(patch):
    """Store the curves of pruned runs after their records."""
    commit = driver_module.Driver._commit

    def mutant(self):
        pruned = any(run.result.status == "pruned" for run, _ in self._ended)
        (commit_with_late_curves if pruned else commit)(self)

    patch.setattr(driver_module.Driver, "_commit", mutant)


PRUNING_MUTANTS = (
    judge_by_later_trials,
    keep_pruned_slot,
    free_slot_without_recording,
    report_pruned_twice,
    accept_uncut_curve,
    forget_pruned_runs,
    store_pruned_curve_after_record,
)


NUM_SEEDS_TRIED = 400
"""Number of seeds after which a mutant counts as not caught."""


def find_first_caught(mutate, seeds=range(NUM_SEEDS_TRIED)):
    """Return the first of the seeds at which a mutant is caught, and the error; None if it never
    is.
    """
    pruning = mutate in PRUNING_MUTANTS
    options = {"make_source": make_pruning_source} if pruning else {}
    # Fewer faults in searches, because a search with a failed run cannot be compared
    fault_share = 0.5 if pruning else 1.0
    run_calm_search()  # cached, so that it runs without the mutant
    with pytest.MonkeyPatch.context() as patch:
        mutate(patch)
        for seed in seeds:
            try:
                study = simulate(seed, faults=fault_share * get_fault_likelihood(seed), **options)
            except (
                BrokenPromiseError,
                SweepError,
                KeyError,
                KilledError,
                PowerLossError,
            ) as error:
                return seed, f"{type(error).__name__}: {error}"
            if pruning and compare_with_calm_search(study.ledger) == "different":
                return seed, "another search"
    return None
