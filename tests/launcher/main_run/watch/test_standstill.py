"""Tests of the alerts for a loss that repeats one value and for a loss that is no longer logged.

A log of rounded losses, which repeats values by chance, raises no alarm.
"""

import numpy as np
import pytest
from planted_watch import NUM_STEPS, draw_losses, make_columns, make_watched_decision
from watched_case import read_log, write_lines

from forerun._launcher.main_run.watch.alerts import WatchedRun
from forerun._launcher.main_run.watch.judgment import judge
from forerun._launcher.main_run.watch.loss_alerts import (
    MIN_EQUAL,
    find_constant_loss,
    find_stopped_losses,
)
from forerun._launcher.main_run.watch.noise import find_resolution

DECISION = make_watched_decision()


def is_frozen(losses):
    """Return whether a log with these losses raises the alert for a constant loss."""
    run = WatchedRun(decision=DECISION, columns=make_columns(losses))
    return next(find_constant_loss(run), None) is not None


def list_alarms(columns):
    """Return the names of all alarms of a log."""
    return [
        alert.name
        for alert in judge(make_watched_decision(), columns).alerts
        if alert.severity == "alarm"
    ]


def test_frozen_loss_is_an_alarm_after_sixteen_lines():
    losses = draw_losses(np.random.default_rng(0))
    losses[500:] = losses[500]
    assert list_alarms(make_columns(losses[: 500 + MIN_EQUAL])) == ["frozen_loss"]
    assert list_alarms(make_columns(losses[: 499 + MIN_EQUAL])) == []
    recovered = np.append(losses[:600], draw_losses(np.random.default_rng(1))[600:])
    assert list_alarms(make_columns(recovered)) == []


@pytest.mark.parametrize("resolution", [0.1, 2.0**-7, 1e-4])
def test_rounded_log_is_never_frozen(resolution):
    for seed in range(2):
        losses = np.round(
            np.round(draw_losses(np.random.default_rng(seed)) / resolution) * resolution, 10
        )
        # A stretch of equal losses is longest at its end, so only the ends are checked.
        ends = np.append(np.flatnonzero(np.diff(losses)) + 1, NUM_STEPS)
        assert not any(is_frozen(losses[:end]) for end in ends.tolist())


def test_coarser_rounding_needs_more_equal_lines():
    num_needed = []
    for digits in (3, 2, 1):
        losses = np.round(draw_losses(np.random.default_rng(0), noise=0.08), digits)
        losses[400:] = losses[400]
        num_needed.append(next(n for n in range(2, 400) if is_frozen(losses[: 400 + n])))
    assert num_needed[0] == MIN_EQUAL and num_needed[0] <= num_needed[1] < num_needed[2]


def test_constant_loss_is_frozen_unless_rounding_explains_it():
    assert list_alarms(make_columns(np.full(120, 2.3026)))[:1] == ["frozen_loss"]
    assert not is_frozen(np.full(60, 2.3026))
    assert not is_frozen(np.full(400, 2.3))


def test_missing_losses_of_later_steps_are_an_alarm(tmp_path):
    losses = draw_losses(np.random.default_rng(0))

    def read_columns(lines):
        return read_log(write_lines(tmp_path / "log.jsonl", lines), NUM_STEPS).columns

    lines = [{"step": step, "loss": losses[step - 1], "grad_norm": 1.0} for step in range(1, 401)]
    without_loss = [{"step": step, "grad_norm": 1.0} for step in range(401, 421)]
    columns = read_columns(lines + without_loss)
    (stopped,) = find_stopped_losses(WatchedRun(decision=DECISION, columns=columns))
    assert (stopped.evidence["loss"], stopped.first_step) == ("training", 400)
    assert list_alarms(columns) == ["metrics_stop"]
    assert list_alarms(read_columns(lines + without_loss[:10])) == []
    without_norm = [{"step": step, "loss": losses[step - 1]} for step in range(401, 450)]
    assert judge(make_watched_decision(), read_columns(lines + without_norm)).alerts == ()


def test_find_resolution_recovers_the_rounding():
    values = 2.0 + 0.05 * np.random.default_rng(0).standard_normal(300)
    assert find_resolution(np.round(values, 2)) == pytest.approx(0.01)
    assert find_resolution(np.round(values * 128) / 128) == pytest.approx(1 / 128)
    assert find_resolution(values) < 1e-6 and find_resolution(values[:10]) < 1e-10
    assert (
        find_resolution(np.array([2.35])) == pytest.approx(0.01)
        and find_resolution(np.array([])) == 1
    )
