"""A pipe in place of a file that a command reads or writes: refused with its kind, and never waited
for.
"""

import os
import shutil

import pytest
from tiny_study import ask, forerun

PLACES = {
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


@pytest.mark.parametrize("place", PLACES)
def test_a_pipe_in_a_study_is_refused(finished, tmp_path, place):
    study = tmp_path / "study"
    shutil.copytree(finished / "study", study)
    (study / place).unlink(missing_ok=True)
    os.mkfifo(study / place)
    code, body = ask(*(str(study) if word == "STUDY" else word for word in PLACES[place]))
    assert code == 2
    assert place in body["message"] and "is a pipe: must be a plain file" in body["message"]


def test_a_fit_does_not_go_into_a_pipe(tmp_path):
    """Said before the table is read, let alone fitted: there is none."""
    os.mkfifo(tmp_path / "fit.json")
    code, body = ask("fit", tmp_path / "no.csv", "--out", tmp_path / "fit.json")
    assert code == 2 and "fit.json: it is a pipe" in body["message"]


@pytest.mark.parametrize(
    "make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")], ids=["pipe", "device"]
)
def test_neither_is_a_plan(tmp_path, make):
    make(tmp_path / "plan.toml")
    code, body = ask("validate", tmp_path / "plan.toml")
    assert code == 2 and "must be a plain file" in body["message"]


def test_advice_follows_the_error(tmp_path):
    code, _, err = forerun("status", tmp_path / ("x" * 300))
    assert code == 2 and "permissions" not in err
    (tmp_path / "loop").symlink_to("loop")
    code, _, err = forerun("status", tmp_path / "loop")
    assert code == 2 and "permissions" not in err


@pytest.mark.parametrize(
    "verb", ["run", "status", "launch", "validate", "note --study", "init --out"]
)
def test_a_name_that_is_not_utf_8_is_refused_at_the_start(tmp_path, verb):
    name = os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9")
    os.mkdir(name)  # noqa: PTH102
    code, body = ask(*verb.split(), name)
    assert code == 2 and r"caf\xe9: a name must be UTF-8" in body["message"]
    assert os.listdir(name) == []  # noqa: PTH208
