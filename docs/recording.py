"""A recording of the terminal: real commands on a finished study, as docs/recordings/demo.cast and
demo.txt.

    python docs/recording.py demo/study          # or: make recording STUDY=demo/study

The folder that holds the study (with its plan and corpus) is copied, so the study itself stays as
it is. Each command runs in a terminal of 110 columns. demo.cast is asciicast v2 (`asciinema play
docs/recordings/demo.cast`), demo.txt the same as plain text. Times are those of this run; a player
shortens pauses to two seconds. The name of the machine and the path of the copy are replaced.
"""

from __future__ import annotations

import argparse
import codecs
import fcntl
import json
import os
import pty
import re
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
OUT = ROOT / "docs" / "recordings"
COLUMNS, ROWS = 110, 40
COMMANDS = (
    "forerun status demo/study",
    "forerun explain demo/study learning_rate",
    "forerun freeze demo/study",
    "forerun verify demo/study",
    "forerun report demo/study",
)
"""What is shown, in this order; none of them trains."""
CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07]*\x07")
Event = tuple[float, str]
"""Seconds since the beginning, and what the terminal showed."""


def run(command: Sequence[str], folder: Path) -> tuple[list[Event], int]:
    """Run a command in a terminal of its own.

    Args:
        command: program and arguments.
        folder: where it runs.

    Returns:
        What it showed, with the seconds since its start; its exit code.
    """
    env = {**os.environ, "TERM": "xterm-256color", "COLUMNS": str(COLUMNS), "LINES": str(ROWS)}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    started, decoder, events = (
        time.monotonic(),
        codecs.getincrementaldecoder("utf-8")("replace"),
        [],
    )
    with subprocess.Popen(
        command, cwd=folder, env=env, stdin=theirs, stdout=theirs, stderr=theirs
    ) as process:
        os.close(theirs)
        while True:
            try:
                read = os.read(ours, 65536)
            except OSError:  # EIO: on Linux the end of a terminal whose other side is closed
                read = b""
            if not read:
                break
            events.append((time.monotonic() - started, decoder.decode(read)))
    os.close(ours)
    return events, process.returncode


def typed(text: str, at: float) -> list[Event]:
    """A prompt and a command, typed at 25 characters a second from second `at` on."""
    return [(at, "$ "), *((at + 0.5 + 0.04 * i, letter) for i, letter in enumerate(text))]


def record(commands: Sequence[str], folder: Path) -> list[Event]:
    """Every command with what it showed; after a command that did not end with 0, its exit code by
    `echo $?`.
    """
    forerun = [sys.executable, "-m", "launcher"]
    hidden = re.compile(rf"{re.escape(str(folder))}/?|\b{re.escape(socket.gethostname())}\b")
    events: list[Event] = []
    for command in commands:
        events += typed(command, events[-1][0] + 1.0 if events else 0.0)
        begun = events[-1][0] + 0.3
        shown, code = run([*forerun, *command.split()[1:]], folder)
        events.append((begun, "\r\n"))
        whole = "".join(text for _, text in shown)
        if hidden.search(whole):  # replaced in one piece: a name may be cut by two reads
            shown = [
                (shown[-1][0], hidden.sub(lambda found: "host" * ("/" not in found[0]), whole))
            ]
        events += [(begun + seconds, text) for seconds, text in shown]
        if code:
            events += [
                *typed("echo $?", events[-1][0] + 1.0),
                (events[-1][0] + 2.0, f"\r\n{code}\r\n"),
            ]
    return events


def cast(events: Sequence[Event]) -> str:
    """The events as asciicast v2: a line of JSON for the terminal, then one for each event."""
    head = {
        "version": 2,
        "width": COLUMNS,
        "height": ROWS,
        "idle_time_limit": 2.0,
        "title": "forerun: a finished demo study",
        "env": {"TERM": "xterm-256color"},
    }
    rows = [[round(seconds, 3), "o", text] for seconds, text in events]
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in [head, *rows])


def plain(events: Sequence[Event]) -> str:
    """The events as text: no colours; of a line that was written over, what stood there last."""
    text = CONTROL.sub("", "".join(text for _, text in events))
    text = re.sub(r"\r+\n", "\n", text).removesuffix("\n")
    return "".join(line.rpartition("\r")[2].rstrip() + "\n" for line in text.split("\n"))


def main() -> None:
    """Record the study that the command line names."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "study", type=Path, help="a finished study, such as demo/study after `make demo`"
    )
    parser.add_argument("--out", type=Path, default=OUT, help="folder for demo.cast and demo.txt")
    given = parser.parse_args()
    if not (given.study / "ledger.db").exists():
        parser.error(f"{given.study} holds no study: run `make demo` first, or name another folder")
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(given.study.resolve().parent, Path(folder, "demo"))
        if given.study.resolve().name != "study":
            Path(folder, "demo", given.study.resolve().name).rename(Path(folder, "demo", "study"))
        events = record(COMMANDS, Path(folder))
    given.out.mkdir(parents=True, exist_ok=True)
    for name, text in (("demo.cast", cast(events)), ("demo.txt", plain(events))):
        (given.out / name).write_text(text, encoding="utf-8")
        print(f"wrote {given.out / name}")


if __name__ == "__main__":
    main()
