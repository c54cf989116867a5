"""A study's calibration: who measures, what is recorded, that it is never made again; on planted
machines and real.
"""

import dataclasses
import json

import pytest
from planted_machine import Machine
from tiny_study import ask, forerun, plan_with, write_corpus

from launcher.calibration import procedure
from launcher.calibration.procedure import calibrate, calibrated, calibrations, groups_of
from launcher.calibration.study_cost import speeds_of
from launcher.plan.calibration_records import WorkerKind
from launcher.study.stages import InterruptedStudyError, Runner
from launcher.study.study_folder import open_ledger, plan_study, recorded
from proxies.core import canon
from proxies.core.spec import Numerics
from proxies.training.calibration import CalibrationProbe
from sweeps.run.pool import Report
from sweeps.store.errors import ClusterUnfit, RunsFail
from sweeps.store.ledger import CALIBRATION, Ledger
from sweeps.store.sites import WHERE

AUTO = '[proxy]\nnum_slots = "auto"\n[ladder]\nnum_slots = "auto"\n'
GIB = 2**30
SHORT = (
    "[transfer]\ndurations = []\nhyperparameters = {}\nmax_extensions = 0\ncontrol_widths = []\n"
)


class PlantedPool:
    """Workers that answer probes as a machine would; `deaf` ones never do, `failing` ones break
    where they are told.
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
        self.machine, self.num_workers, self.deaf, self.failing = (
            machine,
            num_workers,
            deaf,
            failing,
        )
        self.cause = cause
        self.calls, self.restarted, self.probes = {}, [], []

    def start(self, worker, call):
        assert worker not in self.calls
        self.calls[worker] = (
            call.probe if call.probe == WHERE else canon.decode(CalibrationProbe, call.probe)
        )
        self.probes += [] if call.probe == WHERE else [self.calls[worker]]

    def wait(self, timeout_seconds):
        reports = [self.report(worker) for worker in list(self.calls) if worker not in self.deaf]
        self.calls = {worker: probe for worker, probe in self.calls.items() if worker in self.deaf}
        return reports

    def report(self, worker):
        if self.calls[worker] == WHERE:
            return Report(worker=worker, answer={"device": self.kinds[worker]})
        modes = self.calls[worker].modes
        if self.failing(worker, modes):
            return Report(worker=worker, error="worker lost", cause=self.cause)
        return Report(worker=worker, answer=canon.to_json(self.machine.answer(modes)))

    def restart(self, worker):
        self.calls.pop(worker, None)
        self.restarted.append(worker)

    def close(self):
        pass


def doubling(limit):
    return Machine(lambda mode: 10.0 * min(mode.num_slots, limit))


@pytest.fixture(autouse=True)
def every_group_is_worth_it(monkeypatch):
    monkeypatch.setattr(procedure, "LEAST_SECONDS", 0.0)


@pytest.fixture
def study(folder, tmp_path):
    return plan_study(plan_with(folder, AUTO), tmp_path / "study")


STAGES = ("sweep", "transfer", "ladder")


def run(study, pool, check_stop=lambda: None, stages=STAGES):
    with open_ledger(study) as ledger:
        study = calibrated(study, ledger)
        for stage in stages:
            study = calibrate(study, ledger, stage, lambda: pool, check_stop)
        return study


def test_what_workers_measure_at_once_is_chosen_and_recorded(study):
    pool = PlantedPool(doubling(4))
    found = run(study, pool)
    ledger = Ledger.read(study.study_dir)
    assert [record.kind for record in ledger.records()] == ["plan", "driver", *[CALIBRATION] * 5]
    assert len(pool.probes) % 2 == 0 and pool.probes[0] == pool.probes[1], "both workers, the same"
    by_size = {(one.asked.part, one.asked.shape.width): one for one in calibrations(ledger)}
    assert by_size["proxy", 16].chosen == Numerics(num_slots=4)
    trial = found.trial(study.space.lowest)
    assert trial.numerics == by_size["proxy", 8].chosen != study.trial(study.space.lowest).numerics
    assert all(not json.dumps(record.body).count("NaN") for record in ledger.records(CALIBRATION))


def test_a_stage_measures_the_shapes_that_it_runs_and_chooses_as_all_at_once_would(study, tmp_path):
    """The work of all stages counts from the first on; what shapes of two parts share is measured
    once.
    """
    all_ = run(study, PlantedPool(doubling(4)))
    other, measured = dataclasses.replace(study, study_dir=tmp_path / "other"), {}
    for stage in STAGES:
        pool = PlantedPool(doubling(4))
        found = run(other, pool, stages=[stage])  # a driver of its own each time
        measured[stage] = {probe.spec.shape.width for probe in pool.probes}
        run(other, PlantedPool(None), stages=[stage])  # nothing is asked for again
    assert measured == {"sweep": {8}, "transfer": {16}, "ladder": {24}}
    assert found.chosen == all_.chosen
    assert groups_of(found) == groups_of(study), "of the plan alone, whatever was chosen"
    planned = {
        one.asked.key: one.figure.planned_seconds
        for one in calibrations(Ledger.read(study.study_dir))
    }
    apart = {
        one.asked.key: one.figure.planned_seconds
        for one in calibrations(Ledger.read(other.study_dir))
    }
    assert apart == pytest.approx(planned, rel=2.0), "of the machine's load alone"


def test_other_workers_measure_anew(study):
    run(study, PlantedPool(doubling(4)), stages=["sweep"])
    pool = PlantedPool(doubling(4), kinds=("NVIDIA A100", "NVIDIA H100"))
    run(study, pool, stages=["ladder"])
    assert {probe.spec.shape.width for probe in pool.probes} == {8, 16, 24}


A100, H100 = "NVIDIA A100-SXM4-40GB", "NVIDIA H100 80GB HBM3"
WIDE = ("search.num_trials=32", "search.parallelism=16")


class TwoKinds(PlantedPool):
    """One worker with 40 GiB and rate 1, one with 80 GiB and rate 3; a slot holds 12 GiB."""

    def __init__(self, *, kinds=(A100, H100), **options):
        super().__init__(None, len(kinds), kinds=kinds, **options)
        speed, held = {A100: 1.0, H100: 3.0}, lambda mode: 12 * GIB * mode.num_slots
        self.machines = {
            kind: Machine(
                lambda mode, rate=rate: rate * mode.num_slots,
                free=free * GIB,
                held=held,
                kind="cuda",
            )
            for (kind, rate), free in zip(speed.items(), (40, 80), strict=True)
        }

    def report(self, worker):
        self.machine = self.machines[self.kinds[worker]]
        return super().report(worker)


def test_kinds_of_gpu_are_told_apart_and_the_smallest_has_to_hold_a_mode(study, folder, tmp_path):
    study = plan_study(folder / "plan.toml", study.study_dir, WIDE)
    found = run(study, TwoKinds(), stages=["sweep"])
    (record,) = calibrations(Ledger.read(study.study_dir))
    told = {each.kind: (each.num_workers, each.free_bytes) for each in record.kinds}
    assert told == {A100: (1, 40 * GIB), H100: (1, 80 * GIB)}
    assert record.chosen.num_slots == 2, "four of 12 GiB fit on the H100 alone"
    assert max(figure.mode.num_slots for figure in record.figures) == 2, "nor is it tried"
    rate = {each.kind: each.trial_steps_per_second for each in record.figure.by_kind}
    assert 2 < rate[H100] / rate[A100] < 4.5
    assert record.figure.trial_steps_per_second == pytest.approx(sum(rate.values()) / 2)
    assert found.trial(study.space.lowest).numerics == record.chosen, (
        "one mode, whichever worker runs it"
    )
    large = plan_study(folder / "plan.toml", tmp_path / "large", WIDE)
    run(large, TwoKinds(kinds=(H100, H100)), stages=["sweep"])
    (record,) = calibrations(Ledger.read(large.study_dir))
    assert record.chosen.num_slots == 4, "48 of 80 GiB"


def test_a_mode_that_one_kind_does_not_survive_is_refused_for_all(study):
    pool = TwoKinds(
        failing=lambda worker, modes: worker == 0 and any(mode.num_slots > 1 for mode in modes)
    )
    run(study, pool, stages=["sweep"])
    (record,) = calibrations(Ledger.read(study.study_dir))
    assert record.chosen == Numerics() and any(
        "none of some kind" in figure.refused for figure in record.figures
    )


def test_a_run_that_one_kind_cannot_train_is_told_of_that_kind(study):
    with pytest.raises(
        RunsFail, match=f"no worker with {A100} could train a run of width 8: worker lost"
    ):
        run(study, TwoKinds(failing=lambda worker, modes: worker == 0), stages=["sweep"])


def test_a_worker_that_never_names_its_gpu_ends_no_calibration(study, folder):
    """Its GPU is broken, or is slow to open: beside workers of known kinds it counts for
    nothing.
    """

    class OneNameless(TwoKinds):
        def report(self, worker):
            asked = self.calls[worker]
            if worker == 0 and (asked == WHERE or len(asked.modes) > 1):
                return Report(worker=worker, error="CUDA error: unknown error", cause="error")
            return super().report(worker)

    study = plan_study(folder / "plan.toml", study.study_dir, WIDE)
    run(study, OneNameless(kinds=(H100, A100)), stages=["sweep"])
    (record,) = calibrations(Ledger.read(study.study_dir))
    assert [(each.kind, each.num_workers) for each in record.kinds] == [(A100, 1)]
    assert record.num_workers == 1 and record.chosen.num_slots == 2
    later = OneNameless(kinds=(H100, A100))
    run(study, later, stages=["ladder"])
    assert 8 not in {probe.spec.shape.width for probe in later.probes}, (
        "measured before, on such workers"
    )


def test_an_estimate_counts_each_kind_by_its_rate_and_price(study, folder):
    run(study, TwoKinds(), stages=["sweep"])
    run(study, TwoKinds(kinds=(H100, H100, A100)), stages=["transfer"])
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
    code, body = ask("estimate", folder / "plan.toml", *options)
    assert code == 0
    told = {
        one["kind"]: (one["num_workers"], one["gpu_hours"]["value"], one["usd"]["value"])
        for one in body["kinds"]
    }
    hours = body["total"]["gpu_hours"]["value"]
    assert told == {
        A100: (1, pytest.approx(hours / 3), pytest.approx(hours / 3)),
        H100: (2, pytest.approx(hours * 2 / 3), pytest.approx(hours * 4 / 3)),
    }
    assert body["total"]["usd"]["value"] == pytest.approx(hours * 5 / 3)
    assert "shapes that a later stage decides (3)" in body["worker_flops"]["source"], "the ladder's"
    assert f"{H100}" in forerun("estimate", folder / "plan.toml", *options)[1]


def test_a_kinds_speed_is_not_taken_for_anothers(study):
    """The search was measured on both; of its record, the H100 that is left has its own rate, not
    the mean.
    """
    run(study, TwoKinds(), stages=["sweep"])
    mixed = calibrations(Ledger.read(study.study_dir))
    run(study, TwoKinds(kinds=(H100,)), stages=["transfer"])
    found = calibrations(Ledger.read(study.study_dir))
    rate = {each.kind: each.trial_steps_per_second for each in found[0].figure.by_kind}
    spec = study.trial(study.space.lowest)
    step_flops = spec.flops / spec.schedule.num_steps
    assert speeds_of(found, study, "").of(spec).value == pytest.approx(rate[H100] * step_flops)
    assert speeds_of(mixed, study, "").of(spec).value < 0.8 * rate[H100] * step_flops
    other = [dataclasses.replace(mixed[0], asked=found[1].asked), found[0]]
    alone = [
        dataclasses.replace(one, kinds=(WorkerKind(kind="new", num_workers=1, free_bytes=0),))
        for one in other
    ]
    assert speeds_of(alone, study, "").measured == (), "a kind that measured none of it"


def test_a_cap_in_dollars_needs_the_price_of_every_kind(study, folder, monkeypatch):
    plan = plan_study(
        folder / "plan.toml",
        study.study_dir,
        (
            "cluster.max_usd=5.0",
            "cluster.usd_per_device_hour_by_kind={A100=1.0}",
            "proxy.num_slots=1",
        ),
    )
    monkeypatch.setattr("launcher.study.stages.start_pool", lambda *_: TwoKinds())
    said = f"max_usd = 5: no price is known of {H100}: add it to"
    with open_ledger(plan) as ledger, pytest.raises(ClusterUnfit, match=said):
        Runner(plan, ledger, None).sweep()


def test_a_stop_keeps_what_is_recorded_and_the_rest_is_measured_later(study):
    looks = iter(range(10**6))

    def check_stop():
        if next(looks) > 8:
            raise InterruptedStudyError("stopped")

    with pytest.raises(InterruptedStudyError):
        run(study, PlantedPool(doubling(4)), check_stop)
    kept = Ledger.read(study.study_dir).records(CALIBRATION)
    assert 0 < len(kept) < 5
    run(study, PlantedPool(doubling(64)))
    assert Ledger.read(study.study_dir).records(CALIBRATION)[: len(kept)] == kept
    assert len(Ledger.read(study.study_dir).records(CALIBRATION)) == 5


def test_a_worker_that_breaks_or_is_silent_is_started_anew_and_the_others_count(study, monkeypatch):
    pool = PlantedPool(doubling(4), 3, failing=lambda worker, modes: worker == 2)
    run(study, pool)
    assert set(pool.restarted) == {2}
    monkeypatch.setattr(procedure, "SILENT_SECONDS", -1000.0)
    deaf = PlantedPool(doubling(4), 2, deaf=(1,))
    groups = groups_of(study)
    answers = procedure.asking(study, groups[0].example, deaf, deaf.kinds, 0.1, lambda: None)(
        (Numerics(),)
    )
    assert (len(answers), deaf.restarted) == (1, [1])


def test_a_mode_that_kills_every_worker_is_not_chosen_but_a_run_that_does_is_told(study, tmp_path):
    pool = PlantedPool(
        doubling(64), failing=lambda worker, modes: any(mode.num_slots > 2 for mode in modes)
    )
    found = run(study, pool)
    assert max(mode.num_slots for mode in found.chosen.values()) == 2
    other = dataclasses.replace(study, study_dir=tmp_path / "other")
    with pytest.raises(RunsFail, match="no worker could train a run of width 8: worker lost"):
        run(other, PlantedPool(doubling(4), failing=lambda worker, modes: True, cause="error"))
    assert Ledger.read(other.study_dir).records(CALIBRATION) == ()


@pytest.mark.parametrize("cause", ["out_of_memory", "lost_worker", "hung"])
def test_runs_too_much_to_try_are_left_as_planned(study, cause):
    """They are not refused: when they are run, their batches are split, and nobody waits for one
    call.
    """
    found = run(study, PlantedPool(doubling(4), failing=lambda worker, modes: True, cause=cause))
    assert set(found.chosen.values()) == {Numerics()}
    for one in calibrations(Ledger.read(study.study_dir)):
        assert one.figures == () and "one run alone was too much to try (worker lost)" in one.why


def test_a_child_takes_its_parents_choices_over(study, folder, tmp_path):
    mine = run(study, PlantedPool(doubling(4)))
    child = plan_study(
        folder / "plan.toml", tmp_path / "child", ("search.seed=7", "ladder.widths=[8, 16]")
    )
    with open_ledger(child, study.study_dir) as ledger:
        theirs = calibrated(child, ledger)
        for stage in STAGES:
            theirs = calibrate(
                theirs, ledger, stage, lambda: pytest.fail("measured again"), lambda: None
            )
    assert theirs.chosen.items() < mine.chosen.items(), "width 24 is none of its own"
    given = plan_study(
        folder / "plan.toml", tmp_path / "given", ("proxy.num_slots=2", "ladder.num_slots=1")
    )
    with open_ledger(given, study.study_dir) as ledger:
        assert ledger.records(CALIBRATION) == ()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The tiny study's search, calibrated for real, in this process."""
    folder = tmp_path_factory.mktemp("whole")
    plan = plan_with(folder, AUTO + SHORT)
    write_corpus(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(procedure, "LEAST_SECONDS", 0.0)
        patch.setattr(procedure, "LEAST_PROBE_SECONDS", 0.1)
        code, body = ask("sweep", plan, "--study", folder / "study")
    assert code == 0
    return folder, body


def test_a_study_calibrates_before_its_first_trial(whole):
    folder, _ = whole
    ledger = Ledger.read(folder / "study")
    kinds = list(dict.fromkeys(record.kind for record in ledger.records()))
    assert kinds[:4] == ["plan", "driver", CALIBRATION, "suggestion"]
    chosen = {
        one.asked.shape.width: one.chosen
        for one in calibrations(ledger)
        if one.asked.part == "proxy"
    }
    study, _ = recorded(folder / "study")
    searched = [
        run.spec
        for run in ledger.runs()
        if run.spec.shape == study.base_shape and run.spec.seed == 0
    ]
    assert {spec.numerics for spec in searched} == {chosen[8]}
    assert {(one.asked.part, one.asked.shape.width) for one in calibrations(ledger)} == {
        ("proxy", 8)
    }, "of the search"
    assert all(one.why for one in calibrations(ledger) if not one.figures)


def test_it_is_told_by_status_and_resumed_as_it_was(whole, monkeypatch):
    folder, body = whole
    code, out, _ = forerun("status", folder / "study", "--full")
    assert code == 0
    assert "calibration: " in out and " at width 8" in out
    monkeypatch.setattr(
        "proxies.training.calibration.measure", lambda *a, **b: pytest.fail("measured again")
    )
    before = Ledger.read(folder / "study").records()
    code, again = ask("sweep", folder / "plan.toml", "--study", folder / "study")
    assert code == 0
    assert [record.kind for record in Ledger.read(folder / "study").records()[len(before) :]] == [
        "driver"
    ]
    assert again["trials"] == body["trials"]
