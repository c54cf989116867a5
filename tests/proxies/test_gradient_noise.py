"""Looks at gradient noise through the real engines: a planted one is found; the runs stay as they
are to the bit.
"""

import dataclasses

import numpy as np
import pytest
import torch
from proxy_cases import TINY, run_spec, with_settings, write_corpus
from torch import nn

from proxies.core.noise_scale import inverse_scale, look_passes, noise_scale
from proxies.data.tokens import TokenStore
from proxies.model.decoder import Multipliers
from proxies.training import gradient_noise, solo
from proxies.training.bank import Bank
from proxies.training.gradient_noise import NoiseLooks, gram
from proxies.training.solo import Solo
from proxies.training.trainable_model import DecoderModel, our_model

NUM_STEPS = 200


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return TokenStore(write_corpus(tmp_path_factory.mktemp("corpus")))


def trained(engine, specs, noise):
    engine.noise = noise
    for index, spec in enumerate(specs):
        engine.admit(index, spec)
    ended = {}
    while len(ended) < len(specs):
        for slot, result, curve in engine.advance(10**6):
            ended[slot] = (dataclasses.replace(result, seconds=0.0), curve)
    return ended


def looks_of(noise, spec):
    return [look for run_id, look in noise.taken if run_id == spec.id]


@pytest.mark.parametrize("microbatch_tokens", [None, 16])
def test_a_trial_alone_is_bitwise_the_one_without(store, microbatch_tokens):
    spec = run_spec(
        store.manifest.data_id,
        num_slots=1,
        num_steps=NUM_STEPS,
        microbatch_tokens=microbatch_tokens,
    )
    noise = NoiseLooks()
    assert trained(Solo(store), [spec], noise) == trained(Solo(store), [spec], None)
    per_step = 1 if microbatch_tokens is None else 4
    assert {look.step: len(look.gram) for look in looks_of(noise, spec)} == look_passes(
        NUM_STEPS, per_step
    )
    assert all(look.num_sequences == 4 // per_step for look in looks_of(noise, spec))


def test_runs_in_a_bank_are_bitwise_those_without_and_are_seen_as_alone(store):
    specs = [
        run_spec(store.manifest.data_id, num_slots=2, num_steps=NUM_STEPS, seed=seed)
        for seed in (0, 1)
    ]
    with_looks, without = (
        Bank(TINY, specs[0].batch_tokens, specs[0].numerics, store, optimizer="adamw")
        for _ in range(2)
    )
    noise, alone = NoiseLooks(), NoiseLooks()
    assert trained(with_looks, specs, noise) == trained(without, specs, None)
    single = dataclasses.replace(
        specs[1], numerics=dataclasses.replace(specs[1].numerics, num_slots=1)
    )
    trained(Solo(store), [single], alone)
    banked, own = looks_of(noise, specs[1]), looks_of(alone, single)
    assert [look.step for look in banked] == [look.step for look in own] == [NUM_STEPS // 2]
    np.testing.assert_allclose(banked[0].gram, own[0].gram, rtol=1e-3)


def test_parts_average_to_the_whole_batchs_gradient(store):
    """The Gram matrix of parts, summed, is the squared norm of the gradient that training computes
    of all of them.
    """
    spec = run_spec(store.manifest.data_id, num_slots=1, num_steps=NUM_STEPS)
    built = our_model(spec)
    ids_BT = torch.from_numpy(
        store.train_batch(seed=0, first_sequence=0, num_sequences=8, seq_len=spec.shape.seq_len)
    )
    built.loss(ids_BT[:, :-1], ids_BT[:, 1:]).backward()
    whole = sum(float(p.grad.double().square().sum()) for p in built.module.parameters())
    built.module.zero_grad()
    found = np.array(gram(spec, built.module, dict(built.module.named_parameters()), ids_BT, 4))
    assert found.mean() == pytest.approx(whole, rel=1e-5)
    assert all(p.grad is None for p in built.module.parameters())


def test_of_a_large_model_some_entries_stand_for_all(store, monkeypatch):
    spec = run_spec(store.manifest.data_id, num_slots=1, num_steps=NUM_STEPS)
    built = our_model(spec)
    ids_NT = torch.from_numpy(
        store.train_batch(seed=0, first_sequence=0, num_sequences=32, seq_len=spec.shape.seq_len)
    )
    weights = dict(built.module.named_parameters())
    all_of_it = np.array(gram(spec, built.module, weights, ids_NT, 4))
    num_params = sum(weight.numel() for weight in weights.values())
    monkeypatch.setattr(gradient_noise, "TARGET_GRADIENT_ENTRIES", num_params // 3)
    assert np.array(gram(spec, built.module, weights, ids_NT, 4)).trace() < 0.7 * all_of_it.trace()


def test_a_look_compiles_nothing(store):
    spec = run_spec(store.manifest.data_id, num_slots=1, num_steps=NUM_STEPS, compiled=True)
    plain = run_spec(store.manifest.data_id, num_slots=1, num_steps=NUM_STEPS)
    noise, eager = NoiseLooks(), NoiseLooks()
    compiled_with, compiled_without = (
        trained(Solo(store, compile_backend="eager"), [spec], some) for some in (noise, None)
    )
    trained(Solo(store), [plain], eager)
    assert compiled_with == compiled_without
    np.testing.assert_allclose(noise.taken[0][1].gram, eager.taken[0][1].gram, rtol=1e-3)


class Regression(nn.Module):
    """Least squares in place of a decoder: features and answer of a sequence follow from its first
    three tokens.
    """

    def __init__(self):
        super().__init__()
        rng = torch.Generator().manual_seed(0)
        self.weight = nn.Parameter(torch.zeros(8))
        self.register_buffer("features", torch.randn(3, 256, 8, generator=rng))
        self.register_buffer("answers", torch.randn(256, generator=rng))

    def of(self, ids_BT):
        x_BD = sum(self.features[place][ids_BT[:, place]] for place in range(3))
        return x_BD, 2 * x_BD[:, 0] + self.answers[ids_BT[:, 0]]

    def forward(self, ids_BT, multipliers, targets_BT=None):
        x_BD, y_B = self.of(ids_BT)
        return (x_BD @ self.weight - y_B).square().mean() / 20


def test_least_squares_through_the_training_loop_has_the_noise_scale_of_its_formula(
    store, monkeypatch
):
    spec = run_spec(
        store.manifest.data_id,
        num_slots=1,
        num_steps=20_000,
        batch_tokens=64,
        learning_rate=1e-5,
        clip_norm=None,
    )
    numbers = our_model(spec).numbers[0]
    module = Regression()
    built = DecoderModel(
        module=module,
        numbers=(with_settings(dataclasses.replace(numbers, name="weight"), learning_rate=1e-5),),
        multipliers=Multipliers(attention=1.0),
    )
    monkeypatch.setattr(solo, "our_model", lambda spec: built)
    engine, noise = Solo(store), NoiseLooks()
    engine.noise = noise
    engine.admit(0, spec)
    [first, *_] = sorted(look_passes(20_000, 1))
    engine.advance(first + 1)
    weight_D = module.weight.detach().double()

    ids_NT = torch.from_numpy(
        store.train_batch(seed=9, first_sequence=0, num_sequences=20_000, seq_len=16)
    )
    x_ND, y_N = (value.double() for value in module.of(ids_NT))
    gradients_ND = (x_ND @ weight_D - y_N)[:, None] * x_ND / 10
    mean_D = gradients_ND.mean(0)
    true = float(gradients_ND.var(0).sum() / mean_D.square().sum()) * 16
    [look] = looks_of(noise, spec)
    found = noise_scale([look], 16, 0.99)
    assert found.low <= true <= found.high
    assert inverse_scale([look], 16)[0] * true == pytest.approx(1.0, rel=0.5)
