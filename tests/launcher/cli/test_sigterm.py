"""Tests of SIGTERM: a command ends within seconds, even during a call Python cannot interrupt."""

import signal
import subprocess
import sys
import time

import pytest

SCRIPT = """
import hashlib, signal, sys
from forerun._launcher.cli import cli
cli.LEAVE_SECONDS = 0.5
def work(_):
    if sys.argv[1] == "handler":
        signal.signal(signal.SIGTERM, lambda *_: (print("saved", flush=True), sys.exit(7)))
    print("up", flush=True)
    hashlib.pbkdf2_hmac("sha256", b"", b"", int(sys.argv[2]))
cli.run_verb = work
cli.main()
"""


@pytest.mark.parametrize(
    ("handling", "num_rounds", "code"), [("default", 10**9, 130), ("handler", 10**7, 7)]
)
def test_sigterm_ends_a_long_call_unless_the_verb_handles_it(handling, num_rounds, code):
    command = [sys.executable, "-c", SCRIPT, handling, str(num_rounds)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "up\n"
        time.sleep(0.2)
        start = time.monotonic()
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=60)
    assert process.returncode == code
    if code == 130:
        # The call would take minutes, and the verb is ended after LEAVE_SECONDS = 0.5.
        assert time.monotonic() - start < 4
    else:
        assert out == "saved\n"
