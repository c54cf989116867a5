"""What each stage asks for: a pure function of the plan and of what is known so far."""

import dataclasses
import math

import pytest
from tiny_study import write_plan

from launcher.opening import plan_study
from launcher.study import NoFinishedTrialError, recorded_points
from proxies.rules import named
from proxies.spec import RunResult

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


def valley(arm, optimum):
    """Losses of a planted parabola, a little different for each seed."""
    return {
        spec.id: outcome(spec, 3.0 + 0.05 * (log2_lr - optimum) ** 2 + 0.001 * math.sin(7 * spec.seed + log2_lr))
        for spec, log2_lr in arm.specs
    }


def with_transfer(study, **changes):
    transfer = study.plan.transfer.model_copy(update=changes)
    return dataclasses.replace(study, plan=study.plan.model_copy(update={"transfer": transfer}))


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


def test_the_grid_lies_around_the_best_rate_in_whole_octaves(study):
    arm = study.arm(BEST, {}, control=False)
    assert {log2_lr for _, log2_lr in arm.specs} == {-7.0, -6.0, -5.0, -4.0}
    assert all(spec.hparams.learning_rate == 2.0**log2_lr for spec, log2_lr in arm.specs)
    assert {(spec.shape.width, spec.seed) for spec, _ in arm.specs} == {(8, 0), (8, 1), (16, 0), (16, 1)}
    assert not arm.done({})
    assert arm.points({}) == []


def test_both_arms_share_the_runs_at_the_base_width(study):
    mine, control = study.arm(BEST, {}, control=False), study.arm(BEST, {}, control=True)
    shared = {spec.id for spec, _ in mine.specs} & {spec.id for spec, _ in control.specs}
    assert shared == {spec.id for spec, _ in mine.specs if spec.shape.width == 8}
    assert {spec.parametrization for spec, _ in control.specs if spec.shape.width == 16} == {named("sp")}


def test_an_optimum_at_the_edge_asks_for_more_as_often_as_the_plan_allows(study):
    sizes = []
    for extensions in (0, 1, 2):
        longer = with_transfer(study, max_extensions=extensions)
        results = {}
        while not (arm := longer.arm(BEST, results, control=False)).done(results):
            results |= valley(arm, optimum=-1.0)
        sizes.append(len(arm.specs))
    assert sizes[0] == 16
    assert sizes[0] < sizes[1] < sizes[2]


def test_an_optimum_inside_asks_for_nothing_more(study):
    """The mutation of the test above: only where the optimum lies differs."""
    calm = with_transfer(study, max_extensions=2, margin_nats=0.5)
    arm = calm.arm(BEST, {}, control=False)
    assert calm.arm(BEST, valley(arm, optimum=-5.5), control=False) == arm


def test_the_control_arm_grows_to_bracket_its_optimum_and_no_further(study):
    """It is shown, not decided: one valley leaves both arms in doubt, and only the plan's own asks for seeds."""
    narrow = with_transfer(study, margin_nats=1e-6)
    for control, optimum, grows in ((True, -1.0, True), (True, -5.5, False), (False, -5.5, True)):
        arm = narrow.arm(BEST, {}, control=control)
        assert (narrow.arm(BEST, valley(arm, optimum), control=control) != arm) == grows


def test_failed_runs_are_no_points_diverged_ones_are(study):
    arm = study.arm(BEST, {}, control=False)
    results = valley(arm, optimum=-5.5)
    first, second = (spec for spec, _ in arm.specs[:2])
    results[first.id] = outcome(first, None)
    results[second.id] = dataclasses.replace(outcome(second, None), status="failed")
    points = arm.points(results)
    assert arm.done(results)
    assert len(points) == len(arm.specs) - 1
    assert [point.loss_nats for point in points].count(None) == 1


def test_the_best_trial_to_three_digits(study):
    points = [{**BEST, "learning_rate": rate} for rate in (0.0123456, 0.0234567, 0.0345678)]
    results = {
        study.trial(p).id: outcome(study.trial(p), loss) for p, loss in zip(points, (3.0, 2.5, None), strict=True)
    }
    assert study.best_point(points, results) == {**BEST, "learning_rate": 0.0235}
    diverged = {study.trial(p).id: outcome(study.trial(p), None) for p in points}
    said = r"none of 3 trials finished; the last: diverged, planted\. If they diverged, lower search\.learning_rate"
    with pytest.raises(NoFinishedTrialError, match=said):
        study.best_point(points, diverged)


def test_the_ladder_is_every_width_at_every_duration(study):
    specs = study.ladder_runs(BEST)
    ladder = study.plan.ladder
    assert [(s.shape.width, s.schedule.num_steps) for s in specs] == [
        (width, steps) for width in ladder.widths for steps in ladder.num_steps
    ]
    assert {spec.seed for spec in specs} == {ladder.seed}


def test_recorded_points_come_in_order(study):
    records = {"search/1": {"a": 2.0}, "search/0": {"a": 1.0}, "other/0": {"a": 3.0}, "search/10": {"a": 4.0}}
    assert recorded_points(records, 4) == [{"a": 1.0}, {"a": 2.0}]
