"""What the report's first screen shows beside `report.json`: the study's name, the date, device-hours, what to run."""

from __future__ import annotations

import datetime
import shlex
from dataclasses import dataclass
from pathlib import Path

from launcher.base.study_names import shown_name
from launcher.plan.study import PLAN_FILE, Study
from launcher.study.gates import open_gates
from launcher.study.next_runs import deciding_command
from launcher.views.numbers import Body
from sweeps.run.budget import spent
from sweeps.store.ledger import Ledger


@dataclass(frozen=True, kw_only=True, slots=True)
class About:
    """Of a study at one moment; none of it is in `report.json`, which holds no clock and no path."""

    name: str
    date: str
    """Of the writing: UTC, ISO 8601."""
    next_command: str
    """Empty where no command of forerun comes next."""
    device_hours: float
    """Of the drivers that have ended."""
    usd: float | None
    """None: no price is known (`cluster.usd_per_device_hour`)."""
    lacking: tuple[str, ...]
    """Gates that cannot tell for lack of the same runs: people read one line about them."""


def about(study: Study, ledger: Ledger, body: Body, after: Body | None) -> About:
    """What the first screen shows of a study.

    Args:
        study: as it is recorded.
        ledger: as just read.
        body: `report.json`.
        after: the runs that would decide what cannot tell (`launcher.study.next_runs`), or None.
    """
    cost, folder = spent(ledger, study.plan.cluster.usd_per_device_hour or None), study.study_dir.resolve()
    return About(
        name=f"{folder.parent.name}/{folder.name}" if folder.name == "study" else folder.name,  # the usual name
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        next_command=next_command(body, after, study.study_dir),
        device_hours=cost.device_hours,
        usd=cost.usd,
        lacking=tuple(after["gates"]) if after else (),
    )


def next_command(body: Body, after: Body | None, study_dir: Path) -> str:
    """The command that comes next; empty where people have to change the plan, or start their own trainer."""
    if body["own_run"] is not None:
        return ""
    study = shlex.quote(str(study_dir))
    if body["decision"] is None:
        plan = shlex.quote(str(study_dir / PLAN_FILE))
        return "" if body["fit"] is not None else f"forerun run {plan} --study {study}"
    closed = open_gates(body)
    if after is not None and {gate["name"] for gate in closed} <= set(after["gates"]):
        return deciding_command(after, study_dir)
    frozen = study_dir / "frozen" / str(body["digest"])
    if closed or not (frozen / "launch.json").is_file():
        return f"forerun freeze {study}"
    run, named = body["main_run"], shlex.quote(shown_name(frozen))
    if run is not None and run["event"] == "finished":
        return f"forerun watch {named} --conclude"
    return f"forerun {'rehearse' if run is None else 'launch'} {named}"
