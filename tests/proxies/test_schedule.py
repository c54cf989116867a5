import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxies.core.checks import SpecError
from proxies.core.schedule import Schedule, lr_table, whole_warmup

KINDS = ("cosine", "linear", "wsd", "constant")
SHAPES = ("linear", "sqrt")


@st.composite
def schedules(draw):
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
        decay_shape=draw(st.sampled_from(SHAPES if kind == "wsd" else SHAPES[:1])),
    )


def torchtitan_multiplier(step, *, warmup, num_steps, decay, kind, floor):
    """Warmup, stable and decay as torchtitan's LRSchedulersContainer writes them (its steps too
    start at 0).
    """
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
@given(schedules())
def test_it_is_torchtitans(schedule):
    if schedule.kind == "constant" or schedule.num_steps == schedule.warmup_steps:
        return
    decay = schedule.decay_steps or schedule.num_steps - schedule.warmup_steps
    wanted = [
        torchtitan_multiplier(
            step,
            warmup=schedule.warmup_steps,
            num_steps=schedule.num_steps,
            decay=decay,
            kind="sqrt" if schedule.decay_shape == "sqrt" else schedule.kind,
            floor=schedule.final_fraction,
        )
        for step in range(schedule.num_steps)
    ]
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
    assert lr_table(cosine) == pytest.approx(
        [1.0, 0.5 + math.sqrt(0.125), 0.5, 0.5 - math.sqrt(0.125)]
    )
    assert lr_table(Schedule(kind="constant", num_steps=3, warmup_steps=2, final_fraction=0.5)) == (
        0.5,
        1.0,
        1.0,
    )
    for kind in ("cosine", "linear", "constant"):
        assert lr_table(Schedule(kind=kind, num_steps=1)) == (1.0,)
        assert lr_table(Schedule(kind=kind, num_steps=2, warmup_steps=2)) == (0.5, 1.0)
    assert lr_table(Schedule(kind="wsd", num_steps=1, decay_steps=1)) == (1.0,)


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
def test_schedules_that_do_not_hold_together(changes, problem):
    with pytest.raises(SpecError) as caught:
        Schedule(**{"kind": "cosine", "num_steps": 10, **changes})
    (found,) = caught.value.problems
    assert found.startswith(problem)


@pytest.mark.parametrize(
    "fraction, num_steps, decay_steps, found",
    [
        (0.0, 100, 0, 1),
        (0.25, 10, 0, 2),
        (0.26, 10, 0, 3),
        (0.9, 10, 4, 6),
        (1.0, 10, 0, 10),
        (0.5, 10, 10, 0),
    ],
)
def test_a_share_of_warmup_is_whole_steps_before_the_decay(fraction, num_steps, decay_steps, found):
    assert whole_warmup(fraction, num_steps, decay_steps) == found


def test_a_batch_warms_up_in_equal_stages():
    schedule = Schedule(kind="cosine", num_steps=8, batch_warmup_steps=6, batch_warmup_stages=4)
    assert [schedule.batch_share(step) * 4 for step in range(8)] == [1, 1, 2, 2, 3, 3, 4, 4]
    assert schedule.num_full_batches == 5
    assert [schedule.sequences(step, 8) for step in range(4)] == [(0, 2), (2, 2), (4, 4), (8, 4)]


@given(st.integers(1, 12), st.integers(0, 40), st.integers(1, 60))
def test_no_sequence_is_skipped_or_seen_twice(stages, steps, num_steps):
    if steps > num_steps or (steps == 0) != (stages == 1) or stages > steps + 1:
        return
    schedule = Schedule(
        kind="constant", num_steps=num_steps, batch_warmup_steps=steps, batch_warmup_stages=stages
    )
    wanted = 0
    for step in range(num_steps):
        first, count = schedule.sequences(step, 3 * stages)
        assert first == wanted
        assert count >= 3
        wanted += count
    assert wanted == schedule.num_full_batches * 3 * stages
