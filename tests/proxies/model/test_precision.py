"""Tests of bfloat16: proxies round as the main run does under FSDP, and some parts are in float32.

Torch's default dtype and device must not change a run.
"""

import dataclasses

import pytest
import torch
import torch.distributed as dist
from model_cases import FAMILIES, draw_token_ids, fill_parameters
from proxy_cases import TINY, make_run_spec
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional

from forerun._proxies.core.numbers import ForwardNumbers
from forerun._proxies.model import decoder
from forerun._proxies.model.decoder import Block, Decoder, Multipliers
from forerun._proxies.model.layers import Linear
from forerun._proxies.model.loss import compute_token_loss
from forerun._proxies.model.precision import PRECISIONS
from forerun._proxies.training.bank import Bank
from forerun._proxies.training.single_trial import SingleTrialEngine
from forerun._proxies.training.trainable_model import build_decoder

MULTIPLIERS = Multipliers(embedding=1.7, attention=0.3, residual=0.6, output=0.7)
MULTIPLIERS_OF_BANK = Multipliers(
    **{
        field.name: torch.full((1, 1, 1), getattr(MULTIPLIERS, field.name))
        for field in dataclasses.fields(ForwardNumbers)
    }
)
"""The same multipliers for a bank of one trial."""
BFLOAT16 = PRECISIONS["bfloat16"]
IDS, TARGETS = draw_token_ids(3), draw_token_ids(3, seed=2)


@pytest.fixture
def one_rank():
    """A process group with a single rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def build_proxy(shape, **options):
    """Build a decoder that computes in bfloat16 in the way of the proxies."""
    return fill_parameters(
        Decoder(shape, compute=BFLOAT16.compute, **options), dtype=BFLOAT16.weights
    )


def build_sharded(shape):
    """Build a decoder with the same weights, sharded as in the main run."""
    model = fill_parameters(Decoder(shape), dtype=torch.float32)
    policy = MixedPrecisionPolicy(param_dtype=BFLOAT16.compute, reduce_dtype=BFLOAT16.weights)
    mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
    for part in (*model.layers, model):
        fully_shard(part, mesh=mesh, mp_policy=policy)
    return model


def compute_gradients(model):
    """Return the loss of `IDS` and `TARGETS`, and the gradients by parameter name."""
    loss = compute_token_loss(model(IDS, MULTIPLIERS), TARGETS)
    loss.backward()
    gradients = {}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        gradients[name] = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
    return loss.detach(), gradients


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_proxy_matches_the_main_run_on_one_rank(one_rank, family, tied):
    """Losses and gradients are equal bit by bit, except for the gradient of a tied matrix.

    The proxy adds the two gradients of a tied matrix in float32.
    """
    shape = dataclasses.replace(FAMILIES[family], tied=tied)
    loss, gradients = compute_gradients(build_proxy(shape))
    sharded_loss, sharded_gradients = compute_gradients(build_sharded(shape))
    assert torch.equal(loss, sharded_loss)
    different_names = set()
    for name, gradient in gradients.items():
        expected = sharded_gradients[name]
        if not torch.equal(gradient, expected):
            different_names.add(name)
        assert gradient.dtype == torch.float32
        tolerance = 2**-7 * float(expected.abs().max())
        torch.testing.assert_close(gradient, expected, rtol=2**-7, atol=tolerance)
    assert different_names == ({"tok_embeddings.weight"} if tied else set())


def test_residual_stream_in_float32_is_noticed(one_rank, monkeypatch):
    """The comparison above can fail. Under autocast, the stream would be in float32."""

    def add_in_float32(x, branch, factor):
        return x.float() + branch.float() * factor

    with monkeypatch.context() as patch:
        patch.setattr(decoder, "add_branch", add_in_float32)
        loss, _ = compute_gradients(build_proxy(FAMILIES["llama"]))
    sharded_loss, _ = compute_gradients(build_sharded(FAMILIES["llama"]))
    assert not torch.equal(loss, sharded_loss)


@pytest.mark.parametrize("num_trials", [None, 1])
@pytest.mark.parametrize("family", FAMILIES)
def test_products_and_stream_are_bfloat16_and_statistics_float32(family, num_trials, monkeypatch):
    model = build_proxy(FAMILIES[family], num_trials=num_trials)
    product_dtypes, statistic_dtypes = set(), set()

    def record_products(module, inputs, output):
        product_dtypes.update((inputs[0].dtype, output.dtype))

    def make_recording(function, dtypes):
        """Wrap a function of torch so that the dtype of its input is recorded."""

        def call_and_record(x, *arguments, **options):
            dtypes.add(x.dtype)
            return function(x, *arguments, **options)

        return call_and_record

    for module in model.modules():
        if isinstance(module, Linear | Block):
            module.register_forward_hook(record_products)
    for name, dtypes in (
        ("scaled_dot_product_attention", product_dtypes),
        ("rms_norm", statistic_dtypes),
        ("layer_norm", statistic_dtypes),
        ("cross_entropy", statistic_dtypes),
    ):
        recording = make_recording(getattr(functional, name), dtypes)
        monkeypatch.setattr(functional, name, recording)

    ids, multipliers = IDS, MULTIPLIERS
    if num_trials is not None:
        ids, multipliers = IDS[None], MULTIPLIERS_OF_BANK
    loss = model(ids, multipliers, ids)
    loss.sum().backward()
    assert product_dtypes == {torch.bfloat16}
    assert statistic_dtypes == {torch.float32}
    assert loss.dtype == torch.float32
    for parameter in model.parameters():
        assert parameter.dtype == parameter.grad.dtype == torch.float32


def test_trials_of_a_bank_round_as_a_single_trial():
    """The multipliers of a bank are tensors, which could widen the values that they multiply."""
    single = build_proxy(FAMILIES["llama-qk"])
    bank = build_proxy(FAMILIES["llama-qk"], num_trials=1)
    logits, bank_logits = single(IDS, MULTIPLIERS), bank(IDS[None], MULTIPLIERS_OF_BANK)[0]
    assert bank_logits.dtype == torch.bfloat16
    torch.testing.assert_close(bank_logits.float(), logits.float(), rtol=0, atol=0.02)


def train_curves(store):
    """Return the curves of one run on the engine of a single trial and in a bank."""
    options = {"clip_norm": 0.5, "num_steps": 4}
    single_spec = make_run_spec(store.manifest.data_id, num_slots=1, **options)
    bank_spec = make_run_spec(store.manifest.data_id, num_slots=2, **options)
    single = SingleTrialEngine(store, device="cpu")
    bank = Bank(
        TINY, bank_spec.batch_tokens, bank_spec.numerics, store, optimizer="adamw", device="cpu"
    )
    curves = []
    for engine, spec in ((single, single_spec), (bank, bank_spec)):
        engine.admit(0, spec)
        ((_, _, curve),) = engine.advance(4)
        curves.append(curve)
    return curves


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_default_dtype_of_the_user_does_not_change_a_run(store, dtype):
    curves = train_curves(store)
    old_dtype = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        assert train_curves(store) == curves
        assert {parameter.dtype for parameter in Decoder(TINY).parameters()} == {torch.float32}
    finally:
        torch.set_default_dtype(old_dtype)


def test_default_device_of_the_user_does_not_change_initial_weights(store):
    """A weight on the device `meta` has no values."""
    spec = make_run_spec(store.manifest.data_id)
    expected = build_decoder(spec).module.state_dict()
    with torch.device("meta"):
        weights = build_decoder(spec).module.state_dict()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
