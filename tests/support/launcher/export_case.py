"""Cases for tests of the exporters, which write a main run's program for another trainer.

The cases are a main run with grouped key/value heads and no forward multiplier equal to one, and
the assertions that all exporters share.
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
from main_run import make_decision, make_spec

from forerun._launcher.main_run.exporters.comparison import (
    OptimizerSettings,
    RunNumbers,
    TrainerView,
    choose_proof_steps,
)
from forerun._launcher.main_run.exporters.export_checks import ADAMW_SETTINGS, ExportError
from forerun._launcher.main_run.exporters.fidelity import FidelityReport
from forerun._launcher.main_run.frozen import frozen, run_policies
from forerun._launcher.main_run.frozen.frozen import Decision, Parallelism
from forerun._proxies.core.schedule import Schedule
from forerun._proxies.core.shape import Shape, list_parameter_shapes
from forerun._proxies.core.spec import RunSpec
from forerun._proxies.data.tokens import Manifest

ExportFunction = typing.Callable[..., FidelityReport]
SHAPE = Shape(
    num_layers=2, width=64, num_heads=4, num_kv_heads=2, ffn_width=160, vocab_size=256, seq_len=32
)
SCHEDULES = (
    Schedule(kind="cosine", num_steps=12, warmup_steps=3, final_fraction=0.1),
    Schedule(kind="linear", num_steps=12),
    Schedule(kind="wsd", num_steps=12, warmup_steps=2, decay_steps=7, final_fraction=0.05),
    Schedule(kind="constant", num_steps=12, warmup_steps=11),
)
# Edits to the groups of a written forerun.json; a comparison must notice each of them.
CHANGED_GROUPS = (
    (r"w2\\.", r"w9\\."),  # no group claims w2
    (r"ffn_norm\\.", r".*\\."),  # two groups claim every weight of a layer
    ('"learning_rate": 0.015625', '"learning_rate": 0.0156250001'),
    ('"weight_decay": 0.2', '"weight_decay": 0.1'),
)
# Number of ranks of a decision; the number of nodes and of ranks per node that its run.sh must give
# to torchrun; environment variables that are set for run.sh.
LAYOUTS = ((1, ("1", "1"), {}), (12, ("2", "6"), {}), (64, ("16", "4"), {"RANKS_PER_NODE": "4"}))


def make_wide_spec(data_id: str, **changes: Any) -> RunSpec:
    """Return a run of twelve steps at twice the base width, with fields changed."""
    spec = make_spec(data_id, embedding_multiplier=2.0, output_multiplier=1.5)
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


def make_wide_decision(manifest: Manifest, num_ranks: int = 1, **changes: Any) -> Decision:
    """Return the decision of `make_wide_spec`, with fields of either one changed."""
    spec_changes = {
        name: changes.pop(name)
        for name in ("optimizer", "parametrization", "schedule", "shape")
        if name in changes
    }
    decision = make_decision(
        make_wide_spec(manifest.data_id, **spec_changes),
        manifest,
        num_ranks=num_ranks,
        every_steps=10,
    )
    return dataclasses.replace(decision, **changes)


def make_decision_with_one_sequence_each(manifest: Manifest, num_ranks: int) -> Decision:
    """Return a decision whose batch holds one sequence per rank."""
    batch_tokens = num_ranks * SHAPE.seq_len
    mesh = Parallelism(data_parallel_shard=num_ranks)
    return make_wide_decision(
        manifest, parallelism=mesh, batch_tokens=batch_tokens, num_tokens=12 * batch_tokens
    )


def make_unrunnable_decision(
    manifest: Manifest, *, qk_norm: bool = False, **changes: Any
) -> Decision:
    """Return a decision that torchtitan, OLMo-core, and transformers cannot run.

    Each refusal contains the words of `UNRUNNABLE`.
    """
    return make_wide_decision(
        manifest,
        shape=dataclasses.replace(SHAPE, family="gpt2", qk_norm=qk_norm),
        precision="float64",
        abort=run_policies.AbortPolicy(on_non_finite=False, train_loss_above_nats=6.0),
        learning_rate=dataclasses.replace(
            make_wide_decision(manifest).learning_rate, table_sha256="0" * 64
        ),
        **changes,
    )


UNRUNNABLE = ("gpt2", "float64", "on_non_finite", "table")


def assert_refused(
    export: ExportFunction, decision: Decision, out: Path, *expected_words: str, **options: str
) -> None:
    """Assert that an export fails, reports all problems at once, and writes nothing.

    There are as many problems as `expected_words`, and each of these words is in one of them.
    """
    with pytest.raises(ExportError) as caught:
        export(decision, out, **options)
    message = "\n".join(caught.value.problems)
    for words in expected_words:
        assert words in message
    assert len(caught.value.problems) == len(expected_words), message
    assert not out.exists()


def list_leaf_fields(record: type = Decision, path: str = "") -> set[str]:
    """Return the dotted names of all leaf fields of a record."""
    leaves: set[str] = set()
    for field in dataclasses.fields(record):
        # A user's own trainer: no export to another trainer reads this field.
        if "unless_default" in field.metadata:
            continue
        kind = typing.get_type_hints(record)[field.name]
        # The report lists the settings as fields of the group.
        if record is frozen.ParameterGroup and field.name == "settings":
            leaves |= {f"{path}{name}" for name in ADAMW_SETTINGS}
            continue
        inner = [a for a in (kind, *typing.get_args(kind)) if dataclasses.is_dataclass(a)]
        name = f"{path}{field.name}"
        leaves |= list_leaf_fields(inner[0], f"{name}.") if inner else {name}
    return leaves


def list_judged_fields(report: FidelityReport) -> set[str]:
    """Return the fields on which a fidelity report has a verdict.

    Assert that each appears once and that every verdict but "exact" has a note.
    """
    assert isinstance(report, FidelityReport)
    fields = [entry.field for entry in report.entries]
    assert len(fields) == len(set(fields))
    assert all(entry.note for entry in report.entries if entry.verdict != "exact")
    return set(fields)


def assert_judges_every_leaf(export: ExportFunction, manifest: Manifest, out: Path) -> None:
    """Assert that the fidelity report has a verdict on every field, and that none is lost.

    The exported decision has no empty field. A field is lost if the trainer cannot express it.
    """
    decision = make_wide_decision(manifest)
    point = frozen.CurvePoint(step=3, loss_nats=3.0, low_nats=2.9, high_nats=3.1)
    decision = dataclasses.replace(
        decision,
        predicted=dataclasses.replace(decision.predicted, curve=(point,), memory_octaves=1.5),
        spikes=run_policies.SpikePolicy(
            max_rollbacks=1, window_steps=32, threshold=5, least_nats=0.2, patience_steps=4
        ),
        monitoring=run_policies.Monitoring(
            validate_every_steps=1, layers_every_steps=1, replay_every_steps=1
        ),
        compiled=True,
    )
    report = export(decision, out)
    assert list_judged_fields(report) == list_leaf_fields()
    assert report.lost == ()


def run_launch_script(
    export_dir: Path, layout: tuple[str, str], *options: str, **variables: str
) -> list[str]:
    """Return the arguments that an export's run.sh passes to a fake torchrun.

    Assert that they contain the number of nodes and of ranks per node in `layout`, and that run.sh
    refuses to start without a corpus folder.
    """
    fake = export_dir / "torchrun"
    fake.write_text('#!/bin/sh\necho "$@"\n')
    fake.chmod(0o755)
    command = [str(export_dir / "run.sh"), *options]
    path = {"PATH": f"{export_dir}:{os.environ['PATH']}"}
    refused = subprocess.run(command, env=path, capture_output=True, text=True, check=False)
    assert refused.returncode != 0
    assert "the corpus folder" in refused.stderr
    env = {**path, **variables, "FORERUN_DATA": "x", "RDZV_ENDPOINT": "host:29400"}
    words = subprocess.run(
        command, env=env, capture_output=True, text=True, check=True
    ).stdout.split()
    assert (
        words[words.index("--nnodes") + 1],
        words[words.index("--nproc-per-node") + 1],
    ) == layout
    return words


def assert_imports_alone(export_dir: Path, corpus: Path, *modules: str) -> None:
    """Assert that modules of an export need no installed forerun and no torch.

    They are imported from the export's folder, and the first one reads the corpus.
    """
    code = (
        "import importlib, sys; from pathlib import Path; "
        f"loaded = [importlib.import_module(name) for name in {modules}]; "
        f"loaded[0].TokenStore(Path({str(corpus)!r})); "
        "print(*(module.__file__ for module in loaded), 'torch' "
        "in sys.modules)"
    )
    process = subprocess.run(
        [sys.executable, "-c", code], cwd=export_dir, capture_output=True, text=True, check=True
    )
    files = [str(export_dir / f"{name.replace('.', '/')}.py") for name in modules]
    assert process.stdout.split() == [*files, "False"]


def make_view(
    decision: Decision, names: dict[str, str], run: RunNumbers, trainer: str, version: str
) -> TrainerView:
    """Return the view of a trainer that does exactly `run`.

    A view holds the numbers with which another trainer would train, as its own program reports
    them. A fused matrix has as many elements as its parts together.

    Args:
        decision: The frozen decision.
        names: The trainer's name of each parameter, by forerun's name.
        run: Numbers of the parameters, and the schedule.
        trainer: Name of the trainer.
        version: Version of the trainer.
    """
    sizes = list_parameter_shapes(decision.shape)
    rows = {name: row for row, name in enumerate(dict.fromkeys(names.values()))}
    numbers = {names[name]: values for name, values in run.numbers.items()}
    elements = dict.fromkeys(rows, 0)
    for name, trainer_name in names.items():
        elements[trainer_name] += math.prod(sizes[name])
    return TrainerView(
        trainer=trainer,
        version=version,
        num_steps=decision.learning_rate.schedule.num_steps,
        batch_tokens=decision.batch_tokens,
        clip_norm=decision.clip_norm,
        forward=decision.forward,
        steps=choose_proof_steps(decision.learning_rate.schedule),
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


def change_view(view: TrainerView, name: str, **changes: object) -> TrainerView:
    """Return the view with other numbers for one parameter."""
    parameter = view.parameters[name]
    changed_settings = {key: value for key, value in changes.items() if key in parameter.settings}
    settings = {**parameter.settings, **changed_settings}
    fields = {key: value for key, value in changes.items() if key not in settings}
    changed = dataclasses.replace(parameter, settings=settings, **fields)
    return dataclasses.replace(view, parameters={**view.parameters, name: changed})
