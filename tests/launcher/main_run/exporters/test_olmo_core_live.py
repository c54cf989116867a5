"""Tests of the OLMo-core export in OLMo-core itself, unpatched and on CPUs: parser, groups,
scheduler, FLOPs, weights, logits, and whole runs.

The tests need an interpreter with OLMo-core (`make trainers TRAINERS=olmo-core`).
"""

import dataclasses
import shutil
from pathlib import Path

import numpy as np
import pytest
from export_case import SCHEDULES, SHAPE
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
from olmo_core_live_case import train_export
from trainer_venv import require_interpreter, run_in_trainer

from forerun._launcher.main_run.exporters import proof
from forerun._launcher.main_run.exporters.comparison import compare
from forerun._launcher.main_run.exporters.trainers import olmo_core
from forerun._launcher.main_run.frozen.frozen import Decision, Parallelism
from forerun._proxies.core.schedule import Schedule

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
    """Interpreter that has OLMo-core; the test is skipped without it."""
    return require_interpreter("olmo-core")


def list_differences(folder: Path, decision: Decision, python: Path) -> list[str]:
    """Return the differences of an export, as OLMo-core reads it, from the decision."""
    view = proof.ask_trainer("olmo-core", python, folder)
    return compare(decision, view, olmo_core.parameter_names(decision.shape))


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: s.kind)
def test_olmo_core_reads_the_frozen_numbers(tmp_path, manifest, trainer_python, schedule):
    decision = make_varied_decision(
        manifest, schedule=schedule, clip_norm=None if schedule.kind == "constant" else 0.5
    )
    olmo_core.export(decision, tmp_path)
    assert list_differences(tmp_path, decision, trainer_python) == []


# prove.py unpacks the set of all layers' residual multipliers into one variable. It ends with this
# error of Python if the layers have different ones.
SEVERAL_MULTIPLIERS = "too many values to unpack"
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
        SEVERAL_MULTIPLIERS,
    ),
    "unknown": ('"foreach": true', '"for_each": true', "for_each"),
}
"""Wrong exports by name: a text of run.json, the wrong text, and words that a reported problem must
have."""


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_comparison_notices_an_edited_file(tmp_path, manifest, trainer_python, name):
    decision = make_varied_decision(manifest)
    olmo_core.export(decision, tmp_path)
    old, new, words = MUTANTS[name]
    path = tmp_path / "run.json"
    before, match, after = path.read_text().rpartition(old)
    assert match
    path.write_text(before + new + after)
    try:
        problems = list_differences(tmp_path, decision, trainer_python)
    except proof.ProofError as error:
        problems = error.problems
    assert words in " | ".join(problems)


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["untied", "tied", "qk_norm"])
def test_weights_and_logits_equal_the_embedded_trainers(
    tmp_path, manifest, trainer_python, variant
):
    changes = make_tied_changes(manifest) if variant == "tied" else {}
    decision = make_varied_decision(manifest, **changes)
    if variant == "qk_norm":
        shape = dataclasses.replace(SHAPE, qk_norm=True)
        gains = next(g for g in decision.groups if g.kind == "block_gain")
        head_gains = dataclasses.replace(
            gains, pattern=r"layers\.\d+\.attention\.[qk]_norm\.weight"
        )
        decision = dataclasses.replace(decision, shape=shape, groups=(*decision.groups, head_gains))
    olmo_core.export(decision, tmp_path)
    shape = decision.shape
    ids = np.random.default_rng(0).integers(0, 256, (3, shape.seq_len))
    np.save(tmp_path / "ids.npy", ids)
    process = run_in_trainer([trainer_python, "-c", PROBE], tmp_path)
    assert process.returncode == 0, process.stderr[-3000:]
    arrays, names = np.load(tmp_path / "found.npz"), olmo_core.parameter_names(shape)
    weights, logits = run_first_pass(decision, ids)
    for name, weight in weights.items():
        assert np.array_equal(arrays[names[name]], weight), name
    assert measure_logit_difference(logits, arrays["logits"]) < LOGITS_TOLERANCE


RUNS = {
    "FSDP, resumed on one rank": RunCase(
        parallelism=Parallelism(data_parallel_shard=2), is_resumed=True
    ),
    "replicas that accumulate and recompute, tied": RunCase(
        parallelism=Parallelism(
            data_parallel_shard=1,
            data_parallel_replicate=2,
            microbatch_sequences=2,
            activation_checkpointing="full",
        ),
        schedule=SCHEDULES[0],
        is_tied=True,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", RUNS.values(), ids=RUNS)
def test_two_ranks_train_like_the_embedded_trainer(
    tmp_path, corpus, manifest, trainer_python, case
):
    decision = case.make_decision(manifest)
    tokens = case.schedule.num_full_batches * decision.batch_tokens
    assert decision.num_tokens == tokens
    olmo_core.export(decision, tmp_path)
    process, curve = train_export(trainer_python, tmp_path, corpus, num_ranks=2)
    assert process.returncode == 0, process.stderr[-3000:]
    folder = next(tmp_path.glob("outputs/*"))
    assert {p.name for p in folder.glob("step*")} == {"step10", "step12"}
    if case.is_resumed:
        shutil.rmtree(folder / "step12")
        process, curve = train_export(trainer_python, tmp_path, corpus, "num_ranks=1", num_ranks=1)
        assert process.returncode == 0, process.stderr[-3000:]
        assert (folder / "step12").exists()
    assert_same_run(curve, train_natively(decision, tmp_path, corpus))


@pytest.mark.slow
def test_longer_runs_differ_by_rounding_only(tmp_path, corpus, manifest, trainer_python):
    """OLMo-core differs from the embedded trainer by less than three times the effect of rounding.

    Two more runs of the embedded trainer measure the effect of rounding. One adds in another order.
    The other starts from weights that differ by about one unit in the last place.
    """
    schedule = Schedule(kind="cosine", num_steps=55, warmup_steps=3, final_fraction=0.1)
    decision = make_varied_decision(manifest, schedule=schedule)
    one_by_one = Parallelism(data_parallel_shard=1, microbatch_sequences=1)
    groups = tuple(
        dataclasses.replace(g, init_std=g.init_std * (1 + 2**-22)) for g in decision.groups
    )
    reference = train_natively(decision, tmp_path / "native", corpus)
    reordered = train_natively(
        dataclasses.replace(decision, parallelism=one_by_one), tmp_path / "order", corpus
    )
    perturbed = train_natively(
        dataclasses.replace(decision, groups=groups), tmp_path / "ulp", corpus
    )
    olmo_core.export(decision, tmp_path / "olmo")
    process, olmo_curve = train_export(
        trainer_python, tmp_path / "olmo", corpus, "num_ranks=1", num_ranks=1
    )
    assert process.returncode == 0, process.stderr[-3000:]
    curves = {"another order": reordered, "one ulp": perturbed, "OLMo-core": olmo_curve}
    differences = {name: np.abs(curve - reference)[:, 1].max() for name, curve in curves.items()}
    assert len(olmo_curve) == 55
    rounding_nats = max(differences["another order"], differences["one ulp"])
    assert differences["OLMo-core"] < 3 * rounding_nats


@pytest.mark.slow
def test_script_stops_above_the_ceiling_and_refuses_another_number_of_ranks(
    tmp_path, corpus, manifest, trainer_python
):
    decision = make_varied_decision(manifest)
    strict = dataclasses.replace(decision.abort, train_loss_above_nats=0.5)
    olmo_core.export(dataclasses.replace(decision, abort=strict), tmp_path)
    process, rows = train_export(trainer_python, tmp_path, corpus, num_ranks=1)
    assert process.returncode != 0
    assert "over 0.5 nats at step 5, before its update" in process.stdout + process.stderr
    assert len(rows) == 4
    assert not list(tmp_path.glob("outputs/*/step*"))
    process, _ = train_export(trainer_python, tmp_path, corpus, "num_ranks=2", num_ranks=1)
    assert process.returncode != 0
    assert "1 ranks: must be 2" in process.stdout + process.stderr, process.stderr[-6000:]
