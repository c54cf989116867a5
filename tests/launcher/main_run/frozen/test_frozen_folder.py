"""Tests of a frozen config's folder.

The folder must be written completely or not at all, and every change in it must be noticed.
"""

import os
import re
import shutil
import sys

import pytest
from main_run import make_tiny_decision

from forerun._launcher.main_run.frozen import frozen_folder
from forerun._launcher.main_run.frozen.frozen import FrozenError, TamperedError
from forerun._launcher.main_run.frozen.frozen_folder import (
    ATTESTED,
    check_files,
    find_edited,
    write_frozen,
)
from forerun._launcher.main_run.frozen.launch_file import attest, read_launch
from forerun._proxies.core import canon

BODIES = {kind: {"of": kind} for kind in ATTESTED}
EXPORT = {"trainer": "native", "version": "1", "out": "exports/native"}


@pytest.fixture(scope="module")
def decision(corpus):
    """A decision for a tiny model."""
    return make_tiny_decision(corpus)


@pytest.fixture
def folder(decision, tmp_path):
    """Folder of a frozen config with an attested export."""
    folder = write_frozen(tmp_path / "frozen", decision, BODIES).parent
    out = folder / "exports" / "native"
    (out / "inner").mkdir(parents=True)
    for name in ("run.sh", "inner/x.py"):
        (out / name).write_text(name)
    (out / "run.sh").chmod(0o755)
    files = {name: canon.hash_file(out / name) for name in ("run.sh", "inner/x.py")}
    attest(folder, "export-native", decision.digest, {**EXPORT, "files": files})
    return folder


def list_problems(folder):
    """Return the problems of a folder that must be refused."""
    with pytest.raises(TamperedError) as caught:
        check_files(folder, folder.name)
    return caught.value.problems


def test_unchanged_folder_passes_and_lists_its_exports(folder):
    (folder / "notes.txt").write_text("")
    (folder / "exports" / ".native.part").mkdir()
    check = check_files(folder, folder.name)
    assert "files of native: 2 unchanged" in check.unchanged
    assert [(export.trainer, export.version, export.out) for export in check.exports] == [
        ("native", "1", folder / "exports" / "native")
    ]


PLACES = {
    "attestations/environment.json": "attestations/environment.json",
    "attestations/more.json": "attestations/more.json",
    "exports/native/run.sh": "run.sh",
    "launch.json": "launch.json",
}
"""Names that problems give to files, by their paths in the folder."""


@pytest.mark.parametrize("place", PLACES)
def test_link_or_pipe_is_refused(folder, place, tmp_path):
    if (folder / place).exists():
        shutil.move(folder / place, tmp_path / "aside")
    (folder / place).symlink_to(tmp_path / "aside")
    assert list_problems(folder)[0].startswith(f"{PLACES[place]} is a link: ")
    (folder / place).unlink()
    os.mkfifo(folder / place)
    if place == "launch.json":
        with pytest.raises(FrozenError, match="it is a pipe: "):
            read_launch(folder)
    else:
        assert list_problems(folder)[0].startswith(f"{PLACES[place]} is a pipe: ")


def test_every_change_of_an_exports_files_is_reported(folder):
    out = folder / "exports" / "native"
    (out / "run.sh").chmod(0o644)
    (out / "inner" / "x.py").unlink()
    (out / "away").symlink_to("/")
    (out / "gone").symlink_to("nowhere")
    assert list_problems(folder) == [
        "inner/x.py is missing",
        "away was added",
        "gone was added",
        "run.sh is no longer executable: run chmod +x, or `forerun export` again",
        "`forerun export --to native` writes all files again",
    ]


def test_malformed_export_attestation_is_refused(folder):
    for body in (
        {},
        {**EXPORT, "files": {"run.sh": 1}},
        {**EXPORT, "files": {}, "out": "../../../etc"},
    ):
        attest(folder, "export-native", folder.name, body)
        assert "does not describe an export" in list_problems(folder)[0]


def test_unattested_export_or_file_named_exports_is_refused(folder):
    (folder / "exports" / "mine").mkdir()
    assert list_problems(folder) == ["no attestation names it: `forerun export` writes it again"]
    shutil.rmtree(folder / "exports")
    (folder / "attestations" / "export-native.json").unlink()
    (folder / "exports").write_text("")
    assert list_problems(folder) == ["it must be a folder: remove it"]


@pytest.mark.parametrize("depth", [600, 100_000])
def test_deeply_nested_json_is_refused(folder, depth):
    nested = "[" * depth + "]" * depth
    (folder / "attestations" / "environment.json").write_text('{"body": {"x": ' + nested + "}}")
    # Python 3.12 and later parse a depth of 600, and then the content does not match its hash.
    parsed = depth == 600 and sys.version_info >= (3, 12)
    refused = "does not have its hash|has the digest" if parsed else "recursion|nested too deep"
    assert re.search(refused, list_problems(folder)[0])
    (folder / "launch.json").write_text('{"digest": "", "decision": ' + nested + "}")
    with pytest.raises(TamperedError, match=refused):
        read_launch(folder)


@pytest.mark.parametrize("exists", [False, True], ids=["first freeze", "frozen before"])
def test_failed_freezing_leaves_the_folder_as_it_was(decision, tmp_path, monkeypatch, exists):
    frozen_dir = tmp_path / "frozen"
    if exists:
        write_frozen(frozen_dir, decision, BODIES)
        (frozen_dir / decision.digest / "notes.txt").write_text("")
    (frozen_dir / "freezing.part" / "left").mkdir(parents=True)

    def attest_until_disk_is_full(folder, kind, digest, body):
        if kind == "environment":
            raise OSError(28, "No space left on device", "environment.json")
        return attest(folder, kind, digest, body)

    with monkeypatch.context() as patched:
        patched.setattr(frozen_folder, "attest", attest_until_disk_is_full)
        with pytest.raises(OSError, match="No space left"):
            write_frozen(frozen_dir, decision, BODIES)
    assert [path.name for path in frozen_dir.iterdir()] == ([decision.digest] if exists else [])
    folder = write_frozen(frozen_dir, decision, BODIES).parent
    assert [path.name for path in frozen_dir.iterdir()] == [decision.digest]
    assert (folder / "notes.txt").exists() == exists
    check_files(folder, decision.digest)


def test_find_edited_names_the_edited_launch_file(folder):
    study = folder.parent.parent
    assert find_edited(study) == []
    path = folder / "launch.json"
    content = path.read_text()
    path.write_text(content.replace('"on_non_finite": true', '"on_non_finite": false'))
    assert path.read_text() != content
    assert [str(path) in problem for problem in find_edited(study)] == [True]
    path.write_text(content)
    shutil.move(folder, folder.with_name("f" * 64))
    assert len(find_edited(study)) == 1
