"""Runs that share a stable phase: which do, what they cost, and that a branch is the run that it
stands for.
"""

import dataclasses

import pytest
from proxy_cases import TINY, run_spec

from proxies.core import canon
from proxies.core.branches import (
    TRUNK,
    TRUNK_STEPS,
    branch_step,
    own_flops,
    trained_flops,
    trunk_id,
)
from proxies.core.schedule import Schedule
from proxies.core.spec import Numerics, Run
from proxies.training.bank import Bank
from proxies.training.slot_state import StateError, newest, of_branch, of_trunk, store
from proxies.training.solo import Solo

WIDE = TINY.at_width(32)


def wsd(num_steps, *, warmup_steps=2, decay_steps=None, decay_shape="linear"):
    return Schedule(
        kind="wsd",
        num_steps=num_steps,
        warmup_steps=warmup_steps,
        decay_steps=decay_steps or num_steps // 5,
        decay_shape=decay_shape,
    )


def spec_of(data_id="d", schedule=None, **changes):
    return run_spec(data_id, shape=WIDE, base_shape=TINY, schedule=schedule or wsd(20), **changes)


def test_what_differs_in_duration_and_decay_alone_shares_a_trunk():
    mine = trunk_id(spec_of())
    alike = [wsd(40), wsd(20, decay_steps=5), wsd(20, decay_shape="sqrt")]
    assert mine and {trunk_id(spec_of(schedule=one)) for one in alike} == {mine}
    others = [
        spec_of(schedule=wsd(20, warmup_steps=3)),
        spec_of(seed=1),
        spec_of(learning_rate=0.02),
        spec_of(weight_decay=0.3),
        spec_of(clip_norm=0.7),
        spec_of(dtype="float64"),
        spec_of(num_slots=1),
        spec_of(data_id="other"),
    ]
    assert len({mine, *map(trunk_id, others)}) == 1 + len(others)


def test_where_the_duration_counts_from_the_first_step_nothing_is_shared():
    by_duration = {"base_batch_tokens": 64, "base_num_tokens": 640, "parametrization": "completedp"}
    growing = dataclasses.replace(wsd(20), batch_warmup_steps=4, batch_warmup_stages=2)
    for spec in (
        spec_of(schedule=Schedule(kind="cosine", num_steps=20)),
        spec_of(**by_duration),
        spec_of(schedule=growing, num_slots=1),
    ):
        assert trunk_id(spec) == ""


def test_five_durations_cost_what_the_longest_costs_and_four_decays():
    ladder = [spec_of(schedule=wsd(n, decay_steps=n // 10)) for n in (50, 100, 200, 400, 800)]
    unit = ladder[1].flops
    assert sum(own_flops(reversed(ladder))) == pytest.approx(8.75 * unit)
    assert sum(spec.flops for spec in ladder) == pytest.approx(15.5 * unit)
    assert own_flops([ladder[1]] * 3) == [unit] * 3, "the same run again goes on from nothing"
    two = [spec_of(schedule=wsd(100)), spec_of(schedule=wsd(100, decay_shape="sqrt"))]
    assert sorted(own_flops(two)) == pytest.approx([0.2 * unit, unit])
    cosine = spec_of(schedule=Schedule(kind="cosine", num_steps=100))
    assert own_flops([cosine, ladder[0]]) == [cosine.flops, ladder[0].flops]


@pytest.fixture(params=["bank", "alone"])
def engine(request, store):
    def opened(spec):
        if request.param == "alone":
            return Solo(store, device="cpu")
        return Bank(
            spec.shape, spec.batch_tokens, spec.numerics, store, optimizer="adamw", device="cpu"
        )

    opened.num_slots = 1 if request.param == "alone" else 3
    return opened


def whole(engine, spec):
    bank = engine(spec)
    bank.admit(0, spec)
    ((_, result, curve),) = bank.advance(10**6)
    return result, curve


def test_a_branch_is_the_run_from_step_0_bit_by_bit(engine, store, tmp_path):
    data_id, slots = store.manifest.data_id, engine.num_slots
    short = spec_of(data_id, wsd(20), num_slots=slots, weight_decay=0.1)
    bank = engine(short)
    bank.admit(0, short)
    bank.advance(branch_step(short))
    path = store_state(tmp_path, bank.state(0), trunk_id(short))
    assert path.parent.name == trunk_id(short)
    for longer in (wsd(40), wsd(30, decay_shape="sqrt")):
        spec = dataclasses.replace(short, schedule=longer)
        state = newest(path.parent, trunk_id(spec), bank.environment, [])
        other = engine(spec)
        last = slots - 1
        other.admit(last, spec, of_branch(state, spec.id))
        other.advance(3)
        moved = other.state(last)  # saved and resumed once more
        again = engine(spec)
        again.admit(0, spec, moved)
        ((_, result, curve),) = again.advance(10**6)
        reference, their_curve = whole(engine, spec)
        assert (result.loss_nats, curve) == (reference.loss_nats, their_curve)
        assert result.environment[TRUNK] == trunk_id(spec)
        assert result.environment[TRUNK_STEPS] == str(branch_step(short))
        assert result.flops == pytest.approx(sum(own_flops([short, spec])) - short.flops)
        assert (result.flops, reference.flops) == (
            trained_flops(Run(spec=spec, result=result)),
            spec.flops,
        )
        assert result.tokens == reference.tokens == spec.num_tokens


def store_state(folder, state, trunk):
    return store(folder / trunk, of_trunk(state, trunk))


def test_a_state_beyond_the_branch_step_is_passed_over(store, tmp_path):
    short, long = (spec_of(store.manifest.data_id, wsd(n), num_slots=1) for n in (20, 40))
    solo = Solo(store, device="cpu")
    solo.admit(0, long)
    for steps in (4, 16):
        solo.advance(steps - solo.steps[0])
        folder = store_state(tmp_path, solo.state(0), trunk_id(long)).parent
    found = newest(folder, trunk_id(short), solo.environment, [], branch_step(short) - 1)
    assert found.header.step == 4
    assert newest(folder, trunk_id(short), solo.environment, []).header.step == 16
    beyond = dataclasses.replace(short, schedule=wsd(10))
    with pytest.raises(StateError):
        Solo(store, device="cpu").admit(0, beyond, of_branch(solo.state(0), beyond.id))


def test_specs_and_headers_without_it_keep_their_identity(store):
    assert "decay_shape" not in canon.canonical(spec_of())
    solo = Solo(store, device="cpu")
    spec = dataclasses.replace(spec_of(store.manifest.data_id), numerics=Numerics())
    solo.admit(0, spec)
    assert "trunk_steps" not in canon.canonical(solo.state(0).header)
