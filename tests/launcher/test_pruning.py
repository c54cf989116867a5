"""A search that prunes, by the command line: cut short and gone on with, told as it was, killed on Ray."""

import dataclasses
import os
import shutil
import signal

import pytest
from kill_case import RAY, Driver
from tiny_study import ask, forerun, plan_with, write_corpus

from launcher.experiments.searching import ended_losses, num_asked, pruned_trials, trial_points
from launcher.experiments.transferred import searched
from launcher.study.opening import recorded
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
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pruning")
    write_corpus(folder)
    plan_with(folder, PRUNING)
    return folder


@pytest.fixture(scope="module")
def swept(folder):
    """The search of a study, uninterrupted; nobody writes into it."""
    code, _ = ask("sweep", folder / "plan.toml", "--study", folder / "whole")
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
    assert set(ledger.results()) == {study.trial(points[i]).id for i in range(NUM_TRIALS) if i not in pruned}
    assert [loss is None for loss in ended_losses(study, ledger)] == [index in pruned for index in range(NUM_TRIALS)]
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
    assert body["spend"]["by_status"]["pruned"] == len(pruned) and body["spend"]["num_runs"] == NUM_TRIALS
    assert (
        f"pruner curve: {len(pruned)} of {NUM_TRIALS} trials were given up on their way" in forerun("status", swept)[1]
    )


def test_a_search_cut_short_anywhere_goes_on_as_it_would_have(folder, swept, tmp_path):
    for most in (9,):
        study = tmp_path / str(most)
        code, _ = ask("sweep", folder / "plan.toml", "--study", study, "--set", f"cluster.max_runs={most}")
        assert code != 0 and len(Ledger.read(study).first_results()) == most
        assert ask("sweep", folder / "plan.toml", "--study", study)[0] == 0
        assert search_of(study) == search_of(swept)
        assert not any((study / "checkpoints").glob("*")), "nothing is kept of who was given up"


def test_another_stage_runs_in_full_what_was_given_up(folder, swept, tmp_path):
    """It is another fact: the search goes on by its own."""
    shutil.copytree(swept, tmp_path / "study")
    before = search_of(tmp_path / "study")
    code, body = ask("run", folder / "plan.toml", "--study", tmp_path / "study", "--set", "cluster.max_runs=60")
    assert code != 0, body
    study, ledger = recorded(tmp_path / "study")
    assert any(run.spec.shape != study.base_shape for run in ledger.runs()), "the transfer tests have begun"
    assert search_of(tmp_path / "study") == before
    assert all(result.status != "pruned" for result in ledger.results().values())


@pytest.mark.slow
@pytest.mark.parametrize("what", ["worker", "driver"])
def test_killed_on_ray_while_it_prunes(folder, swept, tmp_path, what):
    """SIGKILL of a worker, or of the driver and then again the same command: the same search, nothing lost."""
    study = tmp_path / "study"
    drivers = [Driver(folder / "plan.toml", study, *RAY, verb="sweep")]
    try:
        drivers[0].wait_for(lambda: drivers[0].num_outcomes() >= 4)
        assert drivers[0].process.poll() is None, drivers[0].said()
        if what == "driver":
            drivers[0].process.kill()
            drivers[0].end()
            drivers[0].gone_within()
            drivers.append(Driver(folder / "plan.toml", study, *RAY, verb="sweep"))
        else:
            pids = []
            drivers[0].wait_for(lambda: pids.extend(drivers[0].pids("worker")) or pids)
            os.kill(pids[0], signal.SIGKILL)
        code, _ = drivers[-1].end()
        assert code == 0, drivers[-1].said()
    finally:
        for driver in drivers:
            driver.sweep_up()
    assert search_of(study) == search_of(swept)
    ledger = Ledger.read(study)
    assert len(ledger.records("lost")) > 0 or what == "driver", "a run was in flight"
