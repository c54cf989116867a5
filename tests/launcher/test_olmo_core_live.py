"""The olmo-core export in the hands of OLMo-core: parser, groups, scheduler, FLOPs, weights,
logits, and whole runs.

Unpatched, on CPUs. Needs an interpreter with OLMo-core (`make trainers TRAINERS=olmo-core`).
"""

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from export_case import SCHEDULES, SHAPE
from live_case import (
    GROWING_BATCH,
    LOGITS_TOLERANCE,
    assert_same_run,
    curve,
    first_pass,
    native,
    share_apart,
    tied,
    varied,
)
from trainer_venv import in_trainer, interpreter, torchrun

from launcher.exporters import proof
from launcher.exporters.trainers import olmo_core
from launcher.exporters.view import compare
from launcher.frozen.frozen import Decision, Parallelism
from proxies.core.schedule import Schedule

PROBE = """
import json, sys
import numpy as np, torch
from forerun_olmo_core import FROZEN, RUN_FILE, SEQ_LEN, RunConfig, frozen_name
from forerun_torch import set_initial_values
config = RunConfig.from_file(RUN_FILE)
assert RunConfig.from_dict(config.as_config_dict()) == config
model = config.model.build(init_device="meta")
model.to_empty(device=torch.device("cpu"))
if model.tie_word_embeddings:
    model._tie_weights()  # as init_weights does in a run
set_initial_values(model, FROZEN, frozen_name)
with torch.no_grad():
    logits = model(torch.from_numpy(np.load("ids.npy")))
np.savez("found.npz", logits=logits.numpy(),
         **{name: p.detach().numpy() for name, p in model.named_parameters()})
"""


@pytest.fixture
def trainer_python() -> Path:
    return interpreter("olmo-core")


def differences(folder: Path, decision: Decision, python: Path) -> list[str]:
    view = proof.ask("olmo-core", python, folder)
    return compare(decision, view, olmo_core.parameter_names(decision.shape))


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: s.kind)
def test_olmo_cores_own_parser_groups_and_scheduler_give_the_frozen_numbers(
    tmp_path, manifest, trainer_python, schedule
):
    decision = varied(
        manifest, schedule=schedule, clip_norm=None if schedule.kind == "constant" else 0.5
    )
    olmo_core.export(decision, tmp_path)
    assert differences(tmp_path, decision, trainer_python) == []


MUTANTS = {
    "lr": ('"lr": 0.015625', '"lr": 0.01562501', "learning_rate is 0.01562501"),
    "pattern": (
        "blocks.*.feed_forward.w2.weight",
        "blocks.0.feed_forward.w2.weight",
        "blocks.1.feed_forward.w2",
    ),
    "warmup": ('"warmup": 3', '"warmup": 2', "the rate at step 0"),
    "decay_start": ('"schedulers_max": [', '"schedulers_max": [\n1,', "the rate at step"),
    "clip": ('"max_grad_norm": 0.5', '"max_grad_norm": 1.0', "clip_norm is 1.0"),
    "residual": (
        '"attention_residual_alpha": 0.6',
        '"attention_residual_alpha": 0.5',
        "too many values to unpack",
    ),
    "unknown": ('"foreach": true', '"for_each": true', "for_each"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_the_comparison_notices_a_changed_file(tmp_path, manifest, trainer_python, name):
    decision = varied(manifest)
    olmo_core.export(decision, tmp_path)
    old, new, said = MUTANTS[name]
    path = tmp_path / "run.json"
    before, found, after = path.read_text().rpartition(old)
    assert found
    path.write_text(before + new + after)
    try:
        problems = differences(tmp_path, decision, trainer_python)
    except proof.ProofError as error:
        problems = error.problems
    assert said in " | ".join(problems)


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["untied", "tied", "qk_norm"])
def test_weights_and_logits_are_the_embedded_trainers(tmp_path, manifest, trainer_python, variant):
    changes = tied(manifest) if variant == "tied" else {}
    decision = varied(manifest, **changes)
    if variant == "qk_norm":
        shape = dataclasses.replace(SHAPE, qk_norm=True)
        gains = next(g for g in decision.groups if g.kind == "block_gain")
        gains_of_heads = dataclasses.replace(
            gains, pattern=r"layers\.\d+\.attention\.[qk]_norm\.weight"
        )
        decision = dataclasses.replace(
            decision, shape=shape, groups=(*decision.groups, gains_of_heads)
        )
    olmo_core.export(decision, tmp_path)
    shape = decision.shape
    ids = np.random.default_rng(0).integers(0, 256, (3, shape.seq_len))
    np.save(tmp_path / "ids.npy", ids)
    done = in_trainer([trainer_python, "-c", PROBE], tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    found, names = np.load(tmp_path / "found.npz"), olmo_core.parameter_names(shape)
    weights, logits = first_pass(decision, ids)
    for name, weight in weights.items():
        assert np.array_equal(found[names[name]], weight), name
    difference = share_apart(logits, found["logits"])
    print(f"{variant}: logits within {difference:.1e} of the largest")
    assert difference < LOGITS_TOLERANCE


def trained(python: Path, folder: Path, corpus: Path, num_ranks: int, *options: str):
    """The export's own script, unpatched, on so many ranks of this machine; its steps, losses and
    gradient norms.
    """
    command = [*torchrun(python, num_ranks), "train.py", *options]
    done = in_trainer(command, folder, FORERUN_DATA=corpus, OLMO_SHARED_FS="1")
    files = list(folder.glob("outputs/*/metrics.jsonl"))
    rows = [json.loads(line) for line in files[0].read_text().splitlines()] if files else []
    return done, curve(rows)


RUNS = {
    "fsdp-resumed-on-one-rank": Parallelism(data_parallel_shard=2),
    "replicas-accumulating-recomputing-tied": Parallelism(
        data_parallel_shard=1,
        data_parallel_replicate=2,
        microbatch_sequences=2,
        activation_checkpointing="full",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_two_ranks_train_the_embedded_trainers_run(
    tmp_path, corpus, manifest, trainer_python, name
):
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
    assert_same_run(found, native(decision, tmp_path, corpus), name)


@pytest.mark.slow
def test_longer_runs_part_by_rounding_alone(tmp_path, corpus, manifest, trainer_python):
    """The embedded trainer parts as far from itself, with sums in another order or weights that
    differ by an ulp.
    """
    schedule = Schedule(kind="cosine", num_steps=55, warmup_steps=3, final_fraction=0.1)
    decision = varied(manifest, schedule=schedule)
    one_by_one = Parallelism(data_parallel_shard=1, microbatch_sequences=1)
    groups = tuple(
        dataclasses.replace(g, init_std=g.init_std * (1 + 2**-22)) for g in decision.groups
    )
    ours = native(decision, tmp_path / "ours", corpus)
    others = {
        "another order": native(
            dataclasses.replace(decision, parallelism=one_by_one), tmp_path / "order", corpus
        ),
        "one ulp": native(dataclasses.replace(decision, groups=groups), tmp_path / "ulp", corpus),
    }
    olmo_core.export(decision, tmp_path / "olmo")
    done, theirs = trained(trainer_python, tmp_path / "olmo", corpus, 1, "num_ranks=1")
    assert done.returncode == 0, done.stderr[-3000:]
    apart = {
        name: np.abs(found - ours)[:, 1].max()
        for name, found in {**others, "OLMo-core": theirs}.items()
    }
    print(", ".join(f"{name}: {nats:.1e} nats" for name, nats in apart.items()))
    assert len(theirs) == 55 and apart["OLMo-core"] < 3 * max(apart[name] for name in others)


@pytest.mark.slow
def test_the_brakes_stop_before_the_update_and_other_runs_are_refused(
    tmp_path, corpus, manifest, trainer_python
):
    decision = varied(manifest)
    strict = dataclasses.replace(decision.abort, train_loss_above_nats=0.5)
    olmo_core.export(dataclasses.replace(decision, abort=strict), tmp_path)
    done, rows = trained(trainer_python, tmp_path, corpus, 1)
    assert done.returncode != 0
    assert "over 0.5 nats at step 5, before its update" in done.stdout + done.stderr
    assert len(rows) == 4
    assert not list(tmp_path.glob("outputs/*/step*"))
    done, _ = trained(trainer_python, tmp_path, corpus, 1, "num_ranks=2")
    assert done.returncode != 0
    assert "1 ranks: must be 2" in done.stdout + done.stderr, done.stderr[-6000:]
