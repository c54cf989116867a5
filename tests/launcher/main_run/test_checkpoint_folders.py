"""Tests of listing the files of a folder that forerun writes, with the kind of each."""

import os

from forerun._launcher.main_run.checkpoint_folders import list_file_kinds


def test_list_file_kinds_follows_no_links(tmp_path):
    (tmp_path / "a" / "__pycache__").mkdir(parents=True)
    (tmp_path / "a" / "__pycache__" / "x.pyc").write_text("")
    (tmp_path / "a" / "file").write_text("")
    (tmp_path / "a" / "away").symlink_to("/")
    (tmp_path / "gone").symlink_to("nowhere")
    os.mkfifo(tmp_path / "pipe")
    assert list_file_kinds(tmp_path) == {
        "a/away": "link",
        "a/file": "file",
        "gone": "link",
        "pipe": "pipe",
    }
    assert list_file_kinds(tmp_path / "nowhere") == {}
