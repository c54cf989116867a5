"""Tests of the decoder in bfloat16 and under torch.compile: results, and operations it may use."""

import dataclasses

import pytest
import torch
from model_cases import FAMILIES, draw_token_ids, fill_parameters
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from forerun._proxies.core.numbers import ForwardNumbers
from forerun._proxies.model.decoder import Decoder, Multipliers
from forerun._proxies.model.loss import compute_token_loss
from forerun._proxies.model.rotary import rotate

K = 3
"""Number of trials in a bank, which trains them as one batched model."""
MULTIPLIERS = Multipliers(embedding=2.0, attention=0.3, residual=0.5, output=0.5)
MULTIPLIERS_OF_BANK = Multipliers(
    **{
        field.name: torch.full((K, 1, 1), getattr(MULTIPLIERS, field.name))
        for field in dataclasses.fields(ForwardNumbers)
    }
)
"""The same multipliers for each trial of a bank."""
FAMILIES_AND_TRIALS = [("llama", None), ("llama-qk", K), ("gpt2", K), ("gpt2-qk", None)]
"""Family of a model, and its number of trials; None if it is not a bank."""


def build_case(family, num_trials, num_layers=2, **options):
    """Return a float32 model, its multipliers, token ids and targets.

    Tests that compile use one layer, because the time to compile grows with the layers.
    """
    shape = FAMILIES[family].at_depth(num_layers)
    model = fill_parameters(Decoder(shape, num_trials=num_trials, **options), dtype=torch.float32)
    size = (2,) if num_trials is None else (num_trials, 2)
    multipliers = MULTIPLIERS if num_trials is None else MULTIPLIERS_OF_BANK
    return model, multipliers, draw_token_ids(*size), draw_token_ids(*size, seed=2)


def compute_loss_and_gradients(model, forward, multipliers, ids, targets):
    """Return the loss of `forward`, which is the model or its compiled form, and the gradients."""
    loss = compute_token_loss(forward(ids, multipliers), targets)
    loss.sum().backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    return loss.detach(), gradients


@pytest.mark.parametrize(("family", "num_trials"), FAMILIES_AND_TRIALS)
def test_bfloat16_stays_close_to_float32(family, num_trials):
    """The tests in `test_precision.py` show which operations round."""
    model, multipliers, ids, targets = build_case(family, num_trials)
    loss, gradients = compute_loss_and_gradients(model, model, multipliers, ids, targets)
    model.compute = torch.bfloat16
    rounded_loss, rounded_gradients = compute_loss_and_gradients(
        model, model, multipliers, ids, targets
    )
    torch.testing.assert_close(rounded_loss, loss, rtol=0, atol=0.02)
    assert not torch.equal(rounded_loss, loss)
    for name, expected in gradients.items():
        rounded = rounded_gradients[name]
        cosine = functional.cosine_similarity(rounded.flatten(), expected.flatten(), dim=0)
        # A key's bias adds the same to all scores of a query. Without QK-norm its true gradient is
        # zero, and what is computed is rounding error.
        is_rounding_error = name.endswith("wk.bias") and expected.abs().max() < 1e-6
        assert cosine > 0.98 or is_rounding_error, name


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_parameters_give_bfloat16_logits(family):
    """FSDP's mixed precision has parameters and activations in bfloat16.

    A product of two precisions would raise an error.
    """
    model, multipliers, ids, targets = build_case(family, None)
    loss = compute_token_loss(model(ids, multipliers), targets)
    logits = model.bfloat16()(ids, multipliers)
    assert logits.dtype == torch.bfloat16
    assert compute_token_loss(logits, targets).item() == pytest.approx(loss.item(), abs=0.03)


def test_rotary_positions_are_computed_in_float32():
    """The eight bits of bfloat16 are too few for the angles of late positions."""
    x_BTHE = torch.randn(1, 2048, 2, 16, generator=torch.Generator().manual_seed(3)).bfloat16()
    rotated, expected = rotate(x_BTHE, 2048, 2, 16), rotate(x_BTHE.double(), 2048, 2, 16)
    assert rotated.dtype == torch.float32
    torch.testing.assert_close(rotated.double(), expected, rtol=0, atol=1e-6)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(rotate(x_BTHE, 2048, 2, 16), rotated)


@pytest.mark.parametrize(
    ("family", "num_trials", "checkpointing"),
    [("llama-qk", K, True), ("gpt2", None, False)],
)
def test_model_compiles_to_one_graph_with_the_same_results(family, num_trials, checkpointing):
    torch.compiler.reset()
    model, multipliers, ids, targets = build_case(
        family, num_trials, num_layers=1, checkpointing=checkpointing
    )
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    loss, gradients = compute_loss_and_gradients(model, model, multipliers, ids, targets)
    compiled_loss, compiled_gradients = compute_loss_and_gradients(
        model, compiled, multipliers, ids, targets
    )
    torch.testing.assert_close(compiled_loss, loss, rtol=1e-6, atol=1e-6)
    for name, expected in gradients.items():
        torch.testing.assert_close(
            compiled_gradients[name], expected, rtol=1e-4, atol=1e-6, msg=name
        )


@pytest.mark.parametrize(("family", "num_trials"), [("llama-qk", K), ("gpt2", None)])
@pytest.mark.parametrize(
    # Precision to which the model casts its weights, precision of the weights, and number of
    # products per block by family
    ("compute", "weights", "num_products"),
    [
        (torch.bfloat16, torch.float32, {"llama": 6, "gpt2": 6}),
        (None, torch.float32, {"llama": 7, "gpt2": 6}),
        (None, torch.bfloat16, {"llama": 7, "gpt2": 6}),
    ],
    ids=["cast by the model", "float32", "cast by FSDP"],
)
def test_compiled_model_joins_products_of_one_input_only_if_it_casts_the_weights(
    family, num_trials, compute, weights, num_products
):
    """The gate's and the up projection's weights (w1, w3) are joined while the model casts them.

    Joined copies of weights that FSDP has cast would stay in memory until the backward pass. GPT-2
    has no gate, so nothing is joined there.
    """
    torch.compiler.reset()
    model, multipliers, ids, targets = build_case(family, num_trials, num_layers=1, compute=compute)
    model.to(weights)
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(model, backend=backend, fullgraph=True)
    loss, gradients = compute_loss_and_gradients(model, model, multipliers, ids, targets)
    compiled_loss, compiled_gradients = compute_loss_and_gradients(
        model, compiled, multipliers, ids, targets
    )

    # Count the products of the forward pass: those of each block, and that of the readout.
    count = 0
    for graph in graphs:
        for name, module in graph.named_modules():
            if hasattr(module, "graph") and "bwd" not in name:
                count += sum("matmul" in str(node.target) for node in module.graph.nodes)
    assert count == num_products[family.split("-")[0]] * model.shape.num_layers + 1

    # Compare the results.
    torch.testing.assert_close(compiled_loss, loss, rtol=0, atol=0.01)
    for name, expected in gradients.items():
        tolerance = 0.03 * float(expected.abs().max()) + 1e-4
        torch.testing.assert_close(
            compiled_gradients[name], expected, rtol=0, atol=tolerance, msg=name
        )


@pytest.mark.parametrize("num_trials", [None, K])
def test_gradients_are_accumulated_without_a_copy(num_trials):
    """Torch computes gradients of batched products transposed, and would copy them."""
    torch.compiler.reset()
    model, multipliers, ids, targets = build_case(
        "llama", num_trials, num_layers=1, compute=torch.bfloat16
    )
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    losses = compiled(ids, multipliers, targets)
    with torch.profiler.profile() as profile:
        losses.sum().backward()
    num_events = num_copies = 0
    for event in profile.events():
        parent = event.cpu_parent
        if parent is not None and parent.name.startswith("torch::autograd::AccumulateGrad"):
            num_events += 1
            num_copies += event.name in {"aten::clone", "aten::copy_"}
    assert num_events > 0 and num_copies == 0


@pytest.mark.gpu
@pytest.mark.parametrize("num_trials", [None, K])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_heads_run_on_attention_kernels_without_all_logits(dtype, num_trials):
    """Torch's math kernel, which holds all logits, is not allowed here."""
    model, multipliers, ids, targets = build_case("llama", num_trials, compute=dtype)
    expected, _ = compute_loss_and_gradients(model, model, multipliers, ids, targets)
    model.cuda()
    gpu_values = {}
    for field in dataclasses.fields(ForwardNumbers):
        value = getattr(multipliers, field.name)
        gpu_values[field.name] = value.cuda() if isinstance(value, torch.Tensor) else value
    with sdpa_kernel(
        [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION]
    ):
        loss, _ = compute_loss_and_gradients(
            model, model, Multipliers(**gpu_values), ids.cuda(), targets.cuda()
        )
    tolerance = 1e-4 if dtype == torch.float32 else 0.02
    torch.testing.assert_close(loss.cpu(), expected, rtol=0, atol=tolerance)


def test_compiled_sums_have_no_alpha():
    """The inductor of torch 2.13 compiles `torch.add(x, a @ b, alpha=0.5)` to `x + a @ b`."""
    torch.compiler.reset()
    model, multipliers, ids, _ = build_case("llama-qk", None)
    sums = []

    def backend(graph, inputs):
        sums.extend(node for node in graph.graph.nodes if "add" in str(node.target))
        return graph.forward

    compiled = torch.compile(model, backend=backend, fullgraph=True)
    torch.testing.assert_close(compiled(ids, multipliers), model(ids, multipliers))
    assert len(sums) >= 4 and not [node for node in sums if "alpha" in node.kwargs]
