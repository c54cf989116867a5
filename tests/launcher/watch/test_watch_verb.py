"""`forerun watch`: its exit codes, its words, its memory in the chronicle, and a run followed while
it is written.
"""

import json
import shutil
import signal
import subprocess
import sys
import threading
import time

import pytest
from main_run import tiny_decision, write_attested
from tiny_study import ask, forerun
from watched_case import NUM_STEPS, finish, line, loss_at, write_run

from launcher.base import chronicle, metrics
from launcher.frozen.frozen_folder import ATTESTED


def run_of(decision, frozen, last, **more):
    return write_run(frozen / "run", last, digest=decision.digest, **more)


def names(body):
    return [alert["name"] for alert in body["alerts"]]


def test_a_run_on_its_course_is_fine(decision, frozen):
    run_of(decision, frozen, 300)
    code, body = ask("watch", frozen, "--once")
    assert (code, body["standing"], body["notes"]) == (0, "fine", [])
    assert (body["figures"]["step"], body["digest"]) == (300, decision.digest)
    assert body["figures"]["projection"]["device_hours"][0] > 0
    assert forerun("watch", frozen, "--once")[1].startswith("ON THE BAND at step 300 of 400: ")


def test_cannot_tell(decision, frozen):
    code, body = ask("watch", frozen, "--once")
    assert (code, body["standing"], body["why"]) == (4, "cannot_tell", "nothing is logged yet")
    assert body["notes"] == [f"there is no log at {frozen / 'run'} yet"]
    run_of(decision, frozen, 5)
    code, body = ask("watch", frozen, "--once")
    assert (code, body["standing"]) == (4, "cannot_tell")


def test_bad_input(decision, frozen, tmp_path):
    run_of(decision, frozen, 40)
    write_run(frozen / "run", 50, first=41, digest="cd" * 32)
    code, body = ask("watch", frozen, "--once")
    assert (code, body["error"]) == (
        2,
        "OtherRunError",
    ) and "the config cdcdcdcdcdcdcdcd..." in body["message"]
    for options in (
        ("--once", "--conclude"),
        ("--study", tmp_path, "--once"),
        ("--every", "0", "--once"),
        ("--every", "nan"),
    ):
        assert ask("watch", frozen, *options)[0] == 2
    assert ask("watch", tmp_path / "nowhere", "--once")[0] == 2
    (frozen / "launch.json").write_text(
        (frozen / "launch.json").read_text().replace('"seed": 7', '"seed": 8')
    )
    assert ask("watch", frozen, "--once")[0] == 5


# Live


@pytest.fixture
def watching(frozen):
    """The verb at work in a process of its own; gone after the test."""
    command = [sys.executable, "-m", "launcher", "watch", str(frozen), "--every", "0.2", "--json"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as job:
        yield job
        job.kill()


def test_a_run_is_followed_while_it_is_written(decision, frozen, watching):
    """It waits for a log, tells of a spike when it comes and once, and ends with the run."""

    def write():
        time.sleep(3)
        run_of(decision, frozen, 200)
        time.sleep(2.5)
        for step in range(201, NUM_STEPS + 1):
            metrics.append(
                frozen / "run",
                line(step, train_loss_nats=loss_at(step) + (2.0 if step > 220 else 0.0)),
            )
            time.sleep(0.002)
        time.sleep(1.5)
        finish(frozen / "run", NUM_STEPS, 4.0)

    writer = threading.Thread(target=write)
    writer.start()
    out, err = watching.communicate(timeout=120)
    writer.join()
    body = json.loads(out)
    assert (watching.returncode, body["standing"]) == (3, "alarm"), err
    assert (body["figures"]["step"], body["ending"]["event"]) == (NUM_STEPS, "finished")
    lines = err.splitlines()
    assert lines[0] == f"log: there is no log at {frozen / 'run'} yet"
    assert lines[1] == "CANNOT TELL at step 0 of 400: nothing is logged yet"
    assert any(line.startswith("ON THE BAND at step 200 of 400") for line in lines)
    for name in names(body):
        assert (
            sum(
                line.startswith(("ALARM", "NOTICE")) and f" {name}, from step" in line
                for line in lines
            )
            == 1
        ), name
    assert {entry.data["name"] for entry in chronicle.entries(frozen / "run")} >= set(names(body))


def test_a_log_of_another_run_is_waited_out_and_ctrl_c_leaves_the_last_standing(
    decision, frozen, watching
):
    path = write_run(frozen / "run", 50, digest="cd" * 32)
    assert any(line.startswith("not judged") for line in iter(watching.stderr.readline, ""))
    path.unlink()
    run_of(decision, frozen, 300)
    assert any(
        line.startswith("ON THE BAND at step 300") for line in iter(watching.stderr.readline, "")
    )
    watching.send_signal(signal.SIGINT)
    out, _ = watching.communicate(timeout=60)
    assert watching.returncode == 130
    assert json.loads(out)["figures"]["step"] == 300


# The embedded trainer's own run


def test_a_real_run_watched_and_concluded(two_ranks, corpus, tmp_path):
    decision = tiny_decision(corpus, num_ranks=2)
    frozen = write_attested(tmp_path / "frozen", decision).parent
    shutil.copytree(two_ranks / "plain" / "run", frozen / "run")
    code, body = ask("watch", frozen, "--once")
    assert body["figures"]["step"] == 12
    assert (body["names_digest"], body["notes"], body["ending"]["event"]) == (True, [], "finished")
    code, body = ask("watch", frozen, "--conclude")
    assert (code, body["actual_nats"]) == (
        0,
        metrics.read_ending(frozen / "run").validation_loss_nats,
    )
    assert body["tokens"] == decision.num_tokens
    attested = sorted(path.name for path in (frozen / "attestations").iterdir())
    assert attested == sorted(f"{kind}.json" for kind in (*ATTESTED, "conclusion"))
