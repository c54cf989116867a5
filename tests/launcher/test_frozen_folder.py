"""A frozen config's folder: whole or not there, and nothing in it that goes unnoticed."""

import os
import re
import shutil
import sys

import pytest
from main_run import tiny_decision

from launcher.frozen import frozen_folder
from launcher.frozen.frozen import FrozenError, TamperedError
from launcher.frozen.frozen_folder import ATTESTED, edited, look_through, write_frozen
from launcher.frozen.launch_file import attest, read_launch
from proxies.core import canon

BODIES = {kind: {"of": kind} for kind in ATTESTED}
EXPORT = {"trainer": "native", "version": "1", "out": "exports/native"}


@pytest.fixture(scope="module")
def decision(corpus):
    return tiny_decision(corpus)


@pytest.fixture
def folder(decision, tmp_path):
    """Frozen, with an export."""
    found = write_frozen(tmp_path / "frozen", decision, BODIES).parent
    out = found / "exports" / "native"
    (out / "inner").mkdir(parents=True)
    for name in ("run.sh", "inner/x.py"):
        (out / name).write_text(name)
    (out / "run.sh").chmod(0o755)
    files = {name: canon.file_sha256(out / name) for name in ("run.sh", "inner/x.py")}
    attest(found, "export-native", decision.digest, {**EXPORT, "files": files})
    return found


def problems_of(folder):
    with pytest.raises(TamperedError) as caught:
        look_through(folder, folder.name)
    return caught.value.problems


def test_what_is_whole_is_found(folder):
    (folder / "notes.txt").write_text("")
    (folder / "exports" / ".native.part").mkdir()
    found = look_through(folder, folder.name)
    assert "files of native: 2 unchanged" in found.unchanged
    assert [(export.trainer, export.version, export.out) for export in found.exports] == [
        ("native", "1", folder / "exports" / "native")
    ]


PLACES = {
    "attestations/environment.json": "attestations/environment.json",
    "attestations/more.json": "attestations/more.json",
    "exports/native/run.sh": "run.sh",
    "launch.json": "launch.json",
}


@pytest.mark.parametrize("place", PLACES)
def test_a_link_or_a_pipe_is_no_file(folder, place, tmp_path):
    if (folder / place).exists():
        shutil.move(folder / place, tmp_path / "aside")
    (folder / place).symlink_to(tmp_path / "aside")
    assert problems_of(folder)[0].startswith(f"{PLACES[place]} is a link: ")
    (folder / place).unlink()
    os.mkfifo(folder / place)
    if place == "launch.json":
        with pytest.raises(FrozenError, match="it is a pipe: "):
            read_launch(folder)
    else:
        assert problems_of(folder)[0].startswith(f"{PLACES[place]} is a pipe: ")


def test_an_export_is_held_file_by_file(folder):
    out = folder / "exports" / "native"
    (out / "run.sh").chmod(0o644)
    (out / "inner" / "x.py").unlink()
    (out / "away").symlink_to("/")
    (out / "gone").symlink_to("nowhere")
    assert problems_of(folder) == [
        "inner/x.py is missing",
        "away was added",
        "gone was added",
        "run.sh is no longer executable: run chmod +x, or `forerun export` again",
        "`forerun export --to native` writes all files again",
    ]


def test_an_attestation_of_no_export_is_refused(folder):
    for body in (
        {},
        {**EXPORT, "files": {"run.sh": 1}},
        {**EXPORT, "files": {}, "out": "../../../etc"},
    ):
        attest(folder, "export-native", folder.name, body)
        assert "does not describe an export" in problems_of(folder)[0]


def test_exports_are_a_folder_of_attested_ones(folder):
    (folder / "exports" / "mine").mkdir()
    assert problems_of(folder) == ["no attestation names it: `forerun export` writes it again"]
    shutil.rmtree(folder / "exports")
    (folder / "attestations" / "export-native.json").unlink()
    (folder / "exports").write_text("")
    assert problems_of(folder) == ["it must be a folder: remove it"]


@pytest.mark.parametrize("depth", [600, 100_000])
def test_what_is_nested_too_deep_is_no_file_of_ours(folder, depth):
    nested = "[" * depth + "]" * depth
    (folder / "attestations" / "environment.json").write_text('{"body": {"x": ' + nested + "}}")
    # a newer parser goes so deep, and the content is not ours
    parsed = depth == 600 and sys.version_info >= (3, 12)
    refused = "does not have its hash|has the digest" if parsed else "recursion|nested too deep"
    assert re.search(refused, problems_of(folder)[0])
    (folder / "launch.json").write_text('{"digest": "", "decision": ' + nested + "}")
    with pytest.raises(TamperedError, match=refused):
        read_launch(folder)


@pytest.mark.parametrize("again", [False, True])
def test_freezing_that_fails_leaves_nothing_or_what_was(decision, tmp_path, monkeypatch, again):
    frozen_dir = tmp_path / "frozen"
    if again:
        write_frozen(frozen_dir, decision, BODIES)
        (frozen_dir / decision.digest / "notes.txt").write_text("")
    (frozen_dir / "freezing.part" / "left").mkdir(parents=True)

    def full(folder, kind, digest, body):
        if kind == "environment":
            raise OSError(28, "No space left on device", "environment.json")
        return attest(folder, kind, digest, body)

    with monkeypatch.context() as patched:
        patched.setattr(frozen_folder, "attest", full)
        with pytest.raises(OSError, match="No space left"):
            write_frozen(frozen_dir, decision, BODIES)
    assert [path.name for path in frozen_dir.iterdir()] == ([decision.digest] if again else [])
    folder = write_frozen(frozen_dir, decision, BODIES).parent
    assert [path.name for path in frozen_dir.iterdir()] == [decision.digest]
    assert (folder / "notes.txt").exists() == again
    look_through(folder, decision.digest)


def test_a_study_names_the_launch_file_that_was_edited(folder):
    study = folder.parent.parent
    assert edited(study) == []
    path = folder / "launch.json"
    content = path.read_text()
    path.write_text(content.replace('"on_non_finite": true', '"on_non_finite": false'))
    assert path.read_text() != content
    assert [str(path) in problem for problem in edited(study)] == [True]
    path.write_text(content)
    shutil.move(folder, folder.with_name("f" * 64))
    assert len(edited(study)) == 1
