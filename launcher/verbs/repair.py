"""The verb that copies a damaged ledger and rebuilds it from the records whose hashes prove them:
repair.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, cast

import click

from launcher.cli.names import study_argument
from launcher.cli.options import answer, json_option
from proxies.core import canon
from proxies.core.canon import Json
from proxies.core.notation import counted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sweeps.store.repair import Repaired

_MAX_SHOWN = 5
"""Maximum number of names of one kind on a terminal."""


@click.command()
@study_argument
@json_option
def repair(study_dir: Path, as_json: bool) -> None:
    """Copy the damaged ledger of STUDY, rebuild it from what its hashes prove, and list what was
    lost.
    """
    from sweeps.store.repair import repair as repair_ledger

    result = repair_ledger(study_dir, _read_question(study_dir))
    body: dict[str, Json] = {"repaired": result is not None}
    if result is not None:
        body |= cast(dict[str, Json], canon.to_json(result))
    lines = (
        ["nothing to repair: every record is intact"]
        if result is None
        else _format_repair(study_dir, result)
    )
    answer(as_json, body, "\n".join(lines))


def _read_question(study_dir: Path) -> dict[str, Json] | None:
    """Return the question of the plan kept in the study; None if it can no longer be read."""
    from launcher.study.study_folder import recorded_study

    try:
        return recorded_study(study_dir).question
    except (ValueError, OSError):
        # The plan, the corpus, or the user's code is missing: use the ledger's own record 0.
        return None


def _format_repair(study_dir: Path, result: Repaired) -> list[str]:
    lines = [
        f"{study_dir / result.copy} is the damaged ledger",
        (
            f"kept: {counted(result.num_kept, 'record')}, {result.num_put_back} from after the "
            "damage; hashes prove all"
        ),
    ]
    lines += [
        f"lost: {len(keys)} {kind} ({_name_some(keys)})" for kind, keys in result.lost.items()
    ]
    lines += [] if result.lost or result.rerun else ["lost: nothing"]
    if result.rerun:
        runs = (
            f"{counted(len(result.rerun), 'run')} with a curve but no result now "
            f"({_name_some(result.rerun)})"
        )
        lines.append(f"{runs}: run again if the study needs them")
    return [*lines, f"next: forerun run {study_dir / 'plan.toml'} --study {study_dir}"]


def _name_some(keys: Sequence[str]) -> str:
    return ", ".join(key[:12] for key in keys[:_MAX_SHOWN]) + (
        " ..." if len(keys) > _MAX_SHOWN else ""
    )
