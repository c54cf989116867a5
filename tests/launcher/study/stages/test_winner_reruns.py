"""Tests of the second run of a search's winning trial on another machine, with real banks (trials
trained as one batched model): a machine that flips a bit of a gradient is detected, and machines
that compute correctly agree.
"""

from collections import Counter
from types import SimpleNamespace
from unittest import mock

import pytest
from rerun_case import PLAN, fake_machines
from tiny_study import run_forerun, write_corpus, write_plan_with

from forerun._launcher.study.stages.winner_reruns import build_replay_gate
from forerun._sweeps.store.ledger import Ledger


def write_replay_plan(folder, num_slots=4):
    write_corpus(folder)
    return write_plan_with(folder, PLAN.format(num_slots=num_slots))


@pytest.fixture
def plan(tmp_path):
    return write_replay_plan(tmp_path)


def sweep(plan, hosts, corrupt=(), every=3, study="study"):
    """Search on fake machines.

    Args:
        plan: Plan file.
        hosts: Names of the machines.
        corrupt: Names of the machines that flip a bit of the gradients.
        every: Number of steps of such a machine from one flip to the next.
        study: Name of the study's folder.

    Returns:
        The exit code, the output, the ledger, the pools, and the corruption.
    """
    folder = plan.parent / study
    with fake_machines(hosts, corrupt, every) as (pools, corruption):
        code, out, err = run_forerun("sweep", plan, "--study", folder)
    assert "Traceback" not in err, err
    return code, out + err, Ledger.read(folder), pools, corruption


def list_outcomes(ledger):
    return [record.body["outcome"] for record in ledger.read_records("replayed")]


def test_honest_machines_agree_bitwise(plan):
    """The winner runs again alone in a bank, in another process on another machine."""
    code, _, ledger, pools, _ = sweep(plan, ["a", "b", "c"])
    (record,) = ledger.read_records("replayed")
    assert code == 0 and record.body["outcome"] == "agrees" and len(set(record.body["hosts"])) == 2
    assert len(set(record.body["curve_ids"])) == 1
    assert record.key == min(ledger.get_results().values(), key=lambda result: result.loss_nats).id
    assert Counter(again for *_, again in pools[0].admitted) == {False: 6, True: 1}


def test_flipped_bit_of_a_gradient_stops_the_study_for_good(plan):
    """Either the first or the second run of the trial was on the faulty machine."""
    code, output, ledger, _, corruption = sweep(plan, ["a", "b"], ["b"])
    assert corruption.num_flips and code == 3
    assert "DIFFERS" in output and list_outcomes(ledger) == ["differs"]
    # A second `sweep` starts no pool.
    code, _, ledger, pools, _ = sweep(plan, ["a", "b"], ["b"])
    assert code == 3 and pools == [] and len(ledger.read_records("replayed")) == 1
    # The gate stays closed if the plan no longer asks for a second run.
    gates = build_replay_gate(SimpleNamespace(replays_winner=False), ledger)
    assert [gate.outcome for gate in gates] == ["failed"]
    # There is nothing to freeze yet, but the failure is accepted.
    accept = ("--accept", "replays_agree", "--reason", "one machine, and it is a toy")
    assert run_forerun("freeze", plan.parent / "study", *accept)[0] == 2
    code, output, _, _, _ = sweep(plan, ["a", "b"], ["b"])
    assert code == 0 and "accepted failure: gate replays_agree" in output
    # A machine that flips no bit in this search agrees.
    code, _, ledger, _, _ = sweep(plan, ["a", "b"], ["b"], every=10**9, study="honest")
    assert code == 0 and list_outcomes(ledger) == ["agrees"]


class KilledError(BaseException):
    """Raised in place of the driver's death."""


@pytest.mark.parametrize("when", ["before", "after"])
def test_driver_killed_at_the_record_of_a_replay_resumes(tmp_path, when):
    plan, append = write_replay_plan(tmp_path, num_slots=1), Ledger.append
    killed_at = set()

    def append_or_die(self, kind, key, body):
        if kind != "replayed" or key in killed_at:
            return append(self, kind, key, body)
        killed_at.add(key)
        if when == "after":
            append(self, kind, key, body)
        raise KilledError

    with (
        fake_machines(["a", "b", "c"]) as (pools, _),
        mock.patch.object(Ledger, "append", append_or_die),
    ):
        codes = [run_forerun("sweep", plan, "--study", tmp_path / "study")[0] for _ in range(2)]
    ledger = Ledger.read(tmp_path / "study")
    assert codes[-1] == 0 and len(killed_at) == 1 and list_outcomes(ledger) == ["agrees"]
    num_replays = sum(again for pool in pools for *_, again in pool.admitted)
    assert num_replays == (1 if when == "after" else 2), "a recorded replay is not repeated"
