"""Plans of parallelism: they divide, they fit, and torch shards them."""

import dataclasses

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from launcher.base.reference import MODELS
from launcher.estimates.dry_shard import dry_shard
from launcher.estimates.layout import Layout
from launcher.estimates.parallelism import NoParallelismError, hold_layout, plan_parallelism
from proxies.core.checks import SpecError
from proxies.core.flops import count_params
from proxies.core.shape import Shape

SEVENTY = MODELS["llama-3-70b"].shape
EIGHT = MODELS["llama-3-8b"].shape
SMALL = Shape(num_layers=4, width=128, num_heads=8, num_kv_heads=4, ffn_width=256, vocab_size=512, seq_len=64)


@pytest.mark.parametrize(
    ("name", "batch_tokens", "num_gpus", "memory_gb"),
    [
        ("llama-3-8b", 2**22, 8, 80), ("llama-3-8b", 2**22, 512, 80), ("llama-3-70b", 2**22, 256, 80),
        ("llama-3-70b", 2**22, 64, 141), ("llama-3.1-405b", 2**24, 16_384, 80), ("llama-3.1-405b", 2**24, 512, 80),
        ("gpt-2", 2**19, 8, 24),
    ],
)  # fmt: skip
def test_a_plan_divides_and_fits(name, batch_tokens, num_gpus, memory_gb):
    shape = MODELS[name].shape
    found = plan_parallelism(shape, batch_tokens, num_gpus, memory_gb, "bfloat16")
    layout = found.layout
    assert layout.num_ranks == num_gpus
    assert layout.problems(shape, batch_tokens) == []
    assert layout.tensor <= 8
    assert found.memory.total_bytes <= 0.9e9 * memory_gb
    assert found.num_microbatches * layout.microbatch_sequences * layout.data == batch_tokens // shape.seq_len
    assert "GB at the fullest moment" in found.reasons[0]


def test_what_does_not_fit_is_recomputed_or_split():
    """8B on 8 H100 keeps too much without recomputing (78 GiB); a small model needs nothing."""
    found = plan_parallelism(EIGHT, 2**22, 8, 80, "bfloat16")
    assert (found.layout.tensor, found.layout.checkpointing) == (1, "selective")
    assert plan_parallelism(MODELS["gpt-2"].shape, 2**19, 8, 80, "bfloat16").layout.checkpointing == "none"
    assert plan_parallelism(EIGHT, 2**22, 8, 192, "bfloat16").layout.checkpointing == "none"


def test_more_ranks_than_sequences_want_other_axes():
    """2,048 sequences on 16,384 GPUs: eight ranks share each."""
    layout = plan_parallelism(MODELS["llama-3.1-405b"].shape, 2**24, 16_384, 80, "bfloat16").layout
    assert layout.tensor * layout.pipeline * layout.context >= 8


def test_a_shape_that_no_parallelism_fits_is_refused_with_the_nearest():
    with pytest.raises(NoParallelismError, match=r"the least that a rank can hold is 160\.\d GB"):
        plan_parallelism(EIGHT, 2**22, 1, 80, "bfloat16")
    with pytest.raises(NoParallelismError) as refused:
        plan_parallelism(EIGHT, 2**22, 7, 80, "bfloat16")
    assert "num_gpus = 7: no product of degrees" in refused.value.problems[0]
    assert "no whole sequences of 8192 for 7" in refused.value.problems[1]


def test_every_axis_says_what_it_does_not_divide():
    layout = Layout(shard=3, tensor=3, pipeline=5, context=5, microbatch_sequences=2)
    said = layout.problems(SMALL, 64 * 8)
    names = (
        "num_kv_heads = 4",
        "ffn_width = 256",
        "vocab_size = 512",
        "num_layers = 4",
        "seq_len = 64",
        "batch_tokens",
    )
    assert len(said) == len(names)
    assert all(any(name in one for one in said) for name in names)
    tied = dataclasses.replace(SMALL, tied=True)
    assert "are one matrix" in Layout(pipeline=2).problems(tied, 64 * 8)[0]
    assert "has 1 micro-batches" in Layout(pipeline=2).problems(SMALL, 64)[0]
    with pytest.raises(SpecError, match="tensor = 0"):
        Layout(tensor=0)


def test_a_settled_layout_is_held_against_the_same():
    assert hold_layout(EIGHT, 2**22, Layout(shard=8, checkpointing="full"), 80, "bfloat16").layout.shard == 8
    with pytest.raises(NoParallelismError, match=r"8\d\.\d GB a rank, 72\.0 GB are free"):
        hold_layout(EIGHT, 2**22, Layout(shard=8), 80, "bfloat16")
    with pytest.raises(NoParallelismError, match="no whole sequences"):
        hold_layout(EIGHT, 2**22, Layout(shard=7), 80, "bfloat16")


@pytest.mark.parametrize(
    "layout",
    [Layout(shard=4), Layout(shard=2, replicate=2), Layout(shard=2, tensor=4), Layout(shard=2, context=2, tensor=2),
     Layout(shard=2, replicate=2, tensor=2)],
)  # fmt: skip
def test_torch_shards_it_so(layout):
    """A rank's share to the last but for norms, which the tensor axis does not split, and rounding up to whole rows."""
    (local,) = dry_shard(SMALL, layout).local_parameters
    shards = layout.shard * layout.context
    norms = (2 * SMALL.num_layers + 1) * SMALL.width
    assert local == (count_params(SMALL).total - norms) / shards / layout.tensor + norms / shards


def test_stages_hold_their_layers():
    first, last = dry_shard(SMALL, Layout(shard=2, pipeline=2)).local_parameters
    table, params = SMALL.vocab_size * SMALL.width, count_params(SMALL)
    block = (params.non_embedding - SMALL.width) // 4
    assert first == (table + 2 * block) // 2
    assert last == (table + 2 * block + SMALL.width) // 2


def test_torchs_refusal_is_ours():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        with pytest.raises(NoParallelismError, match="torch cannot shard it: trying to initialize"):
            dry_shard(SMALL, Layout(shard=2))
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
def test_seventy_billion_on_256_ranks_in_seconds():
    found = plan_parallelism(SEVENTY, 2**22, 256, 80, "bfloat16")
    held = dry_shard(SEVENTY, found.layout)
    assert held.num_ranks == 256
    assert held.num_parameters == 70_553_706_496
    assert 4 * held.local_parameters[0] == pytest.approx(found.memory.weights_bytes, rel=1e-2)
    assert held.seconds < 60
