"""Tests of a training command's log file: secrets are replaced before they reach the disk."""

import os
import subprocess
import sys
import time

import pytest

from forerun._proxies.external.log_file import LOG_FILE, RedactedLog


def redact(line):
    """Replace the secret of these tests."""
    return line.replace("hunter2", "***")


def write_log(path, *parts, append=False):
    """Write parts of a log one after another; return what is in the file."""
    log = RedactedLog(path, redact, append=append)
    for part in parts:
        os.write(log.fileno(), part)
    log.close()
    return path.read_bytes()


def test_only_secrets_are_replaced(tmp_path):
    output = b"one\r\nkey hunter2\n\xff\xfe bytes\rbar hunter2\n\nlast hunter2"
    expected = b"one\r\nkey ***\n\xff\xfe bytes\rbar ***\n\nlast ***"
    assert write_log(tmp_path / LOG_FILE, output) == expected
    # A secret is replaced even if it arrives in many parts.
    single_bytes = [output[i : i + 1] for i in range(len(output))]
    assert write_log(tmp_path / LOG_FILE, *single_bytes) == expected
    assert write_log(tmp_path / LOG_FILE, b"more", append=True) == expected + b"more"


def test_log_of_a_running_command_has_its_output_without_secrets(tmp_path):
    log = RedactedLog(tmp_path / LOG_FILE, redact)
    child = subprocess.Popen(
        [sys.executable, "-c", "print('is hunter2', flush=True); import time; time.sleep(60)"],
        stdout=log,
    )
    log.release()  # the command holds the log now
    deadline = time.monotonic() + 20
    while not (text := (tmp_path / LOG_FILE).read_bytes()) and time.monotonic() < deadline:
        time.sleep(0.01)
    child.kill()
    child.wait()
    log.close()
    assert text == b"is ***\n"


def test_full_disk_does_not_stop_the_command(tmp_path):
    if not os.path.exists("/dev/full"):  # noqa: PTH110
        pytest.skip("no /dev/full")
    (tmp_path / LOG_FILE).symlink_to("/dev/full")
    log = RedactedLog(tmp_path / LOG_FILE, redact)
    process = subprocess.run(
        [sys.executable, "-c", "print('x\\n' * 100_000)"], stdout=log, check=False, timeout=60
    )
    log.close()
    assert process.returncode == 0
