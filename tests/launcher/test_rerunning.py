"""Replays of a search with real banks: a machine that flips a bit is found, an honest one never is."""

import json
from collections import Counter
from unittest import mock

import pytest
from rerun_case import PLAN, machines
from tiny_study import ask, forerun, plan_with, write_corpus

from launcher.study import rerunning
from launcher.study.rerun_view import GATE, replay_gates, replays_body, sentences
from sweeps.store.ledger import Ledger
from sweeps.store.quarantine import suspects

MODES = {"K = 4": "", "K = 1": "[proxy]\nnum_slots = 1\n", "medium": '[proxy]\nmatmul_precision = "medium"\n'}


def plan_of(folder, more="", num_slots=4):
    write_corpus(folder)
    return plan_with(folder, PLAN.format(num_slots=num_slots) + more)


@pytest.fixture
def plan(tmp_path):
    return plan_of(tmp_path)


def swept(plan, hosts, corrupt=(), *more, verb="sweep", study="study", **how):
    """Exit code, what was said, the ledger, and the pools."""
    folder = plan.parent / study
    with machines(hosts, corrupt, **how) as (pools, corruption):
        code, out, err = forerun(verb, plan, "--study", folder, *more)
    assert "Traceback" not in err, err
    return code, out + err, Ledger.read(folder), pools, corruption


def outcomes(ledger):
    return [(record.body["outcome"], record.body["odd_host"]) for record in ledger.records("replayed")]


def ran_on(ledger, run_id):
    return ledger.results()[run_id].environment["host"]


@pytest.mark.parametrize("mode", MODES)
def test_honest_machines_agree_to_the_bit(tmp_path, mode):
    """Among other neighbours, in a bank with empty slots, in another process on another machine."""
    code, said, ledger, pools, _ = swept(plan_of(tmp_path, MODES[mode]), ["a", "b", "c"])
    assert code == 0 and outcomes(ledger) == [("agrees", "")] * 2
    for record in ledger.records("replayed"):
        body = record.body
        assert body["allowed_from"] == "bitwise" and body["apart"] == "host" and len(set(body["curve_ids"])) == 1
        assert body["hosts"][0] == ran_on(ledger, body["run_id"]) != body["hosts"][1]
    assert "the winning trial" in said and "drawn by lot" in said and "the same bits" in said
    best = min(ledger.results().values(), key=lambda result: result.loss_nats)
    assert ledger.records("drawn")[0].key == best.id
    assert Counter(replay for *_, replay in pools[0].admitted) == {"": 6, "again": 2}


@pytest.mark.parametrize("num_slots", [1, 4])
def test_a_flipped_bit_of_a_gradient_is_found_and_its_machine_put_into_quarantine(tmp_path, num_slots):
    """The winner ran there, or was run again there."""
    plan, every_trial = plan_of(tmp_path, num_slots=num_slots), ("--set", "search.num_replays=6")
    code, said, ledger, _, corruption = swept(plan, ["a", "b", "c"], ["b"], *every_trial, bit=20)
    assert corruption.num_flips and ("differs", "b") in outcomes(ledger)
    assert [record.key for record in ledger.records("quarantined")] == ["b"]
    theirs = [run.spec.id for run in ledger.runs() if run.result.environment["host"] == "b"]
    assert code == (3 if theirs else 0)
    assert "DIFFERS" in said and "the same bits are promised there" in said
    for record in ledger.records("replayed"):
        assert record.body["outcome"] == ("differs" if "b" in record.body["hosts"][:2] else "agrees")


def test_the_same_without_the_flip_is_honest(tmp_path):
    """The planted machine's bit is what is seen."""
    for every, wanted in ((3, "differs"), (10**9, "agrees")):
        folder = tmp_path / str(every)
        _, _, ledger, _, _ = swept(plan_of(folder), ["a", "b", "c"], ["b"], bit=12, every=every)
        assert wanted in {outcome for outcome, _ in outcomes(ledger)}


@pytest.fixture(scope="module")
def spoilt(tmp_path_factory):
    """A study whose first machine of three computes wrongly, stopped by its replays."""
    plan = plan_of(tmp_path_factory.mktemp("spoilt"))
    code, said, ledger, _, _ = swept(plan, ["a", "b", "c"], ["a"], every=5)
    assert code == 3, said
    return plan, said, ledger


def test_a_study_with_suspect_runs_stops_and_stays_stopped(spoilt):
    plan, said, ledger = spoilt
    assert "a is in quarantine" in said and "suspect" in said and f"--fork {plan.parent / 'study'}" in said
    num_executions = len(ledger.records("rerun"))
    code, again, ledger, pools, _ = swept(plan, ["a", "b", "c"], ["a"])
    assert code == 3 and "a is in quarantine" in again
    assert pools == [] and len(ledger.records("rerun")) == num_executions, "nothing is run for it"
    code, body = ask("status", plan.parent / "study")
    assert code == 0
    (one,) = body["search"]["replays"]["quarantined"]
    assert one["host"] == "a"
    assert set(one["suspect_runs"]) == {run.spec.id for run in ledger.runs() if run.result.environment["host"] == "a"}
    code, out, _ = forerun("status", plan.parent / "study")
    assert "a is in quarantine; suspect are its" in out and one["suspect_runs"][0][:12] in out


@pytest.mark.slow
def test_a_fork_goes_on_without_its_runs_and_without_it(spoilt):
    plan, _, ledger = spoilt
    kept = {run.spec.id for run in ledger.runs() if run.result.environment["host"] != "a"}
    more = ("--fork", plan.parent / "study")
    code, said, child, pools, _ = swept(plan, ["a", "b", "c"], ["a"], *more, study="child", verb="run")
    assert code == 0, said
    assert "a is in quarantine" in said and "nothing runs on these" in said
    assert child.imported() == kept
    assert all("a" not in pool.hosts for pool in pools)
    assert not {run.spec.id for run in child.runs() if run.result.environment["host"] == "a"}
    assert {outcome for outcome, _ in outcomes(child)} == {"agrees"}
    body = json.loads((plan.parent / "child" / "report.json").read_text())
    (gate,) = [gate for gate in body["gates"] if gate["name"] == GATE]
    assert gate["outcome"] == "passed"


def test_a_machine_without_a_run_of_the_study_is_left_aside_and_the_study_goes_on(tmp_path):
    """It had only the replay: what the study found was confirmed by a third."""
    plan = plan_of(tmp_path, "[search]\nparallelism = 1\nnum_startup = 1\n")
    code, said, ledger, _, _ = swept(plan, ["a", "b", "c"], ["b"], every=2)
    assert {ran_on(ledger, run.spec.id) for run in ledger.runs()} == {"a"}
    assert code == 0 and ("differs", "b") in outcomes(ledger)
    assert "no run of this study ended there" in said


def test_of_two_machines_nobody_knows_which_until_there_is_a_third(tmp_path):
    plan = plan_of(tmp_path, num_slots=1)
    code, said, ledger, _, _ = swept(plan, ["a", "b"], ["b"], every=5)
    assert code == 4 and "a third host would tell" in said and "same command" in said
    assert not ledger.records("quarantined")
    code, said, ledger, pools, _ = swept(plan, ["a", "b", "c"], ["b"], every=5)
    assert code == 3 and [record.key for record in ledger.records("quarantined")] == ["b"]
    assert {host for host, _, replay in pools[0].admitted if replay} == {"c"}, "the third execution alone"


def test_one_machine_that_answers_twice_differently_is_odd_itself(plan):
    code, said, ledger, pools, _ = swept(plan, ["a"], ["a"], every=5)
    assert code == 3 and "a gave two answers to one question" in said
    processes = [record.body["processes"] for record in ledger.records("replayed")]
    assert all(len(set(each)) == 2 for each in processes), "its worker was started anew for the replay"
    assert len(pools) == 1


def test_on_another_chip_a_large_fault_is_found_all_the_same(tmp_path):
    plan = plan_of(tmp_path)
    other = {"every": 1, "bit": 22, "everywhere": True, "cpus": ["one kind", "another"]}
    code, said, ledger, pools, _ = swept(plan, ["a", "b"], ["b"], **other)
    assert code == 4 and "rounding allows" in said
    nudged = Counter(host for host, _, replay in pools[0].admitted if replay == "nudged")
    assert nudged["a"] == nudged["b"] > 0, "the noise is measured on both"
    assert "differs" in {outcome for outcome, _ in outcomes(ledger)}


def test_nobody_asks_for_replays_that_no_plan_asks_for(tmp_path):
    plan = plan_of(tmp_path, "[search]\nnum_replays = 0\n")
    code, _, ledger, pools, _ = swept(plan, ["a", "b"], ["b"])
    assert code == 0 and not ledger.records("drawn") and not [each for each in pools[0].admitted if each[2]]
    assert replays_body(ledger) is None and sentences(None) == []


def test_they_can_be_asked_for_later_and_draw_more_of_the_same_lot(plan):
    swept(plan, ["a", "b"])
    for number, expected in ((0, 2), (1, 2), (4, 4), (100, 6)):
        code, _, ledger, _, _ = swept(plan, ["a", "b"], (), "--set", f"search.num_replays={number}")
        assert code == 0 and len(ledger.records("drawn")) == len(ledger.records("replayed")) == expected
    drawn = [record.body["why"] for record in ledger.records("drawn")]
    assert drawn == ["winner"] + ["random"] * 5


def test_the_lot_falls_by_the_ledger(plan):
    swept(plan, ["a", "b"], (), "--set", "search.num_replays=6")
    first = [record.key for record in Ledger.read(plan.parent / "study").records("drawn")]
    _, _, again, _, _ = swept(plan, ["a", "b", "c"], (), "--set", "search.num_replays=6", study="other")
    assert [record.key for record in again.records("drawn")] == first


class KilledError(BaseException):
    """The driver's process is gone."""


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_driver_killed_at_any_record_of_it_goes_on_and_repeats_nothing(tmp_path, when):
    """Each execution that was recorded stands; the machine is found in the end whatever was cut."""
    plan, append = plan_of(tmp_path, num_slots=1), Ledger.append
    _, _, honest, _, _ = swept(plan, ["a", "b", "c"], study="honest")
    odd = honest.records("replayed")[0].body["hosts"][1]  # which will run the winner again
    kinds = ("drawn", "rerun", "replayed", "quarantined")

    def cut(left):
        def mutant(self, kind, key, body):
            if kind not in kinds:
                return append(self, kind, key, body)
            left[0] -= 1
            if left[0] == 0 and when == "before":
                raise KilledError
            record = append(self, kind, key, body)
            if left[0] == 0:
                raise KilledError
            return record

        return mock.patch.object(Ledger, "append", mutant)

    kills = 0
    with machines(["a", "b", "c"], [odd]) as (pools, _):
        for _ in range(30):
            left = [1 if when == "after" else 2]
            with cut(left):
                code, _, _ = forerun("sweep", plan, "--study", tmp_path / "study")
            if left[0] > 0:
                break
            kills += 1
    ledger = Ledger.read(tmp_path / "study")
    recorded = len(ledger.records("rerun"))
    assert 3 < kills < 30
    assert ("differs", odd) in outcomes(ledger) and code == (3 if any(suspects(ledger).values()) else 0)
    begun = sum(replay != "" for pool in pools for *_, replay in pool.admitted)
    assert begun <= recorded + kills * 2, "what was recorded is not run again"


def test_a_replay_that_cannot_be_had_tells_nothing_and_closes_the_gate(plan):
    advance = rerunning.Reruns.ended

    def lost(self, check):
        for task, ran in advance(self, check):
            yield task, ran if task.spec.id != winner else "lost 3 times, the last: gone"

    swept(plan, ["a", "b"], (), "--set", "search.num_replays=0")
    ledger = Ledger.read(plan.parent / "study")
    winner = min(ledger.results().values(), key=lambda result: result.loss_nats).id
    with mock.patch.object(rerunning.Reruns, "ended", lost):
        code, said, ledger, _, _ = swept(plan, ["a", "b"])
    assert code == 0 and "cannot tell: lost 3 times" in said
    assert outcomes(ledger) == [("cannot_tell", ""), ("agrees", "")]


class Asked:
    """A study that asks for so many replays."""

    def __init__(self, num_replays):
        self.num_replays = num_replays


def test_the_gate_is_there_where_it_is_asked_for(plan, spoilt):
    swept(plan, ["a", "b"])
    good, bad = Ledger.read(plan.parent / "study"), spoilt[2]
    assert [gate.outcome for gate in replay_gates(Asked(2), good)] == ["passed"]
    assert [gate.outcome for gate in replay_gates(Asked(2), bad)] == ["failed"]
    assert [gate.outcome for gate in replay_gates(Asked(0), bad)] == ["failed"], "what was found is not forgotten"
    other = plan.parent / "other"
    swept(plan, ["a", "b"], (), "--set", "search.num_replays=0", study="other")
    assert replay_gates(Asked(0), Ledger.read(other)) == ()
    (gate,) = replay_gates(Asked(2), Ledger.read(other))
    assert gate.outcome == "cannot_tell" and "forerun sweep" in gate.reason


def test_the_question_of_a_plan_is_the_same_with_and_without(plan):
    """So a study that was begun without can ask for them, and the frozen digest knows nothing of them."""
    swept(plan, ["a", "b"], (), "--set", "search.num_replays=0")
    assert "num_replays" not in Ledger.read(plan.parent / "study").plan["search"]
