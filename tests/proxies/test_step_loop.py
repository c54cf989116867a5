"""Steps begun before the last one is read: curves, ends, states, looks and pauses are those of
reading at once.
"""

import dataclasses

import pytest
import torch
from proxy_cases import TINY, run_spec, theirs

from proxies.core.noise_scale import look_passes
from proxies.core.programs import Factory
from proxies.core.rules import named
from proxies.training.bank import Bank
from proxies.training.gradient_noise import NoiseLooks
from proxies.training.solo import Solo
from proxies.training.step_loop import StepReport, default_steps_ahead

pytestmark = pytest.mark.usefixtures("few_windows")

WIDE = TINY.at_width(32)
FACTORY = Factory(target="mine:build", source_sha256="0" * 64)
ENDS = {
    "finishes": ({}, "", 12),
    "grows": ({"learning_rate": 1e3, "clip_norm": None, "num_steps": 20}, "above 6.545 nats", None),
    "overflows": (
        {"learning_rate": 1e30, "clip_norm": None, "num_steps": 20},
        "not finite at step",
        None,
    ),
}


def solo(spec, store, steps_ahead, **options):
    engine = Solo(store, device="cpu", steps_ahead=steps_ahead, **options)
    engine.admit(0, spec)
    return engine


def bank(spec, store, steps_ahead):
    """Among neighbours that end and diverge at steps of their own."""
    engine = Bank(
        spec.shape,
        spec.batch_tokens,
        spec.numerics,
        store,
        optimizer="adamw",
        device="cpu",
        steps_ahead=steps_ahead,
    )
    for slot, changes in enumerate(({"learning_rate": 1e30, "clip_norm": None}, {"num_steps": 5})):
        engine.admit(slot, dataclasses.replace(run_like(spec, store, **changes), seed=slot))
    engine.admit(3, spec)
    return engine


def run_like(spec, store, **changes):
    common = {
        "shape": WIDE,
        "base_shape": TINY,
        "num_slots": spec.numerics.num_slots,
        "dtype": spec.numerics.dtype,
    }
    return run_spec(store.manifest.data_id, **{**common, **changes})


def spec_of(store, made, **changes):
    common = {
        "shape": WIDE,
        "base_shape": TINY,
        "seed": 3,
        "weight_decay": 0.1,
        "clip_norm": 0.5,
        "dtype": "float64",
    }
    return run_spec(
        store.manifest.data_id, num_slots=1 if made is solo else 4, **{**common, **changes}
    )


def without_neighbours(engine):
    """The engine with the run in question alone, and its slot."""
    slot = max(engine.steps)
    for other in engine.steps.keys() - {slot}:
        engine.evict(other)
    return engine, slot


def finish(engine, num_steps=10**6):
    """All that ends, by run, but the time that it took."""
    ended = {}
    while engine.steps:
        for _, result, curve in engine.advance(num_steps):
            ended[result.id] = (dataclasses.replace(result, seconds=0.0), curve)
    return ended


class Order:
    """The order in which steps begin and are read."""

    def __init__(self, monkeypatch):
        self.events = []
        real, read, number = StepReport.__init__, StepReport.read, {}

        def begun(report, values):
            number[id(report)] = len(number)
            self.events.append(f"begin {number[id(report)]}")
            # an id is given again to what comes after
            self.kept = [*getattr(self, "kept", []), report]
            real(report, values)

        def told(report):
            self.events.append(f"read {number[id(report)]}")
            return read(report)

        monkeypatch.setattr(StepReport, "__init__", begun)
        monkeypatch.setattr(StepReport, "read", told)


@pytest.mark.parametrize("made", [solo, bank])
def test_a_step_begins_before_the_last_is_read_and_none_is_left_unread(store, made, monkeypatch):
    engine, order = made(spec_of(store, made), store, 1), Order(monkeypatch)
    engine.advance(3)
    assert order.events == ["begin 0", "begin 1", "read 0", "begin 2", "read 1", "read 2"]
    assert set(engine.steps.values()) == {3} or 0 not in engine.steps
    assert (
        default_steps_ahead(torch.device("cuda")),
        default_steps_ahead(torch.device("cpu")),
    ) == (1, 0)


@pytest.mark.parametrize("made", [solo, bank])
@pytest.mark.parametrize("end", ENDS)
def test_curves_and_ends_are_those_of_reading_at_once(store, made, end):
    changes, reason, num_steps = ENDS[end]
    spec = spec_of(store, made, **changes)
    at_once, ahead, by_one = (
        finish(made(spec, store, k), n) for k, n in ((0, 10**6), (1, 10**6), (1, 1))
    )
    assert ahead == by_one, "a call of one step reads it at once"
    (result, curve), (wanted, their_curve) = ahead[spec.id], at_once[spec.id]
    assert (result.status, result.num_steps) == (wanted.status, wanted.num_steps)
    assert reason in result.reason and reason in wanted.reason
    assert result.num_steps == num_steps if num_steps else result.num_steps < 20
    if made is bank:
        assert ahead == at_once
    if end == "finishes":  # the fused AdamW of a trial alone rounds otherwise
        assert curve.train_loss_nats == pytest.approx(their_curve.train_loss_nats, rel=1e-9)
        assert result.loss_nats == pytest.approx(wanted.loss_nats, rel=1e-9)


def test_muon_reads_at_once_and_is_the_same(store):
    spec = spec_of(
        store,
        solo,
        optimizer="muon",
        parametrization=named("mup", muon_rate="original"),
        dtype="float32",
    )
    assert finish(solo(spec, store, 1)) == finish(solo(spec, store, 0))


@pytest.mark.parametrize("made", [solo, bank])
def test_nothing_is_updated_from_the_first_step_on_that_is_not_finite(store, made, monkeypatch):
    """Planted: one loss that is not finite; the step begun beyond it has a finite one."""
    spec = spec_of(store, made)
    engine, slot = without_neighbours(made(spec, store, 1))
    engine.advance(4)
    kept, name, factors = (
        engine.state(slot),
        "_compute_loss" if made is solo else "_losses",
        [float("nan"), 1.0],
    )
    real = getattr(engine, name)
    monkeypatch.setattr(engine, name, lambda *args: real(*args) * factors.pop(0))
    found = []
    monkeypatch.setattr(engine, "evict", lambda index: found.append(engine.state(index)))
    ((_, result, _),) = engine.advance(2)
    assert (result.status, result.num_steps) == ("diverged", 4) and not factors, (
        "a step was begun beyond it"
    )
    assert result.reason == "loss or gradient not finite at step 5"
    assert all(torch.equal(found[0].tensors[key], tensor) for key, tensor in kept.tensors.items())


@pytest.mark.parametrize("steps_ahead", [0, 1])
@pytest.mark.parametrize("made", [solo, bank])
def test_a_run_pauses_is_saved_and_goes_on_as_if_never_stopped(store, made, steps_ahead):
    spec = spec_of(store, made)
    slot, whole = (0 if made is solo else 3), finish(made(spec, store, steps_ahead))
    engine = made(spec, store, steps_ahead)
    engine.pause_at(slot, 5)
    while engine.steps[slot] < 5:
        engine.advance(100)
    assert engine.advance(100) == [] and engine.steps[slot] == 5
    state, (_, curve) = engine.state(slot), engine.pruned(slot, 5, "looked at")
    assert curve.train_loss_nats == whole[spec.id][1].train_loss_nats[:5]
    engine.pause_at(slot, None)
    assert finish(engine)[spec.id] == whole[spec.id]
    again = made(dataclasses.replace(spec, seed=9), store, steps_ahead)
    again.evict(slot)
    again.admit(slot, spec, state)
    assert finish(again)[spec.id][1] == whole[spec.id][1]


@pytest.mark.parametrize("made", [solo, bank])
def test_looks_at_the_noise_see_read_steps_alone(store, made, monkeypatch):
    """A run that turns out to have diverged in the step before a look is not looked at."""
    spec = spec_of(store, made, num_steps=200, dtype="float32")
    ((look_step, _),) = look_passes(200, 1).items()
    for planted, num_looks in ((0, 1), (look_step, 0), (look_step + 1, 1)):
        (engine, _), calls = without_neighbours(made(spec, store, 1)), []
        engine.noise = NoiseLooks()
        name = "_compute_loss" if made is solo else "_losses"
        real = getattr(engine, name)

        def spoiled(*args, real=real, calls=calls, planted=planted):
            calls.append(args)
            return real(*args) * (float("nan") if len(calls) == planted else 1.0)

        monkeypatch.setattr(engine, name, spoiled)
        engine.advance(look_step + 5)
        assert len(engine.noise.taken) == num_looks


def test_what_a_step_beyond_the_end_raises_was_never_asked(store):
    """A user's model that fails in the call after the step at which the run diverged; and in one
    that counts.
    """

    def build(spec):
        built, calls = theirs(spec), []
        forward = built.module.forward

        def failing(ids):
            calls.append(ids)
            if len(calls) == 5:
                raise AssertionError("call 5")
            return forward(ids)

        built.module.forward = failing
        return built

    spec = dataclasses.replace(spec_of(store, solo), factory=FACTORY)
    for steps_ahead in (0, 1):
        ((result, _),) = finish(
            solo(spec, store, steps_ahead, build=build, diverged_above_nats=-100.0)
        ).values()
        assert (result.status, result.num_steps) == ("diverged", 4)
        with pytest.raises(AssertionError, match="call 5"):
            finish(solo(spec, store, steps_ahead, build=build))


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize(
    "numerics", [{}, {"dtype": "bfloat16", "fused_loss": True}, {"compiled": True}], ids=str
)
@pytest.mark.parametrize("made", ["solo", "bank", "recorded"])
def test_steps_on_a_gpu_wait_for_nothing(store, made, numerics):
    """Whole calls, batches and reports included: only a report's own event is waited for."""
    numerics = {**numerics, "cuda_graphs": made == "recorded"}
    spec = run_spec(
        store.manifest.data_id, shape=WIDE, base_shape=TINY, num_slots=1, num_steps=40, **numerics
    )
    if made == "solo":
        engine = Solo(store, device="cuda")
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
@pytest.mark.parametrize("made", [solo, bank])
def test_on_a_gpu_ends_are_those_of_reading_at_once(store, made, end):
    changes, reason, _ = ENDS[end]
    spec = spec_of(store, made, **changes)
    found = []
    for steps_ahead in (0, 1):
        if made is solo:
            engine = Solo(store, device="cuda", steps_ahead=steps_ahead)
        else:
            options = {"device": "cuda", "steps_ahead": steps_ahead}
            engine = Bank(
                spec.shape, spec.batch_tokens, spec.numerics, store, optimizer="adamw", **options
            )
        engine.admit(0, spec)
        found.append(finish(engine)[spec.id])
    (one, curve), (other, their_curve) = found
    assert (one.status, one.num_steps) == (other.status, other.num_steps) and reason in one.reason
    assert curve.train_loss_nats == pytest.approx(their_curve.train_loss_nats, rel=1e-6)
