"""The verb that shows what a study has done, is doing, and has left to do."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from launcher.base.talk import say
from launcher.base.terminal import shown, terminal_columns, wrap
from launcher.cli.names import study_argument
from launcher.cli.options import answer, full_option, json_option, table
from proxies.core.errors import ExitCode
from proxies.core.notation import (
    counted,
    format_count,
    format_duration,
    format_flops,
    format_learning_rate,
    format_loss,
    format_percent,
    format_significant,
    format_usd,
)

FOLLOW_SECONDS = 2.0
"""Minimum seconds between two updates of `--follow`."""
IDLE_PER_LOOK = 9.0
"""Idle time after an update, in units of the time it took: an update reads all records of the
ledger, and may use a tenth of a core at most."""


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
    type=click.Path(path_type=Path),
    help="Write every run with its outcome, one row each: .csv or .parquet.",
)
@full_option
@json_option
def status(
    study_dir: Path, brief: bool, follow: bool, runs_file: Path | None, full: bool, as_json: bool
) -> None:
    """Show what STUDY has done, is doing and has found so far; works while a driver runs, and
    changes no record.
    """
    if runs_file is not None:
        from sweeps.store.view import StudyView

        view = StudyView(study_dir)
        view.write(runs_file)
        say(f"wrote {counted(len(view.ledger.runs()), 'run')} to {runs_file}")
    if follow and as_json:
        raise click.UsageError("--follow prints for people: for one JSON answer use --brief --json")
    if follow:
        try:
            _show_live(study_dir)
        except KeyboardInterrupt:
            say("forerun: this view ended; nothing was stopped: a driver of the study continues")
            raise SystemExit(ExitCode.INTERRUPTED) from None
        return
    if brief:
        from launcher.plan.study import PLAN_FILE

        now, _ = _read_state(study_dir)
        resume = f"to resume: forerun run {study_dir / PLAN_FILE} --study {study_dir}"
        answer(
            as_json,
            {"now": now},
            now_text(now, study_dir) + f"\n\n{resume}" * (now["at_work"] is False),
        )
        return
    from launcher.answers.outcome import closing_text, gate_lines, progress_text
    from launcher.answers.texts import details_text, share_text
    from launcher.frozen.frozen_folder import edited
    from launcher.report.about import next_line
    from launcher.report.body import body_and_next
    from launcher.study.study_folder import recorded
    from launcher.views.study_status import now_body
    from sweeps.store.live import read_live

    live = read_live(study_dir)
    study, ledger = recorded(study_dir)
    findings, after = body_and_next(study, ledger)
    for problem in edited(study_dir):
        say(f"forerun: {problem}")
    now = now_body(study_dir, live, ledger, study.plan)
    spend: Any = findings["spend"]
    stood = now_text(now, study_dir, share_text(spend["share_of_target"]))
    parts = [closing_text(findings, after, study_dir), f"runs: {progress_text(findings)}\n{stood}"]
    parts += [details_text(findings), *gate_lines(findings, after, full=True)] if full else []
    parts.append(next_line(findings, after, study_dir, at_work=now["at_work"] is not False))
    answer(as_json, {**findings, "now": now}, "\n\n".join(filter(None, parts)))


def _read_state(study_dir: Path) -> tuple[dict[str, Any], str]:
    """Return `now_body` and `chart_text` of the ledger and the plan as they are now."""
    from launcher.plan.file import load_plan
    from launcher.plan.study import PLAN_FILE
    from launcher.study.progress_text import chart_text
    from launcher.views.study_status import now_body
    from sweeps.store.ledger import Ledger
    from sweeps.store.live import read_live

    live = read_live(study_dir)
    ledger = Ledger.read(study_dir)
    return now_body(study_dir, live, ledger, load_plan(study_dir / PLAN_FILE)), chart_text(
        ledger.runs()
    )


def _format_view(body: dict[str, Any], chart: str, study_dir: Path) -> str:
    text = shown("\n\n".join(filter(None, [now_text(body, study_dir), chart])))
    return wrap(text, terminal_columns(sys.stdout))


def _show_live(study_dir: Path) -> None:
    from rich.live import Live
    from rich.text import Text

    took, (body, chart) = 0.0, _read_state(study_dir)
    with Live(Text(_format_view(body, chart, study_dir)), auto_refresh=False) as live:
        while body["at_work"] is not False:
            time.sleep(max(FOLLOW_SECONDS, IDLE_PER_LOOK * took))
            began = time.monotonic()
            body, chart = _read_state(study_dir)
            took = time.monotonic() - began
            live.update(Text(_format_view(body, chart, study_dir)), refresh=True)


def now_text(body: dict[str, Any], study_dir: Path, share: str = "") -> str:
    """Format the current state for people.

    Args:
        body: `now_body` of the study.
        study_dir: Folder of the study.
        share: Spend as a share of the main run's FLOPs, as text; empty if not known.
    """
    driver = "\n".join(
        filter(None, [_format_driver(body, study_dir), _format_checks(body["coordinates"])])
    )
    return "\n\n".join(filter(None, [driver, _format_widths(body), _format_spend(body, share)]))


def _format_checks(coordinates: dict[str, Any]) -> str:
    """Format the outcome of the coordinate checks; empty before the first."""
    from launcher.study.gates import describe_check

    if coordinates["outcome"] is None:
        return ""
    outcomes = (
        f"{name} {describe_check(name, outcome, coordinates['parametrization'])}"
        for name, outcome in coordinates["checks"].items()
    )
    return f"coordinate check: {coordinates['outcome'].replace('_', ' ')} ({'; '.join(outcomes)})"


def _format_driver(body: dict[str, Any], study_dir: Path) -> str:
    from launcher.study.progress_text import line_of
    from proxies.core import canon
    from sweeps.store.live import StudyState

    live = body["driver"]
    done = (
        ", ".join(f"{count} {status}" for status, count in body["num_runs"].items() if count)
        or "none yet"
    )
    done += f"; {body['num_imported']} imported" if body["num_imported"] else ""
    done += (
        f"; {counted(body['num_lost_executions'], 'execution')} lost"
        if body["num_lost_executions"]
        else ""
    )
    lines = [f"{study_dir}: runs with an outcome: {done}"]
    if live is None or live["at_work"] is False:
        none = (
            "no driver is running"
            if body["at_work"] is False
            else "a driver is running; no run has started yet"
        )
        return "\n".join([*lines, none])
    where = f"pid {live['pid']} on {live['host']}" + (
        "" if live["at_work"] else f", last report {live['at']}"
    )
    state = canon.decode(StudyState, live["study"])
    lines.append(line_of(state, len(live["running"])))
    lines.append(
        f"{live['stage']}: {len(live['running'])} running, {live['num_queued']} queued (driver: "
        f"{where}, in this stage for {format_duration(live['seconds'])})"
    )
    rows = [
        (run["run_id"][:12], str(run["worker"]), f"{run['step']} of {run['num_steps']}")
        for run in live["running"]
    ]
    lines += [table(("running", "worker", "step"), rows)] if rows else []
    return "\n".join(lines)


def _format_widths(body: dict[str, Any]) -> str:
    rows, statuses = [], tuple(body["num_runs"])
    for at in body["by_width"]:
        best = at["best"]
        cells = (
            ("-", "-", "-")
            if best is None
            else (
                format_loss(best["loss_nats"]),
                format_learning_rate(best["learning_rate"]),
                str(best["num_steps"]),
            )
        )
        rows.append((str(at["width"]), *(str(at[status]) for status in statuses), *cells))
    return table(("width", *statuses, "best (nats)", "its lr", "its steps"), rows) if rows else ""


def _format_spend(body: dict[str, Any], share: str) -> str:
    spent, caps = body["spent"], body["caps"]

    def capped(text: str, name: str, write: Callable[[float], str]) -> str:
        cap = caps[name]
        return (
            text if cap is None else f"{text} of {write(cap)} ({format_percent(spent[name] / cap)})"
        )

    flops = capped(f"{format_flops(spent['flops'])} FLOPs", "flops", format_flops)
    hours = capped(
        format_duration(3600 * spent["hours"]), "hours", lambda cap: format_duration(3600 * cap)
    )
    parts = [
        capped(counted(spent["num_runs"], "run"), "num_runs", format_count),
        flops + (f", {share}" if share else ""),
        f"{hours} of time",
        capped(
            f"{format_significant(spent['device_hours'])} device-hours",
            "device_hours",
            format_significant,
        ),
    ]
    parts += (
        [capped(format_usd(spent["usd"]), "usd", format_usd)] if spent["usd"] is not None else []
    )
    if len(spent["by_kind"]) > 1:
        parts += [
            f"of these {usage['kind'] or 'not recorded'} "
            f"{format_significant(usage['device_hours'])} device-hours"
            + ("" if usage["usd"] is None else f", {format_usd(usage['usd'])}")
            for usage in spent["by_kind"]
        ]
    return "spent: " + "; ".join(parts)
