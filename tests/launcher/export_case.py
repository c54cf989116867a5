"""A main run for the exporters, grouped key/value heads and no forward multiplier equal to one, and
what all keep.
"""

from __future__ import annotations

import dataclasses
import math
import os
import subprocess
import sys
import typing
from pathlib import Path
from typing import Any

import pytest
from main_run import decision_of, spec_of

from launcher.base import policy
from launcher.exporters.fidelity import ADAMW, ExportError, FidelityReport
from launcher.exporters.view import OptimizerSettings, RunNumbers, TrainerView, proof_steps
from launcher.frozen import frozen
from launcher.frozen.frozen import Decision, Parallelism
from proxies.core.schedule import Schedule
from proxies.core.shape import Shape, parameter_shapes
from proxies.core.spec import RunSpec
from proxies.data.tokens import Manifest

Exporter = typing.Callable[..., FidelityReport]
SHAPE = Shape(
    num_layers=2, width=64, num_heads=4, num_kv_heads=2, ffn_width=160, vocab_size=256, seq_len=32
)
SCHEDULES = (
    Schedule(kind="cosine", num_steps=12, warmup_steps=3, final_fraction=0.1),
    Schedule(kind="linear", num_steps=12),
    Schedule(kind="wsd", num_steps=12, warmup_steps=2, decay_steps=7, final_fraction=0.05),
    Schedule(kind="constant", num_steps=12, warmup_steps=11),
)
# In the groups of a written forerun.json: a comparison must notice each.
CHANGED_GROUPS = (
    (r"w2\\.", r"w9\\."),  # nobody claims w2
    (r"ffn_norm\\.", r".*\\."),  # two claim every weight of a layer
    ('"learning_rate": 0.015625', '"learning_rate": 0.0156250001'),
    ('"weight_decay": 0.2', '"weight_decay": 0.1'),
)
# Ranks, and the nodes and ranks per node that run.sh makes of them, as told.
LAYOUTS = ((1, ("1", "1"), {}), (12, ("2", "6"), {}), (64, ("16", "4"), {"RANKS_PER_NODE": "4"}))


def wide_spec(data_id: str, **changes: Any) -> RunSpec:
    spec = spec_of(data_id, embedding_multiplier=2.0, output_multiplier=1.5)
    shape = changes.get("shape", SHAPE)
    return dataclasses.replace(
        spec,
        **{
            "base_shape": shape.at_width(32),
            "batch_tokens": 8 * shape.seq_len,
            **changes,
            "shape": shape,
        },
    )


def wide_decision(manifest: Manifest, num_ranks: int = 1, **changes: Any) -> Decision:
    """The decision of `wide_spec`, with fields of either changed."""
    of_spec = {
        name: changes.pop(name)
        for name in ("optimizer", "parametrization", "schedule", "shape")
        if name in changes
    }
    decision = decision_of(
        wide_spec(manifest.data_id, **of_spec), manifest, num_ranks=num_ranks, every_steps=10
    )
    return dataclasses.replace(decision, **changes)


def one_sequence_each(manifest: Manifest, num_ranks: int) -> Decision:
    batch_tokens = num_ranks * SHAPE.seq_len
    mesh = Parallelism(data_parallel_shard=num_ranks)
    return wide_decision(
        manifest, parallelism=mesh, batch_tokens=batch_tokens, num_tokens=12 * batch_tokens
    )


def unrunnable(manifest: Manifest, *, qk_norm: bool = False, **changes: Any) -> Decision:
    """What none of the three can run, for the reasons of `UNRUNNABLE`."""
    return wide_decision(
        manifest,
        shape=dataclasses.replace(SHAPE, family="gpt2", qk_norm=qk_norm),
        precision="float64",
        abort=policy.AbortPolicy(on_non_finite=False, train_loss_above_nats=6.0),
        learning_rate=dataclasses.replace(
            wide_decision(manifest).learning_rate, table_sha256="0" * 64
        ),
        **changes,
    )


UNRUNNABLE = ("gpt2", "float64", "on_non_finite", "table")


def assert_refused(
    export: Exporter, decision: Decision, out: Path, *said: str, **options: str
) -> None:
    """Every problem is told at once, one for each of `said`, and nothing is written."""
    with pytest.raises(ExportError) as caught:
        export(decision, out, **options)
    told = "\n".join(caught.value.problems)
    for words in said:
        assert words in told
    assert len(caught.value.problems) == len(said), told
    assert not out.exists()


def leaf_fields(record: type = Decision, path: str = "") -> set[str]:
    leaves: set[str] = set()
    for field in dataclasses.fields(record):
        if "unless_default" in field.metadata:  # a user's own trainer: no other takes it
            continue
        kind = typing.get_type_hints(record)[field.name]
        # shown as fields of the group
        if record is frozen.ParameterGroup and field.name == "settings":
            leaves |= {f"{path}{name}" for name in ADAMW}
            continue
        inner = [a for a in (kind, *typing.get_args(kind)) if dataclasses.is_dataclass(a)]
        name = f"{path}{field.name}"
        leaves |= leaf_fields(inner[0], f"{name}.") if inner else {name}
    return leaves


def judged(report: FidelityReport) -> set[str]:
    """The fields that a report judges: each once, with a note unless it is exact."""
    assert isinstance(report, FidelityReport)
    fields = [entry.field for entry in report.entries]
    assert len(fields) == len(set(fields))
    assert all(entry.note for entry in report.entries if entry.verdict != "exact")
    return set(fields)


def assert_judges_every_leaf(export: Exporter, manifest: Manifest, out: Path) -> None:
    """Of a decision without an empty field, and loses none."""
    decision = wide_decision(manifest)
    point = frozen.CurvePoint(step=3, loss_nats=3.0, low_nats=2.9, high_nats=3.1)
    decision = dataclasses.replace(
        decision,
        predicted=dataclasses.replace(decision.predicted, curve=(point,), memory_octaves=1.5),
        spikes=policy.SpikePolicy(
            max_rollbacks=1, window_steps=32, threshold=5, least_nats=0.2, patience_steps=4
        ),
        monitoring=policy.Monitoring(
            validate_every_steps=1, layers_every_steps=1, replay_every_steps=1
        ),
        compiled=True,
    )
    report = export(decision, out)
    assert judged(report) == leaf_fields()
    assert report.lost == ()


def launch_words(
    export_dir: Path, layout: tuple[str, str], *options: str, **told: str
) -> list[str]:
    """What run.sh starts on so many nodes and ranks per node, told by a torchrun that starts
    nothing.

    Without a corpus folder it must refuse.
    """
    fake = export_dir / "torchrun"
    fake.write_text('#!/bin/sh\necho "$@"\n')
    fake.chmod(0o755)
    command, path = (
        [str(export_dir / "run.sh"), *options],
        {"PATH": f"{export_dir}:{os.environ['PATH']}"},
    )
    refused = subprocess.run(command, env=path, capture_output=True, text=True, check=False)
    assert refused.returncode != 0
    assert "the corpus folder" in refused.stderr
    env = {**path, **told, "FORERUN_DATA": "x", "RDZV_ENDPOINT": "host:29400"}
    words = subprocess.run(
        command, env=env, capture_output=True, text=True, check=True
    ).stdout.split()
    assert (
        words[words.index("--nnodes") + 1],
        words[words.index("--nproc-per-node") + 1],
    ) == layout
    return words


def assert_travels(export_dir: Path, corpus: Path, *modules: str) -> None:
    """The modules are imported from the export itself, and the first reads the corpus, all of it
    without torch.
    """
    code = (
        "import importlib, sys; from pathlib import Path; "
        f"found = [importlib.import_module(name) for name in {modules}]; "
        f"found[0].TokenStore(Path({str(corpus)!r})); print(*(m.__file__ for m in found), 'torch' "
        "in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=export_dir, capture_output=True, text=True, check=True
    )
    files = [str(export_dir / f"{name.replace('.', '/')}.py") for name in modules]
    assert done.stdout.split() == [*files, "False"]


def planted_view(
    decision: Decision, names: dict[str, str], run: RunNumbers, trainer: str, version: str
) -> TrainerView:
    """What a trainer would tell that does `run`; fused matrices hold as many elements as their
    parts.
    """
    sizes = parameter_shapes(decision.shape)
    rows = {name: row for row, name in enumerate(dict.fromkeys(names.values()))}
    numbers = {names[name]: held for name, held in run.numbers.items()}
    elements = {
        theirs: sum(math.prod(sizes[n]) for n in names if names[n] == theirs) for theirs in rows
    }
    return TrainerView(
        trainer=trainer,
        version=version,
        num_steps=decision.learning_rate.schedule.num_steps,
        batch_tokens=decision.batch_tokens,
        clip_norm=decision.clip_norm,
        forward=decision.forward,
        steps=proof_steps(decision.learning_rate.schedule),
        rates=tuple(
            tuple(numbers[name].learning_rate * share for share in run.shares) for name in rows
        ),
        parameters={
            name: OptimizerSettings(
                num_elements=elements[name],
                rates=row,
                optimizer=numbers[name].optimizer,
                settings=numbers[name].settings,
            )
            for name, row in rows.items()
        },
    )


def held(view: TrainerView, name: str, **changes: object) -> TrainerView:
    """The view with other numbers for one parameter."""
    there = view.parameters[name]
    settings = {
        **there.settings,
        **{key: value for key, value in changes.items() if key in there.settings},
    }
    fields = {key: value for key, value in changes.items() if key not in settings}
    changed = dataclasses.replace(there, settings=settings, **fields)
    return dataclasses.replace(view, parameters={**view.parameters, name: changed})
