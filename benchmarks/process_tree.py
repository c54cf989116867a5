"""What a command costs with all that it starts, read from /proc: Linux only.

Processor time is that of every process below the command, looked at ten times a second; what one
used after the last look at it, 0.05 s on average, is not counted. Orphans are kept below us
(`PR_SET_CHILD_SUBREAPER`), or Ray's daemons would leave the tree.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import platform
import re
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import PIPE
from typing import IO, Any

LOOK_SECONDS, GONE_SECONDS = 0.1, 30.0
LIMIT_SECONDS = 120.0
"""That processes together may take, before they are held to hang."""
MOST_SAID = 2000
"""Characters kept of why a process ended."""
_PR_SET_CHILD_SUBREAPER = 36
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(slots=True)
class Cost:
    """Of one command that has ended well."""

    seconds: float = 0.0
    """Until it ended itself."""
    cpu_seconds: float = 0.0
    """User and system time of the whole tree, until the last of it was gone."""
    peak_rss_mb: float = 0.0
    """Of the command's own process."""
    began: float = 0.0
    """`time.time()`."""
    ended: float = 0.0
    marked: float = math.nan
    """`time.time()` at which its output held the mark."""
    looks: list[tuple[float, float]] = field(default_factory=list)
    """(`time.time()`, processor seconds of the tree until then)."""

    def cpu_seconds_at(self, moment: float) -> float:
        """Processor seconds of the tree until `moment`."""
        return max((cpu for when, cpu in self.looks if when <= moment), default=0.0)


def own_peak_mb() -> float:
    """Of this process, since its program began: `ru_maxrss` would count what the process before
    `exec` had.
    """
    return int(re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[0]) / 1024


def measured(
    command: Sequence[object], environment: Mapping[str, str], log: Path, mark: str = ""
) -> Cost:
    """Run a command to its end, its output into `log`, watched for a `mark`.

    Raises:
        RuntimeError: it failed; the message ends with the last lines of its output.
    """
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    cost, seen = Cost(began=time.time()), dict[tuple[int, str], int]()
    with log.open("w") as said:
        process = subprocess.Popen(
            list(map(str, command)), stdout=said, stderr=said, env={**os.environ, **environment}
        )
        # Not taken in before it was looked at: the dead keep their times.
        alive = True
        while alive:
            alive = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
            _look(cost, seen, process.pid)
            if held := re.search(
                r"VmHWM:\s+(\d+)", Path(f"/proc/{process.pid}/status").read_text()
            ):
                cost.peak_rss_mb = int(held[1]) / 1024
            if mark and math.isnan(cost.marked) and mark in log.read_text():
                cost.marked = time.time()
            cost.ended = time.time()
            time.sleep(LOOK_SECONDS if alive else 0)
    cost.seconds = cost.ended - cost.began
    while _look(cost, seen, process.pid) and time.time() < cost.ended + GONE_SECONDS:
        time.sleep(LOOK_SECONDS)
    process.wait()
    cost.cpu_seconds = cost.looks[-1][1]
    if process.returncode:
        raise RuntimeError(
            f"exit code {process.returncode}: {' '.join(log.read_text().splitlines()[-6:])}"
        )
    return cost


def _look(cost: Cost, seen: dict[tuple[int, str], int], command: int) -> int:
    """Note what the processes below us have used so far, and bury dead orphans; how many live."""
    parents, used, alive = {}, {}, 0
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            with contextlib.suppress(OSError):
                fields = (path / "stat").read_text().rpartition(")")[2].split()
                pid = int(path.name)
                parents[pid] = int(fields[1])
                used[pid] = (fields[19], int(fields[11]) + int(fields[12]), fields[0])
    for pid, (born, ticks, state) in used.items():
        above = pid
        while above in parents and above != os.getpid():
            above = parents[above]
        if above != os.getpid() or pid == above:
            continue
        seen[pid, born] = ticks
        alive += state != "Z"
        if state == "Z" and parents[pid] == os.getpid() and pid != command:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
    cost.looks.append((time.time(), sum(seen.values()) / _TICKS))
    return alive


def together(
    command: Sequence[object],
    numbers: Sequence[int],
    *,
    environment: Mapping[str, str] | None = None,
    limit_seconds: float = LIMIT_SECONDS,
) -> tuple[list[float], float]:
    """For each of `numbers`, the sum of what so many processes of a command say when let go at
    once; and seconds until all were ready. The processes are the same: those that are not let go
    wait.

    Each says "ready"; then, to every line that it reads, a number. It ends when there are no more
    lines.

    Raises:
        RuntimeError: one of them ended without an answer, or all were not done within
            `limit_seconds`, and why.
    """
    began, sums = time.monotonic(), []
    with contextlib.ExitStack() as stack:
        started: list[tuple[subprocess.Popen[str], IO[str]]] = []

        def stop() -> None:
            for one, _ in started:
                one.kill()

        guard = threading.Timer(limit_seconds, stop)
        try:
            for _ in range(max(numbers)):
                said: IO[str] = stack.enter_context(tempfile.TemporaryFile("w+"))
                # A pipe that nobody reads would stop who writes much.
                one = subprocess.Popen(
                    list(map(str, command)),
                    stdin=PIPE,
                    stdout=PIPE,
                    stderr=said,
                    text=True,
                    env={**os.environ, **(environment or {})},
                )
                started.append((one, said))
            guard.start()
            for one, said in started:
                _answer(one, said, began + limit_seconds)
            start_seconds = time.monotonic() - began
            for number in numbers:
                for one, _ in started[:number]:
                    with contextlib.suppress(BrokenPipeError):  # its answer will be missing
                        assert one.stdin is not None
                        one.stdin.write("go\n")
                        one.stdin.flush()
                sums.append(
                    sum(
                        float(_answer(one, said, began + limit_seconds))
                        for one, said in started[:number]
                    )
                )
            for one, _ in started:
                one.communicate()
        finally:
            guard.cancel()
            stop()
            for one, _ in started:
                one.communicate()
    return sums, start_seconds


def _answer(one: subprocess.Popen[str], said: IO[str], until: float) -> str:
    """The next line of its output; `until`: when it is killed, as `time.monotonic()`."""
    assert one.stdout is not None
    if line := one.stdout.readline():
        return line
    code = one.wait()
    said.seek(0)
    lines = said.read()[-MOST_SAID:].splitlines() or ["it said nothing"]
    ended = "killed, for the time is up" if time.monotonic() > until else f"exit code {code}"
    raise RuntimeError(
        "\n".join([f"a process ended without an answer, {ended}: {lines[-1]}", *lines[:-1]])
    )


def machine() -> dict[str, Any]:
    """What the figures were taken on."""
    info = Path("/proc/cpuinfo").read_text()
    named = re.search(r"model name\s*:\s*(.+)", info)
    flags = set((re.search(r"flags\s*:\s*(.+)", info) or ["", ""])[1].split())
    return {
        "cpu": named[1] if named else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "bfloat16": sorted(flags & {"avx512_bf16", "amx_bf16"}),
        "load_average": os.getloadavg()[0],
        "python": platform.python_version(),
    }
