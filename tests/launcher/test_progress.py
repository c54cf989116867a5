"""How far the whole study is: plain numbers and a clock that the test moves."""

import re

import pytest
from tiny_study import ended, forerun, write_plan

from launcher.calibration.study_cost import (
    AFTER_SECONDS,
    START_SECONDS,
    Speeds,
    stages_of,
    total_of,
    wall_hours,
)
from launcher.study.progress import PlannedStage, StudyProgress, planned_stages
from launcher.study.progress_text import BLOCKS, MOST_WIDTHS, chart_text, line_of, range_text
from launcher.study.study_folder import plan_study
from proxies.core.spec import Run

STAGES = [
    PlannedStage(name="check", least=10.0, most=10.0),
    PlannedStage(name="sweep", least=100.0, most=140.0),
    PlannedStage(name="transfer", least=800.0, most=800.0),
    PlannedStage(name="ladder", least=90.0, most=90.0),
    PlannedStage(name="fit"),
]


class Clock:
    seconds = 1000.0

    def __call__(self):
        return self.seconds


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def progress(clock):
    return StudyProgress(STAGES, clock=clock)


def work(progress, clock, flops, seconds, parts=10):
    """Runs that take so long, asked for and done."""
    progress.ask(flops)
    for _ in range(parts):
        clock.seconds += seconds / parts
        progress.add(flops / parts)


def test_work_is_counted_over_all_stages(progress, clock):
    progress.add(10.0)
    assert progress.state().done == pytest.approx(0.01)
    progress.begin("sweep")
    progress.ask(100.0)
    progress.add(0.0, under_way=20.0)
    assert progress.state().done == pytest.approx(0.03)
    progress.add(40.0, under_way=10.0)
    state = progress.state()
    assert state.done == pytest.approx(0.06) and (state.stage, state.number, state.num_stages) == (
        "sweep",
        2,
        5,
    )


def test_nothing_is_said_of_the_time_before_runs_tell(progress, clock):
    clock.seconds += 500.0  # checks, Ray's start
    progress.begin("sweep")
    work(progress, clock, 50.0, 9.0)
    assert progress.state().left_high_seconds is None
    clock.seconds += 2.0
    assert progress.state().left_low_seconds > 0


def test_a_rate_holds_all_that_passes_in_a_stage_and_nothing_before_its_first_run(progress, clock):
    clock.seconds += 500.0
    progress.begin("sweep")
    work(progress, clock, 100.0, 60.0)
    clock.seconds += 40.0  # its best trial is run again, say: a second for each unit of work
    progress.begin("transfer")
    work(progress, clock, 400.0, 200.0)
    state = progress.state()
    # Of transfer at 0.5 s a unit, of the ladder at 0.5 to 1, both planned; then fits and the
    # report.
    assert state.left_low_seconds == pytest.approx(0.8 * 200 + 0.5 * 90 + AFTER_SECONDS.low)
    assert state.left_high_seconds == pytest.approx(1.25 * 200 + 1.0 * 90 + AFTER_SECONDS.high)
    assert progress.batch_left_seconds == 0.0


def test_the_end_of_a_stages_runs_is_not_the_end_of_the_study(progress, clock):
    """It was shown as 99 %, 7 s left, with three quarters of the study to come."""
    progress.begin("sweep")
    work(progress, clock, 100.0, 50.0)
    state = progress.state()
    assert state.done < 0.12 and state.left_low_seconds > 100.0


def test_runs_that_nobody_planned_move_the_end_and_not_the_share_back(progress, clock):
    progress.begin("transfer")
    work(progress, clock, 800.0, 800.0)
    before = progress.state()
    progress.ask(400.0)
    after = progress.state()
    assert after.done == before.done and after.left_low_seconds > before.left_low_seconds + 300.0
    work(progress, clock, 400.0, 400.0)
    assert before.done < progress.state().done < 1.0


def test_something_is_left_until_the_end(progress, clock):
    progress.begin("ladder")
    work(progress, clock, 90.0, 90.0)
    progress.begin("fit")
    clock.seconds += 1000.0
    state = progress.state()
    assert state.done < 1.0 and state.left_low_seconds >= 1.0
    assert "at most 10 s left" in line_of(state, 0)


def test_a_study_that_resumes_counts_what_it_has(clock):
    progress = StudyProgress(STAGES, done=500.0, clock=clock)
    progress.begin("sweep")
    progress.begin("transfer")
    progress.ask(400.0)
    assert progress.state().done == pytest.approx(0.51)
    progress.begin("check")  # has passed
    assert progress.state().stage == "transfer"


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
def test_a_range_is_rounded_outwards_and_never_zero(ends, text):
    assert range_text(*ends) == text


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    return write_plan(tmp_path_factory.mktemp("planned"))


def test_the_stages_are_those_that_the_verb_runs(plan):
    study = plan_study(plan, plan.parent / "study")
    assert [stage.name for stage in planned_stages(study, "run")] == [
        "check",
        "sweep",
        "transfer",
        "ladder",
        "fit",
    ]
    assert [stage.name for stage in planned_stages(study, "transfer")] == ["sweep", "transfer"]
    assert all(stage.least > 0 for stage in planned_stages(study, "run")[:-1])


def test_an_estimate_counts_more_than_training(plan):
    study = plan_study(plan, plan.parent / "study")
    stages = stages_of(study, Speeds())
    trained, whole = total_of(stages).hours(2), wall_hours(stages, 2)
    start_to_end = START_SECONDS.low + AFTER_SECONDS.low
    assert whole.low > trained.low + start_to_end / 3600 and whole.low < whole.value < whole.high
    # and the check has one worker, of both
    assert wall_hours(stages, 2).high > wall_hours(stages, 4).high
    assert whole.value - trained.value > stages[0].hours(2).value


def test_a_chart_has_ten_lines_at_most_and_diverged_runs_are_in_none(plan):
    study = plan_study(plan, plan.parent / "study")

    def run(width, loss):
        spec = study.run(shape=study.shape(width), point=study.space.lowest, seed=0, num_steps=6)
        return Run(spec=spec, result=ended(spec, loss))

    assert chart_text([run(8, None)]) == ""
    runs = [run(8 * width, loss) for width in range(1, 13) for loss in (4.0, 3.0, None, 2.0, 9.0)]
    lines = chart_text(runs).splitlines()
    assert len(lines) == 1 + MOST_WIDTHS <= 10 and "96" in lines[-1]
    assert re.sub(f"[^{BLOCKS}]", "", lines[-1]) == "█▅▁█"


def test_a_line_per_run_with_verbose(plan):
    code, _, err = forerun("sweep", plan, "--study", plan.parent / "study", "--verbose")
    lines = [line for line in err.splitlines() if line.startswith("run ")]
    assert (
        code == 0
        and len(lines) == 4
        and all(re.search(r"width 8 .* lr .* nats .* s$", line) for line in lines)
    )
    assert "study: done" in err
