"""Slow runs, slow ranks, time lost and time left, each with a planted truth."""

import datetime
import json

import numpy as np
import pytest
from planted_watch import BEGAN, columns_of, decision, started
from watched_case import DIGEST, read, write_run
from watched_case import line as log_line

from launcher.base import chronicle
from launcher.base.watchdog import START_SECONDS, Limits, Watchdog
from launcher.watch import pace
from launcher.watch.alerts import WatchedRun
from launcher.watch.judgment import judge
from launcher.watch.machine_alerts import find_slowdown, find_stragglers, medians_of_others
from launcher.watch.pace import Liveness

SECONDS, TOKENS = 0.5, 1000.0
DECISION = decision()


def found(alert, columns):
    """What an alert's function finds in a run."""
    return [*alert(WatchedRun(decision=DECISION, columns=columns))]


def run(num_lines=400, factor=1.0, since=None, seed=0, noise=0.05, **given):
    """`factor` times as long a step after step `since`."""
    rng = np.random.default_rng(seed)
    steps = np.arange(1.0, num_lines + 1)
    slowdown = np.where(steps > (num_lines if since is None else since), factor, 1.0)
    seconds = SECONDS * slowdown * np.exp(noise * rng.standard_normal(num_lines))
    columns = {"seconds": seconds, "tokens_per_second": TOKENS / seconds, **given}
    return columns_of(np.full(num_lines, 2.0), **columns)


@pytest.mark.parametrize("seed", range(3))
def test_a_steady_run_is_not_slow(seed):
    assert found(find_slowdown, run(seed=seed)) == []
    assert found(find_slowdown, run(seed=seed, noise=0.3)) == [], "nor one of ragged steps"


def test_a_slowdown_that_stays_is_found_with_its_start_and_size():
    (one,) = found(find_slowdown, run(factor=1.25, since=300))
    assert one.severity == "notice" and one.first_step == pytest.approx(301, abs=16)
    assert one.evidence["lost_share"] == pytest.approx(0.2, abs=0.03)
    assert one.evidence["best_tokens_per_second"] == pytest.approx(TOKENS / SECONDS, rel=0.05)
    assert found(find_slowdown, run(310, factor=1.25, since=300)) == [], (
        "ten lines are not sustained"
    )


def test_slow_lines_after_a_start_and_other_machines_are_not_held_against_it():
    columns = run()
    columns.tokens_per_second[[200, 201, 202, 399]] /= 20
    assert found(find_slowdown, columns) == []
    fewer = run(factor=2.0, since=200, events=(started(), started(step=200, num_ranks=1)))
    assert found(find_slowdown, fewer) == [], "half the ranks, half the throughput"
    same = run(factor=2.0, since=200, events=(started(), started(step=200)))
    (one,) = found(find_slowdown, same)
    assert one.severity == "alarm" and one.evidence["lost_share"] == pytest.approx(0.5, abs=0.03)


def ranks(slow_rank=None, by=0.0, since=0, num_lines=300, num_ranks=4, seed=0):
    rng = np.random.default_rng(seed)
    table = 0.4 * np.exp(0.05 * rng.standard_normal((num_lines, num_ranks)))
    if slow_rank is not None:
        table[since:, slow_rank] *= 1 + by
    return run(num_lines, rank_seconds=table)


@pytest.mark.parametrize(("num_ranks", "by", "severity"), [(2, 0.2, "notice"), (7, 0.4, "alarm")])
def test_a_rank_that_stays_slower_is_named(num_ranks, by, severity):
    (one,) = found(find_stragglers, ranks(slow_rank=1, by=by, since=150, num_ranks=num_ranks))
    assert one.evidence["rank"] == 1 and one.evidence["slower_share"] == pytest.approx(by, abs=0.04)
    assert one.severity == severity
    assert one.first_step == pytest.approx(151, abs=24)
    assert one.evidence["seconds"] > 1.15 * one.evidence["others_seconds"]


def test_ranks_that_take_turns_or_a_few_slow_steps_are_no_stragglers():
    assert found(find_stragglers, ranks()) == []
    turns = ranks()
    for line in range(300):
        turns.rank_seconds[line, line % 4] *= 3
    assert found(find_stragglers, turns) == []
    assert found(find_stragglers, ranks(slow_rank=2, by=1.0, since=270)) == [], (
        "not yet three of four lines"
    )
    assert found(find_stragglers, run()) == [], "nothing told of ranks"


def test_goodput_is_kept_steps_over_wall_time():
    begun = BEGAN.timestamp()
    columns = run(
        100,
        noise=0.0,
        events=(started(), started(step=60, after_seconds=60.0)),
        newest_at=begun + 100.0,
    )
    assert pace.goodput(columns) == pytest.approx(0.5), "50 s of steps in 100 s"
    sparse = columns_of(
        np.full(10, 2.0),
        steps=np.arange(10.0, 101, 10),
        seconds=np.full(10, SECONDS),
        events=(started(),),
        newest_at=begun + 100.0,
    )
    assert pace.goodput(sparse) == pytest.approx(0.5), "lines stand for the steps before them"
    quick = run(100, noise=0.0, events=(started(),), newest_at=begun + 10.0)
    assert pace.goodput(quick) == 1.0, "a clock that was set back makes no time"
    assert pace.goodput(run(events=(started(),))) is None, "nobody says when"
    assert pace.goodput(run(newest_at=begun)) is None, "nor since when"


def test_the_end_is_projected_from_recorded_times_and_what_was_lost():
    columns = run(100, noise=0.0, events=(started(),), newest_at=BEGAN.timestamp() + 100.0)
    found = pace.projection(columns, 300, 2)
    assert found.remaining_seconds == pytest.approx((100.0, 100.0, 200.0)), (
        "200 steps of 0.5 s, half of it lost so far"
    )
    assert found.device_hours == pytest.approx([2 * total / 3600 for total in (200, 200, 300)])


def test_a_stop_on_purpose_is_no_lost_pace_and_a_crash_is(tmp_path):
    begun = BEGAN.timestamp()
    columns = run(
        100,
        noise=0.0,
        events=(started(), started(step=60, after_seconds=3600.0)),
        newest_at=begun + 3650.0,
    )
    assert pace.goodput(columns, 3590.0) == pytest.approx(50 / 60)
    projection = pace.projection(columns, 300, 2, 3590.0)
    assert projection.remaining_seconds == pytest.approx((100.0, 100.0, 120.0))
    for event, expected in (("stopped", 3590.0), ("interrupted", 3590.0), ("failed", 0.0)):
        folder = tmp_path / event
        for kind, seconds in (("launched", 0), ("ended", 10), ("launched", 3600)):
            data = {"event": event} if kind == "ended" else {}
            chronicle.record(folder, kind, kind, digest=DIGEST, data=data)
            path = folder / chronicle.CHRONICLE_FILE
            *lines, newest = path.read_text().splitlines()
            at = (BEGAN + datetime.timedelta(seconds=seconds)).isoformat()
            path.write_text(
                "\n".join([*lines, json.dumps({**json.loads(newest), "at": at})]) + "\n"
            )
        assert pace.liveness_of(folder, DIGEST).paused_seconds == expected


def test_a_launch_of_the_finished_run_is_no_attempt_and_no_lost_time(tmp_path):
    folder, num_steps = tmp_path / "run", DECISION.learning_rate.schedule.num_steps
    times = (("launched", 0), ("ended", 10), ("launched", 3600), ("ended", 3630))
    for kind, seconds in times:
        data = {"event": "finished"} if kind == "ended" else {}
        chronicle.record(folder, kind, kind, digest=DIGEST, data=data)
        path = folder / chronicle.CHRONICLE_FILE
        *lines, newest = path.read_text().splitlines()
        at = (BEGAN + datetime.timedelta(seconds=seconds)).isoformat()
        path.write_text("\n".join([*lines, json.dumps({**json.loads(newest), "at": at})]) + "\n")
    assert pace.liveness_of(folder, DIGEST).paused_seconds == 3620, (
        "all that came after the first end"
    )
    again = started(step=num_steps, after_seconds=3600.0)
    figures = judge(DECISION, run(100, events=(started(), again))).figures
    assert figures["num_attempts"] == 1


def test_the_rate_shown_is_that_of_the_projected_end():
    rng = np.random.default_rng(0)
    # one step in five waits: the median step does not
    seconds = np.where(rng.random(400) < 0.2, 5.0, 0.5)
    columns = run(seconds=seconds, tokens_per_second=TOKENS / seconds, mfu=0.2 / seconds)
    figures = judge(DECISION, columns).figures
    left = DECISION.learning_rate.schedule.num_steps - 400
    shown = left * TOKENS / figures["tokens_per_second"]
    assert shown == pytest.approx(figures["projection"]["remaining_seconds"][0])
    assert figures["mfu"] / figures["tokens_per_second"] == pytest.approx(0.2 / TOKENS)


def test_launch_and_watch_tell_one_time_left_in_spite_of_slow_first_steps(tmp_path):
    lines = [
        log_line(step, seconds=5.0 if step <= 16 else 0.5 + 2.0 * (step % 20 == 0))
        for step in range(1, 401)
    ]
    path = write_run(tmp_path, 0)
    path.write_text(path.read_text() + "".join(json.dumps(each) + "\n" for each in lines))
    launch_pace = Watchdog(tmp_path, Limits(), 0.0).pace
    launch_pace.step = 400
    launched = launch_pace.seconds_left(1000)
    watched = pace.projection(read(tmp_path, num_steps=1000).columns, 1000, 1).remaining_seconds
    assert launched == pytest.approx(watched[0]) == pytest.approx(600 * 0.6, rel=0.01)
    assert Watchdog(tmp_path / "none", Limits(), 0.0).pace.seconds_left(1000) is None


def test_no_end_is_projected_from_too_little_or_of_a_run_that_stands_still():
    now = BEGAN.timestamp() + 100.0

    def ends(columns, at, num_steps=1000):
        figures = judge(decision(num_steps), columns, now=at).figures
        assert (figures["projection"] is None) == (figures["projection_reason"] is not None)
        return figures

    early = ends(run(5, events=(started(),), newest_at=now), now + 1.0)
    assert early["projection"] is None and early["goodput"] is None and early["still_since"] is None
    going = run(100, events=(started(),), newest_at=now)
    assert ends(going, now + 5.0)["projection"] is not None
    still = ends(going, now + 7200.0)
    assert still["projection"] is None and pace.unix_seconds(still["still_since"]) == now
    ended = run(100, events=(started(), {"event": "interrupted", "step": 100}), newest_at=now)
    assert pace.unix_seconds(ends(ended, None)["still_since"]) == now
    late = ends(run(100, events=(started(),), newest_at=now + 36000.0), now + 36001.0)
    assert late["projection"] is None and late["still_since"] is None, (
        "hours between attempts are no rate of loss"
    )
    over = run(100, events=(started(),), newest_at=now)
    assert ends(over, now + 7200.0, num_steps=100)["projection"] is not None, "nothing is left"


def test_an_attempts_first_line_is_not_the_pace_of_the_rest():
    columns = run(100, noise=0.0)
    columns.seconds[0] = 500.0
    assert pace.projection(
        columns_of(columns.train_loss_nats, seconds=columns.seconds, events=(started(),)), 200, 1
    ).remaining_seconds[0] == pytest.approx(50.0)


def silence(columns, now, **given):
    return pace.silence(columns, now, Liveness(**given))


def test_silence_is_allowed_as_long_as_steps_and_saves_take():
    now = BEGAN.timestamp()
    assert silence(run(newest_at=now), now + 5.0) == (5.0, pace.MIN_STALL_SECONDS, False)
    slow_run = run(factor=20.0, since=0, noise=0.0, newest_at=now)
    assert silence(slow_run, now)[1] == pytest.approx(pace.STALL_STEPS * 10.0)
    saves = ({"event": "saved", "step": 3, "seconds": 300.0},)
    assert silence(run(newest_at=now, events=saves), now)[1] == 600.0
    assert silence(columns_of([], newest_at=now), now + 1.0) == (1.0, START_SECONDS, True)
    assert silence(run(), now) is None and silence(run(newest_at=now), None) is None


@pytest.mark.parametrize("num_ranks", [2, 3, 8])
def test_the_others_of_a_rank_are_all_but_it(num_ranks):
    table = np.random.default_rng(num_ranks).random((20, num_ranks))
    table[:3] = 0.5  # ties
    others = np.column_stack(
        [np.median(np.delete(table, rank, axis=1), axis=1) for rank in range(num_ranks)]
    )
    assert medians_of_others(table) == pytest.approx(others, abs=1e-15)
