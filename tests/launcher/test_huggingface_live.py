"""The huggingface export in the hands of transformers: parsers, groups, scheduler, weights, logits,
and whole runs.

Needs an interpreter with transformers and accelerate (`make trainers TRAINERS=huggingface`).
"""

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from export_case import SCHEDULES, SHAPE, wide_decision
from exported_program import change
from huggingface_case import PROBE, trained
from live_case import (
    GROWING_BATCH,
    LOGITS_TOLERANCE,
    assert_same_run,
    first_pass,
    native,
    share_apart,
    tied,
    varied,
)
from trainer_venv import in_trainer, interpreter

from launcher.exporters import fidelity, proof
from launcher.exporters.trainers import huggingface
from launcher.exporters.view import TrainerView, compare
from launcher.frozen.frozen import Decision, Parallelism
from proxies.core import canon
from proxies.model.decoder import NORM_EPS


@pytest.fixture
def trainer_python() -> Path:
    return interpreter("huggingface")


def disagreements(folder: Path, decision: Decision, ids: np.ndarray) -> list[str]:
    """Where what transformers made of an export differs from the decision."""
    found = json.loads((folder.parent / "found.json").read_text())[str(folder)]
    shape, forward = decision.shape, decision.forward
    theirs = huggingface.parameter_names(shape)
    view = canon.decode(TrainerView, found["view"], "view")
    config = {
        "hidden_size": shape.width,
        "num_hidden_layers": shape.num_layers,
        "vocab_size": shape.vocab_size,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "intermediate_size": shape.ffn_width,
        "tie_word_embeddings": shape.tied,
        "rms_norm_eps": NORM_EPS,
        "embedding_multiplier": forward.embedding,
        "attention_multiplier": forward.attention,
        "residual_multiplier": forward.residual,
        "logits_scaling": 1 / forward.output,
    }
    checks = {
        "config": {key: found["config"][key] for key in config} == config and not found["unknown"],
        "brake": "not finite at step 1, before its update; weights kept" in found["stopped"],
    }
    arrays = np.load(folder / "found.npz")
    weights, logits = first_pass(decision, ids)
    for name, weight in weights.items():
        checks[name] = np.array_equal(arrays[theirs[name]], weight)
    difference = share_apart(logits, arrays["logits"])
    checks["logits"] = difference < LOGITS_TOLERANCE
    print(f"{folder.name}: logits within {difference:.1e} of the largest")
    return compare(decision, view, theirs) + [name for name, holds in checks.items() if not holds]


MUTANTS = {
    "lr": (
        "forerun.json",
        '"learning_rate": 0.015625',
        '"learning_rate": 0.01562501',
        "learning_rate is 0.01562501",
    ),
    "decay": ("forerun.json", '"weight_decay": 0.2', '"weight_decay": 0.1', "weight_decay is 0.1"),
    "warmup": ("forerun.json", '"warmup_steps": 3', '"warmup_steps": 2', "the rate at step 0"),
    "seed": ("forerun.json", '"seed": 7', '"seed": 8', "lm_head.weight"),
    "embedding": (
        "config.json",
        '"embedding_multiplier": 2.0',
        '"embedding_multiplier": 2.001',
        "forward.embedding",
    ),
    "attention": (
        "config.json",
        '"attention_multiplier": 0.2',
        '"attention_multiplier": 0.25',
        "forward.attention",
    ),
    "residual": (
        "config.json",
        '"residual_multiplier": 0.6',
        '"residual_multiplier": 1.0',
        "forward.residual",
    ),
    "output": (
        "config.json",
        '"logits_scaling": 1.3333333333333333',
        '"logits_scaling": 0.75',
        "forward.output",
    ),
    "rope": ("config.json", '"rope_theta": 10000.0', '"rope_theta": 500000.0', "logits"),
    "clip": (
        "training_arguments.json",
        '"max_grad_norm": 0.5',
        '"max_grad_norm": 1.0',
        "clip_norm is 1.0",
    ),
    "steps": ("training_arguments.json", '"max_steps": 12', '"max_steps": 11', "num_steps is 11"),
    "batch": (
        "training_arguments.json",
        '"per_device_train_batch_size": 8',
        '"per_device_train_batch_size": 4',
        "batch_tokens is 128",
    ),
}


@pytest.mark.slow
def test_transformers_own_parsers_groups_scheduler_weights_and_logits_are_the_frozen_ones(
    tmp_path, corpus, manifest, trainer_python, monkeypatch
):
    decisions = {schedule.kind: varied(manifest, schedule=schedule) for schedule in SCHEDULES}
    decisions["tied"] = varied(manifest, **tied(manifest), clip_norm=None)
    for name, decision in decisions.items():
        huggingface.export(decision, tmp_path / name)
    for name, (file, old, new, _) in MUTANTS.items():
        path = shutil.copytree(tmp_path / "cosine", tmp_path / name) / file
        assert path.read_text().count(old) >= 1, name
        if file == "forerun.json":
            change(path.parent, old, new)
        else:
            path.write_text(path.read_text().replace(old, new, 1))
    ids = np.random.default_rng(0).integers(0, 256, (3, SHAPE.seq_len))
    np.save(tmp_path / "ids.npy", ids)
    shutil.copytree(tmp_path / "cosine" / "proxies", tmp_path / "proxies")
    folders = [str(tmp_path / name) for name in (*decisions, *MUTANTS)]
    done = in_trainer(
        [trainer_python, "-c", PROBE, "ids.npy", *folders], tmp_path, FORERUN_DATA=corpus
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for name, decision in decisions.items():
        assert disagreements(tmp_path / name, decision, ids) == [], name
    monkeypatch.setitem(fidelity.MODULES, "huggingface", "huggingface")
    assert (
        proof.prove(decisions["tied"], "huggingface", huggingface.VERSIONS[-1], trainer_python)
        == []
    )
    for name, (_, _, _, wanted) in MUTANTS.items():
        told = disagreements(tmp_path / name, decisions["cosine"], ids)
        assert any(wanted in problem for problem in told), (name, told)


def history(export_dir: Path) -> np.ndarray:
    """Step, loss and gradient norm of every step, as the Trainer's newest checkpoint tells them."""
    newest = checkpoints(export_dir)[-1]
    rows = json.loads((newest / "trainer_state.json").read_text())["log_history"]
    return np.array([[row["step"], row["loss"], row["grad_norm"]] for row in rows if "loss" in row])


def checkpoints(export_dir: Path) -> list[Path]:
    return sorted(
        export_dir.glob("outputs/*/checkpoint-*"),
        key=lambda path: int(path.name.rpartition("-")[2]),
    )


RUNS = {
    "one-rank-tied": Parallelism(data_parallel_shard=1),
    "ddp-accumulating": Parallelism(
        data_parallel_shard=1,
        data_parallel_replicate=2,
        microbatch_sequences=2,
        activation_checkpointing="selective",
    ),
    "fsdp2-resumed": Parallelism(data_parallel_shard=2, activation_checkpointing="full"),
    "hsdp": Parallelism(data_parallel_shard=2, data_parallel_replicate=2),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_transformers_trains_the_embedded_trainers_run(
    tmp_path, corpus, manifest, trainer_python, name
):
    parallelism = RUNS[name]
    changes = tied(manifest) if name == "one-rank-tied" else {}
    decision = varied(manifest, parallelism=parallelism, schedule=GROWING_BATCH, **changes)
    huggingface.export(decision, tmp_path)
    done = trained(trainer_python, tmp_path, corpus, parallelism.num_ranks)
    assert done.returncode == 0, done.stderr[-3000:]
    assert [path.name for path in checkpoints(tmp_path)] == ["checkpoint-10", "checkpoint-12"]
    if name == "fsdp2-resumed":
        newest = checkpoints(tmp_path)[-1]
        assert len(list(newest.glob("pytorch_model_fsdp_0/*.distcp"))) == 2  # sharded for real
        # as if killed while it was written: the one before it is used
        (newest / "trainer_state.json").unlink()
        done = trained(trainer_python, tmp_path, corpus, 2)
        assert done.returncode == 0, done.stderr[-3000:]
        assert done.stdout.count("'grad_norm'") == 2
    alone = dataclasses.replace(parallelism, activation_checkpointing="none")
    wanted = native(dataclasses.replace(decision, parallelism=alone), tmp_path, corpus)
    assert_same_run(history(tmp_path), wanted[:, :3], name)


@pytest.mark.slow
def test_the_script_stops_above_the_frozen_ceiling_and_refuses_other_runs(
    tmp_path, corpus, manifest, trainer_python
):
    decision = wide_decision(manifest)
    strict = dataclasses.replace(decision.abort, train_loss_above_nats=0.5)
    huggingface.export(dataclasses.replace(decision, abort=strict), tmp_path)
    done = trained(trainer_python, tmp_path, corpus, 1)
    assert done.returncode != 0
    assert "over 0.5 nats at step 5, before its update" in done.stderr
    assert not checkpoints(tmp_path)

    change(tmp_path, manifest.data_id, "0" * 64)
    assert "frozen as 0000" in trained(trainer_python, tmp_path, corpus, 1).stderr
    change(tmp_path, '"transformers": "5.23.0"', '"transformers": "5.0.0"')
    done = trained(trainer_python, tmp_path, corpus, 2)
    assert done.returncode != 0
    for word in ("must be 5.0.0", "2 ranks"):
        assert word in done.stderr, word
