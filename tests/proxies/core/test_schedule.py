"""Tests of schedules: the learning rate of every step, warmup, decay and batch warmup."""

import itertools
import math

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from forerun._proxies.core.checks import SpecError
from forerun._proxies.core.schedule import Schedule, compute_lr_table, compute_warmup_steps

KINDS = ("cosine", "linear", "wsd", "constant")
DECAY_SHAPES = ("linear", "sqrt")


@st.composite
def draw_schedules(draw):
    """Draw valid schedules of every kind."""
    num_steps = draw(st.integers(1, 120))
    kind = draw(st.sampled_from(KINDS))
    decay_steps = draw(st.integers(1, num_steps)) if kind == "wsd" else 0
    warmup_steps = draw(st.integers(0, num_steps - decay_steps))
    return Schedule(
        kind=kind,
        num_steps=num_steps,
        warmup_steps=warmup_steps,
        decay_steps=decay_steps,
        final_fraction=draw(st.floats(0, 1)),
        decay_shape=draw(st.sampled_from(DECAY_SHAPES)) if kind == "wsd" else "linear",
    )


def compute_torchtitan_multiplier(step, *, warmup, num_steps, decay, kind, floor):
    """Return the rate multiplier as torchtitan's LRSchedulersContainer computes it, from step 0."""
    stable = num_steps + 1 - warmup - decay
    if step < warmup:
        return (step + 1) / warmup
    if step < warmup + stable - 1:
        return 1.0
    progress = (step + 1 - (warmup + stable)) / decay
    share = 0.5 * (1 + math.cos(math.pi * progress)) if kind == "cosine" else 1 - progress
    if kind == "sqrt":
        share = 1 - math.sqrt(progress)
    return floor + (1 - floor) * share


@settings(deadline=None, derandomize=True, database=None)
@given(draw_schedules())
def test_rates_match_torchtitan(schedule):
    # torchtitan's formula needs at least one step of decay.
    assume(schedule.kind != "constant" and schedule.num_steps > schedule.warmup_steps)
    decay = schedule.decay_steps or schedule.num_steps - schedule.warmup_steps
    expected = [
        compute_torchtitan_multiplier(
            step,
            warmup=schedule.warmup_steps,
            num_steps=schedule.num_steps,
            decay=decay,
            kind="sqrt" if schedule.decay_shape == "sqrt" else schedule.kind,
            floor=schedule.final_fraction,
        )
        for step in range(schedule.num_steps)
    ]
    assert compute_lr_table(schedule) == pytest.approx(expected, abs=1e-12)


@settings(deadline=None, derandomize=True, database=None)
@given(draw_schedules())
def test_rate_rises_to_its_peak_then_falls_and_is_never_zero(schedule):
    table = compute_lr_table(schedule)
    warmup, after_warmup = table[: schedule.warmup_steps], table[schedule.warmup_steps :]
    assert len(table) == schedule.num_steps
    assert all(0 < share <= 1 for share in table)
    assert all(a < b for a, b in itertools.pairwise(warmup))
    assert all(a >= b for a, b in itertools.pairwise(after_warmup))
    assert min(after_warmup, default=1.0) >= schedule.final_fraction
    assert not warmup or warmup[-1] == 1.0
    assert not after_warmup or after_warmup[0] == 1.0


def test_exact_rates_of_short_schedules():
    wsd = Schedule(kind="wsd", num_steps=10, warmup_steps=2, decay_steps=4, final_fraction=0.2)
    assert compute_lr_table(wsd) == pytest.approx([0.5, 1, 1, 1, 1, 1, 1, 0.8, 0.6, 0.4])
    linear = Schedule(kind="linear", num_steps=4)
    assert compute_lr_table(linear) == (1.0, 0.75, 0.5, 0.25)
    cosine = Schedule(kind="cosine", num_steps=4)
    assert compute_lr_table(cosine) == pytest.approx(
        [1.0, 0.5 + math.sqrt(0.125), 0.5, 0.5 - math.sqrt(0.125)]
    )
    constant = Schedule(kind="constant", num_steps=3, warmup_steps=2, final_fraction=0.5)
    assert compute_lr_table(constant) == (0.5, 1.0, 1.0)
    for kind in ("cosine", "linear", "constant"):
        assert compute_lr_table(Schedule(kind=kind, num_steps=1)) == (1.0,)
        assert compute_lr_table(Schedule(kind=kind, num_steps=2, warmup_steps=2)) == (0.5, 1.0)
    assert compute_lr_table(Schedule(kind="wsd", num_steps=1, decay_steps=1)) == (1.0,)


@pytest.mark.parametrize(
    "changes, problem",
    [
        ({"warmup_steps": 11}, "warmup_steps = 11 and decay_steps = 0 exceed num_steps = 10"),
        (
            {"kind": "wsd", "warmup_steps": 5, "decay_steps": 6},
            "warmup_steps = 5 and decay_steps = 6 exceed",
        ),
        ({"kind": "wsd"}, "decay_steps = 0: must be at least 1"),
        (
            {"final_fraction": 1.1},
            "final_fraction = 1.1: must be a finite number, at least 0 and at most 1",
        ),
        ({"batch_warmup_steps": 4}, "batch_warmup_steps = 4 with batch_warmup_stages = 1"),
        (
            {"batch_warmup_steps": 2, "batch_warmup_stages": 4},
            "batch_warmup_steps = 2 with batch_warmup_stages = 4",
        ),
        ({"batch_warmup_steps": 11, "batch_warmup_stages": 2}, "batch_warmup_steps = 11 with"),
    ],
)
def test_inconsistent_schedules_are_refused(changes, problem):
    with pytest.raises(SpecError) as caught:
        Schedule(**{"kind": "cosine", "num_steps": 10, **changes})
    (message,) = caught.value.problems
    assert message.startswith(problem)


@pytest.mark.parametrize(
    "fraction, num_steps, decay_steps, warmup_steps",
    [
        (0.0, 100, 0, 1),
        (0.25, 10, 0, 2),
        (0.26, 10, 0, 3),
        (0.9, 10, 4, 6),
        (1.0, 10, 0, 10),
        (0.5, 10, 10, 0),
    ],
)
def test_warmup_fraction_becomes_whole_steps_before_the_decay(
    fraction, num_steps, decay_steps, warmup_steps
):
    assert compute_warmup_steps(fraction, num_steps, decay_steps) == warmup_steps


def test_batch_warms_up_in_equal_stages():
    schedule = Schedule(kind="cosine", num_steps=8, batch_warmup_steps=6, batch_warmup_stages=4)
    assert [schedule.compute_batch_share(step) * 4 for step in range(8)] == [1, 1, 2, 2, 3, 3, 4, 4]
    assert schedule.num_full_batches == 5
    # The first sequence and the number of sequences of each step
    assert [schedule.count_sequences(step, 8) for step in range(4)] == [
        (0, 2),
        (2, 2),
        (4, 4),
        (8, 4),
    ]


@st.composite
def draw_batch_warmups(draw):
    """Draw constant schedules with every valid combination of stages and steps of batch warmup."""
    stages = draw(st.integers(1, 12))
    # A single stage is no warmup. Otherwise each stage but the last, of full batches, has a step.
    warmup_steps = 0 if stages == 1 else draw(st.integers(stages - 1, 40))
    return Schedule(
        kind="constant",
        num_steps=draw(st.integers(max(1, warmup_steps), 60)),
        batch_warmup_steps=warmup_steps,
        batch_warmup_stages=stages,
    )


@settings(deadline=None, derandomize=True, database=None)
@given(draw_batch_warmups())
def test_batch_warmup_uses_each_sequence_once(schedule):
    stages, next_sequence = schedule.batch_warmup_stages, 0
    for step in range(schedule.num_steps):
        first, count = schedule.count_sequences(step, 3 * stages)
        assert first == next_sequence
        assert count >= 3
        next_sequence += count
    assert next_sequence == schedule.num_full_batches * 3 * stages
