"""What the watch says of a main run, in the report's data and on its page: alerts, pace, rollbacks, conclusion."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.views import html as show
from proxies.core import canon
from proxies.core.canon import Json

if TYPE_CHECKING:
    from launcher.frozen.frozen import Decision

_COUNTED = ("launched", "restarted", "corrupt", "rolled_back", "quarantined", "alert")
"""Kinds of entries of the run's chronicle that the report counts."""
NUM_ALERTS = 12
NUM_SPIKES = 100


def watched(decision: Decision, folder: Path) -> dict[str, Json]:
    """The run in `folder`/run as the watch judges its log, whatever time it is now.

    Args:
        decision: what was frozen.
        folder: of the frozen config.
    """
    from launcher.base import chronicle
    from launcher.watch.judge import judge
    from launcher.watch.liveness import chronicled
    from launcher.watch.logs.keys import Keys
    from launcher.watch.logs.readings import OtherRunError, Readings
    from launcher.watch.logs.sources import source_of
    from launcher.watch.spikes import spikes

    keys, num_steps = Keys({}), decision.learning_rate.schedule.num_steps
    run_dir = folder / "run"
    try:
        source, num_ranks = source_of(str(run_dir), keys), decision.parallelism.num_ranks
        reading = Readings(source, keys, decision.digest, num_steps, num_ranks).read(last=True)
    except OtherRunError as error:
        return {"problem": str(error)}
    backs: list[Json] = [
        {"step": event.get("step"), "to_step": event.get("to_step")}
        for event in reading.columns.events
        if event.get("event") == "rolled_back"
    ]
    columns, entries = reading.columns, chronicle.entries(run_dir)
    found = judge(decision, columns, liveness=chronicled(entries, decision.digest))
    return {
        "standing": found.standing,
        "why": found.why,
        "alerts": [_alert(alert) for alert in found.alerts],
        "spikes": canon.to_json(spikes(columns.steps, columns.train_loss_nats, decision.spikes)[-NUM_SPIKES:]),
        "rollbacks": backs,
        "num_rollbacks": len(backs),
        "figures": found.figures,
        "events": {kind: sum(entry.kind == kind for entry in entries) for kind in _COUNTED},
        "notes": [*reading.notes],
        "conclusion": _conclusion(folder, decision.digest),
    }


def _alert(alert: Any) -> dict[str, Json]:
    """Without the command: it names a path, and the page is for whoever has the report alone."""
    found = canon.to_json(alert)
    assert isinstance(found, dict)
    return {key: value for key, value in found.items() if key != "next_command"}


def _conclusion(folder: Path, digest: str) -> Json:
    from launcher.frozen.attestations import path_of, read_attestation
    from launcher.watch.conclude import CONCLUSION

    path = path_of(folder, CONCLUSION)
    return read_attestation(path, digest) if path.exists() else None


def watched_parts(run: Any) -> list[str]:
    """The page's part on it; nothing for a body without one."""
    found = run.get("watched")
    if found is None:
        return []
    if "problem" in found:
        return [f'<p class="missing">{show.text(found["problem"])}</p>']
    parts = [f"<p>The watch: <b>{show.words(found['standing'])}</b>; {show.text(found['why'])}.</p>"]
    if found["alerts"]:
        rows = [
            (show.words(alert["name"]), show.words(alert["severity"]), show.count(alert["first_step"]),
             show.text(alert["seen"]))
            for alert in found["alerts"][:NUM_ALERTS]
        ]  # fmt: skip
        parts.append(show.table(("alert", "kind", "from step", "seen"), rows, left=(0, 1, 3)))
    else:
        parts.append("<p>No alert stands.</p>")
    parts.append(show.facts(_facts(found)))
    parts += _concluded(found["conclusion"])
    if found["notes"]:
        parts.append(f"<h3>Its log</h3>{show.bullets([show.text(note) for note in found['notes']])}")
    return parts


def _facts(found: Any) -> list[tuple[str, str]]:
    """What is known of pace and care."""
    figures, events = found["figures"], found["events"]
    facts = [("Throughput", f"{show.count(figures['tokens_per_second'])} tokens a second")]
    shares = (("MFU", "mfu"), ("HFU", "hfu"), ("Goodput", "goodput"))
    facts += [(name, show.percent(figures[key])) for name, key in shares if figures[key] is not None]
    counts = (("Launches", "num_launches"), ("Attempts", "num_attempts"))
    facts += [(name, show.count(figures[key])) for name, key in counts if figures[key]]
    return [
        *facts, ("Restarts by the supervisor", show.count(events["restarted"])),
        ("Spikes", show.count(figures["num_spikes"])), ("Rollbacks", show.count(found["num_rollbacks"])),
    ]  # fmt: skip


def _concluded(conclusion: Any) -> list[str]:
    """How the forecast went, once somebody concluded the run."""
    if conclusion is None:
        return []
    where = "inside" if conclusion["inside"] else "outside"
    coverage = conclusion["coverage"]
    came = f"{show.loss(conclusion['actual_nats'])} nats, {where} the interval"
    expected = f"{show.interval(conclusion['interval_nats'])} around {show.loss(conclusion['predicted_nats'])}"
    off = f"{show.number(conclusion['error_nats'], '+.4f')} nats, {show.number(conclusion['z'], '+.2f')} standard"
    counted = f"{show.count(coverage['num_inside'])} of {show.count(coverage['num_concluded'])} main runs of this study"
    scale = f"{show.number(conclusion['next_interval_scale'], '.3g')} times as wide as a fit's own"
    said = f"It ended at {came} {expected}: off by {off} deviations of the forecast. "
    said += f"So far {counted} and its parents ended inside theirs; later intervals are {scale}."
    return [f"<h3>Concluded</h3><p>{said}</p>"]
