import dataclasses
import math

import pytest
import torch
from model_cases import FAMILIES, SHAPE, filled, token_ids
from mup_reference import Reference, rotated
from torch.nn import functional

from proxies.model.decoder import (
    Decoder,
    LayerNorm,
    Multipliers,
    RMSNorm,
    linear,
    parameter_shapes,
    token_loss,
)
from proxies.model.rotary import rotate

K = 3
MULTIPLIERS = Multipliers(
    embedding=torch.tensor([1.0, 0.5, 2.0]).double()[:, None, None],
    attention=torch.tensor([0.3, 0.2, 0.1]).double()[:, None, None],
    residual=torch.tensor([1.0, 0.5, 0.0]).double()[:, None, None],
    output=torch.tensor([1.0, 4.0, 0.25]).double()[:, None, None],
)


def multipliers_of(trial):
    return Multipliers(**{f.name: getattr(MULTIPLIERS, f.name)[trial].item() for f in dataclasses.fields(Multipliers)})


def single(bank, trial):
    model = Decoder(bank.shape).double()
    model.load_state_dict({name: tensor[trial] for name, tensor in bank.state_dict().items()})
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_a_bank_of_models_is_the_models_one_by_one(family):
    shape = dataclasses.replace(FAMILIES[family], num_kv_heads=2)
    bank, ids = filled(Decoder(shape, num_trials=K)), token_ids(K, 2)
    targets = token_ids(K, 2, seed=2)
    losses = token_loss(bank(ids, MULTIPLIERS), targets)
    losses.sum().backward()
    for trial in range(K):
        model = single(bank, trial)
        logits = model(ids[trial], multipliers_of(trial))
        loss = token_loss(logits, targets[trial])
        loss.backward()
        torch.testing.assert_close(bank(ids, MULTIPLIERS)[trial], logits, rtol=1e-12, atol=1e-12)
        assert losses[trial].item() == pytest.approx(loss.item(), abs=1e-12)
        for (name, ours), alone in zip(bank.named_parameters(), model.parameters(), strict=True):
            assert ours.grad is not None and alone.grad is not None, name
            torch.testing.assert_close(ours.grad[trial], alone.grad, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("family", FAMILIES)
def test_no_token_sees_a_later_one(family):
    model, ids = filled(Decoder(FAMILIES[family])), token_ids(1)
    before = model(ids, multipliers_of(0))
    for position in (0, 5, SHAPE.seq_len - 1):
        changed = ids.clone()
        changed[0, position] = (ids[0, position] + 1) % SHAPE.vocab_size
        after = model(changed, multipliers_of(0))
        assert torch.equal(before[:position], after[:position])
        assert not torch.isclose(before[position:], after[position:]).all(dim=-1).any()


@pytest.mark.parametrize(("tied", "num_kv_heads"), [(False, 1), (True, 4)])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_gradients_are_the_plain_models(family, tied, num_kv_heads):
    shape = dataclasses.replace(FAMILIES[family], tied=tied, num_kv_heads=num_kv_heads)
    ours, theirs = filled(Decoder(shape)), Reference(shape).double()
    theirs.load_state_dict(ours.state_dict())
    ids, targets, forward = token_ids(2), token_ids(2, seed=2), {"embedding": 2.0, "residual": 0.7, "output": 0.5}
    logits, wanted = ours(ids, Multipliers(attention=theirs.scale, **forward)), theirs(ids, **forward).flatten(0, 1)
    torch.testing.assert_close(logits, wanted, rtol=1e-12, atol=1e-12)
    token_loss(logits, targets).backward()
    functional.cross_entropy(wanted, targets.flatten()).backward()
    gradients = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    assert {name for name, _ in ours.named_parameters()} == set(gradients)
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-9, atol=1e-12, msg=name)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_qk_norm_forgets_the_size_of_queries_and_keys(family):
    def change(qk_norm, factor, *names):
        """Largest change of a logit when some of the attention's parameters grow by a factor."""
        model = filled(Decoder(dataclasses.replace(SHAPE, family=family, qk_norm=qk_norm)))
        grown = [model.get_parameter(f"layers.0.attention.{name}") for name in names]
        before = model(token_ids(1), Multipliers(attention=0.3))
        with torch.no_grad():
            torch._foreach_mul_(grown, factor)
        return (model(token_ids(1), Multipliers(attention=0.3)) - before).abs().max().item()

    queries, keys = (("wq.weight", "wq.bias"), ("wk.weight", "wk.bias"))
    if family == "llama":
        queries, keys = queries[:1], keys[:1]
    # Not quite nothing: the norm's eps is 1e-5.
    assert change(True, 10, *queries, *keys) < 1e-4 < 1e-1 < change(True, 10, "q_norm.weight")
    assert change(False, 10, *queries) > 1e-1 < change(False, 10, *keys)


@pytest.mark.parametrize("family", FAMILIES)
def test_without_its_branches_a_model_is_its_embeddings(family):
    model, ids = filled(Decoder(FAMILIES[family])), token_ids(2)
    x_ND = model.tok_embeddings.weight[ids.flatten()]
    if family.startswith("gpt2"):
        x_ND = x_ND + model.pos_embeddings.weight.repeat(2, 1)
    wanted = model.norm(3 * x_ND) @ model.lm_head.weight.T
    torch.testing.assert_close(model(ids, Multipliers(embedding=3.0, attention=1.0, residual=0.0)), wanted)
    halves = model(ids, Multipliers(attention=0.3, residual=0.5))
    assert not torch.allclose(halves, model(ids, Multipliers(attention=0.3)))
    assert torch.equal(
        model(ids, Multipliers(attention=0.3, residual=torch.ones(1, dtype=torch.float64))),
        model(ids, Multipliers(attention=0.3)),
    )


def test_sequences_of_another_length_are_refused():
    with pytest.raises(ValueError, match=r"sequences of 24 tokens: the model's have 12"):
        Decoder(SHAPE)(token_ids(1).repeat(1, 2), multipliers_of(0))


def test_sequences_do_not_see_each_other():
    model, ids = filled(Decoder(SHAPE)), token_ids(3)
    whole = model(ids, multipliers_of(0)).view(3, SHAPE.seq_len, -1)
    for row in range(3):
        alone = model(ids[row : row + 1], multipliers_of(0))
        torch.testing.assert_close(whole[row], alone, rtol=1e-12, atol=1e-12)


def test_rotary_positions_are_complex_turns():
    generator = torch.Generator().manual_seed(4)
    x_BTHE = torch.randn(2, 7, 3, 8, generator=generator, dtype=torch.float64)
    torch.testing.assert_close(rotate(x_BTHE), rotated(x_BTHE), rtol=1e-13, atol=1e-13)
    assert torch.equal(rotate(x_BTHE)[:, 0], x_BTHE[:, 0])


def test_rotary_scores_depend_on_distance_alone():
    generator = torch.Generator().manual_seed(5)
    q, k = (torch.randn(8, generator=generator, dtype=torch.float64).expand(1, 12, 1, 8) for _ in range(2))
    scores = rotate(q)[0, :, 0] @ rotate(k)[0, :, 0].T
    for offset in range(-3, 4):
        diagonal = torch.diagonal(scores, offset)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=1e-12, atol=1e-12)


def test_norm_and_linear():
    x_KND = torch.randn(K, 5, 8, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    norm = filled(RMSNorm(8, num_trials=K, device=None))
    wanted = x_KND / (x_KND.square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight[:, None]
    torch.testing.assert_close(norm(x_KND), wanted)
    layer_norm = filled(LayerNorm(8, num_trials=K, device=None, bias=True))
    for trial in range(K):
        wanted = functional.layer_norm(x_KND[trial], (8,), layer_norm.weight[trial], layer_norm.bias[trial])
        torch.testing.assert_close(layer_norm(x_KND)[trial], wanted)
    weight_KFD = torch.randn(K, 3, 8, dtype=torch.float64)
    torch.testing.assert_close(linear(x_KND, weight_KFD), torch.einsum("knd,kfd->knf", x_KND, weight_KFD))


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_right(family):
    sizes = {"num_layers": 1, "width": 8, "num_heads": 2, "num_kv_heads": 1, "ffn_width": 8, "vocab_size": 5}
    shape = dataclasses.replace(FAMILIES[family], seq_len=3, **sizes)
    model, ids, targets = filled(Decoder(shape)), token_ids(1, shape=shape), token_ids(1, shape=shape, seed=8)
    names, weights = zip(*model.named_parameters(), strict=True)

    def loss(*values):
        logits = torch.func.functional_call(
            model, dict(zip(names, values, strict=True)), (ids, Multipliers(attention=0.5))
        )
        return token_loss(logits, targets)

    assert torch.autograd.gradcheck(loss, weights, fast_mode=True)


def test_the_loss_is_the_mean_surprise():
    logits_KNV = torch.randn(2, 6, 5, dtype=torch.float64)
    targets_KBT = torch.randint(5, (2, 3, 2))
    shares = logits_KNV.softmax(-1).gather(2, targets_KBT.flatten(1)[..., None])
    torch.testing.assert_close(token_loss(logits_KNV, targets_KBT), -shares.log().mean(dim=(1, 2)))
    uniform = token_loss(torch.zeros(6, 5), targets_KBT[0])
    assert uniform.shape == () and uniform.item() == pytest.approx(math.log(5))
    halves = token_loss(logits_KNV.bfloat16(), targets_KBT)
    wanted = functional.cross_entropy(logits_KNV[0].bfloat16().float(), targets_KBT[0].flatten())
    assert halves.dtype == torch.float32 and halves[0].item() == pytest.approx(wanted.item(), rel=1e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_tied_matrices_are_one(family):
    shape = FAMILIES[family]
    tied = dataclasses.replace(shape, tied=True)
    model, apart, ids = filled(Decoder(tied)), Decoder(shape).double(), token_ids(2)
    assert model.lm_head.weight is model.tok_embeddings.weight
    assert set(parameter_shapes(shape)) - set(parameter_shapes(tied)) == {"lm_head.weight"}
    apart.load_state_dict(model.state_dict())
    for each in (model, apart):
        token_loss(each(ids, multipliers_of(0)), token_ids(2, seed=2)).backward()
    wanted = apart.lm_head.weight.grad + apart.tok_embeddings.weight.grad
    torch.testing.assert_close(model.tok_embeddings.weight.grad, wanted, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_trial_axis_leads_every_parameter(family):
    shape = FAMILIES[family]
    bank = Decoder(shape, num_trials=K, device="meta")
    assert {n: tuple(p.shape) for n, p in bank.named_parameters()} == {
        name: (K, *size) for name, size in parameter_shapes(shape).items()
    }
