"""Replays of a search with real banks: a machine that flips a bit is found, an honest one is not
accused.
"""

from collections import Counter
from unittest import mock

import pytest
from rerun_case import PLAN, machines
from tiny_study import forerun, plan_with, write_corpus

from launcher.study.winner_reruns import replay_gates
from sweeps.store.ledger import Ledger


def plan_of(folder, num_slots=4):
    write_corpus(folder)
    return plan_with(folder, PLAN.format(num_slots=num_slots))


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


def test_honest_machines_agree_to_the_bit(plan):
    """Alone in a bank, in another process on another machine."""
    code, _, ledger, pools, _ = swept(plan, ["a", "b", "c"])
    (record,) = ledger.records("replayed")
    assert code == 0 and record.body["outcome"] == "agrees" and len(set(record.body["hosts"])) == 2
    assert len(set(record.body["curve_ids"])) == 1
    assert record.key == min(ledger.results().values(), key=lambda result: result.loss_nats).id
    assert Counter(again for *_, again in pools[0].admitted) == {False: 6, True: 1}


def test_a_flipped_bit_of_a_gradient_stops_the_study_for_good(plan):
    """The trial ran on that machine, or was run again there; without the flip the same machine is
    honest.
    """
    code, said, ledger, _, corruption = swept(plan, ["a", "b"], ["b"])
    assert (
        corruption.num_flips and code == 3 and "DIFFERS" in said and outcomes(ledger) == ["differs"]
    )
    code, _, ledger, pools, _ = swept(plan, ["a", "b"], ["b"])
    assert code == 3 and pools == [] and len(ledger.records("replayed")) == 1, (
        "nothing is run for it"
    )
    assert [gate.outcome for gate in replay_gates(Asked(False), ledger)] == ["failed"], (
        "what was found is not forgotten"
    )
    accept = ("--accept", "replays_agree", "--reason", "one machine, and it is a toy")
    assert forerun("freeze", plan.parent / "study", *accept)[0] == 2, (
        "there is nothing to freeze yet"
    )
    code, said, _, _, _ = swept(plan, ["a", "b"], ["b"])
    assert code == 0 and "accepted failure: gate replays_agree" in said
    code, _, ledger, _, _ = swept(plan, ["a", "b"], ["b"], every=10**9, study="honest")
    assert code == 0 and outcomes(ledger) == ["agrees"]


class KilledError(BaseException):
    """The driver's process is gone."""


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_driver_killed_at_its_record_goes_on_and_repeats_nothing(tmp_path, when):
    plan, append = plan_of(tmp_path, num_slots=1), Ledger.append

    def killed_once(self, kind, key, body):
        if kind != "replayed" or key in met:
            return append(self, kind, key, body)
        met.add(key)
        if when == "after":
            append(self, kind, key, body)
        raise KilledError

    met = set()
    with machines(["a", "b", "c"]) as (pools, _), mock.patch.object(Ledger, "append", killed_once):
        codes = [forerun("sweep", plan, "--study", tmp_path / "study")[0] for _ in range(2)]
    ledger = Ledger.read(tmp_path / "study")
    assert codes[-1] == 0 and len(met) == 1 and outcomes(ledger) == ["agrees"]
    begun = sum(again for pool in pools for *_, again in pool.admitted)
    assert begun == (1 if when == "after" else 2), "what was recorded is not run again"


class Asked:
    """A study that asks for the replay, or does not."""

    def __init__(self, replays_winner):
        self.replays_winner = replays_winner
