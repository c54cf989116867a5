"""The fused loss is the plain one, gradients and all, without its memory."""

import dataclasses
from contextlib import contextmanager

import pytest
import torch
from functorch.compile import make_boxed_func
from model_cases import FAMILIES, filled, token_ids
from torch._dynamo.backends.common import aot_autograd
from torch.utils._python_dispatch import TorchDispatchMode

from proxies.model import loss
from proxies.model.decoder import Decoder, Multipliers
from proxies.model.loss import fused_token_loss, token_loss

K, B, T, D, V = 3, 2, 5, 6, 11
CASES = [(lead, part) for lead in ((K,), ()) for part in (1, 4, None)]


def case(lead, dtype=torch.float64):
    """Hidden states, weights and targets, with or without trials."""
    generator = torch.Generator().manual_seed(4)
    hidden = (
        torch.randn(*lead, B * T, D, generator=generator, dtype=torch.float64)
        .to(dtype)
        .requires_grad_()
    )
    weight = (
        torch.randn(*lead, V, D, generator=generator, dtype=torch.float64)
        .to(dtype)
        .requires_grad_()
    )
    return hidden, weight, torch.randint(V, (*lead, B, T), generator=generator)


def results(loss_of, hidden, weight, shares):
    """Losses and gradients where trials' losses count by `shares`."""
    losses = loss_of(hidden, weight)
    return losses.detach(), *torch.autograd.grad((losses * shares).sum(), (hidden, weight))


@pytest.mark.parametrize(("lead", "part"), CASES)
def test_it_is_the_plain_loss(lead, part):
    hidden, weight, targets = case(lead)
    shares = (
        torch.tensor([0.5, 1.0, 3.0], dtype=torch.float64)[: len(lead) * K].view(*lead)
        if lead
        else 2.0
    )
    fused = results(
        lambda h, w: fused_token_loss(h, w, targets, part_tokens=part), hidden, weight, shares
    )
    plain = results(lambda h, w: token_loss(h @ w.mT, targets), hidden, weight, shares)
    for ours, wanted in zip(fused, plain, strict=True):
        torch.testing.assert_close(ours, wanted, rtol=1e-12, atol=1e-14)
    with torch.no_grad():
        held = fused_token_loss(hidden, weight, targets, part_tokens=part)
    torch.testing.assert_close(held, plain[0], rtol=1e-12, atol=1e-14)


def test_the_comparison_can_fail(monkeypatch):
    """Planted: the target's share is not taken off in the last part."""
    hidden, weight, targets = case((K,))
    plain = results(lambda h, w: token_loss(h @ w.mT, targets), hidden, weight, 1.0)
    real = loss._parts

    def careless(hidden, targets, part):
        for h, y in real(hidden, targets, part):
            yield (h, y) if h.shape[1] == part else (h, (y + 1) % V)

    monkeypatch.setattr(loss, "_parts", careless)
    fused = results(
        lambda h, w: fused_token_loss(h, w, targets, part_tokens=4), hidden, weight, 1.0
    )
    assert all(
        (ours - wanted).abs().max() > 1e-3 for ours, wanted in zip(fused, plain, strict=True)
    )


@pytest.mark.parametrize(("tied", "num_trials"), [(True, None), (False, K)])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_models_gradients_are_those_of_the_plain_loss(family, tied, num_trials, monkeypatch):
    """Output multipliers and tied matrices included, in several parts."""
    monkeypatch.setitem(loss.PART_LOGITS, "cpu", 200)
    shape = dataclasses.replace(FAMILIES[family], tied=tied)
    lead = () if num_trials is None else (num_trials,)
    outputs = torch.tensor([1.0, 4.0, 0.25], dtype=torch.float64)[:, None, None] if lead else 0.5
    ids, targets = token_ids(*lead, 2), token_ids(*lead, 2, seed=2)
    losses, gradients = [], []
    for fused in (True, False):
        model = filled(Decoder(shape, num_trials=num_trials, fused_loss=fused))
        losses.append(model(ids, Multipliers(attention=0.3, output=outputs), targets))
        losses[-1].sum().backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    torch.testing.assert_close(*losses, rtol=1e-12, atol=1e-12)
    for name, gradient in gradients[1].items():
        torch.testing.assert_close(gradients[0][name], gradient, rtol=1e-10, atol=1e-12, msg=name)


class Sizes(TorchDispatchMode):
    """The most elements that any operation's result has."""

    largest = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self.largest = max(self.largest, out.numel())
        return out


def test_logits_are_never_whole_in_memory(monkeypatch):
    """In the forward pass, in the backward pass, in validation; planted: the plain loss, whose
    logits are.
    """
    shape = dataclasses.replace(FAMILIES["llama"], vocab_size=4096)
    monkeypatch.setitem(loss.PART_LOGITS, "cpu", 4 * 2 * 4096)
    ids, whole = token_ids(2, 8), 2 * 8 * shape.seq_len * 4096
    largest = {}
    for fused in (True, False):
        model = filled(Decoder(shape, num_trials=2, fused_loss=fused))
        with Sizes() as seen:
            model(ids, Multipliers(attention=0.3), ids).sum().backward()
            with torch.no_grad():
                model(ids, Multipliers(attention=0.3), ids)
        largest[fused] = seen.largest
    assert largest[False] == whole
    # the readout's own weight, no longer the logits
    assert largest[True] == 2 * 4096 * 32 == whole / 3


@contextmanager
def compiling():
    """What `torch.compile` hands to the compiler, run as it stands: names of operations, in
    order.
    """
    torch.compiler.reset()
    called = []

    def backend(graph, inputs):
        called.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return make_boxed_func(graph.forward)

    yield called, aot_autograd(fw_compiler=backend)
    torch.compiler.reset()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_compiled_it_is_the_same_without_a_scatter(dtype):
    """Which would end the kernel that softmax, loss and gradient are."""
    hidden, weight, targets = case((K,), dtype)
    eager = results(
        lambda h, w: fused_token_loss(h, w, targets, part_tokens=4), hidden, weight, 1.0
    )
    with compiling() as (called, backend):
        loss_of = torch.compile(
            lambda h, w: fused_token_loss(h, w, targets, part_tokens=4),
            backend=backend,
            fullgraph=True,
        )
        compiled = results(loss_of, hidden, weight, 1.0)
    assert any("bmm" in name for name in called)
    assert not [name for name in called if "scatter" in name or "gather" in name]
    near = (
        {"rtol": 1e-12, "atol": 1e-14} if dtype == torch.float64 else {"rtol": 2**-7, "atol": 1e-4}
    )
    for ours, wanted in zip(compiled, eager, strict=True):
        torch.testing.assert_close(ours, wanted, **near)
