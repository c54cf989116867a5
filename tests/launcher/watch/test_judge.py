"""The whole verdict: healthy runs pass, each planted fault has its alert, exit codes are as
documented.
"""

import dataclasses
import shlex

import numpy as np
import pytest
from planted_watch import BEGAN, NUM_STEPS, columns_of, decision, header, losses_of, started

from launcher.base.policy import SpikePolicy
from launcher.watch.alerts import Commands
from launcher.watch.judgment import ALARM, CANNOT_TELL, judge
from proxies.core import canon

NOW = BEGAN.timestamp() + 500.0


def healthy(seed=0, upto=NUM_STEPS, **given):
    rng = np.random.default_rng(seed)
    columns = {
        "seconds": 0.5 * np.exp(0.03 * rng.standard_normal(upto)),
        "grad_norm": np.exp(0.2 * rng.standard_normal(upto)),
        "tokens_per_second": 2000 * np.exp(0.03 * rng.standard_normal(upto)),
        "rank_seconds": 0.4 * np.exp(0.03 * rng.standard_normal((upto, 4))),
        "events": (started(),),
        "header": header(),
        "newest_at": NOW,
    }
    return columns_of(losses_of(rng)[:upto], **{**columns, **given})


def alert(judged, name):
    (found,) = (each for each in judged.alerts if each.name == name)
    return found


def names(judged):
    return [each.name for each in judged.alerts]


@pytest.mark.parametrize("seed", range(3))
def test_a_healthy_run_is_on_the_band_and_says_nothing(seed):
    judged = judge(decision(), healthy(seed, 600), now=NOW)
    assert (judged.standing, names(judged), judged.exit_code) == ("on the band", [], 0)
    assert judged.figures["final_nats"] == pytest.approx(2.0, rel=0.01)
    low, high = judged.figures["final_interval_nats"]
    before_low, before_high = judged.figures["foretold_interval_nats"]
    assert before_low < low < high < before_high, "what was seen makes the forecast surer"
    assert judged.figures["goodput"] == pytest.approx(0.6, abs=0.02)
    canon.canonical(judged)  # no NaN in it


def test_too_little_to_say_is_told():
    early = judge(decision(), healthy(upto=30), now=NOW)
    assert (early.standing, early.exit_code) == ("cannot tell", CANNOT_TELL)
    nothing = judge(decision(), columns_of([]))
    assert nothing.exit_code == CANNOT_TELL and nothing.figures["train_loss_nats"] is None
    bare = decision(forecast=dataclasses.replace(decision().predicted, curve=()))
    assert judge(bare, healthy(), now=NOW).exit_code == CANNOT_TELL
    assert "too few runs" in judge(bare, healthy(), now=NOW).why


def test_an_alarm_outranks_too_little_to_say():
    columns = healthy(upto=30)
    columns.train_loss_nats[20] = np.nan
    judged = judge(decision(), columns, now=NOW)
    assert judged.exit_code == ALARM and alert(judged, "non_finite").first_step == 21


def test_a_departed_run_says_from_when_and_by_how_much():
    losses = losses_of(np.random.default_rng(0))
    losses[400:] *= 1.25
    judged = judge(decision(), columns_of(losses))
    found = alert(judged, "departed")
    assert (judged.standing, judged.exit_code, found.severity) == ("departed", ALARM, "alarm")
    assert abs(found.evidence["departure_sds"]) > found.evidence["bound_sds"]
    assert str(int(found.first_step)) in judged.why


def test_spikes_that_come_back_are_a_notice_and_one_that_lasts_an_alarm():
    columns = healthy()
    columns.train_loss_nats[[300, *range(500, 508)]] += 2.0
    judged = judge(decision(), columns, now=NOW)
    evidence = alert(judged, "spikes").evidence
    assert (evidence["first_steps"], evidence["num_lasted"], judged.exit_code) == ([301, 501], 1, 0)
    lasting = healthy(upto=500)
    lasting.train_loss_nats[480:] += 2.0
    found = alert(
        judge(decision(spikes=SpikePolicy(max_rollbacks=2)), lasting, now=NOW), "spike_lasts"
    )
    assert (
        found.severity == "alarm"
        and found.first_step == 481
        and " 2 times (launch.spike_rollbacks)" in found.seen
    )


def test_a_loss_past_the_ceiling_and_a_slow_rise_are_alarms():
    columns = healthy()
    columns.train_loss_nats[700:] = 7.0
    found = alert(judge(decision(), columns, now=NOW), "diverged")
    assert found.severity == "alarm" and found.first_step == 701
    rising = healthy()
    rising.train_loss_nats[400:] += 1e-3 * np.arange(400)
    assert alert(judge(decision(), rising, now=NOW), "rising").severity == "alarm"
    start = healthy(upto=10)
    start.train_loss_nats[:] = 7.0
    assert "diverged" not in names(judge(decision(), start, now=NOW)), "within the warmup"


def test_silence_is_an_alarm_unless_the_run_is_over():
    assert (
        alert(judge(decision(), healthy(upto=500), now=NOW + 3600), "stalled").severity == "alarm"
    )
    assert names(judge(decision(), healthy(), now=NOW + 3600)) == [], "its last step is there"
    ended = {
        "event": "interrupted",
        "step": 500,
        "exit_code": 130,
        "reason": "SIGTERM",
        "validation_loss_nats": None,
    }
    judged = judge(decision(), healthy(upto=500, events=(started(), ended)), now=NOW + 3600)
    assert names(judged) == ["interrupted"] and judged.exit_code == 0
    aborted = {**ended, "event": "aborted", "reason": "loss is nan"}
    judged = judge(decision(), healthy(upto=500, events=(started(), aborted)), now=NOW + 3600)
    assert (
        alert(judged, "aborted").severity == "alarm"
        and "loss is nan" in alert(judged, "aborted").seen
    )


def test_the_end_is_held_against_the_forecast():
    at_end = {"validation_steps": np.array([float(NUM_STEPS)])}
    fine = judge(decision(), healthy(**at_end, validation_loss_nats=np.array([2.02])), now=NOW)
    assert fine.standing == "on the band" and fine.exit_code == 0
    missed = judge(decision(), healthy(**at_end, validation_loss_nats=np.array([2.4])), now=NOW)
    assert missed.standing == "departed" and alert(missed, "missed_end").severity == "alarm"
    middle = {"validation_steps": np.array([400.0]), "validation_loss_nats": np.array([2.4])}
    assert names(judge(decision(), healthy(**middle), now=NOW)) == []


def test_alarms_come_first_and_every_alert_says_what_to_run():
    columns = healthy(upto=700)
    columns.train_loss_nats[300] += 2.0
    columns.train_loss_nats[640:] += 2.0
    columns.tokens_per_second[300:] *= 0.5
    commands = Commands(frozen="a b/launch.json", metrics="run", run_dir="my run")
    judged = judge(decision(), columns, now=NOW + 3600, commands=commands)
    severities = [each.severity for each in judged.alerts]
    assert severities == sorted(severities) and {"spikes", "slow", "spike_lasts", "stalled"} <= set(
        names(judged)
    )
    for each in judged.alerts:
        program = shlex.split(each.next_command)[0]
        assert program in ("forerun", "nvidia-smi") and each.evidence and each.seen
    assert (
        alert(judged, "stalled").next_command == "forerun launch 'a b/launch.json' --out 'my run'"
    )


def odd_logs():
    losses = losses_of(np.random.default_rng(0))
    steps = np.arange(NUM_STEPS)
    rounded = np.where(steps < 500, np.round(losses, 1), 2.6)
    slow = np.column_stack([np.ones(NUM_STEPS), np.full(NUM_STEPS, 1e308)])
    yield "zero", columns_of(np.where(steps < 400, losses, 0.0)), "departed"
    yield "below zero", columns_of(np.where(steps < 400, losses, -1.0)), "departed"
    yield "rounded", columns_of(rounded), "rising"
    yield "huge", columns_of(np.full(NUM_STEPS, 1e308)), "diverged"
    yield "a rank", columns_of(losses, rank_seconds=slow), "straggler"
    for end in (0.0, -1.0):
        last = {
            "validation_steps": np.array([float(NUM_STEPS)]),
            "validation_loss_nats": np.array([end]),
        }
        yield f"ends at {end}", columns_of(losses, **last), "missed_end"


@pytest.mark.parametrize(
    ("columns", "name"), [pytest.param(*found, id=what) for what, *found in odd_logs()]
)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_no_number_of_a_log_keeps_its_alarm_from_being_told(columns, name):
    judged = judge(decision(), columns, now=NOW)
    assert alert(judged, name).severity == "alarm"
    canon.canonical(judged)
