"""Tests of engines that start a step before they read the report of the last one.

A report holds the loss and the gradient norm of a step. Curves, ends, states, looks (measurements
of gradient noise) and pauses must be the same as when each report is read at once.
"""

import dataclasses
import math

import pytest
import torch
from proxy_cases import (
    TINY,
    build_user_module,
    finish_runs,
    make_run_spec,
    set_row_updates,
)

from forerun._proxies.core.noise_scale import plan_looks
from forerun._proxies.core.programs import Factory
from forerun._proxies.core.rules import get_parametrization
from forerun._proxies.training.bank import Bank
from forerun._proxies.training.engine import StepReport, get_default_steps_ahead
from forerun._proxies.training.gradient_noise import GradientNoiseProbe
from forerun._proxies.training.single_trial import SingleTrialEngine

pytestmark = pytest.mark.usefixtures("few_windows")

WIDE = TINY.at_width(32)
FACTORY = Factory(target="user:build", source_sha256="0" * 64)
MUON_RULES = get_parametrization("mup", muon_rate="original")
"""Parametrization of the runs that Muon trains."""
ENDS = {
    "finishes": ({}, "", 12),
    "loss above the limit": (
        {"learning_rate": 1e3, "clip_norm": None, "num_steps": 20},
        # A loss diverges at one nat above that of a random guess, ln 256.
        f"above {math.log(256) + 1:.3f} nats",
        None,
    ),
    "loss not finite": (
        {"learning_rate": 1e30, "clip_norm": None, "num_steps": 20},
        "not finite at step",
        None,
    ),
}
"""Ways in which a run ends: changes of its spec, text of the reason, and number of steps.

The number of steps is None if it depends on when the loss diverges.
"""


def build_single(spec, store, steps_ahead, **options):
    """Build the engine of a single trial, with the run in it."""
    engine = SingleTrialEngine(store, device="cpu", steps_ahead=steps_ahead, **options)
    engine.admit(0, spec)
    return engine


def build_bank(spec, store, steps_ahead):
    """Build a bank with the run in its last slot, and neighbors that diverge and end earlier."""
    engine = Bank(
        spec.shape,
        spec.batch_tokens,
        spec.numerics,
        store,
        optimizer=spec.optimizer,
        device="cpu",
        steps_ahead=steps_ahead,
    )
    for slot, changes in enumerate(({"learning_rate": 1e30, "clip_norm": None}, {"num_steps": 5})):
        neighbor = make_neighbor(spec, store, **changes)
        engine.admit(slot, dataclasses.replace(neighbor, seed=slot))
    engine.admit(3, spec)
    return engine


def make_neighbor(spec, store, **changes):
    """Return a run for the same bank."""
    common = {
        "shape": WIDE,
        "base_shape": TINY,
        "num_slots": spec.numerics.num_slots,
        "dtype": spec.numerics.dtype,
        "optimizer": spec.optimizer,
        "parametrization": spec.parametrization,
    }
    return make_run_spec(store.manifest.data_id, **{**common, **changes})


def make_spec(store, build, **changes):
    """Return the spec of a run for `build_single` or `build_bank`."""
    common = {
        "shape": WIDE,
        "base_shape": TINY,
        "seed": 3,
        "weight_decay": 0.1,
        "clip_norm": 0.5,
        "dtype": "float64",
    }
    num_slots = 1 if build is build_single else 4
    return make_run_spec(store.manifest.data_id, num_slots=num_slots, **{**common, **changes})


def evict_neighbors(engine):
    """Evict all runs but the one in the last occupied slot, and return this slot."""
    last_slot = max(engine.steps)
    for slot in engine.steps.keys() - {last_slot}:
        engine.evict(slot)
    return last_slot


def get_loss_method(build):
    """Return the name of the engine's method that computes losses."""
    return "_compute_loss" if build is build_single else "_compute_losses"


def record_step_order(monkeypatch):
    """Return a list to which the beginning and the reading of each step will be added."""
    events, reports = [], []
    real_init, real_read = StepReport.__init__, StepReport.read

    def begin(report, values):
        events.append(f"begin {len(reports)}")
        reports.append(report)
        real_init(report, values)

    def read(report):
        # Compare by identity, because reports have no equality.
        (number,) = [i for i, begun in enumerate(reports) if begun is report]
        events.append(f"read {number}")
        return real_read(report)

    monkeypatch.setattr(StepReport, "__init__", begin)
    monkeypatch.setattr(StepReport, "read", read)
    return events


@pytest.mark.parametrize("build", [build_single, build_bank])
def test_step_begins_before_the_last_is_read_and_advance_reads_all(store, build, monkeypatch):
    engine = build(make_spec(store, build), store, 1)
    events = record_step_order(monkeypatch)
    engine.advance(3)
    assert events == ["begin 0", "begin 1", "read 0", "begin 2", "read 1", "read 2"]
    # The first slot of the bank diverges early.
    assert set(engine.steps.values()) == {3} or 0 not in engine.steps


def test_only_gpus_begin_steps_ahead_by_default():
    assert get_default_steps_ahead(torch.device("cuda")) == 1
    assert get_default_steps_ahead(torch.device("cpu")) == 0


@pytest.mark.parametrize("build", [build_single, build_bank])
@pytest.mark.parametrize("end", ENDS)
def test_curves_and_ends_are_those_of_reading_at_once(store, build, end):
    changes, reason, num_steps = ENDS[end]
    spec = make_spec(store, build, **changes)
    at_once = finish_runs(build(spec, store, 0))
    ahead = finish_runs(build(spec, store, 1))
    ahead_by_one = finish_runs(build(spec, store, 1), num_steps=1)
    assert ahead == ahead_by_one, "a call of one step reads it at once"
    if build is build_bank:
        assert ahead == at_once

    (result, curve), (expected, expected_curve) = ahead[spec.id], at_once[spec.id]
    assert (result.status, result.num_steps) == (expected.status, expected.num_steps)
    assert reason in result.reason and reason in expected.reason
    if num_steps is None:
        assert result.num_steps < 20
    else:
        assert result.num_steps == num_steps
    if end == "finishes":
        # The fused AdamW, which a single trial uses when it steps ahead, rounds differently.
        assert curve.train_loss_nats == pytest.approx(expected_curve.train_loss_nats, rel=1e-9)
        assert result.loss_nats == pytest.approx(expected.loss_nats, rel=1e-9)


def test_muon_gives_the_same_curves_with_and_without_steps_ahead(store):
    spec = make_spec(
        store,
        build_single,
        optimizer="muon",
        parametrization=MUON_RULES,
        dtype="float32",
    )
    assert finish_runs(build_single(spec, store, 1)) == finish_runs(build_single(spec, store, 0))


@pytest.mark.parametrize(
    ("build", "by_row", "optimizer"),
    [
        (build_single, None, "adamw"),
        (build_bank, True, "adamw"),
        (build_bank, False, "adamw"),
        (build_bank, True, "muon"),
        (build_bank, False, "muon"),
    ],
)
def test_state_does_not_change_from_the_first_step_that_is_not_finite(
    store, build, by_row, optimizer, monkeypatch
):
    """One loss is made NaN. The step that has begun after it has a finite loss again.

    Neither step changes the weights or the moments of the run.
    """
    set_row_updates(monkeypatch, optimizer, by_row=by_row)
    options = {}
    if optimizer == "muon":
        options = {"optimizer": "muon", "parametrization": MUON_RULES}
    engine = build(make_spec(store, build, **options), store, 1)
    slot = evict_neighbors(engine)
    engine.advance(4)
    state_before, states_at_eviction, factors = engine.get_state(slot), [], [float("nan"), 1.0]
    name = get_loss_method(build)
    real_compute = getattr(engine, name)

    def compute_spoiled_loss(*args):
        return real_compute(*args) * factors.pop(0)

    monkeypatch.setattr(engine, name, compute_spoiled_loss)
    monkeypatch.setattr(
        engine, "evict", lambda index: states_at_eviction.append(engine.get_state(index))
    )
    ((_, result, _),) = engine.advance(2)
    assert (result.status, result.num_steps) == ("diverged", 4)
    assert not factors, "another step must have begun"
    assert result.reason == "loss or gradient not finite at step 5"
    for key, tensor in state_before.tensors.items():
        assert torch.equal(states_at_eviction[0].tensors[key], tensor)


@pytest.mark.parametrize("steps_ahead", [0, 1])
@pytest.mark.parametrize("build", [build_single, build_bank])
def test_paused_and_resumed_run_is_as_if_never_stopped(store, build, steps_ahead):
    spec = make_spec(store, build)
    slot = 0 if build is build_single else 3
    uninterrupted = finish_runs(build(spec, store, steps_ahead))[spec.id]
    _, uninterrupted_curve = uninterrupted

    # Pause at step 5.
    engine = build(spec, store, steps_ahead)
    engine.pause_at(slot, 5)
    # A call also ends when a neighbor ends, which two of them do before the pause.
    for _ in range(3):
        engine.advance(100)
    assert engine.advance(100) == [] and engine.steps[slot] == 5
    state, (_, curve) = engine.get_state(slot), engine.make_pruned_result(slot, 5, "paused")
    assert curve.train_loss_nats == uninterrupted_curve.train_loss_nats[:5]

    # Continue in the same engine.
    engine.pause_at(slot, None)
    assert finish_runs(engine)[spec.id] == uninterrupted

    # Resume from the state in another engine, in a slot that another run has left.
    resumed_engine = build(dataclasses.replace(spec, seed=9), store, steps_ahead)
    resumed_engine.evict(slot)
    resumed_engine.admit(slot, spec, state)
    _, resumed_curve = finish_runs(resumed_engine)[spec.id]
    assert resumed_curve == uninterrupted_curve


@pytest.mark.parametrize("build", [build_single, build_bank])
def test_no_look_is_taken_after_an_unread_divergence(store, build, monkeypatch):
    """A run that diverges in the step before a look is not looked at."""
    spec = make_spec(store, build, num_steps=200, dtype="float32")
    ((look_step, _),) = plan_looks(200, 1).items()
    name = get_loss_method(build)

    def count_looks(bad_step):
        """Train past the look, with a NaN loss at one step (never if 0)."""
        engine, num_calls = build(spec, store, 1), 0
        evict_neighbors(engine)
        engine.noise = GradientNoiseProbe()
        real_compute = getattr(engine, name)

        def compute_spoiled_loss(*args):
            nonlocal num_calls
            num_calls += 1
            return real_compute(*args) * (float("nan") if num_calls == bad_step else 1.0)

        monkeypatch.setattr(engine, name, compute_spoiled_loss)
        engine.advance(look_step + 5)
        return len(engine.noise.measurements)

    assert count_looks(bad_step=0) == 1
    assert count_looks(bad_step=look_step) == 0
    assert count_looks(bad_step=look_step + 1) == 1


def test_error_in_a_step_after_the_end_is_ignored(store):
    """A user's model fails in its fifth call, which counts only if the run has not diverged."""

    def build_failing_model(spec):
        model, num_calls = build_user_module(spec), 0
        real_forward = model.module.forward

        def forward(ids):
            nonlocal num_calls
            num_calls += 1
            if num_calls == 5:
                raise AssertionError("call 5")
            return real_forward(ids)

        model.module.forward = forward
        return model

    spec = dataclasses.replace(make_spec(store, build_single), factory=FACTORY)
    for steps_ahead in (0, 1):
        # Every loss is above this limit, so the run diverges at the first step that is checked.
        engine = build_single(
            spec, store, steps_ahead, build=build_failing_model, diverged_above_nats=-100.0
        )
        ((result, _),) = finish_runs(engine).values()
        assert (result.status, result.num_steps) == ("diverged", 4)
        with pytest.raises(AssertionError, match="call 5"):
            finish_runs(build_single(spec, store, steps_ahead, build=build_failing_model))


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize(
    "numerics", [{}, {"dtype": "bfloat16", "fused_loss": True}, {"compiled": True}], ids=str
)
@pytest.mark.parametrize("engine_kind", ["single", "bank", "recorded bank"])
def test_advance_on_a_gpu_waits_only_for_reports(store, engine_kind, numerics):
    """Neither batches nor steps synchronize with the device; a report waits for its event."""
    numerics = {**numerics, "cuda_graphs": engine_kind == "recorded bank"}
    spec = make_run_spec(
        store.manifest.data_id, shape=WIDE, base_shape=TINY, num_slots=1, num_steps=40, **numerics
    )
    if engine_kind == "single":
        engine = SingleTrialEngine(store, device="cuda")
    else:
        engine = Bank(
            spec.shape, spec.batch_tokens, spec.numerics, store, optimizer="adamw", device="cuda"
        )
    engine.admit(0, spec)
    engine.advance(3)
    try:
        torch.cuda.set_sync_debug_mode("error")
        assert engine.advance(10) == []
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert engine.steps == {0: 13}


@pytest.mark.gpu
@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("build", [build_single, build_bank])
def test_ends_on_a_gpu_are_those_of_reading_at_once(store, build, end):
    changes, reason, _ = ENDS[end]
    spec = make_spec(store, build, **changes)
    outcomes = []
    for steps_ahead in (0, 1):
        if build is build_single:
            engine = SingleTrialEngine(store, device="cuda", steps_ahead=steps_ahead)
        else:
            options = {"device": "cuda", "steps_ahead": steps_ahead}
            engine = Bank(
                spec.shape, spec.batch_tokens, spec.numerics, store, optimizer="adamw", **options
            )
        engine.admit(0, spec)
        outcomes.append(finish_runs(engine)[spec.id])
    (at_once, at_once_curve), (ahead, ahead_curve) = outcomes
    assert (ahead.status, ahead.num_steps) == (at_once.status, at_once.num_steps)
    assert reason in ahead.reason
    assert ahead_curve.train_loss_nats == pytest.approx(at_once_curve.train_loss_nats, rel=1e-6)
