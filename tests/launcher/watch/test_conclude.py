"""A run that has ended: its forecast scored, kept once."""

import dataclasses
import shutil

import pytest
from main_run import tiny_decision, write_attested
from scipy.special import ndtri
from tiny_study import ask
from watched_case import finish, header, line, loss_at, read, write_lines

from launcher.base import chronicle, metrics
from launcher.frozen.frozen import Decision
from launcher.frozen.launch_file import read_attestation
from launcher.study import history
from launcher.study.evidence import decision_of
from launcher.study.history import ConcludedRun
from launcher.watch.conclusion import NotConcludedError, concluded_run
from proxies.core import canon
from sweeps.store.ledger import Ledger


def log(decision: Decision, folder, loss=None, last=None):
    """A log of ours up to `last`; with a loss, ended in order."""
    folder.mkdir(parents=True, exist_ok=True)
    num_steps = decision.learning_rate.schedule.num_steps
    lines = [canon.to_json(dataclasses.replace(header(), digest=decision.digest))]
    write_lines(
        folder / metrics.METRICS_FILE,
        [*lines, *(line(step) for step in range(1, (last or num_steps) + 1))],
    )
    if loss is not None:
        finish(folder, num_steps, loss)
    return folder


def reading_of(decision, where):
    return read(where, decision.learning_rate.schedule.num_steps, digest=decision.digest)


@pytest.fixture
def decision(corpus):
    return tiny_decision(corpus)


# Scoring


@pytest.mark.parametrize(
    "ending", [None, ("aborted", 3, "loss is NaN"), ("interrupted", 130, "by a signal")]
)
def test_a_run_without_an_end_is_refused(decision, tmp_path, ending):
    log(decision, tmp_path, last=8)
    if ending:
        event, code, reason = ending
        metrics.write_ending(
            tmp_path, metrics.AttemptEnd(event=event, exit_code=code, step=8, reason=reason)
        )
    with pytest.raises(NotConcludedError, match=ending[2] if ending else "step 8 of 12"):
        concluded_run(decision, reading_of(decision, tmp_path))


def test_another_trainers_run_needs_a_validation_loss_at_its_end(decision, tmp_path):
    rows = [{"step": step, "loss": loss_at(step)} for step in range(1, 13)]
    path = tmp_path / "log.jsonl"
    for added in ([], [{"step": 8, "val_loss": 2.9}]):
        with pytest.raises(NotConcludedError, match="--validation-loss-key"):
            concluded_run(decision, reading_of(decision, write_lines(path, rows + added)))
    found = concluded_run(
        decision, reading_of(decision, write_lines(path, [*rows, {"step": 12, "val_loss": 2.7}]))
    )
    assert (found.actual_nats, found.tokens) == (2.7, 12 * 256)
    assert found.foretold.z == pytest.approx(1.6449 * 0.4221, abs=2e-3), (
        "log(2.7 / 2.5) over log(3.0 / 2.5), in arms"
    )
    assert canon.decode(ConcludedRun, canon.parse(canon.canonical(found))) == found


# The verb and the ledger


@pytest.fixture(scope="module")
def decided(study, found):
    """What the finished study freezes."""
    return decision_of(study, found)


@pytest.fixture
def frozen(decided, copied):
    """The config of a finished study, in it."""
    return decided, write_attested(copied / "frozen", decided).parent


def concluded(frozen, arms=0.5):
    """End so many upper arms of the interval above the forecast, and conclude."""
    decision, folder = frozen
    predicted = decision.predicted
    log(
        decision,
        folder / "run",
        predicted.loss_nats * (predicted.high_nats / predicted.loss_nats) ** arms,
    )
    code, body = ask("watch", folder, "--conclude")
    assert code == 0
    return body


def test_conclude_scores_attests_and_keeps_once(frozen, copied):
    decision, folder = frozen
    body = concluded(frozen)
    predicted = decision.predicted
    assert body["z"] == pytest.approx(0.5 * ndtri((1 + predicted.level) / 2))
    assert body["error_share"] == pytest.approx(
        (predicted.high_nats / predicted.loss_nats) ** 0.5 - 1
    )
    path = folder / "attestations" / "conclusion.json"
    assert read_attestation(path, decision.digest)["z"] == body["z"]
    (kept,) = history.concluded(Ledger.read(copied))
    assert (kept.digest, kept.actual_nats) == (decision.digest, body["actual_nats"])
    (told,) = [entry for entry in chronicle.entries(folder / "run") if entry.kind == "concluded"]
    assert told.step == decision.learning_rate.schedule.num_steps
    before = path.read_bytes(), Ledger.read(copied).head_hash, chronicle.entries(folder / "run")
    assert concluded(frozen) == body
    assert (
        path.read_bytes(),
        Ledger.read(copied).head_hash,
        chronicle.entries(folder / "run"),
    ) == before


def test_another_outcome_of_the_same_config_is_refused(frozen):
    concluded(frozen)
    decision, folder = frozen
    log(decision, folder / "run", decision.predicted.loss_nats * 1.2)
    code, body = ask("watch", folder, "--conclude")
    assert (code, body["error"]) == (2, "ConcludedOtherwiseError")
    assert "check that this log is of the same run" in body["message"]


def test_a_config_that_lies_in_no_study_is_scored_all_the_same(frozen, copied, tmp_path):
    decision, folder = frozen
    away = tmp_path / "elsewhere" / "frozen" / decision.digest
    shutil.copytree(folder, away)
    log(decision, away / "run", decision.predicted.loss_nats)
    code, body = ask("watch", away, "--conclude")
    assert (code, body["in_ledger"], body["z"]) == (0, False, 0.0)
    assert history.concluded(Ledger.read(copied)) == []
    code, body = ask("watch", away, "--conclude", "--study", copied)
    assert (code, body["in_ledger"]) == (0, True)
    assert len(history.concluded(Ledger.read(copied))) == 1
