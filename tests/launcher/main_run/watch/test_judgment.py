"""Tests of the judgment of a main run from its log.

Healthy runs must pass, and each planted fault must raise its alert, with the documented outcome.
"""

import dataclasses
import shlex

import numpy as np
import pytest
from planted_watch import (
    BEGAN,
    NUM_STEPS,
    draw_losses,
    make_attempt_start,
    make_columns,
    make_watched_decision,
)

from forerun._launcher.main_run.frozen.run_policies import SpikePolicy
from forerun._launcher.main_run.watch.alerts import Commands
from forerun._launcher.main_run.watch.judgment import judge
from forerun._proxies.core import canon

NOW = BEGAN.timestamp() + 500.0
"""Time of the newest line of a log, in seconds since 1970."""


def make_healthy_columns(seed=0, num_lines=NUM_STEPS, **changes):
    """Return the log columns of a run that follows its forecast, with some columns changed."""
    rng = np.random.default_rng(seed)
    columns = {
        "seconds": 0.5 * np.exp(0.03 * rng.standard_normal(num_lines)),
        "grad_norm": np.exp(0.2 * rng.standard_normal(num_lines)),
        "tokens_per_second": 2000 * np.exp(0.03 * rng.standard_normal(num_lines)),
        "rank_seconds": 0.4 * np.exp(0.03 * rng.standard_normal((num_lines, 4))),
        "events": (make_attempt_start(),),
        "newest_at": NOW,
    }
    return make_columns(draw_losses(rng)[:num_lines], **{**columns, **changes})


def get_alert(judgment, name):
    """Return the one alert of this name."""
    (alert,) = (alert for alert in judgment.alerts if alert.name == name)
    return alert


def list_names(judgment):
    """Return the names of the alerts."""
    return [alert.name for alert in judgment.alerts]


@pytest.mark.parametrize("seed", range(3))
def test_healthy_run_is_on_the_band_without_alerts(seed):
    judgment = judge(make_watched_decision(), make_healthy_columns(seed, 600), now=NOW)
    assert (judgment.standing, list_names(judgment), judgment.outcome) == (
        "on the band",
        [],
        "fine",
    )
    assert judgment.figures.final_nats == pytest.approx(2.0, rel=0.01)
    low, high = judgment.figures.final_interval_nats
    before_low, before_high = judgment.figures.foretold_interval_nats
    assert before_low < low < high < before_high, "the seen losses narrow the forecast"
    assert judgment.figures.goodput == pytest.approx(0.6, abs=0.02)
    canon.to_canonical_json(judgment)  # The call fails on NaN.


def test_too_little_data_cannot_tell():
    early = judge(make_watched_decision(), make_healthy_columns(num_lines=30), now=NOW)
    assert (early.standing, early.outcome) == ("cannot tell", "cannot_tell")
    empty = judge(make_watched_decision(), make_columns([]))
    assert empty.outcome == "cannot_tell" and empty.figures.train_loss_nats is None
    without_curve = make_watched_decision(
        forecast=dataclasses.replace(make_watched_decision().predicted, curve=())
    )
    assert judge(without_curve, make_healthy_columns(), now=NOW).outcome == "cannot_tell"
    assert "too few runs" in judge(without_curve, make_healthy_columns(), now=NOW).why


def test_alarm_outranks_too_little_data():
    columns = make_healthy_columns(num_lines=30)
    columns.train_loss_nats[20] = np.nan
    judgment = judge(make_watched_decision(), columns, now=NOW)
    assert judgment.outcome == "alarm" and get_alert(judgment, "non_finite").first_step == 21


def test_departure_reports_its_first_step_and_size():
    losses = draw_losses(np.random.default_rng(0))
    losses[400:] *= 1.25
    judgment = judge(make_watched_decision(), make_columns(losses))
    departure = get_alert(judgment, "departed")
    assert (judgment.standing, judgment.outcome, departure.severity) == (
        "departed",
        "alarm",
        "alarm",
    )
    assert abs(departure.evidence["departure_sds"]) > departure.evidence["bound_sds"]
    assert str(int(departure.first_step)) in judgment.why


def test_returning_spikes_are_a_notice_and_a_lasting_one_an_alarm():
    columns = make_healthy_columns()
    columns.train_loss_nats[[300, *range(500, 508)]] += 2.0
    judgment = judge(make_watched_decision(), columns, now=NOW)
    evidence = get_alert(judgment, "spikes").evidence
    assert (evidence["first_steps"], evidence["num_lasted"]) == ([301, 501], 1)
    assert judgment.outcome == "fine"
    lasting = make_healthy_columns(num_lines=500)
    lasting.train_loss_nats[480:] += 2.0
    alert = get_alert(
        judge(make_watched_decision(spikes=SpikePolicy(max_rollbacks=2)), lasting, now=NOW),
        "spike_lasts",
    )
    assert (
        alert.severity == "alarm"
        and alert.first_step == 481
        and " 2 times (launch.spike_rollbacks)" in alert.seen
    )


def test_loss_above_the_ceiling_and_slow_rise_are_alarms():
    columns = make_healthy_columns()
    columns.train_loss_nats[700:] = 7.0
    alert = get_alert(judge(make_watched_decision(), columns, now=NOW), "diverged")
    assert alert.severity == "alarm" and alert.first_step == 701
    rising = make_healthy_columns()
    rising.train_loss_nats[400:] += 1e-3 * np.arange(400)
    assert get_alert(judge(make_watched_decision(), rising, now=NOW), "rising").severity == "alarm"
    start = make_healthy_columns(num_lines=10)
    start.train_loss_nats[:] = 7.0
    assert "diverged" not in list_names(judge(make_watched_decision(), start, now=NOW)), (
        "not in the warmup"
    )


def test_silence_is_an_alarm_unless_the_run_is_over():
    assert (
        get_alert(
            judge(make_watched_decision(), make_healthy_columns(num_lines=500), now=NOW + 3600),
            "stalled",
        ).severity
        == "alarm"
    )
    assert list_names(judge(make_watched_decision(), make_healthy_columns(), now=NOW + 3600)) == []
    interrupted = {
        "event": "interrupted",
        "step": 500,
        "exit_code": 130,
        "reason": "SIGTERM",
        "validation_loss_nats": None,
    }
    judgment = judge(
        make_watched_decision(),
        make_healthy_columns(num_lines=500, events=(make_attempt_start(), interrupted)),
        now=NOW + 3600,
    )
    assert list_names(judgment) == ["interrupted"] and judgment.outcome == "fine"
    aborted = {**interrupted, "event": "aborted", "reason": "loss is nan"}
    judgment = judge(
        make_watched_decision(),
        make_healthy_columns(num_lines=500, events=(make_attempt_start(), aborted)),
        now=NOW + 3600,
    )
    assert (
        get_alert(judgment, "aborted").severity == "alarm"
        and "loss is nan" in get_alert(judgment, "aborted").seen
    )


def test_final_loss_is_compared_with_the_forecast():
    at_end = {"validation_steps": np.array([float(NUM_STEPS)])}
    fine = judge(
        make_watched_decision(),
        make_healthy_columns(**at_end, validation_loss_nats=np.array([2.02])),
        now=NOW,
    )
    assert fine.standing == "on the band" and fine.outcome == "fine"
    missed = judge(
        make_watched_decision(),
        make_healthy_columns(**at_end, validation_loss_nats=np.array([2.4])),
        now=NOW,
    )
    assert missed.standing == "departed" and get_alert(missed, "missed_end").severity == "alarm"
    middle = {"validation_steps": np.array([400.0]), "validation_loss_nats": np.array([2.4])}
    assert list_names(judge(make_watched_decision(), make_healthy_columns(**middle), now=NOW)) == []


def test_alarms_come_first_and_every_alert_has_a_command():
    columns = make_healthy_columns(num_lines=700)
    columns.train_loss_nats[300] += 2.0
    columns.train_loss_nats[640:] += 2.0
    columns.tokens_per_second[300:] *= 0.5
    commands = Commands(frozen="a b/launch.json", metrics="run", run_dir="my run")
    judgment = judge(make_watched_decision(), columns, now=NOW + 3600, commands=commands)
    severities = [alert.severity for alert in judgment.alerts]
    assert severities == sorted(severities), "alarm sorts before notice"
    assert {"spikes", "slow", "spike_lasts", "stalled"} <= set(list_names(judgment))
    for alert in judgment.alerts:
        program = shlex.split(alert.next_command)[0]
        assert program in ("forerun", "nvidia-smi") and alert.evidence and alert.seen
    assert (
        get_alert(judgment, "stalled").next_command
        == "forerun launch 'a b/launch.json' --out 'my run'"
    )


def list_odd_logs():
    """Yield a description, the columns, and the name of the alarm that must be raised, for each log
    with extreme values.
    """
    losses = draw_losses(np.random.default_rng(0))
    steps = np.arange(NUM_STEPS)
    rounded = np.where(steps < 500, np.round(losses, 1), 2.6)
    slow = np.column_stack([np.ones(NUM_STEPS), np.full(NUM_STEPS, 1e308)])
    yield "loss becomes 0", make_columns(np.where(steps < 400, losses, 0.0)), "departed"
    yield "loss becomes -1", make_columns(np.where(steps < 400, losses, -1.0)), "departed"
    yield "rounded loss rises", make_columns(rounded), "rising"
    yield "every loss is 1e308", make_columns(np.full(NUM_STEPS, 1e308)), "diverged"
    yield "a rank takes 1e308 s", make_columns(losses, rank_seconds=slow), "straggler"
    for end in (0.0, -1.0):
        last = {
            "validation_steps": np.array([float(NUM_STEPS)]),
            "validation_loss_nats": np.array([end]),
        }
        yield f"validation loss is {end:g}", make_columns(losses, **last), "missed_end"


@pytest.mark.parametrize(
    ("columns", "name"),
    [pytest.param(columns, name, id=oddity) for oddity, columns, name in list_odd_logs()],
)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_extreme_numbers_do_not_hide_an_alarm(columns, name):
    judgment = judge(make_watched_decision(), columns, now=NOW)
    assert get_alert(judgment, name).severity == "alarm"
    canon.to_canonical_json(judgment)
