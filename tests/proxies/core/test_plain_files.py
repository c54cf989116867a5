"""Tests of opening files that a person or program named: only plain files are read.

Pipes, devices and folders are refused at once, because opening a pipe would wait for its writer.
"""

import os

import pytest

from forerun._proxies.core.plain_files import open_plain, read_plain, require_plain


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


def test_pipe_is_refused_for_writing_and_by_require_plain(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError):  # the pipe has no reader
        open_plain(tmp_path / "pipe", "ab")
    with pytest.raises(OSError, match="it is a pipe"):
        require_plain(tmp_path / "pipe")
    with open_plain(tmp_path / "new", "ab") as file:
        file.write(b"x")
    assert read_plain(tmp_path / "new") == b"x"
