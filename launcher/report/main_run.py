"""The main run in `report.json`: its log beside the expected curve, and what the watch says of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from launcher.plan.study import Study
from proxies.core import canon
from proxies.core.canon import Json

if TYPE_CHECKING:
    from launcher.frozen.frozen import CurvePoint, Decision

_COUNTED = ("launched", "restarted", "corrupt", "rolled_back", "quarantined", "alert")
"""Kinds of entries of the run's chronicle that the report counts."""
NUM_SPIKES = 100


def main_run(study: Study, decision: Decision) -> Json:
    """What the embedded trainer logged so far, if it was launched into its usual place."""
    from launcher.base import metrics

    frozen = study.study_dir / "frozen" / decision.digest
    folder = frozen / "run"
    lines = [line for line in metrics.read(folder) if "train_loss_nats" in line] if folder.is_dir() else []
    if not lines:
        return None
    ending = metrics.read_ending(folder)
    steps, losses = ([cast(Any, line[key]) for line in lines] for key in ("step", "train_loss_nats"))
    num_steps = decision.learning_rate.schedule.num_steps
    return {
        "steps": steps,
        "train_loss_nats": losses,
        "beside_curve": beside_curve(steps, losses, decision.predicted.curve, num_steps),
        "validation_loss_nats": None if ending is None else ending.validation_loss_nats,
        "event": None if ending is None else ending.event,
        "watched": watched(decision, frozen),
    }


def beside_curve(
    steps: Sequence[int], losses_nats: Sequence[float], curve: Sequence[CurvePoint], num_steps: int
) -> dict[str, Json]:
    """Training loss near each point of the expected curve that the run has wholly passed, and how many lie inside.

    Args:
        steps: logged, ascending.
        losses_nats: of these steps.
        curve: expected; each point is of the mean over the steps within `WINDOW` of it.
        num_steps: of the whole run.
    """
    from scaling_fits.forecast.loss_curves import WINDOW

    passed: list[Json] = []
    num_inside = 0
    for point in curve:
        reach = int(point.step * WINDOW + 1e-9)
        first, last = point.step - reach, min(point.step + reach, num_steps)
        near = [loss for step, loss in zip(steps, losses_nats, strict=True) if first <= step <= last]
        if not near or steps[-1] < last:
            continue
        seen = sum(near) / len(near)
        where = "below" if seen < point.low_nats else "above" if seen > point.high_nats else "inside"
        num_inside += where == "inside"
        passed.append({"step": point.step, "seen_nats": seen, "loss_nats": point.loss_nats, "where": where,
                       "low_nats": point.low_nats, "high_nats": point.high_nats})  # fmt: skip
    return {"passed": passed, "num_passed": len(passed), "num_inside": num_inside, "num_points": len(curve)}


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
