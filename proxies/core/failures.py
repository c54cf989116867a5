"""Causes of failures of runs, workers, and main runs, and advice for each.

Sweeps and the main run's supervisor use the same table and the same patterns. `classify` finds the
cause of an exception in this process. `diagnose_crash` finds the cause of a process's end from its
log and its exit code.
"""

from __future__ import annotations

import contextlib
import re
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from forerun._proxies.core.errors import ExitCode
from forerun._proxies.core.plain_files import open_plain
from forerun._proxies.core.redaction import LineRedactor, redact

Cause = Literal[
    "out_of_memory",
    "no_device",
    "disk_full",
    "port",
    "crashed",
    "lost_worker",
    "killed",
    "preempted",
    "hung",
    "bad_data",
    "user_code",
    "error",
]
"""Cause of a failure. `error` is any other cause, such as an exception in forerun's own code."""


@dataclass(frozen=True, slots=True)
class FailureKind:
    """Description of a cause."""

    words: str
    """The cause in plain words."""
    advice: str
    """Advice if a proxy run failed."""
    launch_advice: str = ""
    """Advice if the main run failed; empty if it is the same."""
    exit_code: int = ExitCode.INPUT
    """Exit code of a launch that gave up: 2 if the machine, the data, or the user's code must be
    fixed, 130 if the same command may succeed later, 1 if it may be a bug of forerun."""
    is_transient: bool = False
    """Whether the cause may disappear by itself, so that two failures at the same step do not prove
    that a third will follow."""


_SYSTEM_LOG_ADVICE = "the system log (dmesg, or the scheduler's log) shows what ended its process"
CAUSES: dict[Cause, FailureKind] = {
    "out_of_memory": FailureKind(
        "out of memory",
        "give it more memory, fewer workers beside it (cluster.num_workers), or a smaller model",
        "freeze with a smaller launch.microbatch_sequences, launch.activation_checkpointing or "
        "more ranks",
    ),
    "no_device": FailureKind(
        "a GPU is missing or lost",
        "see what `forerun doctor` and `nvidia-smi` show; leave the node out, or free the device",
    ),
    "disk_full": FailureKind(
        "the disk is full",
        "free some space, then run the same command again",
        "free some space; the last good checkpoint is untouched",
    ),
    "port": FailureKind(
        "the ranks did not meet",
        "name a free port and a host that every node reaches (--rdzv-endpoint HOST:PORT)",
        is_transient=True,
    ),
    "crashed": FailureKind(
        "crashed", "its last lines of output show where, usually in native code"
    ),
    "lost_worker": FailureKind("worker lost", _SYSTEM_LOG_ADVICE),
    "killed": FailureKind(
        "killed from outside", _SYSTEM_LOG_ADVICE, exit_code=ExitCode.INTERRUPTED, is_transient=True
    ),
    "preempted": FailureKind(
        "pre-empted",
        "nothing to fix: it resumes from its last checkpoint",
        exit_code=ExitCode.INTERRUPTED,
    ),
    "hung": FailureKind(
        "hung",
        "look for a deadlock, a dead network disk or a stuck device",
        "the stacks in the log show where each rank waits: a dead link, a stuck device, a deadlock "
        "or a slow disk",
        exit_code=ExitCode.INTERRUPTED,
        is_transient=True,
    ),
    "bad_data": FailureKind("bad data", "fix the corpus, then run the same command again"),
    "user_code": FailureKind("your code failed", "fix it, then run the same command again"),
    "error": FailureKind(
        "error",
        "its last lines of output may show more",
        "the last lines of the log show more",
        exit_code=ExitCode.BUG,
    ),
}
"""Causes in order of precedence: of the causes of a worker's failed ranks, the first counts."""

TAIL_BYTES = 2048
"""Maximum size of the end of a log that is kept with a failure."""
_MAX_TAIL_LINES = 20
_MAX_ERROR_CHARS, _MAX_DETAIL_CHARS = 2000, 300
"""Maximum lengths of an exception in words, and of the evidence of a crash, which is one line."""
_MAX_READ_BYTES = 256 * 2**10
_PATTERNS: dict[Cause, re.Pattern[str]] = {
    "out_of_memory": re.compile(
        r"OutOfMemoryError|(?:out of|not enough) memory|can(?:'t|not) allocate memory"
        r"|CUBLAS_STATUS_ALLOC_FAILED",
        re.I,
    ),
    # torch reports a write that was cut short as "unexpected pos"
    "disk_full": re.compile(
        r"No space left on device|Disk quota exceeded|File too large|unexpected pos \d"
    ),
    "no_device": re.compile(
        r"no CUDA-capable device|No CUDA GPUs are available|invalid device ordinal"
        r"|CUDA driver version is insufficient|uncorrectable ECC"
        r"|GPU (?:is lost|has fallen off the bus)",
        re.I,
    ),
    "port": re.compile(
        r"EADDRINUSE|address already in use|Rendezvous\w*Error|DistNetworkError|DistStoreError"
        r"|The client socket has (?:timed out|failed to connect)",
        re.I,
    ),
}
"""Patterns of messages by the resource that the machine lacks. The first that matches counts."""
_CRASHED = re.compile(
    r"^(?:Fatal Python error:|.*\*\*\* SIG(?:SEGV|BUS|FPE|ILL|ABRT) received at)", re.M
)
"""Message of Python's faulthandler, and of Ray's handler."""
_RANK_SIGNAL = re.compile(r"exitcode\s*:\s*-(\d+)\b")
"""Signal that ended a rank, in torchrun's summary."""
_RAISED = re.compile(
    r"^(?:\[rank\d+\]:\s*)?((?:\w+\.)*\w*(?:Error|Exception|Interrupt)): ?(.*)$", re.M
)
"""Last line of a traceback, which may have the number of its rank before it."""
_AFTERMATH = re.compile(
    r"ChildFailedError|SignalException|Connection (?:closed|reset)|gloo|NCCL", re.I
)
"""Errors of torchrun and of the other ranks after one rank has ended."""


# ---- Exceptions of this process ----


def find_cause(text: str) -> tuple[Cause, str] | None:
    """Return the cause that a message names, one of `_PATTERNS`, and the line that names it; None
    if the text has no such line.
    """
    for cause, pattern in _PATTERNS.items():
        if match := pattern.search(text):
            start = text.rfind("\n", 0, match.start()) + 1
            return cause, text[start:].split("\n", 1)[0]
    return None


def classify(error: BaseException) -> Cause:
    """Return the cause of an exception, which may name its cause in an attribute `cause`.

    A RuntimeError without a cause of its own gets the cause of the error that was being handled
    when it was raised. For example, if memory runs out while a CUDA graph is recorded, torch raises
    an error about the recording alone.
    """
    return _find_root(error)[0]


def _find_root(error: BaseException) -> tuple[Cause, BaseException]:
    """Return the cause of an exception, and the exception of its chain that has this cause."""
    current: BaseException | None = error
    while current is not None:
        if (cause := _get_own_cause(current)) != "error":
            return cause, current
        if not isinstance(current, RuntimeError):
            break
        context = None if current.__suppress_context__ else current.__context__
        current = current.__cause__ or context
    return "error", error


def _get_own_cause(error: BaseException) -> Cause:
    """Return the cause of an exception without its chain."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, str) and cause in CAUSES:
        return cause
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return "out_of_memory"
    match = find_cause(str(error)) if isinstance(error, RuntimeError | OSError) else None
    return match[0] if match else "error"


def describe_error(error: BaseException) -> str:
    """Return an error in words, without secrets; with its type if the cause is not known."""
    cause, error = _find_root(error)
    text = str(error).strip()
    if cause == "out_of_memory":
        text = (text or "no memory left").splitlines()[0]  # torch's advice follows
    if cause == "error" or not text:
        text = f"{type(error).__name__}: {text}".rstrip(": ")
    return redact(text)[:_MAX_ERROR_CHARS]


# ---- Processes that ended ----


def has_crashed(log: str) -> bool:
    """Return whether a process wrote into its log that it ended by a signal of its own.

    A process that is killed from outside writes nothing.
    """
    return _CRASHED.search(log) is not None


@dataclass(frozen=True, kw_only=True, slots=True)
class Crash:
    """The end of an attempt at the main run, and its cause."""

    cause: Cause
    step: int | None
    """Last step that the attempt logged; None if it logged none."""
    detail: str
    """Evidence of the cause, in one line."""
    log_tail: str
    """Last lines of the log, without secrets."""

    @property
    def words(self) -> str:
        """The cause and the step, for a sentence."""
        place = "before its first step" if self.step is None else f"after step {self.step}"
        detail = f" ({self.detail})" if self.detail else ""
        return f"{CAUSES[self.cause].words} {place}{detail}"


def diagnose_crash(
    log: str, *, step: int | None, exit_code: int, hung: str = "", num_oom_kills: int = 0
) -> Crash:
    """Find out why an attempt ended.

    Args:
        log: The end of the attempt's log.
        step: Last step that the attempt logged.
        exit_code: Exit code of the attempt's process; if below 0, minus the number of a signal.
        hung: Reason why the watchdog ended the process as hung; empty if it did not.
        num_oom_kills: Number of processes that the kernel killed for memory during the attempt.
    """
    cause, detail = _find_cause_of_end(log, exit_code, num_oom_kills)
    if hung:
        cause, detail = "hung", hung
    detail = "".join(c for c in detail if c.isprintable()).strip()
    return Crash(
        cause=cause,
        step=step,
        detail=redact(detail)[:_MAX_DETAIL_CHARS],
        log_tail=get_log_tail(log),
    )


def _find_cause_of_end(log: str, exit_code: int, num_oom_kills: int) -> tuple[Cause, str]:
    """Return the cause of a process's end, and the evidence for it."""
    if match := find_cause(log):
        return match
    if num_oom_kills:
        return "out_of_memory", "the kernel killed a process for memory"
    raised = list(_RAISED.finditer(log))
    first_errors = [match for match in raised if not _AFTERMATH.search(match[0])]
    signals = [int(match[1]) for match in _RANK_SIGNAL.finditer(log)]
    if not signals and (number := get_signal(exit_code)):
        signals = [number]
    if signals and not first_errors:
        # SIGKILL and SIGTERM come from outside, also from torchrun after another rank has crashed
        crashes = set(signals) - {signal.SIGKILL, signal.SIGTERM}
        number = max(crashes, default=signals[0])
        return "crashed" if crashes else "killed", f"by signal {int(number)}"
    if not raised:
        return "error", f"exit code {exit_code}"
    error = (first_errors or raised)[0]
    return "error", f"{error[1]}: {error[2]}"


def get_signal(exit_code: int) -> int:
    """Return the number of the signal that ended a process; 0 if none did.

    A negative exit code is minus the number. A shell's exit code is 128 plus the number: 137 is
    SIGKILL.
    """
    if exit_code < 0:
        return -exit_code
    signals_in_exit_codes = (signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV, signal.SIGABRT)
    return next((int(number) for number in signals_in_exit_codes if exit_code == 128 + number), 0)


def read_log_end(path: Path, since_bytes: int) -> str:
    """Return the content of a log after its first `since_bytes`, at most its last 256 KiB."""
    try:
        with open_plain(path) as file:
            size = file.seek(0, 2)
            file.seek(max(since_bytes, size - _MAX_READ_BYTES))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def get_log_tail(text: str) -> str:
    """Return the last lines of a log, at most `TAIL_BYTES`, without secrets."""
    lines = [
        "".join(c for c in line if c.isprintable() or c == "\t").rstrip()
        for line in text.splitlines()
        if line.strip()
    ]
    lines = [*map(LineRedactor(), lines)][-_MAX_TAIL_LINES:]
    tail = "\n".join(lines).encode()[-TAIL_BYTES:]
    return tail.decode(errors="ignore")


def count_oom_kills() -> int:
    """Return the number of processes that the kernel has killed for memory; 0 if it is not known.

    The processes of this control group and those below it count (`memory.events`, cgroup v2).
    """
    counts = [0]
    for path in _list_oom_counters():
        with contextlib.suppress(OSError, ValueError):
            events = dict(line.split() for line in path.read_text().splitlines())
            counts.append(int(events.get("oom_kill", 0)))
    return max(counts)


def _list_oom_counters() -> list[Path]:
    """Return the files with the counts of the root and of this process's control group."""
    root = Path("/sys/fs/cgroup")
    groups = [""]
    with contextlib.suppress(OSError):
        lines = Path("/proc/self/cgroup").read_text().splitlines()
        groups += [line.removeprefix("0::").strip("/") for line in lines if line.startswith("0::")]
    return [root / group / "memory.events" for group in groups]
