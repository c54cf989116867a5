"""What no longer moves is told: frozen losses, metrics that stop; no rounded log."""

import numpy as np
import pytest
from planted_watch import NUM_STEPS, columns_of, decision, losses_of
from watched_case import read, write_lines

from launcher.watch.judgment import judge
from launcher.watch.loss_alerts import MIN_EQUAL, find_stopped_losses, frozen_loss
from launcher.watch.noise import resolution


def alarms(columns):
    return [alert.name for alert in judge(decision(), columns).alerts if alert.severity == "alarm"]


def test_a_loss_frozen_to_the_last_digit_is_an_alarm_after_sixteen_lines():
    losses = losses_of(np.random.default_rng(0))
    losses[500:] = losses[500]
    assert alarms(columns_of(losses[: 500 + MIN_EQUAL])) == ["frozen_loss"]
    assert alarms(columns_of(losses[: 499 + MIN_EQUAL])) == []
    moves_on = np.append(losses[:600], losses_of(np.random.default_rng(1))[600:])
    assert alarms(columns_of(moves_on)) == []


@pytest.mark.parametrize("step", [0.1, 2.0**-7, 1e-4])
def test_a_rounded_log_is_not_frozen_at_any_of_its_lines(step):
    for seed in range(2):
        losses = np.round(np.round(losses_of(np.random.default_rng(seed)) / step) * step, 10)
        # a stretch is longest at its end
        ends = np.append(np.flatnonzero(np.diff(losses)) + 1, NUM_STEPS)
        assert not any(
            frozen_loss(columns_of(losses[:end]), 20, NUM_STEPS) for end in ends.tolist()
        )


def test_how_many_equal_ones_it_takes_grows_with_the_rounding():
    needed = []
    for digits in (3, 2, 1):
        losses = np.round(losses_of(np.random.default_rng(0), noise=0.08), digits)
        losses[400:] = losses[400]
        found = (
            n for n in range(2, 400) if frozen_loss(columns_of(losses[: 400 + n]), 20, NUM_STEPS)
        )
        needed.append(next(found))
    assert needed[0] == MIN_EQUAL and needed[0] <= needed[1] < needed[2]


def test_a_loss_that_never_changed_is_frozen_unless_it_may_have_been_rounded_so():
    assert alarms(columns_of(np.full(120, 2.3026)))[:1] == ["frozen_loss"]
    assert frozen_loss(columns_of(np.full(60, 2.3026)), 20, NUM_STEPS) is None
    assert frozen_loss(columns_of(np.full(400, 2.3)), 20, NUM_STEPS) is None


def test_losses_that_stop_while_steps_go_on_are_told(tmp_path):
    losses = losses_of(np.random.default_rng(0))

    def columns_in(lines):
        return read(write_lines(tmp_path / "log.jsonl", lines), NUM_STEPS).columns

    lines = [{"step": step, "loss": losses[step - 1], "grad_norm": 1.0} for step in range(1, 401)]
    silent = [{"step": step, "grad_norm": 1.0} for step in range(401, 421)]
    columns = columns_in(lines + silent)
    assert [(each.evidence["loss"], each.first_step) for each in find_stopped_losses(columns)] == [
        ("training", 400)
    ]
    assert alarms(columns) == ["metrics_stop"]
    assert alarms(columns_in(lines + silent[:10])) == []
    bare = [{"step": step, "loss": losses[step - 1]} for step in range(401, 450)]
    assert judge(decision(), columns_in(lines + bare)).alerts == ()


def test_the_rounding_of_a_log_is_found():
    values = 2.0 + 0.05 * np.random.default_rng(0).standard_normal(300)
    assert resolution(np.round(values, 2)) == pytest.approx(0.01)
    assert resolution(np.round(values * 128) / 128) == pytest.approx(1 / 128)
    assert resolution(values) < 1e-6 and resolution(values[:10]) < 1e-10
    assert resolution(np.array([2.35])) == pytest.approx(0.01) and resolution(np.array([])) == 1
