"""alerts.md and drills.md: the kinds of alert of `forerun watch` and the drills of `forerun
rehearse`.
"""

from __future__ import annotations

from launcher.rehearsal.registry import DRILLS, OWN_DRILLS
from reference_pages.command_line import cell

_ALERTS = """# Alerts

Kinds of alert of `forerun watch`. An **alarm** (exit 3) asks for somebody now; a **notice** (exit 0) is worth a look.
Where there are two, the first is the usual one. How they are found, and how often for nothing, is in
[the watch on the main run](../watch.md).

| alert | severity | raised when | next |
|---|---|---|---|
"""  # noqa: E501
_DRILLS = """# Drills

Drills of `forerun rehearse`, in the order in which they are held. What they are held on is in
[the rehearsal](../rehearsal.md).

| drill | what happens | passes if | does not prove |
|---|---|---|---|
"""


def alerts_page() -> str:
    """alerts.md."""
    import launcher.watch.follower  # noqa: F401  (its modules register their kinds)
    from launcher.watch.alerts import KINDS, AlertFinding, Commands

    finding = AlertFinding(first_step=1, seen="", evidence={})
    rows = [
        f"| `{kind.name}` | {', '.join(kind.severities)} | {cell(kind.when)} | "
        f"`{cell(Commands(run_dir='RUN').line(kind.next_command, finding))}` |"
        for kind in sorted(KINDS.values(), key=lambda kind: (kind.severities[0], kind.name))
    ]
    return _ALERTS + "\n".join(rows) + "\n"


def drills_page() -> str:
    """drills.md."""
    rows = [
        f"| `{drill.name}` | {cell(drill.happens)} | {cell(drill.limit)} | "
        f"{cell(drill.not_proven)} |"
        for drill in (DRILLS | OWN_DRILLS).values()
    ]
    return _DRILLS + "\n".join(rows) + "\n"
