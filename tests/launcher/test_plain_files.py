"""Plain files are read; what is none is named, and never waited for."""

import os

import pytest

from launcher.base.run_files import kinds_in
from proxies.core.plain_files import open_plain, read_plain, require_plain


def test_a_plain_file_is_read_also_by_a_link(tmp_path):
    (tmp_path / "file").write_bytes(b"\x00x")
    (tmp_path / "link").symlink_to("file")
    assert read_plain(tmp_path / "file") == read_plain(tmp_path / "link") == b"\x00x"


def test_what_is_not_a_plain_file_is_refused_at_once(tmp_path):
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


def test_a_pipe_is_refused_for_writing_and_before_a_library_opens_it(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError):  # nobody reads it
        open_plain(tmp_path / "pipe", "ab")
    with pytest.raises(OSError, match="it is a pipe"):
        require_plain(tmp_path / "pipe")
    with open_plain(tmp_path / "new", "ab") as file:
        file.write(b"x")
    assert read_plain(tmp_path / "new") == b"x"


def test_every_kind_of_entry_is_listed_and_no_link_followed(tmp_path):
    (tmp_path / "a" / "__pycache__").mkdir(parents=True)
    (tmp_path / "a" / "__pycache__" / "x.pyc").write_text("")
    (tmp_path / "a" / "file").write_text("")
    (tmp_path / "a" / "away").symlink_to("/")
    (tmp_path / "gone").symlink_to("nowhere")
    os.mkfifo(tmp_path / "pipe")
    assert kinds_in(tmp_path) == {
        "a/away": "link",
        "a/file": "file",
        "gone": "link",
        "pipe": "pipe",
    }
    assert kinds_in(tmp_path / "nowhere") == {}
