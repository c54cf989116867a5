"""Tests of looks at the gradient noise of a run: they do not change the run, and they are right.

A look measures the gradients of several parts of a batch at one step. In one test a regression
replaces the model, because the true noise scale of a regression is easily computed from many
sequences. Suffixes of tensors name their dimensions: B or N sequences, T tokens, and D features.
"""

import dataclasses

import numpy as np
import pytest
import torch
from proxy_cases import TINY, make_run_spec, replace_settings, write_corpus
from torch import nn

from forerun._proxies.core.noise_scale import (
    estimate_inverse_scale,
    estimate_noise_scale,
    plan_looks,
)
from forerun._proxies.data.tokens import TokenStore
from forerun._proxies.model.decoder import Multipliers
from forerun._proxies.training import gradient_noise, single_trial
from forerun._proxies.training.bank import Bank
from forerun._proxies.training.gradient_noise import GradientNoiseProbe, compute_gradient_gram
from forerun._proxies.training.single_trial import SingleTrialEngine
from forerun._proxies.training.trainable_model import DecoderModel, build_decoder

NUM_STEPS = 200
"""Steps of a schedule that has one look, in its middle."""
NUM_TRAINED_STEPS = 110
"""Steps that are trained: the look, and some after it that it could change."""


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """Token store of this module alone."""
    return TokenStore(write_corpus(tmp_path_factory.mktemp("corpus")))


def train(engine, specs, noise):
    """Train runs beyond the look, with a noise probe; return their curves and final weights."""
    engine.noise = noise
    for index, spec in enumerate(specs):
        engine.admit(index, spec)
    assert engine.advance(NUM_TRAINED_STEPS) == []
    outcomes = []
    for index in range(len(specs)):
        _, curve = engine.make_pruned_result(index, NUM_TRAINED_STEPS, "stopped")
        weights = {name: x.tolist() for name, x in engine.get_state(index).tensors.items()}
        outcomes.append((curve, weights))
    return outcomes


def select_looks(noise, spec):
    """Return the looks at one run."""
    return [look for run_id, look in noise.measurements if run_id == spec.id]


@pytest.mark.parametrize("product", [float("inf"), float("-inf"), float("nan")])
def test_look_with_a_product_that_is_not_finite_is_left_out(store, monkeypatch, product):
    monkeypatch.setattr(
        gradient_noise, "compute_gradient_gram", lambda *_: ((1.0, product), (product, 1.0))
    )
    spec = make_run_spec(store.manifest.data_id, num_slots=1, num_steps=NUM_STEPS)
    noise = GradientNoiseProbe()
    assert train(SingleTrialEngine(store), [spec], noise)
    assert noise.measurements == []


@pytest.mark.parametrize("microbatch_tokens", [None, 16])
def test_looks_do_not_change_a_single_trial(store, microbatch_tokens):
    spec = make_run_spec(
        store.manifest.data_id,
        num_slots=1,
        num_steps=NUM_STEPS,
        microbatch_tokens=microbatch_tokens,
    )
    noise = GradientNoiseProbe()
    assert train(SingleTrialEngine(store), [spec], noise) == train(
        SingleTrialEngine(store), [spec], None
    )
    looks = select_looks(noise, spec)
    passes_per_step = 1 if microbatch_tokens is None else 4
    num_parts_by_step = {look.step: len(look.gram) for look in looks}
    assert num_parts_by_step == plan_looks(NUM_STEPS, passes_per_step)
    assert all(look.num_sequences == 4 // passes_per_step for look in looks)


def test_looks_do_not_change_a_bank_and_match_those_of_a_single_trial(store):
    specs = [
        make_run_spec(store.manifest.data_id, num_slots=2, num_steps=NUM_STEPS, seed=seed)
        for seed in (0, 1)
    ]

    def train_in_bank(noise):
        bank = Bank(TINY, specs[0].batch_tokens, specs[0].numerics, store, optimizer="adamw")
        return train(bank, specs, noise)

    bank_noise, single_noise = GradientNoiseProbe(), GradientNoiseProbe()
    assert train_in_bank(bank_noise) == train_in_bank(None)
    single_numerics = dataclasses.replace(specs[1].numerics, num_slots=1)
    single = dataclasses.replace(specs[1], numerics=single_numerics)
    train(SingleTrialEngine(store), [single], single_noise)
    (bank_look,) = select_looks(bank_noise, specs[1])
    (single_look,) = select_looks(single_noise, single)
    assert bank_look.step == single_look.step == NUM_STEPS // 2
    np.testing.assert_allclose(bank_look.gram, single_look.gram, rtol=1e-3)


def test_mean_of_the_gram_matrix_is_the_squared_norm_of_the_batch_gradient(store):
    spec = make_run_spec(store.manifest.data_id, num_slots=1, num_steps=NUM_STEPS)
    built = build_decoder(spec)
    ids_BT = torch.from_numpy(
        store.read_train_batch(
            seed=0, first_sequence=0, num_sequences=8, seq_len=spec.shape.seq_len
        )
    )
    built.compute_loss(ids_BT[:, :-1], ids_BT[:, 1:]).backward()
    squared_norm = sum(float(p.grad.double().square().sum()) for p in built.module.parameters())
    built.module.zero_grad()
    weights = dict(built.module.named_parameters())
    gram = np.array(compute_gradient_gram(spec, built.module, weights, ids_BT, 4))
    assert gram.mean() == pytest.approx(squared_norm, rel=1e-5)
    assert all(p.grad is None for p in built.module.parameters())


def test_gram_matrix_of_a_large_model_uses_some_of_the_entries(store, monkeypatch):
    spec = make_run_spec(store.manifest.data_id, num_slots=1, num_steps=NUM_STEPS)
    built = build_decoder(spec)
    ids_NT = torch.from_numpy(
        store.read_train_batch(
            seed=0, first_sequence=0, num_sequences=32, seq_len=spec.shape.seq_len
        )
    )
    weights = dict(built.module.named_parameters())
    full_gram = np.array(compute_gradient_gram(spec, built.module, weights, ids_NT, 4))
    num_params = sum(weight.numel() for weight in weights.values())
    monkeypatch.setattr(gradient_noise, "TARGET_GRADIENT_ENTRIES", num_params // 3)
    # A third of the entries has about a third of the squared norm.
    sampled_gram = np.array(compute_gradient_gram(spec, built.module, weights, ids_NT, 4))
    assert sampled_gram.trace() < 0.7 * full_gram.trace()


def test_looks_do_not_change_a_compiled_run_and_match_those_without_compiling(store):
    options = {"num_slots": 1, "num_steps": NUM_STEPS}
    compiled_spec = make_run_spec(store.manifest.data_id, compiled=True, **options)
    eager_spec = make_run_spec(store.manifest.data_id, **options)
    compiled_noise, eager_noise = GradientNoiseProbe(), GradientNoiseProbe()

    def train_compiled(noise):
        engine = SingleTrialEngine(store, compile_backend="eager")
        return train(engine, [compiled_spec], noise)

    assert train_compiled(compiled_noise) == train_compiled(None)
    train(SingleTrialEngine(store), [eager_spec], eager_noise)
    compiled_look, eager_look = compiled_noise.measurements[0][1], eager_noise.measurements[0][1]
    np.testing.assert_allclose(compiled_look.gram, eager_look.gram, rtol=1e-3)


class Regression(nn.Module):
    """A least-squares regression in place of a decoder.

    The features and the answer of a sequence are functions of its first three tokens. The divisor
    of the loss keeps it below the limit at which a run counts as diverged.
    """

    def __init__(self):
        super().__init__()
        rng = torch.Generator().manual_seed(0)
        self.weight = nn.Parameter(torch.zeros(8))
        self.register_buffer("features", torch.randn(3, 256, 8, generator=rng))
        self.register_buffer("answers", torch.randn(256, generator=rng))

    def compute_features_and_answers(self, ids_BT):
        """Return the features x [B, D] and the answers y [B] of sequences."""
        x_BD = sum(self.features[place][ids_BT[:, place]] for place in range(3))
        return x_BD, 2 * x_BD[:, 0] + self.answers[ids_BT[:, 0]]

    def forward(self, ids_BT, multipliers, targets_BT=None):
        x_BD, y_B = self.compute_features_and_answers(ids_BT)
        return (x_BD @ self.weight - y_B).square().mean() / 20


def test_look_recovers_the_noise_scale_of_a_regression(store, monkeypatch):
    # The first look of a run of this length is at step 625, and the test trains no further.
    num_steps = 20_000
    spec = make_run_spec(
        store.manifest.data_id,
        num_slots=1,
        num_steps=num_steps,
        batch_tokens=64,
        learning_rate=1e-5,
        clip_norm=None,
    )
    seq_len = spec.shape.seq_len
    numbers = build_decoder(spec).numbers[0]
    module = Regression()
    built = DecoderModel(
        module=module,
        numbers=(
            replace_settings(dataclasses.replace(numbers, name="weight"), learning_rate=1e-5),
        ),
        multipliers=Multipliers(attention=1.0),
    )
    monkeypatch.setattr(single_trial, "build_decoder", lambda spec: built)
    engine, noise = SingleTrialEngine(store), GradientNoiseProbe()
    engine.noise = noise
    engine.admit(0, spec)
    first_look_step = min(plan_looks(num_steps, passes_per_step=1))
    assert first_look_step == 625
    engine.advance(first_look_step + 1)
    weight_D = module.weight.detach().double()

    # The true scale, from the gradients of many sequences. The gradient of (x w - y)^2 / 20 is
    # (x w - y) x / 10.
    ids_NT = torch.from_numpy(
        store.read_train_batch(seed=9, first_sequence=0, num_sequences=20_000, seq_len=seq_len)
    )
    x_ND, y_N = (value.double() for value in module.compute_features_and_answers(ids_NT))
    gradients_ND = (x_ND @ weight_D - y_N)[:, None] * x_ND / 10
    mean_D = gradients_ND.mean(0)
    true_tokens = float(gradients_ND.var(0).sum() / mean_D.square().sum()) * seq_len

    [look] = select_looks(noise, spec)
    scale = estimate_noise_scale([look], seq_len, 0.99)
    assert scale.low <= true_tokens <= scale.high
    inverse, *_ = estimate_inverse_scale([look], seq_len)
    # A single look is imprecise, but a formula that is wrong by a factor of two is noticed.
    assert inverse * true_tokens == pytest.approx(1.0, rel=0.5)
