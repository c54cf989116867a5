"""Tests of a complete study: it reaches the same decision if it is stopped or killed at any moment,
and damaged files are refused.
"""

import contextlib
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter

import pytest
from tiny_study import run_forerun, run_json

from forerun._launcher.study.stages import coordinate_checks, stages
from forerun._launcher.study.workers.host import WorkerHost
from forerun._sweeps.store.errors import StudyMissing
from forerun._sweeps.store.ledger import Ledger
from forerun._sweeps.store.lock import DriverLock


def list_outcomes(study):
    """Return the ids of all runs with an outcome."""
    try:
        return set(Ledger.read(study).get_results())
    except StudyMissing:
        return set()


def get_digest(study):
    code, body = run_json("status", study)
    assert code == 0
    return body["digest"]


def start_run(plan, study, *arguments):
    """Start `forerun run` in a new process."""
    command = [
        sys.executable,
        "-m",
        "forerun",
        "run",
        str(plan),
        "--study",
        str(study),
        "--json",
        *arguments,
    ]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for_outcomes(process, study, num_done):
    """Wait until a study has `num_done` outcomes, the process has ended, or 90 seconds are over."""
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline and process.poll() is None:
        if len(list_outcomes(study)) >= num_done:
            return
        time.sleep(0.01)


def read_losses(study):
    return {run.spec.id: run.result.loss_nats for run in Ledger.read(study).read_runs()}


def fail_to_advance(*_):
    raise AssertionError("a finished study trained something")


@pytest.fixture(scope="module")
def num_runs(finished_study_dir):
    return len(list_outcomes(finished_study_dir / "study"))


def test_run_goes_through_every_stage(finished_study_dir, num_runs):
    ledger = Ledger.read(finished_study_dir / "study")
    kinds = Counter(record.kind for record in ledger.read_records())
    assert kinds.pop("driven") >= 3, "one or more for search, transfer and ladder"
    assert kinds == {
        "plan": 1,
        "driver": 1,
        "coordinates": 2,
        "suggestion": 4,
        "result": num_runs,
        "fit": 1,
    }
    assert {result.status for result in ledger.get_results().values()} <= {"finished", "diverged"}
    assert (finished_study_dir / "study" / "report.json").is_file()
    assert len(list((finished_study_dir / "study" / "curves").iterdir())) == num_runs


def test_second_run_repeats_nothing(finished_study_dir, study_copy, monkeypatch):
    monkeypatch.setattr(WorkerHost, "advance", fail_to_advance)
    code, body = run_json("run", finished_study_dir / "plan.toml", "--study", study_copy)
    before, after = (
        Ledger.read(finished_study_dir / "study").read_records(),
        Ledger.read(study_copy).read_records(),
    )
    assert code == 0
    assert [record.kind for record in after[len(before) :]] == ["driver"]
    assert after[: len(before)] == before
    assert body["digest"] == get_digest(finished_study_dir / "study")


def interrupt_after(monkeypatch, num_outcomes):
    """Send a real SIGINT to this process when `num_outcomes` more outcomes have been recorded."""
    num_left, commit_all = num_outcomes, Ledger.commit_all

    def commit_and_interrupt(ledger, runs):
        nonlocal num_left
        commit_all(ledger, runs)
        was_pending = num_left > 0
        num_left -= len(runs)
        if was_pending and num_left <= 0:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Ledger, "commit_all", commit_and_interrupt)


def test_interrupted_study_resumes_to_the_same_decision(
    finished_study_dir, num_runs, tmp_path, monkeypatch
):
    study, plan = tmp_path / "study", finished_study_dir / "plan.toml"
    interrupt_after(monkeypatch, 14)
    code, body = run_json("run", plan, "--study", study)
    assert (code, body["error"]) == (130, "InterruptedStudyError")
    done = list_outcomes(study)
    assert done and f"stopped with {len(done)} runs recorded; `forerun run " in body["message"]
    assert len(done) < num_runs
    code, body = run_json("run", plan, "--study", study)
    assert code == 0
    assert read_losses(study) == read_losses(finished_study_dir / "study")
    assert body["digest"] == get_digest(finished_study_dir / "study")
    kinds = Counter(record.kind for record in Ledger.read(study).read_records())
    assert kinds["result"] == num_runs


def test_signal_during_the_coordinate_check_stops_the_study(
    finished_study_dir, tmp_path, monkeypatch
):
    check = coordinate_checks.check_coordinates

    def signal_and_check(runs, store, **options):
        signal.raise_signal(signal.SIGTERM)
        return check(runs, store, **options)

    monkeypatch.setattr(coordinate_checks, "check_coordinates", signal_and_check)
    code, body = run_json("check", finished_study_dir / "plan.toml", "--study", tmp_path / "study")
    assert code == 130
    assert "stopped with 0 runs recorded" in body["message"]
    assert Ledger.read(tmp_path / "study").read_records("coordinates") == ()


@pytest.mark.slow
def test_study_killed_at_random_moments_reaches_the_same_decision(
    finished_study_dir, num_runs, tmp_path
):
    # The seed is random on purpose: the study must survive a kill at any moment.
    rng, study = random.Random(), tmp_path / "study"
    for earliest in (2, 14):
        moment = rng.randrange(earliest, earliest + 10)
        process = start_run(finished_study_dir / "plan.toml", study)
        wait_for_outcomes(process, study, moment)
        time.sleep(rng.uniform(0, 0.1))
        process.kill()
        _, errors = process.communicate(timeout=30)
        assert process.returncode == -signal.SIGKILL, errors
        assert earliest <= len(list_outcomes(study)) < num_runs, errors
    settled = Ledger.read(study).read_records("result")
    code, body = run_json("run", finished_study_dir / "plan.toml", "--study", study)
    assert code == 0
    assert Ledger.read(study).read_records("result")[: len(settled)] == settled
    assert read_losses(study) == read_losses(finished_study_dir / "study")
    assert body["digest"] == get_digest(finished_study_dir / "study")


def test_second_driver_is_refused_and_status_works(finished_study_dir, study_copy):
    with DriverLock(study_copy):
        code, body = run_json("run", finished_study_dir / "plan.toml", "--study", study_copy)
        assert (code, body["error"]) == (75, "StudyHeld")
        assert f"is held by pid {os.getpid()} on " in body["message"]
        assert run_json("status", study_copy)[0] == 0
        assert run_json("freeze", study_copy)[0] == 75
    assert run_json("sweep", finished_study_dir / "plan.toml", "--study", study_copy)[0] == 0


@pytest.mark.parametrize("verb", ["run", "freeze"])
def test_edited_ledger_is_refused(finished_study_dir, study_copy, verb):
    with contextlib.closing(sqlite3.connect(study_copy / "ledger.db")) as connection, connection:
        connection.execute(
            "UPDATE records SET body = replace(body, 'finished', 'diverged') WHERE seq = 20"
        )
    arguments = (
        (finished_study_dir / "plan.toml", "--study", study_copy)
        if verb == "run"
        else (study_copy,)
    )
    code, body = run_json(verb, *arguments)
    assert (code, body["error"]) == (5, "LedgerCorrupt")
    assert "record 20 is not what was written: its hash differs" in body["message"]


def test_damaged_corpus_fails_the_study_and_not_its_runs(finished_study_dir, tmp_path):
    """Every worker refuses the corpus. If the runs counted as failed, they would never be tried
    again, also not with the repaired corpus.
    """
    shutil.copytree(finished_study_dir / "corpus", tmp_path / "corpus")
    shutil.copy(finished_study_dir / "plan.toml", tmp_path)
    shard = tmp_path / "corpus" / "train-00000.bin"
    content = shard.read_bytes()
    for damaged, message in (
        (content[:-2], "bytes, the manifest says"),
        (b"\1" + content[1:], "its content changed"),
    ):
        shard.write_bytes(damaged)
        code, body = run_json("run", tmp_path / "plan.toml", "--study", tmp_path / "study")
        assert (code, body["error"]) == (5, "CorruptCorpusError")
        assert message in body["message"]
        assert list_outcomes(tmp_path / "study") == set()
    shard.write_bytes(content)
    assert run_json("sweep", tmp_path / "plan.toml", "--study", tmp_path / "study")[0] == 0


def test_transfer_with_spend_adds_runs_to_an_open_verdict_and_records_them(
    finished_study_dir, study_copy, monkeypatch
):
    code, before = run_json("transfer", finished_study_dir / "plan.toml", "--study", study_copy)
    assert (code, before["outcome"]) == (4, "cannot_tell")
    assert (
        "cannot tell"
        in run_forerun("transfer", finished_study_dir / "plan.toml", "--study", study_copy)[1]
    )
    monkeypatch.setattr(stages, "SPEND_ROUNDS", 1)
    code, after = run_json(
        "transfer", finished_study_dir / "plan.toml", "--study", study_copy, "--spend"
    )
    num_rounds = len(Ledger.read(study_copy).read_records("spend"))
    assert code in (0, 3, 4) and num_rounds == 1
    assert after["spend"]["num_runs"] > before["spend"]["num_runs"]
    monkeypatch.setattr(WorkerHost, "advance", fail_to_advance)
    repeated_code, repeated = run_json(
        "transfer", finished_study_dir / "plan.toml", "--study", study_copy
    )
    assert (repeated_code, repeated) == (code, after)
