import dataclasses
import math

import pytest
import torch
from mup_reference import Reference, ReferenceFeedForward, rotated
from proxy_cases import BASE
from torch.nn import functional

from proxies.model import (
    Attention,
    Decoder,
    FeedForward,
    Multipliers,
    RMSNorm,
    linear,
    parameter_shapes,
    rotate,
    token_loss,
)

K = 3
SHAPE = dataclasses.replace(BASE, width=32, num_heads=4, num_kv_heads=2)
MULTIPLIERS = Multipliers(
    embedding=torch.tensor([1.0, 0.5, 2.0]).double()[:, None, None],
    attention=torch.tensor([0.3, 0.2, 0.1]).double()[:, None, None],
    output=torch.tensor([1.0, 4.0, 0.25]).double()[:, None, None],
)


def multipliers_of(trial):
    return Multipliers(**{f.name: getattr(MULTIPLIERS, f.name)[trial].item() for f in dataclasses.fields(Multipliers)})


def filled(model, seed=0):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.double().parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.3
    return model


def token_ids(*size, shape=SHAPE, seed=1):
    return torch.randint(shape.vocab_size, (*size, shape.seq_len), generator=torch.Generator().manual_seed(seed))


def single(bank, trial):
    model = Decoder(bank.shape).double()
    model.load_state_dict({name: tensor[trial] for name, tensor in bank.state_dict().items()})
    return model


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
def test_a_bank_of_models_is_the_models_one_by_one(num_kv_heads):
    shape = dataclasses.replace(SHAPE, num_kv_heads=num_kv_heads)
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


def test_no_token_sees_a_later_one():
    model, ids = filled(Decoder(SHAPE)), token_ids(1)
    before = model(ids, multipliers_of(0))
    for position in (0, 5, SHAPE.seq_len - 1):
        changed = ids.clone()
        changed[0, position] = (ids[0, position] + 1) % SHAPE.vocab_size
        after = model(changed, multipliers_of(0))
        assert torch.equal(before[:position], after[:position])
        assert not torch.isclose(before[position:], after[position:]).all(dim=-1).any()


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


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
def test_attention_is_the_naive_one(num_kv_heads):
    shape = dataclasses.replace(SHAPE, num_kv_heads=num_kv_heads)
    ours, theirs = filled(Attention(shape, None, None)), Reference(shape).double().layers[0].attention
    theirs.load_state_dict(ours.state_dict())
    x_BTD = torch.randn(2, shape.seq_len, shape.width, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    torch.testing.assert_close(
        ours(x_BTD.flatten(0, 1), 0.4).view_as(x_BTD), theirs(x_BTD, 0.4), rtol=1e-12, atol=1e-12
    )


def test_the_feed_forward_is_the_naive_one():
    ours, theirs = filled(FeedForward(SHAPE, None, None)), ReferenceFeedForward(SHAPE).double()
    theirs.load_state_dict(ours.state_dict())
    x_ND = torch.randn(5, SHAPE.width, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    torch.testing.assert_close(ours(x_ND), theirs(x_ND), rtol=1e-12, atol=1e-12)


def test_norm_and_linear():
    x_KND = torch.randn(K, 5, 8, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    norm = filled(RMSNorm(8, num_trials=K, device=None))
    wanted = x_KND / (x_KND.square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight[:, None]
    torch.testing.assert_close(norm(x_KND), wanted)
    weight_KFD = torch.randn(K, 3, 8, dtype=torch.float64)
    torch.testing.assert_close(linear(x_KND, weight_KFD), torch.einsum("knd,kfd->knf", x_KND, weight_KFD))


def test_gradients_are_right():
    shape = dataclasses.replace(SHAPE, num_layers=1, width=8, num_heads=2, num_kv_heads=1, ffn_width=8, vocab_size=5,
                                seq_len=3)  # fmt: skip
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


def test_tied_matrices_are_one():
    tied = dataclasses.replace(SHAPE, tied=True)
    model = Decoder(tied)
    assert model.lm_head.weight is model.tok_embeddings.weight
    assert set(parameter_shapes(SHAPE)) - set(parameter_shapes(tied)) == {"lm_head.weight"}


def test_the_trial_axis_leads_every_parameter():
    bank = Decoder(SHAPE, num_trials=K, device="meta")
    assert {n: tuple(p.shape) for n, p in bank.named_parameters()} == {
        name: (K, *size) for name, size in parameter_shapes(SHAPE).items()
    }
