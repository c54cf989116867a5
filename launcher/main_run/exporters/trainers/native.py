"""Export to the embedded trainer: the launch config itself, and a script that starts it."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import shlex
from pathlib import Path

from forerun._launcher.main_run.exporters.export_checks import ExportError, Expressible
from forerun._launcher.main_run.exporters.export_writer import write_files
from forerun._launcher.main_run.exporters.fidelity import (
    FidelityEntry,
    FidelityReport,
    Judgement,
    judge_fields,
)
from forerun._launcher.main_run.frozen.frozen import Decision, FrozenError
from forerun._launcher.main_run.frozen.launch_file import LAUNCH_FILE, RUN_FILE
from forerun._launcher.main_run.supervisor.launch import build_torchrun_command
from forerun._launcher.main_run.trainer import inputs, model_builder
from forerun._proxies.core import canon
from forerun._proxies.core.optimizers import OPTIMIZERS

VERSIONS = (importlib.metadata.version("forerun"),)

EXPRESSIBLE = Expressible(
    optimizers={name: spec.settings for name, spec in OPTIMIZERS.items()},
    run_wide=inputs.RUN_WIDE_APPLIED,
)
"""The embedded trainer has every registered optimizer (`forerun._proxies.model.optimizer`)."""
# Notes on fields that `launch.json` keeps as they are, by field
_NOTES = {
    "predicted": "kept in the file; training does not read it",
    "base_shape": "kept in the file; its multipliers are in the numbers of groups and forward",
    "parametrization": "kept in the file; its numbers are in groups and forward",
    "transfer": "kept in the file as evidence; its numbers are in groups",
    "parallelism": "any other number of ranks is refused",
    "spikes": "automatic up to max_rollbacks times; `forerun watch` says when to do it by hand",
    "monitoring": "columns of metrics.jsonl; a step whose replay differs stops the run",
}


def export(decision: Decision, out_dir: Path, version: str = VERSIONS[-1]) -> FidelityReport:
    """Write `launch.json` and `run.sh` (`run.sh DATA RUN_DIR`, on one machine).

    Raises:
        ExportError: The version is not that of this forerun, or the embedded trainer cannot run the
            decision.
        FrozenError: The groups do not fit the shape's parameters, or the optimizer that the trainer
            builds differs from them.
    """
    if version not in VERSIONS:
        raise ExportError(
            "native", [f"version {version!r} is unknown: the embedded trainer is {VERSIONS[-1]}"]
        )
    if problems := inputs.find_reasons_to_refuse(decision):
        raise ExportError("native", problems)
    # The code of a user's model may be in another place.
    if decision.model is None and (problems := find_mismatches(decision)):
        raise FrozenError("embedded trainer", problems)
    launch = canon.to_pretty_json({"digest": decision.digest, "decision": decision}).decode()
    write_files(out_dir, {LAUNCH_FILE: launch, RUN_FILE: _format_run_script(decision)})
    return FidelityReport(trainer="native", version=version, entries=_build_entries(decision))


def _format_run_script(decision: Decision) -> str:
    """Return the `run.sh` of a decision; a user's model needs the folder of its code too."""
    command = shlex.join(build_torchrun_command("python", decision.parallelism.num_ranks))
    note, code = "", ""
    if decision.model:
        note = "# FORERUN_CODE: the folder of its model; by default the one that you are in\n"
        code = ' --code "${FORERUN_CODE:-.}"'
    return (
        "#!/bin/sh\n"
        f"# Trains the config {decision.digest}: run.sh DATA RUN_DIR [--stop-after N]\n"
        f"{note}"
        "set -eu\n"
        f'config="$(dirname "$0")/{LAUNCH_FILE}" data="$1" out="$2"\n'
        "shift 2\n"
        f'exec {command} --config "$config" --data "$data" --out "$out"{code} "$@"\n'
    )


def _build_entries(decision: Decision) -> tuple[FidelityEntry, ...]:
    """Return an entry for each field of the decision, and for each leaf field that the trainer does
    not know.
    """
    judgements: dict[str, Judgement] = {
        field.name: ("exact", "") for field in dataclasses.fields(decision)
    }
    leaves = judge_fields(decision, judgements, EXPRESSIBLE)
    exact = {entry.field.partition(".")[0]: None for entry in leaves if entry.verdict == "exact"}
    return (
        *(FidelityEntry(field=name, verdict="exact", note=_NOTES.get(name, "")) for name in exact),
        *(entry for entry in leaves if entry.verdict != "exact"),
    )


def find_mismatches(decision: Decision, code_dir: Path | None = None) -> list[str]:
    """Return where the optimizer groups that the embedded trainer builds differ from the frozen
    ones.

    The model is built on the meta device, so that nothing is allocated at any size.

    Args:
        decision: The decision.
        code_dir: Folder with the code of a user's model.

    Raises:
        FrozenError: The groups do not fit the shape's parameters.
        FactoryError, FactoryChangedError: The model's factory is missing, or it is another one.
    """
    model = model_builder.load_trained_model(decision, code_dir).build_on_meta()
    optimizer = model_builder.build_optimizer(model, decision)
    return model_builder.find_mismatches(model, optimizer, decision)
