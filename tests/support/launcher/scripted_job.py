"""Helpers for tests that run a Python script in place of a trainer: the head of such a script, a
signal that is sent once a file exists, and a search for processes that were left behind.
"""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest
from waiting import wait_until

# `step` logs a step, `save` saves an empty checkpoint, and `end` writes the run's ending and exits.
# `count` is the number of earlier attempts.
SCRIPT_HEAD = """
import json, os, signal, sys, time
from pathlib import Path
run = Path(sys.argv[sys.argv.index("--out") + 1])
count = len(list(run.glob("began-*")))
(run / f"began-{count}").write_text(str(os.getpid()))
def step(number):
    line = {"step": number, "train_loss_nats": 2.5, "tokens": 256 * number, "tokens_per_second": 9.0, "seconds": 0.1}
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\\n")
def save(number):
    (run / "checkpoints" / f"step-{number:08d}").mkdir(parents=True)
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"event": "saved", "step": number, "seconds": 0.1, "wait_seconds": 0.0}) + "\\n")
def end(event="finished", code=0, number=12):
    lines = (run / "metrics.jsonl").read_text().splitlines() if (run / "metrics.jsonl").exists() else []
    for missing in range(max([json.loads(line)["step"] for line in lines], default=0) + 1, number + 1): step(missing)
    text = {"event": event, "exit_code": code, "step": number, "reason": "", "validation_loss_nats": None}
    (run / "ending.json").write_text(json.dumps(text))
    sys.exit(bool(code))
def wait_for(path):
    deadline = time.monotonic() + 60
    while not path.exists():
        if time.monotonic() > deadline: sys.exit(f"{path} did not come")
        time.sleep(0.02)
"""  # noqa: E501


def _make_signal_case(number: signal.Signals) -> object:
    """Return a test parameter that is skipped if this process ignores the signal."""
    reason = (
        f"{number.name} is ignored here, as under nohup or in the background, and by "
        "processes that tests start"
    )
    ignored = signal.getsignal(number) == signal.SIG_IGN
    return pytest.param(number, marks=pytest.mark.skipif(ignored, reason=reason))


ENDING_SIGNALS = pytest.mark.parametrize(
    "number",
    [_make_signal_case(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)],
)


def signal_once_there(path: Path, number: int) -> None:
    """Send a signal to this process as soon as a file exists, from a thread."""

    def wait_and_send() -> None:
        wait_until(path.exists)
        os.kill(os.getpid(), number)

    threading.Thread(target=wait_and_send).start()


def list_processes_with_variable(marker: str) -> list[int]:
    """Return the other processes that have a variable of this name in their environment."""
    pids = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"\0{marker}=".encode() in b"\0" + path.read_bytes():
                pids.append(int(path.parent.name))
        except OSError:
            continue
    return [pid for pid in pids if pid != os.getpid()]
