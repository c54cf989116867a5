"""The verb that logs a study to W&B."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from launcher.cli.names import study_argument
from launcher.cli.options import answer, json_option
from proxies.core import canon
from proxies.core.errors import ExitCode
from proxies.core.notation import counted

if TYPE_CHECKING:
    from launcher.dashboards.records import RunRecord
    from launcher.dashboards.wandb_writer import UploadState

ABSENT = "no workspace: wandb-workspaces is not installed: pip install 'forerun[workspaces]'"
"""Line of the answer if workspaces cannot be written."""


@click.command()
@study_argument
@click.option(
    "--online",
    is_flag=True,
    help="Send it to W&B too, with your own login, and verify what arrived.",
)
@click.option(
    "--project", envvar="WANDB_PROJECT", default="forerun", show_default=True, help="W&B project."
)
@click.option(
    "--entity", envvar="WANDB_ENTITY", help="W&B user or team; default: your login's own."
)
@json_option
def dashboards(
    study_dir: Path, online: bool, project: str, entity: str | None, as_json: bool
) -> None:
    """Log STUDY to W&B: a run for every proxy, for the study and for its main runs, and a
    workspace.

    Works on an unfinished study too. Without --online nothing leaves this machine. W&B gets a copy:
    the study's ledger is the truth, and is only read. Exit 2 if something that was sent did not
    arrive.
    """
    from launcher.dashboards.runs import study_runs
    from launcher.dashboards.wandb_writer import WandbTarget, keep_workspace, log_runs, upload_runs

    runs, place = study_runs(study_dir), WandbTarget(project=project, entity=entity or None)
    folders, written = log_runs(study_dir, runs)
    arrived = upload_runs(study_dir, runs, place) if online else None
    workspace, workspace_url = keep_workspace(study_dir, runs, place, online=online)
    path = folders[runs[0].run_id]
    body: dict[str, Any] = {
        "run_id": runs[0].run_id,
        "mode": "online" if online else "offline",
        "url": arrived and arrived.url,
        "path": str(path),
        "runs": {"num": len(folders), "num_written": len(written)},
        "workspace": {"path": workspace and str(workspace), "url": workspace_url},
        "arrived": arrived and canon.to_json(arrived),
    }
    notes = [
        f"W&B: {describe_runs(runs)} in {study_dir / 'wandb'}, {len(written)} written now",
        f"the study itself is run {runs[0].run_id} in {path}",
    ]
    notes += _describe_upload(arrived)
    notes.append(f"workspace: {workspace_url or workspace}" if workspace else ABSENT)
    answer(
        as_json,
        body,
        "\n".join(
            [*notes, "this copy can be made again; the study's ledger is the source of truth"]
        ),
    )
    if arrived is not None and arrived.lacking:
        raise SystemExit(ExitCode.INPUT)


def describe_runs(runs: Sequence[RunRecord]) -> str:
    """Return the number of runs that W&B shows, and their kinds. The first run is the study
    itself.
    """
    num_main = sum(run.group == "main run" for run in runs)
    parts = [f"{counted(len(runs) - num_main - 1, 'proxy run')}"]
    parts += [counted(num_main, "main run")] if num_main else []
    return f"{counted(len(runs), 'run')} ({', '.join(parts)}, and one for the study itself)"


def _describe_upload(arrived: UploadState | None) -> list[str]:
    if arrived is None:
        return [
            "nothing has left this machine; --online sends it, with your own login, and verifies it"
        ]
    lacking = [
        f"did not arrive: {name}: {'; '.join(problems)}"
        for name, problems in arrived.lacking.items()
    ]
    sentence = (
        f"{arrived.url} confirms {counted(arrived.num_there, 'complete run')}; {arrived.num_sent} "
        "sent now"
    )
    again = ["run the same command again to send what is missing"] if lacking else []
    return [sentence, *lacking, *again]
