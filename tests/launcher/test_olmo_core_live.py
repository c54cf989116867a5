"""The olmo-core export in the hands of OLMo-core: parser, groups, scheduler, FLOPs, weights, logits, and whole runs.

Unpatched, on CPUs. Needs an interpreter with OLMo-core: see `trainer_python`.
"""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from main_run import write_corpus
from torchtitan_case import SCHEDULES, SHAPE, wide_decision
from trainer_venv import interpreter

from launcher import assembly, metrics
from launcher.exporters import olmo_core, proof
from launcher.exporters.view import compare
from launcher.frozen import Decision, Parallelism
from launcher.launch_file import write_launch
from proxies.data.tokens import Manifest, read_manifest
from proxies.flops import flops_per_token
from proxies.model import Decoder, Multipliers
from proxies.schedule import Schedule

# Float32 on both sides, through other kernels. Logits: as a share of the largest.
LOGITS_TOLERANCE = 3e-6
LOSS_TOLERANCE_NATS = 1e-5
NORM_TOLERANCE = 1e-4

PROBE = """
import json, sys
import numpy as np, torch
from forerun_olmo_core import RUN_FILE, RunConfig, set_initial_values
config = RunConfig.from_file(RUN_FILE)
assert RunConfig.from_dict(config.as_config_dict()) == config
model = config.model.build(init_device="meta")
model.to_empty(device=torch.device("cpu"))
if model.tie_word_embeddings:
    model._tie_weights()  # as init_weights does in a run
set_initial_values(model, config)
with torch.no_grad():
    logits = model(torch.from_numpy(np.load("ids.npy")))
np.savez("found.npz", logits=logits.numpy(), flops=model.num_flops_per_token(config.data_loader.sequence_length),
         **{name: p.detach().numpy() for name, p in model.named_parameters()})
"""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    write_corpus(folder)
    return folder / "tokens"


@pytest.fixture
def manifest(corpus) -> Manifest:
    return read_manifest(corpus)


@pytest.fixture
def trainer_python() -> Path:
    return interpreter("olmo-core")


def varied(manifest: Manifest, **changes) -> Decision:
    """A decision in which no forward multiplier is one, and attention's is not 1 / sqrt(head dim)."""
    decision = wide_decision(manifest, **changes)
    return dataclasses.replace(decision, forward=dataclasses.replace(decision.forward, attention=0.2, residual=0.6))


def tied(manifest: Manifest) -> dict:
    """What of a decision changes with one matrix for embedding and readout."""
    groups = [g for g in wide_decision(manifest).groups if g.kind != "readout"]
    return {"shape": dataclasses.replace(SHAPE, tied=True), "groups": tuple(groups)}


def differences(folder: Path, decision: Decision, python: Path) -> list[str]:
    view = proof.ask("olmo-core", python, folder)
    return compare(decision, view, olmo_core.parameter_names(decision.shape))


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: s.kind)
def test_olmo_cores_own_parser_groups_and_scheduler_give_the_frozen_numbers(
    tmp_path, manifest, trainer_python, schedule
):
    decision = varied(manifest, schedule=schedule, clip_norm=None if schedule.kind == "constant" else 0.5)
    olmo_core.export(decision, tmp_path)
    assert differences(tmp_path, decision, trainer_python) == []


MUTANTS = {
    "lr": ('"lr": 0.015625', '"lr": 0.01562501', "learning_rate is 0.01562501"),
    "decay": ('"weight_decay": 0.2', '"weight_decay": 0.1', "weight_decay is 0.1"),
    "pattern": ("blocks.*.feed_forward.w2.weight", "blocks.0.feed_forward.w2.weight", "blocks.1.feed_forward.w2"),
    "warmup": ('"warmup": 3', '"warmup": 2', "the rate at step 0"),
    "decay_start": ('"schedulers_max": [', '"schedulers_max": [\n1,', "the rate at step"),
    "clip": ('"max_grad_norm": 0.5', '"max_grad_norm": 1.0', "clip_norm is 1.0"),
    "embedding": ('"embed_scale": 2.0', '"embed_scale": 2.001', "forward.embedding is 2.001"),
    "attention": ('"softmax_scale": 0.2', '"softmax_scale": 0.25', "forward.attention is 0.25"),
    "residual": ('"attention_residual_alpha": 0.6', '"attention_residual_alpha": 0.5', "too many values to unpack"),
    "output": ('"multiplier": 0.75', '"multiplier": 1.0', "forward.output is 1.0"),
    "unknown": ('"foreach": true', '"for_each": true', "for_each"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_the_comparison_notices_a_changed_file(tmp_path, manifest, trainer_python, name):
    decision = varied(manifest)
    olmo_core.export(decision, tmp_path)
    old, new, said = MUTANTS[name]
    path = tmp_path / "run.json"
    before, found, after = path.read_text().rpartition(old)  # the first pattern of a name is that of its initial value
    assert found
    path.write_text(before + new + after)
    try:
        problems = differences(tmp_path, decision, trainer_python)
    except proof.ProofError as error:
        problems = error.problems
    assert said in " | ".join(problems)


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["untied", "tied", "qk_norm"])
def test_weights_logits_and_flops_are_the_embedded_trainers(tmp_path, manifest, trainer_python, variant):
    changes = tied(manifest) if variant == "tied" else {}
    decision = varied(manifest, **changes)
    if variant == "qk_norm":
        shape = dataclasses.replace(SHAPE, qk_norm=True)
        gains = next(g for g in decision.groups if g.kind == "block_gain")
        gains_of_heads = dataclasses.replace(gains, pattern=r"layers\.\d+\.attention\.[qk]_norm\.weight")
        decision = dataclasses.replace(decision, shape=shape, groups=(*decision.groups, gains_of_heads))
    olmo_core.export(decision, tmp_path)
    shape = decision.shape
    ids = np.random.default_rng(0).integers(0, 256, (3, shape.seq_len))
    np.save(tmp_path / "ids.npy", ids)
    done = subprocess.run(
        [str(trainer_python), "-c", PROBE], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=280
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found, theirs = np.load(tmp_path / "found.npz"), olmo_core.parameter_names(shape)
    model = Decoder(shape)
    assembly.initialize(model, decision.groups, decision.seed)
    for name, parameter in model.named_parameters():
        assert (found[theirs[name]] == parameter.detach().numpy()).all(), name
    with torch.no_grad():
        logits = model(torch.from_numpy(ids), Multipliers(**dataclasses.asdict(decision.forward))).numpy()
    difference = np.abs(logits.reshape(found["logits"].shape) - found["logits"]).max() / np.abs(logits).max()
    print(f"{variant}: logits within {difference:.1e} of the largest")
    assert difference < LOGITS_TOLERANCE
    # It counts the diagonal of the causal triangle too, and the gains of the last norm and of QK-norm as matmuls.
    gains = shape.width + (2 * shape.num_layers * shape.head_dim if shape.qk_norm else 0)
    assert int(found["flops"]) == flops_per_token(shape) + 6 * shape.num_layers * shape.width + 6 * gains


def trained(python: Path, folder: Path, corpus: Path, num_ranks: int, *options: str):
    """The export's own script, unpatched, on so many ranks of this machine; its steps, losses and gradient norms."""
    done = subprocess.run(
        [str(python), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks), "train.py",
         *options],
        env={"OMP_NUM_THREADS": "1", "PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/"),
             "FORERUN_DATA": str(corpus), "OLMO_SHARED_FS": "1"},
        cwd=folder, capture_output=True, text=True, check=False, timeout=280,
    )  # fmt: skip
    files = list(folder.glob("outputs/*/metrics.jsonl"))
    rows = [json.loads(line) for line in files[0].read_text().splitlines()] if files else []
    return done, np.array([[row["step"], row["train_loss_nats"], row["grad_norm"], row["tokens"]] for row in rows])


def native(decision: Decision, folder: Path, corpus: Path) -> np.ndarray:
    """The embedded trainer's, on one rank."""
    config = write_launch(folder / "frozen", decision)
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1", "-m",
         "launcher.trainer", "--config", str(config), "--data", str(corpus), "--out", str(folder / "run"),
         "--allow-world-size"],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [row for row in metrics.read(folder / "run") if "event" not in row]
    return np.array([[row["step"], row["train_loss_nats"], row["grad_norm"], row["tokens"]] for row in rows])


GROWING_BATCH = Schedule(
    kind="cosine", num_steps=12, warmup_steps=3, final_fraction=0.1, batch_warmup_steps=4, batch_warmup_stages=2
)
RUNS = {
    "fsdp-resumed-on-one-rank": Parallelism(data_parallel_shard=2),
    "replicas-accumulating-recomputing-tied": Parallelism(
        data_parallel_shard=1, data_parallel_replicate=2, microbatch_sequences=2, activation_checkpointing="full"
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_two_ranks_train_the_embedded_trainers_run(tmp_path, corpus, manifest, trainer_python, name):
    schedule = GROWING_BATCH if name == "fsdp-resumed-on-one-rank" else SCHEDULES[0]
    changes = tied(manifest) if "tied" in name else {}
    decision = varied(manifest, schedule=schedule, parallelism=RUNS[name], **changes)
    tokens = schedule.num_full_batches * decision.batch_tokens
    assert decision.num_tokens == tokens
    olmo_core.export(decision, tmp_path)
    done, found = trained(trainer_python, tmp_path, corpus, 2)
    assert done.returncode == 0, done.stderr[-3000:]
    folder = next(tmp_path.glob("outputs/*"))
    assert {p.name for p in folder.glob("step*")} == {"step10", "step12"}
    if name == "fsdp-resumed-on-one-rank":
        shutil.rmtree(folder / "step12")
        done, found = trained(trainer_python, tmp_path, corpus, 1, "num_ranks=1")
        assert done.returncode == 0, done.stderr[-3000:]
        assert (folder / "step12").exists()
    wanted = native(decision, tmp_path, corpus)
    assert found.shape == wanted.shape == (12, 4)
    apart = np.abs(found - wanted).max(axis=0)
    print(f"{name}: losses within {apart[1]:.1e} nats of the embedded trainer's, norms within {apart[2]:.1e}")
    assert apart[0] == apart[3] == 0
    assert apart[1] < LOSS_TOLERANCE_NATS
    assert apart[2] < NORM_TOLERANCE


@pytest.mark.slow
def test_the_brakes_stop_before_the_update_and_other_runs_are_refused(tmp_path, corpus, manifest, trainer_python):
    decision = varied(manifest)
    strict = dataclasses.replace(decision.abort, train_loss_above_nats=0.5)
    olmo_core.export(dataclasses.replace(decision, abort=strict), tmp_path)
    done, rows = trained(trainer_python, tmp_path, corpus, 1)
    assert done.returncode != 0
    assert "over 0.5 nats at step 5, before its update" in done.stdout + done.stderr
    assert len(rows) == 4
    assert not list(tmp_path.glob("outputs/*/step*"))
    done, _ = trained(trainer_python, tmp_path, corpus, 1, "num_ranks=2", f"data_loader.data_id={'a' * 64}")
    assert done.returncode != 0
    assert "1 ranks: 2 are wanted" in done.stdout + done.stderr, done.stderr[-6000:]
