"""The verb that follows a main run: watch."""

from __future__ import annotations

import math
import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from forerun._launcher.cli.frozen_config import read_sound_config
from forerun._launcher.cli.names import frozen_argument, get_study_option
from forerun._launcher.cli.options import json_option, print_result
from forerun._launcher.main_run.frozen.frozen_folder import find_study
from forerun._launcher.main_run.frozen.launch_file import format_accepted_failures
from forerun._launcher.main_run.metrics_file import METRICS_FILE
from forerun._launcher.main_run.progress_output import print_progress
from forerun._launcher.main_run.wandb_client import DashboardError
from forerun._launcher.main_run.watch.logs.keys import LOSS, STEP, VALIDATION, ColumnNames
from forerun._proxies.core.canon import Json
from forerun._proxies.core.errors import ExitCode

if TYPE_CHECKING:
    from forerun._launcher.main_run.frozen.frozen import Decision
    from forerun._launcher.main_run.watch.follower import Follower, WatchStatus
    from forerun._launcher.main_run.watch.logs.readings import LogReader

_EXITS = {"fine": ExitCode.DONE, "alarm": ExitCode.GATE, "cannot_tell": ExitCode.CANNOT_TELL}
"""Exit codes by the standing of a run."""
MIN_SECONDS = 0.2
"""Minimum seconds between updates."""


@click.command()
@frozen_argument
@click.option(
    "--metrics",
    "where",
    metavar="FILE|FOLDER|WANDB_RUN",
    help="Log of the run: JSONL, CSV, text, trainer_state.json, W&B (a folder, or "
    "entity/project/run online), TensorBoard. Default: run/ beside the config.",
)
@click.option(
    "--once", is_flag=True, help="Judge the log so far and exit: 0 fine, 3 an alarm, 4 cannot tell."
)
@click.option(
    "--conclude",
    is_flag=True,
    help="Score the forecast of a run that has ended, for later forecasts.",
)
@click.option(
    "--every",
    "every_seconds",
    type=click.FloatRange(MIN_SECONDS, 86400),
    default=30.0,
    show_default=True,
    help="Seconds between updates, live.",
)
@click.option(
    "--step-key",
    default="",
    help="Name of the step in the log; default: what common trainers call it.",
)
@click.option(
    "--train-loss-key", default="", help="The same for the training loss, nats per token."
)
@click.option("--validation-loss-key", default="", help="The same for the validation loss.")
@click.option("--grad-norm-key", default="", help="The same for the gradient norm before clipping.")
@json_option
@click.pass_context
def watch(
    context: click.Context,
    /,
    frozen: Path,
    where: str | None,
    once: bool,
    conclude: bool,
    every_seconds: float,
    as_json: bool,
    **column_names: str,
) -> None:
    """Compare a main run with the loss and pace that FROZEN predicted.

    It reads the log of the run, and updates until the run ends, unless --once or --conclude is
    given. --conclude writes the score of the forecast to the ledger of the study that --study
    names, else to that of the config's own study.
    """
    from forerun._launcher.main_run.watch.logs.readings import LogReader
    from forerun._launcher.main_run.watch.logs.sources import open_source

    if once and conclude:
        raise click.UsageError(
            "--once judges a run that still trains, --conclude one that has ended: give one of them"
        )
    if math.isnan(every_seconds):
        raise click.UsageError("--every: must be a number, not nan")
    decision, folder = read_sound_config(frozen)
    metrics = where or str(folder / "run")
    if decision.own is not None and where is None:
        metrics = str(decision.own.get_metrics_path(folder / "run"))
    keys = _choose_columns(decision, column_names)
    readings = LogReader(
        open_source(metrics, keys),
        keys,
        decision.digest,
        decision.learning_rate.schedule.num_steps,
        decision.parallelism.num_ranks,
    )
    run_dir = _choose_run_dir(folder, where)
    if conclude:
        study_dir = get_study_option(context) or find_study(folder)
        print_result(as_json, *_conclude(decision, folder, run_dir, readings, study_dir))
        return
    from forerun._launcher.main_run.watch.follower import Follower

    follower = Follower(decision, readings, frozen=frozen, run_dir=run_dir, metrics=where)
    code: int | None = None
    if once:
        status: WatchStatus | None = follower.look(last=True)
    else:
        status, code = _follow_run(follower, every_seconds)
    if status is None:
        raise KeyboardInterrupt
    print_result(as_json, {**status.body, "metrics": metrics}, status.text)
    raise SystemExit(_EXITS[status.standing] if code is None else code)


def _choose_columns(decision: Decision, typed: dict[str, str]) -> ColumnNames:
    """Return the names of the columns in the log: as typed, else from the plan of a user's own
    trainer, else the names that common trainers use.

    Args:
        decision: Frozen config.
        typed: Values of the options `step_key`, `train_loss_key`, ...; empty if not given.
    """
    columns = {
        "step_key": STEP,
        "train_loss_key": LOSS,
        "validation_loss_key": VALIDATION,
        "grad_norm_key": "grad_norm",
    }
    if decision.own is None:
        return ColumnNames({column: typed[key] for key, column in columns.items()}, {})
    own = decision.own.command
    names = {column: typed[key] or getattr(own, key) for key, column in columns.items()}
    factors = {
        LOSS: own.get_nats_per_unit(own.train_loss_unit),
        VALIDATION: own.get_nats_per_unit(own.validation_loss_unit),
    }
    return ColumnNames(names, factors)


def _choose_run_dir(folder: Path, where: str | None) -> Path:
    """Return the run folder whose event log gets the alerts: the folder that is followed, or the
    config's own.
    """
    path = Path(where) if where else folder / "run"
    if path.name == METRICS_FILE:
        return path.parent
    return path if (path / METRICS_FILE).exists() else folder / "run"


def _follow_run(follower: Follower, every_seconds: float) -> tuple[WatchStatus | None, int | None]:
    """Update until the run has ended, or the user stops this.

    Returns:
        The last status, and the exit code if the user stopped this; None for that of the status.
    """
    from forerun._launcher.main_run.watch.logs.readings import OtherRunError

    status: WatchStatus | None = None
    shown: list[str] = []
    try:
        while True:
            try:
                status = follower.look(last=False)
                lines = [*status.news, *status.notes, status.line]
            except (OtherRunError, DashboardError, OSError) as error:
                lines = [f"not judged: {error}"]
            for line in lines:
                if line not in shown:
                    print_progress(line)
            shown = lines
            if status is not None and status.over:
                return status, None
            time.sleep(every_seconds)
    except KeyboardInterrupt:
        return status, ExitCode.INTERRUPTED


def _conclude(
    decision: Decision, folder: Path, run_dir: Path, readings: LogReader, study_dir: Path | None
) -> tuple[dict[str, Json], str]:
    """Score the forecast of a run that has ended, and return the answer as data and as text.

    `study_dir` is the study whose ledger keeps the score; None if there is none.
    """
    from forerun._launcher.main_run.watch.conclusion import (
        build_concluded_run,
        conclude,
        describe_conclusion,
    )
    from forerun._launcher.study.stages.concluded_runs import record_concluded

    reading = readings.read(last=True)
    run = build_concluded_run(decision, reading)
    if study_dir is not None:
        run = record_concluded(study_dir, run, decision.data.data_id)
    body = conclude(decision, folder, run_dir, run, in_ledger=study_dir is not None)
    lines = [
        describe_conclusion(run),
        *format_accepted_failures(folder, decision.digest),
        _describe_ledger(study_dir),
        *(f"log: {note}" for note in reading.notes),
    ]
    return {**body, "notes": [*reading.notes]}, "\n".join(lines)


def _describe_ledger(study_dir: Path | None) -> str:
    """Return which study's ledger keeps a concluded run, and the commands that use it."""
    if study_dir is None:
        return (
            "the config lies in no study, so no ledger keeps the run: name a study with "
            "--study STUDY"
        )
    study = shlex.quote(str(study_dir))
    return (
        f"the ledger of {study_dir} keeps the run: `forerun fit {study}` adds it to the ladder, "
        f"`forerun report {study}` shows it beside its forecast"
    )
