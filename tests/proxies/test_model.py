import dataclasses

import pytest
import torch
from model_cases import FAMILIES, filled, token_ids
from mup_reference import Reference
from torch.nn import functional

from proxies.model.decoder import (
    Decoder,
    Multipliers,
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
