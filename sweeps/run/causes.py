"""Why an execution was lost, in one word, and what to do about it. Standard library only."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Literal, get_args

from sweeps.run.redaction import LineRedactor, redacted

Cause = Literal["out_of_memory", "crashed", "lost_worker", "preempted", "hung", "bad_data", "user_code", "error"]
"""`error` is whatever none of the others is: an exception in our own code, say, or a result that is none."""
CAUSES: tuple[Cause, ...] = get_args(Cause)

WORDS: dict[Cause, str] = {
    "out_of_memory": "out of memory",
    "crashed": "crashed",
    "lost_worker": "worker lost",
    "preempted": "pre-empted",
    "hung": "hung",
    "bad_data": "bad data",
    "user_code": "your code failed",
    "error": "error",
}
"""As people say it."""
ADVICE: dict[Cause, str] = {
    "out_of_memory": "give it more memory, fewer workers beside it (cluster.num_workers), or a smaller model",
    "crashed": "what the worker printed last says where, in native code as a rule",
    "lost_worker": "the system's log (dmesg, or the scheduler's) says who ended its process",
    "preempted": "nothing to mend: it goes on from its last checkpoint",
    "hung": "look for a deadlock, a dead network disk or a stuck device",
    "bad_data": "mend the corpus, then give the same command again",
    "user_code": "mend it, then give the same command again",
    "error": "what the worker printed last may say more",
}
"""What to do."""

TAIL_BYTES = 2048
_TAIL_LINES = 20
_DETAIL_CHARS = 2000
_CRASHED = re.compile(r"^(?:Fatal Python error:|.*\*\*\* SIG(?:SEGV|BUS|FPE|ILL|ABRT) received at)", re.M)
"""As Python's faulthandler says it, and Ray's own handler."""
_OUT_OF_MEMORY = re.compile(r"can't allocate memory|out of memory|cannot allocate memory|not enough memory", re.I)


def classify(error: BaseException) -> Cause:
    """The cause of an exception raised in a worker.

    An error may say its own, as `cause`. Out of memory is known by what torch, the CPU's allocator and the system say.
    """
    said = getattr(error, "cause", None)
    if (cause := next((known for known in CAUSES if known == said), None)) is not None:
        return cause
    name = type(error).__name__
    if isinstance(error, MemoryError) or name == "OutOfMemoryError":
        return "out_of_memory"
    if isinstance(error, RuntimeError | OSError) and _OUT_OF_MEMORY.search(str(error)):
        return "out_of_memory"
    return "error"


def crashed(log: str) -> bool:
    """Whether a process says in its log that a signal of its own ends it; of a kill from outside it says nothing."""
    return _CRASHED.search(log) is not None


def described(error: BaseException) -> str:
    """An error in words, without secrets: an unclassified one with its type, for it may say little else."""
    cause, text = classify(error), str(error).strip()
    if cause == "out_of_memory":
        text = (text or "no memory left").splitlines()[0]  # torch goes on with what it advises
    if cause == "error" or not text:
        text = f"{type(error).__name__}: {text}".rstrip(": ")
    return redacted(text)[:_DETAIL_CHARS]


def log_tail(text: str) -> str:
    """The last lines of a log, at most `TAIL_BYTES` bytes, control characters and what looks like a secret removed."""
    lines = ["".join(c for c in line if c.isprintable() or c == "\t") for line in text.splitlines()]
    lines = [*map(LineRedactor(), (line.rstrip() for line in lines if line.strip()))][-_TAIL_LINES:]
    tail = "\n".join(lines).encode()[-TAIL_BYTES:]
    return tail.decode(errors="ignore")


def oom_kills() -> int:
    """Processes of this machine (or container) that the kernel has killed for memory so far; 0 where none can be seen.

    Counted for our own control group and those below it: `memory.events` (cgroup v2), `memory.oom_control` (v1).
    """
    counts = [0]
    for path in _oom_counters():
        with contextlib.suppress(OSError, ValueError):
            for line in path.read_text().splitlines():
                name, _, number = line.partition(" ")
                if name == "oom_kill":
                    counts.append(int(number))
    return max(counts)


def _oom_counters() -> list[Path]:
    root = Path("/sys/fs/cgroup")
    paths = [root / "memory.events", root / "memory" / "memory.oom_control"]
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, folder = line.split(":", 2)
            if not controllers:
                paths.append(root / folder.strip("/") / "memory.events")
            elif "memory" in controllers.split(","):
                paths.append(root / "memory" / folder.strip("/") / "memory.oom_control")
    return paths
