"""The main run in `report.json`: its log beside the expected curve."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from launcher.plan.study import Study
from proxies.core.canon import Json

if TYPE_CHECKING:
    from launcher.frozen.frozen import CurvePoint, Decision


def main_run(study: Study, decision: Decision) -> Json:
    """What the embedded trainer logged so far, if it was launched into its usual place."""
    from launcher.base import metrics

    folder = study.study_dir / "frozen" / decision.digest / "run"
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
