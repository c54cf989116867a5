"""Why a run, a worker or an attempt at the main run failed: one word for it, and what to do.
Standard library only.

The one classifier: of an exception raised in this process (`classify`), and of a process that is
gone, by its log and its exit code (`crash_of`). Sweeps and the main run's supervisor read the same
table and the same patterns.
"""

from __future__ import annotations

import contextlib
import re
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from proxies.core.errors import ExitCode
from proxies.core.plain_files import open_plain
from proxies.core.redaction import LineRedactor, redacted

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
"""`error` is whatever none of the others is: an exception in our own code, say, or a result that is
none."""


@dataclass(frozen=True, slots=True)
class FailureKind:
    """What one cause means."""

    words: str
    """The cause in plain words."""
    advice: str
    """What to do when a proxy run failed."""
    launch_advice: str = ""
    """What to do when the main run failed, if that differs."""
    exit_code: int = ExitCode.INPUT
    """Exit code of a launch that gave up: 2 if the machine, the data, or the user's code must be
    fixed, 130 if the same command may succeed later, 1 if it may be a bug of forerun."""
    passes: bool = False
    """It may go away by itself a little later: failing at the same step twice proves nothing."""


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
        passes=True,
    ),
    "crashed": FailureKind(
        "crashed", "its last lines of output show where, usually in native code"
    ),
    "lost_worker": FailureKind(
        "worker lost", "the system log (dmesg, or the scheduler's log) shows what ended its process"
    ),
    "killed": FailureKind(
        "killed from outside",
        "the system log (dmesg, or the scheduler's log) shows what ended its process",
        exit_code=ExitCode.INTERRUPTED,
        passes=True,
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
        passes=True,
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
"""In order: where several ranks of one worker fail, the first of these counts."""

TAIL_BYTES = 2048
_TAIL_LINES = 20
_DETAIL_CHARS = 2000
_MOST_READ_BYTES = 256 * 2**10
_PATTERNS: dict[Cause, re.Pattern[str]] = {
    "out_of_memory": re.compile(
        r"OutOfMemoryError|(?:out of|not enough) memory|can(?:'t|not) allocate "
        r"memory|CUBLAS_STATUS_ALLOC_FAILED",
        re.I,
    ),
    # The last is torch's, of a write that was cut short.
    "disk_full": re.compile(
        r"No space left on device|Disk quota exceeded|File too large|unexpected pos \d"
    ),
    "no_device": re.compile(
        r"no CUDA-capable device|No CUDA GPUs are available|invalid device ordinal|CUDA driver "
        r"version is insufficient"
        r"|uncorrectable ECC|GPU (?:is lost|has fallen off the bus)",
        re.I,
    ),
    "port": re.compile(
        r"EADDRINUSE|address already in use|Rendezvous\w*Error|The client socket has (?:timed "
        r"out|failed to connect)"
        r"|DistNetworkError|DistStoreError",
        re.I,
    ),
}
_CRASHED = re.compile(
    r"^(?:Fatal Python error:|.*\*\*\* SIG(?:SEGV|BUS|FPE|ILL|ABRT) received at)", re.M
)
"""As Python's faulthandler says it, and Ray's own handler."""
_EXITED = re.compile(r"exitcode\s*:\s*-(\d+)\b")
"""A rank that a signal ended, in torchrun's summary."""
_RAISED = re.compile(
    r"^(?:\[rank\d+\]:\s*)?((?:\w+\.)*\w*(?:Error|Exception|Interrupt)): ?(.*)$", re.M
)
_AFTERMATH = re.compile(
    r"ChildFailedError|SignalException|Connection (?:closed|reset)|gloo|NCCL", re.I
)
"""What the other ranks and torchrun say once one is gone."""


def cause_in(text: str) -> tuple[Cause, str] | None:
    """What the machine lacked, if a message or a log says so, and the line that does."""
    for cause, pattern in _PATTERNS.items():
        if found := pattern.search(text):
            end = text.find("\n", found.start())
            return cause, text[text.rfind("\n", 0, found.start()) + 1 : end if end >= 0 else None]
    return None


def classify(error: BaseException) -> Cause:
    """The cause of an exception. An error may name its own, as `cause`.

    A RuntimeError that names none has that of the error it came up beside: where memory runs out
    while a CUDA graph is recorded, torch ends the recording, and what it raises says of that alone.
    """
    return _root(error)[0]


def _root(error: BaseException) -> tuple[Cause, BaseException]:
    """The cause of an exception, and which of its chain names it: itself, if none does."""
    at: BaseException | None = error
    while at is not None:
        if (cause := _own_cause(at)) != "error":
            return cause, at
        beside = at.__cause__ or (None if at.__suppress_context__ else at.__context__)
        at = beside if isinstance(at, RuntimeError) else None
    return "error", error


def _own_cause(error: BaseException) -> Cause:
    own = getattr(error, "cause", None)
    if isinstance(own, str) and own in CAUSES:
        return own
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return "out_of_memory"
    found = cause_in(str(error)) if isinstance(error, RuntimeError | OSError) else None
    return found[0] if found else "error"


def crashed(log: str) -> bool:
    """Whether a process says in its log that a signal of its own ends it; of a kill from outside it
    says nothing.
    """
    return _CRASHED.search(log) is not None


def described(error: BaseException) -> str:
    """An error in words, without secrets: an unclassified one with its type, for it may say little
    else.
    """
    cause, error = _root(error)
    text = str(error).strip()
    if cause == "out_of_memory":
        text = (text or "no memory left").splitlines()[0]  # torch goes on with what it advises
    if cause == "error" or not text:
        text = f"{type(error).__name__}: {text}".rstrip(": ")
    return redacted(text)[:_DETAIL_CHARS]


@dataclass(frozen=True, kw_only=True, slots=True)
class Crash:
    """How an attempt at the main run died."""

    cause: Cause
    step: int | None
    """The last one it logged; None: it came to none."""
    detail: str
    """What was seen of the cause: one line."""
    log_tail: str
    """The log's last lines, without what looks like a secret."""

    @property
    def words(self) -> str:
        """The cause and where, for a sentence."""
        at = "before its first step" if self.step is None else f"after step {self.step}"
        return f"{CAUSES[self.cause].words} {at}" + (f" ({self.detail})" if self.detail else "")


def crash_of(
    log: str, *, step: int | None, exit_code: int, hung: str = "", num_oom_kills: int = 0
) -> Crash:
    """How an attempt died.

    Args:
        log: what it wrote, the end of it.
        step: the last it logged.
        exit_code: of its own process; below 0, a signal's number.
        hung: why the watchdog ended it; empty if it did not.
        num_oom_kills: processes that the kernel killed for memory meanwhile.
    """
    cause, detail = _cause_of_death(log, exit_code, num_oom_kills)
    if hung:
        cause, detail = "hung", hung
    shown = "".join(c for c in detail if c.isprintable()).strip()
    return Crash(cause=cause, step=step, detail=redacted(shown)[:300], log_tail=log_tail(log))


def _cause_of_death(log: str, exit_code: int, num_oom_kills: int) -> tuple[Cause, str]:
    if found := cause_in(log):
        return found
    if num_oom_kills:
        return "out_of_memory", "the kernel killed a process for memory"
    raised = list(_RAISED.finditer(log))
    own = [match for match in raised if not _AFTERMATH.search(match[0])]
    signals = [int(found[1]) for found in _EXITED.finditer(log)]
    if not signals and (number := signal_of(exit_code)):
        signals = [number]
    if signals and not own:
        outside = {signal.SIGKILL, signal.SIGTERM}.issuperset(signals)
        return (
            "killed" if outside else "crashed",
            f"by signal {max(set(signals) - {9, 15}, default=signals[0])}",
        )
    said = (own or raised)[:1]
    return "error", f"{said[0][1]}: {said[0][2]}" if said else f"exit code {exit_code}"


def signal_of(exit_code: int) -> int:
    """Return the number of the signal that ended a process, also from a shell's exit code (137:
    SIGKILL); 0 if none.
    """
    if exit_code < 0:
        return -exit_code
    signals_in_exit_codes = (signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV, signal.SIGABRT)
    return next((int(number) for number in signals_in_exit_codes if exit_code == 128 + number), 0)


def end_of(path: Path, since_bytes: int) -> str:
    """What was written into a log past `since_bytes`, its last part if that is much."""
    try:
        with open_plain(path) as file:
            size = file.seek(0, 2)
            file.seek(max(since_bytes, size - _MOST_READ_BYTES))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def log_tail(text: str) -> str:
    """The last lines of a log, at most `TAIL_BYTES` bytes, control characters and what looks like a
    secret removed.
    """
    lines = ["".join(c for c in line if c.isprintable() or c == "\t") for line in text.splitlines()]
    lines = [*map(LineRedactor(), (line.rstrip() for line in lines if line.strip()))][-_TAIL_LINES:]
    tail = "\n".join(lines).encode()[-TAIL_BYTES:]
    return tail.decode(errors="ignore")


def oom_kills() -> int:
    """Processes of this machine (or container) that the kernel has killed for memory so far; 0
    where none can be seen.

    Counted for our own control group (`memory.events`, cgroup v2) and those below it.
    """
    counts = [0]
    for path in _oom_counters():
        with contextlib.suppress(OSError, ValueError):
            found = dict(line.split() for line in path.read_text().splitlines())
            counts.append(int(found.get("oom_kill", 0)))
    return max(counts)


def _oom_counters() -> list[Path]:
    root = Path("/sys/fs/cgroup")
    paths = [root / "memory.events"]
    with contextlib.suppress(OSError):
        own = Path("/proc/self/cgroup").read_text().splitlines()
        paths += [
            root / line[len("0::") :].strip("/") / "memory.events"
            for line in own
            if line.startswith("0::")
        ]
    return paths
