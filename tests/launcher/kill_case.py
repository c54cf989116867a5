"""`forerun run` of the tiny study as a real process on real Ray, killed in one part or another,
then run to the end.

Every process that a driver starts carries a mark in its environment, and its temporary folder is
its own: what writes there is counted too, for Ray's agents write their titles over their
environment.
"""

import json
import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

from tiny_study import ask

from sweeps.store.errors import SweepError
from sweeps.store.ledger import LEDGER_NAME, Ledger
from sweeps.store.lock import LOCK_NAME

MARK = "FORERUN_TEST_MARK"
RAY = ("--set", "cluster.backend=ray", "--set", "cluster.num_workers=2")
PARTS = {
    "worker": r"^ray::RayWorker\.advance",
    "raylet": r"/raylet/raylet ",
    "gcs_server": r"/gcs_server ",
}


class Driver:
    """A `forerun run` in a process group of its own."""

    def __init__(self, plan, study, *arguments, environment=(), verb="run"):
        self.study, self.mark = study, uuid.uuid4().hex
        command = [
            sys.executable,
            "-m",
            "launcher",
            verb,
            str(plan),
            "--study",
            str(study),
            "--json",
            *arguments,
        ]
        diary = {
            "FORERUN_TEST_DIARY": str(diary_of(study)),
            "PYTHONPATH": str(Path(__file__).parent / "spy"),
        }
        environment = {
            **os.environ,
            **diary,
            **dict(environment),
            MARK: self.mark,
            "OMP_NUM_THREADS": "1",
        }
        # short: Ray's sockets lie below
        self.temporary = Path(tempfile.mkdtemp(prefix="fk-", dir="/tmp"))
        environment["TMPDIR"] = str(self.temporary)
        self.errors = study.with_name(f"{study.name}-{self.mark[:8]}.err")
        with self.errors.open("w") as errors:
            self.process = subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=environment,
                start_new_session=True,
            )

    def said(self):
        """What it has printed for people so far."""
        return self.errors.read_text(errors="replace")

    def processes(self):
        """Pid -> command line of all of it that lives, driver included."""
        found = {}
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                if f"{MARK}={self.mark}".encode() in (
                    entry / "environ"
                ).read_bytes() or self._is_written_by(entry):
                    found[int(entry.name)] = (
                        (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                    )
            except OSError:
                continue
        if self.process.poll() is None:  # just started, it may not show its environment yet
            found.setdefault(self.process.pid, "driver")
        return {pid: line for pid, line in found.items() if line}  # a zombie has none

    def _is_written_by(self, entry):
        """Whether a process holds a file of the temporary folder open."""
        return any(
            str(handle.readlink()).startswith(f"{self.temporary}/")
            for handle in (entry / "fd").iterdir()
        )

    def pids(self, part):
        return [pid for pid, line in self.processes().items() if re.search(PARTS[part], line)]

    def num_outcomes(self):
        return num_outcomes(self.study)

    def wait_for(self, what, seconds=120.0):
        """Until `what()` is true or the driver has ended; the seconds that took."""
        began = time.monotonic()
        while not what() and self.process.poll() is None:
            if time.monotonic() - began > seconds:
                raise TimeoutError(f"not within {seconds} s; it said: {self.said()[-2000:]}")
            time.sleep(0.02)
        return time.monotonic() - began

    def end(self, seconds=240.0):
        """Wait for it: exit code and the object on its stdout, None if there is none."""
        out, _ = self.process.communicate(timeout=seconds)
        return self.process.returncode, json.loads(out) if out.strip() else None

    def gone_within(self, seconds=90.0):
        """How long until no process of its is left. Raises TimeoutError."""
        began = time.monotonic()
        while left := self.processes():
            if time.monotonic() - began > seconds:
                raise TimeoutError(f"still there: {left}")
            time.sleep(0.05)
        return time.monotonic() - began

    def sweep_up(self):
        """Nothing survives a test, whatever became of it."""
        for pid in self.processes():
            os.kill(pid, signal.SIGKILL)
        self.process.wait(timeout=10)
        if self.process.stdout is not None:
            self.process.stdout.close()
        shutil.rmtree(self.temporary, ignore_errors=True)


def diary_of(study):
    """Where workers note the runs that they begin."""
    return study.with_name(f"{study.name}-diary")


def num_repeated(study):
    """Executions beyond one per run."""
    begun = diary_of(study).read_text().split()
    assert set(begun) >= set(Ledger.read(study).results()), "the diary has every run"
    return len(begun) - len(set(begun))


def num_outcomes(study):
    try:
        return len(Ledger.read(study).results())
    except SweepError:
        return 0


def kill(plan, study, what, at_outcomes, *, environment=(), settings=RAY):
    """One run of the study with one kill at so many outcomes, resumed if need be.

    Args:
        plan, study: as for `forerun run`.
        what: worker, raylet or gcs_server (SIGKILL); driver (SIGKILL); SIGTERM, SIGINT, `SIGINT
            twice` (to the driver's whole group, as a terminal does), SIGSTOP (another takes over,
            then it goes on).
        at_outcomes: in the ledger.
        environment: of the driver.
        settings: further arguments of `forerun run`.

    Returns:
        A row of the table: what was killed, how the driver ended and in how many seconds, what it
            cost.
    """
    first = Driver(plan, study, *settings, environment=environment)
    try:
        first.wait_for(lambda: first.num_outcomes() >= at_outcomes)
        assert first.process.poll() is None, first.said()
        row = {"what": what, "at_outcomes": first.num_outcomes()}
        row |= (
            _taken_over(first, plan, settings, environment)
            if what == "SIGSTOP"
            else _killed(first, what)
        )
        row["orphans_gone_seconds"] = first.gone_within()
        row["said"] = first.said()
        done_before, begun_before = (
            set(Ledger.read(study).results()),
            len(diary_of(study).read_text().split()),
        )
        drivers = 1 if row["exit_code"] == 0 else 2
        if drivers == 2 and what != "SIGSTOP":
            second = Driver(plan, study, *settings, environment=environment)
            try:
                code, body = second.end()
                assert code == 0, second.said()
                second.gone_within()
            finally:
                second.sweep_up()
            row["digest"] = body["digest"]
    finally:
        first.sweep_up()
    ledger = Ledger.read(study)
    assert done_before <= set(ledger.results()), "an outcome was lost"
    assert not done_before & set(diary_of(study).read_text().split()[begun_before:]), (
        "a finished run was run again"
    )
    assert [result for result in ledger.results().values() if result.status == "failed"] == []
    return {**row, "drivers": drivers, "num_repeated": num_repeated(study)}


def _killed(first, what):
    """Do it; how the driver ended, or when it said so and that it went on to the end."""
    began = time.monotonic()
    if what in PARTS:  # a worker names what it is doing: one at work
        pids = []
        first.wait_for(lambda: pids.extend(first.pids(what)) or pids)
        os.kill(pids[0], signal.SIGKILL)
    elif what == "driver":
        first.process.kill()
    else:
        os.killpg(first.process.pid, getattr(signal, what.split()[0]))
        if what.endswith("twice"):
            first.wait_for(lambda: "again to abort" in first.said())
            os.killpg(first.process.pid, signal.SIGINT)
    if what == "worker":
        first.wait_for(lambda: "worker lost" in first.said())
        noticed = time.monotonic() - began
        code, body = first.end()
        return {"notice_seconds": noticed, "exit_code": code, "digest": body and body["digest"]}
    code, body = first.end()
    return {
        "notice_seconds": time.monotonic() - began,
        "exit_code": code,
        "digest": body and body.get("digest"),
    }


def _taken_over(first, plan, settings, environment):
    """The driver stops, is taken for dead, and comes back when another has finished its study."""
    _stop_between_records(first)
    began = time.monotonic()
    second = Driver(plan, first.study, *settings, environment=environment)
    try:
        code, body = second.end()
        assert code == 75, "the study is held"
        assert f"pid {first.process.pid}" in body["message"]
        noticed = time.monotonic() - began
    finally:
        second.sweep_up()
    # what an operator does who knows that the holder will not come back
    (first.study / LOCK_NAME).unlink()
    third = Driver(plan, first.study, *settings, environment=environment)
    try:
        code, body = third.end()
        assert code == 0, third.said()
    finally:
        third.sweep_up()
    head = Ledger.read(first.study).head_hash
    os.kill(first.process.pid, signal.SIGCONT)
    code, refused = first.end(seconds=90)
    assert Ledger.read(first.study).head_hash == head, "a stale driver wrote"
    return {
        "notice_seconds": noticed,
        "exit_code": code,
        "digest": body["digest"],
        "stale_error": refused["error"],
    }


def _stop_between_records(driver):
    """SIGSTOP, but not while SQLite's lock is held: that would keep everybody out until the process
    ends.
    """
    while True:
        os.kill(driver.process.pid, signal.SIGSTOP)
        connection = sqlite3.connect(driver.study / LEDGER_NAME, timeout=0, isolation_level=None)
        try:
            connection.execute("BEGIN IMMEDIATE")
            connection.execute("ROLLBACK")
            return
        except sqlite3.OperationalError:
            os.kill(driver.process.pid, signal.SIGCONT)
            time.sleep(0.01)
        finally:
            connection.close()


def frozen_digest(study):
    """The digest of the study's frozen config, gates accepted as they are."""
    code, body = ask("freeze", study)
    if code in (3, 4):
        closed = [
            gate["name"] for gate in ask("status", study)[1]["gates"] if gate["outcome"] != "passed"
        ]
        accepts = [part for gate in closed for part in ("--accept", gate)]
        code, body = ask("freeze", study, *accepts, "--reason", "a test of kills")
    assert code == 0, body
    return body["digest"]
