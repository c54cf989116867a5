"""A study in one go, stopped and killed at many moments, refused, damaged: in the end always the
same decision.
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
from tiny_study import ask, forerun

from launcher.study import coordinate_checks, stages
from launcher.workers.host import WorkerHost
from sweeps.store.errors import StudyMissing
from sweeps.store.ledger import Ledger
from sweeps.store.lock import DriverLock


def outcomes(study):
    try:
        return set(Ledger.read(study).results())
    except StudyMissing:
        return set()


def digest_of(study):
    code, body = ask("status", study)
    assert code == 0
    return body["digest"]


def start(plan, study, *arguments):
    """`forerun run` as a process of its own."""
    command = [
        sys.executable,
        "-m",
        "launcher",
        "run",
        str(plan),
        "--study",
        str(study),
        "--json",
        *arguments,
    ]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def await_outcomes(process, study, num_done, seconds=90):
    deadline = time.monotonic() + seconds
    while (
        len(outcomes(study)) < num_done and time.monotonic() < deadline and process.poll() is None
    ):
        time.sleep(0.01)


def losses(study):
    return {run.spec.id: run.result.loss_nats for run in Ledger.read(study).runs()}


def no_bank(*_):
    raise AssertionError("a finished study trained something")


@pytest.fixture(scope="module")
def num_runs(finished):
    return len(outcomes(finished / "study"))


def test_a_run_goes_through_every_stage(finished, num_runs):
    ledger = Ledger.read(finished / "study")
    kinds = Counter(record.kind for record in ledger.records())
    assert kinds.pop("driven") >= 3  # search, transfer, ladder
    assert kinds == {
        "plan": 1,
        "driver": 1,
        "coordinates": 2,
        "suggestion": 4,
        "result": num_runs,
        "fit": 1,
    }
    assert {result.status for result in ledger.results().values()} <= {"finished", "diverged"}
    assert (finished / "study" / "report.json").is_file()
    assert len(list((finished / "study" / "curves").iterdir())) == num_runs


def test_a_second_run_repeats_nothing(finished, copied, monkeypatch):
    monkeypatch.setattr(WorkerHost, "advance", no_bank)
    code, body = ask("run", finished / "plan.toml", "--study", copied)
    before, after = Ledger.read(finished / "study").records(), Ledger.read(copied).records()
    assert code == 0
    assert [record.kind for record in after[len(before) :]] == ["driver"]
    assert after[: len(before)] == before
    assert body["digest"] == digest_of(finished / "study")


class Interrupt:
    """Sends a real SIGINT once so many more outcomes are recorded."""

    def __init__(self, monkeypatch, left):
        self.left, commit_all = left, Ledger.commit_all

        def counted(ledger, runs):
            commit_all(ledger, runs)
            before, self.left = self.left, self.left - len(runs)
            if before > 0 >= self.left:
                signal.raise_signal(signal.SIGINT)

        monkeypatch.setattr(Ledger, "commit_all", counted)


def test_interrupted_and_resumed(finished, num_runs, tmp_path, monkeypatch):
    study, plan = tmp_path / "study", finished / "plan.toml"
    Interrupt(monkeypatch, left=14)
    code, body = ask("run", plan, "--study", study)
    assert (code, body["error"]) == (130, "InterruptedStudyError")
    done = outcomes(study)
    assert done and f"stopped with {len(done)} runs recorded; `forerun run " in body["message"]
    assert len(done) < num_runs
    code, body = ask("run", plan, "--study", study)
    assert code == 0
    assert losses(study) == losses(finished / "study")
    assert body["digest"] == digest_of(finished / "study")
    assert Counter(r.kind for r in Ledger.read(study).records())["result"] == num_runs


def test_a_signal_during_the_coordinate_check(finished, tmp_path, monkeypatch):
    whole = coordinate_checks.check_coordinates

    def signalled(runs, store, **options):
        signal.raise_signal(signal.SIGTERM)
        return whole(runs, store, **options)

    monkeypatch.setattr(coordinate_checks, "check_coordinates", signalled)
    code, body = ask("check", finished / "plan.toml", "--study", tmp_path / "study")
    assert code == 130
    assert "stopped with 0 runs recorded" in body["message"]
    assert Ledger.read(tmp_path / "study").records("coordinates") == ()


@pytest.mark.slow
def test_killed_at_random_moments(finished, num_runs, tmp_path):
    # truly random: whatever the moment, it must hold
    rng, study = random.Random(), tmp_path / "study"
    for least in (2, 14):
        moment = rng.randrange(least, least + 10)
        process = start(finished / "plan.toml", study)
        await_outcomes(process, study, moment)
        time.sleep(rng.uniform(0, 0.1))
        process.kill()
        _, errors = process.communicate(timeout=30)
        assert process.returncode == -signal.SIGKILL, errors
        assert least <= len(outcomes(study)) < num_runs, errors
    settled = Ledger.read(study).records("result")
    code, body = ask("run", finished / "plan.toml", "--study", study)
    assert code == 0
    assert Ledger.read(study).records("result")[: len(settled)] == settled
    assert losses(study) == losses(finished / "study")
    assert body["digest"] == digest_of(finished / "study")


def test_a_second_driver_is_sent_away_and_status_works_meanwhile(finished, copied):
    with DriverLock(copied):
        code, body = ask("run", finished / "plan.toml", "--study", copied)
        assert (code, body["error"]) == (75, "StudyHeld")
        assert f"is held by pid {os.getpid()} on " in body["message"]
        assert ask("status", copied)[0] == 0
        assert ask("freeze", copied)[0] == 75
    assert ask("sweep", finished / "plan.toml", "--study", copied)[0] == 0


@pytest.mark.parametrize("verb", ["run", "freeze"])
def test_an_edited_ledger_is_refused_by_everyone(finished, copied, verb):
    with contextlib.closing(sqlite3.connect(copied / "ledger.db")) as connection, connection:
        connection.execute(
            "UPDATE records SET body = replace(body, 'finished', 'diverged') WHERE seq = 20"
        )
    arguments = (finished / "plan.toml", "--study", copied) if verb == "run" else (copied,)
    code, body = ask(verb, *arguments)
    assert (code, body["error"]) == (5, "LedgerCorrupt")
    assert "record 20 is not what was written: its hash differs" in body["message"]


def test_a_damaged_corpus_fails_the_study_and_not_its_runs(finished, tmp_path):
    """Workers that each refuse the corpus would make every run `failed`, for ever."""
    shutil.copytree(finished / "corpus", tmp_path / "corpus")
    shutil.copy(finished / "plan.toml", tmp_path)
    shard = tmp_path / "corpus" / "train-00000.bin"
    content = shard.read_bytes()
    for damaged, said in (
        (content[:-2], "bytes, the manifest says"),
        (b"\1" + content[1:], "its content changed"),
    ):
        shard.write_bytes(damaged)
        code, body = ask("run", tmp_path / "plan.toml", "--study", tmp_path / "study")
        assert (code, body["error"]) == (5, "CorruptCorpusError")
        assert said in body["message"]
        assert outcomes(tmp_path / "study") == set()
    shard.write_bytes(content)
    assert ask("sweep", tmp_path / "plan.toml", "--study", tmp_path / "study")[0] == 0


def test_spending_on_an_open_verdict_adds_runs_and_is_remembered(finished, copied, monkeypatch):
    code, before = ask("transfer", finished / "plan.toml", "--study", copied)
    assert (code, before["outcome"]) == (4, "cannot_tell")
    assert "cannot tell" in forerun("transfer", finished / "plan.toml", "--study", copied)[1]
    monkeypatch.setattr(stages, "SPEND_ROUNDS", 1)
    code, after = ask("transfer", finished / "plan.toml", "--study", copied, "--spend")
    rounds = len(Ledger.read(copied).records("spend"))
    assert code in (0, 3, 4) and rounds == 1
    assert after["spend"]["num_runs"] > before["spend"]["num_runs"]
    monkeypatch.setattr(WorkerHost, "advance", no_bank)
    code_again, again = ask("transfer", finished / "plan.toml", "--study", copied)
    assert (code_again, again) == (code, after)
