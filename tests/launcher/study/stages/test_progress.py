"""Tests of a study's progress with planted work and a fake clock, and of its charts and lines."""

import re

import pytest
from tiny_study import make_result, run_forerun, write_plan

from forerun._launcher.study.calibration.study_cost import (
    AFTER_SECONDS,
    START_SECONDS,
    Speeds,
    compute_stage_costs,
    estimate_wall_hours,
    sum_stage_costs,
)
from forerun._launcher.study.stages.progress import (
    MIN_SPEED_SECONDS,
    OWN_SPREAD,
    PlannedStage,
    StudyProgress,
    plan_stages,
)
from forerun._launcher.study.stages.progress_text import (
    BLOCKS,
    MAX_WIDTHS,
    format_chart,
    format_progress_line,
    format_range,
)
from forerun._launcher.study.stages.study_folder import read_study
from forerun._proxies.core.spec import Run

# Work in FLOPs, 1,000 in all, so that shares can be read off
STAGES = [
    PlannedStage(name="check", min_flops=10.0, max_flops=10.0),
    PlannedStage(name="sweep", min_flops=100.0, max_flops=140.0),
    PlannedStage(name="transfer", min_flops=800.0, max_flops=800.0),
    PlannedStage(name="ladder", min_flops=90.0, max_flops=90.0),
    PlannedStage(name="fit"),
]


class FakeClock:
    """A clock that a test sets by `seconds`."""

    seconds = 1000.0

    def __call__(self):
        return self.seconds


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def progress(clock):
    return StudyProgress(STAGES, clock=clock)


def train(progress, clock, flops, seconds):
    """Ask for ten runs, and finish them one after another within `seconds`."""
    progress.begin_batch(flops)
    for _ in range(10):
        clock.seconds += seconds / 10
        progress.add(flops / 10)


def test_work_is_counted_over_all_stages(progress):
    progress.add(10.0)
    assert progress.update_state().done == pytest.approx(0.01)
    progress.begin("sweep")
    progress.begin_batch(100.0)
    progress.add(0.0, under_way=20.0)
    assert progress.update_state().done == pytest.approx(0.03)
    progress.add(40.0, under_way=10.0)
    state = progress.update_state()
    assert state.done == pytest.approx(0.06) and (state.stage, state.number, state.num_stages) == (
        "sweep",
        2,
        5,
    )


def test_remaining_time_is_unknown_before_enough_runs(progress, clock):
    clock.seconds += 500.0  # checks and the start of Ray
    progress.begin("sweep")
    train(progress, clock, 50.0, MIN_SPEED_SECONDS - 1.0)
    assert progress.update_state().left_high_seconds is None
    clock.seconds += 2.0
    assert progress.update_state().left_low_seconds > 0


def test_rate_counts_all_time_of_a_stage_from_its_first_run(progress, clock):
    clock.seconds += 500.0
    progress.begin("sweep")
    train(progress, clock, 100.0, 60.0)
    clock.seconds += 40.0  # for example a repeat of the best trial: the sweep took 1 s per FLOP
    progress.begin("transfer")
    train(progress, clock, 400.0, 200.0)
    state = progress.update_state()
    # 400 FLOPs of transfer are left, at 0.5 s each, and 90 FLOPs of the ladder, at 0.5 to 1 s
    # each. Then fits and the report follow.
    low_share, high_share = OWN_SPREAD
    low_seconds, high_seconds = low_share * 200 + 0.5 * 90, high_share * 200 + 1.0 * 90
    assert state.left_low_seconds == pytest.approx(low_seconds + AFTER_SECONDS.low)
    assert state.left_high_seconds == pytest.approx(high_seconds + AFTER_SECONDS.high)
    assert progress.batch_left_seconds == 0.0


def test_end_of_a_stage_is_not_the_end_of_the_study(progress, clock):
    """The end of the search was once shown as 99 % and 7 s left, with three quarters of the study
    to come.
    """
    progress.begin("sweep")
    train(progress, clock, 100.0, 50.0)
    state = progress.update_state()
    assert state.done < 0.12 and state.left_low_seconds > 100.0


def test_unplanned_runs_add_time_and_do_not_lower_the_share_done(progress, clock):
    progress.begin("transfer")
    train(progress, clock, 800.0, 800.0)
    before = progress.update_state()
    progress.begin_batch(400.0)
    after = progress.update_state()
    assert after.done == before.done and after.left_low_seconds > before.left_low_seconds + 300.0
    train(progress, clock, 400.0, 400.0)
    assert before.done < progress.update_state().done < 1.0


def test_some_time_is_left_until_the_end(progress, clock):
    progress.begin("ladder")
    train(progress, clock, 90.0, 90.0)
    progress.begin("fit")
    clock.seconds += 1000.0
    state = progress.update_state()
    assert state.done < 1.0 and state.left_low_seconds >= 1.0
    assert "at most 10 s left" in format_progress_line(state, 0)


def test_resumed_study_counts_its_finished_work(progress):
    progress.resume(500.0)
    progress.begin("sweep")
    progress.begin("transfer")
    progress.begin_batch(400.0)
    assert progress.update_state().done == pytest.approx(0.51)
    progress.begin("check")  # a stage that has passed
    assert progress.update_state().stage == "transfer"


@pytest.mark.parametrize(
    ("ends", "text"),
    [
        ((0.0, 0.2), "at most 5 s"),
        ((21.0, 44.0), "20 to 45 s"),
        ((21.0, 70.0), "at most 2 min"),
        ((400.0, 590.0), "6 to 10 min"),
        ((7300.0, 12000.0), "2 to 3.5 h"),
    ],
)
def test_range_is_rounded_outwards_and_never_zero(ends, text):
    assert format_range(*ends) == text


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    return write_plan(tmp_path_factory.mktemp("planned"))


def test_planned_stages_are_those_that_the_command_runs(plan):
    study = read_study(plan, plan.parent / "study")
    assert [stage.name for stage in plan_stages(study, "run")] == [
        "check",
        "sweep",
        "transfer",
        "ladder",
        "fit",
    ]
    assert [stage.name for stage in plan_stages(study, "transfer")] == ["sweep", "transfer"]
    assert all(stage.min_flops > 0 for stage in plan_stages(study, "run")[:-1])


def test_estimated_hours_include_more_than_training(plan):
    study = read_study(plan, plan.parent / "study")
    stages = compute_stage_costs(study, Speeds())
    training, total = sum_stage_costs(stages).hours(2), estimate_wall_hours(stages, 2)
    start_to_end = START_SECONDS.low + AFTER_SECONDS.low
    assert total.low > training.low + start_to_end / 3600
    assert total.low < total.value < total.high
    # The check uses one worker, whatever their number.
    assert estimate_wall_hours(stages, 2).high > estimate_wall_hours(stages, 4).high
    assert total.value - training.value > stages[0].hours(2).value


def test_chart_has_at_most_ten_lines_and_no_diverged_runs(plan):
    study = read_study(plan, plan.parent / "study")

    def make_run(width, loss):
        spec = study.build_run(
            shape=study.build_shape(width), point=study.space.lowest, seed=0, num_steps=6
        )
        return Run(spec=spec, result=make_result(spec, loss))

    assert format_chart([make_run(8, None)]) == ""
    losses = (4.0, 3.0, None, 2.0, 9.0)
    runs = [make_run(8 * width, loss) for width in range(1, 13) for loss in losses]
    lines = format_chart(runs).splitlines()
    assert len(lines) == 1 + MAX_WIDTHS <= 10 and "96" in lines[-1]
    assert re.sub(f"[^{BLOCKS}]", "", lines[-1]) == "█▅▁█"


def test_verbose_prints_a_line_per_run(plan):
    code, _, err = run_forerun("sweep", plan, "--study", plan.parent / "study", "--verbose")
    lines = [line for line in err.splitlines() if line.startswith("run ")]
    assert (
        code == 0
        and len(lines) == 4
        and all(re.search(r"width 8 .* lr .* nats .* s$", line) for line in lines)
    )
    assert "study: done" in err
