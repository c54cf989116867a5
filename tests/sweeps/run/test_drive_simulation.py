"""Tests of whole studies with simulated disks, clocks, workers and faults.

`simulate` checks the promises of the driver and the ledger itself, and raises an error at a broken
one. The tests run it for many seeds, and check that it notices mutants: drivers with one planted
bug.
"""

from collections import Counter

import pytest
import simulation
from driver_mutants import (
    MUTANTS,
    NUM_SEEDS_TRIED,
    PRUNING_MUTANTS,
    compare_with_calm_search,
    find_first_caught,
    get_fault_likelihood,
    make_pruning_source,
    make_run,
    run_calm_search,
)
from simulation import simulate, use_study_folder
from spaces import SPACE

from forerun._sweeps.search.source import Search, SearchSource

NUM_SEEDS, NUM_SEARCHES = 100, 40
CATCHING_SEEDS = {
    "blame_own_absence": 301,
    "leave_checkpoints": 50,
    "stop_without_saving": 67,
    "store_curve_after_result": 18,
    "store_pruned_curve_after_record": 6,
}
"""Seeds at which rare bugs are noticed, by mutant. They save time: without them, or if a change of
the driver or of the simulation has moved them, all seeds are tried."""


@pytest.fixture(autouse=True)
def simulated_study(tmp_path):
    """Keep the files of simulated studies in a temporary folder."""
    with use_study_folder(tmp_path):
        yield


def test_every_promise_holds_under_all_faults():
    """`simulate` raises an error at a broken promise; the test checks that all faults strike."""
    counts = Counter()
    for seed in range(NUM_SEEDS):
        counts += simulate(seed, faults=get_fault_likelihood(seed)).counts
    fault_names = (
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
        "invalid results",
        "checkpoints damaged",
        "resumed",
        "studies ended by failures",
        "calls continued",
    )
    assert {name for name in fault_names if counts[name] < NUM_SEEDS / 20} == set(), (
        "some faults strike too rarely"
    )
    assert counts["executions"] > 1.2 * NUM_SEEDS * len(simulation.SPECS), "nothing was run again"


def test_seed_determines_every_record():
    """The same seed gives the same records, byte for byte, so that a failure can be repeated."""
    first, repeated, other_seed = (
        [record.hash for record in simulate(seed).ledger.read_records()] for seed in (11, 11, 13)
    )
    assert first == repeated != other_seed


def make_search_source(ledger):
    search = Search(SPACE, study_seed=1, parallelism=4)
    return SearchSource(search, make_run, ledger, stage="sweep", num_trials=12)


def test_search_is_the_same_under_all_faults():
    calm = simulate(1, faults=0.0, make_source=make_search_source).ledger
    calm_points = [record.body for record in calm.read_records("suggestion")]
    num_compared = 0
    for seed in range(20):
        ledger = simulate(seed, faults=0.1, make_source=make_search_source).ledger
        if all(result.status != "failed" for result in ledger.get_results().values()):
            assert [record.body for record in ledger.read_records("suggestion")] == calm_points
            assert dict(ledger.get_results()) == dict(calm.get_results())
            num_compared += 1
    assert num_compared > 10


def test_pruning_search_is_the_same_under_all_faults():
    """Workers and drivers die, hang and stop while runs wait for the pruner's verdict, in any
    order.
    """
    _, calm_results = run_calm_search()
    pruned = [result.num_steps for result in calm_results if result.status == "pruned"]
    assert len(pruned) > 3 and set(pruned) == set(simulation.RUNGS), (
        "the rule must prune at every rung"
    )
    counts, comparisons = Counter(), Counter()
    for seed in range(NUM_SEARCHES):
        faults = 0.2 * get_fault_likelihood(seed)
        study = simulate(seed, faults=faults, make_source=make_pruning_source)
        counts += study.counts
        comparisons[compare_with_calm_search(study.ledger)] += 1
    assert comparisons["different"] == 0 and comparisons["same"] > NUM_SEARCHES / 2
    fault_names = (
        "power losses",
        "drivers killed",
        "takeovers",
        "orderly stops",
        "workers hung",
        "lost_worker",
        "resumed",
        "late or double reports",
        "curves not cut",
        "invalid pauses",
        "slots emptied",
    )
    assert {name for name in fault_names if counts[name] < NUM_SEARCHES / 20} == set(), (
        "some faults strike too rarely"
    )


@pytest.mark.parametrize("mutate", MUTANTS + PRUNING_MUTANTS, ids=lambda mutate: mutate.__name__)
def test_mutant_of_the_driver_is_caught(mutate):
    likely_seed = CATCHING_SEEDS.get(mutate.__name__, 0)
    assert find_first_caught(mutate, (likely_seed, *range(NUM_SEEDS_TRIED))) is not None
