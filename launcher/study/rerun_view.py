"""Replays as plain data for report and verbs, in sentences, and as a gate of freezing. No torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from launcher.frozen.attestations import CheckOutcome
from launcher.plan.study import Study
from launcher.study.gates import Gate
from proxies.core.canon import Json
from sweeps.store.quarantine import suspects

if TYPE_CHECKING:
    from sweeps.store.ledger import Ledger

DRAWN, REPLAYED = "drawn", "replayed"
"""Kinds of records: a trial that is to be run again; what came of it."""
GATE = "replays_agree"

_APART = {
    "host": "on another host",
    "process": "in another process of the same host: a fault of the machine itself would not be seen",
    "nothing": "in the same process: only what does not repeat itself would be seen",
    "unknown": "elsewhere, as far as is known",
}


def replays_body(ledger: Ledger) -> dict[str, Json] | None:
    """Of every trial drawn what came of it, and the hosts found; None where nothing was asked for."""
    latest: dict[str, Json] = {record.key: None for record in ledger.records(DRAWN)}
    for record in ledger.records(REPLAYED):  # a later one, after a third execution, counts
        latest[str(cast(dict[str, Json], record.body)["run_id"])] = record.body
    quarantined = suspects(ledger)
    if not latest and not quarantined:
        return None
    return {
        "replays": [latest[run_id] or {"run_id": run_id, "outcome": None} for run_id in latest],
        "quarantined": [
            {"host": host, "suspect_runs": [spec.id for spec in specs]} for host, specs in quarantined.items()
        ],
    }


def told(run_id: str, why: str, verdict: Any) -> str:
    """What came of one replay, as a sentence."""
    which = f"{'the winning trial' if why == 'winner' else 'a trial drawn by lot'}, run {run_id[:12]}"
    if verdict["outcome"] == "cannot_tell":
        return f"{which}: cannot tell: {verdict['reason']}"
    hosts = verdict["hosts"]
    where = f"{hosts[0] or 'an unnamed host'} and {hosts[1]}"
    if verdict["outcome"] == "agrees":
        return f"{which}: agrees, run again {_APART[verdict['apart']]} ({where}): {verdict['reason']}"
    end = "" if verdict["end_nats"] is None else f", {verdict['end_nats']:.3g} in the end"
    step = f" from step {verdict['at_step']} on" if verdict["at_step"] is not None else ""
    bits = verdict["allowed_from"] == "bitwise"
    limit = "the same bits are promised there" if bits else f"rounding allows {verdict['allowed_nats']:.3g}"
    return (
        f"{which}: DIFFERS between {where}{step}, by up to {verdict['largest_nats']:.3g} nats on the way{end}; "
        f"{limit}; {verdict['reason']}"
    )


def sentences(body: Any) -> list[str]:
    """The same of all, with what is suspect."""
    if body is None:
        return []
    lines = [
        f"replay of run {each['run_id'][:12]}: not made yet: `forerun sweep PLAN` does"
        if each["outcome"] is None
        else f"replay of {told(each['run_id'], each['why'], each)}"
        for each in body["replays"]
    ]
    for one in body["quarantined"]:
        ids = [run_id[:12] for run_id in one["suspect_runs"]]
        shown = ", ".join(ids[:8]) + (f" and {len(ids) - 8} more" if len(ids) > 8 else "")
        suspect = (
            f"suspect are its {len(ids)} runs {shown}: `forerun run PLAN --study ANOTHER --fork STUDY` runs them again "
            "elsewhere and keeps the others"
        )
        lines.append(f"{one['host']} is in quarantine; " + (suspect if ids else "no run of this study ended there"))
    return lines


def replay_gates(study: Study, ledger: Ledger) -> tuple[Gate, ...]:
    """The gate of the replays: none where none is asked for and no host was found."""
    body: Any = replays_body(ledger)
    if not study.num_replays and body is None:
        return ()
    made = [each for each in body["replays"] if each["outcome"] is not None] if body else []
    outcomes = {each["outcome"] for each in made}
    said = sentences(body)
    found: CheckOutcome = "passed"
    if (study.num_replays and not made) or "cannot_tell" in outcomes or len(made) < len(body["replays"]):
        found = "cannot_tell"
        said = said or ["no trial was run again yet: `forerun sweep PLAN` does"]
    unknown = any(each["outcome"] == "differs" and not each["odd_host"] for each in made)
    if unknown or any(one["suspect_runs"] for one in (body["quarantined"] if body else [])):
        found = "failed"
    return (Gate(name=GATE, outcome=found, reason="; ".join(said)),)
