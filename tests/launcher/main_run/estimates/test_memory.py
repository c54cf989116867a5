"""Tests of the estimated memory of a rank against torch's own memory tracker.

The tracker runs one training step on fake tensors, which have shapes but hold no data.
"""

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from forerun._launcher.main_run.estimates.main_run import compute_kept_bytes, estimate_memory
from forerun._launcher.main_run.estimates.reference_tables import MODELS
from forerun._launcher.main_run.frozen.frozen import Parallelism
from forerun._launcher.main_run.trainer.ranks import build_device_mesh
from forerun._proxies.core.flops import count_params
from forerun._proxies.core.shape import Shape
from forerun._proxies.model import rotary
from forerun._proxies.model.decoder import Block, Decoder, Multipliers
from forerun._proxies.model.loss import compute_token_loss


def make_shape(layers, width, heads, kv_heads, ffn, vocab, seq_len, **more):
    """Return a shape, with short names of the fields that every test sets."""
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


LARGE_VOCABULARY = make_shape(
    layers=4, width=512, heads=8, kv_heads=8, ffn=2048, vocab=32_000, seq_len=512
)
SMALL_VOCABULARY = make_shape(
    layers=6, width=512, heads=8, kv_heads=2, ffn=2048, vocab=1000, seq_len=1024
)
FEW_TOKENS = make_shape(
    layers=4, width=1024, heads=16, kv_heads=16, ffn=4096, vocab=50_000, seq_len=64
)


@contextlib.contextmanager
def fake_ranks(count):
    """A process group of fake ranks; the cache of rotary tables is cleared around it."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=count)
    rotary._compute_tables.cache_clear()
    try:
        yield
    finally:
        dist.destroy_process_group()
        rotary._compute_tables.cache_clear()  # The cached tables are fake tensors.


def measure_peak(shape, degrees, precision, num_sequences, num_microbatches):
    """Return the peak bytes of one training step on one of the ranks, as torch tracks them.

    The optimizer has states from an earlier step. The model is sharded only if there are several
    ranks.
    """
    policy = MixedPrecisionPolicy()
    if precision == "bfloat16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    with fake_ranks(degrees.num_ranks):
        mesh = build_device_mesh(degrees, "cpu")
        with FakeTensorMode():
            # The decoder takes a bool, or the word "selective".
            name = degrees.activation_checkpointing
            checkpointing = {"none": False, "full": True}.get(name, name)
            is_sharded = degrees.num_ranks > 1
            bfloat16 = torch.bfloat16 if precision == "bfloat16" else None
            model = Decoder(
                shape,
                device="meta" if is_sharded else "cpu",
                checkpointing=checkpointing,
                compute=None if is_sharded else bfloat16,
            )
            if is_sharded:
                for module in (*model.layers, model):
                    fully_shard(module, mesh=mesh, mp_policy=policy)
                model.to_empty(device="cpu")
            optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter)
            optimizer.step()
            optimizer.zero_grad()
            if is_sharded:
                tracker = FSDPMemTracker(model, optimizer)
                tracker.track_inputs(())
            else:
                tracker = MemTracker()
                tracker.track_external(model, optimizer)
            ids = torch.zeros(num_sequences, shape.seq_len, dtype=torch.long)
            multipliers = Multipliers(attention=0.1, output=0.5, embedding=2.0, residual=0.5)
            with tracker:
                for microbatch in range(num_microbatches):
                    if microbatch > 0:
                        tracker.reset_mod_stats()
                    compute_token_loss(model(ids, multipliers), ids).backward()
            snapshot = tracker.get_tracker_snapshot("peak")
            (peak,) = (
                totals["Total"] for device, totals in snapshot.items() if device.type == "cpu"
            )
            return peak


@pytest.mark.parametrize(
    ("shape", "num_shards", "num_sequences", "checkpointing", "precision", "num_microbatches"),
    [
        (LARGE_VOCABULARY, 4, 2, "selective", "bfloat16", 2),
        (SMALL_VOCABULARY, 4, 2, "full", "bfloat16", 1),
        (FEW_TOKENS, 2, 1, "none", "bfloat16", 2),
        (SMALL_VOCABULARY, 1, 2, "none", "bfloat16", 2),
        (LARGE_VOCABULARY, 1, 2, "full", "float32", 1),
    ],
)
def test_estimate_agrees_with_torchs_tracker(
    shape, num_shards, num_sequences, checkpointing, precision, num_microbatches
):
    degrees = Parallelism(data_parallel_shard=num_shards, activation_checkpointing=checkpointing)
    estimate = estimate_memory(
        shape, degrees, precision, num_sequences, num_microbatches, optimizer="adamw"
    )
    assert estimate.total_bytes == pytest.approx(
        measure_peak(shape, degrees, precision, num_sequences, num_microbatches), rel=0.1
    )


@pytest.mark.slow
@pytest.mark.parametrize(("checkpointing", "gib"), [("none", 78.3), ("full", 27.2)])
def test_estimate_of_llama_3_8b_on_eight_ranks(checkpointing, gib):
    """`gib` is the estimate when the test was written; torch's tracker agrees within 1 %."""
    shape = MODELS["llama-3-8b"].shape
    degrees = Parallelism(data_parallel_shard=8, activation_checkpointing=checkpointing)
    estimate = estimate_memory(shape, degrees, "bfloat16", optimizer="adamw")
    assert estimate.total_bytes == pytest.approx(
        measure_peak(shape, degrees, "bfloat16", num_sequences=1, num_microbatches=1), rel=0.01
    )
    assert estimate.total_bytes / 2**30 == pytest.approx(gib, abs=0.1)


@pytest.mark.parametrize(
    ("family", "qk_norm", "dtype"),
    [("llama", False, torch.bfloat16), ("gpt2", True, torch.float32)],
)
def test_kept_bytes_of_a_block_equal_what_autograd_saves(family, qk_norm, dtype):
    """The kept bytes are those of the activations that a block keeps for its backward pass.

    The difference between two batch sizes leaves out the rotary tables, which do not grow with it.
    """
    shape = make_shape(
        layers=1,
        width=128,
        heads=8,
        kv_heads=4,
        ffn=256,
        vocab=100,
        seq_len=32,
        family=family,
        qk_norm=qk_norm,
    )

    def measure_saved_bytes(num_sequences):
        block = Block(shape, None, None).to(dtype)
        parameter_pointers = {p.untyped_storage().data_ptr() for p in block.parameters()}
        storage_bytes, alive = {}, []

        def pack(tensor):
            alive.append(tensor)  # An address could be used twice if a tensor were freed.
            storage = tensor.untyped_storage()
            storage_bytes[storage.data_ptr()] = storage.nbytes()
            return tensor

        x_ND = torch.randn(num_sequences * shape.seq_len, shape.width, dtype=dtype).requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            block(x_ND, 1.0)
        return sum(
            size for pointer, size in storage_bytes.items() if pointer not in parameter_pointers
        )

    per_token = (measure_saved_bytes(3) - measure_saved_bytes(1)) / (2 * shape.seq_len)
    assert compute_kept_bytes(shape, "none", dtype.itemsize) == pytest.approx(per_token)


def test_every_degree_of_parallelism_but_replication_divides_the_memory():
    shape = MODELS["llama-3-70b"].shape
    sharded = estimate_memory(
        shape, Parallelism(data_parallel_shard=8), "bfloat16", optimizer="adamw"
    )
    with_tensor = estimate_memory(
        shape, Parallelism(data_parallel_shard=8, tensor=8), "bfloat16", optimizer="adamw"
    )
    assert with_tensor.total_bytes == pytest.approx(sharded.total_bytes / 8, rel=1e-3)
    with_context = estimate_memory(
        shape, Parallelism(data_parallel_shard=8, context=4), "bfloat16", optimizer="adamw"
    )
    # The peak is at another moment of the step, so the activations do not divide exactly.
    assert with_context.activations_bytes == pytest.approx(sharded.activations_bytes / 4, rel=0.01)
    assert with_context.weights_bytes == pytest.approx(sharded.weights_bytes / 4)
    # A float32 weight has 4 bytes.
    assert sharded.weights_bytes == pytest.approx(4 * count_params(shape).total / 8, rel=1e-6)
    replicas = estimate_memory(
        shape,
        Parallelism(data_parallel_shard=8, data_parallel_replicate=4),
        "bfloat16",
        optimizer="adamw",
    )
    assert replicas == sharded


def test_first_pipeline_stage_keeps_the_microbatches_in_flight():
    """The first of 8 stages keeps the activations of 8 microbatches, with the 1F1B schedule.

    The stage has an eighth of the layers. So it keeps about as much as all layers together keep of
    one microbatch.
    """
    shape = MODELS["llama-3-70b"].shape
    without_stages = estimate_memory(
        shape, Parallelism(data_parallel_shard=8), "bfloat16", num_microbatches=8, optimizer="adamw"
    )
    staged = estimate_memory(
        shape,
        Parallelism(data_parallel_shard=8, pipeline=8),
        "bfloat16",
        num_microbatches=8,
        optimizer="adamw",
    )
    kept_bytes = compute_kept_bytes(shape, "none", torch.bfloat16.itemsize)
    assert staged.activations_bytes == pytest.approx(
        shape.num_layers * shape.seq_len * kept_bytes, rel=0.05
    )
    # The first stage has an eighth of the layers, and the embedding.
    assert staged.weights_bytes < 0.15 * without_stages.weights_bytes
