import dataclasses
import gc
import math
import weakref

import pytest
import torch
from proxy_cases import TINY, run_spec

from proxies.core import canon
from proxies.core.schedule import Schedule
from proxies.core.spec import Numerics
from proxies.model.loss import token_loss
from proxies.training.bank import Bank, NoGpuError

WIDE = TINY.at_width(32)


def bank_for(spec, store, **options):
    return Bank(spec.shape, spec.batch_tokens, spec.numerics, store, optimizer="adamw", **options)


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


def test_a_call_returns_when_a_run_ends_and_one_that_is_evicted_is_gone(subject, store):
    bank = bank_for(subject, store)
    bank.admit(
        0, run_spec(store.manifest.data_id, shape=WIDE, base_shape=TINY, seed=1, num_steps=5)
    )
    bank.admit(3, subject)
    ((slot, result, _),) = bank.advance(100)
    assert (slot, result.num_steps, bank.free_slots, bank.steps) == (0, 5, [0, 1, 2], {3: 5})
    bank.evict(3)
    assert bank.free_slots == [0, 1, 2, 3] and bank.advance(100) == []


@pytest.mark.parametrize("learning_rate", [1e3, 1e30])
def test_a_diverging_neighbour_does_not_show(subject, store, learning_rate):
    wild = run_spec(
        store.manifest.data_id,
        shape=WIDE,
        base_shape=TINY,
        learning_rate=learning_rate,
        clip_norm=None,
        num_steps=20,
    )
    bank = bank_for(subject, store)
    bank.admit(0, wild)
    bank.admit(1, subject)
    ended = finish(bank)
    result, curve = ended[wild.id]
    assert list(ended) == [wild.id, subject.id]
    assert result.status == "diverged" and result.loss_nats is None and result.num_steps < 20
    assert ("not finite" if learning_rate > 1e9 else "above 6.545 nats") in result.reason
    assert (
        len(curve.steps) == result.num_steps
        and curve.train_loss_nats[-1] == result.last_train_loss_nats
    )
    assert canon.content_id(result)  # holds no NaN
    assert outcome(*ended[subject.id]) == outcome(*alone(subject, store))


def test_each_slot_trains_on_the_batches_of_its_own_seed(store):
    specs = [run_spec(store.manifest.data_id, seed=seed, learning_rate=1e-30) for seed in (5, 6)]
    bank = bank_for(specs[0], store)
    for slot, spec in enumerate(specs):
        bank.admit(slot, spec)
    wanted = {}
    for slot, spec in enumerate(specs):
        losses = []
        for step in range(12):
            batch = store.train_batch(
                seed=spec.seed, first_sequence=4 * step, num_sequences=4, seq_len=16
            )
            ids = torch.from_numpy(batch).expand(4, -1, -1)
            with torch.no_grad():
                losses.append(token_loss(bank.predict(ids[..., :-1]), ids[..., 1:])[slot].item())
        wanted[spec.id] = losses
    for run_id, (_, curve) in finish(bank).items():
        assert curve.train_loss_nats == pytest.approx(wanted[run_id], rel=1e-6)


def test_the_validation_loss_is_that_of_a_model_at_the_same_weights(store):
    """One step at a rate of nearly nothing: the loss of the initial weights, computed here by
    hand.
    """
    spec = run_spec(
        store.manifest.data_id, learning_rate=1e-30, schedule=Schedule(kind="constant", num_steps=1)
    )
    bank = bank_for(spec, store)
    bank.admit(0, spec)
    ids = torch.from_numpy(store.validation_batch(num_sequences=256, seq_len=16))
    with torch.no_grad():
        logits = bank.predict(ids[:, :-1].expand(4, -1, -1))[0]
    wanted = torch.nn.functional.cross_entropy(logits, ids[:, 1:].flatten()).item()
    assert finish(bank)[spec.id][0].loss_nats == pytest.approx(wanted, rel=1e-5)


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
    with pytest.raises(
        ValueError, match="microbatch_tokens, activation_checkpointing: only a single trial"
    ):
        Bank(WIDE, subject.batch_tokens, numerics, store, optimizer="adamw")
    alone_only = dataclasses.replace(
        subject,
        numerics=Numerics(),
        schedule=Schedule(kind="cosine", num_steps=12, batch_warmup_steps=4, batch_warmup_stages=2),
    )
    bank = bank_for(alone_only, store)
    with pytest.raises(ValueError, match="batch warmup needs one trial at a time"):
        bank.admit(0, alone_only)
    assert bank.free_slots == [0]


def test_banks_that_cannot_be_are_refused(subject, store):
    with pytest.raises(NoGpuError, match="needs a GPU, and none is visible") as error:
        Bank(
            WIDE,
            subject.batch_tokens,
            Numerics(cuda_graphs=True),
            store,
            optimizer="adamw",
            device="cpu",
        )
    assert error.value.refuses_study, (
        "else the rest of the study would be recorded as failed, run by run"
    )
    with pytest.raises(ValueError, match=r"vocab_size = 100 is smaller than the corpus's 256"):
        Bank(
            dataclasses.replace(WIDE, vocab_size=100),
            subject.batch_tokens,
            Numerics(),
            store,
            optimizer="adamw",
        )


def test_a_pruned_run_is_its_first_steps(subject, store):
    bank = bank_for(subject, store)
    bank.admit(2, subject)
    bank.advance(6)
    result, curve = bank.pruned(2, 4, "it lost")
    assert bank.steps == {2: 6}, "the run may go on"
    _, whole = alone(subject, store)
    assert (
        curve.train_loss_nats == whole.train_loss_nats[:4]
        and curve.grad_norm == whole.grad_norm[:4]
    )
    assert (result.status, result.loss_nats, result.num_steps, result.reason) == (
        "pruned",
        None,
        4,
        "it lost",
    )
    assert (
        result.tokens == 4 * subject.batch_tokens
        and result.last_train_loss_nats == whole.train_loss_nats[3]
    )


def test_an_older_torch_compiles_many_banks_too(subject, store, monkeypatch):
    """Three banks in one process, more than the limit here; a torch without `isolate_recompiles`
    counts them all.
    """
    newer = torch.compile

    def older(model=None, *, fullgraph=False, dynamic=None, backend="inductor"):
        return newer(model, fullgraph=fullgraph, dynamic=dynamic, backend=backend)

    monkeypatch.setattr(torch, "compile", older)
    torch.compiler.reset()
    with torch._dynamo.config.patch(recompile_limit=2):
        for num_slots in range(1, 4):
            numerics = dataclasses.replace(subject.numerics, compiled=True, num_slots=num_slots)
            spec = dataclasses.replace(subject, numerics=numerics)
            bank = bank_for(spec, store, compile_backend="eager")
            bank.admit(0, spec)
            bank.advance(1)
    torch.compiler.reset()


def test_a_bank_that_is_dropped_gives_its_memory_to_the_next(subject, store):
    spec = dataclasses.replace(
        subject, numerics=dataclasses.replace(subject.numerics, compiled=True)
    )
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
