"""The conclusion of a finished run: its frozen forecast is scored, and the score is recorded.

The forecast is an interval for the validation loss at the end, frozen before the run began. The
score goes to an attestation, `attestations/conclusion.json` in the config's folder.
"""

from __future__ import annotations

from pathlib import Path

from forerun._launcher.main_run import event_log
from forerun._launcher.main_run.frozen.concluded_run import ConcludedRun, NotConcludedError
from forerun._launcher.main_run.frozen.frozen import Decision
from forerun._launcher.main_run.frozen.launch_file import (
    attest,
    get_attestation_path,
    read_attestation,
)
from forerun._launcher.main_run.watch.logs.readings import LogReading
from forerun._proxies.core.canon import Json
from forerun._proxies.core.notation import format_interval, format_loss, format_nats, format_percent

CONCLUSION = "conclusion"
"""Kind of the attestation."""


def build_concluded_run(decision: Decision, reading: LogReading) -> ConcludedRun:
    """Return a finished run: its final loss, from the log, and its frozen forecast.

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
        actual_nats=_require_final_loss(decision.learning_rate.schedule.num_steps, reading),
    )
    run.forecast_outcome  # noqa: B018  (raises SpecError if the interval has no width)
    return run


def _require_final_loss(num_steps: int, reading: LogReading) -> float:
    """Return the validation loss at the end of the schedule; raise NotConcludedError without it."""
    ending, at = reading.ending, f"step {reading.columns.step} of {num_steps}"
    if ending is not None and ending.event != "finished":
        reason = f" ({ending.reason})" if ending.reason else ""
        raise NotConcludedError(
            f"the run {ending.event} at {at}{reason}: there is no final loss to score"
        )
    if ending is None and reading.names_digest:
        raise NotConcludedError(
            f"the run has not ended: it is at {at}, and its last attempt wrote no end"
        )
    loss_nats = reading.find_final_loss(num_steps)
    if loss_nats is None:
        raise NotConcludedError(
            f"the forecast is for the validation loss at step {num_steps}, and the log, at {at}, "
            "has none: log one at that step, or name its column with --validation-loss-key"
        )
    return loss_nats


def conclude(
    decision: Decision, folder: Path, run_dir: Path, run: ConcludedRun, *, in_ledger: bool
) -> dict[str, Json]:
    """Score a run's forecast and attest the score. Repeating it changes nothing.

    Args:
        decision: The frozen decision.
        folder: Folder of the config, which gets the attestation.
        run_dir: Folder of the run, whose event log records the conclusion.
        run: The finished run.
        in_ledger: Whether a study's ledger records the run.

    Returns:
        The score, as it is attested.

    Raises:
        ConcludedOtherwiseError: The run was concluded before, with another loss.
    """
    path, body = get_attestation_path(folder, CONCLUSION), _score(run, in_ledger=in_ledger)
    known = read_attestation(path, decision.digest) if path.exists() else None
    if known is not None:
        run.require_same_loss(known.get("actual_nats"), path)
    if known != body:
        attest(folder, CONCLUSION, decision.digest, body)
    if known is None:
        event_log.append_event(
            run_dir,
            "concluded",
            describe_conclusion(run),
            step=decision.learning_rate.schedule.num_steps,
            digest=decision.digest,
            data=body,
        )
    return body


def _score(run: ConcludedRun, *, in_ledger: bool) -> dict[str, Json]:
    """Return the score of a run's forecast as JSON."""
    return {
        "digest": run.digest,
        "actual_nats": run.actual_nats,
        "predicted_nats": run.predicted_nats,
        "interval_nats": [run.low_nats, run.high_nats],
        "level": run.level,
        "inside": run.forecast_outcome.covered,
        "z": run.forecast_outcome.z,
        "error_nats": run.actual_nats - run.predicted_nats,
        "error_share": run.actual_nats / run.predicted_nats - 1,
        "extrapolation": run.extrapolation,
        "params": run.params,
        "tokens": run.tokens,
        "in_ledger": in_ledger,
    }


def describe_conclusion(run: ConcludedRun) -> str:
    """Return a line on how the forecast of a run went."""
    return (
        f"ended at {format_loss(run.actual_nats)} nats, "
        f"{'inside' if run.forecast_outcome.covered else 'outside'} "
        f"the {format_percent(run.level)} interval {format_interval((run.low_nats, run.high_nats))}"
        f" around {format_loss(run.predicted_nats)}: "
        f"{format_nats(run.actual_nats - run.predicted_nats, is_signed=True)} nats, "
        f"{format_percent(run.actual_nats / run.predicted_nats - 1, is_signed=True)}, z "
        f"{run.forecast_outcome.z:+.2f}"
    )
