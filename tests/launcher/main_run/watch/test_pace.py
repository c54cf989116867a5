"""Tests of the alerts for slow runs and slow ranks, and of the estimated lost and remaining time.

Goodput is the share of the wall-clock time that went into steps that were kept.
"""

import datetime
import json

import numpy as np
import pytest
from planted_watch import BEGAN, make_attempt_start, make_columns, make_watched_decision
from watched_case import DIGEST, make_line, read_log, write_run

from forerun._launcher.main_run import event_log
from forerun._launcher.main_run.supervisor.hang_detector import (
    START_SECONDS,
    HangDetector,
    SilenceLimits,
)
from forerun._launcher.main_run.watch.alerts import WatchedRun
from forerun._launcher.main_run.watch.judgment import judge
from forerun._launcher.main_run.watch.liveness import Liveness, read_liveness
from forerun._launcher.main_run.watch.machine_alerts import (
    compute_medians_of_others,
    find_slowdown,
    find_stragglers,
)
from forerun._launcher.main_run.watch.pace import MIN_STALL_SECONDS, STALL_STEPS, Pace

SECONDS, TOKENS = 0.5, 1000.0
"""Seconds and tokens of a step."""
DECISION = make_watched_decision()


def make_pace(columns, num_steps=1000, now=None, **liveness):
    """Return the pace of a run at time `now`; `liveness` are fields of `Liveness`."""
    return Pace(columns=columns, num_steps=num_steps, now=now, liveness=Liveness(**liveness))


def to_unix_seconds(text):
    """Return a time in ISO 8601 as seconds since 1970."""
    return event_log.parse_time(text).timestamp()


def list_alerts(find, columns):
    """Return the alerts that `find` yields for a run with these columns."""
    return [*find(WatchedRun(decision=DECISION, columns=columns))]


def make_step_times(num_lines=400, factor=1.0, since=None, seed=0, noise=0.05, **given):
    """Return columns of a run whose steps take `factor` times as long after step `since`.

    `noise` is the standard deviation of the logarithm of a step's time.
    """
    rng = np.random.default_rng(seed)
    steps = np.arange(1.0, num_lines + 1)
    slowdown = np.where(steps > (num_lines if since is None else since), factor, 1.0)
    seconds = SECONDS * slowdown * np.exp(noise * rng.standard_normal(num_lines))
    columns = {"seconds": seconds, "tokens_per_second": TOKENS / seconds, **given}
    return make_columns(np.full(num_lines, 2.0), **columns)


@pytest.mark.parametrize("seed", range(3))
def test_steady_run_is_not_slow(seed):
    assert list_alerts(find_slowdown, make_step_times(seed=seed)) == []
    assert list_alerts(find_slowdown, make_step_times(seed=seed, noise=0.3)) == []


def test_lasting_slowdown_is_found_with_its_start_and_size():
    (alert,) = list_alerts(find_slowdown, make_step_times(factor=1.25, since=300))
    assert alert.severity == "notice" and alert.first_step == pytest.approx(301, abs=16)
    assert alert.evidence["lost_share"] == pytest.approx(0.2, abs=0.03)
    assert alert.evidence["best_tokens_per_second"] == pytest.approx(TOKENS / SECONDS, rel=0.05)
    ten_slow_lines = make_step_times(310, factor=1.25, since=300)
    assert list_alerts(find_slowdown, ten_slow_lines) == []


def test_slow_first_lines_and_fewer_ranks_are_no_slowdown():
    columns = make_step_times()
    columns.tokens_per_second[[200, 201, 202, 399]] /= 20
    assert list_alerts(find_slowdown, columns) == []
    fewer = make_step_times(
        factor=2.0,
        since=200,
        events=(make_attempt_start(), make_attempt_start(step=200, num_ranks=1)),
    )
    assert list_alerts(find_slowdown, fewer) == [], "half the ranks, half the throughput"
    same = make_step_times(
        factor=2.0, since=200, events=(make_attempt_start(), make_attempt_start(step=200))
    )
    (alert,) = list_alerts(find_slowdown, same)
    assert alert.severity == "alarm"
    assert alert.evidence["lost_share"] == pytest.approx(0.5, abs=0.03)


def make_rank_columns(slow_rank=None, by=0.0, since=0, num_lines=300, num_ranks=4, seed=0):
    """Return columns with times of ranks.

    After line `since`, `slow_rank` takes 1 + `by` times as long as the other ranks.
    """
    rng = np.random.default_rng(seed)
    table = 0.4 * np.exp(0.05 * rng.standard_normal((num_lines, num_ranks)))
    if slow_rank is not None:
        table[since:, slow_rank] *= 1 + by
    return make_step_times(num_lines, rank_seconds=table)


@pytest.mark.parametrize(("num_ranks", "by", "severity"), [(2, 0.2, "notice"), (7, 0.4, "alarm")])
def test_lasting_slow_rank_is_named(num_ranks, by, severity):
    columns = make_rank_columns(slow_rank=1, by=by, since=150, num_ranks=num_ranks)
    (alert,) = list_alerts(find_stragglers, columns)
    assert alert.evidence["rank"] == 1
    assert alert.evidence["slower_share"] == pytest.approx(by, abs=0.04)
    assert alert.severity == severity
    assert alert.first_step == pytest.approx(151, abs=24)
    assert alert.evidence["seconds"] > 1.15 * alert.evidence["others_seconds"]


def test_alternating_slow_ranks_or_few_slow_steps_are_no_stragglers():
    assert list_alerts(find_stragglers, make_rank_columns()) == []
    turns = make_rank_columns()
    for step in range(300):
        turns.rank_seconds[step, step % 4] *= 3
    assert list_alerts(find_stragglers, turns) == []
    few_slow_steps = make_rank_columns(slow_rank=2, by=1.0, since=270)
    assert list_alerts(find_stragglers, few_slow_steps) == []
    assert list_alerts(find_stragglers, make_step_times()) == [], "the log has no times of ranks"


def test_goodput_is_time_of_kept_steps_over_wall_time():
    begun = BEGAN.timestamp()
    columns = make_step_times(
        100,
        noise=0.0,
        events=(make_attempt_start(), make_attempt_start(step=60, after_seconds=60.0)),
        newest_at=begun + 100.0,
    )
    assert make_pace(columns).goodput == pytest.approx(0.5), "50 s of steps in 100 s"
    sparse = make_columns(
        np.full(10, 2.0),
        steps=np.arange(10.0, 101, 10),
        seconds=np.full(10, SECONDS),
        events=(make_attempt_start(),),
        newest_at=begun + 100.0,
    )
    assert make_pace(sparse).goodput == pytest.approx(0.5), "a line stands for ten steps"
    fast = make_step_times(100, noise=0.0, events=(make_attempt_start(),), newest_at=begun + 10.0)
    assert make_pace(fast).goodput == 1.0, "a clock that was set back gives no more than 1"
    assert make_pace(make_step_times(events=(make_attempt_start(),))).goodput is None, (
        "no newest time"
    )
    assert make_pace(make_step_times(newest_at=begun)).goodput is None, "no start time"


def test_projected_end_assumes_step_times_and_lost_time_so_far():
    columns = make_step_times(
        100, noise=0.0, events=(make_attempt_start(),), newest_at=BEGAN.timestamp() + 100.0
    )
    projection = make_pace(columns, num_steps=300).project_end(num_ranks=2)
    # 200 steps of 0.5 s remain, and half of the time was lost so far.
    assert projection.remaining_seconds == pytest.approx((100.0, 100.0, 200.0))
    expected_hours = [2 * total / 3600 for total in (200, 200, 300)]
    assert projection.device_hours == pytest.approx(expected_hours)


def append_event_at(folder, kind, seconds, data):
    """Append an event to the log, dated `seconds` after BEGAN."""
    event_log.append_event(folder, kind, kind, digest=DIGEST, data=data)
    path = folder / event_log.EVENT_LOG_FILE
    *lines, newest = path.read_text().splitlines()
    at = (BEGAN + datetime.timedelta(seconds=seconds)).isoformat()
    path.write_text("\n".join([*lines, json.dumps({**json.loads(newest), "at": at})]) + "\n")


def test_time_after_a_stop_is_no_lost_time_and_after_a_crash_is(tmp_path):
    begun = BEGAN.timestamp()
    columns = make_step_times(
        100,
        noise=0.0,
        events=(make_attempt_start(), make_attempt_start(step=60, after_seconds=3600.0)),
        newest_at=begun + 3650.0,
    )
    assert make_pace(columns, paused_seconds=3590.0).goodput == pytest.approx(50 / 60)
    projection = make_pace(columns, num_steps=300, paused_seconds=3590.0).project_end(num_ranks=2)
    assert projection.remaining_seconds == pytest.approx((100.0, 100.0, 120.0))
    for event, expected in (("stopped", 3590.0), ("interrupted", 3590.0), ("failed", 0.0)):
        folder = tmp_path / event
        for kind, seconds in (("launched", 0), ("ended", 10), ("launched", 3600)):
            data = {"event": event} if kind == "ended" else {}
            append_event_at(folder, kind, seconds, data)
        assert read_liveness(folder, DIGEST).paused_seconds == expected


def test_relaunch_of_a_finished_run_is_no_attempt_and_no_lost_time(tmp_path):
    folder, num_steps = tmp_path / "run", DECISION.learning_rate.schedule.num_steps
    times = (("launched", 0), ("ended", 10), ("launched", 3600), ("ended", 3630))
    for kind, seconds in times:
        data = {"event": "finished"} if kind == "ended" else {}
        append_event_at(folder, kind, seconds, data)
    assert read_liveness(folder, DIGEST).paused_seconds == 3620, "all after the first end"
    again = make_attempt_start(step=num_steps, after_seconds=3600.0)
    figures = judge(DECISION, make_step_times(100, events=(make_attempt_start(), again))).figures
    assert figures.num_attempts == 1


def test_shown_rate_agrees_with_the_projected_end():
    rng = np.random.default_rng(0)
    # One step in five waits, which the median of the steps does not show.
    seconds = np.where(rng.random(400) < 0.2, 5.0, 0.5)
    columns = make_step_times(
        seconds=seconds, tokens_per_second=TOKENS / seconds, mfu=0.2 / seconds
    )
    figures = judge(DECISION, columns).figures
    num_left = DECISION.learning_rate.schedule.num_steps - 400
    remaining = num_left * TOKENS / figures.tokens_per_second
    assert remaining == pytest.approx(figures.projection.remaining_seconds[0])
    assert figures.mfu / figures.tokens_per_second == pytest.approx(0.2 / TOKENS)


def test_launch_and_watch_agree_on_the_remaining_time_after_slow_first_steps(tmp_path):
    lines = [
        make_line(step, seconds=5.0 if step <= 16 else 0.5 + 2.0 * (step % 20 == 0))
        for step in range(1, 401)
    ]
    path = write_run(tmp_path, 0)
    path.write_text(path.read_text() + "".join(json.dumps(line) + "\n" for line in lines))
    launch_pace = HangDetector(tmp_path, SilenceLimits(), 0.0).pace
    launch_pace.step = 400
    launched = launch_pace.estimate_seconds_left(1000)
    columns = read_log(tmp_path, num_steps=1000).columns
    watched = make_pace(columns, num_steps=1000).project_end(num_ranks=1).remaining_seconds
    assert launched == pytest.approx(watched[0]) == pytest.approx(600 * 0.6, rel=0.01)
    assert (
        HangDetector(tmp_path / "none", SilenceLimits(), 0.0).pace.estimate_seconds_left(1000)
        is None
    )


def test_no_end_is_projected_from_too_little_data_or_for_a_silent_run():
    now = BEGAN.timestamp() + 100.0

    def get_figures(columns, at, num_steps=1000):
        figures = judge(make_watched_decision(num_steps), columns, now=at).figures
        assert (figures.projection is None) == (figures.projection_reason is not None)
        return figures

    early = get_figures(
        make_step_times(5, events=(make_attempt_start(),), newest_at=now), now + 1.0
    )
    assert early.projection is None and early.goodput is None and early.still_since is None
    going = make_step_times(100, events=(make_attempt_start(),), newest_at=now)
    assert get_figures(going, now + 5.0).projection is not None
    still = get_figures(going, now + 7200.0)
    assert still.projection is None and to_unix_seconds(still.still_since) == now
    ended = make_step_times(
        100, events=(make_attempt_start(), {"event": "interrupted", "step": 100}), newest_at=now
    )
    assert to_unix_seconds(get_figures(ended, None).still_since) == now
    late = get_figures(
        make_step_times(100, events=(make_attempt_start(),), newest_at=now + 36000.0), now + 36001.0
    )
    assert late.projection is None and late.still_since is None, "hours between attempts"
    over = make_step_times(100, events=(make_attempt_start(),), newest_at=now)
    figures = get_figures(over, now + 7200.0, num_steps=100)
    assert figures.projection is not None, "no step is left, so the end is known"


def test_first_line_of_an_attempt_does_not_count_for_the_pace():
    columns = make_step_times(100, noise=0.0)
    columns.seconds[0] = 500.0
    columns = make_columns(
        columns.train_loss_nats, seconds=columns.seconds, events=(make_attempt_start(),)
    )
    projection = make_pace(columns, num_steps=200).project_end(num_ranks=1)
    assert projection.remaining_seconds[0] == pytest.approx(50.0)


def test_allowed_silence_grows_with_step_and_save_times():
    now = BEGAN.timestamp()
    assert make_pace(make_step_times(newest_at=now), now=now + 5.0).silence == (
        5.0,
        MIN_STALL_SECONDS,
        False,
    )
    slow_run = make_step_times(factor=20.0, since=0, noise=0.0, newest_at=now)
    assert make_pace(slow_run, now=now).silence[1] == pytest.approx(STALL_STEPS * 10.0)
    saves = ({"event": "saved", "step": 3, "seconds": 300.0},)
    assert make_pace(make_step_times(newest_at=now, events=saves), now=now).silence[1] == 600.0
    assert make_pace(make_columns([], newest_at=now), now=now + 1.0).silence == (
        1.0,
        START_SECONDS,
        True,
    )
    assert (
        make_pace(make_step_times(), now=now).silence is None
        and make_pace(make_step_times(newest_at=now), now=None).silence is None
    )


@pytest.mark.parametrize("num_ranks", [2, 3, 8])
def test_medians_of_others_exclude_the_rank_itself(num_ranks):
    table = np.random.default_rng(num_ranks).random((20, num_ranks))
    table[:3] = 0.5  # All ranks take equally long in these lines.
    expected = np.column_stack(
        [np.median(np.delete(table, rank, axis=1), axis=1) for rank in range(num_ranks)]
    )
    assert compute_medians_of_others(table) == pytest.approx(expected, abs=1e-15)
