"""Measure the cost of a command with all processes that it starts, from /proc (Linux only).

Processor time is that of every process below the command, read ten times a second. The time that a
process uses after its last reading, 0.05 s on average, is lost. Orphans stay below this process
(`PR_SET_CHILD_SUBREAPER`), because Ray's daemons would leave the tree otherwise.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import re
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import PIPE
from typing import IO

READING_SECONDS = 0.1
"""Seconds between two readings of the process times."""
MAX_EXIT_SECONDS = 30.0
"""Time limit for processes that outlive the command, in seconds."""
TIMEOUT_SECONDS = 120.0
"""Time limit of processes that run together, in seconds."""
MAX_MESSAGE_CHARS = 2000
"""Characters kept of a failed process's output, from its end."""
_PR_SET_CHILD_SUBREAPER = 36  # from linux/prctl.h
_TICKS = os.sysconf("SC_CLK_TCK")  # clock ticks per second


@dataclass(slots=True)
class Cost:
    """Cost of one command that succeeded."""

    seconds: float = 0.0
    """Wall time until the command ended."""
    cpu_seconds: float = 0.0
    """User and system time of the whole tree, until its last process was gone."""
    peak_rss_mb: float = 0.0
    """Peak memory of the command's own process."""
    began: float = 0.0
    """Start of the command, as `time.time()`."""
    ended: float = 0.0
    """End of the command, as `time.time()`."""
    marked: float = math.nan
    """Time at which the output contained the mark, as `time.time()`."""
    readings: list[tuple[float, float]] = field(default_factory=list)
    """Pairs of `time.time()` and the processor seconds of the tree until then."""

    def find_cpu_seconds(self, moment: float) -> float:
        """Return the processor seconds of the tree until `moment`."""
        return max((cpu for when, cpu in self.readings if when <= moment), default=0.0)


def read_peak_memory_mb() -> float:
    """Return the peak memory of this process in MB since its program started.

    `ru_maxrss` would count the memory that the process had before `exec`.
    """
    return int(re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[0]) / 1024


def measure_command(
    command: Sequence[object], environment: Mapping[str, str], log: Path, mark: str = ""
) -> Cost:
    """Run a command to its end and return its cost.

    Args:
        command: Program and arguments.
        environment: Variables added to this process's environment.
        log: File for the output.
        mark: Text in the output whose time is recorded.

    Raises:
        RuntimeError: The command failed. The message ends with the last lines of its output.
    """
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    cost, ticks_by_process = Cost(began=time.time()), dict[tuple[int, str], int]()
    with log.open("w") as output:
        process = subprocess.Popen(
            list(map(str, command)), stdout=output, stderr=output, env={**os.environ, **environment}
        )
        # Read the times before waiting for the process: they are gone once it has been reaped.
        alive = True
        while alive:
            alive = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
            _record_usage(cost, ticks_by_process, process.pid)
            if peak := re.search(
                r"VmHWM:\s+(\d+)", Path(f"/proc/{process.pid}/status").read_text()
            ):
                cost.peak_rss_mb = int(peak[1]) / 1024
            if mark and math.isnan(cost.marked) and mark in log.read_text():
                cost.marked = time.time()
            cost.ended = time.time()
            time.sleep(READING_SECONDS if alive else 0)
    cost.seconds = cost.ended - cost.began
    while (
        _record_usage(cost, ticks_by_process, process.pid)
        and time.time() < cost.ended + MAX_EXIT_SECONDS
    ):
        time.sleep(READING_SECONDS)
    process.wait()
    cost.cpu_seconds = cost.readings[-1][1]
    if process.returncode:
        raise RuntimeError(
            f"exit code {process.returncode}: {' '.join(log.read_text().splitlines()[-6:])}"
        )
    return cost


def _record_usage(
    cost: Cost, ticks_by_process: dict[tuple[int, str], int], command_pid: int
) -> int:
    """Add a reading of all processes below this one, and return how many of them are alive.

    Orphans that have ended are reaped.
    """
    # Parent and processor ticks of every process on the machine
    parents, usage, alive = {}, {}, 0
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            with contextlib.suppress(OSError):
                # Fields after the name, by proc(5): state, parent, ..., user and system ticks at
                # 11 and 12, ..., start time at 19
                fields = (path / "stat").read_text().rpartition(")")[2].split()
                state, parent, user_ticks, system_ticks, start = (
                    fields[index] for index in (0, 1, 11, 12, 19)
                )
                pid = int(path.name)
                parents[pid] = int(parent)
                usage[pid] = (start, int(user_ticks) + int(system_ticks), state)
    # Processes that descend from this one
    for pid, (start, ticks, state) in usage.items():
        ancestor = pid
        while ancestor in parents and ancestor != os.getpid():
            ancestor = parents[ancestor]
        if ancestor != os.getpid() or pid == ancestor:
            continue
        ticks_by_process[pid, start] = ticks  # a process id may be used again
        alive += state != "Z"
        if state == "Z" and parents[pid] == os.getpid() and pid != command_pid:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
    cost.readings.append((time.time(), sum(ticks_by_process.values()) / _TICKS))
    return alive


def run_together(
    command: Sequence[object],
    numbers: Sequence[int],
    *,
    environment: Mapping[str, str] | None = None,
    limit_seconds: float = TIMEOUT_SECONDS,
) -> tuple[list[float], float]:
    """Run several processes of a command at once and return the sums of their answers.

    Each process prints "ready", then a number for every line that it reads, and ends when there are
    no more lines. All processes start first; the processes that a round does not use wait.

    Args:
        command: Program and arguments.
        numbers: Number of processes to use at once in each round.
        environment: Variables added to this process's environment.
        limit_seconds: Time limit for everything.

    Returns:
        The sum of the answers for each of `numbers`, and the seconds until all were ready.

    Raises:
        RuntimeError: A process ended without an answer, or the time limit was reached.
    """
    began, sums = time.monotonic(), []
    with contextlib.ExitStack() as stack:
        started: list[tuple[subprocess.Popen[str], IO[str]]] = []

        def stop() -> None:
            for process, _ in started:
                process.kill()

        guard = threading.Timer(limit_seconds, stop)
        try:
            for _ in range(max(numbers)):
                errors: IO[str] = stack.enter_context(tempfile.TemporaryFile("w+"))
                started.append((_start_process(command, environment or {}, errors), errors))
            guard.start()
            for process, errors in started:
                _read_answer(process, errors, began + limit_seconds)
            start_seconds = time.monotonic() - began
            for number in numbers:
                for process, _ in started[:number]:
                    _send_line(process)
                sums.append(
                    sum(
                        float(_read_answer(process, errors, began + limit_seconds))
                        for process, errors in started[:number]
                    )
                )
            for process, _ in started:
                process.communicate()
        finally:
            guard.cancel()
            stop()
            for process, _ in started:
                process.communicate()
    return sums, start_seconds


def _start_process(
    command: Sequence[object], environment: Mapping[str, str], errors: IO[str]
) -> subprocess.Popen[str]:
    """Start a process that answers lines.

    Its errors go to a file, because a process blocks on a full pipe that nobody reads.
    """
    return subprocess.Popen(
        list(map(str, command)),
        stdin=PIPE,
        stdout=PIPE,
        stderr=errors,
        text=True,
        env={**os.environ, **environment},
    )


def _send_line(process: subprocess.Popen[str]) -> None:
    """Ask a process for its next answer; a process that has ended is noticed by the answer."""
    with contextlib.suppress(BrokenPipeError):
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()


def _read_answer(process: subprocess.Popen[str], errors: IO[str], deadline: float) -> str:
    """Return the next line of a process that is killed at `deadline` (`time.monotonic()`)."""
    assert process.stdout is not None
    if line := process.stdout.readline():
        return line
    code = process.wait()
    errors.seek(0)
    lines = errors.read()[-MAX_MESSAGE_CHARS:].splitlines() or ["no output"]
    ended = "killed at the time limit" if time.monotonic() > deadline else f"exit code {code}"
    raise RuntimeError(
        "\n".join([f"a process ended without an answer, {ended}: {lines[-1]}", *lines[:-1]])
    )
