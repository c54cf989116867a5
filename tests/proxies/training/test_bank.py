"""Tests of banks, which train several trials as one batched model: slots, losses, and results.

Each trial of a bank has its slot, which another trial may take when the first one ends.
"""

import dataclasses
import gc
import math
import weakref

import pytest
import torch
from proxy_cases import TINY, finish_runs, make_run_spec

from forerun._proxies.core import canon
from forerun._proxies.core.schedule import Schedule
from forerun._proxies.core.spec import Numerics
from forerun._proxies.model.loss import compute_token_loss
from forerun._proxies.training import run_progress
from forerun._proxies.training.bank import Bank, NoGpuError

WIDE = TINY.at_width(32)
"""Shape of most runs, at twice the width of their base."""


def build_bank(spec, store, **options):
    """Build the bank of a run."""
    return Bank(spec.shape, spec.batch_tokens, spec.numerics, store, optimizer="adamw", **options)


def compute_logits(bank, ids_KBT):
    """Return the logits [K, B * T, V] of the models in a bank."""
    with torch.no_grad():
        return bank.model(ids_KBT, bank._forward)


def train_without_neighbors(spec, store):
    """Train a run in a bank with other slots free; return its (result, curve)."""
    bank = build_bank(spec, store)
    bank.admit(0, spec)
    return finish_runs(bank)[spec.id]


@pytest.fixture
def spec(store):
    """Spec of the run that is tested."""
    return make_run_spec(
        store.manifest.data_id, shape=WIDE, base_shape=TINY, seed=11, weight_decay=0.1
    )


def test_advance_returns_at_the_end_of_a_run_and_evict_frees_a_slot(spec, store):
    bank = build_bank(spec, store)
    bank.admit(
        0, make_run_spec(store.manifest.data_id, shape=WIDE, base_shape=TINY, seed=1, num_steps=5)
    )
    bank.admit(3, spec)
    ((slot, result, _),) = bank.advance(100)
    assert (slot, result.num_steps, bank.steps) == (0, 5, {3: 5})
    bank.evict(3)
    assert bank.steps == {} and bank.advance(100) == []


@pytest.mark.parametrize("learning_rate", [1e3, 1e30])
def test_diverging_neighbor_does_not_change_a_run(spec, store, learning_rate):
    diverging = make_run_spec(
        store.manifest.data_id,
        shape=WIDE,
        base_shape=TINY,
        learning_rate=learning_rate,
        clip_norm=None,
        num_steps=20,
    )
    bank = build_bank(spec, store)
    bank.admit(0, diverging)
    bank.admit(1, spec)
    outcomes = finish_runs(bank, num_steps=7)
    assert list(outcomes) == [diverging.id, spec.id]

    result, curve = outcomes[diverging.id]
    assert result.status == "diverged" and result.loss_nats is None and result.num_steps < 20
    # A loss diverges at one nat above that of a random guess, ln 256.
    reason = "not finite" if learning_rate > 1e9 else f"above {math.log(256) + 1:.3f} nats"
    assert reason in result.reason
    assert len(curve.steps) == result.num_steps
    assert curve.train_loss_nats[-1] == result.last_train_loss_nats
    assert canon.compute_content_id(result), "a result with NaN would have no id"

    expected = train_without_neighbors(spec, store)
    assert outcomes[spec.id] == expected


def test_slots_train_on_the_batches_of_their_own_seeds(store):
    """The learning rate is so small that the weights do not change, nor do the expected losses."""
    specs = [
        make_run_spec(store.manifest.data_id, seed=seed, learning_rate=1e-30) for seed in (5, 6)
    ]
    bank = build_bank(specs[0], store)
    for slot, spec in enumerate(specs):
        bank.admit(slot, spec)
    expected_losses = {}
    for slot, spec in enumerate(specs):
        losses = []
        for step in range(spec.schedule.num_steps):
            batch = store.read_train_batch(
                seed=spec.seed,
                first_sequence=spec.batch_sequences * step,
                num_sequences=spec.batch_sequences,
                seq_len=spec.shape.seq_len,
            )
            # The bank predicts for all slots; each slot gets the same batch here.
            ids = torch.from_numpy(batch).expand(spec.numerics.num_slots, -1, -1)
            losses_K = compute_token_loss(compute_logits(bank, ids[..., :-1]), ids[..., 1:])
            losses.append(losses_K[slot].item())
        expected_losses[spec.id] = losses
    for run_id, (_, curve) in finish_runs(bank).items():
        assert curve.train_loss_nats == pytest.approx(expected_losses[run_id], rel=1e-6)


def test_validation_loss_is_that_of_the_final_weights(store):
    """One step at a tiny learning rate leaves the initial weights, whose loss is computed here."""
    spec = make_run_spec(
        store.manifest.data_id, learning_rate=1e-30, schedule=Schedule(kind="constant", num_steps=1)
    )
    bank = build_bank(spec, store)
    bank.admit(0, spec)
    batch = store.read_validation_batch(
        num_sequences=run_progress.VALIDATION_SEQUENCES, seq_len=spec.shape.seq_len
    )
    ids = torch.from_numpy(batch)
    logits = compute_logits(bank, ids[:, :-1].expand(spec.numerics.num_slots, -1, -1))[0]
    expected = torch.nn.functional.cross_entropy(logits, ids[:, 1:].flatten()).item()
    result, _ = finish_runs(bank)[spec.id]
    assert result.loss_nats == pytest.approx(expected, rel=1e-5)


def test_training_reduces_the_loss(store):
    """The loss falls from about ln 256 to well below the entropy of single characters."""
    spec = make_run_spec(store.manifest.data_id, shape=WIDE, num_steps=100, learning_rate=0.02)
    result, curve = train_without_neighbors(spec, store)
    ids = store.read_validation_batch(
        num_sequences=run_progress.VALIDATION_SEQUENCES, seq_len=spec.shape.seq_len
    )
    counts = torch.bincount(torch.from_numpy(ids).flatten()).double()
    shares = counts[counts > 0] / counts.sum()
    # Entropy of single characters
    unigram_nats = -(shares * shares.log()).sum().item()
    assert curve.train_loss_nats[0] == pytest.approx(math.log(256) + 0.5, abs=0.4)
    assert result.loss_nats < unigram_nats - 0.5


def test_taken_slots_and_runs_of_another_bank_are_refused(spec, store):
    bank = build_bank(spec, store)
    bank.admit(0, spec)
    with pytest.raises(ValueError, match="slot 0 is taken"):
        bank.admit(0, spec)
    for changes in (
        {"shape": TINY},
        {"batch_tokens": 16},
        {"data_id": "f" * 64},
        {"numerics": Numerics(num_slots=5)},
    ):
        with pytest.raises(ValueError, match="belongs to another bank"):
            bank.admit(1, dataclasses.replace(spec, **changes))
    assert bank.steps.keys() == {0}


def test_options_of_single_trials_are_refused(spec, store):
    numerics = Numerics(microbatch_tokens=16, activation_checkpointing=True)
    with pytest.raises(
        ValueError, match="microbatch_tokens, activation_checkpointing: only a single trial"
    ):
        Bank(WIDE, spec.batch_tokens, numerics, store, optimizer="adamw")
    batch_warmup_spec = dataclasses.replace(
        spec,
        numerics=Numerics(),
        schedule=Schedule(kind="cosine", num_steps=12, batch_warmup_steps=4, batch_warmup_stages=2),
    )
    bank = build_bank(batch_warmup_spec, store)
    with pytest.raises(ValueError, match="batch warmup needs one trial at a time"):
        bank.admit(0, batch_warmup_spec)
    assert bank.steps == {}


def test_banks_without_a_gpu_or_with_a_small_vocabulary_are_refused(spec, store):
    with pytest.raises(NoGpuError, match="needs a GPU, and none is visible") as error:
        Bank(
            WIDE,
            spec.batch_tokens,
            Numerics(cuda_graphs=True),
            store,
            optimizer="adamw",
            device="cpu",
        )
    # The error must stop the study, which would otherwise record every run as failed.
    assert error.value.refuses_study
    with pytest.raises(ValueError, match=r"vocab_size = 100 is smaller than the corpus's 256"):
        Bank(
            dataclasses.replace(WIDE, vocab_size=100),
            spec.batch_tokens,
            Numerics(),
            store,
            optimizer="adamw",
        )


def test_pruned_result_has_the_first_steps_of_a_run(spec, store):
    bank = build_bank(spec, store)
    bank.admit(2, spec)
    bank.advance(6)
    result, curve = bank.make_pruned_result(2, 4, "it lost")
    assert bank.steps == {2: 6}, "the run may go on"
    _, full_curve = train_without_neighbors(spec, store)
    assert curve.train_loss_nats == full_curve.train_loss_nats[:4]
    assert curve.grad_norm == full_curve.grad_norm[:4]
    assert (result.status, result.loss_nats, result.num_steps, result.reason) == (
        "pruned",
        None,
        4,
        "it lost",
    )
    assert result.tokens == 4 * spec.batch_tokens
    assert result.last_train_loss_nats == full_curve.train_loss_nats[3]


def test_old_torch_compiles_more_banks_than_its_recompile_limit(spec, store, monkeypatch):
    """Torch versions without `isolate_recompiles` count the compilations of all banks together.

    With a limit of one compilation, the second bank would fail if forerun did not raise the limit.
    """
    new_compile = torch.compile

    def compile_as_old_torch(model=None, *, fullgraph=False, dynamic=None, backend="inductor"):
        return new_compile(model, fullgraph=fullgraph, dynamic=dynamic, backend=backend)

    monkeypatch.setattr(torch, "compile", compile_as_old_torch)
    torch.compiler.reset()
    with torch._dynamo.config.patch(recompile_limit=1):
        for num_slots in (1, 2):
            numerics = dataclasses.replace(spec.numerics, compiled=True, num_slots=num_slots)
            compiled_spec = dataclasses.replace(spec, numerics=numerics)
            bank = build_bank(compiled_spec, store, compile_backend="eager")
            bank.admit(0, compiled_spec)
            bank.advance(1)
    torch.compiler.reset()


def test_new_bank_frees_the_memory_of_the_previous_one(spec, store):
    """A compiled bank is in a reference cycle, so it must be freed explicitly."""
    numerics = dataclasses.replace(spec.numerics, compiled=True)
    compiled_spec = dataclasses.replace(spec, numerics=numerics)
    gc.collect()
    gc.disable()
    try:
        bank = build_bank(compiled_spec, store, compile_backend="eager")
        bank.admit(0, compiled_spec)
        bank.advance(2)
        weights = weakref.ref(bank.optimizer.weights_KP)
        del bank
        build_bank(compiled_spec, store, compile_backend="eager")
        assert weights() is None
    finally:
        gc.enable()
