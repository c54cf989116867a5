"""The torchtitan export, read back number by number. What torchtitan itself makes of it:
test_torchtitan_live.py.
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
from export_case import SHAPE, wide_decision, wide_spec
from exported_program import change, frozen_in, imported

from launcher.exporters.fidelity import ExportError, rank_sequences
from launcher.exporters.trainers import torchtitan
from launcher.frozen import frozen
from launcher.frozen.frozen import Decision
from proxies.core.numbers import ParameterNumbers
from proxies.core.schedule import Schedule
from proxies.core.shape import parameter_shapes
from proxies.data.tokens import Manifest, TokenStore
from proxies.parametrization.parametrization import initial_tensor, parameter_table


def exported(decision: Decision, folder: Path) -> typing.Any:
    """The module, imported with stand-ins for torchtitan's classes."""
    torchtitan.export(decision, folder)
    return imported(folder, torchtitan.MODULE)


def mup_table(manifest: Manifest) -> tuple[ParameterNumbers, ...]:
    return parameter_table(wide_spec(manifest.data_id))


def disagreements(folder: Path, decision: Decision) -> list[str]:
    """Where the export's groups, by torchtitan's rule (search, first match wins), differ from the
    decision's.
    """
    groups = frozen_in(folder).groups
    wanted = frozen.assign_groups(decision.groups, list(parameter_shapes(decision.shape)))
    problems = []
    for name, theirs in torchtitan.parameter_names(decision.shape).items():
        found = [g for g in groups if re.search(g["pattern"], theirs)]
        if len(found) != 1:
            problems.append(f"{theirs}: {len(found)} patterns")
            continue
        told = {field: number for field, number in found[0].items() if field != "pattern"}
        numbers = {field: getattr(wanted[name], field) for field in told}
        problems += [f"{theirs}: {told} != {numbers}"] * (told != numbers)
    return problems


def test_every_parameter_has_its_frozen_numbers_in_the_module_and_changed_ones_are_noticed(
    tmp_path, manifest
):
    decision = wide_decision(manifest)
    for old, new in (*export_case.CHANGED_GROUPS, ('"init_std": 0.125', '"init_std": 0.02')):
        assert exported(decision, tmp_path).FROZEN.digest == decision.digest
        assert disagreements(tmp_path, decision) == []
        change(tmp_path, old, new)
        assert disagreements(tmp_path, decision), new
    assert decision.digest in (tmp_path / "run.sh").read_text()


@pytest.mark.parametrize("version", ["0.2.0", "0.4.0.dev20260821", None])
def test_another_version_is_refused_by_name_before_torchtitan_is_imported(
    tmp_path, manifest, version, capsys
):
    torchtitan.export(wide_decision(manifest), tmp_path)
    with pytest.raises(SystemExit) as stop:
        imported(tmp_path, torchtitan.MODULE, {"torchtitan": version} if version else {})
    err = capsys.readouterr().err
    assert stop.value.code == 2
    assert (version or "not installed") in err and "0.3.0" in err and "pip install" in err
    with pytest.raises(ExportError, match=r"0\.9\.9.*0\.3\.0"):
        torchtitan.export(wide_decision(manifest), tmp_path, "0.9.9")


def test_a_local_version_is_the_release(tmp_path, manifest):
    torchtitan.export(wide_decision(manifest), tmp_path)
    assert imported(tmp_path, torchtitan.MODULE, {"torchtitan": "0.3.0+cpu"}).FROZEN


def test_patterns_survive_checkpoint_wrappers(tmp_path, manifest):
    names = torchtitan.parameter_names(SHAPE)
    patterns = [pattern for pattern, _ in torchtitan.group_patterns(wide_decision(manifest))]
    for theirs in names.values():
        wrapped = re.sub(r"^(layers\.\d+\.)", r"\1_checkpoint_wrapped_module.", theirs)
        assert [bool(re.search(p, wrapped)) for p in patterns] == [
            bool(re.search(p, theirs)) for p in patterns
        ]
    assert not any(re.search(p, "layers.0.attention.qkv_linear.wq.weight_scale") for p in patterns)


def test_a_decay_survives_as_a_ratio():
    for num_steps, decay_steps in itertools.product((7, 1000, 142_857, 10**9 + 7), (1, 3, 6)):
        schedule = Schedule(kind="wsd", num_steps=num_steps, decay_steps=decay_steps)
        ratio, kind = torchtitan._scheduler(schedule)
        assert ratio is not None and kind == "linear"
        assert round(num_steps * ratio) == decay_steps
        assert torchtitan._scheduler(dataclasses.replace(schedule, decay_shape="sqrt")) == (
            ratio,
            "sqrt",
        )


def test_initial_values_are_the_embedded_trainers_bit_for_bit(tmp_path, manifest):
    module = exported(wide_decision(manifest), tmp_path)
    theirs = torchtitan.parameter_names(SHAPE)
    for numbers in mup_table(manifest):
        value = module.first_value(theirs[numbers.name], numbers.size)
        assert torch.equal(value, initial_tensor(numbers, seed=7)), numbers.name


def test_the_ranks_together_read_the_batches_of_the_run_and_resume_on_another_number(
    tmp_path, manifest, corpus, capsys
):
    store = TokenStore(corpus)
    loader = exported(wide_decision(manifest), tmp_path).CorpusLoader

    def ranks(number: int, local: int) -> list[typing.Any]:
        config = types.SimpleNamespace(corpus=str(corpus))
        return [
            loader(
                config,
                dp_world_size=number,
                dp_rank=r,
                seq_len=SHAPE.seq_len,
                local_batch_size=local,
                tokenizer=None,
            )
            for r in range(number)
        ]

    def batch(readers: list[typing.Any]) -> np.ndarray:
        rows = []
        while len(rows) < 8:
            for inputs, labels in [next(iter(r)) for r in readers]:
                assert torch.equal(inputs["input"][:, 1:], labels[:, :-1])
                rows += torch.cat((inputs["input"], labels[:, -1:]), dim=1).tolist()
        return np.array(rows)

    def wanted(step: int) -> np.ndarray:
        return store.train_batch(
            seed=7, first_sequence=8 * step, num_sequences=8, seq_len=SHAPE.seq_len
        )

    two = ranks(2, 2)  # two accumulation steps
    for step in range(3):
        assert (batch(two) == wanted(step)).all()
    four = ranks(4, 2)
    for reader in four:
        reader.load_state_dict(two[0].state_dict())
    assert (batch(four) == wanted(3)).all()
    assert not (batch(four) == wanted(3)).all()
    with pytest.raises(ValueError, match="a multiple of 10"):
        ranks(5, 2)[0].load_state_dict(two[0].state_dict())
    other = dataclasses.replace(wide_decision(manifest).data, data_id="0" * 64)
    with pytest.raises(SystemExit, match="2"):
        exported(wide_decision(manifest, data=other), tmp_path).CorpusLoader(
            types.SimpleNamespace(corpus=str(corpus)),
            dp_world_size=1,
            dp_rank=0,
            seq_len=32,
            local_batch_size=1,
        )
    assert "frozen as 0000" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("shape", "mesh", "said"),
    [
        ({}, {"tensor": 4}, "tensor = 4 does not divide num_kv_heads = 2"),
        ({"seq_len": 33}, {"tensor": 2}, "seq_len = 33 must be a multiple of tensor = 2"),
        ({"qk_norm": True}, {"tensor": 2}, "tensor = 2 with shape.qk_norm"),
        ({}, {"pipeline": 2}, "pipeline = 2"),
        ({}, {"microbatch_sequences": 3}, "microbatch_sequences = 3 does not divide"),
        ({}, {"context": 2}, "context = 2"),
    ],
)
def test_a_mesh_that_torchtitan_cannot_have_is_refused(tmp_path, manifest, shape, mesh, said):
    shape = dataclasses.replace(SHAPE, **shape)
    decision = wide_decision(
        manifest,
        shape=shape,
        parallelism=frozen.Parallelism(data_parallel_shard=1, **mesh),
        batch_tokens=8 * shape.seq_len,
        num_tokens=12 * 8 * shape.seq_len,
    )
    export_case.assert_refused(torchtitan.export, decision, tmp_path / "out", said)


@pytest.mark.parametrize(
    ("mesh", "share", "microbatch"),
    [({}, 16, 16), ({"data_parallel_replicate": 2, "microbatch_sequences": 2}, 8, 2)],
)
def test_degrees_share_out_the_batch_among_data_ranks_alone(manifest, mesh, share, microbatch):
    degrees, tokens = (
        frozen.Parallelism(data_parallel_shard=4, tensor=2, **mesh),
        64 * SHAPE.seq_len,
    )
    decision = wide_decision(
        manifest, parallelism=degrees, batch_tokens=tokens, num_tokens=12 * tokens
    )
    assert rank_sequences(decision) == (share, microbatch)
