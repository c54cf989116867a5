"""Plans as records: shapes, schedules, identity, the first guess of a width."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.plan.plan import Plan
from proxies.core.checks import SpecError

PLAN = Plan()


def planned(**sections):
    return Plan.model_validate(sections)


def test_only_width_scales_a_shape():
    small, large = PLAN.shape(32, 256), PLAN.shape(128, 256)
    assert small == dataclasses.replace(large, width=32, num_heads=2, num_kv_heads=2, ffn_width=64)
    assert small.head_dim == large.head_dim == PLAN.model.head_dim
    assert planned(model={"query_heads_per_kv_head": 2}).shape(64, 256).num_kv_heads == 2


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ({}, "width = 40 must be a multiple of head_dim = 16"),
        (
            {"head_dim": 8, "ffn_ratio": 2.01},
            "width = 40 times ffn_ratio = 2.01 must be a whole number",
        ),
        (
            {"head_dim": 8, "query_heads_per_kv_head": 2},
            "5 heads must be a multiple of query_heads_per_kv_head = 2",
        ),
    ],
)
def test_a_shape_that_does_not_add_up(model, said):
    with pytest.raises(SpecError, match=said):
        planned(model=model).shape(40, 256)


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from(["cosine", "linear", "wsd", "constant"]),
    num_steps=st.integers(1, 10_000),
    warmup=st.floats(0, 1, exclude_max=True),
    decay=st.floats(0, 1, exclude_max=True),
)
def test_any_fractions_make_a_schedule(kind, num_steps, warmup, decay):
    schedule = planned(proxy={"schedule": kind, "decay_fraction": decay}).schedule(
        num_steps, warmup
    )
    assert schedule.num_steps == num_steps
    assert (schedule.decay_steps > 0) == (kind == "wsd")
    assert schedule.warmup_steps + schedule.decay_steps <= num_steps
    if kind != "wsd":
        assert abs(schedule.warmup_steps - max(1, warmup * num_steps)) <= 0.5


def test_the_question_leaves_out_where_it_runs():
    other = planned(cluster={"backend": "inline", "num_workers": 7}, data={"path": "elsewhere"})
    assert other.question() == PLAN.question()
    assert planned(search={"seed": 1}).question() != PLAN.question()
    assert planned(proxy={"num_slots": 5}).question() != PLAN.question(), "K changes how sums round"


AUTO = {"num_slots": "auto", "compiled": "auto"}


@pytest.mark.parametrize(
    ("proxy", "left"),
    [
        ({}, ("num_slots", "compiled")),
        ({"num_slots": 4}, ("compiled",)),
        ({"compiled": True}, ("num_slots",)),
        ({"microbatch_tokens": 64}, ("compiled",)),
        ({"batch_warmup_fraction": 0.1}, ("compiled",)),
        ({"factory": "a:b"}, ()),
        ({"command": "train {run_dir}"}, ()),
    ],
)
def test_what_is_left_to_the_calibration(proxy, left):
    plan = planned(proxy={**AUTO, **proxy})
    assert plan.choices("proxy") == left
    assert plan.choices("ladder") == tuple(name for name in left if name != "num_slots"), (
        "ladder.num_slots is given"
    )
    numerics = plan.numerics("proxy")
    assert numerics.num_slots == proxy.get("num_slots", 1)
    assert numerics.compiled == proxy.get("compiled", False)
