"""Texts of docs/reference/alerts.md and docs/reference/drills.md.

alerts.md lists the alerts of `forerun watch`, which reads the log of a main run. drills.md lists
the drills of `forerun rehearse`. A drill injects a fault into a short training run, or tests one of
its properties.
"""

from __future__ import annotations

from forerun._launcher.main_run.rehearsal.registry import DRILLS, USER_DRILLS
from reference_pages.markdown import format_cell

_ALERTS = """# Alerts

Kinds of alert of `forerun watch`. An **alarm** (exit 3) asks for somebody now; a **notice** (exit 0) is worth a look.
Of two severities, the first is the usual one. [The watch on the main run](../watch.md) says how alerts are
found and how many are false.

| alert | severity | raised when | next |
|---|---|---|---|
"""  # noqa: E501
_DRILLS = """# Drills

Drills of `forerun rehearse`, in order. [The rehearsal](../rehearsal.md) says on what they are run.

| drill | what happens | passes if | does not prove |
|---|---|---|---|
"""


def format_alerts_page() -> str:
    """Return the text of alerts.md."""
    from forerun._launcher.main_run.watch import follower  # noqa: F401  (its modules register the alerts)
    from forerun._launcher.main_run.watch.alerts import KINDS, AlertFinding, Commands

    finding = AlertFinding(first_step=1, seen="", evidence={})
    rows = [
        f"| `{kind.name}` | {', '.join(kind.severities)} | {format_cell(kind.when)} | "
        f"`{format_cell(Commands(run_dir='RUN').format_command(kind.next_command, finding))}` |"
        for kind in sorted(KINDS.values(), key=lambda kind: (kind.severities[0], kind.name))
    ]
    return _ALERTS + "\n".join(rows) + "\n"


def format_drills_page() -> str:
    """Return the text of drills.md."""
    rows = [
        f"| `{drill.name}` | {format_cell(drill.happens)} | {format_cell(drill.limit)} | "
        f"{format_cell(drill.not_proven)} |"
        for drill in (DRILLS | USER_DRILLS).values()
    ]
    return _DRILLS + "\n".join(rows) + "\n"
