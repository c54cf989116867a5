"""The olmo-core export, read back number by number. What OLMo-core makes of it:
test_olmo_core_live.py.
"""

import dataclasses
import json
from fnmatch import fnmatch
from pathlib import Path

import export_case
import pytest
from export_case import SHAPE, wide_decision, wide_spec
from exported_program import frozen_in

from launcher.exporters.trainers import olmo_core
from launcher.frozen import frozen
from launcher.frozen.frozen import Decision, Parallelism
from proxies.core.rules import named
from proxies.core.shape import parameter_shapes
from proxies.parametrization.parametrization import parameter_table


def exported(decision: Decision, folder: Path) -> dict:
    olmo_core.export(decision, folder)
    return json.loads((folder / "run.json").read_text())


def disagreements(run: dict, decision: Decision) -> list[str]:
    """Where the groups in the file, by OLMo-core's rule (fnmatch), differ from the decision's."""
    wanted = frozen.assign_groups(decision.groups, list(parameter_shapes(decision.shape)))
    problems = []
    for name, theirs in olmo_core.parameter_names(decision.shape).items():
        optim = run["train_module"]["optim"]["group_overrides"]
        found = [
            group["opts"]
            for group in optim
            if any(fnmatch(theirs, glob) for glob in group["params"])
        ]
        g = wanted[name]
        numbers = {"lr": g.learning_rate, "weight_decay": g.weight_decay, "eps": g.settings["eps"]}
        numbers["betas"] = [g.settings["beta1"], g.settings["beta2"]]
        problems += [f"{theirs}: {found}"] * (found != [numbers])
    return problems


@pytest.mark.parametrize(("parametrization", "qk_norm"), [("mup", True), ("sp", False)])
def test_every_parameter_has_its_frozen_numbers_in_the_file(
    tmp_path, manifest, parametrization, qk_norm
):
    spec = wide_spec(manifest.data_id, parametrization=named(parametrization))
    shape = dataclasses.replace(SHAPE, qk_norm=qk_norm)
    spec = dataclasses.replace(spec, shape=shape, base_shape=shape.at_width(32))
    decision = wide_decision(manifest, shape=shape, groups=frozen.groups_of(parameter_table(spec)))
    run = exported(decision, tmp_path)
    assert disagreements(run, decision) == []
    assert run["digest"] == decision.digest
    assert decision.digest in (tmp_path / "run.sh").read_text()


CHANGED = {
    "feed_forward.w2": "feed_forward.w9",  # nobody claims w2
    "blocks.*.feed_forward_norm.weight": "blocks.*",  # two claim every weight of a block
    '"lr": 0.015625': '"lr": 0.0156250001',
    '"weight_decay": 0.2': '"weight_decay": 0.1',
}


def test_the_comparison_notices_a_changed_file(tmp_path, manifest):
    decision = wide_decision(manifest)
    text = json.dumps(exported(decision, tmp_path))
    for old, new in CHANGED.items():
        assert old in text
        assert disagreements(json.loads(text.replace(old, new)), decision)


def test_the_other_numbers_are_in_the_file(tmp_path, manifest):
    mesh = Parallelism(
        data_parallel_shard=2,
        data_parallel_replicate=2,
        microbatch_sequences=1,
        activation_checkpointing="full",
    )
    decision = wide_decision(manifest, parallelism=mesh, precision="bfloat16", clip_norm=None)
    run = exported(decision, tmp_path)
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
    assert (frozen_in(tmp_path).batch_sequences, frozen_in(tmp_path).data_id) == (
        8,
        manifest.data_id,
    )


def test_everything_that_cannot_be_run_is_said_at_once(tmp_path, manifest):
    mesh = Parallelism(
        data_parallel_shard=1, tensor=2, pipeline=2, context=2, microbatch_sequences=3
    )
    said = (*export_case.UNRUNNABLE, "tensor = 2", "pipeline = 2", "context = 2", "share of 8")
    export_case.assert_refused(
        olmo_core.export,
        export_case.unrunnable(manifest, parallelism=mesh),
        tmp_path / "out",
        *said,
    )


def test_a_decay_that_it_lacks_is_refused(tmp_path, manifest):
    schedule = dataclasses.replace(export_case.SCHEDULES[2], decay_shape="sqrt")
    decision = wide_decision(manifest, schedule=schedule)
    export_case.assert_refused(
        olmo_core.export, decision, tmp_path / "out", "proxy.decay_shape = 'sqrt'"
    )
