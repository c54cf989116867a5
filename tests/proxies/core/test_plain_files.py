"""Tests of opening files that a person or another program named: only plain files are read.

Pipes, devices and folders are refused at once, because opening a pipe would wait for its writer.
"""

import os
from pathlib import Path

import pytest

from forerun._proxies.core.plain_files import (
    open_plain,
    open_to_append,
    read_plain,
    require_plain,
)


def test_plain_file_is_read_directly_and_through_a_link(tmp_path):
    (tmp_path / "file").write_bytes(b"\x00x")
    (tmp_path / "link").symlink_to("file")
    assert read_plain(tmp_path / "file") == read_plain(tmp_path / "link") == b"\x00x"


def test_pipes_devices_folders_and_large_files_are_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "large").write_bytes(b"four")
    messages = {}
    for path in (tmp_path / "pipe", tmp_path / "large", tmp_path, "/dev/zero", tmp_path / "absent"):
        with pytest.raises(OSError) as caught:
            read_plain(path, max_bytes=3)
        assert caught.value.filename is not None
        messages[str(path)] = caught.value.strerror
    assert list(messages.values()) == [
        "it is a pipe: must be a plain file",
        "it has 4 bytes: must be at most 3",
        "Is a directory",
        "it is a device: must be a plain file",
        "No such file or directory",
    ]


def test_file_that_is_larger_than_its_stated_size_is_refused():
    """Linux states a size of 0 for files of /proc: only reading shows that they are too large."""
    path = Path("/proc/self/status")
    assert path.stat().st_size == 0 < len(read_plain(path))
    with pytest.raises(OSError, match="it has 4 bytes: must be at most 3"):
        read_plain(path, max_bytes=3)


def test_devices_may_be_appended_to_and_pipes_may_not(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with open_to_append(Path("/dev/null")) as device:
        assert device.write(b"x") == 1
    with pytest.raises(OSError, match="it is a pipe"):
        open_to_append(tmp_path / "pipe")


def test_pipe_is_refused_for_writing_and_by_require_plain(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="it is a pipe"):  # the pipe has no reader
        open_plain(tmp_path / "pipe", "ab")
    with pytest.raises(OSError, match="it is a pipe"):
        require_plain(tmp_path / "pipe")
    with open_plain(tmp_path / "new", "ab") as file:
        file.write(b"x")
    assert read_plain(tmp_path / "new") == b"x"
