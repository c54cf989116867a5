"""Helpers that run the tiny study with `forerun run` in a real process on real Ray, kill one of the
processes of that driver, and then run the study to the end.

A driver's processes are recognized by a mark in their environment, or by an open file in the
driver's temporary folder: Ray's agents write their titles over their environment.
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

from tiny_study import run_json
from waiting import wait_until

from forerun._sweeps.store.errors import SweepError
from forerun._sweeps.store.ledger import LEDGER_NAME, Ledger
from forerun._sweeps.store.lock import LOCK_NAME

MARK = "FORERUN_TEST_MARK"
"""Environment variable of a driver's processes; its value names the driver."""
RAY = ("--set", "cluster.backend=ray", "--set", "cluster.num_workers=2")
# Kind of process that Ray starts for the driver -> regular expression that finds its command line
PARTS = {
    "worker": r"^ray::RayWorker\.advance",
    "raylet": r"/raylet/raylet ",
    "gcs_server": r"/gcs_server ",
}


class Driver:
    """A `forerun run` process in its own process group."""

    def __init__(self, plan, study, *arguments, environment=(), verb="run"):
        self.study, self.mark = study, uuid.uuid4().hex
        command = [
            sys.executable,
            "-m",
            "forerun",
            verb,
            str(plan),
            "--study",
            str(study),
            "--json",
            *arguments,
        ]
        spy_environment = {
            "FORERUN_TEST_DIARY": str(get_diary_path(study)),
            "PYTHONPATH": str(Path(__file__).parent / "spy"),
        }
        environment = {
            **os.environ,
            **spy_environment,
            **dict(environment),
            MARK: self.mark,
            "OMP_NUM_THREADS": "1",
        }
        # Short, because Ray's socket paths lie below it and are limited in length.
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

    def read_stderr(self):
        """Return everything the driver has printed to stderr so far."""
        return self.errors.read_text(errors="replace")

    def list_processes(self):
        """Return the command lines of the live processes by pid, driver included."""
        mark = f"{MARK}={self.mark}".encode()
        command_lines = {}
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                if mark in (entry / "environ").read_bytes() or self._has_temporary_file(entry):
                    words = (entry / "cmdline").read_bytes().replace(b"\0", b" ")
                    command_lines[int(entry.name)] = words.decode()
            except OSError:
                continue
        if self.process.poll() is None:  # a new process may not show its environment yet
            command_lines.setdefault(self.process.pid, "driver")
        # A zombie has an empty command line.
        return {pid: line for pid, line in command_lines.items() if line}

    def _has_temporary_file(self, entry):
        """Return whether the process of an entry of /proc has a file of the temporary folder
        open.
        """
        return any(
            str(handle.readlink()).startswith(f"{self.temporary}/")
            for handle in (entry / "fd").iterdir()
        )

    def list_pids(self, part):
        """Return the process ids of one of PARTS."""
        return [pid for pid, line in self.list_processes().items() if re.search(PARTS[part], line)]

    def count_outcomes(self):
        return count_outcomes(self.study)

    def wait_for(self, condition, seconds=120.0):
        """Wait until `condition()` is true or the driver has ended; return the seconds waited."""
        began = time.monotonic()
        while not condition() and self.process.poll() is None:
            if time.monotonic() - began > seconds:
                raise TimeoutError(f"not within {seconds} s; stderr: {self.read_stderr()[-2000:]}")
            time.sleep(0.02)
        return time.monotonic() - began

    def wait_for_end(self, seconds=240.0):
        """Wait for the driver; return its exit code and the object on stdout, None if empty."""
        out, _ = self.process.communicate(timeout=seconds)
        return self.process.returncode, json.loads(out) if out.strip() else None

    def wait_until_gone(self, seconds=90.0):
        """Wait until none of the processes lives; return the seconds waited."""
        began = time.monotonic()
        while processes := self.list_processes():
            if time.monotonic() - began > seconds:
                raise TimeoutError(f"still running: {processes}")
            time.sleep(0.05)
        return time.monotonic() - began

    def sweep_up(self):
        """Kill every process that is left and remove the temporary folder."""
        for pid in self.list_processes():
            os.kill(pid, signal.SIGKILL)
        self.process.wait(timeout=10)
        if self.process.stdout is not None:
            self.process.stdout.close()
        shutil.rmtree(self.temporary, ignore_errors=True)


def get_diary_path(study):
    """Return the file in which workers note the runs that they begin."""
    return study.with_name(f"{study.name}-diary")


def count_repeated(study):
    """Return how many runs were begun again, counting each repetition; fail if a run that has a
    result was never begun.
    """
    begun = get_diary_path(study).read_text().split()
    assert set(begun) >= set(Ledger.read(study).get_results()), "a run is missing in the diary"
    return len(begun) - len(set(begun))


def count_outcomes(study):
    """Return the number of runs in the ledger with a result; 0 if there is no ledger yet."""
    try:
        return len(Ledger.read(study).get_results())
    except SweepError:
        return 0


def kill(plan, study, part, at_outcomes, *, environment=(), settings=RAY):
    """Run the study, kill one part after `at_outcomes` outcomes, and run it to the end.

    Args:
        plan: The plan file.
        study: The study folder.
        part: `worker`, `raylet`, `gcs_server` or `driver` (SIGKILL); `SIGTERM`, `SIGINT` or `SIGINT
            twice` (to the driver's process group, as a terminal sends it); `SIGSTOP` (another
            driver takes over, then the first one continues).
        at_outcomes: Outcomes in the ledger when the kill happens.
        environment: Environment variables of the driver.
        settings: Further arguments of `forerun run`.

    Returns:
        A row that says what was killed (`what`), how the first driver ended (`exit_code`, `said`:
        its stderr), the frozen `digest`, and the number of `drivers` that the study needed.
        `num_repeated` is the number of runs that were begun again. `notice_seconds` and
        `orphans_gone_seconds` are the times until the kill was noticed and no process was left.
    """
    first = Driver(plan, study, *settings, environment=environment)
    try:
        first.wait_for(lambda: first.count_outcomes() >= at_outcomes)
        assert first.process.poll() is None, first.read_stderr()
        row = {"what": part, "at_outcomes": first.count_outcomes()}
        row |= (
            _take_over(first, plan, settings, environment)
            if part == "SIGSTOP"
            else _kill_part(first, part)
        )
        row["orphans_gone_seconds"] = first.wait_until_gone()
        row["said"] = first.read_stderr()
        done_before = set(Ledger.read(study).get_results())
        begun_before = len(get_diary_path(study).read_text().split())
        num_drivers = 1 if row["exit_code"] == 0 else 2
        if num_drivers == 2 and part != "SIGSTOP":
            second = Driver(plan, study, *settings, environment=environment)
            try:
                code, body = second.wait_for_end()
                assert code == 0, second.read_stderr()
                second.wait_until_gone()
            finally:
                second.sweep_up()
            row["digest"] = body["digest"]
    finally:
        first.sweep_up()
    ledger = Ledger.read(study)
    assert done_before <= set(ledger.get_results()), "an outcome was lost"
    assert not done_before & set(get_diary_path(study).read_text().split()[begun_before:]), (
        "a finished run was run again"
    )
    assert [result for result in ledger.get_results().values() if result.status == "failed"] == []
    return {**row, "drivers": num_drivers, "num_repeated": count_repeated(study)}


def _kill_part(first, part):
    """Kill a part or send a signal; return how soon that was noticed, and how the driver ended."""
    began = time.monotonic()
    if part in PARTS:
        # Only a worker at work has the pattern in its title, and it may have ended its work between
        # two listings, so the pid comes from the listing that found it.
        pids = []

        def find_pids():
            pids[:] = first.list_pids(part)
            return bool(pids)

        first.wait_for(find_pids)
        os.kill(pids[0], signal.SIGKILL)
    elif part == "driver":
        first.process.kill()
    else:
        os.killpg(first.process.pid, getattr(signal, part.split()[0]))
        if part.endswith("twice"):
            first.wait_for(lambda: "again to abort" in first.read_stderr())
            os.killpg(first.process.pid, signal.SIGINT)
    if part == "worker":
        first.wait_for(lambda: "worker lost" in first.read_stderr())
        noticed = time.monotonic() - began
        code, body = first.wait_for_end()
        return {"notice_seconds": noticed, "exit_code": code, "digest": body and body["digest"]}
    code, body = first.wait_for_end()
    return {
        "notice_seconds": time.monotonic() - began,
        "exit_code": code,
        "digest": body and body.get("digest"),
    }


def _take_over(first, plan, settings, environment):
    """Stop the driver, let another finish its study, and continue the stopped one."""
    _stop_between_records(first)
    began = time.monotonic()
    second = Driver(plan, first.study, *settings, environment=environment)
    try:
        code, body = second.wait_for_end()
        assert code == 75, "the study is locked by the stopped driver"
        assert f"pid {first.process.pid}" in body["message"]
        noticed = time.monotonic() - began
    finally:
        second.sweep_up()
    # An operator who knows that the holder will not come back removes the lock.
    (first.study / LOCK_NAME).unlink()
    third = Driver(plan, first.study, *settings, environment=environment)
    try:
        code, body = third.wait_for_end()
        assert code == 0, third.read_stderr()
    finally:
        third.sweep_up()
    head = Ledger.read(first.study).head_hash
    os.kill(first.process.pid, signal.SIGCONT)
    code, refused = first.wait_for_end(seconds=90)
    assert Ledger.read(first.study).head_hash == head, "a stale driver wrote"
    return {
        "notice_seconds": noticed,
        "exit_code": code,
        "digest": body["digest"],
        "stale_error": refused["error"],
    }


def _stop_between_records(driver):
    """Stop the driver (SIGSTOP) at a moment when it does not hold SQLite's lock, because a stopped
    holder would block every other driver.
    """

    def stop_unless_locked():
        os.kill(driver.process.pid, signal.SIGSTOP)
        connection = sqlite3.connect(driver.study / LEDGER_NAME, timeout=0, isolation_level=None)
        try:
            connection.execute("BEGIN IMMEDIATE")
            connection.execute("ROLLBACK")
            return True
        except sqlite3.OperationalError:
            os.kill(driver.process.pid, signal.SIGCONT)
            return False
        finally:
            connection.close()

    wait_until(stop_unless_locked)


def freeze_accepting_gates(study):
    """Freeze the study, accepting every gate that is not passed; return the config's digest."""
    code, body = run_json("freeze", study)
    if code in (3, 4):
        closed = [
            gate["name"]
            for gate in run_json("status", study)[1]["gates"]
            if gate["outcome"] != "passed"
        ]
        accepts = [part for gate in closed for part in ("--accept", gate)]
        code, body = run_json("freeze", study, *accepts, "--reason", "a test of kills")
    assert code == 0, body
    return body["digest"]
