"""Every slot gets the same bits of an activation, whichever slot it is, however many threads share
the work.
"""

from functools import partial

import pytest
import torch
from torch.nn import functional

from proxies.model.decoder import slotwise

GELU = partial(functional.gelu, approximate="tanh")


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def slots_alike(function, x_NF, num_slots):
    """Whether all slots of one input have one output and one gradient."""
    x_KNF = x_NF.expand(num_slots, *x_NF.shape).clone().requires_grad_()
    y_KNF = function(x_KNF)
    y_KNF.sum().backward()
    return all(
        torch.equal(each[0], each[k]) for each in (y_KNF, x_KNF.grad) for k in range(num_slots)
    )


@pytest.mark.parametrize("function", [functional.silu, GELU])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(
    ("num_threads", "num_slots", "shape"),
    [(1, 3, (52, 33)), (2, 5, (500, 86)), (4, 3, (256, 171))],
)
def test_a_slot_is_the_same_wherever_vectors_and_threads_end(
    threads, function, dtype, num_threads, num_slots, shape
):
    threads(num_threads)
    x_NF = (3 * torch.randn(shape, generator=torch.Generator().manual_seed(0))).to(dtype)
    assert slots_alike(partial(slotwise, function), x_NF, num_slots)
    assert torch.equal(slotwise(function, x_NF), function(x_NF))


def test_a_function_that_rounds_otherwise_at_the_end_of_its_input_is_made_alike(threads):
    # Planted: torch may do this, where whole vectors end, and does on some processors and not on
    # others.
    def uneven(x_NF):
        scale = torch.ones_like(x_NF)
        scale.view(-1)[-1] = 1 + 2**-20
        return x_NF * scale

    threads(1)
    x_NF = torch.randn((52, 33), generator=torch.Generator().manual_seed(0))
    assert not slots_alike(uneven, x_NF, 3)
    assert slots_alike(partial(slotwise, uneven), x_NF, 3)
