"""SIGTERM ends a command within seconds, even during a call that Python cannot interrupt."""

import signal
import subprocess
import sys
import time

import pytest

SCRIPT = """
import hashlib, signal, sys
from launcher.cli import cli
cli.LEAVE_SECONDS = 0.5
def work(**_):
    if sys.argv[1] == "handles it":
        signal.signal(signal.SIGTERM, lambda *_: (print("saved", flush=True), sys.exit(7)))
    print("up", flush=True)
    hashlib.pbkdf2_hmac("sha256", b"", b"", int(sys.argv[2]))
cli.cli.main = work
cli.main()
"""


@pytest.mark.parametrize(
    ("how", "num_rounds", "code"), [("leaves it", 10**9, 130), ("handles it", 10**7, 7)]
)
def test_sigterm_ends_a_long_call_unless_the_verb_handles_it(how, num_rounds, code):
    command = [sys.executable, "-c", SCRIPT, how, str(num_rounds)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "up\n"
        time.sleep(0.2)
        start = time.monotonic()
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=60)
    assert process.returncode == code
    if code == 130:
        assert time.monotonic() - start < 4
    else:
        assert out == "saved\n"
