"""Bytes of a rank against torch's own tracker, on our model under fake tensors."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from launcher.base.reference import MODELS
from launcher.estimates.main_run import kept_per_token, memory_per_rank
from launcher.frozen.frozen import Parallelism
from launcher.trainer.ranks import device_mesh
from proxies.core.flops import count_params
from proxies.core.shape import Shape
from proxies.model import decoder
from proxies.model.decoder import Block, Decoder, Multipliers
from proxies.model.loss import token_loss


def shape_of(layers, width, heads, kv_heads, ffn, vocab, seq_len, **more):
    return Shape(
        num_layers=layers,
        width=width,
        num_heads=heads,
        num_kv_heads=kv_heads,
        ffn_width=ffn,
        vocab_size=vocab,
        seq_len=seq_len,
        **more,
    )


LARGE_VOCABULARY = shape_of(4, 512, 8, 8, 2048, 32_000, 512)
SMALL_VOCABULARY = shape_of(6, 512, 8, 2, 2048, 1000, 1024)
FEW_TOKENS = shape_of(4, 1024, 16, 16, 4096, 50_000, 64)


@contextlib.contextmanager
def fake_ranks(count):
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=count)
    decoder._rotary_tables.cache_clear()
    try:
        yield
    finally:
        dist.destroy_process_group()
        decoder._rotary_tables.cache_clear()  # of fake tensors: nobody else may have them


def tracked(shape, degrees, precision, num_sequences, num_microbatches):
    """The peak that torch sees over a step's passes, moments there already; bytes. One rank shards
    nothing.
    """
    policy = MixedPrecisionPolicy()
    if precision == "bfloat16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    with fake_ranks(degrees.num_ranks):
        mesh = device_mesh(degrees, "cpu")
        with FakeTensorMode():
            kind = degrees.activation_checkpointing
            checkpointing = {"none": False, "full": True}.get(kind, kind)
            alone, bfloat16 = (
                degrees.num_ranks == 1,
                torch.bfloat16 if precision == "bfloat16" else None,
            )
            model = Decoder(
                shape,
                device="cpu" if alone else "meta",
                checkpointing=checkpointing,
                compute=bfloat16 if alone else None,
            )
            for block in () if alone else (*model.layers, model):
                fully_shard(block, mesh=mesh, mp_policy=policy)
            if not alone:
                model.to_empty(device="cpu")
            optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter)
            optimizer.step()
            optimizer.zero_grad()
            if alone:
                tracker = MemTracker()
                tracker.track_external(model, optimizer)
            else:
                tracker = FSDPMemTracker(model, optimizer)
                tracker.track_inputs(())
            ids = torch.zeros(num_sequences, shape.seq_len, dtype=torch.long)
            numbers = Multipliers(attention=0.1, output=0.5, embedding=2.0, residual=0.5)
            with tracker:
                for number in range(num_microbatches):
                    if number:
                        tracker.reset_mod_stats()
                    token_loss(model(ids, numbers), ids).backward()
            (peak,) = (
                v["Total"]
                for d, v in tracker.get_tracker_snapshot("peak").items()
                if d.type == "cpu"
            )
            return peak


@pytest.mark.parametrize(
    ("shape", "shards", "sequences", "checkpointing", "precision", "passes"),
    [
        (LARGE_VOCABULARY, 4, 2, "selective", "bfloat16", 2),
        (SMALL_VOCABULARY, 4, 2, "full", "bfloat16", 1),
        (FEW_TOKENS, 2, 1, "none", "bfloat16", 2),
        (SMALL_VOCABULARY, 1, 2, "none", "bfloat16", 2),
        (LARGE_VOCABULARY, 1, 2, "full", "float32", 1),
    ],
)
def test_a_rank_holds_what_torch_tracks(shape, shards, sequences, checkpointing, precision, passes):
    degrees = Parallelism(data_parallel_shard=shards, activation_checkpointing=checkpointing)
    found = memory_per_rank(shape, degrees, precision, sequences, passes, optimizer="adamw")
    assert found.total_bytes == pytest.approx(
        tracked(shape, degrees, precision, sequences, passes), rel=0.1
    )


@pytest.mark.slow
@pytest.mark.parametrize(("checkpointing", "gib"), [("none", 78.3), ("full", 27.2)])
def test_llama_3_8b_on_eight_ranks(checkpointing, gib):
    shape = MODELS["llama-3-8b"].shape
    degrees = Parallelism(data_parallel_shard=8, activation_checkpointing=checkpointing)
    found = memory_per_rank(shape, degrees, "bfloat16", optimizer="adamw")
    assert found.total_bytes == pytest.approx(tracked(shape, degrees, "bfloat16", 1, 1), rel=0.01)
    assert found.total_bytes / 2**30 == pytest.approx(gib, abs=0.1)


@pytest.mark.parametrize(
    ("family", "qk_norm", "dtype"),
    [("llama", False, torch.bfloat16), ("gpt2", True, torch.float32)],
)
def test_a_block_keeps_what_autograd_saves(family, qk_norm, dtype):
    """To the byte, but for the rotary tables, which do not grow with the batch."""
    shape = shape_of(1, 128, 8, 4, 256, 100, 32, family=family, qk_norm=qk_norm)

    def saved(num_sequences):
        block = Block(shape, None, None).to(dtype)
        own = {p.untyped_storage().data_ptr() for p in block.parameters()}
        seen, alive = {}, []

        def pack(tensor):
            alive.append(tensor)
            seen[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        x_ND = torch.randn(num_sequences * shape.seq_len, shape.width, dtype=dtype).requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            block(x_ND, 1.0)
        return sum(size for pointer, size in seen.items() if pointer not in own)

    per_token = (saved(3) - saved(1)) / (2 * shape.seq_len)
    assert kept_per_token(shape, "none", dtype.itemsize) == pytest.approx(per_token)


def test_every_axis_takes_its_share():
    shape = MODELS["llama-3-70b"].shape
    alone = memory_per_rank(
        shape, Parallelism(data_parallel_shard=8), "bfloat16", optimizer="adamw"
    )
    split = memory_per_rank(
        shape, Parallelism(data_parallel_shard=8, tensor=8), "bfloat16", optimizer="adamw"
    )
    assert split.total_bytes == pytest.approx(alone.total_bytes / 8, rel=1e-3)
    cut = memory_per_rank(
        shape, Parallelism(data_parallel_shard=8, context=4), "bfloat16", optimizer="adamw"
    )
    # at another moment
    assert cut.activations_bytes == pytest.approx(alone.activations_bytes / 4, rel=0.01)
    assert cut.weights_bytes == pytest.approx(alone.weights_bytes / 4)
    assert alone.weights_bytes == pytest.approx(4 * count_params(shape).total / 8, rel=1e-6)
    replicas = memory_per_rank(
        shape,
        Parallelism(data_parallel_shard=8, data_parallel_replicate=4),
        "bfloat16",
        optimizer="adamw",
    )
    assert replicas == alone


def test_the_first_stage_holds_the_micro_batches_in_flight():
    """1F1B: as many as there are stages, each a share of the layers: together about what one rank
    would keep.
    """
    shape = MODELS["llama-3-70b"].shape
    alone = memory_per_rank(
        shape, Parallelism(data_parallel_shard=8), "bfloat16", num_microbatches=8, optimizer="adamw"
    )
    staged = memory_per_rank(
        shape,
        Parallelism(data_parallel_shard=8, pipeline=8),
        "bfloat16",
        num_microbatches=8,
        optimizer="adamw",
    )
    blocks = 80 * 8192 * kept_per_token(shape, "none", 2)
    assert staged.activations_bytes == pytest.approx(blocks, rel=0.05)
    assert staged.weights_bytes < 0.15 * alone.weights_bytes
