"""Tests of `forerun watch --conclude`, which scores the forecast of a finished main run.

The score compares the forecast with the final validation loss, and is recorded once.
"""

import dataclasses
import math
import shutil

import pytest
from main_run import make_tiny_decision, write_attested
from scipy.special import ndtri
from tiny_study import run_json
from watched_case import (
    compute_loss_at,
    make_header,
    make_line,
    read_log,
    write_finished,
    write_lines,
)

from forerun._launcher.main_run import event_log, metrics_file
from forerun._launcher.main_run.frozen.concluded_run import ConcludedRun, NotConcludedError
from forerun._launcher.main_run.frozen.frozen import Decision
from forerun._launcher.main_run.frozen.launch_file import read_attestation
from forerun._launcher.main_run.watch.conclusion import build_concluded_run
from forerun._launcher.study.stages import concluded_runs
from forerun._launcher.study.stages.study_findings import build_decision_from_findings
from forerun._proxies.core import canon
from forerun._sweeps.store.ledger import Ledger


def write_log(decision: Decision, folder, loss=None, last=None):
    """Write forerun's own log up to step `last`; if a loss is given, the run has finished."""
    folder.mkdir(parents=True, exist_ok=True)
    num_steps = decision.learning_rate.schedule.num_steps
    lines = [canon.to_json(dataclasses.replace(make_header(), digest=decision.digest))]
    write_lines(
        folder / metrics_file.METRICS_FILE,
        [*lines, *(make_line(step) for step in range(1, (last or num_steps) + 1))],
    )
    if loss is not None:
        write_finished(folder, num_steps, loss)
    return folder


def read_run_log(decision, path):
    """Read a log of the decision's main run."""
    return read_log(path, decision.learning_rate.schedule.num_steps, digest=decision.digest)


@pytest.fixture
def decision(corpus):
    """A decision for a main run of 12 steps."""
    return make_tiny_decision(corpus)


# ---- Scoring ----


@pytest.mark.parametrize(
    "ending", [None, ("aborted", 3, "loss is NaN"), ("interrupted", 130, "by a signal")]
)
def test_run_that_has_not_finished_is_not_scored(decision, tmp_path, ending):
    write_log(decision, tmp_path, last=8)
    if ending:
        event, code, reason = ending
        metrics_file.write_ending(
            tmp_path, metrics_file.AttemptEnd(event=event, exit_code=code, step=8, reason=reason)
        )
    with pytest.raises(NotConcludedError, match=ending[2] if ending else "step 8 of 12"):
        build_concluded_run(decision, read_run_log(decision, tmp_path))


def test_another_trainers_run_needs_a_final_validation_loss(decision, tmp_path):
    rows = [{"step": step, "loss": compute_loss_at(step)} for step in range(1, 13)]
    path = tmp_path / "log.jsonl"
    for extra_rows in ([], [{"step": 8, "val_loss": 2.9}]):
        with pytest.raises(NotConcludedError, match="--validation-loss-key"):
            build_concluded_run(
                decision, read_run_log(decision, write_lines(path, rows + extra_rows))
            )
    run = build_concluded_run(
        decision, read_run_log(decision, write_lines(path, [*rows, {"step": 12, "val_loss": 2.7}]))
    )
    assert (run.actual_nats, run.tokens) == (2.7, 12 * 256)
    # The forecast is 2.5 nats, and the upper end of its 90 % interval is 3.0 nats. So z, the error
    # in standard deviations, is that end's quantile times the share of the way to it in log loss.
    share_of_way = math.log(2.7 / 2.5) / math.log(3.0 / 2.5)
    assert run.forecast_outcome.z == pytest.approx(ndtri(0.95) * share_of_way, abs=2e-3)
    assert canon.decode(ConcludedRun, canon.parse(canon.to_canonical_json(run))) == run


# ---- The command and the ledger ----


@pytest.fixture(scope="module")
def study_decision(study, findings):
    """The decision that the finished study freezes."""
    return build_decision_from_findings(study, findings)


@pytest.fixture
def frozen(study_decision, study_copy):
    """The decision and its frozen folder in a copy of the finished study."""
    return study_decision, write_attested(study_copy / "frozen", study_decision).parent


def conclude_above_forecast(frozen):
    """Conclude a run whose log loss is halfway from the forecast to its interval's upper end."""
    decision, folder = frozen
    predicted = decision.predicted
    write_log(
        decision,
        folder / "run",
        predicted.loss_nats * (predicted.high_nats / predicted.loss_nats) ** 0.5,
    )
    code, body = run_json("watch", folder, "--conclude")
    assert code == 0
    return body


def test_conclusion_is_scored_attested_and_recorded_once(frozen, study_copy):
    decision, folder = frozen
    body = conclude_above_forecast(frozen)
    predicted = decision.predicted
    assert body["z"] == pytest.approx(0.5 * ndtri((1 + predicted.level) / 2))
    assert body["error_share"] == pytest.approx(
        (predicted.high_nats / predicted.loss_nats) ** 0.5 - 1
    )
    path = folder / "attestations" / "conclusion.json"
    assert read_attestation(path, decision.digest)["z"] == body["z"]
    (concluded,) = concluded_runs.load_concluded_runs(Ledger.read(study_copy))
    assert (concluded.digest, concluded.actual_nats) == (
        decision.digest,
        body["actual_nats"],
    )
    (entry,) = [
        entry for entry in event_log.read_events(folder / "run") if entry.kind == "concluded"
    ]
    assert entry.step == decision.learning_rate.schedule.num_steps

    def read_records():
        events = event_log.read_events(folder / "run")
        return path.read_bytes(), Ledger.read(study_copy).head_hash, events

    before = read_records()
    assert conclude_above_forecast(frozen) == body
    assert read_records() == before


def test_second_outcome_of_one_config_is_refused(frozen):
    conclude_above_forecast(frozen)
    decision, folder = frozen
    write_log(decision, folder / "run", decision.predicted.loss_nats * 1.2)
    code, body = run_json("watch", folder, "--conclude")
    assert (code, body["error"]) == (2, "ConcludedOtherwiseError")
    assert "check that this log is of the same run" in body["message"]


def test_config_outside_a_study_is_scored(frozen, study_copy, tmp_path):
    decision, folder = frozen
    outside = tmp_path / "elsewhere" / "frozen" / decision.digest
    shutil.copytree(folder, outside)
    write_log(decision, outside / "run", decision.predicted.loss_nats)
    code, body = run_json("watch", outside, "--conclude")
    assert (code, body["in_ledger"], body["z"]) == (0, False, 0.0)
    assert concluded_runs.load_concluded_runs(Ledger.read(study_copy)) == []
    code, body = run_json("watch", outside, "--conclude", "--study", study_copy)
    assert (code, body["in_ledger"]) == (0, True)
    assert len(concluded_runs.load_concluded_runs(Ledger.read(study_copy))) == 1
