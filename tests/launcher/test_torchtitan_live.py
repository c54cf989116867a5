"""The torchtitan export in the hands of torchtitan: parser, groups, scheduler, weights, logits, and whole runs.

Needs an interpreter with torchtitan: see `trainer_python`.
"""

import dataclasses
import json
import math
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from main_run import write_corpus
from torchtitan_case import SCHEDULES, SHAPE, wide_decision, wide_spec

from launcher.exporters import torchtitan
from proxies.bank import Bank
from proxies.data.tokens import TokenStore, read_manifest
from proxies.model import Decoder, Multipliers
from proxies.parametrization import initial_tensor, parameter_table
from proxies.schedule import lr_table

PROBE = """
import json, sys
import numpy as np, torch
from torchtitan.config import ConfigManager
config = ConfigManager().parse_args(["--module", "forerun_torchtitan", "--config", "main_run"])
config.model_spec.model.update_from_config(config=config)
with torch.device("meta"):
    model = config.model_spec.model.build()
model.verify_module_protocol()
model.to_empty(device="cpu")
model.init_weights()
weights = {name: p.detach().numpy().copy() for name, p in model.named_parameters()}
ids = torch.from_numpy(np.load(sys.argv[1]))
with torch.no_grad():
    logits = model(ids).numpy()
np.savez(sys.argv[2], ids=ids.numpy(), logits=logits, **weights)
optimizers = config.optimizer.build(model_parts=[model])
scheduler = config.lr_scheduler.build(optimizers=optimizers, training_steps=config.training.steps)
groups, _ = optimizers._build_param_groups(model, config.optimizer.param_groups, {})
assert list(groups) == ["AdamW"] and len(optimizers.optimizers) == 1
numbers = {
    name: [g["lr"], g["weight_decay"], g["eps"], *g["betas"]] for g in groups["AdamW"] for name in g["param_names"]
}
rates = []
for _ in range(config.training.steps):
    rates.append([g["lr"] for g in optimizers.optimizers[0].param_groups])
    optimizers.step()
    scheduler.step()
before = [p.detach().clone() for p in model.parameters()]
for p in model.parameters():
    p.grad = torch.zeros_like(p)
model.norm.weight.grad[0] = float("nan")
try:
    optimizers.step()
    stopped = False
except RuntimeError:
    stopped = all(torch.equal(a, b) for a, b in zip(before, model.parameters()))
json.dump({"numbers": numbers, "rates": rates, "stopped": stopped, "max_norm": config.training.max_norm,
           "peaks": [g["lr"] for g in groups["AdamW"]]}, sys.stdout)
"""

# torchtitan is made for GPUs: what it asks of the device and of NCCL, told for CPUs and gloo.
CPU_MAIN = """
import json, os, sys
import torch, torch._utils
torch._utils._get_available_device_type = lambda: "cpu"
torch.cpu.set_device = lambda device: None
from torch.distributed.fsdp import FSDPModule
import torchtitan.components.metrics as metrics
import torchtitan.distributed.fsdp as fsdp
from torchtitan.distributed import utils
from torchtitan.train import main
undivided, log = fsdp.disable_fsdp_gradient_division, metrics.MetricsProcessor.log
class Memory:
    device_name = "cpu"
    def get_peak_stats(self):
        return metrics.DeviceMemStats(*[0.0] * 6)
    def reset_peak_stats(self):
        pass
def summed(model):
    undivided(model)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
def logged(self, step, loss, max_loss, grad_norm, *args, **kwargs):
    if int(os.environ["RANK"]) == 0:
        with open(os.environ["LOSSES"], "a") as file:
            file.write(json.dumps([step, loss, grad_norm]) + "\\n")
    log(self, step, loss, max_loss, grad_norm, *args, **kwargs)
metrics.build_device_memory_monitor = Memory
fsdp.disable_fsdp_gradient_division = summed
metrics.MetricsProcessor.log = logged
utils.set_pg_timeouts = lambda **kwargs: None
main()
"""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    write_corpus(folder)
    return folder / "tokens"


@pytest.fixture
def trainer_python() -> str:
    python = os.environ.get("FORERUN_TORCHTITAN_PYTHON", "")
    if not python:
        pytest.skip(
            "FORERUN_TORCHTITAN_PYTHON is not set: python3 -m venv titan && titan/bin/pip install torch==2.13.0 "
            "torchtitan==0.3.0 triton makes an interpreter, then FORERUN_TORCHTITAN_PYTHON=titan/bin/python"
        )
    return str(Path(python).absolute())


def in_trainer(command: list[str], export_dir: Path, corpus: Path, **env: str) -> subprocess.CompletedProcess[str]:
    threads = {"OMP_NUM_THREADS": "1", "PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/")}
    told = {"PYTHONPATH": str(export_dir), "FORERUN_DATA": str(corpus)}
    return subprocess.run(
        command,
        env={**threads, **told, **env},
        cwd=export_dir,
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: s.kind)
def test_torchtitans_own_groups_scheduler_weights_and_logits_are_the_frozen_ones(
    tmp_path, corpus, trainer_python, schedule
):
    clip_norm = None if schedule.kind == "constant" else 1.0
    decision = wide_decision(read_manifest(corpus), schedule=schedule, clip_norm=clip_norm)
    torchtitan.export(decision, tmp_path)
    rng = np.random.default_rng(0)
    np.save(tmp_path / "ids.npy", rng.integers(0, 256, (3, SHAPE.seq_len)))
    done = in_trainer([trainer_python, "-c", PROBE, "ids.npy", "found.npz"], tmp_path, corpus)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    theirs = torchtitan.parameter_names(SHAPE)
    spec = wide_spec(decision.data.data_id)
    table = parameter_table(spec)
    assert found["numbers"] == {
        theirs[p.name]: [p.learning_rate, p.weight_decay, p.eps, p.beta1, p.beta2] for p in table
    }
    peaks = found["peaks"]
    assert found["rates"] == [[peak * share for peak in peaks] for share in lr_table(schedule)]
    assert found["stopped"]
    assert found["max_norm"] == (math.inf if clip_norm is None else clip_norm)

    arrays = np.load(tmp_path / "found.npz")
    model = Decoder(SHAPE)
    for numbers in table:
        weight = torch.from_numpy(arrays[theirs[numbers.name]])
        assert torch.equal(weight, initial_tensor(numbers, decision.seed)), numbers.name
        model.get_parameter(numbers.name).data = weight
    forward = decision.forward
    with torch.no_grad():
        logits = model(
            torch.from_numpy(arrays["ids"]),
            Multipliers(embedding=forward.embedding, attention=forward.attention, output=forward.output),
        )
    difference = np.abs(logits.numpy().reshape(arrays["logits"].shape) - arrays["logits"]).max()
    print(f"{schedule.kind}: {len(table)} parameters equal bit for bit, logits within {difference:.1e}")
    assert difference < 1e-5


def trained(python: str, export_dir: Path, corpus: Path, num_ranks: int, *options: str):
    losses = export_dir / "losses.jsonl"
    losses.unlink(missing_ok=True)
    (export_dir / "cpu_main.py").write_text(CPU_MAIN)
    done = in_trainer(
        [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks), "cpu_main.py",
         "--module", "forerun_torchtitan", "--config", "main_run", *options],
        export_dir, corpus, LOSSES=str(losses),
    )  # fmt: skip
    return done, [json.loads(line) for line in losses.read_text().splitlines()]


@pytest.mark.slow
def test_torchtitan_trains_the_banks_run_on_two_ranks_and_resumes_on_one(tmp_path, corpus, trainer_python):
    store = TokenStore(corpus)
    spec = wide_spec(store.manifest.data_id, schedule=SCHEDULES[0])
    bank = Bank(SHAPE, spec.batch_tokens, spec.numerics, store)
    bank.admit(0, spec)
    [(_, _, curve)] = bank.advance(spec.schedule.num_steps)
    torchtitan.export(wide_decision(store.manifest, num_ranks=2), tmp_path)
    done, two = trained(trainer_python, tmp_path, corpus, 2)
    assert done.returncode == 0, done.stderr[-3000:]
    wanted = np.array([curve.steps, curve.train_loss_nats, curve.grad_norm]).T
    assert np.abs(np.array(two) - wanted).max() < 1e-4
    print(f"2 ranks: loss within {np.abs(np.array(two) - wanted)[:, 1].max():.1e} nats of the bank's")

    checkpoints = next((tmp_path / "outputs").iterdir()) / "checkpoint"
    assert {p.name for p in checkpoints.iterdir()} == {"step-10", "step-12"}
    shutil.rmtree(checkpoints / "step-12")
    done, one = trained(trainer_python, tmp_path, corpus, 1, "--parallelism.data_parallel_shard_degree", "1")
    assert done.returncode == 0, done.stderr[-3000:]
    assert [row[0] for row in one] == [11, 12]
    assert np.abs(np.array(one) - wanted[10:]).max() < 1e-4


@pytest.mark.slow
def test_torchtitan_stops_above_the_frozen_ceiling_before_it_saves(tmp_path, corpus, trainer_python):
    decision = wide_decision(read_manifest(corpus))
    strict = dataclasses.replace(decision.abort, train_loss_above_nats=0.5)
    torchtitan.export(dataclasses.replace(decision, abort=strict), tmp_path)
    done, rows = trained(trainer_python, tmp_path, corpus, 1)
    assert done.returncode != 0
    assert "> 0.5 nats at step 5" in done.stderr
    assert rows[-1][0] == 5
    assert not list((tmp_path / "outputs").glob("*/checkpoint/step-*"))
