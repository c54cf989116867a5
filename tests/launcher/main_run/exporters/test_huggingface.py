"""Tests of the Hugging Face export, read back number by number.

test_huggingface_live.py runs the export in transformers.
"""

import dataclasses
import json
import types
import typing
from pathlib import Path

import export_case
import numpy as np
import torch
from export_case import SHAPE, make_wide_decision, make_wide_spec
from exported_program import edit_numbers, import_program, read_exported_numbers

from forerun._launcher.main_run.exporters.trainers import huggingface
from forerun._launcher.main_run.frozen import frozen
from forerun._launcher.main_run.frozen.frozen import Decision, Parallelism
from forerun._proxies.core.schedule import Schedule
from forerun._proxies.core.shape import list_parameter_shapes
from forerun._proxies.data.tokens import TokenStore
from forerun._proxies.parametrization.parametrization import (
    compute_parameter_table,
    draw_initial_tensor,
)

LARGE_SEED = 2**33 + 5


def import_script(folder: Path) -> typing.Any:
    """Import the training script of an export."""
    return import_program(folder, "forerun_huggingface")


class FakeModel:
    """A stand-in for the transformers model with parameters and their names only."""

    def __init__(self, decision: Decision) -> None:
        names = huggingface.parameter_names(decision.shape)
        sizes = list_parameter_shapes(decision.shape)
        self.parameters = {
            names[name]: torch.nn.Parameter(torch.zeros(size)) for name, size in sizes.items()
        }

    def named_parameters(self) -> typing.Iterator[tuple[str, torch.nn.Parameter]]:
        return iter(self.parameters.items())


def list_disagreements(folder: Path, decision: Decision) -> list[str]:
    """Return the differences of the optimizer that the script builds from the decision's groups."""
    model = FakeModel(decision)
    try:
        optimizer = import_script(folder).build_optimizer(model)
    except ValueError as error:
        return [str(error)]
    live_groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    names, problems = huggingface.parameter_names(decision.shape), []
    for name, group in frozen.assign_groups(decision.groups, list(names)).items():
        live = live_groups[id(model.parameters[names[name]])]
        live_settings = (live["lr"], live["weight_decay"], live["eps"], *live["betas"])
        settings = tuple(
            group.settings[setting]
            for setting in ("learning_rate", "weight_decay", "eps", "beta1", "beta2")
        )
        if live_settings != settings:
            problems.append(f"{name}: {live_settings} != {settings}")
    return problems


def test_optimizer_has_the_frozen_numbers_and_edits_are_noticed(tmp_path, manifest):
    decision = make_wide_decision(manifest)
    renamed = ('["mlp.up_proj", "feed_forward.w3"]', '["mlp.up_proj", "feed_forward.w4"]')
    for old, new in (*export_case.CHANGED_GROUPS, renamed):
        huggingface.export(decision, tmp_path)
        assert list_disagreements(tmp_path, decision) == []
        edit_numbers(tmp_path, old, new)
        assert list_disagreements(tmp_path, decision), new


def test_initial_values_equal_the_embedded_trainers_bitwise(tmp_path, manifest):
    decision = make_wide_decision(manifest)
    huggingface.export(decision, tmp_path)
    script = import_script(tmp_path)
    script.empty_model = lambda: FakeModel(decision)
    built, names = script.build_model().parameters, huggingface.parameter_names(SHAPE)
    for numbers in compute_parameter_table(make_wide_spec(manifest.data_id)):
        assert torch.equal(built[names[numbers.name]], draw_initial_tensor(numbers, seed=7)), (
            numbers.name
        )


def test_model_config_has_the_shape_and_the_four_multipliers(tmp_path, manifest):
    decision = make_wide_decision(manifest)
    forward = dataclasses.replace(decision.forward, attention=0.125, residual=0.5, output=0.8)
    shape = dataclasses.replace(SHAPE, tied=True)
    groups = tuple(g for g in decision.groups if g.kind != "readout")
    huggingface.export(
        dataclasses.replace(decision, forward=forward, shape=shape, groups=groups), tmp_path
    )
    config = json.loads((tmp_path / "config.json").read_text())
    multipliers = {
        key: config[key] for key in config if key.endswith("_multiplier") or key == "logits_scaling"
    }
    assert multipliers == {
        "embedding_multiplier": 2.0,
        "attention_multiplier": 0.125,
        "residual_multiplier": 0.5,
        "logits_scaling": 1.25,
    }
    assert (
        config["num_key_value_heads"],
        config["num_attention_heads"],
        config["intermediate_size"],
    ) == (2, 4, 160)
    assert (config["rms_norm_eps"], config["rope_parameters"]["rope_theta"]) == (1e-5, 10_000)
    assert config["tie_word_embeddings"] is True


def export_arguments(decision: Decision, folder: Path) -> dict[str, typing.Any]:
    """Export a decision; return its training arguments."""
    huggingface.export(decision, folder)
    arguments: dict[str, typing.Any] = json.loads((folder / "training_arguments.json").read_text())
    return arguments


def test_training_arguments_say_batch_clip_precision_and_cadence(tmp_path, manifest):
    mesh = Parallelism(
        data_parallel_shard=1,
        data_parallel_replicate=2,
        microbatch_sequences=2,
        activation_checkpointing="full",
    )
    arguments = export_arguments(
        make_wide_decision(manifest, parallelism=mesh, precision="bfloat16", seed=LARGE_SEED),
        tmp_path,
    )
    expected = {
        "max_steps": 12,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_grad_norm": 0.5,
        "bf16": True,
        "seed": LARGE_SEED % 2**32,  # transformers takes no larger seed.
        "save_steps": 10,
        "save_total_limit": 2,
        "activation_checkpointing": True,
    }
    assert {key: arguments[key] for key in expected} == expected
    assert "fsdp" not in arguments
    assert read_exported_numbers(tmp_path).seed == LARGE_SEED

    mesh = Parallelism(data_parallel_shard=4, activation_checkpointing="selective")
    arguments = export_arguments(
        make_wide_decision(manifest, parallelism=mesh, clip_norm=None), tmp_path
    )
    assert (
        arguments["max_grad_norm"],
        arguments["bf16"],
        arguments["per_device_train_batch_size"],
    ) == (
        0,
        False,
        2,
    )
    assert arguments["fsdp"] is True
    assert arguments["fsdp_config"]["activation_checkpointing"] is True
    assert arguments["activation_checkpointing"] is False, "FSDP recomputes activations"


def test_ranks_together_read_the_batches_of_the_run_while_the_batch_grows(
    tmp_path, manifest, corpus
):
    schedule = Schedule(kind="constant", num_steps=12, batch_warmup_steps=4, batch_warmup_stages=2)
    huggingface.export(make_wide_decision(manifest, schedule=schedule), tmp_path)
    script, store = import_script(tmp_path), TokenStore(corpus)

    def read_batch(num_ranks: int, num_parts: int, done: int) -> list[np.ndarray]:
        """Return the rows of the step after `done` steps, read rank by rank in parts."""
        rows = []
        for rank in range(num_ranks):
            args = types.SimpleNamespace(
                process_index=rank, world_size=num_ranks, gradient_accumulation_steps=num_parts
            )
            state = types.SimpleNamespace(global_step=done)
            reader = iter(
                script.Batches(types.SimpleNamespace(args=args, state=state, store=store))
            )
            for _, part in zip(range(num_parts), reader, strict=False):
                assert torch.equal(part["input_ids"][:, 1:], part["targets"][:, :-1])
                rows += torch.cat((part["input_ids"], part["targets"][:, -1:]), dim=1).tolist()
        return rows

    # The batch has 4 sequences in the first 4 steps, and then 8.
    for done, first, count in ((0, 0, 4), (3, 12, 4), (4, 16, 8), (11, 72, 8)):
        batch = store.read_train_batch(
            seed=7, first_sequence=first, num_sequences=count, seq_len=SHAPE.seq_len
        ).tolist()
        for num_ranks, num_parts in ((1, 1), (2, 2), (4, 1)):
            assert read_batch(num_ranks, num_parts, done) == batch


def test_all_reasons_of_a_refusal_are_reported_at_once(tmp_path, manifest):
    mesh = Parallelism(data_parallel_shard=1, tensor=2, microbatch_sequences=3)
    decision = export_case.make_unrunnable_decision(manifest, qk_norm=True, parallelism=mesh)
    problems = (
        *export_case.UNRUNNABLE,
        "'4.57.6' is not supported: this export is written for 5.23.0",
        "qk_norm",
        "tensor = 2",
        "microbatch_sequences = 3",
    )
    export_case.assert_refused(
        huggingface.export, decision, tmp_path / "out", *problems, version="4.57.6"
    )


def test_run_resumes_from_the_newest_complete_checkpoint(tmp_path, manifest):
    huggingface.export(make_wide_decision(manifest), tmp_path)
    find_newest = import_script(tmp_path).newest_checkpoint
    assert find_newest(tmp_path / "none") is None
    for step in (8, 12, 100):
        (tmp_path / f"checkpoint-{step}").mkdir()
    for step in (8, 12):
        (tmp_path / f"checkpoint-{step}" / "trainer_state.json").touch()
    assert find_newest(tmp_path) == str(tmp_path / "checkpoint-12")
