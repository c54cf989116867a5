"""What each stage asks for: a pure function of the plan and of what is known so far."""

import dataclasses
import math

import pytest
from tiny_study import write_plan

from launcher.plan.study import NoFinishedTrialError
from launcher.study.opening import plan_study
from proxies.core.flops import count_params
from proxies.core.spec import RunResult

BEST = {"learning_rate": 0.02, "warmup_fraction": 0.1, "clip_norm": 1.0}


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    folder = tmp_path_factory.mktemp("study")
    return plan_study(write_plan(folder), folder / "study")


def outcome(spec, loss_nats):
    status = "diverged" if loss_nats is None else "finished"
    return RunResult(
        id=spec.id, status=status, loss_nats=loss_nats, num_steps=6, last_train_loss_nats=None, curve_id="0" * 64,
        flops=0.0, tokens=0, seconds=0.0, environment={}, reason="" if loss_nats else "planted",
    )  # fmt: skip


def test_a_trial_is_the_plan_at_the_base_width(study):
    spec = study.trial(BEST)
    assert spec.shape == spec.base_shape == study.base_shape
    assert spec.shape.vocab_size == study.manifest.vocab_size
    assert (spec.hparams.learning_rate, spec.hparams.clip_norm) == (0.02, 1.0)
    assert spec.data_id == study.manifest.data_id
    assert spec.schedule.num_steps == study.plan.proxy.num_steps


def test_the_question_holds_the_data_and_not_the_place(study):
    assert study.question["data_id"] == study.manifest.data_id
    assert dataclasses.replace(study, study_dir=study.study_dir / "x").question == study.question


def test_the_coordinate_check_hides_nothing(study):
    rows = study.check_runs(study.plan.parametrization)
    assert [row[0].shape.width for row in rows] == [8, 16]
    for spec in (spec for row in rows for spec in row):
        assert spec.hparams.clip_norm is None
        assert (spec.schedule.kind, spec.schedule.warmup_steps) == ("constant", 0)
    assert [spec.seed for spec in rows[0]] == [0, 1]


def test_the_best_trial(study):
    points = [{**BEST, "learning_rate": rate} for rate in (0.0123456, 0.0234567, 0.0345678)]
    results = {
        study.trial(p).id: outcome(study.trial(p), loss) for p, loss in zip(points, (3.0, 2.5, None), strict=True)
    }
    assert study.best_trial(points, results) == 1
    assert study.space.rounded(points[1]) == {**BEST, "learning_rate": 0.0235}
    diverged = {study.trial(p).id: outcome(study.trial(p), None) for p in points}
    said = r"none of 3 trials finished; the last: diverged, planted\. If they diverged, lower search\.learning_rate"
    with pytest.raises(NoFinishedTrialError, match=said):
        study.best_trial(points, diverged)


def test_a_point_may_set_any_hyperparameter(study):
    spec = study.trial({**BEST, "weight_decay": 0.3, "beta2": 0.9, "output_multiplier": 2.0})
    hparams = spec.hparams
    assert (hparams.weight_decay, hparams.beta2, hparams.output_multiplier, hparams.beta1) == (0.3, 0.9, 2.0, 0.9)


@pytest.mark.parametrize("budget_flops", [1.0, 1e13, 1e30])
def test_the_width_before_any_fit_is_the_choosers_for_any_budget(study, budget_flops):
    target = study.plan.target.model_copy(update={"budget_flops": budget_flops, "width_multiple": 48})
    other = dataclasses.replace(study, plan=study.plan.model_copy(update={"target": target}))
    width = other.target_width_guess
    assert width % 48 == 0 and other.shape(width).num_layers == study.base_shape.num_layers
    if budget_flops == 1e13:
        params = [count_params(other.shape(near)).total for near in (width - 48, width, width + 48)]
        missed = [abs(math.log(n / (budget_flops / 120) ** 0.5)) for n in params]
        assert missed[1] == min(missed)
