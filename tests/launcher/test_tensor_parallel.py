"""A model split over ranks is the whole model: same curve up to rounding, same names, same checkpoints."""

from __future__ import annotations

import dataclasses
import shutil

import pytest
from main_run import QUIET_TORCH, spec_like, split, tiny_decision
from rank_runs import CUT

from launcher.base import metrics
from launcher.frozen.frozen import Parallelism
from launcher.frozen.launch_file import write_launch
from launcher.supervisor.launch import launch
from launcher.trainer import tensor_parallel
from launcher.trainer.rank import Options, _problems, run
from proxies.data.tokens import TokenStore
from proxies.training.solo import Solo

pytestmark = QUIET_TORCH


def lines_of(run_dir):
    return [line for line in metrics.read(run_dir) if "train_loss_nats" in line]


def assert_is_the_proxys(run_dir, outcome, spec, corpus):
    solo = Solo(TokenStore(corpus), device="cpu")
    solo.admit(0, spec)
    ((_, result, curve),) = solo.advance(100)
    lines = lines_of(run_dir)
    assert [line["train_loss_nats"] for line in lines] == pytest.approx(list(curve.train_loss_nats), abs=1e-5)
    assert [line["grad_norm"] for line in lines] == pytest.approx(list(curve.grad_norm), rel=1e-5)
    assert lines[-1]["tokens"] == result.tokens
    assert outcome.validation_loss_nats == pytest.approx(result.loss_nats, abs=1e-5)


def test_two_ranks_that_split_the_model_train_as_the_proxy_and_one_can_go_on(two_ranks, one_rank, corpus, tmp_path):
    """The two stopped at step 6 and resumed, and so did the one after them."""
    spec, run_dir = spec_like(corpus, qk_norm=True), two_ranks / "split" / "run"
    assert_is_the_proxys(run_dir, metrics.read_ending(run_dir), spec, corpus)

    shutil.copytree(two_ranks / "split" / "cut", tmp_path / "one")
    assert metrics.read_ending(tmp_path / "one").step == CUT
    config = write_launch(tmp_path / "frozen", split(spec, corpus, data_parallel_shard=1, tensor=2))
    ending = run(Options(config=config, data=corpus, out=tmp_path / "one", allow_world_size=True))
    assert_is_the_proxys(tmp_path / "one", ending, spec, corpus)
    assert lines_of(tmp_path / "one") != lines_of(run_dir)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "degrees"),
    [
        ({"family": "gpt2", "num_kv_heads": 2}, {"data_parallel_shard": 2, "tensor": 2}),
        ({"tied": True, "num_kv_heads": 2}, {"data_parallel_shard": 1, "tensor": 2}),
        ({"qk_norm": True}, {"data_parallel_shard": 1, "data_parallel_replicate": 2, "tensor": 2}),
    ],
    ids=["biases and positions, sharded too", "tied", "with replicas"],
)
def test_every_family_and_sharding_trains_as_the_proxy(corpus, tmp_path, shape, degrees):
    spec = spec_like(corpus, **shape)
    config = write_launch(tmp_path / "frozen", split(spec, corpus, **degrees))
    outcome = launch(config, corpus, tmp_path / "run")
    assert (outcome.event, outcome.step) == ("finished", 12)
    assert_is_the_proxys(tmp_path / "run", outcome, spec, corpus)


@pytest.mark.slow  # the compiler takes a minute
def test_compiled_blocks_that_are_split_train_as_the_proxy(two_ranks, corpus, tmp_path):
    spec = spec_like(corpus, qk_norm=True)
    decision = split(spec, corpus, data_parallel_shard=1, tensor=2)
    config = write_launch(tmp_path / "frozen", dataclasses.replace(decision, compiled=True))
    outcome = launch(config, corpus, tmp_path / "run")
    assert (outcome.event, outcome.step) == ("finished", 12), outcome
    assert_is_the_proxys(tmp_path / "run", outcome, spec, corpus)
    compiled, eager = lines_of(tmp_path / "run"), lines_of(two_ranks / "split" / "run")
    norms = [[line["grad_norm"] for line in lines] for lines in (compiled, eager)]
    assert norms[0] != norms[1], "it was compiled: other kernels round otherwise"


def test_what_the_ranks_cannot_share_evenly_is_refused(one_rank, corpus, tmp_path):
    decision = dataclasses.replace(
        tiny_decision(corpus), parallelism=Parallelism(data_parallel_shard=1, tensor=3, pipeline=2)
    )
    config = write_launch(tmp_path / "frozen", decision)
    ending = run(Options(config=config, data=corpus, out=tmp_path / "run", allow_world_size=True))
    assert (ending.event, ending.exit_code) == ("refused", 2)
    for name, count in (("num_heads", 2), ("num_kv_heads", 2), ("ffn_width", 64), ("vocab_size", 256)):
        assert f"tensor = 3 does not divide {name} = {count}" in ending.reason
    assert "pipeline = 2, context = 1" in ending.reason
    assert tensor_parallel.indivisible(decision.shape, 2) == []


def test_ranks_that_split_the_model_need_no_sequences_of_their_own(corpus, tmp_path):
    spec = dataclasses.replace(spec_like(corpus), batch_tokens=2 * 32)
    decision = split(spec, corpus, data_parallel_shard=2, tensor=2)
    options = Options(config=tmp_path, data=corpus, out=tmp_path, allow_world_size=True)
    store = TokenStore(corpus)
    assert _problems(decision, store, options, 4) == []
    (problem,) = _problems(decision, store, options, 8)
    assert problem == "batch_tokens = 64 does not give 8 ranks whole sequences of 32"
