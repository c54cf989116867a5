"""The model in bfloat16, checkpointing, torch.compile and inference mode; and against other
people's code.
"""

import dataclasses

import pytest
import torch
from model_cases import FAMILIES, filled, token_ids
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from proxies.core.numbers import ForwardNumbers
from proxies.model.decoder import Decoder, Multipliers, rotate
from proxies.model.loss import token_loss

K = 3
NUMBERS = Multipliers(embedding=2.0, attention=0.3, residual=0.5, output=0.5)
PER_TRIAL = Multipliers(
    **{
        field.name: torch.full((K, 1, 1), getattr(NUMBERS, field.name))
        for field in dataclasses.fields(ForwardNumbers)
    }
)
CASES = [("llama", None), ("llama-qk", K), ("gpt2", K), ("gpt2-qk", None)]


def case(family, num_trials, **options):
    """A float32 model, its multipliers, token ids and targets."""
    model = filled(Decoder(FAMILIES[family], num_trials=num_trials, **options), dtype=torch.float32)
    size = (2,) if num_trials is None else (num_trials, 2)
    return (
        model,
        NUMBERS if num_trials is None else PER_TRIAL,
        token_ids(*size),
        token_ids(*size, seed=2),
    )


def loss_and_gradients(model, forward, multipliers, ids, targets):
    loss = token_loss(forward(ids, multipliers), targets)
    loss.sum().backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    return loss.detach(), gradients


@pytest.mark.parametrize(("family", "num_trials"), CASES)
def test_bfloat16_stays_close_to_float32(family, num_trials):
    """What it rounds where: `test_precision.py`."""
    model, multipliers, ids, targets = case(family, num_trials)
    full, wanted = loss_and_gradients(model, model, multipliers, ids, targets)
    model.compute = torch.bfloat16
    rounded, found = loss_and_gradients(model, model, multipliers, ids, targets)
    torch.testing.assert_close(rounded, full, rtol=0, atol=0.02)
    assert not torch.equal(rounded, full)
    for name, gradient in found.items():
        cosine = functional.cosine_similarity(gradient.flatten(), wanted[name].flatten(), dim=0)
        # A key's bias moves every score of a query alike: without a norm its gradient is rounding
        # and nothing else.
        assert cosine > 0.98 or (name.endswith("wk.bias") and wanted[name].abs().max() < 1e-6), name


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_parameters_widen_nothing(family):
    """As under FSDP's mixed precision: parameters and activations in bfloat16, no product of two
    precisions.
    """
    model, multipliers, ids, targets = case(family, None)
    full = token_loss(model(ids, multipliers), targets)
    logits = model.bfloat16()(ids, multipliers)
    assert logits.dtype == torch.bfloat16
    assert token_loss(logits, targets).item() == pytest.approx(full.item(), abs=0.03)


def test_positions_are_turned_in_float32():
    """At bfloat16's eight bits the angles of late positions would be noise."""
    x_BTHE = torch.randn(1, 2048, 2, 16, generator=torch.Generator().manual_seed(3)).bfloat16()
    turned, wanted = rotate(x_BTHE, 2048, 2, 16), rotate(x_BTHE.double(), 2048, 2, 16)
    assert turned.dtype == torch.float32
    torch.testing.assert_close(turned.double(), wanted, rtol=0, atol=1e-6)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(rotate(x_BTHE, 2048, 2, 16), turned)


@pytest.mark.parametrize(
    ("family", "num_trials", "checkpointing"),
    [("llama-qk", K, True), ("gpt2", None, False)],
)
def test_one_graph_is_compiled_and_gives_the_same(family, num_trials, checkpointing):
    torch.compiler.reset()
    model, multipliers, ids, targets = case(family, num_trials, checkpointing=checkpointing)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    loss, gradients = loss_and_gradients(model, model, multipliers, ids, targets)
    same_loss, same_gradients = loss_and_gradients(model, compiled, multipliers, ids, targets)
    torch.testing.assert_close(same_loss, loss, rtol=1e-6, atol=1e-6)
    for name, gradient in gradients.items():
        torch.testing.assert_close(same_gradients[name], gradient, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize(("family", "num_trials"), [("llama-qk", K), ("gpt2", None)])
@pytest.mark.parametrize(
    ("compute", "weights", "num_products"),
    [
        (torch.bfloat16, torch.float32, {"llama": 6, "gpt2": 6}),
        (None, torch.float32, {"llama": 7, "gpt2": 6}),
        (None, torch.bfloat16, {"llama": 7, "gpt2": 6}),
    ],
    ids=["as proxies cast", "float32", "as FSDP has cast"],
)
def test_maps_of_one_input_are_one_product_where_compiled_as_it_is_cast(
    family, num_trials, compute, weights, num_products
):
    """Not of weights that FSDP has cast: nobody would free the joined ones until the backward
    pass.
    """
    torch.compiler.reset()
    model, multipliers, ids, targets = case(family, num_trials, compute=compute)
    model.to(weights)
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(model, backend=backend, fullgraph=True)
    wanted, gradients = loss_and_gradients(model, model, multipliers, ids, targets)
    loss, found = loss_and_gradients(model, compiled, multipliers, ids, targets)
    forward = [
        m
        for graph in graphs
        for name, m in graph.named_modules()
        if hasattr(m, "graph") and "bwd" not in name
    ]
    products = sum(
        "matmul" in str(node.target) for module in forward for node in module.graph.nodes
    )
    assert products == num_products[family.split("-")[0]] * model.shape.num_layers + 1
    torch.testing.assert_close(loss, wanted, rtol=0, atol=0.01)
    for name, gradient in gradients.items():
        near = 0.03 * float(gradient.abs().max()) + 1e-4
        torch.testing.assert_close(found[name], gradient, rtol=0, atol=near, msg=name)


@pytest.mark.parametrize("num_trials", [None, K])
def test_no_gradient_is_copied_once_more_to_turn_it(num_trials):
    """As torch does with those of batched products, which it computes transposed."""
    torch.compiler.reset()
    model, multipliers, ids, targets = case("llama", num_trials, compute=torch.bfloat16)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    losses = compiled(ids, multipliers, targets)
    with torch.profiler.profile() as profile:
        losses.sum().backward()
    names, copies = set(), 0
    for event in profile.events():
        if (within := event.cpu_parent) is not None and within.name.startswith(
            "torch::autograd::AccumulateGrad"
        ):
            names.add(within.name)
            copies += event.name in {"aten::clone", "aten::copy_"}
    assert names and not copies


@pytest.mark.gpu
@pytest.mark.parametrize("num_trials", [None, K])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_heads_need_no_attention_that_holds_all_logits(dtype, num_trials):
    """Refused there: the kernel of torch that is mathematics written out."""
    model, multipliers, ids, targets = case("llama", num_trials, compute=dtype)
    wanted, _ = loss_and_gradients(model, model, multipliers, ids, targets)
    model.cuda()
    multipliers = Multipliers(
        **{
            field.name: value.cuda()
            if isinstance(value := getattr(multipliers, field.name), torch.Tensor)
            else value
            for field in dataclasses.fields(ForwardNumbers)
        }
    )
    with sdpa_kernel(
        [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION]
    ):
        loss, _ = loss_and_gradients(model, model, multipliers, ids.cuda(), targets.cuda())
    torch.testing.assert_close(
        loss.cpu(), wanted, rtol=0, atol=1e-4 if dtype == torch.float32 else 0.02
    )


def test_no_sum_that_is_compiled_has_a_factor_of_its_own():
    """torch 2.13's inductor takes `torch.add(x, a @ b, alpha=0.5)` for `x + a @ b`; no other
    backend does.
    """
    torch.compiler.reset()
    model, multipliers, ids, _ = case("llama-qk", None)
    sums = []

    def backend(graph, inputs):
        sums.extend(node for node in graph.graph.nodes if "add" in str(node.target))
        return graph.forward

    compiled = torch.compile(model, backend=backend, fullgraph=True)
    torch.testing.assert_close(compiled(ids, multipliers), model(ids, multipliers))
    assert len(sums) >= 4 and not [node for node in sums if "alpha" in node.kwargs]
