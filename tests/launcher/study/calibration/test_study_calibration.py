"""Tests of a study's calibration on planted and real machines. A calibration measures how fast the
workers train in each mode (number of slots of a bank, compiled or not) and chooses one. The tests
check which workers measure, what is recorded, that nothing is measured twice, and that estimates
use the measured speeds.
"""

import dataclasses
import json

import pytest
from planted_machine import PlantedMachine
from tiny_study import run_forerun, run_json, write_corpus, write_plan_with

from forerun._launcher.study.calibration import procedure
from forerun._launcher.study.calibration.procedure import (
    apply_calibrations,
    calibrate,
    group_runs,
    read_calibrations,
)
from forerun._launcher.study.calibration.study_cost import collect_speeds
from forerun._launcher.study.plan.calibration_records import WorkerKind
from forerun._launcher.study.stages.stages import InterruptedStudyError, StageRunner
from forerun._launcher.study.stages.study_folder import open_ledger, open_recorded_study, read_study
from forerun._proxies.core import canon
from forerun._proxies.core.spec import Numerics
from forerun._proxies.training.calibration import CalibrationProbe
from forerun._sweeps.run.pool import Report
from forerun._sweeps.store.errors import ClusterUnfit, RunsFail
from forerun._sweeps.store.ledger import CALIBRATION, Ledger
from forerun._sweeps.store.sites import PLACE_PROBE

AUTO = '[proxy]\nnum_slots = "auto"\n[ladder]\nnum_slots = "auto"\n'
"""Part of a plan: calibration chooses the number of slots."""
GIB = 2**30
FEW_TESTS = (
    "[transfer]\ndurations = []\nhyperparameters = {}\nmax_extensions = 0\ncontrol_widths = []\n"
)
"""Part of a plan: the only transfer test is that of the learning rate over width."""


class PlantedPool:
    """Fake workers that answer probes (requests to measure) like a planted machine.

    Args:
        machine: Machine that every worker measures.
        num_workers: Number of workers.
        deaf: Workers that never answer.
        failing: Returns whether a worker reports an error for these modes.
        cause: Cause of that error.
        kinds: Kind of device of each worker; empty for CPUs.
    """

    def __init__(
        self,
        machine,
        num_workers=2,
        *,
        deaf=(),
        failing=lambda worker, modes: False,
        cause="error",
        kinds=(),
    ):
        self.kinds = kinds or ("cpu",) * num_workers
        self.machine, self.num_workers = machine, num_workers
        self.deaf, self.failing, self.cause = deaf, failing, cause
        self.calls, self.restarted, self.probes = {}, [], []

    def start(self, worker, call):
        assert worker not in self.calls
        self.calls[worker] = call.probe
        if call.probe != PLACE_PROBE:
            self.calls[worker] = canon.decode(CalibrationProbe, call.probe["modes"])
            self.probes.append(self.calls[worker])

    def wait(self, timeout_seconds):
        reports = [self.report(worker) for worker in list(self.calls) if worker not in self.deaf]
        self.calls = {worker: probe for worker, probe in self.calls.items() if worker in self.deaf}
        return reports

    def report(self, worker):
        if self.calls[worker] == PLACE_PROBE:
            return Report(worker=worker, answer={"device": self.kinds[worker]})
        modes = self.calls[worker].modes
        if self.failing(worker, modes):
            return Report(worker=worker, error="worker lost", cause=self.cause)
        return Report(worker=worker, answer=canon.to_json(self.get_machine(worker).answer(modes)))

    def get_machine(self, worker):
        return self.machine

    def restart(self, worker):
        self.calls.pop(worker, None)
        self.restarted.append(worker)

    def close(self):
        pass


def make_doubling_machine(limit):
    """Return a machine whose speed doubles with the slots, up to `limit` slots."""
    return PlantedMachine(lambda mode: 10.0 * min(mode.num_slots, limit))


@pytest.fixture(autouse=True)
def calibrate_short_work(monkeypatch):
    """Calibrate every group of runs, however little work is planned."""
    monkeypatch.setattr(procedure, "MIN_PLANNED_SECONDS", 0.0)


@pytest.fixture
def study(folder, tmp_path):
    return read_study(write_plan_with(folder, AUTO), tmp_path / "study")


STAGES = ("sweep", "transfer", "ladder")


def run_calibration(study, pool, check_stop=lambda: None, stages=STAGES):
    """Calibrate stages of a study in its ledger; return the study with the choices."""
    with open_ledger(study) as ledger:
        study = apply_calibrations(study, ledger)
        for stage in stages:
            study = calibrate(study, ledger, stage, lambda: pool, check_stop)
        return study


def test_all_workers_measure_and_the_choice_is_recorded(study):
    pool = PlantedPool(make_doubling_machine(4))
    calibrated = run_calibration(study, pool)
    ledger = Ledger.read(study.study_dir)
    assert [record.kind for record in ledger.read_records()] == [
        "plan",
        "driver",
        *[CALIBRATION] * 5,
    ]
    # Both workers measure the same modes.
    assert len(pool.probes) % 2 == 0 and pool.probes[0] == pool.probes[1]
    by_size = {
        (record.asked.part, record.asked.shape.width): record
        for record in read_calibrations(ledger)
    }
    assert by_size["proxy", 16].chosen == Numerics(num_slots=4)
    trial = calibrated.build_trial(study.space.lowest)
    assert (
        trial.numerics
        == by_size["proxy", 8].chosen
        != study.build_trial(study.space.lowest).numerics
    )
    assert all("NaN" not in json.dumps(record.body) for record in ledger.read_records(CALIBRATION))


def test_stages_measured_one_by_one_choose_like_all_at_once(study, tmp_path):
    """Each stage measures the shapes that it runs. A shape of two stages is measured once."""
    at_once = run_calibration(study, PlantedPool(make_doubling_machine(4)))
    one_by_one = dataclasses.replace(study, study_dir=tmp_path / "one-by-one")
    measured = {}
    for stage in STAGES:
        pool = PlantedPool(make_doubling_machine(4))
        calibrated = run_calibration(one_by_one, pool, stages=[stage])  # a new driver each time
        measured[stage] = {probe.spec.shape.width for probe in pool.probes}
        # A repetition would fail if it measured, because this pool has no machine.
        run_calibration(one_by_one, PlantedPool(None), stages=[stage])
    assert measured == {"sweep": {8}, "transfer": {16}, "ladder": {24}}
    assert calibrated.chosen == at_once.chosen
    assert group_runs(calibrated) == group_runs(study), "groups do not depend on the choices"

    def read_planned_seconds(study_dir):
        return {
            record.asked.key: record.figure.planned_seconds
            for record in read_calibrations(Ledger.read(study_dir))
        }

    # The planned times differ only by the machine's planted load, which leaves 0.3 to 1 of its
    # speed.
    planned = read_planned_seconds(study.study_dir)
    assert read_planned_seconds(one_by_one.study_dir) == pytest.approx(planned, rel=2.0)


def test_other_kinds_of_workers_measure_again(study):
    run_calibration(study, PlantedPool(make_doubling_machine(4)), stages=["sweep"])
    pool = PlantedPool(make_doubling_machine(4), kinds=("NVIDIA A100", "NVIDIA H100"))
    run_calibration(study, pool, stages=["ladder"])
    assert {probe.spec.shape.width for probe in pool.probes} == {8, 16, 24}


A100, H100 = "NVIDIA A100-SXM4-40GB", "NVIDIA H100 80GB HBM3"
WIDE = ("search.num_trials=32", "search.parallelism=16")
"""Values of `--set` for a search that keeps many slots busy."""


class TwoKindsPool(PlantedPool):
    """Fake workers on A100s and H100s. For each slot, an A100 makes one step a second and an H100
    makes three. An A100 has 40 GiB of memory, an H100 has 80 GiB, and a slot takes 12 GiB.
    """

    def __init__(self, *, kinds=(A100, H100), **options):
        super().__init__(None, len(kinds), kinds=kinds, **options)
        speed, held = {A100: 1.0, H100: 3.0}, lambda mode: 12 * GIB * mode.num_slots
        self.machines = {
            kind: PlantedMachine(
                lambda mode, rate=rate: rate * mode.num_slots,
                free=free * GIB,
                held=held,
                kind="cuda",
            )
            for (kind, rate), free in zip(speed.items(), (40, 80), strict=True)
        }

    def get_machine(self, worker):
        return self.machines[self.kinds[worker]]


def test_each_kind_of_gpu_is_measured_and_the_smallest_limits_the_mode(study, folder, tmp_path):
    study = read_study(folder / "plan.toml", study.study_dir, WIDE)
    calibrated = run_calibration(study, TwoKindsPool(), stages=["sweep"])
    (record,) = read_calibrations(Ledger.read(study.study_dir))
    kinds = {kind.kind: (kind.num_workers, kind.free_bytes) for kind in record.kinds}
    assert kinds == {A100: (1, 40 * GIB), H100: (1, 80 * GIB)}
    # Four slots of 12 GiB fit only on the H100, so four slots are not even measured.
    assert record.chosen.num_slots == 2
    assert max(figure.mode.num_slots for figure in record.figures) == 2
    rate = {kind.kind: kind.trial_steps_per_second for kind in record.figure.by_kind}
    assert 2 < rate[H100] / rate[A100] < 4.5, "planted is 3, with noise"
    assert record.figure.trial_steps_per_second == pytest.approx(sum(rate.values()) / 2)
    assert calibrated.build_trial(study.space.lowest).numerics == record.chosen
    large = read_study(folder / "plan.toml", tmp_path / "large", WIDE)
    run_calibration(large, TwoKindsPool(kinds=(H100, H100)), stages=["sweep"])
    (record,) = read_calibrations(Ledger.read(large.study_dir))
    assert record.chosen.num_slots == 4, "48 of 80 GiB"


def test_mode_that_fails_on_one_kind_is_refused_for_all(study):
    pool = TwoKindsPool(
        failing=lambda worker, modes: worker == 0 and any(mode.num_slots > 1 for mode in modes)
    )
    run_calibration(study, pool, stages=["sweep"])
    (record,) = read_calibrations(Ledger.read(study.study_dir))
    assert record.chosen == Numerics() and any(
        "every worker of one kind failed" in figure.refused for figure in record.figures
    )


def test_run_that_one_kind_cannot_train_names_that_kind(study):
    with pytest.raises(
        RunsFail, match=f"no worker with {A100} could train a run of width 8: worker lost"
    ):
        run_calibration(
            study, TwoKindsPool(failing=lambda worker, modes: worker == 0), stages=["sweep"]
        )


def test_worker_without_a_known_gpu_is_ignored(study, folder):
    """The worker's GPU is broken or slow to open; the others are calibrated without it."""

    class BrokenGpuPool(TwoKindsPool):
        def report(self, worker):
            probe = self.calls[worker]
            if worker == 0 and (probe == PLACE_PROBE or len(probe.modes) > 1):
                return Report(worker=worker, error="CUDA error: unknown error", cause="error")
            return super().report(worker)

    study = read_study(folder / "plan.toml", study.study_dir, WIDE)
    run_calibration(study, BrokenGpuPool(kinds=(H100, A100)), stages=["sweep"])
    (record,) = read_calibrations(Ledger.read(study.study_dir))
    assert [(kind.kind, kind.num_workers) for kind in record.kinds] == [(A100, 1)]
    assert record.num_workers == 1 and record.chosen.num_slots == 2
    later = BrokenGpuPool(kinds=(H100, A100))
    run_calibration(study, later, stages=["ladder"])
    # Width 8 was measured on such workers before.
    assert 8 not in {probe.spec.shape.width for probe in later.probes}


def test_estimate_counts_each_kind_with_its_rate_and_price(study, folder):
    run_calibration(study, TwoKindsPool(), stages=["sweep"])
    run_calibration(study, TwoKindsPool(kinds=(H100, H100, A100)), stages=["transfer"])
    options = (
        "--study",
        study.study_dir,
        "--set",
        "cluster.worker_gpus=1.0",
        "--set",
        "cluster.num_workers=3",
        "--set",
        "cluster.usd_per_device_hour_by_kind={A100=1.0, H100=2.0}",
    )
    code, body = run_json("estimate", folder / "plan.toml", *options)
    assert code == 0
    kinds = {
        kind["kind"]: (kind["num_workers"], kind["gpu_hours"]["value"], kind["usd"]["value"])
        for kind in body["kinds"]
    }
    hours = body["total"]["gpu_hours"]["value"]
    assert kinds == {
        A100: (1, pytest.approx(hours / 3), pytest.approx(hours / 3)),
        H100: (2, pytest.approx(hours * 2 / 3), pytest.approx(hours * 4 / 3)),
    }
    assert body["total"]["usd"]["value"] == pytest.approx(hours * 5 / 3)
    # The ladder's shapes are not decided yet.
    assert "shapes that a later stage decides (3)" in body["worker_flops"]["source"]
    assert f"{H100}" in run_forerun("estimate", folder / "plan.toml", *options)[1]


def test_speed_of_one_kind_is_not_used_for_another(study):
    """The search was measured on both kinds. If only the H100 is left, its own rate is used, not
    the mean of both.
    """
    run_calibration(study, TwoKindsPool(), stages=["sweep"])
    mixed = read_calibrations(Ledger.read(study.study_dir))
    run_calibration(study, TwoKindsPool(kinds=(H100,)), stages=["transfer"])
    records = read_calibrations(Ledger.read(study.study_dir))
    rate = {kind.kind: kind.trial_steps_per_second for kind in records[0].figure.by_kind}
    spec = study.build_trial(study.space.lowest)
    step_flops = spec.flops / spec.schedule.num_steps
    speeds = collect_speeds(records, study, "")
    assert speeds.estimate_speed(spec).value == pytest.approx(rate[H100] * step_flops)
    assert (
        collect_speeds(mixed, study, "").estimate_speed(spec).value < 0.8 * rate[H100] * step_flops
    )
    new_kind = (WorkerKind(kind="new", num_workers=1, free_bytes=0),)
    exchanged = [dataclasses.replace(mixed[0], asked=records[1].asked), records[0]]
    unmeasured = [dataclasses.replace(record, kinds=new_kind) for record in exchanged]
    assert collect_speeds(unmeasured, study, "").measured == ()


def test_limit_in_dollars_needs_the_price_of_every_kind(study, folder, monkeypatch):
    plan = read_study(
        folder / "plan.toml",
        study.study_dir,
        (
            "cluster.max_usd=5.0",
            "cluster.usd_per_device_hour_by_kind={A100=1.0}",
            "proxy.num_slots=1",
        ),
    )
    monkeypatch.setattr(
        "forerun._launcher.study.stages.stages.start_pool", lambda *_: TwoKindsPool()
    )
    message = f"max_usd = 5: no price is known for {H100}: add it to"
    with open_ledger(plan) as ledger, pytest.raises(ClusterUnfit, match=message):
        StageRunner(plan, ledger, None).sweep()


def test_stopped_calibration_keeps_its_records_and_continues(study):
    num_stop_checks = 0

    def check_stop():
        nonlocal num_stop_checks
        num_stop_checks += 1
        if num_stop_checks > 9:  # after the first of five choices, and before the last
            raise InterruptedStudyError("stopped")

    with pytest.raises(InterruptedStudyError):
        run_calibration(study, PlantedPool(make_doubling_machine(4)), check_stop)
    records = Ledger.read(study.study_dir).read_records(CALIBRATION)
    assert 0 < len(records) < 5
    run_calibration(study, PlantedPool(make_doubling_machine(64)))
    assert Ledger.read(study.study_dir).read_records(CALIBRATION)[: len(records)] == records
    assert len(Ledger.read(study.study_dir).read_records(CALIBRATION)) == 5


def test_failing_or_silent_worker_is_restarted_and_the_others_count(study, monkeypatch):
    pool = PlantedPool(make_doubling_machine(4), 3, failing=lambda worker, modes: worker == 2)
    run_calibration(study, pool)
    assert set(pool.restarted) == {2}
    monkeypatch.setattr(procedure, "MAX_SILENCE_SECONDS", -1000.0)
    deaf = PlantedPool(make_doubling_machine(4), 2, deaf=(1,))
    groups = group_runs(study)
    answers = procedure.make_measure_modes(
        study, groups[0].example, deaf, deaf.kinds, 0.1, lambda: None
    )((Numerics(),))
    assert (len(answers), deaf.restarted) == (1, [1])


def test_mode_that_every_worker_fails_in_is_refused_and_a_run_that_always_fails_is_an_error(
    study, tmp_path
):
    pool = PlantedPool(
        make_doubling_machine(64),
        failing=lambda worker, modes: any(mode.num_slots > 2 for mode in modes),
    )
    calibrated = run_calibration(study, pool)
    assert max(mode.num_slots for mode in calibrated.chosen.values()) == 2
    failing_study = dataclasses.replace(study, study_dir=tmp_path / "failing")
    failing = PlantedPool(
        make_doubling_machine(4), failing=lambda worker, modes: True, cause="error"
    )
    with pytest.raises(RunsFail, match="no worker could train a run of width 8: worker lost"):
        run_calibration(failing_study, failing)
    assert Ledger.read(failing_study.study_dir).read_records(CALIBRATION) == ()


@pytest.mark.parametrize("cause", ["out_of_memory", "lost_worker", "hung"])
def test_runs_too_large_to_measure_keep_the_planned_mode(study, cause):
    """The runs are not refused. When they are trained, their batches may be split, and a call has
    no deadline.
    """
    pool = PlantedPool(make_doubling_machine(4), failing=lambda worker, modes: True, cause=cause)
    calibrated = run_calibration(study, pool)
    assert set(calibrated.chosen.values()) == {Numerics()}
    for record in read_calibrations(Ledger.read(study.study_dir)):
        assert record.figures == ()
        assert (
            "a single run takes too much memory or time to be measured (worker lost)" in record.why
        )


def test_child_study_takes_its_parents_choices(study, folder, tmp_path):
    parent = run_calibration(study, PlantedPool(make_doubling_machine(4)))
    child = read_study(
        folder / "plan.toml", tmp_path / "child", ("search.seed=7", "ladder.widths=[8, 16]")
    )
    with open_ledger(child, study.study_dir) as ledger:
        child = apply_calibrations(child, ledger)
        for stage in STAGES:
            child = calibrate(
                child, ledger, stage, lambda: pytest.fail("measured again"), lambda: None
            )
    assert child.chosen.items() < parent.chosen.items(), "width 24 is not in the child's plan"
    fixed = read_study(
        folder / "plan.toml", tmp_path / "fixed", ("proxy.num_slots=2", "ladder.num_slots=1")
    )
    with open_ledger(fixed, study.study_dir) as ledger:
        assert ledger.read_records(CALIBRATION) == ()


@pytest.fixture(scope="module")
def searched_study(tmp_path_factory):
    """Folder and answer of the tiny study's search with a real calibration in this process."""
    folder = tmp_path_factory.mktemp("searched")
    plan = write_plan_with(folder, AUTO + FEW_TESTS)
    write_corpus(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(procedure, "MIN_PLANNED_SECONDS", 0.0)
        patch.setattr(procedure, "MIN_PROBE_SECONDS", 0.1)
        code, body = run_json("sweep", plan, "--study", folder / "study")
    assert code == 0
    return folder, body


def test_study_calibrates_before_its_first_trial(searched_study):
    folder, _ = searched_study
    ledger = Ledger.read(folder / "study")
    kinds = list(dict.fromkeys(record.kind for record in ledger.read_records()))
    assert kinds[:4] == ["plan", "driver", CALIBRATION, "suggestion"]
    records = read_calibrations(ledger)
    assert {(record.asked.part, record.asked.shape.width) for record in records} == {("proxy", 8)}
    study, _ = open_recorded_study(folder / "study")
    trained_modes = {
        run.spec.numerics
        for run in ledger.read_runs()
        if run.spec.shape == study.base_shape and run.spec.seed == 0
    }
    assert trained_modes == {records[0].chosen}
    assert all(record.why for record in records if not record.figures)


def test_calibration_is_shown_by_status_and_not_repeated(searched_study, monkeypatch):
    folder, body = searched_study
    code, out, _ = run_forerun("status", folder / "study", "--full")
    assert code == 0
    assert "calibration: " in out and " at width 8" in out
    monkeypatch.setattr(
        "forerun._proxies.training.calibration.measure_modes",
        lambda *a, **b: pytest.fail("measured again"),
    )
    before = Ledger.read(folder / "study").read_records()
    code, again = run_json("sweep", folder / "plan.toml", "--study", folder / "study")
    assert code == 0
    assert [
        record.kind for record in Ledger.read(folder / "study").read_records()[len(before) :]
    ] == ["driver"]
    assert again["trials"] == body["trials"]
