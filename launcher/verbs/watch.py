"""The verb that follows a main run: watch."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from launcher.cli.names import frozen_argument, study_of_line
from launcher.cli.options import answer, json_option, sound_config
from proxies.core.canon import Json
from proxies.core.errors import ExitCode

if TYPE_CHECKING:
    from launcher.frozen.frozen import Decision
    from launcher.watch.follower import Follower, WatchStatus
    from launcher.watch.logs.keys import ColumnNames
    from launcher.watch.logs.readings import LogReader

_EXITS = {"fine": ExitCode.DONE, "alarm": ExitCode.GATE, "cannot_tell": ExitCode.CANNOT_TELL}
LEAST_SECONDS = 0.2
"""Minimum seconds between updates."""


@click.command()
@frozen_argument
@click.option(
    "--metrics",
    "where",
    metavar="FILE|FOLDER|WANDB_RUN",
    help="Log of the run: JSONL, CSV, text, trainer_state.json, W&B (a folder, or "
    "entity/project/run "
    "online), TensorBoard. Default: run/ beside the config.",
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
    type=click.FloatRange(LEAST_SECONDS, 86400),
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
    step_key: str,
    train_loss_key: str,
    validation_loss_key: str,
    grad_norm_key: str,
    as_json: bool,
) -> None:
    """Compare a main run with the loss and pace that FROZEN predicted; live unless --once or
    --conclude is given.

    With --conclude, the ledger of the study that --study names keeps the run; without, that of the
    config's own.
    """
    from launcher.watch.logs.readings import LogReader
    from launcher.watch.logs.sources import source_of

    if once and conclude:
        raise click.UsageError(
            "--once judges a run that still trains, --conclude one that has ended: give one of them"
        )
    if math.isnan(every_seconds):
        raise click.UsageError("--every: must be a number, not nan")
    decision, folder = sound_config(frozen)
    metrics = where or str(folder / "run")
    if decision.own is not None and where is None:
        metrics = str(decision.own.metrics_at(folder / "run"))
    keys = _choose_columns(decision, (step_key, train_loss_key, validation_loss_key, grad_norm_key))
    readings = LogReader(
        source_of(metrics, keys),
        keys,
        decision.digest,
        decision.learning_rate.schedule.num_steps,
        decision.parallelism.num_ranks,
    )
    run_dir = _choose_run_dir(folder, where)
    if conclude:
        _print_conclusion(decision, folder, run_dir, readings, study_of_line(context), as_json)
        return
    from launcher.watch.follower import Follower

    follower = Follower(decision, readings, frozen=frozen, run_dir=run_dir, metrics=where)
    last_status, code = (
        (follower.look(last=True), None) if once else _follow_run(follower, every_seconds)
    )
    if last_status is None:
        raise KeyboardInterrupt
    answer(as_json, {**last_status.body, "metrics": metrics}, last_status.text)
    raise SystemExit(_EXITS[last_status.standing] if code is None else code)


def _choose_columns(decision: Decision, typed: tuple[str, str, str, str]) -> ColumnNames:
    """Return the names of the columns in the log: as typed, else from the plan of a user's own
    trainer, else the names that common trainers use.

    Args:
        decision: Frozen config.
        typed: Names of step, training loss, validation loss, and gradient norm; empty if not given.
    """
    from launcher.watch.logs.keys import LOSS, STEP, VALIDATION, ColumnNames

    columns = (STEP, LOSS, VALIDATION, "grad_norm")
    if decision.own is None:
        return ColumnNames(dict(zip(columns, typed, strict=True)), {})
    own = decision.own.command
    planned = (own.step_key, own.train_loss_key, own.validation_loss_key, own.grad_norm_key)
    names = (name or default for name, default in zip(typed, planned, strict=True))
    factors = {
        LOSS: own.nats_per_unit(own.train_loss_unit),
        VALIDATION: own.nats_per_unit(own.validation_loss_unit),
    }
    return ColumnNames(dict(zip(columns, names, strict=True)), factors)


def _choose_run_dir(folder: Path, where: str | None) -> Path:
    """Return the run folder whose event log gets the alerts: the folder that is followed, or the
    config's own.
    """
    from launcher.base.metrics import METRICS_FILE

    path = Path(where) if where else folder / "run"
    if path.name == METRICS_FILE:
        return path.parent
    return path if (path / METRICS_FILE).exists() else folder / "run"


def _follow_run(follower: Follower, every_seconds: float) -> tuple[WatchStatus | None, int | None]:
    """Update until the run has ended or the user stops this. Return the last status, and an exit
    code that overrides its own.
    """
    from launcher.base.talk import say
    from launcher.base.wandb_calls import DashboardError
    from launcher.watch.logs.readings import OtherRunError

    status: WatchStatus | None = None
    shown: list[str] = []
    try:
        while True:
            try:
                look = status = follower.look(last=False)
                lines, message = [*look.news, *look.notes], look.line
            except (OtherRunError, DashboardError, OSError) as error:
                lines, message = [], f"not judged: {error}"
            for line in [
                *(line for line in lines if line not in shown),
                *([message] if message not in shown[-1:] else []),
            ]:
                say(line)
            shown = [*lines, message]
            if status is not None and status.over:
                return status, None
            time.sleep(every_seconds)
    except KeyboardInterrupt:
        return status, ExitCode.INTERRUPTED


def _print_conclusion(
    decision: Decision,
    folder: Path,
    run_dir: Path,
    readings: LogReader,
    study_dir: Path | None,
    as_json: bool,
) -> None:
    from launcher.frozen.frozen_folder import study_of
    from launcher.frozen.launch_file import format_accepted_failures
    from launcher.watch.conclusion import conclude, next_lines, sentence

    reading = readings.read(last=True)
    conclusion = conclude(decision, folder, run_dir, reading, study_dir or study_of(folder))
    notes: list[Json] = [*reading.notes]
    lines = [
        sentence(conclusion),
        *format_accepted_failures(folder, decision.digest),
        *next_lines(conclusion),
        *(f"log: {note}" for note in reading.notes),
    ]
    answer(as_json, {**conclusion.body, "notes": notes}, "\n".join(lines))
