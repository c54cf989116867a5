"""The torchtitan export in the hands of torchtitan: parser, groups, scheduler, weights, logits, and
whole runs.

Needs an interpreter with torchtitan 0.3.0 (`make trainers TRAINERS=torchtitan`).
"""

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from export_case import SCHEDULES, SHAPE, wide_decision, wide_spec
from live_case import first_pass
from main_run import write_attested
from tiny_study import ask
from trainer_venv import in_trainer, interpreter, torchrun

from launcher.base.policy import Monitoring
from launcher.exporters import proof
from launcher.exporters.trainers import torchtitan
from launcher.frozen.frozen import Parallelism
from proxies.core.shape import Shape
from proxies.data.tokens import TokenStore
from proxies.training.bank import Bank

# Weights as torchtitan starts them, logits of given tokens, and what it does with a gradient that
# is not finite.
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

MAIN = Path(__file__).parents[2] / "benchmarks" / "gpu" / "torchtitan_main.py"


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule.kind)
def test_torchtitans_own_groups_and_scheduler_are_the_frozen_ones(manifest, schedule):
    clip_norm = None if schedule.kind == "constant" else 1.0
    mesh = Parallelism(data_parallel_shard=2, tensor=2)
    decision = wide_decision(manifest, schedule=schedule, clip_norm=clip_norm, parallelism=mesh)
    assert (
        proof.prove(decision, "torchtitan", torchtitan.VERSIONS[-1], interpreter("torchtitan"))
        == []
    )


VARIANTS = {
    "plain": (SHAPE, 1.0),
    "tied": (dataclasses.replace(SHAPE, tied=True), 1.0),
    "qk_norm and residual multiplier": (dataclasses.replace(SHAPE, qk_norm=True), 0.25),
}


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_torchtitans_first_weights_and_logits_are_the_embedded_trainers(
    tmp_path, manifest, variant
):
    python, (shape, residual) = interpreter("torchtitan"), VARIANTS[variant]
    decision = wide_decision(manifest, shape=shape)
    decision = dataclasses.replace(
        decision, forward=dataclasses.replace(decision.forward, residual=residual)
    )
    torchtitan.export(decision, tmp_path)
    ids = np.random.default_rng(0).integers(0, 256, (3, SHAPE.seq_len))
    np.save(tmp_path / "ids.npy", ids)
    done = in_trainer([python, "-c", PROBE], tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-1] == "True"
    arrays, names = np.load(tmp_path / "found.npz"), torchtitan.parameter_names(shape)
    weights, logits = first_pass(decision, ids)
    for name, weight in weights.items():
        assert np.array_equal(arrays[names[name]], weight), name
    difference = np.abs(logits.reshape(arrays["logits"].shape) - arrays["logits"]).max()
    print(f"{variant}: {len(weights)} parameters equal bit for bit, logits to {difference:.1e}")
    assert difference < 1e-5


def trained(python: Path, export_dir: Path, corpus: Path, num_ranks: int, *options: str):
    losses = export_dir / "losses.jsonl"
    losses.unlink(missing_ok=True)
    shutil.copy(MAIN, export_dir)
    options = ("--module", "forerun_torchtitan", "--config", "main_run", *options)
    command = [*torchrun(python, num_ranks), MAIN.name, *options]
    done = in_trainer(
        command, export_dir, FORERUN_DATA=corpus, LOSSES=losses, FORERUN_LOG_EVERY_STEPS="1"
    )
    assert losses.exists(), done.stderr[-3000:]
    return done, [json.loads(line)[:3] for line in losses.read_text().splitlines()]


def banks_curve(store: TokenStore, shape: Shape = SHAPE) -> np.ndarray:
    """Step, training loss and gradient norm of the same run in the bank."""
    spec = wide_spec(store.manifest.data_id, schedule=SCHEDULES[0], shape=shape)
    bank = Bank(shape, spec.batch_tokens, spec.numerics, store, optimizer="adamw")
    bank.admit(0, spec)
    [(_, _, curve)] = bank.advance(spec.schedule.num_steps)
    return np.array([curve.steps, curve.train_loss_nats, curve.grad_norm]).T


MESHES = {
    "tied": {"data_parallel_shard": 2},
    "tensor": {"data_parallel_shard": 1, "tensor": 2, "activation_checkpointing": "full"},
}


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
def test_two_ranks_of_torchtitan_train_the_banks_run_and_one_goes_on_with_it(
    tmp_path, corpus, manifest, mesh
):
    python = interpreter("torchtitan")
    shape = dataclasses.replace(SHAPE, tied=mesh == "tied", qk_norm=mesh == "tied")
    wanted = banks_curve(TokenStore(corpus), shape)
    decision = wide_decision(manifest, shape=shape, parallelism=Parallelism(**MESHES[mesh]))
    torchtitan.export(decision, tmp_path)
    done, found = trained(python, tmp_path, corpus, 2)
    assert done.returncode == 0, done.stderr[-3000:]
    print(
        f"{mesh}: loss within {np.abs(np.array(found) - wanted)[:, 1].max():.1e} nats of the bank's"
    )
    assert np.abs(np.array(found) - wanted).max() < 1e-4
    if mesh == "tied":
        checkpoints = next((tmp_path / "outputs").iterdir()) / "checkpoint"
        assert {p.name for p in checkpoints.iterdir()} == {"step-10", "step-12"}
        shutil.rmtree(checkpoints / "step-12")
        done, found = trained(
            python, tmp_path, corpus, 1, "--parallelism.data_parallel_shard_degree", "1"
        )
        assert done.returncode == 0, done.stderr[-3000:]
        assert [row[0] for row in found] == [11, 12]
        assert np.abs(np.array(found) - wanted[10:]).max() < 1e-4


@pytest.mark.slow
def test_torchtitan_stops_above_the_frozen_ceiling_before_it_saves(tmp_path, corpus, manifest):
    python = interpreter("torchtitan")
    decision = wide_decision(manifest)
    strict = dataclasses.replace(decision.abort, train_loss_above_nats=0.5)
    torchtitan.export(dataclasses.replace(decision, abort=strict), tmp_path)
    done, rows = trained(python, tmp_path, corpus, 1)
    assert done.returncode != 0
    assert "> 0.5 nats at step 5" in done.stderr
    assert rows[-1][0] == 5
    assert not list((tmp_path / "outputs").glob("*/checkpoint/step-*"))


@pytest.mark.slow
def test_the_watch_reads_what_torchtitan_logs(tmp_path, corpus, manifest):
    """Its TensorBoard events, below the folder that it makes for a run, named by that folder or one
    above.
    """
    python = interpreter("torchtitan")
    decision = dataclasses.replace(
        wide_decision(manifest), monitoring=Monitoring(validate_every_steps=4)
    )
    predicted = dataclasses.replace(decision.predicted, loss_nats=1.4, low_nats=1.0, high_nats=2.0)
    decision = dataclasses.replace(decision, predicted=predicted)
    config = write_attested(tmp_path / "frozen", decision)
    (tmp_path / "export").mkdir()
    torchtitan.export(decision, tmp_path / "export")
    done, losses = trained(python, tmp_path / "export", corpus, 1)
    assert done.returncode == 0, done.stderr[-3000:]
    for folder in (
        tmp_path / "export" / "outputs",
        next(tmp_path.glob("export/outputs/**/*tfevents*")).parent,
    ):
        code, body = ask("watch", config, "--metrics", folder, "--once")
        assert code == 0 and body["figures"]["step"] == 12, body
        assert body["figures"]["train_loss_nats"] == pytest.approx(losses[-1][1], abs=1e-6)
        assert body["figures"]["tokens_per_second"] > 0
        code, body = ask("watch", config, "--metrics", folder, "--conclude")
        # by its validation loss at the last step, where no checkpoint is due
        assert code == 0, body
