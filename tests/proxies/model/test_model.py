"""Tests of the decoder's logits and gradients, against a reference written with torch's modules."""

import dataclasses

import pytest
import torch
from model_cases import FAMILIES, draw_token_ids, fill_parameters
from mup_reference import ReferenceDecoder
from torch.nn import functional

from forerun._proxies.model.decoder import (
    Decoder,
    Multipliers,
    compute_token_loss,
)


@pytest.mark.parametrize(("tied", "num_kv_heads"), [(False, 1), (True, 4)])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_gradients_match_the_reference(family, tied, num_kv_heads):
    shape = dataclasses.replace(FAMILIES[family], tied=tied, num_kv_heads=num_kv_heads)
    decoder, reference = fill_parameters(Decoder(shape)), ReferenceDecoder(shape).double()
    reference.load_state_dict(decoder.state_dict())
    ids, targets = draw_token_ids(2), draw_token_ids(2, seed=2)

    # Logits
    multipliers = {"embedding": 2.0, "residual": 0.7, "output": 0.5}
    logits = decoder(ids, Multipliers(attention=reference.scale, **multipliers))
    reference_logits = reference(ids, **multipliers).flatten(0, 1)
    torch.testing.assert_close(logits, reference_logits, rtol=1e-12, atol=1e-12)

    # Gradients
    compute_token_loss(logits, targets).backward()
    functional.cross_entropy(reference_logits, targets.flatten()).backward()
    expected = {name: parameter.grad for name, parameter in reference.named_parameters()}
    assert {name for name, _ in decoder.named_parameters()} == set(expected)
    for name, parameter in decoder.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-9, atol=1e-12, msg=name)
