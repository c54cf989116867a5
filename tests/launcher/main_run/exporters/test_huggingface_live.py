"""Tests of the Hugging Face export in transformers itself: parsers, groups, scheduler, weights,
logits, and whole runs.

The tests need an interpreter with transformers and accelerate (`make trainers
TRAINERS=huggingface`).
"""

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from export_case import SCHEDULES, SHAPE, make_wide_decision
from exported_program import edit_numbers
from huggingface_case import PROBE, train_export
from huggingface_live_case import list_checkpoints, read_history
from live_case import (
    LOGITS_TOLERANCE,
    RunCase,
    assert_same_run,
    make_tied_changes,
    make_varied_decision,
    measure_logit_difference,
    run_first_pass,
    train_natively,
)
from trainer_venv import require_interpreter, run_in_trainer

from forerun._launcher.main_run.exporters import proof
from forerun._launcher.main_run.exporters.comparison import TrainerView, compare
from forerun._launcher.main_run.exporters.trainers import huggingface
from forerun._launcher.main_run.frozen.frozen import Decision, Parallelism
from forerun._proxies.core import canon
from forerun._proxies.model.layers import NORM_EPS


@pytest.fixture
def trainer_python() -> Path:
    """Interpreter that has transformers; the test is skipped without it."""
    return require_interpreter("huggingface")


def list_disagreements(folder: Path, decision: Decision, ids: np.ndarray) -> list[str]:
    """Return the differences of an export, as transformers read it, from the decision.

    `PROBE` has written what transformers read to `found.json` and `found.npz`.
    """
    result = json.loads((folder.parent / "found.json").read_text())[str(folder)]
    shape, forward = decision.shape, decision.forward
    names = huggingface.parameter_names(shape)
    view = canon.decode(TrainerView, result["view"], "view")
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
        "config": {key: result["config"][key] for key in config} == config
        and not result["unknown"],
        "abort on NaN": "not finite at step 1, before its update; weights kept"
        in result["stopped"],
    }
    arrays = np.load(folder / "found.npz")
    weights, logits = run_first_pass(decision, ids)
    for name, weight in weights.items():
        checks[name] = np.array_equal(arrays[names[name]], weight)
    checks["logits"] = measure_logit_difference(logits, arrays["logits"]) < LOGITS_TOLERANCE
    return compare(decision, view, names) + [name for name, holds in checks.items() if not holds]


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
"""Wrong exports by name: a file, a text in it, the wrong text, and words of the problem that must
be reported."""


@pytest.mark.slow
def test_transformers_reads_the_frozen_run_and_every_mutant_is_noticed(
    tmp_path, corpus, manifest, trainer_python
):
    decisions = {
        schedule.kind: make_varied_decision(manifest, schedule=schedule) for schedule in SCHEDULES
    }
    decisions["tied"] = make_varied_decision(
        manifest, **make_tied_changes(manifest), clip_norm=None
    )
    for name, decision in decisions.items():
        huggingface.export(decision, tmp_path / name)
    for name, (file, old, new, _) in MUTANTS.items():
        path = shutil.copytree(tmp_path / "cosine", tmp_path / name) / file
        assert path.read_text().count(old) >= 1, name
        if file == "forerun.json":
            edit_numbers(path.parent, old, new)
        else:
            path.write_text(path.read_text().replace(old, new, 1))
    ids = np.random.default_rng(0).integers(0, 256, (3, SHAPE.seq_len))
    np.save(tmp_path / "ids.npy", ids)
    shutil.copytree(tmp_path / "cosine" / "proxies", tmp_path / "proxies")
    folders = [str(tmp_path / name) for name in (*decisions, *MUTANTS)]
    process = run_in_trainer(
        [trainer_python, "-c", PROBE, "ids.npy", *folders], tmp_path, FORERUN_DATA=corpus
    )
    assert process.returncode == 0, process.stderr[-3000:]
    for name, decision in decisions.items():
        assert list_disagreements(tmp_path / name, decision, ids) == [], name
    assert (
        proof.prove(decisions["tied"], "huggingface", huggingface.VERSIONS[-1], trainer_python)
        == []
    )
    for name, (_, _, _, words) in MUTANTS.items():
        problems = list_disagreements(tmp_path / name, decisions["cosine"], ids)
        assert any(words in problem for problem in problems), (name, problems)


RUNS = {
    "one rank, tied": RunCase(parallelism=Parallelism(data_parallel_shard=1), is_tied=True),
    "DDP that accumulates and recomputes": RunCase(
        parallelism=Parallelism(
            data_parallel_shard=1,
            data_parallel_replicate=2,
            microbatch_sequences=2,
            activation_checkpointing="selective",
        )
    ),
    "FSDP2 that recomputes, resumed": RunCase(
        parallelism=Parallelism(data_parallel_shard=2, activation_checkpointing="full"),
        is_resumed=True,
    ),
    "HSDP": RunCase(parallelism=Parallelism(data_parallel_shard=2, data_parallel_replicate=2)),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", RUNS.values(), ids=RUNS)
def test_transformers_trains_like_the_embedded_trainer(
    tmp_path, corpus, manifest, trainer_python, case
):
    decision, num_ranks = case.make_decision(manifest), case.parallelism.num_ranks
    huggingface.export(decision, tmp_path)
    process = train_export(trainer_python, tmp_path, corpus, num_ranks=num_ranks)
    assert process.returncode == 0, process.stderr[-3000:]
    assert [path.name for path in list_checkpoints(tmp_path)] == ["checkpoint-10", "checkpoint-12"]
    if case.is_resumed:
        newest = list_checkpoints(tmp_path)[-1]
        assert len(list(newest.glob("pytorch_model_fsdp_0/*.distcp"))) == 2, "one part per rank"
        # A killed run may leave an incomplete checkpoint. The run then resumes from the checkpoint
        # before it, at step 10 of 12.
        (newest / "trainer_state.json").unlink()
        process = train_export(trainer_python, tmp_path, corpus, num_ranks=num_ranks)
        assert process.returncode == 0, process.stderr[-3000:]
        assert process.stdout.count("'grad_norm'") == 2, "a log line of steps 11 and 12"
    plain = dataclasses.replace(case.parallelism, activation_checkpointing="none")
    expected = train_natively(dataclasses.replace(decision, parallelism=plain), tmp_path, corpus)
    # The history of transformers has no tokens.
    assert_same_run(read_history(tmp_path), expected[:, :3])


@pytest.mark.slow
def test_script_stops_above_the_ceiling_and_refuses_another_run(
    tmp_path, corpus, manifest, trainer_python
):
    decision = make_wide_decision(manifest)
    strict = dataclasses.replace(decision.abort, train_loss_above_nats=0.5)
    huggingface.export(dataclasses.replace(decision, abort=strict), tmp_path)
    process = train_export(trainer_python, tmp_path, corpus, num_ranks=1)
    assert process.returncode != 0
    assert "over 0.5 nats at step 5, before its update" in process.stderr
    assert not list_checkpoints(tmp_path)

    edit_numbers(tmp_path, manifest.data_id, "0" * 64)
    process = train_export(trainer_python, tmp_path, corpus, num_ranks=1)
    assert "frozen as 0000" in process.stderr
    edit_numbers(tmp_path, '"transformers": "5.23.0"', '"transformers": "5.0.0"')
    process = train_export(trainer_python, tmp_path, corpus, num_ranks=2)
    assert process.returncode != 0
    for word in ("must be 5.0.0", "2 ranks"):
        assert word in process.stderr, word
