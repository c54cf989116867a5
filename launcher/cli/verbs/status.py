"""The verb that shows what a study has done, is doing, and has left to do."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from forerun._launcher.cli.names import study_argument
from forerun._launcher.cli.options import PATH, full_option, json_option, print_result
from forerun._launcher.main_run.frozen.frozen_folder import find_edited
from forerun._launcher.main_run.progress_output import print_progress
from forerun._launcher.main_run.terminal_layout import (
    escape_control_characters,
    format_table,
    get_terminal_columns,
    wrap,
)
from forerun._launcher.report.views.wording import to_words
from forerun._launcher.study.stages.gates import describe_check
from forerun._launcher.study.stages.progress_text import format_chart, format_progress_line
from forerun._proxies.core.errors import ExitCode
from forerun._proxies.core.notation import (
    NONE,
    format_count,
    format_counted,
    format_duration,
    format_flops,
    format_learning_rate,
    format_loss,
    format_main_run_share,
    format_percent,
    format_significant,
    format_usd,
)
from forerun._sweeps.store.ledger import Ledger
from forerun._sweeps.store.live_state import read_live
from forerun._sweeps.store.view import StudyView

if TYPE_CHECKING:
    from forerun._launcher.report.views.study_status import CoordinateStatus, StudyStatus

FOLLOW_SECONDS = 2.0
"""Minimum seconds between two updates of `--follow`."""
IDLE_PER_LOOK = 9.0
"""Idle time after an update, as a multiple of the time that the update took. An update reads all
records of the ledger, so with this it uses a tenth of a core at most."""


@click.command()
@study_argument
@click.option("--brief", is_flag=True, help="Only counts, best trials, spend and time left.")
@click.option(
    "--follow", is_flag=True, help="Keep it up to date, until Ctrl-C or until the driver ends."
)
@click.option(
    "--runs",
    "runs_file",
    metavar="FILE",
    type=PATH,
    help="Write every run with its outcome, one row each: .csv or .parquet.",
)
@full_option
@json_option
def status(
    study_dir: Path, brief: bool, follow: bool, runs_file: Path | None, full: bool, as_json: bool
) -> None:
    """Show what STUDY has done, is doing and has found so far.

    It works while a driver runs, and changes no record.
    """
    if runs_file is not None:
        view = StudyView(study_dir)
        view.write(runs_file)
        print_progress(
            f"wrote {format_counted(len(view.ledger.read_runs()), 'run')} to {runs_file}"
        )
    if full and (brief or follow):
        raise click.UsageError("--full: only without --brief and --follow")
    if follow and as_json:
        raise click.UsageError("--follow prints for people: for one JSON answer use --brief --json")
    if follow:
        _follow(study_dir)
    elif brief:
        from forerun._launcher.study.plan.study import PLAN_FILE

        now, _ = _read_state(study_dir)
        text = format_state(now, study_dir)
        if now.at_work is False:
            text += f"\n\nto resume: forerun run {study_dir / PLAN_FILE} --study {study_dir}"
        print_result(as_json, {"now": now.to_json()}, text)
    else:
        print_result(as_json, *_describe_study(study_dir, full=full))


def _describe_study(study_dir: Path, *, full: bool) -> tuple[dict[str, Any], str]:
    """Return everything that a study has found, as data and as text."""
    from forerun._launcher.report.answers.outcome import format_gates, format_progress, format_study
    from forerun._launcher.report.answers.report_text import format_details
    from forerun._launcher.report.page.header import format_next_line
    from forerun._launcher.report.page.report_builder import build_report_and_next_runs
    from forerun._launcher.report.views.study_status import build_status
    from forerun._launcher.study.stages.study_folder import open_recorded_study

    live = read_live(study_dir)
    study, ledger = open_recorded_study(study_dir)
    report, next_runs = build_report_and_next_runs(study, ledger)
    for problem in find_edited(study_dir):
        print_progress(f"forerun: {problem}")
    now = build_status(study_dir, live, ledger, study.plan)
    state = format_state(now, study_dir, format_main_run_share(report.spend.share_of_target))
    parts = [
        format_study(report, next_runs, study_dir),
        f"runs: {format_progress(report)}\n{state}",
    ]
    if full:
        parts += [format_details(report), *format_gates(report, next_runs, full=True)]
    parts.append(format_next_line(report, next_runs, study_dir, at_work=now.at_work is not False))
    return {**report.to_json(), "now": now.to_json()}, "\n\n".join(filter(None, parts))


def _read_state(study_dir: Path) -> tuple[StudyStatus, str]:
    """Return the status of a study as it is now, and a chart of its runs as text."""
    from forerun._launcher.report.views.study_status import build_status
    from forerun._launcher.study.plan.file import load_plan
    from forerun._launcher.study.plan.study import PLAN_FILE

    live, ledger = read_live(study_dir), Ledger.read(study_dir)
    now = build_status(study_dir, live, ledger, load_plan(study_dir / PLAN_FILE))
    return now, format_chart(ledger.read_runs())


def _follow(study_dir: Path) -> None:
    """Show the state of a study and update it until its driver ends.

    Raises:
        SystemExit: The user ended the view.
    """
    from rich.live import Live
    from rich.text import Text

    def write(now: StudyStatus, chart: str) -> Text:
        text = "\n\n".join(filter(None, [format_state(now, study_dir), chart]))
        return Text(wrap(escape_control_characters(text), get_terminal_columns(sys.stdout)))

    try:
        took, (now, chart) = 0.0, _read_state(study_dir)
        with Live(write(now, chart), auto_refresh=False) as live:
            while now.at_work is not False:
                time.sleep(max(FOLLOW_SECONDS, IDLE_PER_LOOK * took))
                began = time.monotonic()
                now, chart = _read_state(study_dir)
                took = time.monotonic() - began
                live.update(write(now, chart), refresh=True)
    except KeyboardInterrupt:
        print_progress(
            "forerun: this view ended; nothing was stopped: a driver of the study continues"
        )
        raise SystemExit(ExitCode.INTERRUPTED) from None


def format_state(now: StudyStatus, study_dir: Path, share: str = "") -> str:
    """Format the current state for people.

    Args:
        now: Status of the study.
        study_dir: Folder of the study.
        share: Spend as a share of the main run's FLOPs, as text; empty if not known.
    """
    head = [_format_driver(now, study_dir), _format_checks(now.coordinates)]
    parts = ["\n".join(filter(None, head)), _format_widths(now), _format_spend(now, share)]
    return "\n\n".join(filter(None, parts))


def _format_checks(coordinates: CoordinateStatus) -> str:
    """Format the outcome of the coordinate checks; empty before the first."""
    if coordinates.outcome is None:
        return ""
    outcomes = "; ".join(
        f"{name} {describe_check(name, outcome, coordinates.parametrization)}"
        for name, outcome in coordinates.checks.items()
    )
    return f"coordinate check: {to_words(coordinates.outcome)} ({outcomes})"


def _format_driver(now: StudyStatus, study_dir: Path) -> str:
    """Format how many runs have ended, and what the driver reports about its work."""
    counts = [f"{count} {status}" for status, count in now.num_runs.items() if count]
    done = ", ".join(counts) or "none yet"
    if now.num_imported:
        done += f"; {now.num_imported} imported"
    if now.num_lost_executions:
        done += f"; {format_counted(now.num_lost_executions, 'execution')} lost"
    lines, live = [f"{study_dir}: runs with an outcome: {done}"], now.driver
    if live is None or now.driver_at_work is False:
        if now.at_work is False:
            return "\n".join([*lines, "no driver is running"])
        return "\n".join([*lines, "a driver is running; no run has started yet"])
    process = f"pid {live.pid} on {live.host}"
    if not now.driver_at_work:
        process += f", last report {live.at}"
    lines += [
        format_progress_line(live.study, len(live.running)),
        (
            f"{live.stage}: {len(live.running)} running, {live.num_queued} queued "
            f"(driver: {process}, in this stage for {format_duration(live.seconds)})"
        ),
    ]
    rows = [
        (run.run_id[:12], str(run.worker), f"{run.step} of {run.num_steps}") for run in live.running
    ]
    if rows:
        lines.append(format_table(("running", "worker", "step"), rows))
    return "\n".join(lines)


def _format_widths(now: StudyStatus) -> str:
    rows, statuses = [], tuple(now.num_runs)
    for group in now.by_width:
        best = group.best
        cells = (NONE, NONE, NONE)
        if best is not None:
            cells = (
                format_loss(best.loss_nats),
                format_learning_rate(best.learning_rate),
                str(best.num_steps),
            )
        counts = (str(getattr(group, status)) for status in statuses)
        rows.append((str(group.width), *counts, *cells))
    head = ("width", *statuses, "best (nats)", "its lr", "its steps")
    return format_table(head, rows) if rows else ""


def _format_spend(now: StudyStatus, share: str) -> str:
    """Format what was spent, each amount with its cap if the plan has one."""
    spent, caps = now.spent, now.caps

    def add_cap(text: str, name: str, write: Callable[[float], str]) -> str:
        cap: float | None = getattr(caps, name)
        if cap is None:
            return text
        return f"{text} of {write(cap)} ({format_percent(getattr(spent, name) / cap)})"

    def format_hours(hours: float) -> str:
        return format_duration(3600 * hours)

    flops = add_cap(f"{format_flops(spent.flops)} FLOPs", "flops", format_flops)
    device_hours = f"{format_significant(spent.device_hours)} device-hours"
    parts = [
        add_cap(format_counted(spent.num_runs, "run"), "num_runs", format_count),
        f"{flops}, {share}" if share else flops,
        f"{add_cap(format_hours(spent.hours), 'hours', format_hours)} of time",
        add_cap(device_hours, "device_hours", format_significant),
    ]
    if spent.usd is not None:
        parts.append(add_cap(format_usd(spent.usd), "usd", format_usd))
    if len(spent.by_kind) > 1:
        for usage in spent.by_kind:
            usd = "" if usage.usd is None else f", {format_usd(usage.usd)}"
            hours = format_significant(usage.device_hours)
            parts.append(f"of these {usage.kind or 'not recorded'} {hours} device-hours{usd}")
    return "spent: " + "; ".join(parts)
