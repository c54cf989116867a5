"""The study under simulated disks, clocks, pools and fates: many seeds, and the planted bugs that
they catch.
"""

import dataclasses
import functools
import math
import re
from collections import Counter

import pytest
import simulation
import sweep_fakes
from simulation import BrokenPromiseError, KilledError, PowerLossError, simulate, study_folder
from spaces import SPACE

from proxies.core.spec import Run
from sweeps.run import driver, lost_runs, pool
from sweeps.run import driver as driver_module
from sweeps.run.crew import Crew
from sweeps.search.pruning import SearchPruner
from sweeps.search.source import Search, SearchSource
from sweeps.store import chain
from sweeps.store.errors import SweepError
from sweeps.store.ledger import Ledger

NUM_SEEDS, NUM_SEARCHES = 150, 40


@pytest.fixture(autouse=True)
def folder(tmp_path):
    with study_folder(tmp_path):
        yield


def faults(seed):
    """Every fourth study is left alone but for the run that kills its workers, or is too large for
    them.
    """
    return float(seed % 4 > 0)


def test_every_promise_holds_through_everything():
    counts = sum((simulate(seed, faults=faults(seed))[0] for seed in range(NUM_SEEDS)), Counter())
    struck = (
        "power losses",
        "drivers killed",
        "takeovers",
        "stale drivers refused",
        "orderly stops",
        "clock jumps",
        "workers hung",
        "lost_worker",
        "out_of_memory",
        "preempted",
        "user_code",
        "late or double reports",
        "results that are none",
        "checkpoints damaged",
        "resumed",
        "studies refused",
        "went on",
    )
    assert {what for what in struck if counts[what] < NUM_SEEDS / 20} == set(), (
        "some faults never strike"
    )
    assert counts["executions"] > 1.2 * NUM_SEEDS * len(simulation.SPECS), "nothing was run again"


def test_a_seed_is_a_study():
    """The same seed gives the same records, byte for byte: what fails can be looked at."""
    first, again, other = (
        [record.hash for record in simulate(seed)[1].records()] for seed in (11, 11, 13)
    )
    assert first == again != other


make_run = functools.partial(sweep_fakes.make_run, num_steps=simulation.NUM_STEPS)


def search_source(ledger):
    return SearchSource(Search(SPACE, 1, 4), make_run, ledger, stage="sweep", num_trials=12)


def pruning_source(ledger):
    search = Search(SPACE, 1, 4, sampler="random", num_startup=simulation.NUM_STARTUP)
    pruner = SearchPruner(search, simulation.STUDY, num_steps=simulation.NUM_STEPS)
    return SearchSource(search, make_run, ledger, stage="sweep", num_trials=16, pruner=pruner)


def test_a_search_is_the_same_through_all_of_it():
    calm = simulate(1, faults=0.0, make_source=search_source)[1]
    wanted = [record.body for record in calm.records("suggestion")]
    num_compared = 0
    for seed in range(20):
        ledger = simulate(seed, faults=0.1, make_source=search_source)[1]
        if all(result.status != "failed" for result in ledger.results().values()):
            assert [record.body for record in ledger.records("suggestion")] == wanted
            assert dict(ledger.results()) == dict(calm.results())
            num_compared += 1
    assert num_compared > 10


def told_by(ledger):
    """All that a search with pruning goes by: its points, and what came of each, with the
    reason.
    """
    points = [record.body for record in ledger.records("suggestion")]
    return points, [ledger.first_results()[make_run(point).id] for point in points]


@functools.cache
def calm_search():
    return told_by(simulate(1, faults=0.0, make_source=pruning_source)[1])


def decided_otherwise(ledger, calm):
    """Whether a search went another way than the calm one; None where a run was lost too often to
    tell.
    """
    if any(result.status == "failed" for result in ledger.results().values()):
        return None
    return told_by(ledger) != calm


def test_a_search_that_prunes_is_the_same_through_all_of_it():
    """Whoever dies, hangs, stops or is killed while runs wait, and in whatever order they come to
    wait.
    """
    calm = calm_search()
    pruned = [result.num_steps for result in calm[1] if result.status == "pruned"]
    assert len(pruned) > 3 and set(pruned) == set(simulation.RUNGS), (
        "the rule has something to do, at every rung"
    )
    counts, compared = Counter(), []
    for seed in range(NUM_SEARCHES):
        struck, ledger = simulate(seed, faults=0.2 * faults(seed), make_source=pruning_source)
        counts += struck
        compared.append(decided_otherwise(ledger, calm))
    assert True not in compared and compared.count(False) > NUM_SEARCHES / 2
    struck = (
        "power losses",
        "drivers killed",
        "takeovers",
        "orderly stops",
        "workers hung",
        "lost_worker",
        "resumed",
        "late or double reports",
        "curves not cut",
        "pauses that are none",
        "given up",
    )
    assert {what for what in struck if counts[what] < NUM_SEARCHES / 20} == set(), (
        "some faults never strike"
    )


# Planted bugs, each in our own code as it runs: the simulation must catch every one.


def no_fsync(patch):
    """Commits are left to the kernel."""
    execute = simulation.Connection.execute

    def lazy(self, sql, parameters=()):
        return execute(self, re.sub(r"(PRAGMA synchronous =) \w+", r"\1 OFF", sql), parameters)

    patch.setattr(simulation.Connection, "execute", lazy)


def no_fencing(patch):
    """A record is added wherever the chain ends, whoever wrote there last."""
    write = chain.write

    def careless(connection, *records):
        seq, digest = connection.execute("SELECT seq, hash FROM head WHERE one = 1").fetchone()
        for record in records:
            linked = chain.link(seq + 1, record.kind, record.key, record.text, digest)
            write(connection, linked)
            seq, digest = linked.seq, linked.hash

    patch.setattr(chain, "write", careless)


def told_twice(patch):
    """Every result that comes in is told, whether or not its run has one."""
    settle = driver_module.Driver._handle_finished

    def mutant(self, index, finished):
        known = [run for run in self._ledger.each_run() if run.result.id == finished.result["id"]]
        settle(self, index, finished)
        self._outcomes += known

    patch.setattr(driver_module.Driver, "_handle_finished", mutant)


def attempts_forgotten(patch):
    """A new driver counts from nought."""
    init = lost_runs.Losses.__init__

    def mutant(self, ledger):
        init(self, ledger)
        self._losses.clear()

    patch.setattr(lost_runs.Losses, "__init__", mutant)


def lease_by_wall_clock(patch):
    patch.setattr(simulation.SimPool, "clock", simulation.SimPool.wall)


def told_before_it_answered(patch):
    """A worker whose answer needs a reply is taken for idle while the call behind it is under
    way.
    """
    take_in = Crew._update_worker

    def mutant(self, report, now):
        take_in(self, report, now)
        self._idle.add(report.worker)

    patch.setattr(Crew, "_update_worker", mutant)


def leases_without_end(patch):
    patch.setattr("sweeps.run.crew.AdaptiveTimeouts.seconds", lambda self, bank_key: math.inf)


def own_absence_blamed(patch):
    """A driver that was suspended takes its own absence for its workers' silence."""
    patch.setattr("sweeps.run.crew.Crew._discount_absence", lambda self, away_seconds: None)


def lost_runs_forgotten(patch):
    patch.setattr(driver_module.Driver, "_lose", lambda self, attempt, loss: None)


def results_forgotten(patch):
    """A new driver does not look at what has an outcome."""
    pull = driver_module.Driver.pull

    def mutant(self):
        settled, self.settled = self.settled, {}
        try:
            pull(self)
        finally:
            self.settled = settled

    patch.setattr(driver_module.Driver, "pull", mutant)


def late_curves(self):
    """`Driver._commit` with the curves after the records."""
    ended, self._ended = self._ended, []
    if ended:
        runs = [Run(spec=attempt.spec, result=result) for attempt, result, _ in ended]
        self._ledger.commit_all(runs)
        driver_module.store_curves(self._study_dir, [(result, curve) for _, result, curve in ended])
        for run in runs:
            driver_module.drop_checkpoints(self._study_dir, run.result.id)
        self._outcomes += runs


def curve_after_result(patch):
    patch.setattr(driver_module.Driver, "_commit", late_curves)


def checkpoint_dropped_first(patch):
    end = driver_module.Driver._keep_outcome

    def mutant(self, attempt, result, curve):
        driver_module.drop_checkpoints(self._study_dir, result.id)
        end(self, attempt, result, curve)

    patch.setattr(driver_module.Driver, "_keep_outcome", mutant)


def one_of_several_recorded(patch):
    """Of several outcomes that came in at once, one is recorded."""
    commit_all = Ledger.commit_all

    def mutant(self, runs):
        commit_all(self, runs[:1])

    patch.setattr(Ledger, "commit_all", mutant)


def checkpoints_left(patch):
    patch.setattr(driver, "drop_stale_checkpoints", lambda *_: None)
    patch.setattr(simulation, "faked", without_dropping(simulation.faked))


def without_dropping(faked):
    def planted(world):
        world.disk.drop_stale_checkpoints = lambda *_: None
        return faked(world)

    return planted


def stop_without_saving(patch):
    patch.setattr(driver_module.Driver, "stop", lambda self, grace_seconds: iter(()))


def nobody_runs_alone(patch):
    """And whoever is there is to blame."""
    patch.setattr(driver_module, "Loss", lambda **said: lost_runs.Loss(**said | {"alone": True}))
    standing = lost_runs.Losses.standing
    patch.setattr(
        lost_runs.Losses,
        "standing",
        lambda *those: dataclasses.replace(standing(*those), alone=False),
    )


def kills_blamed(patch):
    """A run that is killed from outside as often as it may be lost has failed."""
    patch.setattr(lost_runs, "MOST_IN_A_ROW", simulation.MAX_ATTEMPTS)


def memory_forgotten(patch):
    """A run that did not fit is tried again as it was."""
    standing = lost_runs.Losses.standing

    def mutant(self, run_id, spec, max_attempts):
        return dataclasses.replace(standing(self, run_id, spec, max_attempts), num_microbatches={})

    patch.setattr(lost_runs.Losses, "standing", mutant)


MUTANTS = (
    no_fsync,
    no_fencing,
    told_twice,
    attempts_forgotten,
    lease_by_wall_clock,
    leases_without_end,
    own_absence_blamed,
    lost_runs_forgotten,
    results_forgotten,
    curve_after_result,
    checkpoint_dropped_first,
    checkpoints_left,
    stop_without_saving,
    nobody_runs_alone,
    memory_forgotten,
    kills_blamed,
    told_before_it_answered,
    one_of_several_recorded,
)


def looks_at_whoever_has_ended(patch):
    """A decision looks at every trial that is known by now, later ones among them."""
    begin = SearchPruner.begin
    patch.setattr(
        SearchPruner,
        "begin",
        lambda self, *args, **more: begin(self, *args, **(more | {"num_seen": 10**6})),
    )


def slot_not_given_up(patch):
    """The outcome is recorded, and the run goes on in its slot: an order that is lost."""
    look = driver_module.Driver._handle_paused

    def mutant(self, index, paused):
        held = self._crew.workers[index].slots.get(paused.slot)
        look(self, index, paused)
        if held is not None:
            self._crew.workers[index].slots[paused.slot] = held

    patch.setattr(driver_module.Driver, "_handle_paused", mutant)


def refilled_before_it_is_recorded(patch):
    """The slot is free, and nobody has written down what came of its run."""
    end = driver_module.Driver._keep_outcome

    def mutant(self, attempt, result, curve):
        if result.status != "pruned":
            end(self, attempt, result, curve)

    patch.setattr(driver_module.Driver, "_keep_outcome", mutant)


def pruned_told_twice(patch):
    end = driver_module.Driver._keep_outcome

    def mutant(self, attempt, result, curve):
        end(self, attempt, result, curve)
        self._outcomes += (
            [Run(spec=attempt.spec, result=result)] if result.status == "pruned" else []
        )

    patch.setattr(driver_module.Driver, "_keep_outcome", mutant)


def curve_not_cut(patch):
    """What a worker says of a run that is beyond its pause is believed as it is."""
    patch.setattr(
        driver_module, "decoded_pause", lambda paused, run_id, num_steps: pool.decoded(paused)
    )


def pruned_forgotten(patch):
    """A new driver takes whole runs alone for settled."""
    patch.setattr("sweeps.store.ledger.Ledger.first_results", lambda self: self.results())


def pruned_curve_after_its_record(patch):
    commit = driver_module.Driver._commit

    def mutant(self):
        pruned = any(result.status == "pruned" for _, result, _ in self._ended)
        (late_curves if pruned else commit)(self)

    patch.setattr(driver_module.Driver, "_commit", mutant)


PRUNING_MUTANTS = (
    looks_at_whoever_has_ended,
    slot_not_given_up,
    refilled_before_it_is_recorded,
    pruned_told_twice,
    curve_not_cut,
    pruned_forgotten,
    pruned_curve_after_its_record,
)


NUM_TRIES = 400


def first_caught(plant):
    """The first seed at which a planted bug is seen, and what is said; None if it never is."""
    pruning = plant in PRUNING_MUTANTS
    how = {"make_source": pruning_source} if pruning else {}
    calm = calm_search()
    with pytest.MonkeyPatch.context() as patch:
        plant(patch)
        for seed in range(NUM_TRIES):
            try:
                _, ledger = simulate(seed, faults=(0.5 if pruning else 1.0) * faults(seed), **how)
            except (
                BrokenPromiseError,
                SweepError,
                KeyError,
                KilledError,
                PowerLossError,
            ) as caught:
                return seed, f"{type(caught).__name__}: {caught}"
            if pruning and decided_otherwise(ledger, calm):
                return seed, "another search"
    return None


@pytest.mark.parametrize("plant", MUTANTS + PRUNING_MUTANTS, ids=lambda plant: plant.__name__)
def test_a_planted_bug_is_caught(plant):
    """A fault test that has never caught a bug is not a test."""
    assert first_caught(plant) is not None
