"""A search that prunes, by the command line: cut short and gone on with, told as it was, killed on
Ray.
"""

import dataclasses

import pytest
from tiny_study import ask, plan_with

from launcher.experiments.search import ended_losses, num_asked, pruned_trials, trial_points
from launcher.experiments.transferred_values import searched
from launcher.study.study_folder import recorded
from sweeps.store.ledger import Ledger

NUM_TRIALS = 22
PRUNING = f"""
[proxy]
num_steps = 16
[search]
num_trials = {NUM_TRIALS}
num_startup = 3
parallelism = 3
pruner = "curve"
"""


@pytest.fixture(scope="module")
def swept(folder):
    """The search of a study, uninterrupted; nobody writes into it."""
    code, _ = ask("sweep", plan_with(folder, PRUNING), "--study", folder / "whole")
    assert code == 0
    return folder / "whole"


def search_of(study_dir):
    """Its points, and what came of each but for the clock."""
    study, ledger = recorded(study_dir)
    points = trial_points(ledger)
    ends = [ledger.first_results()[study.trial(point).id] for point in points]
    return points, [dataclasses.replace(end, seconds=0.0) for end in ends]


def test_some_trials_are_given_up_and_told_as_such(swept):
    study, ledger = recorded(swept)
    points, ends = search_of(swept)
    pruned = [index for index, end in enumerate(ends) if end.status == "pruned"]
    assert pruned == pruned_trials(study, ledger) and len(pruned) >= 2 and min(pruned) >= 3 + 3 - 1
    assert {ends[index].num_steps for index in pruned} <= {2, 4, 8}
    assert set(ledger.results()) == {
        study.trial(points[i]).id for i in range(NUM_TRIALS) if i not in pruned
    }
    assert [loss is None for loss in ended_losses(study, ledger)] == [
        index in pruned for index in range(NUM_TRIALS)
    ]
    assert num_asked(study, ledger) == (NUM_TRIALS, NUM_TRIALS)
    assert searched(study, ledger).best_trial not in pruned
    code, body = ask("status", swept)
    told = [trial for trial in body["search"]["trials"] if trial["status"] == "pruned"]
    assert code == 0 and [trial["index"] for trial in told] == pruned
    assert [trial["num_steps"] for trial in told] == [ends[index].num_steps for index in pruned]
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


def test_a_search_cut_short_anywhere_goes_on_as_it_would_have(folder, swept, tmp_path):
    study = tmp_path / "study"
    code, _ = ask("sweep", folder / "plan.toml", "--study", study, "--set", "cluster.max_runs=9")
    assert code != 0 and len(Ledger.read(study).first_results()) == 9
    assert ask("sweep", folder / "plan.toml", "--study", study)[0] == 0
    assert search_of(study) == search_of(swept)
    assert not any((study / "checkpoints").glob("*")), "nothing is kept of who was given up"
