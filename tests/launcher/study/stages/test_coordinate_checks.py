"""Tests of how workers execute and measure the runs of a coordinate check, which compares the sizes
of activations across widths: in any order, with retries, and without torch in the driver's process.
"""

import dataclasses
import json
import subprocess
import sys

import pytest
from failing_factory import FAILING_FACTORY
from main_run import make_spec, write_corpus

from forerun._launcher.study.stages.coordinate_checks import _measure_runs
from forerun._launcher.study.workers.host import HostFactory
from forerun._proxies.coordinates.coordinate_check import CoordinateProbe
from forerun._proxies.core import canon
from forerun._proxies.core.schedule import Schedule
from forerun._proxies.core.spec import Numerics
from forerun._proxies.external.factory import load_factory
from forerun._sweeps.run.pool import HostCall, InlinePool, Report, execute_call
from forerun._sweeps.store.errors import RunsFail


class FaultyPool:
    """Two workers in this process. The reports in `faults` replace the first answers, in order."""

    num_workers = 2

    def __init__(self, factory, faults=()):
        self.hosts, self.faults = [InlinePool(factory) for _ in range(2)], list(faults)
        self.calls, self.restarted, self.started_seeds = {}, [], []

    def start(self, worker, call):
        assert worker not in self.calls
        self.calls[worker] = dataclasses.replace(
            call, probe=json.loads(canon.to_canonical_json(call.probe))
        )
        self.started_seeds.append(call.probe["coordinates"]["spec"]["seed"])

    def wait(self, timeout_seconds):
        worker = max(self.calls)  # worker 1 answers first, so answers are out of order
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
    """A host factory, and probes for three runs that differ in their seeds."""
    spec = make_spec(write_corpus(tmp_path).data_id)
    constant = Schedule(kind="constant", num_steps=4)
    specs = [
        dataclasses.replace(spec, numerics=Numerics(), schedule=constant, seed=seed)
        for seed in range(3)
    ]
    factory = HostFactory(
        study_dir=str(tmp_path / "study"), corpus=str(tmp_path / "tokens"), code_dir=str(tmp_path)
    )
    return factory, [CoordinateProbe(spec=run, axis="width") for run in specs]


def test_measurements_are_returned_in_order_and_a_lost_run_is_executed_again(case):
    factory, probes = case
    stop_checks = []
    measurements = _measure_runs(
        InlinePool(factory), probes, lambda: stop_checks.append(None), max_attempts=3
    )
    assert len(stop_checks) == 3
    # Each run is measured at steps 0, 1, 2, and at its last step, 3.
    assert [len(run.steps) for run in measurements] == [4, 4, 4]
    assert measurements[0] != measurements[1]
    assert all(run.not_finite_step is None for run in measurements)
    lost = Report(worker=0, error="worker lost", cause="lost_worker")
    pool = FaultyPool(factory, [lost])
    assert _measure_runs(pool, probes, lambda: None, max_attempts=3) == measurements
    # Worker 1 was lost with the run of seed 1, which is executed again before that of seed 2.
    assert (pool.restarted, pool.started_seeds) == ([1], [0, 1, 1, 2])


def test_run_that_fails_too_often_ends_the_check(case):
    factory, probes = case
    memory = Report(worker=0, error="CUDA out of memory", cause="out_of_memory")
    with pytest.raises(
        RunsFail,
        match=r"a run of width \d+ with 2 layers failed: out of memory: CUDA .* To do: give",
    ):
        _measure_runs(FaultyPool(factory, [memory] * 9), probes[:1], lambda: None, max_attempts=3)
    pool = FaultyPool(factory, [dataclasses.replace(memory, ends_study=True)])
    with pytest.raises(RunsFail):
        _measure_runs(pool, probes, lambda: None, max_attempts=3)
    assert pool.restarted == [1]
    assert len(pool.started_seeds) == 2, "a refused run is not executed again"


def test_silent_worker_is_an_error(case, monkeypatch):
    module = "forerun._launcher.study.stages.coordinate_checks"
    monkeypatch.setattr(f"{module}.MAX_SILENCE_SECONDS", -1.0)
    factory, probes = case
    pool = FaultyPool(factory)
    monkeypatch.setattr(pool, "wait", lambda seconds: pool.calls.clear() or [])
    with pytest.raises(RunsFail, match=r"hung: no answer in -1 s"):
        _measure_runs(pool, probes, lambda: None, max_attempts=2)


def test_error_in_the_users_model_names_its_line(case, tmp_path):
    (tmp_path / "failing.py").write_text(FAILING_FACTORY.replace("> 8", "> 5"))
    factory, (probe, *_) = case
    spec = dataclasses.replace(probe.spec, factory=load_factory("failing:build", tmp_path)[1])
    data = canon.to_json(dataclasses.replace(probe, spec=spec))
    call = HostCall(bank_key="", num_slots=1, admit=(), seconds=0, probe={"coordinates": data})
    report = execute_call(0, call, factory)
    assert report.cause == "user_code" and report.error.startswith(
        "failing.py, line 21: `if self.calls > 5:"
    )


def test_drivers_side_of_the_check_imports_no_torch():
    script = (
        "import sys; from forerun._launcher.study.stages import stages, coordinate_checks; "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
