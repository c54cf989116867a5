"""`forerun repair`: a damaged ledger copied, and what its hashes prove saved."""

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

_SHOWN = 5  # names of a kind, on a terminal


@click.command()
@study_argument
@json_option
def repair(study_dir: Path, as_json: bool) -> None:
    """Copy the damaged ledger of STUDY, rebuild it from what its hashes prove, and list what was
    lost.
    """
    from sweeps.store.repair import repair as repair_ledger

    found = repair_ledger(study_dir, _question(study_dir))
    body: dict[str, Json] = {"repaired": found is not None}
    if found is not None:
        body |= cast(dict[str, Json], canon.to_json(found))
    lines = (
        ["nothing to repair: every record is intact"] if found is None else _lines(study_dir, found)
    )
    answer(as_json, body, "\n".join(lines))


def _question(study_dir: Path) -> dict[str, Json] | None:
    """What the plan kept in the study asks; None if that is no longer known."""
    from launcher.study.study_folder import recorded_study

    try:
        return recorded_study(study_dir).question
    except (
        ValueError,
        OSError,
    ):  # no plan, no corpus, no code of the user's: the ledger's own record 0 has to do
        return None


def _lines(study_dir: Path, found: Repaired) -> list[str]:
    lines = [
        f"{study_dir / found.copy} is the damaged ledger",
        (
            f"kept: {counted(found.num_kept, 'record')}, {found.num_put_back} from after the "
            "damage; "
            "hashes prove all"
        ),
    ]
    lines += [f"lost: {len(keys)} {kind} ({_some(keys)})" for kind, keys in found.lost.items()]
    lines += [] if found.lost or found.rerun else ["lost: nothing"]
    if found.rerun:
        runs = (
            f"{counted(len(found.rerun), 'run')} with a curve but no result now "
            f"({_some(found.rerun)})"
        )
        lines.append(f"{runs}: run again if the study needs them")
    return [*lines, f"next: forerun run {study_dir / 'plan.toml'} --study {study_dir}"]


def _some(keys: Sequence[str]) -> str:
    return ", ".join(key[:12] for key in keys[:_SHOWN]) + (" ..." if len(keys) > _SHOWN else "")
