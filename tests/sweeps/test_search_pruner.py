"""A search that prunes: who is held against whom, what the sampler is told, whatever the order in
which runs go on.
"""

import functools
import random

import pytest
import sweep_fakes
from spaces import SPACE
from sweep_fakes import outcome, pruned_outcome

from sweeps.search import pruning
from sweeps.search.pruning import SearchPruner
from sweeps.search.source import Search, SearchSource, SourceSignal
from sweeps.store.curves import curve_path, store_curve
from sweeps.store.errors import CurveCorrupt
from sweeps.store.ledger import Ledger

NUM_STEPS, PARALLELISM = 8, 4


make_run = functools.partial(sweep_fakes.make_run, num_steps=NUM_STEPS)


@pytest.fixture(autouse=True)
def asked(monkeypatch):
    """A rule of the tests' own, and all that it was asked."""
    calls = []

    def verdict(**call):
        calls.append(call)
        step = len(call["losses_nats"])
        others = sorted(
            trial.losses_nats[step - 1] for trial in call["seen"] if len(trial.losses_nats) >= step
        )
        if len(others) < call["num_startup"] or call["losses_nats"][-1] <= others[len(others) // 2]:
            return ""
        return f"lost to {len(others)} at {step}"

    monkeypatch.setattr(pruning, "rungs", lambda num_steps: (2, 4))
    monkeypatch.setattr(pruning, "verdict", verdict)
    monkeypatch.setattr(
        pruning, "told_nats", lambda space, point, losses_nats, seen: losses_nats[-1] + len(seen)
    )
    return calls


def source_of(ledger, folder, **more):
    searched = Search(SPACE, 7, PARALLELISM, num_startup=3)
    pruner = SearchPruner(searched, folder, num_steps=NUM_STEPS)
    return SearchSource(
        searched, make_run, ledger, **({"stage": "sweep", "num_trials": 20} | more), pruner=pruner
    )


def finish(source, ledger, folder, seed):
    """Carry a search out: runs go on to their next rung, or their end, in any order."""
    rng, left = random.Random(seed), {}
    while (answer := source.next(ledger.first_results())) is not SourceSignal.DONE or left:
        if isinstance(answer, SourceSignal):
            go_on(source, ledger, folder, left, rng.choice(sorted(left)))
        elif answer.id not in ledger.first_results():
            left.setdefault(answer.id, (answer, list(source.pruner.rungs(answer.id))))


def go_on(source, ledger, folder, left, run_id):
    """One run goes to its next rung, and beyond or not; or to its end."""
    spec, rungs = left[run_id]
    result, curve = pruned_outcome(spec, rungs.pop(0)) if rungs else outcome(spec)
    if result.status == "pruned":
        why = source.pruner.verdict(run_id, curve.train_loss_nats)
        assert source.pruner.verdict(run_id, curve.train_loss_nats) == why, "asked again, the same"
        if not why:
            return
        result = pruned_outcome(spec, result.num_steps, why)[0]
    del left[run_id]
    store_curve(folder, run_id, curve, pruned=result.status == "pruned")
    ledger.commit(spec, result)


def search(folder, seed, **more):
    """All that a search goes by: its points, and what came of each."""
    with Ledger.open(folder, {}, create=True) as ledger:
        finish(source_of(ledger, folder, **more), ledger, folder, seed)
        points = [record.body for record in ledger.records("suggestion")]
        return points, [ledger.first_results()[make_run(point).id] for point in points]


def test_an_interrupted_search_decides_as_it_would_have(tmp_path):
    whole = search(tmp_path / "whole", 0)
    assert {result.status for result in whole[1]} == {"finished", "diverged", "pruned"}
    for num_before in (1, 9, 14):
        search(tmp_path / str(num_before), 1, num_trials=num_before)
        assert search(tmp_path / str(num_before), 2) == whole


def test_a_trial_is_held_against_those_that_had_ended_before_it_was_suggested(tmp_path, asked):
    points, outcomes = search(tmp_path, 0)
    assert {len(call["losses_nats"]) for call in asked} == {2, 4}, (
        "neither before the first step nor after the last"
    )
    for call in asked:
        assert call["num_steps"] == NUM_STEPS
        index = points.index(call["point"])
        assert [trial.point for trial in call["seen"]] == points[: max(0, index - PARALLELISM + 1)]
        for trial, result in zip(call["seen"], outcomes, strict=False):
            assert (trial.status, trial.loss_nats) == (result.status, result.loss_nats)
            assert len(trial.losses_nats) == result.num_steps


def rest(source, ledger):
    """All that a source gives at once."""
    return list(iter(lambda: source.next(ledger.first_results()), SourceSignal.DONE))


def test_a_lost_curve_stops_the_search(tmp_path):
    """A decision without it would be another one."""
    search(tmp_path, 0)
    with Ledger.open(tmp_path, {}, create=False) as ledger:
        result = next(
            result for result in ledger.first_results().values() if result.status == "pruned"
        )
        curve_path(tmp_path, result.id, pruned=True).unlink()
        with pytest.raises(CurveCorrupt, match=f"restore it from a copy.*--fork {tmp_path}"):
            rest(source_of(ledger, tmp_path), ledger)


def test_points_beyond_an_end_are_never_given_up(tmp_path):
    given = [SPACE.at((share, 0.5, 0.5)) for share in (0.98, 0.99)]
    with Ledger.open(tmp_path, {}, create=True) as ledger:
        source = source_of(ledger, tmp_path, given=given)
        looked_at = [source.pruner.rungs(source.next({}).id) for _ in range(3)]
    assert looked_at == [(), (), (2, 4)]
