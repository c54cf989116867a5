import dataclasses
import gc
import math
import weakref

import pytest
import torch
from proxy_cases import TINY, run_spec

from proxies.core.schedule import Schedule
from proxies.core.spec import Numerics
from proxies.model.optimizer import BankAdamW
from proxies.training.bank import Bank, NoGpuError

WIDE = TINY.at_width(32)


def bank_for(spec, store, **options):
    return Bank(spec.shape, spec.batch_tokens, spec.numerics, store, **options)


def finish(bank):
    """Train until every slot is empty; (result, curve) by run id, in the order of their ends."""
    ended = {}
    while len(bank.free_slots) < bank.numerics.num_slots:
        ended.update({result.id: (result, curve) for _, result, curve in bank.advance(7)})
    return ended


def alone(spec, store, slot=0):
    bank = bank_for(spec, store)
    bank.admit(slot, spec)
    return finish(bank)[spec.id]


def outcome(result, curve):
    """All of a run but the time it took."""
    return dataclasses.replace(result, seconds=0.0), curve


@pytest.fixture
def subject(store):
    return run_spec(store.manifest.data_id, shape=WIDE, base_shape=TINY, seed=11, weight_decay=0.1)


def neighbours(store, **changes):
    """Runs unlike the subject in everything a slot may choose."""
    common = {"shape": WIDE, "base_shape": TINY, **changes}
    return [
        run_spec(store.manifest.data_id, seed=1, learning_rate=0.3, num_steps=5, **common),
        run_spec(store.manifest.data_id, seed=2, parametrization="sp", num_steps=9, clip_norm=None, **common),
        run_spec(
            store.manifest.data_id, seed=3, parametrization="completep", beta1=0.5, output_multiplier=4.0, eps=1e-3,
            num_steps=14, **common,
        ),
    ]  # fmt: skip


def test_the_comparison_can_fail(subject, store, monkeypatch):
    """Planted: moments left in a slot by the run before it."""
    wanted = outcome(*alone(subject, store))

    def careless(optimizer, trial):
        optimizer.weights_KP[trial] = 0

    monkeypatch.setattr(BankAdamW, "clear", careless)
    bank = bank_for(subject, store)
    bank.admit(0, neighbours(store)[0])
    finish(bank)
    bank.admit(0, subject)
    assert outcome(*finish(bank)[subject.id]) != wanted


def test_training_learns(store):
    """From about ln 256 to well below the entropy of single characters."""
    spec = run_spec(store.manifest.data_id, shape=WIDE, num_steps=100, learning_rate=0.02)
    result, curve = alone(spec, store)
    ids = store.validation_batch(num_sequences=256, seq_len=16)
    counts = torch.bincount(torch.from_numpy(ids).flatten()).double()
    shares = counts[counts > 0] / counts.sum()
    unigram_nats = -(shares * shares.log()).sum().item()
    assert curve.train_loss_nats[0] == pytest.approx(math.log(256) + 0.5, abs=0.4)
    assert result.loss_nats < unigram_nats - 0.5


def test_a_slot_that_is_taken_and_runs_of_another_bank_are_refused(subject, store):
    bank = bank_for(subject, store)
    bank.admit(0, subject)
    with pytest.raises(ValueError, match="slot 0 is taken"):
        bank.admit(0, subject)
    others = [
        dataclasses.replace(subject, shape=TINY),
        dataclasses.replace(subject, batch_tokens=16),
        dataclasses.replace(subject, data_id="f" * 64),
        dataclasses.replace(subject, numerics=Numerics(num_slots=5)),
    ]
    for other in others:
        with pytest.raises(ValueError, match="belongs to another bank"):
            bank.admit(1, other)
    assert bank.free_slots == [1, 2, 3]


def test_what_only_a_trial_alone_can_do_is_refused(subject, store):
    numerics = Numerics(microbatch_tokens=16, activation_checkpointing=True)
    with pytest.raises(ValueError, match="microbatch_tokens, activation_checkpointing: a trial alone does"):
        Bank(WIDE, subject.batch_tokens, numerics, store)
    alone_only = dataclasses.replace(
        subject,
        numerics=Numerics(),
        schedule=Schedule(kind="cosine", num_steps=12, batch_warmup_steps=4, batch_warmup_stages=2),
    )
    bank = bank_for(alone_only, store)
    with pytest.raises(ValueError, match="batch warmup wants one trial at a time"):
        bank.admit(0, alone_only)
    assert bank.free_slots == [0]


def test_banks_that_cannot_be_are_refused(subject, store):
    with pytest.raises(NoGpuError, match="no GPU is seen here: cluster") as error:
        Bank(WIDE, subject.batch_tokens, Numerics(cuda_graphs=True), store, device="cpu")
    assert error.value.refuses_study, "else the rest of the study would be recorded as failed, run by run"
    with pytest.raises(ValueError, match=r"vocab_size = 100 is smaller than the corpus's 256"):
        Bank(dataclasses.replace(WIDE, vocab_size=100), subject.batch_tokens, Numerics(), store)


def test_a_run_pauses_where_it_is_looked_at(subject, store):
    bank = bank_for(subject, store)
    bank.admit(0, subject)
    bank.pause_at(0, 3)
    bank.admit(1, neighbours(store)[0])
    assert not bank.advance(100)
    assert bank.steps == {0: 3, 1: 3}
    assert not bank.advance(100)
    assert bank.steps == {0: 3, 1: 3}
    bank.pause_at(0, None)
    assert finish(bank)[subject.id][1] == alone(subject, store)[1]


def test_a_pruned_run_is_its_first_steps(subject, store):
    bank = bank_for(subject, store)
    bank.admit(2, subject)
    bank.advance(6)
    result, curve = bank.pruned(2, 4, "it lost")
    assert bank.steps == {2: 6}, "the run may go on"
    _, whole = alone(subject, store)
    assert curve.train_loss_nats == whole.train_loss_nats[:4] and curve.grad_norm == whole.grad_norm[:4]
    assert (result.status, result.loss_nats, result.num_steps, result.reason) == ("pruned", None, 4, "it lost")
    assert result.tokens == 4 * subject.batch_tokens and result.last_train_loss_nats == whole.train_loss_nats[3]


def test_a_bank_that_is_dropped_gives_its_memory_to_the_next(subject, store):
    spec = dataclasses.replace(subject, numerics=dataclasses.replace(subject.numerics, compiled=True))
    gc.collect()
    gc.disable()
    try:
        bank = bank_for(spec, store, compile_backend="eager")
        bank.admit(0, spec)
        bank.advance(2)
        weights = weakref.ref(bank.optimizer.weights_KP)
        del bank
        bank_for(spec, store, compile_backend="eager")
        assert weights() is None
    finally:
        gc.enable()
