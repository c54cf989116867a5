"""The decision for the embedded trainer: the launch config itself, and the line that starts it."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import shlex
from pathlib import Path

from launcher.exporters.export_writer import write_files
from launcher.exporters.fidelity import (
    ExportError,
    Expressible,
    FidelityEntry,
    FidelityReport,
    Judgement,
    judge_fields,
)
from launcher.frozen.frozen import Decision, FrozenError
from launcher.frozen.launch_file import LAUNCH_FILE, RUN_FILE, read_launch
from launcher.supervisor.launch import torchrun_command
from launcher.trainer import assembly
from launcher.trainer.trained_model import trained_model
from proxies.core import canon
from proxies.core.optimizers import OPTIMIZERS

VERSIONS = (importlib.metadata.version("forerun"),)

EXPRESSIBLE = Expressible(
    optimizers={name: spec.settings for name, spec in OPTIMIZERS.items()},
    run_wide=assembly.RUN_WIDE_APPLIED,
)
"""The embedded trainer steps by every registered optimizer (`proxies.model.optimizer`)."""
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
    """Write `launch.json` and `run.sh` (`run.sh DATA RUN_DIR`, on one machine) into `out_dir`.

    Raises:
        ExportError: another version than this one, or what the embedded trainer cannot run.
        FrozenError: the groups do not fit the shape's parameters, the live optimizer would differ
            from them, or what was written does not read back as the decision.
    """
    if version not in VERSIONS:
        raise ExportError(
            "native", [f"version {version!r} is unknown: the embedded trainer is {VERSIONS[-1]}"]
        )
    if problems := assembly.unfit(decision):
        raise ExportError("native", problems)
    # the code of a user's own may lie elsewhere
    if decision.model is None and (problems := parity(decision)):
        raise FrozenError("embedded trainer", problems)
    launch = canon.pretty({"digest": decision.digest, "decision": decision}).decode()
    head = shlex.join(torchrun_command("python", decision.parallelism.num_ranks))
    code = ' --code "${FORERUN_CODE:-.}"' if decision.model else ""
    script = (
        "#!/bin/sh\n"
        f"# Trains the config {decision.digest}: run.sh DATA RUN_DIR [--stop-after N]\n"
        f"{'# FORERUN_CODE: the folder of its model; by default the one that you are in' + chr(10) if code else ''}"  # noqa: E501
        "set -eu\n"
        'config="$(dirname "$0")/' + LAUNCH_FILE + '" data="$1" out="$2"\n'
        "shift 2\n"
        f'exec {head} --config "$config" --data "$data" --out "$out"{code} "$@"\n'
    )
    write_files(out_dir, {LAUNCH_FILE: launch, RUN_FILE: script})
    if read_launch(out_dir / LAUNCH_FILE) != decision:
        raise FrozenError(
            str(out_dir / LAUNCH_FILE), ["does not read back as the decision that was written"]
        )
    return FidelityReport(trainer="native", version=version, entries=_entries(decision))


def _entries(decision: Decision) -> tuple[FidelityEntry, ...]:
    """Return one entry for each field of the decision, and one for each leaf field that the trainer
    does not know.
    """
    judgements: dict[str, Judgement] = {
        field.name: ("exact", "") for field in dataclasses.fields(decision)
    }
    leaves = judge_fields(decision, judgements, EXPRESSIBLE)
    lost = tuple(entry for entry in leaves if entry.verdict != "exact")
    kept = dict.fromkeys(
        entry.field.partition(".")[0] for entry in leaves if entry.verdict == "exact"
    )
    return (
        tuple(
            FidelityEntry(field=name, verdict="exact", note=_NOTES.get(name, "")) for name in kept
        )
        + lost
    )


def parity(decision: Decision, code_dir: Path | None = None) -> list[str]:
    """Where the embedded trainer's own optimizer groups, built on the full model, differ from the
    frozen ones.

    The model is built on the meta device: nothing is allocated, at any size. `code_dir` is the
    folder of a user's own.

    Raises:
        FrozenError: the groups do not fit the shape's parameters.
        FactoryError, FactoryChangedError: there is no such factory, or it is another.
    """
    model = trained_model(decision, code_dir).outline()
    optimizer = assembly.build_optimizer(model, decision.groups, decision.optimizer)
    return assembly.mismatches(model, optimizer, decision.groups, decision.optimizer)
