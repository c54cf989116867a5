"""The trainer is held against the proxy engine, against itself resumed, and against every refusal
it promises.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import shutil

import pytest
import torch
from care_case import events, train
from functorch.compile import make_boxed_compiler
from main_run import (
    QUIET_TORCH,
    all_choices,
    by_muon,
    decision_of,
    losses,
    spec_of,
    tiny_decision,
    write_corpus,
)
from rank_runs import CUT
from torch._dynamo.backends.common import aot_autograd

from launcher.base import metrics
from launcher.base.policy import AbortPolicy, Monitoring
from launcher.frozen.frozen import Parallelism
from launcher.frozen.launch_file import write_launch
from launcher.supervisor.launch import LOG_FILE, launch
from launcher.trainer import assembly, trained_model
from launcher.trainer.rank import RankOptions, run
from launcher.trainer.training import Trainer
from proxies.core import canon
from proxies.core.spec import Numerics
from proxies.data.tokens import TokenStore, read_manifest
from proxies.model import loss
from proxies.model.decoder import Block, Decoder
from proxies.training.solo import Solo

pytestmark = QUIET_TORCH


def curve(run_dir):
    return {line["step"]: line for line in metrics.read(run_dir) if "train_loss_nats" in line}


def proxy_of(spec, corpus):
    """The result and the curve of the same run as a proxy."""
    solo = Solo(TokenStore(corpus), device="cpu")
    solo.admit(0, spec)
    ((_, result, curve),) = solo.advance(100)
    return result, curve


@pytest.fixture(scope="module")
def proxy(corpus):
    return proxy_of(spec_of(read_manifest(corpus).data_id), corpus)


@pytest.fixture(scope="module")
def alone(one_rank, corpus, tmp_path_factory):
    """An uninterrupted run of one rank: its folder and ending."""
    out = tmp_path_factory.mktemp("alone")
    return out / "run", train(tiny_decision(corpus), corpus, out)


def assert_is_the_proxys(run_dir, validation_loss_nats, proxy):
    result, curve_of_proxy = proxy
    mine = curve(run_dir)
    assert tuple(mine) == curve_of_proxy.steps
    worst = max(
        abs(a["train_loss_nats"] - b)
        for a, b in zip(mine.values(), curve_of_proxy.train_loss_nats, strict=True)
    )
    assert worst < 5e-6  # float32 rounds a loss of 5 nats at 5e-7
    for line, norm in zip(mine.values(), curve_of_proxy.grad_norm, strict=True):
        assert line["grad_norm"] == pytest.approx(norm, rel=1e-5)
    assert validation_loss_nats == pytest.approx(result.loss_nats, abs=5e-6)


def test_one_rank_trains_as_the_proxy(alone, proxy):
    run_dir, ending = alone
    assert (ending.event, ending.exit_code, ending.step) == ("finished", 0, 12)
    assert_is_the_proxys(run_dir, ending.validation_loss_nats, proxy)


def test_two_ranks_train_as_the_proxy(two_ranks, proxy):
    ending = metrics.read_ending(two_ranks / "plain" / "run")
    assert (ending.event, ending.exit_code, ending.step) == ("finished", 0, 12)
    assert_is_the_proxys(two_ranks / "plain" / "run", ending.validation_loss_nats, proxy)


@pytest.mark.parametrize(
    ("name", "exchanges"),
    # Of two blocks and the rest, over 12 steps of 4 passes; the first pass's are looked at in steps
    # 5 and 10 too.
    [
        ("small", 3 * (12 + 2)),
        ("split", 3 * 12 * 4),
        ("split replicas", 3 * (12 + 2)),
        ("replicas", 3 * 12),
    ],
)
def test_two_ranks_in_other_layouts_train_as_the_proxy(two_ranks, proxy, name, exchanges):
    run_dir = two_ranks / name / "run"
    assert_is_the_proxys(run_dir, metrics.read_ending(run_dir).validation_loss_nats, proxy)
    assert json.loads((two_ranks / "exchanged.json").read_text())[name] == exchanges


def test_each_initial_value_is_drawn_by_one_rank_of_two(two_ranks, corpus):
    drawn = [
        json.loads((two_ranks / "plain" / f"drawn-{rank}.json").read_text()) for rank in (0, 1)
    ]
    names = [
        name for name, _ in Decoder(tiny_decision(corpus).shape, device="meta").named_parameters()
    ]
    assert sorted([*drawn[0], *drawn[1]]) == sorted(names)
    assert abs(len(drawn[0]) - len(drawn[1])) <= 1


def test_two_ranks_train_as_the_proxy_by_muon_and_resume_bitwise(two_ranks, corpus):
    run_dir = two_ranks / "muon" / "run"
    ending = metrics.read_ending(run_dir)
    assert_is_the_proxys(run_dir, ending.validation_loss_nats, proxy_of(by_muon(corpus), corpus))
    assert [line["step"] for line in events(run_dir, "started")] == [0, 6]


def test_one_rank_trains_as_the_proxy_by_muon(one_rank, corpus, tmp_path):
    spec = by_muon(corpus)
    ending = train(decision_of(spec, read_manifest(corpus)), corpus, tmp_path)
    assert_is_the_proxys(tmp_path / "run", ending.validation_loss_nats, proxy_of(spec, corpus))


def test_smaller_passes_that_recompute_train_as_the_proxy(
    one_rank, proxy, corpus, tmp_path, monkeypatch
):
    passes = []
    whole = Decoder.forward

    def counted(self, ids, *rest):
        passes.append(len(ids))
        return whole(self, ids, *rest)

    monkeypatch.setattr(Decoder, "forward", counted)
    layout = Parallelism(
        data_parallel_shard=1, microbatch_sequences=3, activation_checkpointing="full"
    )
    ending = train(dataclasses.replace(tiny_decision(corpus), parallelism=layout), corpus, tmp_path)
    assert passes[:6] == [3, 3, 2, 3, 3, 2]  # eight sequences a step, the last pass smaller
    assert max(passes) == 3, "nor does validation take more at once than fit in training"
    assert_is_the_proxys(tmp_path / "run", ending.validation_loss_nats, proxy)


@pytest.mark.slow  # the compiler takes half a minute
def test_compiled_blocks_train_as_the_proxy(one_rank, proxy, alone, corpus, tmp_path, monkeypatch):
    compiled = []
    whole = Block.compile
    monkeypatch.setattr(Block, "compile", lambda self: (compiled.append(self), whole(self))[1])
    ending = train(dataclasses.replace(tiny_decision(corpus), compiled=True), corpus, tmp_path)
    assert len(compiled) == 2
    assert_is_the_proxys(tmp_path / "run", ending.validation_loss_nats, proxy)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_tied_model_trains_as_the_proxy(one_rank, corpus, tmp_path, precision):
    spec = spec_of(read_manifest(corpus).data_id)
    base, shape = (dataclasses.replace(shape, tied=True) for shape in (spec.base_shape, spec.shape))
    spec = dataclasses.replace(
        spec, base_shape=base, shape=shape, numerics=Numerics(dtype=precision)
    )
    decision = decision_of(spec, read_manifest(corpus), num_ranks=1, every_steps=4)
    ending = train(dataclasses.replace(decision, precision=precision), corpus, tmp_path)
    assert_is_the_proxys(tmp_path / "run", ending.validation_loss_nats, proxy_of(spec, corpus))


def failing(*_):
    raise RuntimeError("no compiler here")


BACKENDS = {
    "good": ("aot_eager", ""),
    "broken": (
        failing,
        "blocks cannot be compiled (BackendCompilerFailed: backend='failing' raised:)",
    ),
    "broken backward": (
        aot_autograd(fw_compiler=make_boxed_compiler(lambda graph, _: graph), bw_compiler=failing),
        "blocks cannot be compiled (BackendCompilerFailed: ",
    ),
}


@pytest.mark.parametrize("name", BACKENDS)
def test_blocks_and_loss_are_compiled_or_said_not_to_be(
    one_rank, proxy, corpus, tmp_path, monkeypatch, capfd, name
):
    """In passes of two sizes, by another backend than the one used, which takes half a minute; the
    loss as on a GPU.
    """
    backend, said = BACKENDS[name]
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    monkeypatch.setattr(
        trained_model, "Decoder", lambda shape, **how: Decoder(shape, **{**how, "fused_loss": True})
    )
    monkeypatch.setitem(loss.PART_LOGITS, "cpu", 10 * 256)  # so that a pass has many parts
    layout = Parallelism(data_parallel_shard=1, microbatch_sequences=3)
    decision = dataclasses.replace(tiny_decision(corpus), compiled=True, parallelism=layout)
    ending = train(decision, corpus, tmp_path)
    assert_is_the_proxys(tmp_path / "run", ending.validation_loss_nats, proxy)
    told = capfd.readouterr().err
    assert told.count("blocks cannot be compiled") == bool(said) and said in told
    counted = torch._dynamo.utils.counters["stats"]
    assert said or (counted["unique_graphs"] > 3 and counted["calls_captured"] < 300), (
        "blocks alone; each part anew"
    )


def test_the_next_batch_is_read_ahead_and_each_only_once(one_rank, corpus, tmp_path, monkeypatch):
    read, waited = [], []
    draw, step = TokenStore.train_batch, Trainer._update
    monkeypatch.setattr(
        TokenStore,
        "train_batch",
        lambda self, **rows: (read.append(rows["first_sequence"]), draw(self, **rows))[1],
    )
    monkeypatch.setattr(
        Trainer, "_update", lambda *given: (waited.append(len(read)), step(*given))[1]
    )
    train(tiny_decision(corpus), corpus, tmp_path)
    assert read == [8 * step for step in range(12)]
    assert waited == [*range(2, 13), 12], (
        "before each update, but for the last, the next batch is there"
    )


def test_resume_of_two_ranks_is_bitwise_and_one_rank_can_go_on(
    two_ranks, one_rank, corpus, tmp_path
):
    plain = two_ranks / "plain" / "run"
    first = metrics.read_ending(two_ranks / "cut" / "cut")
    assert (first.event, first.step) == ("stopped", CUT)
    assert first.validation_loss_nats is not None
    assert metrics.read_ending(two_ranks / "cut" / "run") == metrics.read_ending(plain)
    assert losses(two_ranks / "cut" / "run") == losses(plain)
    assert [line["step"] for line in events(two_ranks / "cut" / "run", "started")] == [0, 6]
    shutil.copytree(two_ranks / "cut" / "cut", tmp_path / "narrow")
    config = write_launch(tmp_path / "frozen", tiny_decision(corpus, num_ranks=2))
    options = RankOptions(
        config=config, data=corpus, out=tmp_path / "narrow", allow_world_size=True
    )
    assert run(options).event == "finished"
    assert losses(tmp_path / "narrow") == pytest.approx(losses(plain), abs=1e-5)
    assert losses(tmp_path / "narrow") != losses(plain)


def test_a_crash_between_checkpoints_replays_and_supersedes_metrics(alone, corpus, tmp_path):
    decision = tiny_decision(corpus)
    train(decision, corpus, tmp_path, stop_after=6)
    run_dir = tmp_path / "run"
    # as if killed at step 6: newest is step 4
    shutil.rmtree(run_dir / "checkpoints" / "step-00000006")
    with (run_dir / metrics.METRICS_FILE).open("a") as file:
        file.write('{"step": 7, "train_lo')
    train(decision, corpus, tmp_path)
    steps = [line["step"] for line in metrics.read(run_dir) if "event" not in line]
    assert steps == list(range(1, 13))
    assert losses(run_dir) == losses(alone[0])


def test_a_forged_index_is_set_aside_and_the_checkpoint_before_it_is_used(alone, corpus, tmp_path):
    """The hashes are right: a person who can write the folder can compute them again."""
    decision = tiny_decision(corpus)
    train(decision, corpus, tmp_path, stop_after=6)
    newest, fuse = tmp_path / "run" / "checkpoints" / "step-00000006", tmp_path / "ran"
    (newest / ".metadata").write_bytes(f"cposix\nmkdir\n(V{fuse}\ntR.".encode())
    manifest = json.loads((newest / "manifest.json").read_bytes())["manifest"]
    manifest["files"][".metadata"] = canon.file_sha256(newest / ".metadata")
    signed = {"manifest": manifest, "sha256": canon.content_id(manifest)}
    (newest / "manifest.json").write_bytes(canon.pretty(signed))
    train(decision, corpus, tmp_path)
    assert not fuse.exists()
    assert newest.with_suffix(".corrupt").is_dir()
    assert [line["step"] for line in events(tmp_path / "run", "started")] == [0, 4]
    assert losses(tmp_path / "run") == losses(alone[0])


def test_names_everything_that_does_not_fit_at_once(one_rank, corpus, tmp_path):
    write_corpus(tmp_path / "other", seed=1)
    decision = dataclasses.replace(
        tiny_decision(corpus),
        precision="float64",
        abort=AbortPolicy(on_non_finite=False, train_loss_above_nats=6.0),
        parallelism=Parallelism(data_parallel_shard=1, tensor=2, pipeline=2, context=2),
    )
    ending = train(decision, tmp_path / "other" / "tokens", tmp_path, stop_after=0)
    assert (ending.event, ending.exit_code) == ("refused", 2)
    for problem in (
        "the corpus",
        "1 rank: must be 8",
        "tensor = 2, pipeline = 2, context = 2: ",
        "precision = float64",
        "abort.on_non_finite",
        "stop_after = 0",
    ):
        assert problem in ending.reason
    assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.parametrize(
    ("monitoring", "wrong"),
    [
        (
            Monitoring(layers_every_steps=1),
            "layers.layers.1.weight_rms is nan after the update of step 6",
        ),
        (
            Monitoring(validate_every_steps=3),
            "validation_loss_nats is nan after the update of step 6",
        ),
        (Monitoring(), "step 6 could not be written (layers.1.attention.wo.weight is not finite)"),
    ],
)
def test_a_weight_that_is_no_number_stops_the_run_before_it_is_saved(
    one_rank, corpus, tmp_path, monkeypatch, monitoring, wrong
):
    update = Trainer._update

    def spoiling(self, step, norm):
        update(self, step, norm)
        if step == 5:
            with torch.no_grad():
                self.model.get_parameter("layers.1.attention.wo.weight")[3, 4] = math.nan

    monkeypatch.setattr(Trainer, "_update", spoiling)
    ending = train(
        dataclasses.replace(tiny_decision(corpus, every_steps=3), monitoring=monitoring),
        corpus,
        tmp_path,
    )
    assert (ending.event, ending.exit_code) == ("aborted", 3) and wrong in ending.reason
    last = curve(tmp_path / "run")[6]
    assert math.isfinite(last["train_loss_nats"]) and not {"layers", "validation_loss_nats"} & set(
        last
    )
    assert [p.name for p in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000003"]


def test_a_loss_over_the_ceiling_past_warmup_aborts(one_rank, corpus, tmp_path):
    decision = tiny_decision(corpus)
    low = dataclasses.replace(decision.abort, train_loss_above_nats=0.1)
    ending = train(dataclasses.replace(decision, abort=low), corpus, tmp_path)
    assert (ending.event, ending.exit_code, ending.step) == ("aborted", 3, 4), (
        "as in the bank, past the warmup"
    )
    assert "over 0.100 nats" in ending.reason


def test_all_choices_at_once_train_as_the_proxy_on_two_ranks(two_ranks, corpus):
    run_dir = two_ranks / "choices" / "run"
    ending = metrics.read_ending(run_dir)
    assert (ending.event, ending.step) == ("finished", 12)
    proxy = proxy_of(all_choices(corpus), corpus)
    assert_is_the_proxys(run_dir, ending.validation_loss_nats, proxy)
    lines = curve(run_dir)
    assert [lines[step]["tokens"] for step in (1, 5, 6, 12)] == [128, 640, 896, proxy[0].tokens]


def test_bfloat16_trains_near_float32(alone, corpus, tmp_path):
    decision = dataclasses.replace(tiny_decision(corpus), precision="bfloat16")
    assert train(decision, corpus, tmp_path).event == "finished"
    assert losses(tmp_path / "run") == pytest.approx(losses(alone[0]), abs=0.05)
    assert losses(tmp_path / "run") != pytest.approx(losses(alone[0]), abs=1e-5)


def test_a_run_whose_live_optimizer_or_weights_are_not_the_frozen_ones_never_steps(
    one_rank, corpus, tmp_path, monkeypatch
):
    build, initialize = assembly.build_optimizer, assembly.initialize

    def other(model, groups, name):
        optimizer = build(model, groups, name)
        optimizer.param_groups[1]["weight_decay"] += 0.1
        return optimizer

    def louder(model, *given):
        initialize(model, *given)
        with torch.no_grad():
            model.lm_head.weight.mul_(2.0)

    for name, wrong, said in (
        ("build_optimizer", other, "weight_decay is 0."),
        ("initialize", louder, "lm_head.weight: init std is"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(assembly, name, wrong)
            ending = train(tiny_decision(corpus), corpus, tmp_path / name)
        assert (ending.event, ending.exit_code) == ("refused", 2) and said in ending.reason
        assert not curve(tmp_path / name / "run")


@pytest.mark.gpu
@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize(
    ("precision", "near"), [("float32", 1e-3), ("bfloat16", 0.05), ("by Muon", 0.05)]
)
def test_on_gpus_compiled_passes_train_and_resume_as_the_proxy_there(
    corpus, tmp_path, precision, near, num_ranks
):
    """With AdamW fused, its count of steps saved from the device; the loss by parts; batches copied
    ahead; by NCCL.
    """
    if torch.cuda.device_count() < num_ranks:
        pytest.skip(f"there are no {num_ranks} GPUs")
    manifest, dtype = read_manifest(corpus), "bfloat16" if precision == "by Muon" else precision
    spec = by_muon(corpus) if precision == "by Muon" else spec_of(manifest.data_id)
    solo = Solo(TokenStore(corpus), device="cuda")
    solo.admit(0, dataclasses.replace(spec, numerics=Numerics(dtype=dtype)))
    ((_, result, curve_of_proxy),) = solo.advance(100)
    layout = Parallelism(data_parallel_shard=num_ranks, microbatch_sequences=3)
    decision = dataclasses.replace(
        decision_of(spec, manifest), precision=dtype, parallelism=layout, compiled=True
    )
    config = write_launch(tmp_path, decision)
    assert launch(config, corpus, tmp_path / "run", stop_after=CUT).event == "stopped"
    outcome = launch(config, corpus, tmp_path / "run")
    assert outcome.event == "finished", outcome.reason
    assert list(losses(tmp_path / "run").values()) == pytest.approx(
        curve_of_proxy.train_loss_nats, abs=near
    )
    assert outcome.validation_loss_nats == pytest.approx(result.loss_nats, abs=near)
    assert "blocks cannot be compiled" not in (tmp_path / "run" / LOG_FILE).read_text()
