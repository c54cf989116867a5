"""Record a terminal session in which forerun's commands run on a finished study.

    python docs/recording.py demo/study

The script writes docs/recordings/demo.cast and demo.txt. `make recording STUDY=demo/study` does the
same in a few seconds. The folder that contains the study (with its plan and corpus) is copied, so
the study itself does not change. demo.cast is in asciicast v2 format, which a player can show
(`asciinema play docs/recordings/demo.cast`). demo.txt is the same session as plain text. The
commands run in real time, and a player shortens long pauses. In both files the name of the machine
is replaced by `host`, and the path of the copy is removed.
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
"""Size of the terminal, in characters."""
MAX_PAUSE_SECONDS = 2.0
"""Length to which a player shortens longer pauses."""
COMMANDS = (
    "forerun status demo/study",
    "forerun explain demo/study learning_rate",
    "forerun freeze demo/study",
    "forerun verify demo/study",
    "forerun report demo/study",
)
"""Commands to record, in this order; none of them trains.

`main` copies any study to the path that is named here.
"""
CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07]*\x07")
"""Sequence of characters that controls a terminal, such as the choice of a color."""
Event = tuple[float, str]
"""Seconds since the beginning, and the text that the terminal showed."""


def run_in_terminal(command: Sequence[str], folder: Path) -> tuple[list[Event], int]:
    """Run a command in a terminal of its own.

    Args:
        command: Program and arguments.
        folder: Folder in which it runs.

    Returns:
        The text that it showed, with the seconds since its start; and its exit code.
    """
    env = {**os.environ, "TERM": "xterm-256color", "COLUMNS": str(COLUMNS), "LINES": str(ROWS)}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    terminal, process_side = pty.openpty()
    fcntl.ioctl(process_side, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    began, decoder, events = (
        time.monotonic(),
        codecs.getincrementaldecoder("utf-8")("replace"),
        [],
    )
    with subprocess.Popen(
        command, cwd=folder, env=env, stdin=process_side, stdout=process_side, stderr=process_side
    ) as process:
        os.close(process_side)
        while True:
            try:
                content = os.read(terminal, 65536)
            except OSError:  # EIO: the other side of the terminal is closed (Linux)
                content = b""
            if not content:
                break
            events.append((time.monotonic() - began, decoder.decode(content)))
    os.close(terminal)
    return events, process.returncode


def type_command(text: str, begin_seconds: float) -> list[Event]:
    """Return the events of a prompt and of a command that is typed at 25 characters per second."""
    return [
        (begin_seconds, "$ "),
        *((begin_seconds + 0.5 + 0.04 * i, letter) for i, letter in enumerate(text)),
    ]


def record(commands: Sequence[str], folder: Path) -> list[Event]:
    """Run commands of forerun in a folder and return the events of the session.

    A command whose exit code is not 0 is followed by `echo $?`. Typing and the pauses between the
    commands are simulated.
    """
    copy_path = re.compile(rf"{re.escape(str(folder))}/?")
    host_name = re.compile(rf"\b{re.escape(socket.gethostname())}\b")
    events: list[Event] = []
    for command in commands:
        events += type_command(command, events[-1][0] + 1.0 if events else 0.0)
        began = events[-1][0] + 0.3
        # The forerun of this Python runs, not the one that a shell would find.
        arguments = command.removeprefix("forerun ").split()
        shown, code = run_in_terminal([sys.executable, "-m", "forerun", *arguments], folder)
        events.append((began, "\r\n"))
        # Replace names in the whole output, because two reads may split a name. An output with a
        # name becomes one event.
        output = "".join(text for _, text in shown)
        anonymous = host_name.sub("host", copy_path.sub("", output))
        if anonymous != output:
            shown = [(shown[-1][0], anonymous)]
        events += [(began + seconds, text) for seconds, text in shown]
        if code:
            events += [
                *type_command("echo $?", events[-1][0] + 1.0),
                (events[-1][0] + 2.0, f"\r\n{code}\r\n"),
            ]
    return events


def format_cast(events: Sequence[Event]) -> str:
    """Return the events as asciicast v2.

    The first line of JSON describes the terminal; each further line is one event.
    """
    header = {
        "version": 2,
        "width": COLUMNS,
        "height": ROWS,
        "idle_time_limit": MAX_PAUSE_SECONDS,
        "title": "forerun: a finished demo study",
        "env": {"TERM": "xterm-256color"},
    }
    rows = [[round(seconds, 3), "o", text] for seconds, text in events]
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in [header, *rows])


def format_plain(events: Sequence[Event]) -> str:
    """Return the events as text without colors.

    Only the last state remains of a line that was overwritten, such as a progress bar.
    """
    text = CONTROL.sub("", "".join(text for _, text in events))
    text = re.sub(r"\r+\n", "\n", text).removesuffix("\n")
    return "".join(line.rpartition("\r")[2].rstrip() + "\n" for line in text.split("\n"))


def main() -> None:
    """Record the session on a copy of the study that the command line names."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "study", type=Path, help="A finished study, such as demo/study after `make demo`."
    )
    parser.add_argument("--out", type=Path, default=OUT, help="Folder for demo.cast and demo.txt.")
    options = parser.parse_args()
    if not (options.study / "ledger.db").exists():
        parser.error(
            f"{options.study} holds no study: run `make demo` first, or name another folder"
        )
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(options.study.resolve().parent, Path(folder, "demo"))
        if options.study.resolve().name != "study":
            Path(folder, "demo", options.study.resolve().name).rename(Path(folder, "demo", "study"))
        events = record(COMMANDS, Path(folder))
    options.out.mkdir(parents=True, exist_ok=True)
    for name, text in (("demo.cast", format_cast(events)), ("demo.txt", format_plain(events))):
        (options.out / name).write_text(text, encoding="utf-8")
        print(f"wrote {options.out / name}")


if __name__ == "__main__":
    main()
