"""Tests of runs that share the stable phase of a wsd (warmup, stable, decay) schedule.

Such runs share a trunk: the steps before the first run decays are trained once, and each other run
branches off from a saved state of them. The tests cover which runs share a trunk, what a branch
costs, and that a run that branches off equals the run trained from step 0.
"""

import dataclasses

import pytest
from proxy_cases import TINY, make_run_spec

from forerun._proxies.core import canon
from forerun._proxies.core.branches import (
    TRUNK,
    TRUNK_STEPS,
    compute_branch_step,
    compute_own_flops,
    compute_trained_flops,
    compute_trunk_id,
)
from forerun._proxies.core.schedule import Schedule
from forerun._proxies.core.spec import Numerics, Run
from forerun._proxies.training.bank import Bank
from forerun._proxies.training.single_trial import SingleTrialEngine
from forerun._proxies.training.slot_state import (
    StateError,
    load_newest_state,
    save_state,
    to_branch_state,
    to_trunk_state,
)

pytestmark = pytest.mark.usefixtures("few_windows")

MANY_STEPS = 10**6
"""More steps than any run has: the engine trains until a run ends."""
WIDE = TINY.at_width(32)
"""Shape of all runs, at twice the width of their base."""


def make_wsd(num_steps, *, warmup_steps=2, decay_steps=None, decay_shape="linear"):
    """Return a warmup-stable-decay schedule that decays over a fifth of its steps by default."""
    return Schedule(
        kind="wsd",
        num_steps=num_steps,
        warmup_steps=warmup_steps,
        decay_steps=decay_steps or num_steps // 5,
        decay_shape=decay_shape,
    )


def make_spec(data_id="d", schedule=None, **changes):
    """Return the spec of a run with a wsd schedule."""
    return make_run_spec(
        data_id, shape=WIDE, base_shape=TINY, schedule=schedule or make_wsd(20), **changes
    )


def test_runs_that_differ_only_in_duration_and_decay_share_a_trunk():
    trunk_id = compute_trunk_id(make_spec())
    assert trunk_id
    for schedule in (make_wsd(40), make_wsd(20, decay_steps=5), make_wsd(20, decay_shape="sqrt")):
        assert compute_trunk_id(make_spec(schedule=schedule)) == trunk_id
    different_specs = [
        make_spec(schedule=make_wsd(20, warmup_steps=3)),
        make_spec(seed=1),
        make_spec(learning_rate=0.02),
        make_spec(weight_decay=0.3),
        make_spec(clip_norm=0.7),
        make_spec(dtype="float64"),
        make_spec(num_slots=1),
        make_spec(data_id="other"),
    ]
    trunk_ids = {trunk_id, *map(compute_trunk_id, different_specs)}
    assert len(trunk_ids) == 1 + len(different_specs)


def test_runs_whose_duration_affects_the_first_step_have_no_trunk():
    by_duration = {"base_batch_tokens": 64, "base_num_tokens": 640, "parametrization": "completedp"}
    growing = dataclasses.replace(make_wsd(20), batch_warmup_steps=4, batch_warmup_stages=2)
    for spec in (
        make_spec(schedule=Schedule(kind="cosine", num_steps=20)),
        make_spec(**by_duration),
        make_spec(schedule=growing, num_slots=1),
    ):
        assert compute_trunk_id(spec) == ""


def test_durations_that_share_a_trunk_cost_one_trunk_and_their_decays():
    ladder = [
        make_spec(schedule=make_wsd(n, decay_steps=n // 10)) for n in (50, 100, 200, 400, 800)
    ]
    unit = ladder[1].flops
    # In units of 100 steps, the runs have 0.5 + 1 + 2 + 4 + 8 = 15.5. With a shared trunk they cost
    # the 8 of the longest run, and for each of the other runs a decay over a tenth of its steps:
    # 0.05 + 0.1 + 0.2 + 0.4. The order in which the runs are listed does not matter.
    assert sum(compute_own_flops(reversed(ladder))) == pytest.approx(8.75 * unit)
    assert sum(spec.flops for spec in ladder) == pytest.approx(15.5 * unit)
    assert compute_own_flops([ladder[1]] * 3) == [unit] * 3, "an equal run does not branch off"
    two_decays = [
        make_spec(schedule=make_wsd(100)),
        make_spec(schedule=make_wsd(100, decay_shape="sqrt")),
    ]
    assert sorted(compute_own_flops(two_decays)) == pytest.approx([0.2 * unit, unit])
    cosine = make_spec(schedule=Schedule(kind="cosine", num_steps=100))
    assert compute_own_flops([cosine, ladder[0]]) == [cosine.flops, ladder[0].flops]


@pytest.fixture(params=["bank", "single"])
def num_slots(request):
    """Slots of the engine: a bank of three, or the engine of a single trial."""
    return {"bank": 3, "single": 1}[request.param]


def build_engine(spec, store):
    """Build the engine for a run's number of slots."""
    if spec.numerics.num_slots == 1:
        return SingleTrialEngine(store, device="cpu")
    return Bank(
        spec.shape, spec.batch_tokens, spec.numerics, store, optimizer="adamw", device="cpu"
    )


def save_trunk_state(folder, state, trunk_id):
    """Save a run's state as a state of its trunk; return the path."""
    return save_state(folder / trunk_id, to_trunk_state(state, trunk_id))


def test_branch_equals_the_run_from_step_0_bit_by_bit(num_slots, store, tmp_path):
    short = make_spec(store.manifest.data_id, make_wsd(10), num_slots=num_slots, weight_decay=0.1)
    trunk_engine = build_engine(short, store)
    trunk_engine.admit(0, short)
    trunk_engine.advance(compute_branch_step(short))
    path = save_trunk_state(tmp_path, trunk_engine.get_state(0), compute_trunk_id(short))
    assert path.parent.name == compute_trunk_id(short)
    for schedule in (make_wsd(20), make_wsd(15, decay_shape="sqrt")):
        spec = dataclasses.replace(short, schedule=schedule)
        trunk_id = compute_trunk_id(spec)

        # Branch off in the last slot, save after three steps, resume in the first slot.
        state = load_newest_state(path.parent, trunk_id, trunk_engine.environment, [])
        branch_engine = build_engine(spec, store)
        branch_engine.admit(num_slots - 1, spec, to_branch_state(state, spec.id))
        branch_engine.advance(3)
        resumed_engine = build_engine(spec, store)
        resumed_engine.admit(0, spec, branch_engine.get_state(num_slots - 1))
        ((_, result, curve),) = resumed_engine.advance(MANY_STEPS)

        # Train the same run from step 0.
        reference_engine = build_engine(spec, store)
        reference_engine.admit(0, spec)
        ((_, reference, reference_curve),) = reference_engine.advance(MANY_STEPS)

        assert (result.loss_nats, curve) == (reference.loss_nats, reference_curve)
        assert result.environment[TRUNK] == trunk_id
        assert result.environment[TRUNK_STEPS] == str(compute_branch_step(short))
        assert result.flops == pytest.approx(sum(compute_own_flops([short, spec])) - short.flops)
        assert (result.flops, reference.flops) == (
            compute_trained_flops(Run(spec=spec, result=result)),
            spec.flops,
        )
        assert result.tokens == reference.tokens == spec.num_tokens


def test_states_after_the_branch_step_are_skipped(store, tmp_path):
    short = make_spec(store.manifest.data_id, make_wsd(20), num_slots=1)
    long = make_spec(store.manifest.data_id, make_wsd(40), num_slots=1)
    engine = SingleTrialEngine(store, device="cpu")
    engine.admit(0, long)
    # The run of 20 steps leaves the trunk after 16 steps.
    assert compute_branch_step(short) == 16
    for step in (4, 16):
        engine.advance(step - engine.steps[0])
        folder = save_trunk_state(tmp_path, engine.get_state(0), compute_trunk_id(long)).parent
    trunk_id, last_step = compute_trunk_id(short), compute_branch_step(short) - 1
    state = load_newest_state(folder, trunk_id, engine.environment, [], last_step)
    assert state.header.step == 4
    # Without a last step, the newest state is loaded.
    newest_state = load_newest_state(folder, trunk_id, engine.environment, [])
    assert newest_state.header.step == 16
    # The engine has trained 16 steps; a run of 10 steps leaves the trunk after 8.
    shorter = dataclasses.replace(short, schedule=make_wsd(10))
    with pytest.raises(StateError, match="it is at step 16, and the run has 10"):
        SingleTrialEngine(store, device="cpu").admit(
            0, shorter, to_branch_state(engine.get_state(0), shorter.id)
        )


def test_default_branch_fields_are_not_part_of_the_identity(store):
    """Specs and state headers that were stored before these fields existed keep their ids."""
    assert "decay_shape" not in canon.to_canonical_json(make_spec())
    engine = SingleTrialEngine(store, device="cpu")
    spec = dataclasses.replace(make_spec(store.manifest.data_id), numerics=Numerics())
    engine.admit(0, spec)
    assert "trunk_steps" not in canon.to_canonical_json(engine.get_state(0).header)
