"""Tests of the fused loss, which never has the logits of all tokens in memory.

The fused loss splits the tokens into parts and computes the logits of one part after another. Its
losses and gradients are those of the plain loss, which computes all logits at once.
"""

import dataclasses
from contextlib import contextmanager

import pytest
import torch
from functorch.compile import make_boxed_func
from model_cases import FAMILIES, draw_token_ids, fill_parameters
from torch._dynamo.backends.common import aot_autograd
from torch.utils._python_dispatch import TorchDispatchMode

from forerun._proxies.model import loss
from forerun._proxies.model.decoder import Decoder, Multipliers
from forerun._proxies.model.loss import compute_fused_token_loss, compute_token_loss

K, B, T, D, V = 3, 2, 5, 6, 11
"""Numbers of trials, sequences, tokens, features and entries of the vocabulary."""
LEADS_AND_PARTS = [(lead, part) for lead in ((K,), ()) for part in (1, 4, None)]
"""Leading dimensions of the tensors, and the number of tokens in a part; None is the default.

A trial has 10 tokens, so with parts of 4 tokens the last part has only 2.
"""


def draw_inputs(lead, dtype=torch.float64):
    """Draw hidden states, readout weights and targets with these leading dimensions."""
    generator = torch.Generator().manual_seed(4)

    def draw(*size):
        values = torch.randn(*lead, *size, generator=generator, dtype=torch.float64)
        return values.to(dtype).requires_grad_()

    hidden, weight = draw(B * T, D), draw(V, D)
    return hidden, weight, torch.randint(V, (*lead, B, T), generator=generator)


def compute_gradients(compute_loss, hidden, weight, factors):
    """Return losses and gradients, with each trial's loss multiplied by its factor."""
    losses = compute_loss(hidden, weight)
    return losses.detach(), *torch.autograd.grad((losses * factors).sum(), (hidden, weight))


@pytest.mark.parametrize(("lead", "part"), LEADS_AND_PARTS)
def test_fused_loss_matches_the_plain_loss(lead, part):
    hidden, weight, targets = draw_inputs(lead)
    factors = torch.tensor([0.5, 1.0, 3.0], dtype=torch.float64) if lead else 2.0
    fused = compute_gradients(
        lambda h, w: compute_fused_token_loss(h, w, targets, part_tokens=part),
        hidden,
        weight,
        factors,
    )
    plain = compute_gradients(
        lambda h, w: compute_token_loss(h @ w.mT, targets), hidden, weight, factors
    )
    for values, expected in zip(fused, plain, strict=True):
        torch.testing.assert_close(values, expected, rtol=1e-12, atol=1e-14)
    with torch.no_grad():
        losses = compute_fused_token_loss(hidden, weight, targets, part_tokens=part)
    torch.testing.assert_close(losses, plain[0], rtol=1e-12, atol=1e-14)


def test_wrong_targets_in_the_last_part_are_noticed(monkeypatch):
    """The comparison with the plain loss can fail: it notices wrong targets."""
    hidden, weight, targets = draw_inputs((K,))
    plain = compute_gradients(
        lambda h, w: compute_token_loss(h @ w.mT, targets), hidden, weight, 1.0
    )
    real_split = loss._split_parts

    def split_with_wrong_targets(hidden, targets, part):
        # Only the last part is smaller than `part`.
        for h, y in real_split(hidden, targets, part):
            yield (h, y) if h.shape[1] == part else (h, (y + 1) % V)

    monkeypatch.setattr(loss, "_split_parts", split_with_wrong_targets)
    fused = compute_gradients(
        lambda h, w: compute_fused_token_loss(h, w, targets, part_tokens=4), hidden, weight, 1.0
    )
    for values, expected in zip(fused, plain, strict=True):
        assert (values - expected).abs().max() > 1e-3


@pytest.mark.parametrize(("tied", "num_trials"), [(True, None), (False, K)])
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_of_a_decoder_match_the_plain_loss(family, tied, num_trials, monkeypatch):
    # With so few logits in a part, the tokens are split into several parts.
    monkeypatch.setitem(loss.PART_LOGITS, "cpu", 200)
    shape = dataclasses.replace(FAMILIES[family], tied=tied)
    lead = () if num_trials is None else (num_trials,)
    output_multipliers = 0.5
    if lead:
        output_multipliers = torch.tensor([1.0, 4.0, 0.25], dtype=torch.float64)[:, None, None]
    ids, targets = draw_token_ids(*lead, 2), draw_token_ids(*lead, 2, seed=2)
    losses, gradients = [], []
    for fused in (True, False):
        model = fill_parameters(Decoder(shape, num_trials=num_trials, fused_loss=fused))
        losses.append(model(ids, Multipliers(attention=0.3, output=output_multipliers), targets))
        losses[-1].sum().backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    torch.testing.assert_close(*losses, rtol=1e-12, atol=1e-12)
    for name, gradient in gradients[1].items():
        torch.testing.assert_close(gradients[0][name], gradient, rtol=1e-10, atol=1e-12, msg=name)


class SizeRecorder(TorchDispatchMode):
    """Records the largest number of elements of any operation's result."""

    largest = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self.largest = max(self.largest, out.numel())
        return out


def test_logits_of_all_tokens_are_never_in_memory(monkeypatch):
    """Training and validation never hold all logits; with the plain loss they do."""
    shape = dataclasses.replace(FAMILIES["llama"], vocab_size=4096)
    num_trials, num_sequences = 2, 8
    # A part has the logits of 4 tokens of each trial.
    monkeypatch.setitem(loss.PART_LOGITS, "cpu", 4 * num_trials * shape.vocab_size)
    ids = draw_token_ids(num_trials, num_sequences)
    num_logits = ids.numel() * shape.vocab_size
    largest = {}
    for fused in (True, False):
        model = fill_parameters(Decoder(shape, num_trials=num_trials, fused_loss=fused))
        with SizeRecorder() as recorder:
            model(ids, Multipliers(attention=0.3), ids).sum().backward()
            with torch.no_grad():
                model(ids, Multipliers(attention=0.3), ids)
        largest[fused] = recorder.largest
    assert largest[False] == num_logits
    # With the fused loss, the largest tensor is the readout's weight.
    assert largest[True] == num_trials * shape.vocab_size * shape.width
    assert largest[True] < num_logits / 2


@contextmanager
def record_compiled_operations():
    """Yield a list of operations, and a backend for `torch.compile` that adds to it."""
    torch.compiler.reset()
    operations = []

    def backend(graph, inputs):
        calls = [node for node in graph.graph.nodes if node.op == "call_function"]
        operations.extend(str(node.target) for node in calls)
        return make_boxed_func(graph.forward)

    yield operations, aot_autograd(fw_compiler=backend)
    torch.compiler.reset()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_compiled_loss_is_the_same_and_has_no_scatter(dtype):
    """A scatter would split the kernel of softmax, loss and gradient."""
    hidden, weight, targets = draw_inputs((K,), dtype)

    def compute_loss(hidden, weight):
        return compute_fused_token_loss(hidden, weight, targets, part_tokens=4)

    eager = compute_gradients(compute_loss, hidden, weight, 1.0)
    with record_compiled_operations() as (operations, backend):
        compute_compiled_loss = torch.compile(compute_loss, backend=backend, fullgraph=True)
        compiled = compute_gradients(compute_compiled_loss, hidden, weight, 1.0)
    assert any("bmm" in name for name in operations)
    assert not [name for name in operations if "scatter" in name or "gather" in name]
    tolerances = {"rtol": 2**-7, "atol": 1e-4}
    if dtype == torch.float64:
        tolerances = {"rtol": 1e-12, "atol": 1e-14}
    for values, expected in zip(compiled, eager, strict=True):
        torch.testing.assert_close(values, expected, **tolerances)
