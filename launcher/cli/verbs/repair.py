"""The verb that copies a damaged ledger, and rebuilds it from the records that hashes prove."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import cast

import click

from forerun._launcher.cli.names import study_argument
from forerun._launcher.cli.options import json_option, print_result
from forerun._proxies.core import canon
from forerun._proxies.core.canon import Json
from forerun._proxies.core.notation import format_counted
from forerun._sweeps.store.repair import RepairResult
from forerun._sweeps.store.repair import repair as repair_ledger

_MAX_SHOWN = 5
"""Maximum number of keys of one kind of record that the text shows."""


@click.command()
@study_argument
@json_option
def repair(study_dir: Path, as_json: bool) -> None:
    """Copy the damaged ledger of STUDY, rebuild it from what its hashes prove, and list what was
    lost.
    """
    result = repair_ledger(study_dir, _read_question(study_dir))
    if result is None:
        print_result(as_json, {"repaired": False}, "nothing to repair: every record is intact")
        return
    body = {"repaired": True, **cast(dict[str, Json], canon.to_json(result))}
    print_result(as_json, body, "\n".join(_format_repair(study_dir, result)))


def _read_question(study_dir: Path) -> dict[str, Json] | None:
    """Return the study's question from the plan in its folder; None if the plan cannot be read.

    The question is the part of a plan that decides what is measured. Record 0 of the ledger holds
    it too.
    """
    from forerun._launcher.study.stages.study_folder import read_recorded_study

    try:
        return read_recorded_study(study_dir).question
    except (ValueError, OSError):
        # The plan, the corpus, or the user's code is missing: use the ledger's own record 0.
        return None


def _format_repair(study_dir: Path, result: RepairResult) -> list[str]:
    kept = format_counted(result.num_kept, "record")
    lines = [
        f"{study_dir / result.copy} is the damaged ledger",
        f"kept: {kept}, {result.num_put_back} from after the damage; hashes prove all",
        *(f"lost: {len(keys)} {kind} ({_name_some(keys)})" for kind, keys in result.lost.items()),
    ]
    if result.rerun:
        runs = f"{format_counted(len(result.rerun), 'run')} with a curve but no result now"
        lines.append(f"{runs} ({_name_some(result.rerun)}): run again if the study needs them")
    elif not result.lost:
        lines.append("lost: nothing")
    return [*lines, f"next: forerun run {study_dir / 'plan.toml'} --study {study_dir}"]


def _name_some(keys: Sequence[str]) -> str:
    names = ", ".join(key[:12] for key in keys[:_MAX_SHOWN])
    return f"{names} ..." if len(keys) > _MAX_SHOWN else names
