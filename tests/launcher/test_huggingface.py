"""The huggingface export, read back number by number. What transformers makes of it:
test_huggingface_live.py.
"""

import dataclasses
import json
import types
import typing
from pathlib import Path

import export_case
import numpy as np
import torch
from export_case import SHAPE, wide_decision, wide_spec
from exported_program import change, frozen_in, imported

from launcher.exporters.trainers import huggingface
from launcher.frozen import frozen
from launcher.frozen.frozen import Decision, Parallelism
from proxies.core.schedule import Schedule
from proxies.core.shape import parameter_shapes
from proxies.data.tokens import TokenStore
from proxies.parametrization.parametrization import initial_tensor, parameter_table


def script_in(folder: Path) -> typing.Any:
    return imported(folder, "forerun_huggingface")


class Model:
    """As much of a model as the script asks of it to build groups."""

    def __init__(self, decision: Decision) -> None:
        theirs = huggingface.parameter_names(decision.shape)
        sizes = parameter_shapes(decision.shape)
        self.parameters = {
            theirs[name]: torch.nn.Parameter(torch.zeros(size)) for name, size in sizes.items()
        }

    def named_parameters(self) -> typing.Iterator[tuple[str, torch.nn.Parameter]]:
        return iter(self.parameters.items())


def disagreements(folder: Path, decision: Decision) -> list[str]:
    """Where the optimizer that the script builds differs from the decision's groups."""
    model = Model(decision)
    try:
        optimizer = script_in(folder).build_optimizer(model)
    except ValueError as error:
        return [str(error)]
    held = {id(p): g for g in optimizer.param_groups for p in g["params"]}
    theirs, problems = huggingface.parameter_names(decision.shape), []
    for name, group in frozen.assign_groups(decision.groups, list(theirs)).items():
        live = held[id(model.parameters[theirs[name]])]
        told = (live["lr"], live["weight_decay"], live["eps"], *live["betas"])
        wanted = tuple(
            group.settings[name]
            for name in ("learning_rate", "weight_decay", "eps", "beta1", "beta2")
        )
        problems += [f"{name}: {told} != {wanted}"] * (told != wanted)
    return problems


def test_every_parameter_has_its_frozen_numbers_and_changed_ones_are_noticed(tmp_path, manifest):
    decision = wide_decision(manifest)
    renamed = ('["mlp.up_proj", "feed_forward.w3"]', '["mlp.up_proj", "feed_forward.w4"]')
    for old, new in (*export_case.CHANGED_GROUPS, renamed):
        huggingface.export(decision, tmp_path)
        assert disagreements(tmp_path, decision) == []
        change(tmp_path, old, new)
        assert disagreements(tmp_path, decision), new


def test_initial_values_are_the_embedded_trainers_bit_for_bit(tmp_path, manifest):
    decision = wide_decision(manifest)
    huggingface.export(decision, tmp_path)
    script = script_in(tmp_path)
    script.empty_model = lambda: Model(decision)
    built, theirs = script.build_model().parameters, huggingface.parameter_names(SHAPE)
    for numbers in parameter_table(wide_spec(manifest.data_id)):
        assert torch.equal(built[theirs[numbers.name]], initial_tensor(numbers, seed=7)), (
            numbers.name
        )


def test_the_model_config_says_the_shape_and_the_four_multipliers(tmp_path, manifest):
    decision = wide_decision(manifest)
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


def arguments(decision: Decision, folder: Path) -> dict[str, typing.Any]:
    huggingface.export(decision, folder)
    told: dict[str, typing.Any] = json.loads((folder / "training_arguments.json").read_text())
    return told


def test_training_arguments_say_batch_clip_precision_and_cadence(tmp_path, manifest):
    mesh = Parallelism(
        data_parallel_shard=1,
        data_parallel_replicate=2,
        microbatch_sequences=2,
        activation_checkpointing="full",
    )
    told = arguments(
        wide_decision(manifest, parallelism=mesh, precision="bfloat16", seed=2**33 + 5), tmp_path
    )
    wanted = {
        "max_steps": 12,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_grad_norm": 0.5,
        "bf16": True,
        "seed": 5,
        "save_steps": 10,
        "save_total_limit": 2,
        "activation_checkpointing": True,
    }
    assert {key: told[key] for key in wanted} == wanted
    assert "fsdp" not in told
    assert frozen_in(tmp_path).seed == 8589934597

    mesh = Parallelism(data_parallel_shard=4, activation_checkpointing="selective")
    told = arguments(wide_decision(manifest, parallelism=mesh, clip_norm=None), tmp_path)
    assert (told["max_grad_norm"], told["bf16"], told["per_device_train_batch_size"]) == (
        0,
        False,
        2,
    )
    assert told["fsdp"] is True
    assert told["fsdp_config"]["activation_checkpointing"] is True
    assert told["activation_checkpointing"] is False  # not twice


def test_the_ranks_together_read_the_batches_of_the_run_while_the_batch_grows(
    tmp_path, manifest, corpus
):
    schedule = Schedule(kind="constant", num_steps=12, batch_warmup_steps=4, batch_warmup_stages=2)
    huggingface.export(wide_decision(manifest, schedule=schedule), tmp_path)
    script, store = script_in(tmp_path), TokenStore(corpus)

    def batches(num_ranks: int, num_parts: int, done: int) -> list[np.ndarray]:
        """All microbatches of the next step, rank by rank."""
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

    for done, first, count in ((0, 0, 4), (3, 12, 4), (4, 16, 8), (11, 72, 8)):
        wanted = store.train_batch(
            seed=7, first_sequence=first, num_sequences=count, seq_len=SHAPE.seq_len
        )
        assert batches(1, 1, done) == batches(2, 2, done) == batches(4, 1, done) == wanted.tolist()


def test_everything_that_cannot_be_run_is_said_at_once_and_nothing_is_written(tmp_path, manifest):
    mesh = Parallelism(data_parallel_shard=1, tensor=2, microbatch_sequences=3)
    decision = export_case.unrunnable(manifest, qk_norm=True, parallelism=mesh)
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


def test_the_newest_whole_checkpoint_is_resumed_from(tmp_path, manifest):
    huggingface.export(wide_decision(manifest), tmp_path)
    newest = script_in(tmp_path).newest_checkpoint
    assert newest(tmp_path / "none") is None
    for step in (8, 12, 100):
        (tmp_path / f"checkpoint-{step}").mkdir()
    for step in (8, 12):
        (tmp_path / f"checkpoint-{step}" / "trainer_state.json").touch()
    assert newest(tmp_path) == str(tmp_path / "checkpoint-12")
