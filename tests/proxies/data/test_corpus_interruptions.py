"""Tests of `tokenize` when it cannot finish: it leaves no half-written corpus and keeps old files.

It meets full disks, interruptions, killed processes, and files of the user in its folder.
"""

import errno
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from corpus_cases import get_tokenize_refusal, list_names, to_jsonl, write_short_texts

from forerun._proxies.core import canon
from forerun._proxies.data.corpus import tokenize
from forerun._proxies.data.tokens import DataError, TokenStore


@pytest.fixture
def texts_dir(tmp_path):
    """Folder of sixty short texts."""
    return write_short_texts(tmp_path / "texts")


def test_full_disk_is_named_and_leaves_no_files(texts_dir, tmp_path, monkeypatch):
    real_open = Path.open

    class FullDiskFile:
        def __init__(self, file):
            self.file = file

        def write(self, content):
            raise OSError(errno.ENOSPC, "No space left on device")

        def close(self):
            self.file.close()

    def open_on_full_disk(path, mode="r", *arguments, **options):
        file = real_open(path, mode, *arguments, **options)
        return FullDiskFile(file) if mode == "wb" and path.suffix == ".bin" else file

    monkeypatch.setattr(Path, "open", open_on_full_disk)
    message = get_tokenize_refusal([texts_dir], tmp_path / "out")
    assert "train-00000.bin cannot be written: No space left on device" in message
    assert "free some space" in message
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("has_corpus", [False, True])
def test_disk_that_is_full_at_the_last_write_keeps_the_old_files(
    texts_dir, tmp_path, monkeypatch, has_corpus
):
    out = tmp_path / "out"
    if has_corpus:
        tokenize([texts_dir], out)
        old_names = list_names(out)

    def fail_on_full_disk(path, content):
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(canon, "write_atomic", fail_on_full_disk)
        message = get_tokenize_refusal([texts_dir], out)
        assert "manifest.json cannot be written: No space left on device" in message
    if has_corpus:
        assert list_names(out) == old_names
        old_manifest = TokenStore(out).manifest
        assert tokenize([texts_dir], out) == old_manifest
    else:
        assert not out.exists()
        tokenize([texts_dir], out)


def test_manifest_is_moved_into_place_last(texts_dir, tmp_path, monkeypatch):
    """An interruption after the first file has moved must leave no corpus behind.

    With the manifest first, the folder would count as a corpus.
    """
    real_replace, moved = Path.replace, []

    def interrupt_at_second_call(path, target):
        moved.append(path)
        if len(moved) == 2:
            raise KeyboardInterrupt
        return real_replace(path, target)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Path, "replace", interrupt_at_second_call)
        tokenize([texts_dir], tmp_path / "out")
    assert len(moved) == 2 and not (tmp_path / "out").exists()
    tokenize([texts_dir], tmp_path / "out")


SLOW_TOKENIZE = """
import sys, time
from pathlib import Path
from forerun._proxies.data import shards
from forerun._proxies.data.corpus import tokenize
shards.SHARD_TOKENS = 50
def slow(progress):
    if progress.num_documents > 200:
        print("written", flush=True)
        time.sleep(60)
tokenize([Path(sys.argv[1])], Path(sys.argv[2]), progress=slow)
"""
"""Program that tokenizes into many small shards and pauses after 200 documents."""


def test_killed_process_leaves_no_corpus_and_the_next_one_replaces_its_files(tmp_path):
    source, out = tmp_path / "a.jsonl", tmp_path / "out"
    source.write_bytes(to_jsonl(f"document {i} of several" * 20 for i in range(600)))
    command = [sys.executable, "-c", SLOW_TOKENIZE, str(source), str(out)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "written\n"
        assert "is being written by another process" in get_tokenize_refusal([source], out)
        process.send_signal(signal.SIGKILL)
    assert list_names(out) == [".unfinished"]
    with pytest.raises(DataError, match="does not exist"):
        TokenStore(out)
    # A file that the next process would not write must not reach the corpus.
    (out / ".unfinished" / "train-00099.bin").write_bytes(b"left")
    manifest = tokenize([source], out)
    assert TokenStore(out).manifest == manifest
    assert list_names(out) == ["manifest.json", "train-00000.bin", "validation-00000.bin"]


def test_files_of_the_user_are_not_overwritten(texts_dir, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "notes.md").write_text("notes")
    (out / "train-00000.bin").write_bytes(b"data")
    assert (
        "has no manifest.json but has train-00000.bin, which would be overwritten"
        in get_tokenize_refusal([texts_dir], out)
    )
    (out / "train-00000.bin").unlink()
    tokenize([texts_dir], out)
    assert (out / "notes.md").read_text() == "notes"
    (tmp_path / "file").touch()
    assert "file is a file: name a folder with --out" in get_tokenize_refusal(
        [texts_dir], tmp_path / "file"
    )
