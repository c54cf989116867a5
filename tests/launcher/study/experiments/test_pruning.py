"""Tests of a search that prunes trials (stops them early), on the command line: pruned trials are
reported, and an interrupted search ends like an uninterrupted one.
"""

import dataclasses

import pytest
from tiny_study import run_json, write_plan_with

from forerun._launcher.study.experiments.search import SearchState
from forerun._launcher.study.experiments.transfer_results import load_search_result
from forerun._launcher.study.stages.study_folder import open_recorded_study
from forerun._sweeps.store.ledger import Ledger

NUM_TRIALS, NUM_STARTUP, PARALLELISM = 22, 3, 3
PRUNING = f"""
[proxy]
num_steps = 16
[search]
num_trials = {NUM_TRIALS}
num_startup = {NUM_STARTUP}
parallelism = {PARALLELISM}
pruner = "curve"
"""


@pytest.fixture(scope="module")
def searched_study(folder):
    """The study folder of an uninterrupted search; tests must not change it."""
    code, _ = run_json("sweep", write_plan_with(folder, PRUNING), "--study", folder / "searched")
    assert code == 0
    return folder / "searched"


def read_search(study_dir):
    """Return the trials' points and their results without seconds."""
    study, ledger = open_recorded_study(study_dir)
    points = SearchState(study, ledger).points
    results = [ledger.get_first_results()[study.build_trial(point).id] for point in points]
    return points, [dataclasses.replace(result, seconds=0.0) for result in results]


def test_pruned_trials_are_recorded_and_reported(searched_study):
    study, ledger = open_recorded_study(searched_study)
    points, results = read_search(searched_study)
    pruned = [index for index, result in enumerate(results) if result.status == "pruned"]
    state = SearchState(study, ledger)
    assert pruned == state.pruned and len(pruned) >= 2
    # The pruner compares a trial with at least NUM_STARTUP trials that ended before it began.
    assert min(pruned) >= NUM_STARTUP + PARALLELISM - 1
    assert {results[index].num_steps for index in pruned} <= {2, 4, 8}, "the pruner's rungs"
    # A pruned trial has no final result.
    assert set(ledger.get_results()) == {
        study.build_trial(points[i]).id for i in range(NUM_TRIALS) if i not in pruned
    }
    assert [loss is None for loss in state.losses] == [
        index in pruned for index in range(NUM_TRIALS)
    ]
    assert state.count_runs() == (NUM_TRIALS, NUM_TRIALS)
    assert load_search_result(study, ledger).best_trial not in pruned
    code, body = run_json("status", searched_study)
    trials = [trial for trial in body["search"]["trials"] if trial["status"] == "pruned"]
    assert code == 0 and [trial["index"] for trial in trials] == pruned
    assert [trial["num_steps"] for trial in trials] == [
        results[index].num_steps for index in pruned
    ]
    assert body["now"]["num_runs"] == {
        "finished": NUM_TRIALS - len(pruned),
        "diverged": 0,
        "pruned": len(pruned),
        "failed": 0,
    }
    assert (
        body["spend"]["by_status"]["pruned"] == len(pruned)
        and body["spend"]["num_runs"] == NUM_TRIALS
    )


def test_interrupted_search_ends_like_an_uninterrupted_one(folder, searched_study, tmp_path):
    study = tmp_path / "study"
    code, _ = run_json(
        "sweep", folder / "plan.toml", "--study", study, "--set", "cluster.max_runs=9"
    )
    assert code != 0 and len(Ledger.read(study).get_first_results()) == 9
    assert run_json("sweep", folder / "plan.toml", "--study", study)[0] == 0
    assert read_search(study) == read_search(searched_study)
    assert not any((study / "checkpoints").glob("*")), "states of pruned trials are removed"
