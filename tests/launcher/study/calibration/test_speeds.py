"""Test of the speeds that estimates use for proxies, from the calibrations of others."""

import dataclasses

from tiny_study import write_plan

from forerun._launcher.main_run.estimates.machine import Span
from forerun._launcher.study.calibration.study_cost import WORKER_FLOPS, Speeds
from forerun._launcher.study.plan.calibration_records import ModeRequest
from forerun._launcher.study.stages.study_folder import read_study


def test_speed_of_the_nearest_measured_width_and_stage_is_used(tmp_path):
    study = read_study(write_plan(tmp_path), tmp_path / "study")
    spec = study.build_trial(study.space.lowest)
    wide = dataclasses.replace(spec, shape=study.build_shape(64))
    proxy = ModeRequest(
        part="proxy", shape=spec.shape, batch_tokens=spec.batch_tokens, given=spec.numerics, open=()
    )
    measured = {
        proxy: 1.0,
        dataclasses.replace(proxy, part="ladder"): 2.0,
        dataclasses.replace(proxy, part="ladder", shape=study.build_shape(24)): 3.0,
    }
    speeds = Speeds(
        measured=tuple(
            (request, Span(value=rate, low=rate, high=rate)) for request, rate in measured.items()
        )
    )
    assert speeds.estimate_speed(spec).value == 1.0
    assert speeds.estimate_speed(spec, "ladder").value == 2.0
    assert speeds.estimate_speed(wide).value == speeds.estimate_speed(wide, "ladder").value == 3.0
    assert Speeds().estimate_speed(spec, "ladder") == WORKER_FLOPS
