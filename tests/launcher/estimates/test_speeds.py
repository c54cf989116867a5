"""How fast proxies are taken to be, by what was measured of others."""

import dataclasses

from tiny_study import write_plan

from launcher.calibration.study_cost import WORKER_FLOPS, Speeds
from launcher.estimates.machine import Span
from launcher.plan.calibration_records import ModeRequest
from launcher.study.study_folder import plan_study


def test_the_nearest_that_was_measured_of_the_same_stage_counts(tmp_path):
    study = plan_study(write_plan(tmp_path), tmp_path / "study")
    spec = study.trial(study.space.lowest)
    wide = dataclasses.replace(spec, shape=study.shape(64))
    proxy = ModeRequest(
        part="proxy", shape=spec.shape, batch_tokens=spec.batch_tokens, given=spec.numerics, open=()
    )
    measured = {
        proxy: 1.0,
        dataclasses.replace(proxy, part="ladder"): 2.0,
        dataclasses.replace(proxy, part="ladder", shape=study.shape(24)): 3.0,
    }
    speeds = Speeds(
        measured=tuple(
            (asked, Span(value=rate, low=rate, high=rate)) for asked, rate in measured.items()
        )
    )
    assert speeds.of(spec).value == 1.0
    assert speeds.of(spec, "ladder").value == 2.0
    assert speeds.of(wide).value == speeds.of(wide, "ladder").value == 3.0
    assert Speeds().of(spec, "ladder") == WORKER_FLOPS
