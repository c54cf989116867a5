"""Tests of plans: the shapes and schedules that they give, the question (the part of a plan that
decides what is measured), and the fields that a calibration chooses.
"""

import dataclasses
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun._launcher.study.plan.plan import Plan
from forerun._proxies.core.checks import SpecError

PLAN = Plan()


def make_plan(**sections):
    return Plan.model_validate(sections)


def test_only_width_scales_a_shape():
    small, large = PLAN.build_shape(32, 256), PLAN.build_shape(128, 256)
    assert small == dataclasses.replace(large, width=32, num_heads=2, num_kv_heads=2, ffn_width=64)
    assert small.head_dim == large.head_dim == PLAN.model.head_dim
    assert make_plan(model={"query_heads_per_kv_head": 2}).build_shape(64, 256).num_kv_heads == 2


@pytest.mark.parametrize(
    ("model", "message"),
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
def test_inconsistent_shape_is_refused(model, message):
    with pytest.raises(SpecError, match=message):
        make_plan(model=model).build_shape(40, 256)


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from(["cosine", "linear", "wsd", "constant"]),
    num_steps=st.integers(1, 10_000),
    warmup=st.floats(0, 1, exclude_max=True),
    decay=st.floats(0, 1, exclude_max=True),
)
def test_any_fractions_make_a_valid_schedule(kind, num_steps, warmup, decay):
    schedule = make_plan(proxy={"schedule": kind, "decay_fraction": decay}).build_schedule(
        num_steps, warmup
    )
    assert schedule.num_steps == num_steps
    assert (schedule.decay_steps > 0) == (kind == "wsd")
    assert schedule.warmup_steps + schedule.decay_steps <= num_steps
    if kind != "wsd":
        assert abs(schedule.warmup_steps - max(1, warmup * num_steps)) <= 0.5, "rounded"


def test_question_does_not_depend_on_where_the_study_runs():
    moved = make_plan(cluster={"backend": "inline", "num_workers": 7}, data={"path": "elsewhere"})
    assert moved.to_question() == PLAN.to_question()
    assert make_plan(search={"seed": 1}).to_question() != PLAN.to_question()
    # The number of slots is in the question, because it changes the rounding of sums.
    assert make_plan(proxy={"num_slots": 5}).to_question() != PLAN.to_question()


AUTO = {"num_slots": "auto", "compiled": "auto"}


@pytest.mark.parametrize(
    ("proxy", "open_fields"),
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
def test_calibration_chooses_auto_fields_that_the_plan_allows(proxy, open_fields):
    plan = make_plan(proxy={**AUTO, **proxy})
    assert plan.list_open_choices("proxy") == open_fields
    # The default of ladder.num_slots is a number.
    ladder_fields = tuple(name for name in open_fields if name != "num_slots")
    assert plan.list_open_choices("ladder") == ladder_fields
    numerics = plan.build_numerics("proxy")
    assert numerics.num_slots == proxy.get("num_slots", 1)
    assert numerics.compiled == proxy.get("compiled", False)


def test_import_of_a_plan_needs_no_sqlite():
    # None in `sys.modules` makes an import of that name fail.
    code = (
        "import sys; sys.modules['sqlite3'] = None; "
        "from forerun._launcher.study.plan import plan, file"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
