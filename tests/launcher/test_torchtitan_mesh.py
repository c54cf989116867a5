"""Degrees of the torchtitan export: what is refused, what a rank's share is, and which groups a pipeline stage has."""

import dataclasses
import re
import types

import pytest
from export_case import SHAPE, assert_refused, wide_decision
from exported_program import imported

from launcher.exporters.trainers import torchtitan
from launcher.frozen import frozen


@pytest.mark.parametrize(
    ("shape", "mesh", "said"),
    [
        ({}, {"tensor": 4}, "tensor = 4 does not divide num_kv_heads = 2"),
        ({"seq_len": 33}, {"tensor": 2}, "seq_len = 33 is no multiple of tensor = 2"),
        ({"qk_norm": True}, {"tensor": 2}, "tensor = 2 with shape.qk_norm"),
        ({"tied": True}, {"pipeline": 2, "microbatch_sequences": 2}, "shape.tied"),
        ({}, {"pipeline": 2}, "pipeline = 2 with 1 microbatches"),
        ({}, {"pipeline": 3, "microbatch_sequences": 2}, "pipeline = 3 for 2 layers"),
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
    [({}, 16, 16), ({"data_parallel_replicate": 2}, 8, 8), ({"pipeline": 4, "microbatch_sequences": 2}, 16, 2)],
)
def test_degrees_share_out_the_batch_among_data_ranks_alone(mesh, share, microbatch):
    degrees = frozen.Parallelism(data_parallel_shard=4, tensor=2, **mesh)
    assert torchtitan.rank_sequences(degrees, 64) == (share, microbatch)


def test_each_stages_optimizer_takes_the_patterns_it_holds_parameters_of(tmp_path, manifest):
    """torchtitan takes a pattern that matches nothing on a stage for dead; ours hands it those that match."""
    mesh = frozen.Parallelism(data_parallel_shard=1, pipeline=2, microbatch_sequences=2)
    torchtitan.export(wide_decision(manifest, parallelism=mesh), tmp_path)
    module = imported(tmp_path, torchtitan.MODULE)
    module.OptimizersContainer._build_param_groups = staticmethod(lambda model, groups, _: groups)
    build = module.GuardedOptimizers._build_param_groups
    groups = [types.SimpleNamespace(pattern=g["pattern"]) for g in module.FROZEN.groups]
    names = list(torchtitan.parameter_names(SHAPE).values())
    first = [n for n in names if n.startswith(("tok_embeddings", "layers.0."))]
    last = [n for n in names if n not in first]
    for stage in (first, last):
        model = types.SimpleNamespace(named_parameters=lambda stage=stage: [(n, None) for n in stage])
        taken = build(model, groups, {})
        assert len(taken) < len(groups)
        assert all(sum(bool(re.search(g.pattern, n)) for g in taken) == 1 for n in stage)
