"""What the main refusals say, word for word: people read them, and search for them."""

import contextlib
import json
import os
import sqlite3

import pytest
from tiny_study import PLAN, forerun, write_corpus

from launcher.study.opening import open_ledger, plan_study
from sweeps.store.lock import DriverLock

FOLDER = "<folder>"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A corpus, a plan, and a study that was begun and has run nothing."""
    folder = tmp_path_factory.mktemp("errors")
    write_corpus(folder)
    (folder / "plan.toml").write_text(PLAN)
    (folder / "typo.toml").write_text("[serach]\nseed = 1\n[proxy]\nnum_steps = 0\n")
    open_ledger(plan_study(folder / "plan.toml", folder / "study")).close()
    (folder / "runs.csv").write_text("params,tokens,loss\n1e6,1e7,3.1\n-1,1e7,many\n")
    (folder / "rates.csv").write_text("width,lr\n32,0.1\n")
    return folder


def said(folder, *arguments):
    """Exit code and message, with the folder's name taken out; the same words on stderr and in the JSON."""
    arguments = [str(argument).replace(FOLDER, str(folder)) for argument in arguments]
    code, out, err = forerun(*arguments, "--json")
    body = json.loads(out)
    assert body["exit_code"] == code
    assert f"forerun: {body['message']}\n" in err
    return code, body["message"].replace(str(folder), FOLDER)


REFUSALS = [
    (
        ("run", "<folder>/typo.toml"),
        2,
        (
            "<folder>/typo.toml: 2 problems\n"
            "  proxy.num_steps = 0: must be greater than or equal to 1 (line 4)\n"
            "  serach is unknown: did you mean search? (line 1)"
        ),
    ),
    (
        ("run", "<folder>/plan.toml", "--study", "<folder>/study", "--set", "search.seed=7"),
        2,
        (
            "the plan differs from the one this study was started with:\n"
            "  search.seed: 0 -> 7\n"
            "put the old values back, or start a child study that takes over the finished runs: forerun run PLAN "
            "--study ANOTHER --fork <folder>/study"
        ),
    ),
    (
        ("run", "<folder>/plan.toml", "--set", 'data.path="gone"'),
        2,
        "<folder>/gone/manifest.json does not exist: `forerun tokenize SOURCE... --out <folder>/gone` writes it",
    ),
    (
        ("validate", "<folder>/plan.toml", "--set", 'data.path="gone"'),
        2,
        (
            "<folder>/plan.toml: 1 problem\n"
            "  data.path = 'gone': no corpus there; `forerun tokenize SOURCE... --out <folder>/gone` makes it"
        ),
    ),
    (
        ("status", "<folder>"),
        2,
        "<folder> holds no study: name another folder, or start one with `forerun run PLAN`",
    ),
    (("freeze", "<folder>/study"), 2, "the study has not ended: `forerun run PLAN` continues it"),
    (
        ("fit", "<folder>/study"),
        2,
        "the search has not ended: `forerun sweep PLAN` runs or resumes it",
    ),
    (("freeze", "<folder>/study", "--reason", "x"), 2, "--accept GATE and --reason TEXT go together"),
    (
        ("init", "--out", "<folder>/plan.toml"),
        2,
        "Invalid value: <folder>/plan.toml exists: name another file with --out, or remove it",
    ),
    (("verify", "<folder>/gone"), 2, "<folder>/gone: cannot be read: No such file or directory"),
    (("transfer",), 2, "name a PLAN, or a table with --runs FILE"),
    (("statsu",), 2, "No such verb 'statsu'. Did you mean 'status'?"),
]


@pytest.mark.parametrize(("arguments", "code", "message"), REFUSALS, ids=lambda value: str(value)[:60])
def test_a_refusal_word_for_word(folder, arguments, code, message):
    assert said(folder, *arguments) == (code, message)


def test_tables_name_row_and_column(folder):
    code, message = said(folder, "fit", "<folder>/runs.csv")
    assert code == 2
    assert "row 3" in message
    assert "params" in message
    assert "loss" in message, "every bad cell at once"
    code, message = said(folder, "transfer", "--runs", "<folder>/rates.csv")
    assert code == 2
    assert "no column for loss" in message


def test_a_held_study_names_its_holder(folder):
    with DriverLock(folder / "study") as lock:
        code, message = said(folder, "run", "<folder>/plan.toml", "--study", "<folder>/study")
    holder = f"pid {os.getpid()} on {lock.holder['host']} since {lock.holder['since']}"
    assert code == 75
    assert message == f"<folder>/study is held by {holder}: wait for it or stop it; `status` works meanwhile"


def test_a_tampered_ledger_names_the_record(folder, tmp_path):
    open_ledger(plan_study(folder / "plan.toml", tmp_path / "study")).close()
    with contextlib.closing(sqlite3.connect(tmp_path / "study" / "ledger.db")) as connection, connection:
        connection.execute("UPDATE records SET body = '{}' WHERE seq = 1")
    study = tmp_path / "study"
    assert said(folder, "status", study) == (
        5,
        (
            f"{study}/ledger.db: record 1 is not what was written: its hash differs; nothing was changed. `forerun "
            f"repair {study}` copies the file, then saves what its hashes prove"
        ),
    )
