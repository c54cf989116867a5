"""A main run as a dashboard receives it: its metrics as rows, with the predicted band.

The metrics may be complete, or still grow. A resumed run repeats the steps after its checkpoint bit
for bit, and its metrics are rewound, so the repeated steps are not sent again. A run that was
rolled back takes different steps under the same step numbers. The new steps are sent with a higher
`take`, after a row that says that the earlier steps no longer count.
"""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from forerun._launcher.main_run import metrics_file
from forerun._launcher.main_run.metrics_file import MetricsFollower
from forerun._launcher.report.dashboards.run_record import ID_DIGITS, Row, RunRecord, select_numbers
from forerun._proxies.core import canon
from forerun._proxies.core.canon import Json
from forerun._proxies.core.plain_files import open_plain

if TYPE_CHECKING:
    from forerun._launcher.main_run.frozen.frozen import CurvePoint, Decision

_SHARED_COLUMNS = ("train_loss_nats", "grad_norm", "validation_loss_nats")
"""Columns that proxies have too. They are also logged under `main_run/`, because a W&B chart draws
a name for every run that has it."""


def build_main_run_record(
    decision: Decision,
    run_dir: Path,
    study: str = "",
    is_over: Callable[[], bool] = lambda: True,
    failures: Sequence[str] = (),
) -> RunRecord:
    """Build the record of a frozen config's main run.

    Args:
        decision: The frozen decision.
        run_dir: Folder with the run's metrics, which may not exist yet.
        study: Id of the study. It is empty while the run's own launch logs the run, so that the
            record has no end and no content id of the rows yet.
        is_over: Function that is called when all rows so far were produced. It returns whether the
            run has ended, so that no rows come later. It may wait before it returns.
        failures: Names of gates that failed and were accepted, shown in the run's name.
    """
    run_id = decision.digest[:ID_DIGITS]
    name, summary = f"run {run_id[:8]}", dict[str, Json]()
    if failures:
        name += f", accepted failure: {', '.join(failures)}"
        summary["accepted_failures"] = [*failures]
    path, sha256 = run_dir / metrics_file.METRICS_FILE, ""
    if study and path.is_file():
        if (ending := metrics_file.read_ending(run_dir)) is not None:
            summary |= {"ended": ending.event, "num_steps_done": ending.step}
            if (loss := ending.validation_loss_nats) is not None:
                summary["validation_loss_nats"] = loss
        with open_plain(path) as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]  # buffered
    return RunRecord(
        run_id=run_id,
        name=name,
        config=_build_config(decision) | ({"study": study} if study else {}),
        summary=summary,
        group="main run",
        job_type="main run",
        rows=lambda: _generate_rows(decision, run_dir, is_over),
        rows_id=sha256,
    )


def _build_config(decision: Decision) -> dict[str, Json]:
    """Return numbers and fixed choices of the decision, without text that a person wrote."""
    predicted = decision.predicted
    return {
        "digest": decision.digest,
        "shape": canon.to_json(decision.shape),
        "batch_tokens": decision.batch_tokens,
        "num_tokens": decision.num_tokens,
        "num_steps": decision.learning_rate.schedule.num_steps,
        "num_ranks": decision.parallelism.num_ranks,
        "precision": decision.precision,
        "seed": decision.seed,
        **decision.run_wide,
        "predicted_loss_nats": predicted.loss_nats,
        "predicted_low_nats": predicted.low_nats,
        "predicted_high_nats": predicted.high_nats,
    }


def _generate_rows(decision: Decision, run_dir: Path, is_over: Callable[[], bool]) -> Iterator[Row]:
    """Yield every row of the metrics, with the predicted band next to the loss."""
    log, run_is_over = MetricsLog(run_dir), False
    while True:
        for row in log.read():
            row_to_log = {
                **row,
                **{f"main_run/{name}": row[name] for name in _SHARED_COLUMNS if name in row},
            }
            if "train_loss_nats" in row:
                row_to_log |= interpolate_band(decision.predicted.curve, int(row["step"]))
            yield row_to_log
        if run_is_over and log.at_end:
            return
        # After the run is over, the metrics are read to their end: rows may have come since the
        # last read.
        run_is_over = run_is_over or is_over()


class MetricsLog:
    """The rows of a run's growing metrics, each step once."""

    def __init__(self, run_dir: Path) -> None:
        """Start before the first line of the metrics in `run_dir`."""
        self._follower = MetricsFollower(run_dir)
        self._newest_step, self._take = 0, 1
        self._rollbacks: set[str] = set()

    @property
    def at_end(self) -> bool:
        """Whether everything in the file so far has been read."""
        return self._follower.at_end

    def read(self) -> list[dict[str, float]]:
        """Read the next rows: numbers under flat names, with `step` and `take`.

        Raises:
            OSError: The metrics cannot be read.
        """
        return [row for line in self._follower.read()[0] if (row := self._convert_line(line))]

    def _convert_line(self, line: dict[str, Json]) -> dict[str, float]:
        """Convert a line to a row; empty if the row was sent before or has no numbers."""
        step, event = line.get("step"), line.get("event")
        if not isinstance(step, int) or isinstance(step, bool) or not isinstance(event, str | None):
            return {}
        if event is None:
            if step <= self._newest_step:
                return {}
            self._newest_step = step
            return {**select_numbers(line), "take": self._take}
        return self._convert_rollback(line) if event == "rolled_back" else {}

    def _convert_rollback(self, line: dict[str, Json]) -> dict[str, float]:
        """Start a new take at the step that a rollback went to; return an empty row if repeated."""
        # A resumed run may repeat the rollback at another step.
        rollback = canon.to_canonical_json({key: line[key] for key in line if key != "step"})
        to_step = line.get("to_step")
        if rollback in self._rollbacks or not isinstance(to_step, int):
            return {}
        self._rollbacks.add(rollback)
        self._take += 1
        self._newest_step = min(self._newest_step, to_step)
        columns = {
            f"rolled_back/{name}": value
            for name, value in select_numbers(line).items()
            if name != "step"
        }
        return {"step": self._newest_step, "take": self._take, **columns}


def interpolate_band(curve: Sequence[CurvePoint], step: int) -> dict[str, float]:
    """Return the expected loss at a step and the ends of its band; empty outside of the curve.

    Values are interpolated linearly over log(step).
    """
    index = bisect_left([point.step for point in curve], step)
    if index == len(curve) or (index == 0 and curve[0].step != step):
        return {}
    after, before = curve[index], curve[max(0, index - 1)]
    fraction = (
        math.log(step / before.step) / math.log(after.step / before.step)
        if after.step != before.step
        else 0.0
    )
    band = {}
    for name in ("loss_nats", "low_nats", "high_nats"):
        start, end = getattr(before, name), getattr(after, name)
        band[f"expected_{name}"] = start + fraction * (end - start)
    return band
