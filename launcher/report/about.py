"""The header of the report's page: the study's name, date, device-hours, and next command.

None of it is in `report.json`.
"""

from __future__ import annotations

import datetime
import shlex
from dataclasses import dataclass
from pathlib import Path

from launcher.base.study_names import shown_name
from launcher.plan.study import PLAN_FILE, Study
from launcher.rehearsal.status import rehearsal_of
from launcher.study.gates import open_gates
from launcher.study.next_runs import deciding_command
from launcher.views.numbers import Body
from launcher.views.study_status import spent_now
from sweeps.run.budget import KindSpent
from sweeps.store.ledger import Ledger
from sweeps.store.live import DriverState


@dataclass(frozen=True, kw_only=True, slots=True)
class About:
    """The header of a study's report at one moment.

    It is kept out of `report.json`, which holds no time and no path.
    """

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
    by_kind: tuple[KindSpent, ...] = ()
    """Spend by kind of device."""
    lacking: tuple[str, ...]
    """Gates that cannot tell because they lack the same runs; people read one line about them."""


def about(
    study: Study,
    ledger: Ledger,
    body: Body,
    after: Body | None,
    live: DriverState | None = None,
    *,
    at_work: bool = False,
) -> About:
    """Build the header of a study's report.

    Args:
        study: The study as recorded.
        ledger: The ledger as just read.
        body: `report.json`.
        after: The runs that would decide the gates that cannot tell
            (`launcher.study.next_runs`), or None.
        live: The driver's last state, read before the ledger.
        at_work: Whether another process drives this study now.
    """
    cost = spent_now(ledger, live, study.plan.cluster.caps)
    folder = study.study_dir.resolve()
    return About(
        # Folders named `study`, the usual name, are shown with their parent.
        name=f"{folder.parent.name}/{folder.name}" if folder.name == "study" else folder.name,
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        next_command=next_command(body, after, study.study_dir, at_work=at_work),
        device_hours=cost.device_hours,
        usd=cost.usd,
        by_kind=cost.by_kind,
        lacking=tuple(after["gates"]) if after else (),
    )


def next_command(body: Body, after: Body | None, study_dir: Path, *, at_work: bool = False) -> str:
    """Return the command that comes next.

    It is empty if people have to change the plan, or start their own trainer.

    Args:
        body: `report.json`.
        after: As in `about`.
        study_dir: The study's folder.
        at_work: Whether another process drives this study now, so that no command may change it.
    """
    study = shlex.quote(str(study_dir))
    if at_work:
        return f"forerun status {study} --follow"
    if body["fit"] is None and any(gate["outcome"] == "failed" for gate in open_gates(body)):
        return ""  # `run` would stop at the same gate again.
    if body["fit"] is None:
        return f"forerun run {shlex.quote(str(study_dir / PLAN_FILE))} --study {study}"
    if not body["choice"]:
        return ""
    closed = open_gates(body)
    if after is not None and {gate["name"] for gate in closed} <= set(after["gates"]):
        return deciding_command(after, study_dir)
    if body["own_run"] is not None and body["digest"] is None:
        return ""
    frozen = study_dir / "frozen" / str(body["digest"])
    if closed or not (frozen / "launch.json").is_file():
        return f"forerun freeze {study}"
    folder_name = shlex.quote(shown_name(frozen))
    event = None if body["main_run"] is None else body["main_run"]["event"] or "running"
    if event in ("finished", "running"):  # `watch` finds out if the run was killed.
        return f"forerun watch {folder_name}{' --conclude' if event == 'finished' else ''}"
    # A run that was stopped on purpose has made a few steps at most.
    has_few_steps = event in (None, "stopped")
    needs_rehearsal = has_few_steps and not rehearsal_of(frozen, body["digest"]).rehearsed
    return f"forerun {'rehearse' if needs_rehearsal else 'launch'} {folder_name}"


def next_line(body: Body, after: Body | None, study_dir: Path, *, at_work: bool = False) -> str:
    """Return the last line that a verb prints: what comes next; arguments as for `next_command`."""
    if command := next_command(body, after, study_dir, at_work=at_work):
        addition = (
            ", which says what each closed gate needs"
            if open_gates(body) and " freeze " in command
            else ""
        )
        return f"next: {command}{addition}"
    if body["fit"] is None:
        names = [gate["name"] for gate in open_gates(body)]
        accept = (
            f"forerun freeze {shlex.quote(str(study_dir))} --accept "
            f"{' --accept '.join(names)} --reason TEXT"
        )
        return f"next: a new study with what the gate needs; or {accept}, then forerun run"
    if not body["choice"]:
        return (
            "next: a child study (--fork) with more rungs, ladder.widths or ladder.num_steps: "
            "no law fits this ladder"
        )
    return (
        "next: start your main run as shown "
        f"above{', once its gates are settled' if open_gates(body) else ''}"
    )
