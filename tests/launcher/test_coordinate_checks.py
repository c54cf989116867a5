"""The coordinate check's runs are read by workers: whichever answers, in order; the driver's
process loads no torch.
"""

import dataclasses
import json
import subprocess
import sys

import pytest
from main_run import spec_of, write_corpus
from test_host import FAILING

from launcher.study.coordinate_checks import _read_runs
from launcher.workers.host import HostFactory
from proxies.coordinates.coordinates import CoordinateProbe
from proxies.core import canon
from proxies.core.schedule import Schedule
from proxies.core.spec import Numerics
from proxies.external.factory import load
from sweeps.run.pool import HostCall, InlinePool, Report, carry_out
from sweeps.store.errors import RunsFail


class Faulty:
    """Two workers in this process; `faults` are what the next answers are instead."""

    num_workers = 2

    def __init__(self, factory, faults=()):
        self.hosts, self.faults = [InlinePool(factory) for _ in range(2)], list(faults)
        self.calls, self.restarted, self.asked = {}, [], []

    def start(self, worker, call):
        assert worker not in self.calls
        self.calls[worker] = dataclasses.replace(
            call, probe=json.loads(canon.canonical(call.probe))
        )
        self.asked.append(call.probe["spec"]["seed"])

    def wait(self, timeout_seconds):
        worker = max(self.calls)  # the one that was asked last answers first
        call = self.calls.pop(worker)
        if self.faults:
            return [dataclasses.replace(self.faults.pop(0), worker=worker)]
        self.hosts[worker].start(worker, call)
        return [
            dataclasses.replace(report, worker=worker) for report in self.hosts[worker].wait(1.0)
        ]

    def restart(self, worker):
        self.restarted.append(worker)


@pytest.fixture
def case(tmp_path):
    """What makes hosts, and three runs of one width by their seeds."""
    spec = spec_of(write_corpus(tmp_path).data_id)
    constant = Schedule(kind="constant", num_steps=4)
    specs = [
        dataclasses.replace(spec, numerics=Numerics(), schedule=constant, seed=seed)
        for seed in range(3)
    ]
    factory = HostFactory(
        study_dir=str(tmp_path / "study"), corpus=str(tmp_path / "tokens"), code_dir=str(tmp_path)
    )
    return factory, [CoordinateProbe(spec=each, axis="width") for each in specs]


def test_workers_read_runs_in_their_order_and_a_lost_one_is_read_again(case):
    factory, probes = case
    stops = []
    plain = _read_runs(InlinePool(factory), probes, lambda: stops.append(None), 3)
    assert len(stops) == 3 and [len(each.steps) for each in plain] == [4, 4, 4], (
        "steps 0, 1, 2 and the last, 3"
    )
    assert plain[0] != plain[1] and all(each.not_finite_step is None for each in plain)
    lost = Report(worker=0, error="worker lost", cause="lost_worker")
    pool = Faulty(factory, [lost])
    assert _read_runs(pool, probes, lambda: None, 3) == plain
    assert (pool.restarted, pool.asked) == ([1], [0, 1, 1, 2])


def test_a_run_that_fails_as_often_as_allowed_ends_the_check(case):
    factory, probes = case
    memory = Report(worker=0, error="CUDA out of memory", cause="out_of_memory")
    with pytest.raises(
        RunsFail,
        match=r"a run of width \d+ with 2 layers failed: out of memory: CUDA .* To do: give",
    ):
        _read_runs(Faulty(factory, [memory] * 9), probes[:1], lambda: None, 3)
    pool = Faulty(factory, [dataclasses.replace(memory, refused=True)])
    with pytest.raises(RunsFail):
        _read_runs(pool, probes, lambda: None, 3)
    assert pool.restarted == [1] and len(pool.asked) == 2, "no other attempt can help"


def test_a_silent_worker_is_restarted(case, monkeypatch):
    monkeypatch.setattr("launcher.study.coordinate_checks.HANG_SECONDS", -1.0)
    factory, probes = case
    pool = Faulty(factory)
    monkeypatch.setattr(pool, "wait", lambda seconds: pool.calls.clear() or [])
    with pytest.raises(RunsFail, match=r"hung: no answer in -1 s"):
        _read_runs(pool, probes, lambda: None, 2)


def test_an_error_in_the_users_model_names_their_line_here_too(case, tmp_path):
    (tmp_path / "failing.py").write_text(FAILING.replace("> 8", "> 5"))
    factory, (probe, *_) = case
    spec = dataclasses.replace(probe.spec, factory=load("failing:build", tmp_path)[1])
    asked = canon.to_json(dataclasses.replace(probe, spec=spec))
    report = carry_out(
        0, HostCall(bank_key="", num_slots=1, admit=(), seconds=0, probe=asked), factory
    )
    assert report.cause == "user_code" and report.error.startswith(
        "failing.py, line 21: `if self.calls > 5:"
    )


def test_the_driver_loads_no_torch_for_it():
    modules = (
        "import sys, launcher.study.stages, launcher.study.coordinate_checks; "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", modules], check=False).returncode == 0
