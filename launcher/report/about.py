"""What the report's first screen shows beside `report.json`: the study's name, the date, device-hours, what to run."""

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
    """Of a study at one moment; none of it is in `report.json`, which holds no clock and no path."""

    name: str
    date: str
    """Of the writing: UTC, ISO 8601."""
    next_command: str
    """Empty where no command of forerun comes next."""
    device_hours: float
    """Of all drivers, one at work included."""
    usd: float | None
    """None: some price is not known (`cluster.usd_per_device_hour`)."""
    by_kind: tuple[KindSpent, ...] = ()
    """The same by kind of device."""
    lacking: tuple[str, ...]
    """Gates that cannot tell for lack of the same runs: people read one line about them."""


def about(
    study: Study, ledger: Ledger, body: Body, after: Body | None, live: DriverState | None = None, *,
    at_work: bool = False,
) -> About:  # fmt: skip
    """What the first screen shows of a study.

    Args:
        study: as it is recorded.
        ledger: as just read.
        body: `report.json`.
        after: the runs that would decide what cannot tell (`launcher.study.next_runs`), or None.
        live: the driver's last look, read before the ledger was.
        at_work: another process drives this study now.
    """
    cost = spent_now(ledger, live, study.plan.cluster.caps)
    folder = study.study_dir.resolve()
    return About(
        name=f"{folder.parent.name}/{folder.name}" if folder.name == "study" else folder.name,  # the usual name
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        next_command=next_command(body, after, study.study_dir, at_work=at_work),
        device_hours=cost.device_hours,
        usd=cost.usd,
        by_kind=cost.by_kind,
        lacking=tuple(after["gates"]) if after else (),
    )


def next_command(body: Body, after: Body | None, study_dir: Path, *, at_work: bool = False) -> str:
    """The command that comes next; empty where people have to change the plan, or start their own trainer.

    Args:
        body: `report.json`.
        after: as `about` has it.
        study_dir: the study's folder.
        at_work: another process drives this study now, so that no command may change it.
    """
    study = shlex.quote(str(study_dir))
    if at_work:
        return f"forerun status {study} --follow"
    if body["fit"] is None and any(gate["outcome"] == "failed" for gate in open_gates(body)):
        return ""  # `run` would stop there again
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
    named = shlex.quote(shown_name(frozen))
    event = None if body["main_run"] is None else body["main_run"]["event"] or "running"
    if event in ("finished", "running"):  # or killed, which `watch` finds out
        return f"forerun watch {named}{' --conclude' if event == 'finished' else ''}"
    # At most some steps, on purpose.
    tried = event in (None, "stopped")
    return f"forerun {'rehearse' if tried and not rehearsal_of(frozen, body['digest']).rehearsed else 'launch'} {named}"


def next_line(body: Body, after: Body | None, study_dir: Path, *, at_work: bool = False) -> str:
    """What comes next, as the last line that a verb prints; arguments as for `next_command`."""
    if command := next_command(body, after, study_dir, at_work=at_work):
        refused = ", which says what each closed gate needs" if open_gates(body) and " freeze " in command else ""
        return f"next: {command}{refused}"
    if body["fit"] is None:
        names = [gate["name"] for gate in open_gates(body)]
        accept = f"forerun freeze {shlex.quote(str(study_dir))} --accept {' --accept '.join(names)} --reason TEXT"
        return f"next: a new study with what the gate needs; or {accept}, then forerun run"
    if not body["choice"]:
        return (
            "next: a child study (--fork) with more rungs, ladder.widths or ladder.num_steps: no law fits this ladder"
        )
    return f"next: start your main run as shown above{', once its gates are settled' if open_gates(body) else ''}"
