"""Tests of the trainer of main runs.

The trainer must train like the engine of the proxies. A resumed run must equal an uninterrupted
one. The trainer must refuse a config, corpus, or machine that does not fit.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
import shutil

import pytest
import torch
from functorch.compile import make_boxed_compiler
from main_run import (
    QUIET_TORCH,
    make_decision,
    make_muon_spec,
    make_spec,
    make_spec_with_all_choices,
    make_tiny_decision,
    read_losses,
    write_corpus,
)
from rank_runs import CUT
from spike_case import read_events, train
from torch._dynamo.backends.common import aot_autograd

from forerun._launcher.main_run import metrics_file
from forerun._launcher.main_run.frozen.frozen import Parallelism
from forerun._launcher.main_run.frozen.launch_file import write_launch
from forerun._launcher.main_run.frozen.run_policies import AbortPolicy, Monitoring
from forerun._launcher.main_run.supervisor.launch import LOG_FILE, launch
from forerun._launcher.main_run.trainer import model_builder, training
from forerun._launcher.main_run.trainer.inputs import RunOptions
from forerun._launcher.main_run.trainer.model_builder import TrainedModel
from forerun._launcher.main_run.trainer.training import run
from forerun._proxies.core import canon
from forerun._proxies.core.spec import Numerics
from forerun._proxies.data.tokens import TokenStore, read_manifest
from forerun._proxies.model import loss
from forerun._proxies.model.decoder import Block, Decoder
from forerun._proxies.training.single_trial import SingleTrialEngine

pytestmark = QUIET_TORCH
MAX_STEPS = 100
"""More steps than any run of these tests has."""


def read_lines_by_step(run_dir):
    """Return the lines of the metrics file that log a training step, by step."""
    return {
        line["step"]: line for line in metrics_file.read_lines(run_dir) if "train_loss_nats" in line
    }


def train_proxy(spec, corpus):
    """Train the run of `spec` as a proxy, to its end; return its result and curve."""
    engine = SingleTrialEngine(TokenStore(corpus), device="cpu")
    engine.admit(0, spec)
    ((_, result, proxy_curve),) = engine.advance(MAX_STEPS)
    return result, proxy_curve


@pytest.fixture(scope="module")
def proxy(corpus):
    """Result and curve of the tiny run, trained as a proxy."""
    return train_proxy(make_spec(read_manifest(corpus).data_id), corpus)


@pytest.fixture(scope="module")
def one_rank_run(one_rank, corpus, tmp_path_factory):
    """Folder and ending of an uninterrupted run of one rank."""
    out = tmp_path_factory.mktemp("alone")
    return out / "run", train(make_tiny_decision(corpus), corpus, out)


def assert_equals_proxy(run_dir, validation_loss_nats, proxy):
    """Assert that losses and gradient norms of a run equal the proxy's up to rounding."""
    result, proxy_curve = proxy
    lines = read_lines_by_step(run_dir)
    assert tuple(lines) == proxy_curve.steps
    losses_nats = [line["train_loss_nats"] for line in lines.values()]
    grad_norms = [line["grad_norm"] for line in lines.values()]
    # float32 rounds a loss of 5 nats at 5e-7.
    assert losses_nats == pytest.approx(proxy_curve.train_loss_nats, rel=0, abs=5e-6)
    assert grad_norms == pytest.approx(proxy_curve.grad_norm, rel=1e-5)
    assert validation_loss_nats == pytest.approx(result.loss_nats, abs=5e-6)


def test_one_rank_trains_like_the_proxy(one_rank_run, proxy):
    run_dir, ending = one_rank_run
    assert (ending.event, ending.exit_code, ending.step) == ("finished", 0, 12)
    assert_equals_proxy(run_dir, ending.validation_loss_nats, proxy)


def test_two_ranks_train_like_the_proxy(two_rank_runs, proxy):
    ending = metrics_file.read_ending(two_rank_runs / "plain" / "run")
    assert (ending.event, ending.exit_code, ending.step) == ("finished", 0, 12)
    assert_equals_proxy(two_rank_runs / "plain" / "run", ending.validation_loss_nats, proxy)


@pytest.mark.parametrize(
    ("name", "exchanges"),
    # The model has three units that exchange gradients: two blocks, and all other modules together.
    # With microbatches of one sequence, a step has 4 passes; the run has 12 steps. Shards
    # exchange gradients in every pass. Replicas exchange them after the last pass of a step, and
    # also after the first pass of steps 5 and 10, which measure the gradient noise.
    [
        ("microbatches", 3 * 12 * 4),
        ("replicas with microbatches", 3 * (12 + 2)),
        ("replicas", 3 * 12),
    ],
)
def test_two_ranks_in_other_layouts_train_like_the_proxy(two_rank_runs, proxy, name, exchanges):
    run_dir = two_rank_runs / name / "run"
    assert_equals_proxy(run_dir, metrics_file.read_ending(run_dir).validation_loss_nats, proxy)
    assert json.loads((two_rank_runs / "exchanged.json").read_text())[name] == exchanges


def test_each_initial_value_is_drawn_by_one_of_two_ranks(two_rank_runs, corpus):
    drawn = [
        json.loads((two_rank_runs / "plain" / f"drawn-{rank}.json").read_text()) for rank in (0, 1)
    ]
    names = [
        name
        for name, _ in Decoder(make_tiny_decision(corpus).shape, device="meta").named_parameters()
    ]
    assert sorted([*drawn[0], *drawn[1]]) == sorted(names)
    assert abs(len(drawn[0]) - len(drawn[1])) <= 1


def test_two_ranks_with_muon_train_like_the_proxy_and_resume(two_rank_runs, corpus):
    run_dir = two_rank_runs / "muon" / "run"
    ending = metrics_file.read_ending(run_dir)
    assert_equals_proxy(
        run_dir, ending.validation_loss_nats, train_proxy(make_muon_spec(corpus), corpus)
    )
    assert [line["step"] for line in read_events(run_dir, "started")] == [0, 6]


def test_one_rank_with_muon_trains_like_the_proxy(one_rank, corpus, tmp_path):
    spec = make_muon_spec(corpus)
    ending = train(make_decision(spec, read_manifest(corpus)), corpus, tmp_path)
    assert_equals_proxy(tmp_path / "run", ending.validation_loss_nats, train_proxy(spec, corpus))


def test_smaller_passes_with_recomputation_train_like_the_proxy(
    one_rank, proxy, corpus, tmp_path, monkeypatch
):
    passes = []
    forward = Decoder.forward

    def record_and_forward(self, ids, *args):
        passes.append(len(ids))
        return forward(self, ids, *args)

    monkeypatch.setattr(Decoder, "forward", record_and_forward)
    layout = Parallelism(
        data_parallel_shard=1, microbatch_sequences=3, activation_checkpointing="full"
    )
    ending = train(
        dataclasses.replace(make_tiny_decision(corpus), parallelism=layout), corpus, tmp_path
    )
    # A step has eight sequences, so its last pass is smaller.
    assert passes[:6] == [3, 3, 2, 3, 3, 2]
    assert max(passes) == 3, "validation uses passes of this size too"
    assert_equals_proxy(tmp_path / "run", ending.validation_loss_nats, proxy)


@pytest.mark.slow  # The compiler takes half a minute.
def test_compiled_blocks_train_like_the_proxy(
    one_rank, proxy, one_rank_run, corpus, tmp_path, monkeypatch
):
    compiled = []
    compile_block = Block.compile

    def record_and_compile(self):
        compiled.append(self)
        return compile_block(self)

    monkeypatch.setattr(Block, "compile", record_and_compile)
    ending = train(dataclasses.replace(make_tiny_decision(corpus), compiled=True), corpus, tmp_path)
    assert len(compiled) == 2
    assert_equals_proxy(tmp_path / "run", ending.validation_loss_nats, proxy)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_tied_model_trains_like_the_proxy(one_rank, corpus, tmp_path, precision):
    spec = make_spec(read_manifest(corpus).data_id)
    base, shape = (dataclasses.replace(shape, tied=True) for shape in (spec.base_shape, spec.shape))
    spec = dataclasses.replace(
        spec, base_shape=base, shape=shape, numerics=Numerics(dtype=precision)
    )
    decision = make_decision(spec, read_manifest(corpus), num_ranks=1, every_steps=4)
    ending = train(dataclasses.replace(decision, precision=precision), corpus, tmp_path)
    assert_equals_proxy(tmp_path / "run", ending.validation_loss_nats, train_proxy(spec, corpus))


def fail_to_compile(*_):
    """Fail like a compiler that is not installed."""
    raise RuntimeError("no compiler here")


fail_in_backward = aot_autograd(
    fw_compiler=make_boxed_compiler(lambda graph, _: graph), bw_compiler=fail_to_compile
)
BACKENDS = {
    "good": ("aot_eager", False),
    "broken": (fail_to_compile, True),
    "broken backward": (fail_in_backward, True),
}
"""Backend of `torch.compile`, and whether it fails, by name."""


@pytest.mark.parametrize(("backend", "fails"), BACKENDS.values(), ids=BACKENDS)
def test_failing_compiler_falls_back_to_eager_with_a_warning(
    one_rank, proxy, corpus, tmp_path, monkeypatch, caplog, backend, fails
):
    """A compiled run trains like the proxy, whether its compiler works or fails.

    The blocks compile for passes of two sizes, and the loss is computed in parts, as on a GPU. The
    backends are faster than the real compiler, which takes half a minute.
    """
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    monkeypatch.setattr(
        model_builder,
        "Decoder",
        lambda shape, **options: Decoder(shape, **{**options, "fused_loss": True}),
    )
    monkeypatch.setitem(loss.PART_LOGITS, "cpu", 10 * 256)  # The loss then has many parts.
    layout = Parallelism(data_parallel_shard=1, microbatch_sequences=3)
    decision = dataclasses.replace(make_tiny_decision(corpus), compiled=True, parallelism=layout)
    # The patch also restores the setting that the trainer changes.
    with torch._dynamo.config.patch(suppress_errors=False):
        ending = train(decision, corpus, tmp_path)
    assert_equals_proxy(tmp_path / "run", ending.validation_loss_nats, proxy)
    warnings = [record for record in caplog.records if "no compiler here" in record.getMessage()]
    assert bool(warnings) == fails
    stats = torch._dynamo.utils.counters["stats"]
    if not fails:
        # Each block and each part of the loss is a graph of its own. A graph of the whole model
        # would capture more calls.
        assert stats["unique_graphs"] > 3
        assert stats["calls_captured"] < 300


def test_next_batch_is_read_ahead_and_only_once(one_rank, corpus, tmp_path, monkeypatch):
    first_sequences, num_read_at_update = [], []
    draw, clip = TokenStore.read_train_batch, training.clip_to_norm

    def record_and_draw(self, **rows):
        first_sequences.append(rows["first_sequence"])
        return draw(self, **rows)

    def record_and_clip(*args):
        num_read_at_update.append(len(first_sequences))
        return clip(*args)

    monkeypatch.setattr(TokenStore, "read_train_batch", record_and_draw)
    monkeypatch.setattr(training, "clip_to_norm", record_and_clip)
    train(make_tiny_decision(corpus), corpus, tmp_path)
    assert first_sequences == [8 * step for step in range(12)]
    # Before each update but the last, the next batch has been read.
    assert num_read_at_update == [*range(2, 13), 12]


def test_two_ranks_resume_bitwise_and_one_rank_can_continue(
    two_rank_runs, one_rank, corpus, tmp_path
):
    plain = two_rank_runs / "plain" / "run"
    first = metrics_file.read_ending(two_rank_runs / "cut" / "cut")
    assert (first.event, first.step) == ("stopped", CUT)
    assert first.validation_loss_nats is not None
    assert metrics_file.read_ending(two_rank_runs / "cut" / "run") == metrics_file.read_ending(
        plain
    )
    assert read_losses(two_rank_runs / "cut" / "run") == read_losses(plain)
    assert [line["step"] for line in read_events(two_rank_runs / "cut" / "run", "started")] == [
        0,
        6,
    ]
    shutil.copytree(two_rank_runs / "cut" / "cut", tmp_path / "narrow")
    config = write_launch(tmp_path / "frozen", make_tiny_decision(corpus, num_ranks=2))
    options = RunOptions(config=config, data=corpus, out=tmp_path / "narrow", allow_world_size=True)
    assert run(options).event == "finished"
    assert read_losses(tmp_path / "narrow") == pytest.approx(read_losses(plain), abs=1e-5)
    assert read_losses(tmp_path / "narrow") != read_losses(plain)


def test_crash_after_a_checkpoint_repeats_steps_and_replaces_their_metrics(
    one_rank_run, corpus, tmp_path
):
    decision = make_tiny_decision(corpus)
    train(decision, corpus, tmp_path, stop_after=6)
    run_dir = tmp_path / "run"
    # The run looks as if it was killed at step 6: its newest checkpoint is that of step 4.
    shutil.rmtree(run_dir / "checkpoints" / "step-00000006")
    with (run_dir / metrics_file.METRICS_FILE).open("a") as file:
        file.write('{"step": 7, "train_lo')
    train(decision, corpus, tmp_path)
    steps = [line["step"] for line in metrics_file.read_lines(run_dir) if "event" not in line]
    assert steps == list(range(1, 13))
    assert read_losses(run_dir) == read_losses(one_rank_run[0])


def test_forged_index_is_set_aside_and_an_older_checkpoint_used(one_rank_run, corpus, tmp_path):
    """The hashes are correct, because a person who can write the folder can compute them."""
    decision = make_tiny_decision(corpus)
    train(decision, corpus, tmp_path, stop_after=6)
    newest, created_path = tmp_path / "run" / "checkpoints" / "step-00000006", tmp_path / "ran"
    (newest / ".metadata").write_bytes(f"cposix\nmkdir\n(V{created_path}\ntR.".encode())
    manifest = json.loads((newest / "manifest.json").read_bytes())["manifest"]
    manifest["files"][".metadata"] = canon.hash_file(newest / ".metadata")
    signed = {"manifest": manifest, "sha256": canon.compute_content_id(manifest)}
    (newest / "manifest.json").write_bytes(canon.to_pretty_json(signed))
    train(decision, corpus, tmp_path)
    assert not created_path.exists()
    assert newest.with_suffix(".corrupt").is_dir()
    assert [line["step"] for line in read_events(tmp_path / "run", "started")] == [0, 4]
    assert read_losses(tmp_path / "run") == read_losses(one_rank_run[0])


def test_all_reasons_of_a_refusal_are_reported_at_once(one_rank, corpus, tmp_path):
    write_corpus(tmp_path / "other", seed=1)
    decision = dataclasses.replace(
        make_tiny_decision(corpus),
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
    ("monitoring", "reason"),
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
def test_nan_weight_stops_the_run_before_it_is_saved(
    one_rank, corpus, tmp_path, monkeypatch, monitoring, reason
):
    build = model_builder.build_optimizer

    def build_spoiling(model, decision):
        optimizer, steps = build(model, decision), itertools.count()

        def set_weight_to_nan(*_):
            if next(steps) == 5:
                with torch.no_grad():
                    model.get_parameter("layers.1.attention.wo.weight")[3, 4] = math.nan

        optimizer.register_step_post_hook(set_weight_to_nan)
        return optimizer

    monkeypatch.setattr(model_builder, "build_optimizer", build_spoiling)
    ending = train(
        dataclasses.replace(make_tiny_decision(corpus, every_steps=3), monitoring=monitoring),
        corpus,
        tmp_path,
    )
    assert (ending.event, ending.exit_code) == ("aborted", 3) and reason in ending.reason
    last = read_lines_by_step(tmp_path / "run")[6]
    assert math.isfinite(last["train_loss_nats"])
    assert not {"layers", "validation_loss_nats"} & set(last)
    assert [p.name for p in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000003"]


def test_loss_above_the_ceiling_after_the_warmup_aborts(one_rank, corpus, tmp_path):
    decision = make_tiny_decision(corpus)
    low = dataclasses.replace(decision.abort, train_loss_above_nats=0.1)
    ending = train(dataclasses.replace(decision, abort=low), corpus, tmp_path)
    # The warmup has three steps. A proxy with this ceiling stops at the same step.
    assert (ending.event, ending.exit_code, ending.step) == ("aborted", 3, 4)
    assert "over 0.100 nats" in ending.reason


def test_two_ranks_with_no_default_choice_train_like_the_proxy(two_rank_runs, corpus):
    run_dir = two_rank_runs / "no default choice" / "run"
    ending = metrics_file.read_ending(run_dir)
    assert (ending.event, ending.step) == ("finished", 12)
    proxy = train_proxy(make_spec_with_all_choices(corpus), corpus)
    assert_equals_proxy(run_dir, ending.validation_loss_nats, proxy)
    lines = read_lines_by_step(run_dir)
    assert [lines[step]["tokens"] for step in (1, 5, 6, 12)] == [128, 640, 896, proxy[0].tokens]


def test_bfloat16_trains_near_float32(one_rank_run, corpus, tmp_path):
    decision = dataclasses.replace(make_tiny_decision(corpus), precision="bfloat16")
    assert train(decision, corpus, tmp_path).event == "finished"
    assert read_losses(tmp_path / "run") == pytest.approx(read_losses(one_rank_run[0]), abs=0.05)
    assert read_losses(tmp_path / "run") != pytest.approx(read_losses(one_rank_run[0]), abs=1e-5)


def test_run_with_another_optimizer_or_other_weights_than_frozen_is_refused(
    one_rank, corpus, tmp_path, monkeypatch
):
    build, initialize = model_builder.build_optimizer, TrainedModel.initialize

    def build_with_more_decay(model, decision):
        optimizer = build(model, decision)
        optimizer.param_groups[1]["weight_decay"] += 0.1
        return optimizer

    def initialize_too_large(source, model):
        initialize(source, model)
        with torch.no_grad():
            model.lm_head.weight.mul_(2.0)

    for owner, name, wrong_function, problem in (
        (model_builder, "build_optimizer", build_with_more_decay, "weight_decay is 0."),
        (TrainedModel, "initialize", initialize_too_large, "lm_head.weight: init std is"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, wrong_function)
            ending = train(make_tiny_decision(corpus), corpus, tmp_path / name)
        assert (ending.event, ending.exit_code) == ("refused", 2) and problem in ending.reason
        assert not read_lines_by_step(tmp_path / name / "run")


@pytest.mark.gpu
@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize(
    ("variant", "tolerance_nats"), [("float32", 1e-3), ("bfloat16", 0.05), ("muon", 0.05)]
)
def test_compiled_run_on_gpus_trains_and_resumes_like_the_proxy(
    corpus, tmp_path, variant, tolerance_nats, num_ranks
):
    """The run uses the paths for GPUs.

    These are fused AdamW with step counts on the device, the loss in parts, batches that are copied
    ahead, and NCCL.
    """
    if torch.cuda.device_count() < num_ranks:
        pytest.skip(f"there are no {num_ranks} GPUs")
    manifest = read_manifest(corpus)
    if variant == "muon":
        dtype, spec = "bfloat16", make_muon_spec(corpus)
    else:
        dtype, spec = variant, make_spec(manifest.data_id)
    engine = SingleTrialEngine(TokenStore(corpus), device="cuda")
    engine.admit(0, dataclasses.replace(spec, numerics=Numerics(dtype=dtype)))
    ((_, result, proxy_curve),) = engine.advance(MAX_STEPS)
    layout = Parallelism(data_parallel_shard=num_ranks, microbatch_sequences=3)
    decision = dataclasses.replace(
        make_decision(spec, manifest), precision=dtype, parallelism=layout, compiled=True
    )
    config = write_launch(tmp_path, decision)
    assert launch(config, corpus, tmp_path / "run", stop_after=CUT).event == "stopped"
    outcome = launch(config, corpus, tmp_path / "run")
    assert outcome.event == "finished", outcome.reason
    assert list(read_losses(tmp_path / "run").values()) == pytest.approx(
        proxy_curve.train_loss_nats, abs=tolerance_nats
    )
    assert outcome.validation_loss_nats == pytest.approx(result.loss_nats, abs=tolerance_nats)
    assert "WON'T CONVERT" not in (tmp_path / "run" / LOG_FILE).read_text()
