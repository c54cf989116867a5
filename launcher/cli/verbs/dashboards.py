"""The verb that logs a study to W&B."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from forerun._launcher.cli.names import study_argument
from forerun._launcher.cli.options import json_option, print_result
from forerun._proxies.core import canon
from forerun._proxies.core.errors import ExitCode
from forerun._proxies.core.notation import format_counted

if TYPE_CHECKING:
    from forerun._launcher.report.dashboards.run_record import RunRecord
    from forerun._launcher.report.dashboards.wandb_writer import UploadState

_NO_WORKSPACE = "no workspace: wandb-workspaces is not installed: pip install 'forerun[workspaces]'"
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

    It works on an unfinished study too, and writes to wandb/ in the study. Without --online nothing
    leaves this machine. W&B gets a copy; the study's ledger is only read. Exit 2 if something that
    was sent did not arrive.
    """
    from forerun._launcher.report.dashboards.runs import list_study_runs
    from forerun._launcher.report.dashboards.wandb_writer import (
        WandbTarget,
        log_runs,
        upload_runs,
        write_workspace,
    )

    runs, place = list_study_runs(study_dir), WandbTarget(project=project, entity=entity or None)
    folders, written = log_runs(study_dir, runs)
    arrived = upload_runs(study_dir, runs, place) if online else None
    workspace, workspace_url = write_workspace(study_dir, runs, place, online=online)
    path = folders[runs[0].run_id]
    body: dict[str, Any] = {
        "run_id": runs[0].run_id,
        "mode": "online" if online else "offline",
        "url": None if arrived is None else arrived.url,
        "path": str(path),
        "runs": {"num": len(folders), "num_written": len(written)},
        "workspace": {"path": None if workspace is None else str(workspace), "url": workspace_url},
        "arrived": canon.to_json(arrived),
    }
    lines = [
        f"W&B: {describe_runs(runs)} in {study_dir / 'wandb'}, {len(written)} written now",
        f"the study itself is run {runs[0].run_id} in {path}",
        *_describe_upload(arrived),
        f"workspace: {workspace_url or workspace}" if workspace else _NO_WORKSPACE,
        "this copy can be made again; the study's ledger is the source of truth",
    ]
    print_result(as_json, body, "\n".join(lines))
    if arrived is not None and arrived.lacking:
        raise SystemExit(ExitCode.INPUT)


def describe_runs(runs: Sequence[RunRecord]) -> str:
    """Return the number of runs that W&B shows, and their kinds. The first run is the study
    itself.
    """
    num_main = sum(run.group == "main run" for run in runs)
    kinds = format_counted(len(runs) - num_main - 1, "proxy run")
    if num_main:
        kinds += f", {format_counted(num_main, 'main run')}"
    return f"{format_counted(len(runs), 'run')} ({kinds}, and one for the study itself)"


def _describe_upload(arrived: UploadState | None) -> list[str]:
    if arrived is None:
        return [
            "nothing has left this machine; --online sends it, with your own login, and verifies it"
        ]
    complete = format_counted(arrived.num_there, "complete run")
    lines = [f"{arrived.url} confirms {complete}; {arrived.num_sent} sent now"]
    for name, problems in arrived.lacking.items():
        lines.append(f"did not arrive: {name}: {'; '.join(problems)}")
    if arrived.lacking:
        lines.append("run the same command again to send what is missing")
    return lines
