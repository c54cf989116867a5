"""Tests of the OLMo-core export, read back number by number.

test_olmo_core_live.py runs the export in OLMo-core.
"""

import dataclasses
import json
from fnmatch import fnmatch
from pathlib import Path

import export_case
import pytest
from export_case import SHAPE, make_wide_decision, make_wide_spec
from exported_program import read_exported_numbers

from forerun._launcher.main_run.exporters.trainers import olmo_core
from forerun._launcher.main_run.frozen import frozen
from forerun._launcher.main_run.frozen.frozen import Decision, Parallelism
from forerun._proxies.core.rules import get_parametrization
from forerun._proxies.core.shape import list_parameter_shapes
from forerun._proxies.parametrization.parametrization import compute_parameter_table


def export_run(decision: Decision, folder: Path) -> dict:
    """Export a decision; return its run.json."""
    olmo_core.export(decision, folder)
    return json.loads((folder / "run.json").read_text())


def list_disagreements(run: dict, decision: Decision) -> list[str]:
    """Return the differences of the parameter groups of run.json from those of the decision.

    OLMo-core matches names of parameters to groups by fnmatch.
    """
    groups = frozen.assign_groups(decision.groups, list(list_parameter_shapes(decision.shape)))
    overrides = run["train_module"]["optim"]["group_overrides"]
    problems = []
    for name, trainer_name in olmo_core.parameter_names(decision.shape).items():
        matches = [
            override["opts"]
            for override in overrides
            if any(fnmatch(trainer_name, glob) for glob in override["params"])
        ]
        settings = groups[name].settings
        expected = {
            "lr": settings["learning_rate"],
            "weight_decay": settings["weight_decay"],
            "eps": settings["eps"],
            "betas": [settings["beta1"], settings["beta2"]],
        }
        if matches != [expected]:
            problems.append(f"{trainer_name}: {matches}")
    return problems


@pytest.mark.parametrize(("parametrization", "qk_norm"), [("mup", True), ("sp", False)])
def test_every_parameter_has_its_frozen_numbers(tmp_path, manifest, parametrization, qk_norm):
    spec = make_wide_spec(manifest.data_id, parametrization=get_parametrization(parametrization))
    shape = dataclasses.replace(SHAPE, qk_norm=qk_norm)
    spec = dataclasses.replace(spec, shape=shape, base_shape=shape.at_width(32))
    decision = make_wide_decision(
        manifest, shape=shape, groups=frozen.build_groups(compute_parameter_table(spec))
    )
    run = export_run(decision, tmp_path)
    assert list_disagreements(run, decision) == []
    assert run["digest"] == decision.digest
    assert decision.digest in (tmp_path / "run.sh").read_text()


EDITS = {
    "feed_forward.w2": "feed_forward.w9",  # no group claims w2
    "blocks.*.feed_forward_norm.weight": "blocks.*",  # two groups claim every weight of a block
    '"lr": 0.015625': '"lr": 0.0156250001',
    '"weight_decay": 0.2': '"weight_decay": 0.1',
}
"""Texts that replace texts of run.json; a comparison must notice each edit."""


def test_comparison_notices_an_edited_file(tmp_path, manifest):
    decision = make_wide_decision(manifest)
    text = json.dumps(export_run(decision, tmp_path))
    for old, new in EDITS.items():
        assert old in text
        assert list_disagreements(json.loads(text.replace(old, new)), decision)


def test_file_has_the_parallelism_shape_and_cadence(tmp_path, manifest):
    mesh = Parallelism(
        data_parallel_shard=2,
        data_parallel_replicate=2,
        microbatch_sequences=1,
        activation_checkpointing="full",
    )
    decision = make_wide_decision(manifest, parallelism=mesh, precision="bfloat16", clip_norm=None)
    run = export_run(decision, tmp_path)
    module, model, trainer = run["train_module"], run["model"], run["trainer"]
    assert "max_grad_norm" not in module
    assert (module["rank_microbatch_size"], module["max_sequence_length"]) == (32, 32)
    dp = module["dp_config"]
    assert (dp["name"], dp["num_replicas"], dp["shard_degree"], dp["param_dtype"]) == (
        "hsdp",
        2,
        2,
        "bfloat16",
    )
    assert (dp["reduce_dtype"], module["ac_config"]["mode"], run["num_ranks"]) == (
        "float32",
        "full",
        4,
    )
    block = model["block"]
    assert (model["embed_scale"], block["sequence_mixer"]["softmax_scale"]) == (2.0, 0.25)
    assert model["lm_head"]["layer_norm"]["multiplier"] == 0.75
    assert (block["sequence_mixer"]["n_kv_heads"], block["sequence_mixer"]["rope"]["theta"]) == (
        2,
        10_000,
    )
    assert (
        trainer["max_duration"]["value"],
        trainer["callbacks"]["checkpointer"]["save_interval"],
    ) == (12, 10)
    assert trainer["callbacks"]["checkpointer"]["max_checkpoints"] == 2
    assert (
        read_exported_numbers(tmp_path).batch_sequences,
        read_exported_numbers(tmp_path).data_id,
    ) == (
        8,
        manifest.data_id,
    )


def test_all_reasons_of_a_refusal_are_reported_at_once(tmp_path, manifest):
    mesh = Parallelism(
        data_parallel_shard=1, tensor=2, pipeline=2, context=2, microbatch_sequences=3
    )
    export_case.assert_refused(
        olmo_core.export,
        export_case.make_unrunnable_decision(manifest, parallelism=mesh),
        tmp_path / "out",
        *(*export_case.UNRUNNABLE, "tensor = 2", "pipeline = 2", "context = 2", "share of 8"),
    )


def test_unsupported_decay_shape_is_refused(tmp_path, manifest):
    schedule = dataclasses.replace(export_case.SCHEDULES[2], decay_shape="sqrt")
    decision = make_wide_decision(manifest, schedule=schedule)
    export_case.assert_refused(
        olmo_core.export, decision, tmp_path / "out", "proxy.decay_shape = 'sqrt'"
    )
