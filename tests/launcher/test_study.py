"""What each stage asks for: a pure function of the plan and of what is known so far."""

import dataclasses
import math

import pytest
from tiny_study import plan_with

from launcher.study.study_folder import plan_study
from proxies.core.flops import count_params


@pytest.fixture(scope="module")
def study(folder):
    return plan_study(plan_with(folder, ""), folder / "study")


def test_the_coordinate_check_hides_nothing(study):
    rows = study.check_runs(study.plan.parametrization)
    assert [row[0].shape.width for row in rows] == [8, 16]
    for spec in (spec for row in rows for spec in row):
        assert spec.hparams.clip_norm is None
        assert (spec.schedule.kind, spec.schedule.warmup_steps) == ("constant", 0)
    assert [spec.seed for spec in rows[0]] == [0, 1]


@pytest.mark.parametrize("budget_flops", [1.0, 1e13, 1e30])
def test_the_width_before_any_fit_is_the_choosers_for_any_budget(study, budget_flops):
    target = study.plan.target.model_copy(
        update={"budget_flops": budget_flops, "width_multiple": 48}
    )
    other = dataclasses.replace(study, plan=study.plan.model_copy(update={"target": target}))
    width = other.target_shape_guess.width
    assert width % 48 == 0 and other.shape(width).num_layers == study.base_shape.num_layers
    if budget_flops == 1e13:
        params = [count_params(other.shape(near)).total for near in (width - 48, width, width + 48)]
        missed = [abs(math.log(n / (budget_flops / 120) ** 0.5)) for n in params]
        assert missed[1] == min(missed)


def test_trials_and_their_ids_are_the_same_when_few_are_kept(study, monkeypatch):
    points = [study.space.at((share, 0.5, 0.5)) for share in (0.1, 0.5, 0.9)]
    specs = [study.trial(point) for point in points]
    monkeypatch.setattr("launcher.plan.study.MOST_TRIALS", 2)
    other = dataclasses.replace(study)
    for _ in range(2):
        assert [other.trial(point) for point in points] == specs
        assert [other.trial_id(point) for point in points] == [spec.id for spec in specs]
    assert len(other._trials) <= 2 and len(set(other._trial_ids.values())) == 3
    assert other.trial(points[0], 1).id not in other._trial_ids.values()
