"""Tests of a search that prunes (stops trials early): its decisions do not depend on the order in
which runs are trained on.
"""

import functools
import random

import pytest
import sweep_fakes
from spaces import SPACE
from sweep_fakes import make_outcome, make_pruned_outcome

from forerun._sweeps.search import pruning
from forerun._sweeps.search.pruning import SearchPruner
from forerun._sweeps.search.source import Search, SearchSource, SourceSignal
from forerun._sweeps.store.curves import get_curve_path, store_curve
from forerun._sweeps.store.errors import CurveCorrupt
from forerun._sweeps.store.ledger import Ledger

NUM_STEPS, PARALLELISM = 8, 4


make_run = functools.partial(sweep_fakes.make_run, num_steps=NUM_STEPS)


@pytest.fixture(autouse=True)
def pruner_calls(monkeypatch):
    """Replace the pruning rule by a simple one, which prunes a loss above the median; return the
    list of its calls.
    """
    calls = []

    def judge_trial(**call):
        calls.append(call)
        step = len(call["losses_nats"])
        losses = sorted(
            trial.losses_nats[step - 1]
            for trial in call["earlier_trials"]
            if len(trial.losses_nats) >= step
        )
        if len(losses) < call["num_startup"] or call["losses_nats"][-1] <= losses[len(losses) // 2]:
            return ""
        return f"lost to {len(losses)} at {step}"

    monkeypatch.setattr(pruning, "list_rungs", lambda num_steps: (2, 4))
    monkeypatch.setattr(pruning, "judge_trial", judge_trial)
    monkeypatch.setattr(
        pruning,
        "compute_sampler_loss",
        lambda space, point, losses_nats, earlier_trials: losses_nats[-1] + len(earlier_trials),
    )
    return calls


def make_source(ledger, folder, **options):
    """Return the source of a search that prunes."""
    search = Search(SPACE, 7, PARALLELISM, num_startup=3)
    pruner = SearchPruner(search, folder, num_steps=NUM_STEPS)
    return SearchSource(
        search, make_run, ledger, **({"stage": "sweep", "num_trials": 20} | options), pruner=pruner
    )


def finish_search(source, ledger, folder, seed):
    """Carry out a search. Runs advance in random order, each to its next rung (a step at which the
    pruner judges it) or to its end.
    """
    rng, active_runs = random.Random(seed), {}
    while (
        answer := source.next(ledger.get_first_results())
    ) is not SourceSignal.DONE or active_runs:
        if isinstance(answer, SourceSignal):
            continue_run(source, ledger, folder, active_runs, rng.choice(sorted(active_runs)))
        elif answer.id not in ledger.get_first_results():
            active_runs.setdefault(answer.id, (answer, list(source.pruner.list_rungs(answer.id))))


def continue_run(source, ledger, folder, active_runs, run_id):
    """Train one run to its next rung, and end it there if it is pruned; or train it to its end."""
    spec, rungs = active_runs[run_id]
    result, curve = make_pruned_outcome(spec, rungs.pop(0)) if rungs else make_outcome(spec)
    if result.status == "pruned":
        reason = source.pruner.judge_run(run_id, curve.train_loss_nats)
        assert source.pruner.judge_run(run_id, curve.train_loss_nats) == reason, (
            "the same answer when asked again"
        )
        if not reason:
            return
        result = make_pruned_outcome(spec, result.num_steps, reason)[0]
    del active_runs[run_id]
    store_curve(folder, run_id, curve, pruned=result.status == "pruned")
    ledger.commit(spec, result)


def run_search(folder, seed, **options):
    """Run a search; return its points and the result of each."""
    with Ledger.open(folder, {}, create=True) as ledger:
        finish_search(make_source(ledger, folder, **options), ledger, folder, seed)
        points = [record.body for record in ledger.read_records("suggestion")]
        return points, [ledger.get_first_results()[make_run(point).id] for point in points]


def test_interrupted_search_decides_as_an_uninterrupted_one(tmp_path):
    uninterrupted = run_search(tmp_path / "whole", 0)
    assert {result.status for result in uninterrupted[1]} == {"finished", "diverged", "pruned"}
    for num_before in (1, 9, 14):
        run_search(tmp_path / str(num_before), 1, num_trials=num_before)
        assert run_search(tmp_path / str(num_before), 2) == uninterrupted


def test_trial_is_compared_with_those_that_ended_before_it_was_suggested(tmp_path, pruner_calls):
    points, outcomes = run_search(tmp_path, 0)
    assert {len(call["losses_nats"]) for call in pruner_calls} == {2, 4}, (
        "neither before the first rung nor at the end"
    )
    for call in pruner_calls:
        assert call["num_steps"] == NUM_STEPS
        index = points.index(call["point"])
        assert [trial.point for trial in call["earlier_trials"]] == points[
            : max(0, index - PARALLELISM + 1)
        ]
        for trial, result in zip(call["earlier_trials"], outcomes, strict=False):
            assert (trial.status, trial.loss_nats) == (result.status, result.loss_nats)
            assert len(trial.losses_nats) == result.num_steps


def list_remaining(source, ledger):
    """Return all runs that a source has not given out yet."""
    return list(iter(lambda: source.next(ledger.get_first_results()), SourceSignal.DONE))


def test_missing_curve_stops_the_search(tmp_path):
    """Without that curve, the pruner could decide differently."""
    run_search(tmp_path, 0)
    with Ledger.open(tmp_path, {}, create=False) as ledger:
        result = next(
            result for result in ledger.get_first_results().values() if result.status == "pruned"
        )
        get_curve_path(tmp_path, result.id, pruned=True).unlink()
        with pytest.raises(CurveCorrupt, match=f"restore it from a copy.*--fork {tmp_path}"):
            list_remaining(make_source(ledger, tmp_path), ledger)


def test_given_points_are_never_pruned(tmp_path):
    given = [SPACE.make_point((share, 0.5, 0.5)) for share in (0.98, 0.99)]
    with Ledger.open(tmp_path, {}, create=True) as ledger:
        source = make_source(ledger, tmp_path, given=given)
        rungs = [source.pruner.list_rungs(source.next({}).id) for _ in range(3)]
    assert rungs == [(), (), (2, 4)]
