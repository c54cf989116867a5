"""The conclusion of a finished run: its forecast is scored and attested, and the run is recorded.

The validation loss at the end is scored against the interval frozen before the run began. The
study's ledger records the run (`launcher.study.history`), which `forerun fit STUDY` then uses;
`conclusion.json` next to the config attests the score.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from launcher.base import chronicle
from launcher.frozen.frozen import Decision
from launcher.frozen.launch_file import attest, path_of, read_attestation
from launcher.study import history
from launcher.study.history import ConcludedRun
from launcher.watch.logs.readings import LogReading
from proxies.core import canon
from proxies.core.canon import Json
from proxies.core.errors import ExitCode, InputError
from proxies.core.notation import format_interval, format_loss, format_nats, format_percent
from sweeps.store.ledger import Ledger

CONCLUSION = "conclusion"
"""Kind of the attestation."""


class NotConcludedError(InputError):
    """A run's forecast cannot be scored; the message has the reason and what to do."""

    exit_code = ExitCode.CANNOT_TELL


class ConcludedOtherwiseError(InputError):
    """This config was concluded before, with another final loss."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Conclusion:
    """The score of a finished run's forecast."""

    run: ConcludedRun
    study: Path | None
    """Study whose ledger records the run; None if there is none."""

    @property
    def body(self) -> dict[str, Json]:
        """Conclusion as JSON, for the attestation and `--json`."""
        run, actual = self.run, self.run.actual_nats
        return {
            "digest": run.digest,
            "actual_nats": actual,
            "predicted_nats": run.predicted_nats,
            "interval_nats": [run.low_nats, run.high_nats],
            "level": run.level,
            "inside": run.foretold.covered,
            "z": run.foretold.z,
            "error_nats": actual - run.predicted_nats,
            "error_share": actual / run.predicted_nats - 1,
            "extrapolation": run.extrapolation,
            "params": run.params,
            "tokens": run.tokens,
            "in_ledger": self.study is not None,
        }


def concluded_run(decision: Decision, reading: LogReading) -> ConcludedRun:
    """Return the finished run, as its log shows it.

    Args:
        decision: The frozen decision.
        reading: The run's log.

    Raises:
        NotConcludedError: The run has not reached the end of its schedule, or its validation loss
            there was not measured.
        SpecError: The frozen forecast has no interval to score it by.
    """
    predicted = decision.predicted
    run = ConcludedRun(
        digest=decision.digest,
        params=decision.num_params,
        tokens=decision.num_tokens,
        predicted_nats=predicted.loss_nats,
        low_nats=predicted.low_nats,
        high_nats=predicted.high_nats,
        level=predicted.level,
        extrapolation=predicted.extrapolation,
        actual_nats=_require_final_loss(decision, reading),
    )
    run.foretold  # noqa: B018  (raises SpecError if the interval has no width)
    return run


def _require_final_loss(decision: Decision, reading: LogReading) -> float:
    num_steps, columns, ending = (
        decision.learning_rate.schedule.num_steps,
        reading.columns,
        reading.ending,
    )
    at = f"step {columns.step} of {num_steps}"
    if ending is not None and ending.event != "finished":
        reason = f" ({ending.reason})" if ending.reason else ""
        raise NotConcludedError(
            f"the run {ending.event} at {at}{reason}: there is no final loss to score"
        )
    if ending is not None and ending.validation_loss_nats is not None:
        return ending.validation_loss_nats
    if ending is None and reading.names_digest:
        raise NotConcludedError(
            f"the run has not ended: it is at {at}, and its last attempt wrote no end"
        )
    if not len(columns.validation_steps) or columns.validation_steps[-1] < num_steps:
        raise NotConcludedError(
            f"the forecast is for the validation loss at step {num_steps}, and the log, at {at}, "
            "has none: log one at that step, or name its column with --validation-loss-key"
        )
    return float(columns.validation_loss_nats[-1])


def conclude(
    decision: Decision, folder: Path, run_dir: Path, reading: LogReading, study_dir: Path | None
) -> Conclusion:
    """Score a run's forecast, record the run, and attest the score. Repeating it changes nothing.

    Args:
        decision: The frozen decision.
        folder: Folder of the config, which gets the attestation.
        run_dir: Folder of the run, whose event log records the conclusion.
        reading: The run's log.
        study_dir: Study whose ledger records the run; None if there is none.

    Raises:
        NotConcludedError: See `concluded_run`.
        ConcludedOtherwiseError: The run was concluded before, with another loss.
        SweepError, PlanError, DataError: The study's ledger cannot be written.
    """
    run = (
        concluded_run(decision, reading)
        if study_dir is None
        else _record_in_ledger(decision, reading, study_dir)
    )
    conclusion = Conclusion(run=run, study=study_dir)
    path, body = path_of(folder, CONCLUSION), cast(dict[str, Json], canon.to_json(conclusion.body))
    known = read_attestation(path, decision.digest) if path.exists() else None
    if known is not None:
        _check_same(run, known.get("actual_nats"), path)
    if known != body:
        attest(folder, CONCLUSION, decision.digest, body)
    if known is None:
        chronicle.record(
            run_dir,
            "concluded",
            sentence(conclusion),
            step=decision.learning_rate.schedule.num_steps,
            digest=decision.digest,
            data=conclusion.body,
        )
    return conclusion


def _check_same(run: ConcludedRun, known_nats: object, place: Path) -> None:
    if known_nats != run.actual_nats:
        raise ConcludedOtherwiseError(
            f"{place} records {known_nats} nats at the end of this config, and this log ends at "
            f"{run.actual_nats:.6g}: "
            "the recorded value is kept; check that this log is of the same run"
        )


def _record_in_ledger(decision: Decision, reading: LogReading, study_dir: Path) -> ConcludedRun:
    """Record the run in the study's ledger, and return it as recorded."""
    from launcher.study.study_folder import open_ledger, recorded_study

    run = concluded_run(decision, reading)
    known = Ledger.read(study_dir).find(history.CONCLUDED, run.digest)
    if known is not None:
        before = canon.decode(ConcludedRun, known.body)
        _check_same(run, before.actual_nats, study_dir)
        return before
    study = recorded_study(study_dir)
    if study.manifest.data_id != decision.data.data_id:
        raise NotConcludedError(
            f"{study_dir} was made with other data than this config: name the config's study with "
            "--study"
        )
    with open_ledger(study) as writable_ledger:
        writable_ledger.append(history.CONCLUDED, run.digest, run)
    return run


def sentence(conclusion: Conclusion) -> str:
    """Return a line on how the forecast went."""
    run, score = conclusion.run, conclusion.run.foretold
    place = "inside" if score.covered else "outside"
    return (
        f"ended at {format_loss(run.actual_nats)} nats, {place} the {format_percent(run.level)} "
        f"interval {format_interval((run.low_nats, run.high_nats))} around "
        f"{format_loss(run.predicted_nats)}: "
        f"{format_nats(run.actual_nats - run.predicted_nats, is_signed=True)} nats, "
        f"{format_percent(run.actual_nats / run.predicted_nats - 1, is_signed=True)}, z "
        f"{score.z:+.2f}"
    )


def next_lines(conclusion: Conclusion) -> list[str]:
    """Return the commands that use the outcome."""
    if conclusion.study is None:
        return [
            (
                "the config lies in no study, so no ledger keeps the run: name a study with "
                "--study STUDY"
            )
        ]
    study = shlex.quote(str(conclusion.study))
    uses = (
        f"`forerun fit {study}` adds it to the ladder, `forerun report {study}` shows it beside "
        "its forecast"
    )
    return [f"the ledger of {conclusion.study} keeps the run: {uses}"]
