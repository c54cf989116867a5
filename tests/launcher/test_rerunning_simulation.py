"""Searches on machines of which one corrupts silently: many seeds, workers lost and drivers killed meanwhile."""

import dataclasses
import random
from collections import Counter
from unittest import mock

import pytest
from tiny_study import plan_with, write_corpus

from launcher.study.opening import plan_study
from launcher.study.rerunning import CorruptHostError, replay_search
from launcher.study.stages import bank_key
from launcher.study.sweeping import run_search
from proxies.core import canon
from proxies.core.spec import Curve, RunResult, RunSpec
from sweeps.run.drive import drive
from sweeps.run.pool import Finished, Report
from sweeps.store.ledger import Ledger
from sweeps.store.quarantine import quarantined, suspects

HOSTS = ("a", "b", "c", "d")
NUM_SEEDS = 30
PLAN = """
[proxy]
num_slots = 1
[search]
num_trials = 8
parallelism = 4
num_startup = 4
num_replays = 2
sampler = "random"
"""


class KilledError(BaseException):
    """The driver's process is gone."""


class Machines:
    """One worker a host; the odd one's answers are off in a share of its executions."""

    num_workers = len(HOSTS)

    def __init__(self, rng, odd, share, lost):
        self.random, self.odd, self.share, self.lost = rng, odd, share, lost
        self.waiting, self.processes = [], Counter()
        self.salt = rng.random()  # another trial wins each time, on another machine

    def start(self, worker, call):
        self.waiting.append((worker, call))

    def wait(self, timeout_seconds):
        if not self.waiting:
            return []
        worker, call = self.waiting.pop(self.random.randrange(len(self.waiting)))
        site = {"host": HOSTS[worker], "process": f"{worker} {self.processes[worker]}", "cpu": "one kind"}
        if call.probe is not None:
            return [Report(worker=worker, answer=site)]
        if self.random.random() < self.lost:
            return [Report(worker=worker, error="gone", cause="lost_worker")]
        return [Report(worker=worker, finished=tuple(self.ended(*each, site) for each in call.admit))]

    def ended(self, slot, data, site):
        spec = canon.decode(RunSpec, data)
        rng = random.Random(f"{spec.id} {self.salt}")
        off = site["host"] == self.odd and self.random.random() < self.share
        losses = [3.0 + rng.random() + (1e-9 * off if step == 4 else 0.0) for step in range(spec.schedule.num_steps)]
        steps = tuple(range(1, len(losses) + 1))
        curve = Curve(steps=steps, train_loss_nats=tuple(losses), grad_norm=(1.0,) * len(losses))
        result = RunResult(
            id=spec.id, status="finished", loss_nats=losses[-1], num_steps=len(losses), last_train_loss_nats=losses[-1],
            curve_id=canon.content_id(curve), flops=1.0, tokens=1, seconds=0.0, reason="",
            environment={"device": "cpu", **site},
        )  # fmt: skip
        return Finished(slot=slot, result=canon.to_json(result), curve=canon.to_json(curve))

    def restart(self, worker):
        self.processes[worker] += 1
        self.waiting = [each for each in self.waiting if each[0] != worker]

    def close(self):
        pass


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plan")
    write_corpus(folder)
    return plan_with(folder, PLAN)


def killing(rng, share):
    """The driver dies now and then, before a record is written or after."""
    append = Ledger.append

    def mutant(self, kind, key, body):
        if rng.random() < share:
            raise KilledError
        record = append(self, kind, key, body)
        if rng.random() < share:
            raise KilledError
        return record

    return mock.patch.object(Ledger, "append", mutant)


def simulated(plan, folder, seed, odd="c", share=1.0, lost=0.1, kills=0.03):
    """A search and its replays to their end; the ledger, what was said, and the machines."""
    rng = random.Random(seed)
    study = dataclasses.replace(plan_study(plan, folder), study_dir=folder)
    pool = Machines(rng, odd, share, lost)

    def drives(label, source, specs):
        drive(
            source, pool, ledger, folder, num_slots_for=lambda spec: 1, bank_key_for=bank_key, steps_per_call=50,
            max_attempts=10**6,
        )  # fmt: skip

    said = None
    with killing(rng, kills):
        while True:
            pool.waiting.clear()
            try:
                with Ledger.open(folder, study.question, create=True) as ledger:
                    run_search(study, ledger, drives, bank_key)
                    replay_search(study, ledger, lambda: pool, bank_key, 50, lambda: None)
                break
            except KilledError:
                continue
            except CorruptHostError as error:
                said = error
                break
    return Ledger.read(folder), said, pool


def check(ledger, said, pool, odd):
    """Whoever was looked at there is found; nobody else is; no execution is recorded twice."""
    verdicts = [record.body for record in ledger.records("replayed")]
    assert len(verdicts) == 2 and [record.body["why"] for record in ledger.records("drawn")] == ["winner", "random"]
    for body in verdicts:
        looked_at = odd in body["hosts"][:2]
        assert body["outcome"] in (("differs",) if looked_at and pool.share == 1.0 else ("agrees", "differs"))
        assert looked_at or body["outcome"] == "agrees"
        assert body["outcome"] != "differs" or body["odd_host"] == odd
        reruns = [record for record in ledger.records("rerun") if record.key.startswith(body["run_id"])]
        assert len(reruns) == (2 if body["outcome"] == "differs" else 1), "a third tells; nothing is run again"
    found = any(body["outcome"] == "differs" for body in verdicts)
    assert quarantined(ledger) == ((odd,) if found else ())
    assert (said is not None) == any(suspects(ledger).values())
    assert said is None or said.exit_code == 3
    return found


def test_an_odd_machine_is_found_where_it_was_looked_at(plan, tmp_path):
    """Workers are lost and drivers killed meanwhile."""
    found = 0
    for seed in range(NUM_SEEDS):
        ledger, said, pool = simulated(plan, tmp_path / str(seed), seed)
        found += check(ledger, said, pool, "c")
    # Of 4 hosts that work alike: 1 - (1 - 2 / 4) ** 2 = 3 / 4 of the studies; four standard errors of 30 are 0.32.
    assert 0.43 < found / NUM_SEEDS < 1.0, found / NUM_SEEDS


def test_honest_machines_are_never_accused(plan, tmp_path):
    for seed in range(NUM_SEEDS // 3):
        ledger, said, pool = simulated(plan, tmp_path / str(seed), seed, odd="")
        assert not check(ledger, said, pool, "")
        assert {record.body["outcome"] for record in ledger.records("replayed")} == {"agrees"}


def test_one_that_is_wrong_now_and_then_is_found_less_often(plan, tmp_path):
    runs = [simulated(plan, tmp_path / str(seed), seed, share=0.3, lost=0, kills=0) for seed in range(NUM_SEEDS)]
    found = sum(bool(quarantined(ledger)) for ledger, _, _ in runs)
    assert 0 < found < 0.75 * len(runs)
