"""Tests of the torchtitan export, read back number by number.

test_torchtitan_live.py runs the export in torchtitan.
"""

import dataclasses
import itertools
import re
import types
import typing
from pathlib import Path

import export_case
import numpy as np
import pytest
import torch
from export_case import SHAPE, make_wide_decision, make_wide_spec
from exported_program import edit_numbers, import_program, read_exported_numbers

from forerun._launcher.main_run.exporters.export_checks import ExportError, count_rank_sequences
from forerun._launcher.main_run.exporters.trainers import torchtitan
from forerun._launcher.main_run.frozen import frozen
from forerun._launcher.main_run.frozen.frozen import Decision
from forerun._proxies.core.numbers import ParameterNumbers
from forerun._proxies.core.schedule import Schedule
from forerun._proxies.core.shape import list_parameter_shapes
from forerun._proxies.data.tokens import Manifest, TokenStore
from forerun._proxies.parametrization.parametrization import (
    compute_parameter_table,
    draw_initial_tensor,
)


def export_module(decision: Decision, folder: Path) -> typing.Any:
    """Export a decision; import the module with stand-ins for torchtitan's classes."""
    torchtitan.export(decision, folder)
    return import_program(folder, torchtitan.MODULE)


def compute_mup_table(manifest: Manifest) -> tuple[ParameterNumbers, ...]:
    """Return the numbers of every parameter of the wide model under muP."""
    return compute_parameter_table(make_wide_spec(manifest.data_id))


def list_disagreements(folder: Path, decision: Decision) -> list[str]:
    """Return the differences of the export's parameter groups from those of the decision.

    torchtitan searches each parameter's name for the groups' regular expressions.
    """
    exported_groups = read_exported_numbers(folder).groups
    groups = frozen.assign_groups(decision.groups, list(list_parameter_shapes(decision.shape)))
    problems = []
    for name, trainer_name in torchtitan.parameter_names(decision.shape).items():
        matches = [group for group in exported_groups if re.search(group["pattern"], trainer_name)]
        if len(matches) != 1:
            problems.append(f"{trainer_name}: {len(matches)} patterns")
            continue
        numbers = {field: number for field, number in matches[0].items() if field != "pattern"}
        expected = {field: getattr(groups[name], field) for field in numbers}
        if numbers != expected:
            problems.append(f"{trainer_name}: {numbers} != {expected}")
    return problems


def test_module_has_the_frozen_numbers_and_edits_are_noticed(tmp_path, manifest):
    decision = make_wide_decision(manifest)
    for old, new in (*export_case.CHANGED_GROUPS, ('"init_std": 0.125', '"init_std": 0.02')):
        assert export_module(decision, tmp_path).FROZEN.digest == decision.digest
        assert list_disagreements(tmp_path, decision) == []
        edit_numbers(tmp_path, old, new)
        assert list_disagreements(tmp_path, decision), new
    assert decision.digest in (tmp_path / "run.sh").read_text()


@pytest.mark.parametrize("version", ["0.2.0", "0.4.0.dev20260821", None])
def test_other_version_is_refused_before_torchtitan_is_imported(
    tmp_path, manifest, version, capsys
):
    torchtitan.export(make_wide_decision(manifest), tmp_path)
    with pytest.raises(SystemExit) as stop:
        import_program(tmp_path, torchtitan.MODULE, {"torchtitan": version} if version else {})
    err = capsys.readouterr().err
    assert stop.value.code == 2
    assert (version or "not installed") in err and "0.3.0" in err and "pip install" in err
    with pytest.raises(ExportError, match=r"0\.9\.9.*0\.3\.0"):
        torchtitan.export(make_wide_decision(manifest), tmp_path, "0.9.9")


def test_local_version_counts_as_the_release(tmp_path, manifest):
    torchtitan.export(make_wide_decision(manifest), tmp_path)
    assert import_program(tmp_path, torchtitan.MODULE, {"torchtitan": "0.3.0+cpu"}).FROZEN


def test_patterns_survive_checkpoint_wrappers(tmp_path, manifest):
    names = torchtitan.parameter_names(SHAPE)
    patterns = [
        pattern for pattern, _ in torchtitan.build_group_patterns(make_wide_decision(manifest))
    ]
    for name in names.values():
        wrapped = re.sub(r"^(layers\.\d+\.)", r"\1_checkpoint_wrapped_module.", name)
        matches = [bool(re.search(pattern, name)) for pattern in patterns]
        assert [bool(re.search(pattern, wrapped)) for pattern in patterns] == matches
    assert not any(re.search(p, "layers.0.attention.qkv_linear.wq.weight_scale") for p in patterns)


def test_decay_ratio_gives_back_the_decay_steps():
    for num_steps, decay_steps in itertools.product((7, 1000, 142_857, 10**9 + 7), (1, 3, 6)):
        schedule = Schedule(kind="wsd", num_steps=num_steps, decay_steps=decay_steps)
        ratio, kind = torchtitan._choose_decay(schedule)
        assert ratio is not None and kind == "linear"
        assert round(num_steps * ratio) == decay_steps
        assert torchtitan._choose_decay(dataclasses.replace(schedule, decay_shape="sqrt")) == (
            ratio,
            "sqrt",
        )


def test_initial_values_equal_the_embedded_trainers_bitwise(tmp_path, manifest):
    module = export_module(make_wide_decision(manifest), tmp_path)
    names = torchtitan.parameter_names(SHAPE)
    for numbers in compute_mup_table(manifest):
        value = module.draw_value(names[numbers.name], numbers.size)
        assert torch.equal(value, draw_initial_tensor(numbers, seed=7)), numbers.name


def test_ranks_together_read_the_batches_of_the_run_and_resume_on_another_number_of_ranks(
    tmp_path, manifest, corpus, capsys
):
    store = TokenStore(corpus)
    loader = export_module(make_wide_decision(manifest), tmp_path).CorpusLoader

    def make_loaders(num_ranks: int, local_batch_size: int) -> list[typing.Any]:
        config = types.SimpleNamespace(corpus=str(corpus))
        return [
            loader(
                config,
                dp_world_size=num_ranks,
                dp_rank=rank,
                seq_len=SHAPE.seq_len,
                local_batch_size=local_batch_size,
                tokenizer=None,
            )
            for rank in range(num_ranks)
        ]

    def read_batch(loaders: list[typing.Any]) -> np.ndarray:
        rows = []
        while len(rows) < 8:
            for rank_loader in loaders:
                inputs, labels = next(iter(rank_loader))
                assert torch.equal(inputs["input"][:, 1:], labels[:, :-1])
                rows += torch.cat((inputs["input"], labels[:, -1:]), dim=1).tolist()
        return np.array(rows)

    def draw_batch(step: int) -> np.ndarray:
        return store.read_train_batch(
            seed=7, first_sequence=8 * step, num_sequences=8, seq_len=SHAPE.seq_len
        )

    # A batch of 8 sequences takes two accumulation steps on two ranks, and one on four.
    two_ranks = make_loaders(2, 2)
    for step in range(3):
        assert (read_batch(two_ranks) == draw_batch(step)).all()
    four_ranks = make_loaders(4, 2)
    for rank_loader in four_ranks:
        rank_loader.load_state_dict(two_ranks[0].state_dict())
    assert (read_batch(four_ranks) == draw_batch(3)).all()
    assert not (read_batch(four_ranks) == draw_batch(3)).all(), "the loaders have moved on"
    with pytest.raises(ValueError, match="a multiple of 10"):
        make_loaders(5, 2)[0].load_state_dict(two_ranks[0].state_dict())
    other_data = dataclasses.replace(make_wide_decision(manifest).data, data_id="0" * 64)
    with pytest.raises(SystemExit, match="2"):
        export_module(make_wide_decision(manifest, data=other_data), tmp_path).CorpusLoader(
            types.SimpleNamespace(corpus=str(corpus)),
            dp_world_size=1,
            dp_rank=0,
            seq_len=32,
            local_batch_size=1,
        )
    assert "frozen as 0000" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("shape", "mesh", "problem"),
    [
        ({}, {"tensor": 4}, "tensor = 4 does not divide num_kv_heads = 2"),
        ({"seq_len": 33}, {"tensor": 2}, "seq_len = 33 must be a multiple of tensor = 2"),
        ({"qk_norm": True}, {"tensor": 2}, "tensor = 2 with shape.qk_norm"),
        ({}, {"pipeline": 2}, "pipeline = 2"),
        ({}, {"microbatch_sequences": 3}, "microbatch_sequences = 3 does not divide"),
        ({}, {"context": 2}, "context = 2"),
    ],
)
def test_unsupported_parallelism_is_refused(tmp_path, manifest, shape, mesh, problem):
    shape = dataclasses.replace(SHAPE, **shape)
    decision = make_wide_decision(
        manifest,
        shape=shape,
        parallelism=frozen.Parallelism(data_parallel_shard=1, **mesh),
        batch_tokens=8 * shape.seq_len,
        num_tokens=12 * 8 * shape.seq_len,
    )
    export_case.assert_refused(torchtitan.export, decision, tmp_path / "out", problem)


@pytest.mark.parametrize(
    ("mesh", "num_rank_sequences", "microbatch_sequences"),
    [({}, 16, 16), ({"data_parallel_replicate": 2, "microbatch_sequences": 2}, 8, 2)],
)
def test_batch_is_shared_among_data_parallel_ranks_only(
    manifest, mesh, num_rank_sequences, microbatch_sequences
):
    degrees = frozen.Parallelism(data_parallel_shard=4, tensor=2, **mesh)
    tokens = 64 * SHAPE.seq_len
    decision = make_wide_decision(
        manifest, parallelism=degrees, batch_tokens=tokens, num_tokens=12 * tokens
    )
    assert count_rank_sequences(decision) == (num_rank_sequences, microbatch_sequences)
