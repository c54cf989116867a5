"""Replays of a search with real banks: a machine that flips a bit is found, an honest one is not accused."""

from collections import Counter
from unittest import mock

import pytest
from rerun_case import PLAN, machines
from tiny_study import forerun, plan_with, write_corpus

from launcher.study import rerunning
from launcher.study.rerunning import replay_gates
from sweeps.store.ledger import Ledger

MODES = {"K = 4": "", "K = 1": "[proxy]\nnum_slots = 1\n"}


def plan_of(folder, more="", num_slots=4):
    write_corpus(folder)
    return plan_with(folder, PLAN.format(num_slots=num_slots) + more)


@pytest.fixture
def plan(tmp_path):
    return plan_of(tmp_path)


def swept(plan, hosts, corrupt=(), *more, study="study", **how):
    """Exit code, what was said, the ledger, and the pools."""
    folder = plan.parent / study
    with machines(hosts, corrupt, **how) as (pools, corruption):
        code, out, err = forerun("sweep", plan, "--study", folder, *more)
    assert "Traceback" not in err, err
    return code, out + err, Ledger.read(folder), pools, corruption


def outcomes(ledger):
    return [record.body["outcome"] for record in ledger.records("replayed")]


@pytest.mark.parametrize("mode", MODES)
def test_honest_machines_agree_to_the_bit(tmp_path, mode):
    """Alone in a bank, in another process on another machine."""
    code, _, ledger, pools, _ = swept(plan_of(tmp_path, MODES[mode]), ["a", "b", "c"])
    assert code == 0 and outcomes(ledger) == ["agrees"] * 2
    for record in ledger.records("replayed"):
        assert record.body["apart"] == "host" and len(set(record.body["curve_ids"])) == 1
    assert [record.body["why"] for record in ledger.records("drawn")] == ["winner", "random"]
    best = min(ledger.results().values(), key=lambda result: result.loss_nats)
    assert ledger.records("drawn")[0].key == best.id
    assert Counter(again for *_, again in pools[0].admitted) == {False: 6, True: 2}


@pytest.mark.parametrize("num_slots", [4])
def test_a_flipped_bit_of_a_gradient_stops_the_study_for_good(tmp_path, num_slots):
    """The trial ran on that machine, or was run again there; without the flip the same machine is honest."""
    plan, every_trial = plan_of(tmp_path, num_slots=num_slots), ("--set", "search.num_replays=6")
    code, said, ledger, _, corruption = swept(plan, ["a", "b", "c"], ["b"], *every_trial, bit=20)
    assert corruption.num_flips and code == 3 and "DIFFERS" in said
    for record in ledger.records("replayed"):
        assert record.body["outcome"] == ("differs" if "b" in record.body["hosts"] else "agrees")
    code, _, ledger, pools, _ = swept(plan, ["a", "b", "c"], ["b"], *every_trial)
    assert code == 3 and pools == [] and len(ledger.records("replayed")) == 6, "nothing is run for it"
    assert [gate.outcome for gate in replay_gates(Asked(0), ledger)] == ["failed"], "what was found is not forgotten"
    code, _, ledger, _, _ = swept(plan, ["a", "b", "c"], ["b"], *every_trial, every=10**9, study="honest")
    assert code == 0 and set(outcomes(ledger)) == {"agrees"}


def test_on_another_chip_rounding_is_allowed(plan):
    other = {"every": 1, "bit": 1, "everywhere": True, "cpus": ["one kind", "another"]}
    code, _, ledger, _, _ = swept(plan, ["a", "b"], ["b"], **other)
    assert code == 0 and outcomes(ledger) == ["agrees"] * 2
    assert {len(set(record.body["curve_ids"])) for record in ledger.records("replayed")} == {2}


class KilledError(BaseException):
    """The driver's process is gone."""


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_driver_killed_at_any_record_of_it_goes_on_and_repeats_nothing(tmp_path, when):
    plan, append = plan_of(tmp_path, num_slots=1), Ledger.append

    def killed_once(self, kind, key, body):
        if kind not in ("drawn", "replayed") or (kind, key) in met:
            return append(self, kind, key, body)
        met.add((kind, key))
        if when == "after":
            append(self, kind, key, body)
        raise KilledError

    met = set()
    with machines(["a", "b", "c"]) as (pools, _), mock.patch.object(Ledger, "append", killed_once):
        codes = [forerun("sweep", plan, "--study", tmp_path / "study")[0] for _ in range(5)]
    ledger = Ledger.read(tmp_path / "study")
    assert codes[-1] == 0 and len(met) == 4 and outcomes(ledger) == ["agrees"] * 2
    begun = sum(again for pool in pools for *_, again in pool.admitted)
    assert begun <= (2 if when == "after" else 4) + 1, "what was recorded is not run again"


def test_a_replay_that_cannot_be_had_tells_nothing_and_closes_the_gate(plan):
    carried_out = rerunning.carried_out

    def lost(*arguments, **options):
        for number, (task, again) in enumerate(carried_out(*arguments, **options)):
            yield task, again if number else "lost 3 times, the last: gone"

    with mock.patch.object(rerunning, "carried_out", lost):
        code, _, ledger, _, _ = swept(plan, ["a", "b"])
    assert code == 0 and sorted(outcomes(ledger)) == ["agrees", "cannot_tell"]
    assert [gate.outcome for gate in replay_gates(Asked(2), ledger)] == ["cannot_tell"]


class Asked:
    """A study that asks for so many replays."""

    def __init__(self, num_replays):
        self.num_replays = num_replays
