"""Tests of `forerun watch`: exit codes, output, recorded alerts, and a run that still trains."""

import json
import shutil
import signal
import subprocess
import sys
import threading
import time

import pytest
from main_run import make_tiny_decision, write_attested
from tiny_study import run_forerun, run_json
from watched_case import NUM_STEPS, compute_loss_at, make_line, write_finished, write_run

from forerun._launcher.main_run import event_log, metrics_file
from forerun._launcher.main_run.frozen.frozen_folder import ATTESTED


def write_watched_run(decision, frozen, last, **more):
    """Write the log of the config's run up to step `last`."""
    return write_run(frozen / "run", last, digest=decision.digest, **more)


def list_names(body):
    """Return the names of the alerts."""
    return [alert["name"] for alert in body["alerts"]]


def test_run_on_the_band_is_fine(decision, frozen):
    write_watched_run(decision, frozen, 300)
    code, body = run_json("watch", frozen, "--once")
    assert (code, body["standing"], body["notes"]) == (0, "fine", [])
    assert (body["figures"]["step"], body["digest"]) == (300, decision.digest)
    assert body["figures"]["projection"]["device_hours"][0] > 0
    assert run_forerun("watch", frozen, "--once")[1].startswith("ON THE BAND at step 300 of 400: ")


def test_empty_or_short_log_cannot_tell(decision, frozen):
    code, body = run_json("watch", frozen, "--once")
    assert (code, body["standing"], body["why"]) == (4, "cannot_tell", "nothing is logged yet")
    assert body["notes"] == [f"there is no log at {frozen / 'run'} yet"]
    write_watched_run(decision, frozen, 5)
    code, body = run_json("watch", frozen, "--once")
    assert (code, body["standing"]) == (4, "cannot_tell")


def test_wrong_run_or_options_are_bad_input_and_an_edited_config_is_tampering(
    decision, frozen, tmp_path
):
    write_watched_run(decision, frozen, 40)
    write_run(frozen / "run", 50, first=41, digest="cd" * 32)
    code, body = run_json("watch", frozen, "--once")
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
        assert run_json("watch", frozen, *options)[0] == 2
    assert run_json("watch", tmp_path / "nowhere", "--once")[0] == 2
    (frozen / "launch.json").write_text(
        (frozen / "launch.json").read_text().replace('"seed": 7', '"seed": 8')
    )
    assert run_json("watch", frozen, "--once")[0] == 5


# ---- Live ----


@pytest.fixture
def watching(frozen):
    """A `forerun watch` process, killed after the test.

    It is also killed after 120 s, so that a test which waits for a line that never comes sees the
    end of the output instead.
    """
    command = [sys.executable, "-m", "forerun", "watch", str(frozen), "--every", "0.2", "--json"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as job:
        killer = threading.Timer(120, job.kill)
        killer.start()
        yield job
        killer.cancel()
        job.kill()


def test_run_is_followed_while_it_is_written(decision, frozen, watching):
    """The watch waits for a log, reports a spike once, and ends with the run."""

    lines = []

    def read_until(start):
        for line in iter(watching.stderr.readline, ""):
            lines.append(line.rstrip("\n"))
            if line.startswith(start):
                return
        raise AssertionError(f"no line starts with {start!r}: {lines}")

    read_until("CANNOT TELL at step 0 of 400: nothing is logged yet")
    assert lines[0] == f"log: there is no log at {frozen / 'run'} yet"
    write_watched_run(decision, frozen, 200)
    read_until("ON THE BAND at step 200 of 400")
    for step in range(201, NUM_STEPS + 1):
        loss = compute_loss_at(step) + (2.0 if step > 220 else 0.0)
        metrics_file.append_line(frozen / "run", make_line(step, train_loss_nats=loss))
    read_until("ALARM")
    time.sleep(1.0)  # The next looks must not repeat the alerts.
    write_finished(frozen / "run", NUM_STEPS, 4.0)
    # communicate() would miss the lines that the buffered reader already holds.
    lines += watching.stderr.read().splitlines()
    body = json.loads(watching.stdout.read())
    assert (watching.wait(60), body["standing"]) == (3, "alarm"), lines
    assert (body["figures"]["step"], body["ending"]["event"]) == (NUM_STEPS, "finished")
    for name in list_names(body):
        alert_lines = [
            text
            for text in lines
            if text.startswith(("ALARM", "NOTICE")) and f" {name}, from step" in text
        ]
        assert len(alert_lines) == 1, name
    assert {entry.data["name"] for entry in event_log.read_events(frozen / "run")} >= set(
        list_names(body)
    )


def test_watch_waits_while_another_runs_log_is_there_and_ctrl_c_prints_the_last_status(
    decision, frozen, watching
):
    path = write_run(frozen / "run", 50, digest="cd" * 32)
    assert any(text.startswith("not judged") for text in iter(watching.stderr.readline, ""))
    path.unlink()
    write_watched_run(decision, frozen, 300)
    assert any(
        text.startswith("ON THE BAND at step 300") for text in iter(watching.stderr.readline, "")
    )
    watching.send_signal(signal.SIGINT)
    out, _ = watching.communicate(timeout=60)
    assert watching.returncode == 130
    assert json.loads(out)["figures"]["step"] == 300


# ---- A run of the embedded trainer ----


def test_real_run_is_watched_and_concluded(two_rank_runs, corpus, tmp_path):
    decision = make_tiny_decision(corpus, num_ranks=2)
    frozen = write_attested(tmp_path / "frozen", decision).parent
    shutil.copytree(two_rank_runs / "plain" / "run", frozen / "run")
    code, body = run_json("watch", frozen, "--once")
    assert body["figures"]["step"] == 12
    assert (body["names_digest"], body["notes"], body["ending"]["event"]) == (True, [], "finished")
    code, body = run_json("watch", frozen, "--conclude")
    assert (code, body["actual_nats"]) == (
        0,
        metrics_file.read_ending(frozen / "run").validation_loss_nats,
    )
    assert body["tokens"] == decision.num_tokens
    attested = sorted(path.name for path in (frozen / "attestations").iterdir())
    assert attested == sorted(f"{kind}.json" for kind in (*ATTESTED, "conclusion"))
