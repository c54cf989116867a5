"""After the run: its forecast scored, attested, and the run kept for `forerun fit STUDY`.

What is scored is the validation loss at the end, against the interval frozen before the run began. The ledger of the
study keeps the run (`launcher.study.history`); `conclusion.json` beside the config says how it went.
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
    """A run whose forecast cannot be scored; says why, and what to do."""

    exit_code = ExitCode.CANNOT_TELL


class ConcludedOtherwiseError(InputError):
    """This config was concluded before, with another outcome."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Conclusion:
    """How a forecast went."""

    run: ConcludedRun
    study: Path | None
    """Whose ledger keeps it; None where there is none."""

    @property
    def body(self) -> dict[str, Json]:
        """For the attestation and `--json`."""
        run, actual = self.run, self.run.actual_nats
        return {
            "digest": run.digest, "actual_nats": actual, "predicted_nats": run.predicted_nats,
            "interval_nats": [run.low_nats, run.high_nats], "level": run.level, "inside": run.foretold.covered,
            "z": run.foretold.z, "error_nats": actual - run.predicted_nats,
            "error_share": actual / run.predicted_nats - 1, "extrapolation": run.extrapolation,
            "params": run.params, "tokens": run.tokens,
            "in_ledger": self.study is not None,
        }  # fmt: skip


def concluded_run(decision: Decision, reading: LogReading) -> ConcludedRun:
    """The run as its log shows it.

    Raises:
        NotConcludedError: it has not come to the schedule's end, or nobody measured its validation loss there.
        SpecError: the frozen forecast has no interval to score it by.
    """
    predicted = decision.predicted
    run = ConcludedRun(
        digest=decision.digest, params=decision.num_params, tokens=decision.num_tokens,
        predicted_nats=predicted.loss_nats, low_nats=predicted.low_nats, high_nats=predicted.high_nats,
        level=predicted.level, extrapolation=predicted.extrapolation, actual_nats=_last_loss(decision, reading),
    )  # fmt: skip
    run.foretold  # noqa: B018  (refuses an interval without width)
    return run


def _last_loss(decision: Decision, reading: LogReading) -> float:
    num_steps, columns, ending = decision.learning_rate.schedule.num_steps, reading.columns, reading.ending
    at = f"step {columns.step} of {num_steps}"
    if ending is not None and ending.event != "finished":
        why = f" ({ending.reason})" if ending.reason else ""
        raise NotConcludedError(f"the run {ending.event} at {at}{why}: there is no final loss to score")
    if ending is not None and ending.validation_loss_nats is not None:
        return ending.validation_loss_nats
    if ending is None and reading.names_digest:
        raise NotConcludedError(f"the run has not ended: it is at {at}, and its last attempt wrote no end")
    if not len(columns.validation_steps) or columns.validation_steps[-1] < num_steps:
        raise NotConcludedError(
            f"the forecast is for the validation loss at step {num_steps}, and the log, at {at}, has none: log one "
            "at that step, or name its column with --validation-loss-key"
        )
    return float(columns.validation_loss_nats[-1])


def conclude(
    decision: Decision, folder: Path, run_dir: Path, reading: LogReading, study_dir: Path | None
) -> Conclusion:
    """Score, keep and attest; done twice, it is the same as done once.

    Args:
        decision: what was frozen.
        folder: where it lies; gets the attestation.
        run_dir: whose chronicle records it.
        reading: the run's log.
        study_dir: whose ledger keeps the run; None: no study is at hand.

    Raises:
        NotConcludedError: see `concluded_run`.
        ConcludedOtherwiseError: it was concluded before, with another loss.
        SweepError, PlanError, DataError: of the study, if its ledger cannot be written.
    """
    run = concluded_run(decision, reading) if study_dir is None else _kept(decision, reading, study_dir)
    found = Conclusion(run=run, study=study_dir)
    path, body = path_of(folder, CONCLUSION), cast(dict[str, Json], canon.to_json(found.body))
    known = read_attestation(path, decision.digest) if path.exists() else None
    if known is not None:
        _check_same(run, known.get("actual_nats"), path)
    if known != body:
        attest(folder, CONCLUSION, decision.digest, body)
    if known is None:
        chronicle.record(
            run_dir, "concluded", sentence(found), step=decision.learning_rate.schedule.num_steps,
            digest=decision.digest, data=found.body,
        )  # fmt: skip
    return found


def _check_same(run: ConcludedRun, known_nats: object, where: Path) -> None:
    if known_nats != run.actual_nats:
        raise ConcludedOtherwiseError(
            f"{where} records {known_nats} nats at the end of this config, and this log ends at {run.actual_nats:.6g}: "
            "the recorded value is kept; is this the log of the same run?"
        )


def _kept(decision: Decision, reading: LogReading, study_dir: Path) -> ConcludedRun:
    """The run as the study's ledger has it from now on."""
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
            f"{study_dir} was made with other data than this config: name the config's study with --study"
        )
    with open_ledger(study) as writing:
        writing.append(history.CONCLUDED, run.digest, run)
    return run


def sentence(found: Conclusion) -> str:
    """How the forecast went, in a line."""
    run, foretold = found.run, found.run.foretold
    where = "inside" if foretold.covered else "outside"
    return (
        f"ended at {format_loss(run.actual_nats)} nats, {where} the {format_percent(run.level)} interval "
        f"{format_interval((run.low_nats, run.high_nats))} around {format_loss(run.predicted_nats)}: "
        f"{format_nats(run.actual_nats - run.predicted_nats, is_signed=True)} nats, "
        f"{format_percent(run.actual_nats / run.predicted_nats - 1, is_signed=True)}, z {foretold.z:+.2f}"
    )


def next_lines(found: Conclusion) -> list[str]:
    """The commands that use the outcome."""
    if found.study is None:
        return ["the config lies in no study, so no ledger keeps the run: name a study with --study STUDY"]
    study = shlex.quote(str(found.study))
    uses = f"`forerun fit {study}` adds it to the ladder, `forerun report {study}` shows it beside its forecast"
    return [f"the ledger of {found.study} keeps the run: {uses}"]
