"""The header of the report's page: the study's name, date, device-hours, and next command.

The header is not part of `report.json`, which holds no time and no path. Verbs print the next
command too (`format_next_line`).
"""

from __future__ import annotations

import datetime
import shlex
from dataclasses import dataclass
from pathlib import Path

from forerun._launcher.main_run.frozen.config_names import shorten_config_name
from forerun._launcher.main_run.rehearsal.status import read_rehearsal_status
from forerun._launcher.report.views.report_model import Report
from forerun._launcher.report.views.study_status import summarize_spend
from forerun._launcher.study.plan.study import PLAN_FILE, Study
from forerun._launcher.study.stages.next_runs import NextRuns, format_deciding_command
from forerun._sweeps.run.budget import KindSpend
from forerun._sweeps.store.ledger import Ledger
from forerun._sweeps.store.live_state import DriverState


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportHeader:
    """The header of a study's report at one moment."""

    name: str
    date: str
    """Date of writing: UTC, ISO 8601."""
    next_command: str
    """Next command; empty if no command of forerun comes next."""
    device_hours: float
    """Device-hours of all drivers, including one that still works."""
    usd: float | None
    """Dollars of these device-hours; None if a price is unknown
    (`cluster.usd_per_device_hour`)."""
    by_kind: tuple[KindSpend, ...] = ()
    """Spend by kind of device."""
    lacking: tuple[str, ...]
    """Gates that cannot tell because they lack the same runs; the page has one line on them."""


def build_header(
    study: Study,
    ledger: Ledger,
    report: Report,
    next_runs: NextRuns | None,
    live: DriverState | None = None,
    *,
    at_work: bool = False,
) -> ReportHeader:
    """Build the header of a study's report.

    Args:
        study: The study as recorded.
        ledger: The ledger as just read.
        report: The report.
        next_runs: The runs that would decide the gates that cannot tell
            (`forerun._launcher.study.stages.next_runs`), or None.
        live: The driver's last state, read before the ledger.
        at_work: Whether another process drives this study now.
    """
    cost = summarize_spend(ledger, live, study.plan.cluster.caps)
    folder = study.study_dir.resolve()
    return ReportHeader(
        # Folders named `study`, the usual name, are shown with their parent.
        name=f"{folder.parent.name}/{folder.name}" if folder.name == "study" else folder.name,
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        next_command=choose_next_command(report, next_runs, study.study_dir, at_work=at_work),
        device_hours=cost.device_hours,
        usd=cost.usd,
        by_kind=cost.by_kind,
        lacking=next_runs.gates if next_runs else (),
    )


def choose_next_command(
    report: Report, next_runs: NextRuns | None, study_dir: Path, *, at_work: bool = False
) -> str:
    """Return the command that comes next.

    The command is empty if a person has to change the plan, or start a trainer of their own.

    Args:
        report: The report.
        next_runs: As in `build_header`.
        study_dir: The study's folder.
        at_work: Whether another process drives this study now, so that no command may change it.
    """
    study = shlex.quote(str(study_dir))
    if at_work:
        return f"forerun status {study} --follow"
    if report.fit is None and any(gate.outcome == "failed" for gate in report.open_gates):
        return ""  # `run` would stop at the same gate again.
    if report.fit is None:
        return f"forerun run {shlex.quote(str(study_dir / PLAN_FILE))} --study {study}"
    if not report.choice:
        return ""
    unsettled = report.open_gates
    if next_runs is not None and {gate.name for gate in unsettled} <= set(next_runs.gates):
        return format_deciding_command(next_runs, study_dir)
    if report.user_run is not None and report.digest is None:
        return ""
    frozen = study_dir / "frozen" / str(report.digest)
    if unsettled or not (frozen / "launch.json").is_file():
        return f"forerun freeze {study}"
    folder_name = shlex.quote(shorten_config_name(frozen))
    event = None if report.main_run is None else report.main_run.event or "running"
    if event in ("finished", "running"):  # `watch` finds out if the run was killed.
        return f"forerun watch {folder_name}{' --conclude' if event == 'finished' else ''}"
    # A run that was stopped on purpose has made a few steps at most.
    has_few_steps = event in (None, "stopped")
    needs_rehearsal = (
        has_few_steps and not read_rehearsal_status(frozen, str(report.digest)).rehearsed
    )
    return f"forerun {'rehearse' if needs_rehearsal else 'launch'} {folder_name}"


def format_next_line(
    report: Report, next_runs: NextRuns | None, study_dir: Path, *, at_work: bool = False
) -> str:
    """Return the last line that a verb prints, which names the next command or action.

    The arguments are those of `choose_next_command`.
    """
    if command := choose_next_command(report, next_runs, study_dir, at_work=at_work):
        addition = (
            ", which says what each closed gate needs"
            if report.open_gates and " freeze " in command
            else ""
        )
        return f"next: {command}{addition}"
    if report.fit is None:
        names = [gate.name for gate in report.open_gates]
        accept = (
            f"forerun freeze {shlex.quote(str(study_dir))} --accept "
            f"{' --accept '.join(names)} --reason TEXT"
        )
        return f"next: a new study with what the gate needs; or {accept}, then forerun run"
    if not report.choice:
        return (
            "next: a child study (--fork) with more rungs, ladder.widths or ladder.num_steps: "
            "no law fits this ladder"
        )
    return (
        "next: start your main run as shown "
        f"above{', once its gates are settled' if report.open_gates else ''}"
    )
