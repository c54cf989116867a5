"""Tests of slotwise activations: every slot of a bank gets the same bits for the same input.

A bank trains several trials as one batched model, each in its slot. Torch may round differently at
the end of a vector or of a thread's share of the work. Suffixes of tensors name their dimensions:
K slots, N tokens, and F features.
"""

from functools import partial

import pytest
import torch
from torch.nn import functional

from forerun._proxies.model.layers import apply_slotwise

GELU = partial(functional.gelu, approximate="tanh")


@pytest.fixture
def restored_threads():
    """Restore the number of threads after the test."""
    num_threads = torch.get_num_threads()
    yield
    torch.set_num_threads(num_threads)


def has_equal_slots(function, x_NF, num_slots):
    """Return whether slots with equal inputs have equal outputs and gradients."""
    x_KNF = x_NF.expand(num_slots, *x_NF.shape).clone().requires_grad_()
    y_KNF = function(x_KNF)
    y_KNF.sum().backward()
    for values_KNF in (y_KNF, x_KNF.grad):
        if not all(torch.equal(values_KNF[0], values_NF) for values_NF in values_KNF):
            return False
    return True


@pytest.mark.parametrize("function", [functional.silu, GELU])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(
    ("num_threads", "num_slots", "shape"),
    # Odd sizes, so that vectors and shares of threads end inside of slots
    [(1, 3, (52, 33)), (2, 5, (500, 86)), (4, 3, (256, 171))],
)
@pytest.mark.usefixtures("restored_threads")
def test_slots_are_equal_wherever_vectors_and_threads_end(
    function, dtype, num_threads, num_slots, shape
):
    torch.set_num_threads(num_threads)
    x_NF = (3 * torch.randn(shape, generator=torch.Generator().manual_seed(0))).to(dtype)
    assert has_equal_slots(partial(apply_slotwise, function), x_NF, num_slots)
    assert torch.equal(apply_slotwise(function, x_NF), function(x_NF))


@pytest.mark.usefixtures("restored_threads")
def test_function_that_rounds_differently_at_the_end_gives_equal_slots():
    """Some processors round differently where a vector ends. The test plants such a rounding.

    The planted function changes the last element of its whole input. Slotwise, each slot is an
    input of its own, so every slot changes in the same way.
    """

    def round_last_differently(x_NF):
        scale = torch.ones_like(x_NF)
        scale.view(-1)[-1] = 1 + 2**-20
        return x_NF * scale

    torch.set_num_threads(1)
    x_NF = torch.randn((52, 33), generator=torch.Generator().manual_seed(0))
    assert not has_equal_slots(round_last_differently, x_NF, 3)
    assert has_equal_slots(partial(apply_slotwise, round_last_differently), x_NF, 3)
