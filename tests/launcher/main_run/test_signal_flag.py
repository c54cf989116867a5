"""Tests of the flag that signal handlers set, at any moment of the main thread."""

import signal
import subprocess
import sys
import threading

from forerun._launcher.main_run.process_signals import SignalFlag

# Sends SIGTERM again at every line that the first handler runs.
STORM = """
import os, signal, sys, threading
from forerun._launcher.main_run.process_signals import SignalFlag
flag = {"flag": SignalFlag, "event": threading.Event}[sys.argv[1]]()
seen = set()
def send_at_new_line(frame, event, arg):
    place = frame.f_code.co_filename, frame.f_lineno
    if place not in seen:
        seen.add(place)
        os.kill(os.getpid(), signal.SIGTERM)
    return send_at_new_line
signal.signal(signal.SIGTERM, lambda *_: flag.set())
sys.settrace(send_at_new_line)
flag.set()
sys.settrace(None)
print("ended", flag.is_set())
"""


def run_signal_storm(kind, limit_seconds=60):
    """Return the output of a process whose flag is set again while it is being set; "hangs" if it
    does not end.
    """
    command = [sys.executable, "-c", STORM, kind]
    try:
        return subprocess.run(
            command, capture_output=True, text=True, timeout=limit_seconds, check=False
        ).stdout
    except subprocess.TimeoutExpired:
        return "hangs"


def test_flag_survives_a_signal_during_a_signal():
    assert run_signal_storm("flag") == "ended True\n"


def test_threading_event_hangs_on_a_signal_during_a_signal():
    """This is the reason for the flag."""
    assert run_signal_storm("event", limit_seconds=2) == "hangs"


def test_handler_ends_the_wait_of_the_main_thread():
    flag = SignalFlag()
    before = signal.signal(signal.SIGUSR2, lambda *_: flag.set())
    try:
        threading.Timer(0.1, signal.raise_signal, [signal.SIGUSR2]).start()
        assert flag.wait(60)
    finally:
        signal.signal(signal.SIGUSR2, before)
