"""A command's log: its end in a sentence, and its secrets taken out once it is written."""

import os

from proxies.external.log_file import LOG_FILE, clean, clean_earlier, told


def redact(line):
    return line.replace("hunter2", "***")


def test_only_what_is_secret_changes(tmp_path):
    log = tmp_path / LOG_FILE
    log.write_bytes(b"one\r\nkey hunter2\n\xff\xfe bytes\rbar hunter2\n\nlast hunter2")
    clean(log, redact)
    assert log.read_bytes() == b"one\r\nkey ***\n\xff\xfe bytes\rbar ***\n\nlast ***"
    assert [path.name for path in tmp_path.iterdir()] == [LOG_FILE]


def test_a_log_without_secrets_is_not_written_again(tmp_path):
    log = tmp_path / LOG_FILE
    log.write_bytes(b"nothing here\n")
    before = log.stat()
    clean(log, redact)
    assert log.stat().st_ino == before.st_ino and log.stat().st_mtime_ns == before.st_mtime_ns
    assert [path.name for path in tmp_path.iterdir()] == [LOG_FILE]


def test_what_cannot_be_cleaned_is_left(tmp_path):
    clean(tmp_path / "absent", redact)
    (tmp_path / LOG_FILE).mkdir()
    clean(tmp_path / LOG_FILE, redact)
    assert os.listdir(tmp_path) == [LOG_FILE]  # noqa: PTH208


def test_attempts_before_this_one_are_cleaned_and_this_one_is_let_be(tmp_path):
    """Whoever looked after them may have been killed."""
    for number in (1, 2, 3):
        (tmp_path / f"attempt-{number}").mkdir()
        (tmp_path / f"attempt-{number}" / LOG_FILE).write_text("hunter2\n")
    clean_earlier(tmp_path / "attempt-3", redact)
    texts = [(tmp_path / f"attempt-{number}" / LOG_FILE).read_text() for number in (1, 2, 3)]
    assert texts == ["***\n", "***\n", "hunter2\n"]


def test_the_end_is_told_without_secrets(tmp_path):
    log = tmp_path / LOG_FILE
    log.write_text("\n".join([*(f"line {i}" for i in range(20)), "\x1b[1mpassword hunter2\x07", "", "x" * 500]))
    said = told(log, redact)
    assert said.startswith(f"; {LOG_FILE} ends: line 14 | ") and said.endswith(f" | [1mpassword *** | {'x' * 200}")
    assert told(tmp_path / "absent", redact) == f"; {LOG_FILE} is empty"
