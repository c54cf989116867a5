"""Tests of the runs that a plan asks for before anything is known: checks, the first guess of the
target's width, and trials.
"""

import dataclasses
import math

import pytest
from tiny_study import write_plan_with

from forerun._launcher.study.stages.study_folder import read_study
from forerun._proxies.core.flops import count_params


@pytest.fixture(scope="module")
def study(folder):
    return read_study(write_plan_with(folder, ""), folder / "study")


def test_coordinate_check_runs_have_no_clipping_and_no_schedule(study):
    rows = study.coordinate_checks[study.plan.proxy.parametrization]
    assert [row[0].shape.width for row in rows] == [8, 16]
    for spec in (spec for row in rows for spec in row):
        assert spec.hparams.clip_norm is None
        assert (spec.schedule.kind, spec.schedule.warmup_steps) == ("constant", 0)
    assert [spec.seed for spec in rows[0]] == [0, 1]


@pytest.mark.parametrize("budget_flops", [1.0, 1e13, 1e30])
def test_first_guess_of_the_width_is_nearest_for_any_budget(study, budget_flops):
    target = study.plan.target.model_copy(
        update={"budget_flops": budget_flops, "width_multiple": 48}
    )
    changed = dataclasses.replace(study, plan=study.plan.model_copy(update={"target": target}))
    width = changed.target_shape_guess.width
    assert width % 48 == 0 and changed.build_shape(width).num_layers == study.base_shape.num_layers
    if budget_flops == 1e13:
        # 20 tokens per parameter: budget = 6 N * 20 N
        target_params = (budget_flops / 120) ** 0.5
        log_distances = [
            abs(math.log(count_params(changed.build_shape(near)).total / target_params))
            for near in (width - 48, width, width + 48)
        ]
        assert log_distances[1] == min(log_distances)


def test_trials_and_ids_do_not_depend_on_the_cache_size(study, monkeypatch):
    points = [study.space.make_point((share, 0.5, 0.5)) for share in (0.1, 0.5, 0.9)]
    specs = [study.build_trial(point) for point in points]
    monkeypatch.setattr("forerun._launcher.study.plan.study.MAX_CACHED_TRIALS", 2)
    small_cache = dataclasses.replace(study)
    for _ in range(2):
        assert [small_cache.build_trial(point) for point in points] == specs
        assert [small_cache.get_trial_id(point) for point in points] == [spec.id for spec in specs]
    assert len(small_cache._trials) <= 2 and len(set(small_cache._trial_ids.values())) == 3
    assert small_cache.build_trial(points[0], 1).id not in small_cache._trial_ids.values()
