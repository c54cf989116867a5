"""A command's log: no secret is on disk at any moment, all else byte by byte; how it ends in a
sentence.
"""

import os
import subprocess
import sys
import threading
import time

import pytest

from proxies.external.log_file import LOG_FILE, RedactedLog


def redact(line):
    return line.replace("hunter2", "***")


def written(path, *parts, append=False):
    log = RedactedLog(path, redact, append=append)
    for part in parts:
        os.write(log.fileno(), part)
    log.close()
    return path.read_bytes()


def test_only_what_is_secret_changes(tmp_path):
    said = b"one\r\nkey hunter2\n\xff\xfe bytes\rbar hunter2\n\nlast hunter2"
    kept = b"one\r\nkey ***\n\xff\xfe bytes\rbar ***\n\nlast ***"
    assert written(tmp_path / LOG_FILE, said) == kept
    assert written(tmp_path / LOG_FILE, *(said[i : i + 1] for i in range(len(said)))) == kept, (
        "byte by byte"
    )
    assert written(tmp_path / LOG_FILE, b"more", append=True) == kept + b"more"


def test_while_a_command_runs_its_log_holds_what_it_printed_without_secrets(tmp_path):
    log = RedactedLog(tmp_path / LOG_FILE, redact)
    child = subprocess.Popen(
        [sys.executable, "-c", "print('is hunter2', flush=True); import time; time.sleep(60)"],
        stdout=log,
    )
    log.release()
    until = time.monotonic() + 20
    while not (text := (tmp_path / LOG_FILE).read_bytes()) and time.monotonic() < until:
        time.sleep(0.01)
    child.kill()
    child.wait()
    log.close()
    assert text == b"is ***\n"


def test_a_full_disk_does_not_stop_the_command(tmp_path):
    if not os.path.exists("/dev/full"):  # noqa: PTH110
        pytest.skip("no /dev/full")
    (tmp_path / LOG_FILE).symlink_to("/dev/full")
    log = RedactedLog(tmp_path / LOG_FILE, redact)
    done = subprocess.run(
        [sys.executable, "-c", "print('x\\n' * 100_000)"], stdout=log, check=False, timeout=60
    )
    log.close()
    assert done.returncode == 0


def test_a_command_does_not_wait_until_its_output_is_clean(tmp_path):
    """A redactor that takes for ever holds no writer up."""
    may_clean = threading.Event()

    def slow(lines):
        may_clean.wait(60)
        return lines

    log = RedactedLog(tmp_path / LOG_FILE, slow)
    done = subprocess.run(
        [sys.executable, "-c", "print(('y' * 999 + '\\n') * 20_000, end='')"],
        stdout=log,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0 and (tmp_path / LOG_FILE).read_bytes() == b""
    may_clean.set()
    log.close()
    assert len((tmp_path / LOG_FILE).read_bytes()) == 20_000_000
