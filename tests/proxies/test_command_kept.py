"""A user's command whose keeper process is killed or stopped, or whose output comes faster than its
redaction.
"""

import dataclasses
import os
import signal
import time
from pathlib import Path

import pytest
from command_cases import GOOD, Place, command_spec, gone, number_in

from proxies.core.failures import classify
from proxies.external import log_file
from proxies.external.command import CommandEngine, CommandError
from proxies.external.log_file import RedactedLog

LEADER = "open('own.pid', 'w').write(f'{os.getpid()} {os.getppid()}')\n"
GRANDCHILD = """
child = subprocess.Popen([sys.executable, "-I", "-S", "-c", "import time; time.sleep(300)"], start_new_session=True)
open("child.pid", "w").write(str(child.pid))
"""  # noqa: E501


@pytest.fixture
def place(tmp_path):
    return Place(tmp_path / "place", timeout_seconds=2.0)


def start_trainer(place, code):
    """Start a trainer and return the ids of its process, of its keeper, and of its child."""
    place.trainer(GRANDCHILD + LEADER + code)
    place.engine.admit(0, command_spec())
    child = number_in(place.code_dir / "child.pid", 20)
    until = time.monotonic() + 20
    while " " not in (text := read(place.code_dir / "own.pid")) and time.monotonic() < until:
        time.sleep(0.02)
    own, keeper = map(int, text.split())
    return own, keeper, child


def read(path):
    return path.read_text() if path.exists() else ""


def test_a_killed_keeper_is_not_the_users_code_and_nothing_outlives_it(place):
    own, keeper, child = start_trainer(place, "time.sleep(300)")
    os.kill(keeper, signal.SIGKILL)
    with pytest.raises(
        CommandError, match="keeper of the command was killed from outside"
    ) as caught:
        while True:
            place.engine.advance(50)
    assert classify(caught.value) == "lost_worker"
    assert gone(own) and gone(child)


def test_a_stopped_keeper_does_not_stop_the_clock(place):
    own, keeper, child = start_trainer(place, "time.sleep(300)")
    os.kill(keeper, signal.SIGSTOP)
    start = time.monotonic()
    with pytest.raises(CommandError, match="timeout_seconds = 2"):
        while True:
            place.engine.advance(50)
    assert time.monotonic() - start < 15
    assert gone(own, 0.5) and gone(child, 0.5) and gone(keeper, 1)


def test_a_flood_of_output_neither_blocks_the_command_nor_counts_as_its_time(place):
    """The command prints six thousand lines, whose redaction takes longer than its time limit."""

    def redact_slowly(lines):
        time.sleep(0.0005 * lines.count("\n"))
        return lines

    place.engine = CommandEngine(
        dataclasses.replace(place.workplace, timeout_seconds=2.5, redact=lambda: redact_slowly)
    )
    code = "for _ in range(6):\n    sys.stdout.write(('x' * 1023 + '\\n') * 1024)\n"
    result, _ = place.outcome(code + GOOD, limit_seconds=40)
    assert result.status == "finished" and result.seconds < 2.5


def test_what_is_printed_beyond_a_limit_is_left_out_and_said(tmp_path, monkeypatch):
    monkeypatch.setattr(log_file, "MAX_PENDING_BYTES", 2**18)
    log = RedactedLog(tmp_path / "log.txt", lambda lines: (time.sleep(0.2), lines)[1])
    sink = log.fileno()
    for number in range(40):
        os.write(sink, f"{number} {'x' * 2**15}\n".encode())
    log.close()
    text = Path(tmp_path / "log.txt").read_text()
    assert " bytes of output]" in text and text.startswith("0 x")
