"""Tests of the probe of activations: it measures the sizes that mup's coordinate check measures.

The probe records the output of each layer, and how it changes, during a few steps of a run.
Suffixes of tensors name their dimensions: B sequences, T tokens, C channels, and D or F features.
"""

import dataclasses
import math

import mup.coord_check
import pytest
import torch
from coordinate_cases import BASE
from mup_reference import build_mup_model
from proxy_cases import make_run_spec
from torch import nn
from torch.nn import functional

from forerun._proxies.coordinates.activations import ActivationProbe, compute_attention_logits
from forerun._proxies.core.schedule import Schedule
from forerun._proxies.parametrization.parametrization import compute_parameter_table
from forerun._proxies.training.single_trial import SingleTrialEngine


@pytest.mark.parametrize("corpus_name", ["store", "learned_store"])
def test_sizes_match_the_coord_check_of_mup(corpus_name, request):
    """The probe on forerun's model and engine agrees with mup's `get_coord_data` on mup's model.

    Both train on the same batches; mup's model is trained by MuAdamW.
    """
    store = request.getfixturevalue(corpus_name)
    num_steps, width = 4, 64
    base = dataclasses.replace(BASE, vocab_size=store.manifest.vocab_size)
    shape = base.at_width(width)
    spec = make_run_spec(
        store.manifest.data_id,
        shape=shape,
        base_shape=base,
        num_slots=1,
        dtype="float64",
        learning_rate=0.01,
        schedule=Schedule(kind="constant", num_steps=num_steps),
        parametrization="mup",
        beta2=0.999,
        clip_norm=None,
    )
    batches = []
    for step in range(num_steps):
        batch = store.read_train_batch(
            seed=0, first_sequence=4 * step, num_sequences=4, seq_len=shape.seq_len
        )
        batches.append(torch.from_numpy(batch))
    engine = SingleTrialEngine(store)
    engine.admit(0, spec)
    weights = {name: p.detach().clone() for name, p in engine.model.named_parameters()}

    def build_with_same_weights():
        model = build_mup_model(shape, base).double()
        for name, parameter in model.named_parameters():
            parameter.data.copy_(weights[name])
        return model

    table = mup.coord_check.get_coord_data(
        {width: build_with_same_weights},
        [(batch[:, :-1], batch[:, 1:].flatten()) for batch in batches],
        optimizer="adamw",
        lr=0.01,
        nsteps=num_steps,
        flatten_output=True,
        fix_data=False,
        cuda=False,
        show_progress=False,
    )
    mup_sizes = {(row.module, row.t): row.l1 for row in table.itertuples()}
    kinds = {row.name: row.kind for row in compute_parameter_table(spec)}
    probe = ActivationProbe(engine.model, kinds)
    for step, batch in enumerate(batches, start=1):
        readings = probe.record(engine.predict, batch[:, :-1])
        for layer, reading in readings.items():
            # mup does not record attention logits.
            if reading.role != "attention_logits":
                mup_size = mup_sizes[layer.removesuffix(".stream"), step]
                assert reading.size == pytest.approx(mup_size, rel=1e-6), (layer, step)
        engine.advance(1)


class Affine(nn.Module):
    """A linear layer, and a convolution whose fan-in is not its input's last dimension."""

    def __init__(self):
        super().__init__()
        self.linear, self.convolution = nn.Linear(96, 80), nn.Conv1d(16, 16, 3, padding=1)

    def forward(self, x_BCF):
        return self.linear(x_BCF), self.convolution(x_BCF)


def test_size_of_an_update_is_the_size_of_its_elements_times_the_fan_in():
    generator = torch.Generator().manual_seed(1)
    module = Affine()
    kinds = {
        name: "hidden" if name.endswith("weight") else "block_bias"
        for name, _ in module.named_parameters()
    }
    x_BCF = torch.randn(32, 16, 96, generator=generator) + 1
    probe = ActivationProbe(module, kinds)

    def predict(x):
        return module(x)[0].flatten(0, 1)

    assert probe.record(predict, x_BCF)["linear"].rate == 0
    update = 0.01 * torch.randn(80, 96, generator=generator)
    with torch.no_grad():
        module.linear.weight += update
        module.linear.bias += 1.0
        module.convolution.weight += 0.01
    # The bias has moved too, but only the update of the weight counts.
    reading = probe.record(predict, x_BCF)
    # The mean absolute value of a Gaussian is sqrt(2 / pi) of its root mean square.
    input_rms = x_BCF.square().mean().sqrt().item()
    update_size = math.sqrt(2 / math.pi) * update.square().mean().sqrt().item() * 96 * input_rms
    expected = update_size / x_BCF.abs().mean().item()
    assert reading["linear"].rate == pytest.approx(expected, rel=0.03)
    assert reading["convolution"].rate is None and reading["convolution"].update > 0


class FusedBlock(nn.Module):
    """A block that has a matrix of its own, calls a child module, and attends."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Parameter(torch.randn(48, 16) / 4), nn.Linear(16, 16)

    def forward(self, x_BTD):
        q, k, v = (y[:, None] for y in functional.linear(x_BTD, self.qkv).chunk(3, dim=-1))
        return self.out(functional.scaled_dot_product_attention(q, k, v, is_causal=True)[:, 0])


def test_each_module_is_recorded_once():
    module = nn.Sequential(FusedBlock())
    probe = ActivationProbe(
        module, dict.fromkeys(("0.qkv", "0.out.weight", "0.out.bias"), "hidden")
    )
    x_BTD = torch.randn(4, 8, 16, generator=torch.Generator().manual_seed(0))
    for _ in range(2):
        readings = probe.record(lambda x: module(x).flatten(0, 1), x_BTD)
        assert list(readings) == ["attention_logits", "0.out", "0"]
    assert readings["0"].update == readings["0.out"].rate == 0
    # Attention is not linear, so random inputs do not give the size of its update.
    assert readings["0"].rate is None


def has_hooks(model):
    """Return whether a module of the model has a forward hook."""
    return any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_probe_does_not_change_a_run(store):
    """A run has the same losses with and without the probe, which removes its hooks."""
    spec = make_run_spec(store.manifest.data_id, shape=BASE, num_slots=1, num_steps=3)
    kinds = {row.name: row.kind for row in compute_parameter_table(spec)}
    batch = store.read_validation_batch(num_sequences=2, seq_len=BASE.seq_len)
    ids_BT = torch.from_numpy(batch[:, :-1])
    curves = []
    for num_recordings in (2, 0):
        engine = SingleTrialEngine(store)
        engine.admit(0, spec)
        probe = ActivationProbe(engine.model, kinds)
        for _ in range(num_recordings):
            probe.record(engine.predict, ids_BT)
            assert not has_hooks(engine.model)
        ((_, _, curve),) = engine.advance(3)
        curves.append(curve)
    assert curves[0] == curves[1]


def test_attention_logits_are_those_that_the_mask_allows():
    """Two query heads share one key head; the scale is torch's default, 1 / sqrt(head_dim)."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, 2, 3, 4, generator=generator)
    k = torch.randn(1, 1, 3, 4, generator=generator)
    causal = compute_attention_logits(q, k, k, is_causal=True, enable_gqa=True)
    # By hand: the last queries come first.
    expected = []
    for head in range(2):
        for i in (2, 1, 0):
            expected += [float(q[0, head, i] @ k[0, 0, j]) / 2 for j in range(i + 1)]
    assert causal[0].tolist() == pytest.approx(expected, rel=1e-5)

    # The same mask as booleans, and as numbers that are added
    mask = torch.ones(3, 3).tril().bool()
    masked = compute_attention_logits(q, k, k, mask, scale=0.5, enable_gqa=True)
    assert masked.tolist() == causal.tolist()
    bias = torch.zeros(3, 3).masked_fill(~mask, -torch.inf)
    biased = compute_attention_logits(q, k, k, bias, enable_gqa=True)
    assert biased.tolist() == causal.tolist()

    # From a long sequence, only every sixth query is used: 34 of 200. Without a mask, each of these
    # queries has a logit for every key of its sequence.
    long = torch.randn(4, 1, 200, 4, generator=generator)
    assert compute_attention_logits(long, long, long).shape == (1, 4 * 34 * 200)
