import dataclasses
import math

import pytest
import torch
from model_cases import FAMILIES, SHAPE, filled, token_ids
from mup_reference import Reference
from torch.nn import functional

from proxies.model.decoder import (
    Decoder,
    Multipliers,
    parameter_shapes,
    token_loss,
)

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
def test_the_trial_axis_leads_every_parameter(family):
    shape = FAMILIES[family]
    bank = Decoder(shape, num_trials=K, device="meta")
    assert {n: tuple(p.shape) for n, p in bank.named_parameters()} == {
        name: (K, *size) for name, size in parameter_shapes(shape).items()
    }
