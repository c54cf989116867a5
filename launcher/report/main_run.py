"""The main run in `report.json`: its log, which the page draws over the expected curve."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from launcher.plan.study import Study
from proxies.core.canon import Json

if TYPE_CHECKING:
    from launcher.frozen.frozen import Decision


def main_run(study: Study, decision: Decision) -> Json:
    """What the embedded trainer logged so far, if it was launched into its usual place."""
    from launcher.base import metrics

    folder = study.study_dir / "frozen" / decision.digest / "run"
    lines = [line for line in metrics.read(folder) if "train_loss_nats" in line] if folder.is_dir() else []
    if not lines:
        return None
    ending = metrics.read_ending(folder)
    steps, losses = ([cast(Any, line[key]) for line in lines] for key in ("step", "train_loss_nats"))
    return {
        "steps": steps,
        "train_loss_nats": losses,
        "validation_loss_nats": None if ending is None else ending.validation_loss_nats,
        "event": None if ending is None else ending.event,
    }
