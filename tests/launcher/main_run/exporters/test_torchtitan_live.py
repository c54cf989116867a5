"""Tests of the torchtitan export in torchtitan itself: parser, groups, scheduler, weights, logits,
and whole runs.

The tests need an interpreter with torchtitan 0.3.0 (`make trainers TRAINERS=torchtitan`).
"""

import dataclasses
import shutil

import numpy as np
import pytest
from export_case import SCHEDULES, SHAPE, make_wide_decision, make_wide_spec
from live_case import run_first_pass
from main_run import write_attested
from tiny_study import run_json
from torchtitan_live_case import train_export
from trainer_venv import require_interpreter, run_in_trainer

from forerun._launcher.main_run.exporters import proof
from forerun._launcher.main_run.exporters.trainers import torchtitan
from forerun._launcher.main_run.frozen.frozen import Parallelism
from forerun._launcher.main_run.frozen.run_policies import Monitoring
from forerun._proxies.core.shape import Shape
from forerun._proxies.data.tokens import TokenStore
from forerun._proxies.training.bank import Bank

# This program saves the weights as torchtitan initializes them, and the logits of given tokens. It
# prints whether the weights stay unchanged after a gradient that is not finite.
PROBE = """
import sys
import numpy as np, torch
from torchtitan.config import ConfigManager
config = ConfigManager().parse_args(["--module", "forerun_torchtitan", "--config", "main_run"])
config.model_spec.model.update_from_config(config=config)
with torch.device("meta"):
    model = config.model_spec.model.build()
model.to_empty(device="cpu")
model.init_weights()
weights = {name: p.detach().numpy().copy() for name, p in model.named_parameters()}
ids = torch.from_numpy(np.load("ids.npy"))
with torch.no_grad():
    logits = model(ids)
np.savez("found.npz", logits=logits.numpy(), **weights)
optimizers = config.optimizer.build(model_parts=[model])
before = [p.detach().clone() for p in model.parameters()]
for p in model.parameters():
    p.grad = torch.zeros_like(p)
model.norm.weight.grad[0] = float("nan")
try:
    optimizers.step()
except RuntimeError:
    print(all(torch.equal(a, b) for a, b in zip(before, model.parameters())))
"""


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule.kind)
def test_torchtitans_groups_and_scheduler_have_the_frozen_numbers(manifest, schedule):
    clip_norm = None if schedule.kind == "constant" else 1.0
    mesh = Parallelism(data_parallel_shard=2, tensor=2)
    decision = make_wide_decision(
        manifest, schedule=schedule, clip_norm=clip_norm, parallelism=mesh
    )
    python = require_interpreter("torchtitan")
    assert proof.prove(decision, "torchtitan", torchtitan.VERSIONS[-1], python) == []


VARIANTS = {
    "plain": (SHAPE, 1.0),
    "tied": (dataclasses.replace(SHAPE, tied=True), 1.0),
    "qk_norm and residual multiplier": (dataclasses.replace(SHAPE, qk_norm=True), 0.25),
}


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_first_weights_and_logits_equal_the_embedded_trainers(tmp_path, manifest, variant):
    python, (shape, residual) = require_interpreter("torchtitan"), VARIANTS[variant]
    decision = make_wide_decision(manifest, shape=shape)
    decision = dataclasses.replace(
        decision, forward=dataclasses.replace(decision.forward, residual=residual)
    )
    torchtitan.export(decision, tmp_path)
    ids = np.random.default_rng(0).integers(0, 256, (3, SHAPE.seq_len))
    np.save(tmp_path / "ids.npy", ids)
    process = run_in_trainer([python, "-c", PROBE], tmp_path)
    assert process.returncode == 0, process.stderr[-3000:]
    assert process.stdout.splitlines()[-1] == "True"
    arrays, names = np.load(tmp_path / "found.npz"), torchtitan.parameter_names(shape)
    weights, logits = run_first_pass(decision, ids)
    for name, weight in weights.items():
        assert np.array_equal(arrays[names[name]], weight), name
    assert np.abs(logits.reshape(arrays["logits"].shape) - arrays["logits"]).max() < 1e-5


def train_in_bank(store: TokenStore, shape: Shape = SHAPE) -> np.ndarray:
    """Train the same run in a bank; return step, training loss, and gradient norm of each step.

    A bank trains proxies of one shape as one batched model.
    """
    spec = make_wide_spec(store.manifest.data_id, schedule=SCHEDULES[0], shape=shape)
    bank = Bank(shape, spec.batch_tokens, spec.numerics, store, optimizer="adamw")
    bank.admit(0, spec)
    [(_, _, curve)] = bank.advance(spec.schedule.num_steps)
    return np.array([curve.steps, curve.train_loss_nats, curve.grad_norm]).T


@dataclasses.dataclass(frozen=True, kw_only=True)
class BankCase:
    """A run of two ranks that torchtitan must train like a bank."""

    parallelism: Parallelism
    shape: Shape = SHAPE
    is_resumed: bool = False
    """Whether the run loses its last checkpoint, and is then resumed on one rank."""


RUNS = {
    "FSDP, tied, qk_norm, resumed on one rank": BankCase(
        parallelism=Parallelism(data_parallel_shard=2),
        shape=dataclasses.replace(SHAPE, tied=True, qk_norm=True),
        is_resumed=True,
    ),
    "tensor parallel, recomputed": BankCase(
        parallelism=Parallelism(data_parallel_shard=1, tensor=2, activation_checkpointing="full"),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", RUNS.values(), ids=RUNS)
def test_two_ranks_train_like_the_bank_and_one_rank_resumes(tmp_path, corpus, manifest, case):
    python = require_interpreter("torchtitan")
    expected = train_in_bank(TokenStore(corpus), case.shape)
    decision = make_wide_decision(manifest, shape=case.shape, parallelism=case.parallelism)
    torchtitan.export(decision, tmp_path)
    process, rows = train_export(python, tmp_path, corpus, num_ranks=2)
    assert process.returncode == 0, process.stderr[-3000:]
    assert np.abs(np.array(rows) - expected).max() < 1e-4
    if case.is_resumed:
        checkpoints = next((tmp_path / "outputs").iterdir()) / "checkpoint"
        assert {p.name for p in checkpoints.iterdir()} == {"step-10", "step-12"}
        shutil.rmtree(checkpoints / "step-12")
        one_shard = ("--parallelism.data_parallel_shard_degree", "1")
        process, rows = train_export(python, tmp_path, corpus, *one_shard, num_ranks=1)
        assert process.returncode == 0, process.stderr[-3000:]
        assert [row[0] for row in rows] == [11, 12]
        assert np.abs(np.array(rows) - expected[10:]).max() < 1e-4


@pytest.mark.slow
def test_torchtitan_stops_above_the_ceiling_before_it_saves(tmp_path, corpus, manifest):
    python = require_interpreter("torchtitan")
    decision = make_wide_decision(manifest)
    strict = dataclasses.replace(decision.abort, train_loss_above_nats=0.5)
    torchtitan.export(dataclasses.replace(decision, abort=strict), tmp_path)
    process, rows = train_export(python, tmp_path, corpus, num_ranks=1)
    assert process.returncode != 0
    assert "> 0.5 nats at step 5" in process.stderr
    assert rows[-1][0] == 5
    assert not list((tmp_path / "outputs").glob("*/checkpoint/step-*"))


@pytest.mark.slow
def test_watch_reads_torchtitans_tensorboard_events(tmp_path, corpus, manifest):
    """`--metrics` may be the folder of the event files, or a folder above it."""
    python = require_interpreter("torchtitan")
    decision = dataclasses.replace(
        make_wide_decision(manifest), monitoring=Monitoring(validate_every_steps=4)
    )
    predicted = dataclasses.replace(decision.predicted, loss_nats=1.4, low_nats=1.0, high_nats=2.0)
    decision = dataclasses.replace(decision, predicted=predicted)
    config = write_attested(tmp_path / "frozen", decision)
    (tmp_path / "export").mkdir()
    torchtitan.export(decision, tmp_path / "export")
    process, losses = train_export(python, tmp_path / "export", corpus, num_ranks=1)
    assert process.returncode == 0, process.stderr[-3000:]
    for folder in (
        tmp_path / "export" / "outputs",
        next(tmp_path.glob("export/outputs/**/*tfevents*")).parent,
    ):
        code, body = run_json("watch", config, "--metrics", folder, "--once")
        assert code == 0 and body["figures"]["step"] == 12, body
        assert body["figures"]["train_loss_nats"] == pytest.approx(losses[-1][1], abs=1e-6)
        assert body["figures"]["tokens_per_second"] > 0
        code, body = run_json("watch", config, "--metrics", folder, "--conclude")
        # The score uses the validation loss of the last step, where no checkpoint is due.
        assert code == 0, body
