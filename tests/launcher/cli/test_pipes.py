"""Tests of paths that commands refuse: pipes, devices, bad links, and names that are not UTF-8.

Commands name the kind of a pipe or a device, and never wait for it.
"""

import os
import shutil

import pytest
from tiny_study import run_forerun, run_json

COMMANDS = {
    "ledger.db": ("status", "STUDY"),
    "ledger.db-journal": ("note", "--study", "STUDY", "hi"),
    "ledger.db-wal": ("status", "STUDY"),
    "logbook.md": ("note", "--study", "STUDY", "hi"),
    "plan.toml": ("status", "STUDY"),
    "report.html": ("report", "STUDY"),
    "report.json": ("report", "STUDY"),
    "chronicle.jsonl": ("note", "--study", "STUDY", "hi"),
    "driver.lock": ("freeze", "STUDY"),
    "live.json": ("status", "STUDY"),
    "findings.json": ("report", "STUDY"),
}
"""A command that opens the file, by the file's name."""


@pytest.mark.parametrize("name", COMMANDS)
def test_pipe_in_a_study_is_refused(finished_study_dir, tmp_path, name):
    study = tmp_path / "study"
    shutil.copytree(finished_study_dir / "study", study)
    (study / name).unlink(missing_ok=True)
    os.mkfifo(study / name)
    code, body = run_json(*(str(study) if word == "STUDY" else word for word in COMMANDS[name]))
    assert code == 2
    assert name in body["message"] and "is a pipe: must be a plain file" in body["message"]


def test_fit_into_a_pipe_is_refused_before_the_table_is_read(tmp_path):
    os.mkfifo(tmp_path / "fit.json")
    code, body = run_json("fit", tmp_path / "no.csv", "--out", tmp_path / "fit.json")
    assert code == 2 and "fit.json: it is a pipe" in body["message"]


@pytest.mark.parametrize(
    "make_special_file",
    [os.mkfifo, lambda path: path.symlink_to("/dev/zero")],
    ids=["pipe", "device"],
)
def test_plan_that_is_no_plain_file_is_refused(tmp_path, make_special_file):
    make_special_file(tmp_path / "plan.toml")
    code, body = run_json("validate", tmp_path / "plan.toml")
    assert code == 2 and "must be a plain file" in body["message"]


@pytest.mark.parametrize("name", ["x" * 300, "loop"], ids=["too long", "link to itself"])
def test_path_errors_do_not_advise_on_permissions(tmp_path, name):
    (tmp_path / "loop").symlink_to("loop")
    code, _, err = run_forerun("status", tmp_path / name)
    assert code == 2 and "permissions" not in err


@pytest.mark.parametrize(
    "verb", ["run", "status", "launch", "validate", "note --study", "init --out"]
)
def test_path_that_is_not_utf_8_is_refused(tmp_path, verb):
    name = os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9")
    os.mkdir(name)  # noqa: PTH102
    code, body = run_json(*verb.split(), name)
    assert code == 2 and r"caf\xe9: a name must be UTF-8" in body["message"]
    assert os.listdir(name) == []  # noqa: PTH208
