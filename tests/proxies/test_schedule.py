import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxies.schedule import lr_multiplier, lr_table
from proxies.spec import Schedule

KINDS = ("cosine", "linear", "wsd", "constant")


@st.composite
def schedules(draw):
    num_steps = draw(st.integers(1, 120))
    kind = draw(st.sampled_from(KINDS))
    decay_steps = draw(st.integers(1, num_steps)) if kind == "wsd" else 0
    warmup_steps = draw(st.integers(0, num_steps - decay_steps))
    return Schedule(
        kind=kind, num_steps=num_steps, warmup_steps=warmup_steps, decay_steps=decay_steps,
        final_fraction=draw(st.floats(0, 1)),
    )  # fmt: skip


def test_the_worked_cosine():
    table = lr_table(Schedule(kind="cosine", num_steps=100, warmup_steps=10, final_fraction=0.1))
    assert [round(share, 4) for share in table[:3] + table[9:12] + table[-2:]] == [
        0.1, 0.2, 0.3, 1.0, 1.0, 0.9997, 0.1011, 0.1003,
    ]  # fmt: skip
    assert sum(table) == pytest.approx(55.450, abs=5e-4)


def torchtitan_multiplier(step, *, warmup, num_steps, decay, kind, floor):
    """Warmup, stable and decay as torchtitan's LRSchedulersContainer writes them (its steps too start at 0)."""
    stable = num_steps + 1 - warmup - decay
    if step < warmup:
        return (step + 1) / warmup
    if step < warmup + stable - 1:
        return 1.0
    progress = (step + 1 - (warmup + stable)) / decay
    share = 0.5 * (1 + math.cos(math.pi * progress)) if kind == "cosine" else 1 - progress
    return floor + (1 - floor) * share


@settings(deadline=None, derandomize=True, database=None)
@given(schedules())
def test_it_is_torchtitans(schedule):
    if schedule.kind == "constant" or schedule.num_steps == schedule.warmup_steps:
        return
    decay = schedule.decay_steps or schedule.num_steps - schedule.warmup_steps
    wanted = [
        torchtitan_multiplier(
            step, warmup=schedule.warmup_steps, num_steps=schedule.num_steps, decay=decay,
            kind=schedule.kind, floor=schedule.final_fraction,
        )
        for step in range(schedule.num_steps)
    ]  # fmt: skip
    assert lr_table(schedule) == pytest.approx(wanted, abs=1e-12)


@settings(deadline=None, derandomize=True, database=None)
@given(schedules())
def test_every_schedule_rises_then_falls_and_wastes_no_step(schedule):
    table = lr_table(schedule)
    warm, rest = table[: schedule.warmup_steps], table[schedule.warmup_steps :]
    assert len(table) == schedule.num_steps
    assert all(0 < share <= 1 for share in table)
    assert all(a < b for a, b in itertools.pairwise(warm))
    assert all(a >= b for a, b in itertools.pairwise(rest))
    assert min(rest, default=1.0) >= schedule.final_fraction
    assert not warm or warm[-1] == 1.0
    assert not rest or rest[0] == 1.0


def test_exact_values_at_the_edges():
    wsd = Schedule(kind="wsd", num_steps=10, warmup_steps=2, decay_steps=4, final_fraction=0.2)
    assert lr_table(wsd) == pytest.approx([0.5, 1, 1, 1, 1, 1, 1, 0.8, 0.6, 0.4])
    linear = Schedule(kind="linear", num_steps=4)
    assert lr_table(linear) == (1.0, 0.75, 0.5, 0.25)
    cosine = Schedule(kind="cosine", num_steps=4)
    assert lr_table(cosine) == pytest.approx([1.0, 0.5 + math.sqrt(0.125), 0.5, 0.5 - math.sqrt(0.125)])
    assert lr_table(Schedule(kind="constant", num_steps=3, warmup_steps=2, final_fraction=0.5)) == (0.5, 1.0, 1.0)
    for kind in ("cosine", "linear", "constant"):
        assert lr_table(Schedule(kind=kind, num_steps=1)) == (1.0,)
        assert lr_table(Schedule(kind=kind, num_steps=2, warmup_steps=2)) == (0.5, 1.0)
    assert lr_table(Schedule(kind="wsd", num_steps=1, decay_steps=1)) == (1.0,)


@pytest.mark.parametrize("step", [-1, 4, 100])
def test_steps_outside_are_refused(step):
    with pytest.raises(ValueError, match=f"step {step} is outside a schedule of 4 steps"):
        lr_multiplier(Schedule(kind="linear", num_steps=4), step)
