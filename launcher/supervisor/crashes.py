"""Why an attempt at a main run died, in a word, in words, and what to do: from what its log and its processes say."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from sweeps.run.causes import log_tail
from sweeps.run.redaction import redacted

Cause = Literal["hung", "out_of_memory", "no_device", "disk_full", "port", "killed", "error"]
"""`error` is whatever none of the others is."""
CAUSES: tuple[Cause, ...] = get_args(Cause)

WORDS: dict[Cause, str] = {
    "hung": "hung",
    "out_of_memory": "out of memory",
    "no_device": "a GPU is missing or lost",
    "disk_full": "the disk is full",
    "port": "the ranks did not meet",
    "killed": "killed from outside",
    "error": "crashed",
}
ADVICE: dict[Cause, str] = {
    "hung": "the stacks in the log say where each rank waits: a dead link, a stuck device, a deadlock, a slow disk",
    "out_of_memory": "freeze with launch.microbatch_sequences smaller, launch.activation_checkpointing, or more ranks",
    "no_device": "`forerun doctor` and `nvidia-smi` show what is there; take the node out, or free the device",
    "disk_full": "free space; the last good checkpoint is untouched",
    "port": "name a free port and a host that every node reaches (--rdzv-endpoint HOST:PORT)",
    "killed": "the system's log (dmesg, or the scheduler's) says who ended its process",
    "error": "the last lines of the log say more",
}
"""What to do."""
PASSING: frozenset[Cause] = frozenset(("port", "killed", "hung"))
"""May be gone by themselves a little later: the same step twice proves nothing."""
EXIT_CODES: dict[Cause, int] = {
    "hung": 130, "out_of_memory": 2, "no_device": 2, "disk_full": 2, "port": 2, "killed": 130, "error": 1,
}  # fmt: skip
"""Of a launch that gave up: the machine's fault is bad input, what a restart may mend is interrupted and resumable."""

_MOST_READ_BYTES = 256 * 2**10
_PATTERNS: tuple[tuple[Cause, re.Pattern[str]], ...] = (
    ("out_of_memory", re.compile(r"OutOfMemoryError|out of memory|can(?:'t|not) allocate memory", re.I)),
    ("disk_full", re.compile(r"No space left on device|Disk quota exceeded")),
    ("no_device", re.compile(
        r"no CUDA-capable device|No CUDA GPUs are available|invalid device ordinal|CUDA driver version is insufficient"
        r"|uncorrectable ECC|GPU (?:is lost|has fallen off the bus)", re.I)),
    ("port", re.compile(
        r"EADDRINUSE|address already in use|Rendezvous\w*Error|The client socket has (?:timed out|failed to connect)"
        r"|DistNetworkError|DistStoreError", re.I)),
)  # fmt: skip
_EXITED = re.compile(r"exitcode\s*:\s*-(\d+)\b")
"""A rank that a signal ended, in torchrun's summary."""
_RAISED = re.compile(r"^(?:\[rank\d+\]:\s*)?((?:\w+\.)*\w*(?:Error|Exception|Interrupt)): ?(.*)$", re.M)
_AFTERMATH = re.compile(r"ChildFailedError|SignalException|Connection (?:closed|reset)|gloo|NCCL", re.I)
"""What the other ranks and torchrun say once one is gone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Crash:
    """How an attempt died."""

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
        return f"{WORDS[self.cause]} {at}" + (f" ({self.detail})" if self.detail else "")


def crash_of(log: str, *, step: int | None, exit_code: int, hung: str = "", num_oom_kills: int = 0) -> Crash:
    """How an attempt died.

    Args:
        log: what it wrote, the end of it.
        step: the last it logged.
        exit_code: of its own process; below 0, a signal's number.
        hung: why the watchdog ended it; empty if it did not.
        num_oom_kills: processes that the kernel killed for memory meanwhile.
    """
    cause, detail = _cause(log, exit_code, num_oom_kills)
    if hung:
        cause, detail = "hung", hung
    shown = "".join(c for c in detail if c.isprintable()).strip()
    return Crash(cause=cause, step=step, detail=redacted(shown)[:300], log_tail=log_tail(log))


def _cause(log: str, exit_code: int, num_oom_kills: int) -> tuple[Cause, str]:
    for cause, pattern in _PATTERNS:
        if found := pattern.search(log):
            return cause, _line_of(log, found.start())
    if num_oom_kills:
        return "out_of_memory", "the kernel killed a process for memory"
    raised = list(_RAISED.finditer(log))
    own = [found for found in raised if not _AFTERMATH.search(found[0])]
    signals = [int(found[1]) for found in _EXITED.finditer(log)] or ([-exit_code] if exit_code < 0 else [])
    if signals and not own:
        outside = {signal.SIGKILL, signal.SIGTERM}.issuperset(signals)
        return "killed" if outside else "error", f"by signal {max(set(signals) - {9, 15}, default=signals[0])}"
    said = (own or raised)[:1]
    return "error", f"{said[0][1]}: {said[0][2]}" if said else f"exit code {exit_code}"


def _line_of(text: str, at: int) -> str:
    start = text.rfind("\n", 0, at) + 1
    end = text.find("\n", at)
    return text[start : end if end >= 0 else None]


def end_of(path: Path, since_bytes: int) -> str:
    """What was written into a log past `since_bytes`, its last part if that is much."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(since_bytes, size - _MOST_READ_BYTES))
            return file.read().decode(errors="replace")
    except OSError:
        return ""
