"""bfloat16 means one thing for proxies and for the main run; and torch's defaults change
nothing.
"""

import dataclasses

import pytest
import torch
import torch.distributed as dist
from model_cases import FAMILIES, filled, token_ids
from proxy_cases import TINY, run_spec
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional

from proxies.core.numbers import ForwardNumbers
from proxies.model import decoder
from proxies.model.decoder import Block, Decoder, Linear, Multipliers
from proxies.model.loss import token_loss
from proxies.model.precision import PRECISIONS
from proxies.training.bank import Bank
from proxies.training.solo import Solo
from proxies.training.trainable_model import our_model

NUMBERS = Multipliers(embedding=1.7, attention=0.3, residual=0.6, output=0.7)
PER_TRIAL = Multipliers(
    **{
        field.name: torch.full((1, 1, 1), getattr(NUMBERS, field.name))
        for field in dataclasses.fields(ForwardNumbers)
    }
)
BFLOAT16 = PRECISIONS["bfloat16"]
IDS, TARGETS = token_ids(3), token_ids(3, seed=2)


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def proxy(shape, **options):
    return filled(Decoder(shape, compute=BFLOAT16.compute, **options), dtype=BFLOAT16.weights)


def sharded(shape):
    """The same weights as the main run has them."""
    model = filled(Decoder(shape), dtype=torch.float32)
    policy = MixedPrecisionPolicy(param_dtype=BFLOAT16.compute, reduce_dtype=BFLOAT16.weights)
    mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
    for part in (*model.layers, model):
        fully_shard(part, mesh=mesh, mp_policy=policy)
    return model


def trained(model):
    """Loss and gradients of a batch."""
    loss = token_loss(model(IDS, NUMBERS), TARGETS)
    loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    return loss.detach(), {
        name: g.full_tensor() if isinstance(g, DTensor) else g for name, g in grads.items()
    }


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_proxy_is_what_the_main_run_is_on_one_rank(one_rank, family, tied):
    """To the bit; but of a tied matrix, whose two gradients are added in float32 here."""
    shape = dataclasses.replace(FAMILIES[family], tied=tied)
    (loss, ours), (their_loss, theirs) = trained(proxy(shape)), trained(sharded(shape))
    assert torch.equal(loss, their_loss)
    rounded = {"tok_embeddings.weight"} if tied else set()
    assert {name for name in ours if not torch.equal(ours[name], theirs[name])} == rounded
    for name in ours:
        assert ours[name].dtype == torch.float32
        torch.testing.assert_close(
            ours[name], theirs[name], rtol=2**-7, atol=2**-7 * float(theirs[name].abs().max())
        )


def test_the_comparison_can_fail(one_rank, monkeypatch):
    """Planted: the residual stream in float32, as under autocast."""
    monkeypatch.setattr(
        decoder, "_joined", lambda x, branch, factor: x.float() + branch.float() * factor
    )
    loss, _ = trained(proxy(FAMILIES["llama"]))
    monkeypatch.undo()
    assert not torch.equal(loss, trained(sharded(FAMILIES["llama"]))[0])


@pytest.mark.parametrize("num_trials", [None, 1])
@pytest.mark.parametrize("family", FAMILIES)
def test_products_and_stream_are_narrow_and_statistics_wide(family, num_trials, monkeypatch):
    model = proxy(FAMILIES[family], num_trials=num_trials)
    found = {}

    def seen(what, *tensors):
        found.setdefault(what, set()).update(x.dtype for x in tensors)

    for module in model.modules():
        if isinstance(module, Linear | Block):
            module.register_forward_hook(lambda m, inputs, out: seen("narrow", inputs[0], out))
    watched = [
        ("rms_norm", "wide"),
        ("layer_norm", "wide"),
        ("scaled_dot_product_attention", "narrow"),
    ]
    watched += [("cross_entropy", "wide")]
    for name, what in watched:
        real = getattr(functional, name)
        monkeypatch.setattr(
            functional,
            name,
            lambda x, *a, real=real, what=what, **named: (seen(what, x), real(x, *a, **named))[1],
        )
    ids, numbers = (IDS, NUMBERS) if num_trials is None else (IDS[None], PER_TRIAL)
    loss = model(ids, numbers, ids)
    loss.sum().backward()
    assert found == {"narrow": {torch.bfloat16}, "wide": {torch.float32}}
    assert {
        loss.dtype,
        *(p.dtype for p in model.parameters()),
        *(p.grad.dtype for p in model.parameters()),
    } == {torch.float32}


def test_trials_of_a_bank_round_as_one_alone():
    """Multipliers are tensors there, which would widen what they multiply."""
    alone, bank = proxy(FAMILIES["llama-qk"]), proxy(FAMILIES["llama-qk"], num_trials=1)
    logits, beside = alone(IDS, NUMBERS), bank(IDS[None], PER_TRIAL)[0]
    assert beside.dtype == torch.bfloat16
    torch.testing.assert_close(beside.float(), logits.float(), rtol=0, atol=0.02)


@pytest.fixture(params=[torch.float64, torch.bfloat16], ids=str)
def default_dtype(request):
    before = torch.get_default_dtype()
    yield lambda: torch.set_default_dtype(request.param)
    torch.set_default_dtype(before)


def curves(store):
    """Of one run alone and in a bank."""
    numbers = {"clip_norm": 0.5, "num_steps": 4}
    alone, beside = (run_spec(store.manifest.data_id, num_slots=k, **numbers) for k in (1, 2))
    solo, bank = (
        Solo(store, device="cpu"),
        Bank(TINY, beside.batch_tokens, beside.numerics, store, optimizer="adamw", device="cpu"),
    )
    solo.admit(0, alone)
    bank.admit(0, beside)
    return [engine.advance(4)[0][2] for engine in (solo, bank)]


def test_a_default_dtype_of_the_users_changes_no_run(store, default_dtype):
    plain = curves(store)
    default_dtype()
    assert curves(store) == plain
    assert {p.dtype for p in Decoder(TINY).parameters()} == {torch.float32}


def test_a_default_device_of_the_users_changes_no_initial_weight(store):
    """On `meta` a weight would have no value at all."""
    spec = run_spec(store.manifest.data_id)
    plain = our_model(spec).module.state_dict()
    with torch.device("meta"):
        there = our_model(spec).module.state_dict()
    assert all(torch.equal(there[name], plain[name]) for name in plain)
