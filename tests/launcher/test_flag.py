"""A flag that handlers of signals set, whatever the main thread is at."""

import signal
import subprocess
import sys
import threading

from launcher.base.signals import Flag

STORM = """
import os, signal, sys, threading
from launcher.base.signals import Flag
flag = {"flag": Flag, "event": threading.Event}[sys.argv[1]]()
taken = set()
def again(frame, event, arg):  # at every line that the first handler runs, wherever it is, the signal comes once more
    place = frame.f_code.co_filename, frame.f_lineno
    if place not in taken:
        taken.add(place)
        os.kill(os.getpid(), signal.SIGTERM)
    return again
signal.signal(signal.SIGTERM, lambda *_: flag.set())
sys.settrace(again)
flag.set()
sys.settrace(None)
print("ended", flag.is_set())
"""  # noqa: E501


def stormed(what, limit_seconds=60):
    """What a process says of itself whose flag is set again while it is being set; nothing if it
    hangs.
    """
    command = [sys.executable, "-c", STORM, what]
    try:
        return subprocess.run(
            command, capture_output=True, text=True, timeout=limit_seconds, check=False
        ).stdout
    except subprocess.TimeoutExpired:
        return "hangs"


def test_a_signal_on_top_of_a_signal_does_no_harm():
    assert stormed("flag") == "ended True\n"


def test_an_event_would_hang():
    """Why there is a flag at all."""
    assert stormed("event", limit_seconds=2) == "hangs"


def test_a_handler_ends_the_wait_of_the_main_thread():
    flag = Flag()
    before = signal.signal(signal.SIGUSR2, lambda *_: flag.set())
    try:
        threading.Timer(0.1, signal.raise_signal, [signal.SIGUSR2]).start()
        assert flag.wait(60)
    finally:
        signal.signal(signal.SIGUSR2, before)
