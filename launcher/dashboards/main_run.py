"""A main run as a dashboard gets it: its metrics as rows, as they are or while they grow, with its
band.

A run that is resumed takes the steps after its checkpoint again, bit for bit, and its metrics are
rewound: those steps are not sent again. A run that was rolled back takes other steps under the same
numbers: those are, as a further `take`, and a row before them says that the earlier ones no longer
count.
"""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.base import metrics
from launcher.base.metrics import Following
from launcher.dashboards.records import ID_DIGITS, Row, RunRecord, numbers
from proxies.core import canon
from proxies.core.canon import Json
from proxies.core.plain_files import open_plain

if TYPE_CHECKING:
    from launcher.frozen.frozen import CurvePoint, Decision

_OF_PROXIES_TOO = ("train_loss_nats", "grad_norm", "validation_loss_nats")
"""Columns of a main run that are logged under `main_run/` too: a chart of W&B's takes a name from
every run."""


def main_run(
    decision: Decision,
    run_dir: Path,
    study: str = "",
    is_over: Callable[[], bool] = lambda: True,
    failures: Sequence[str] = (),
) -> RunRecord:
    """The main run of a frozen config.

    Args:
        decision: that was frozen.
        run_dir: where its metrics are, or will be.
        study: the study's id, where it is known.
        is_over: asked after all that was there has been told: whether to stop there, or to look
            again. It may wait.
        failures: names of gates that failed and were accepted; the run's name says so.
    """
    run_id = decision.digest[:ID_DIGITS]
    name = f"run {run_id[:8]}"
    name += f", accepted failure: {', '.join(failures)}" if failures else ""
    summary: dict[str, Json] = {"accepted_failures": [*failures]} if failures else {}
    path, sha256 = run_dir / metrics.METRICS_FILE, ""
    if study and path.is_file():
        summary |= _ended(run_dir)
        with open_plain(path) as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]  # it is buffered
    return RunRecord(
        run_id=run_id,
        name=name,
        config=_settings(decision) | ({"study": study} if study else {}),
        summary=summary,
        group="main run",
        job_type="main run",
        rows=lambda: _rows(decision, run_dir, is_over),
        rows_id=sha256,
    )


def _ended(run_dir: Path) -> dict[str, Json]:
    ending = metrics.read_ending(run_dir)
    if ending is None:
        return {}
    found: dict[str, Json] = {"ended": ending.event, "num_steps_done": ending.step}
    loss = ending.validation_loss_nats
    return found if loss is None else {**found, "validation_loss_nats": loss}


def _settings(decision: Decision) -> dict[str, Json]:
    """Numbers and choices from fixed lists alone: no path, no name that a person gave."""
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


def _rows(decision: Decision, run_dir: Path, is_over: Callable[[], bool]) -> Iterator[Row]:
    """Every number of the metrics, and the predicted band next to the loss."""
    log, over = MetricsLog(run_dir), False
    while True:
        for row in log.read():
            told = {
                **row,
                **{f"main_run/{name}": row[name] for name in _OF_PROXIES_TOO if name in row},
            }
            if "train_loss_nats" in row:
                told |= band_at(decision.predicted.curve, int(row["step"]))
            yield told
        if over and log.at_end:
            return
        over = over or is_over()


class MetricsLog:
    """The rows of a run, as its metrics grow: every step once."""

    def __init__(self, run_dir: Path) -> None:
        self._following = Following(run_dir)
        self._told_to, self._take = 0, 1
        self._rollbacks: set[str] = set()

    @property
    def at_end(self) -> bool:
        """Whether all that was there has been read."""
        return self._following.at_end

    def read(self) -> list[dict[str, float]]:
        """The next rows: numbers under flat names, `step` and `take`.

        Raises:
            OSError: the metrics cannot be read.
        """
        return [row for line in self._following.read()[0] if (row := self._row(line))]

    def _row(self, line: dict[str, Json]) -> dict[str, float]:
        """Empty: it was sent before, or says nothing."""
        step, event = line.get("step"), line.get("event")
        if not isinstance(step, int) or isinstance(step, bool) or not isinstance(event, str | None):
            return {}
        if event is None:
            if step <= self._told_to:
                return {}
            self._told_to = step
            return {**numbers(line), "take": self._take}
        return self._rolled_back(line) if event == "rolled_back" else {}

    def _rolled_back(self, line: dict[str, Json]) -> dict[str, float]:
        # said again at another one
        told = canon.canonical({key: line[key] for key in line if key != "step"})
        to_step = line.get("to_step")
        if told in self._rollbacks or not isinstance(to_step, int):
            return {}
        self._rollbacks.add(told)
        self._take += 1
        self._told_to = min(self._told_to, to_step)
        columns = {
            f"rolled_back/{name}": value for name, value in numbers(line).items() if name != "step"
        }
        return {"step": self._told_to, "take": self._take, **columns}


def band_at(curve: Sequence[CurvePoint], step: int) -> dict[str, float]:
    """Expected loss at a step and the ends of its band, on straight lines over log(step); none
    outside of the curve.
    """
    at = bisect_left([point.step for point in curve], step)
    if at == len(curve) or (at == 0 and curve[0].step != step):
        return {}
    after, before = curve[at], curve[max(0, at - 1)]
    share = (
        math.log(step / before.step) / math.log(after.step / before.step)
        if after.step != before.step
        else 0.0
    )
    names = {
        "expected_loss_nats": "loss_nats",
        "expected_low_nats": "low_nats",
        "expected_high_nats": "high_nats",
    }
    ends = {
        told: (float(getattr(before, name)), float(getattr(after, name)))
        for told, name in names.items()
    }
    return {told: low + share * (high - low) for told, (low, high) in ends.items()}
