"""The verb that shows a study in W&B."""

from __future__ import annotations

import errno
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import click

from launcher.verbs.options import answer, json_option, study_argument
from proxies.canon import Json

if TYPE_CHECKING:
    from launcher.dashboards import Logged


@click.command()
@study_argument
@click.option(
    "--online", is_flag=True, help="Send it to W&B now, with your own login; else nothing leaves this machine."
)
@click.option("--project", envvar="WANDB_PROJECT", default="forerun", show_default=True, help="W&B project.")
@click.option("--entity", envvar="WANDB_ENTITY", help="W&B user or team; default: your login's own.")
@click.option("--optuna", "optuna_port", type=click.IntRange(1024, 65535), metavar="PORT",
              help="Show it in optuna-dashboard instead, at 127.0.0.1:PORT, until Ctrl-C.")  # fmt: skip
@json_option
def dashboards(
    study_dir: Path, online: bool, project: str, entity: str | None, optuna_port: int | None, as_json: bool
) -> None:
    """Log STUDY to W&B as one run: settings, verdicts, tables and the report's pictures; again, to bring it up to date.

    Works on an unfinished study too. W&B's is a copy: the study's ledger is the truth, and is only read.
    """
    if optuna_port is not None:
        _serve_optuna(study_dir, optuna_port)
        return
    from launcher.dashboard_record import record_of
    from launcher.dashboards import log_study
    from launcher.report import page
    from launcher.report_body import recorded_body
    from proxies import canon

    body = canon.parse(canon.pretty(recorded_body(study_dir)))
    assert isinstance(body, dict)
    logged = log_study(study_dir, record_of(body, page(body)), online=online, project=project, entity=entity)
    counts: dict[str, Json] = {
        "tables": logged.num_tables, "table_rows": logged.num_table_rows, "pictures": logged.num_pictures,
        "summary_values": logged.num_summary_values,
    }  # fmt: skip
    found: dict[str, Json] = {
        "run_id": logged.run_id, "path": str(logged.path), "mode": logged.mode, "url": logged.url, "logged": counts,
    }  # fmt: skip
    answer(as_json, found, _text(logged))


def _serve_optuna(study_dir: Path, port: int) -> None:
    """Serve the study to this machine's browsers, following a driver at work, until interrupted."""
    from launcher.talk import say
    from sweeps.optuna_view import StudyStorage

    try:
        from optuna_dashboard import run_server
    except ImportError:
        raise click.UsageError("optuna-dashboard is not installed: pip install 'forerun[optuna-dashboard]'") from None
    storage = StudyStorage(study_dir)
    say(f"{study_dir} at http://127.0.0.1:{port}, read only, until Ctrl-C")
    try:
        run_server(storage, host="127.0.0.1", port=port)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        raise click.UsageError(f"--optuna {port}: something else serves there already: name another port") from None


def _text(logged: Logged) -> str:
    counts = (("tables", logged.num_tables), ("rows in them", logged.num_table_rows),
              ("pictures", logged.num_pictures), ("summary values", logged.num_summary_values))  # fmt: skip
    lines = [f"W&B run {logged.run_id}: {', '.join(f'{what} {count}' for what, count in counts)}", f"in {logged.path}"]
    if logged.mode == "offline":
        lines.append(f"nothing has left this machine; this uploads it: wandb sync {shlex.quote(str(logged.path))}")
    else:
        lines.append(f"sent to {logged.url}")
    lines.append("W&B's is a copy that this verb rebuilds; the study's ledger is the truth")
    return "\n".join(lines)
