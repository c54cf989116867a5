"""Degrees of the torchtitan export: what is refused, what a rank's share is, and which groups a pipeline stage has."""

import dataclasses

import pytest
from export_case import SHAPE, assert_refused, wide_decision

from launcher.exporters.trainers import torchtitan
from launcher.frozen import frozen


@pytest.mark.parametrize(
    ("shape", "mesh", "said"),
    [
        ({}, {"tensor": 4}, "tensor = 4 does not divide num_kv_heads = 2"),
        ({"seq_len": 33}, {"tensor": 2}, "seq_len = 33 is no multiple of tensor = 2"),
        ({"qk_norm": True}, {"tensor": 2}, "tensor = 2 with shape.qk_norm"),
        ({}, {"pipeline": 2}, "pipeline = 2"),
        ({}, {"microbatch_sequences": 3}, "microbatch_sequences = 3 does not divide"),
        ({}, {"context": 2}, "context = 2"),
    ],
)
def test_a_mesh_that_torchtitan_cannot_have_is_refused(tmp_path, manifest, shape, mesh, said):
    shape = dataclasses.replace(SHAPE, **shape)
    decision = wide_decision(
        manifest,
        shape=shape,
        parallelism=frozen.Parallelism(data_parallel_shard=1, **mesh),
        batch_tokens=8 * shape.seq_len,
        num_tokens=12 * 8 * shape.seq_len,
    )
    assert_refused(torchtitan.export, decision, tmp_path / "out", said)


@pytest.mark.parametrize(
    ("mesh", "share", "microbatch"),
    [({}, 16, 16), ({"data_parallel_replicate": 2, "microbatch_sequences": 2}, 8, 2)],
)
def test_degrees_share_out_the_batch_among_data_ranks_alone(mesh, share, microbatch):
    degrees = frozen.Parallelism(data_parallel_shard=4, tensor=2, **mesh)
    assert torchtitan.rank_sequences(degrees, 64) == (share, microbatch)
