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


@pytest.mark.parametrize(("tied", "num_kv_heads"), [(False, 1), (True, 4)])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_gradients_are_the_plain_models(family, tied, num_kv_heads):
    shape = dataclasses.replace(FAMILIES[family], tied=tied, num_kv_heads=num_kv_heads)
    ours, theirs = filled(Decoder(shape)), Reference(shape).double()
    theirs.load_state_dict(ours.state_dict())
    ids, targets, forward = (
        token_ids(2),
        token_ids(2, seed=2),
        {"embedding": 2.0, "residual": 0.7, "output": 0.5},
    )
    logits, wanted = (
        ours(ids, Multipliers(attention=theirs.scale, **forward)),
        theirs(ids, **forward).flatten(0, 1),
    )
    torch.testing.assert_close(logits, wanted, rtol=1e-12, atol=1e-12)
    token_loss(logits, targets).backward()
    functional.cross_entropy(wanted, targets.flatten()).backward()
    gradients = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    assert {name for name, _ in ours.named_parameters()} == set(gradients)
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-9, atol=1e-12, msg=name)
