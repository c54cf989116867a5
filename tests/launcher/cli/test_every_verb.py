"""Tests that hold for every verb of the command line.

Errors are printed as one JSON object, and the documentation has every verb and exit code.
"""

import re
from pathlib import Path

import click
import pytest
from tiny_study import run_forerun, run_json

from forerun._launcher.cli import cli
from forerun._launcher.cli.verbs.doctor import SHELLS
from forerun._proxies.core.errors import ExitCode

ROOT = Path(__file__).parents[3]
COMMANDS = {verb: cli.cli.get_command(click.Context(cli.cli), verb) for verb in cli.VERBS}
MISSING_FILE = "no/such/thimble"


def build_wrong_line(verb):
    """Return a verb's command line with a missing file as each required argument and option."""
    words = [verb]
    for param in COMMANDS[verb].params:
        if isinstance(param, click.Argument):
            words.append(MISSING_FILE)
        elif param.required:
            words += [param.opts[0], MISSING_FILE]
    return words


VERBS_WITHOUT_REQUIRED_INPUT = {verb for verb in COMMANDS if build_wrong_line(verb) == [verb]}
"""Verbs without a required argument or option."""
VERBS_WITH_ANOTHER_PROBLEM = {"note", "allocate"}
"""Verbs that report a missing study or budget before they look for the file."""


@pytest.mark.parametrize("verb", COMMANDS)
def test_unknown_option_is_reported_as_one_json_object(verb, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, body = run_json(verb, "--no-such-option")
    assert (code, body["exit_code"], body["error"]) == (2, 2, "NoSuchOption")
    assert "--no-such-option" in body["message"] and body["problems"] == [body["message"]]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("verb", sorted(set(COMMANDS) - VERBS_WITHOUT_REQUIRED_INPUT))
def test_missing_file_is_reported_as_one_json_object(verb, tmp_path, monkeypatch):
    """`run_json` parses all of stdout as one object and fails on a traceback."""
    monkeypatch.chdir(tmp_path)
    code, body = run_json(*build_wrong_line(verb))
    assert (code, body["exit_code"]) == (2, 2)
    assert {"error", "message", "problems"} < set(body) and "This is a bug" not in body["message"]
    is_named = Path(MISSING_FILE).name in body["message"]
    assert is_named or verb in VERBS_WITH_ANOTHER_PROBLEM, "the value is named"
    assert list(tmp_path.iterdir()) == [], "a refused command leaves nothing behind"


def test_few_verbs_require_nothing():
    """The test above skips these verbs, so there must be few."""
    assert {"demo", "doctor", "init", "flops"} == VERBS_WITHOUT_REQUIRED_INPUT


def test_documented_exit_codes_are_the_real_ones():
    """docs/command-line.md lists them as a table; README and --help list them as a sentence."""
    page = (ROOT / "docs" / "command-line.md").read_text()
    rows = re.findall(r"^\| (\d+) \| ([^|]+?) \|", page, re.M)
    table = {int(code): meaning for code, meaning in rows}
    assert table == {int(code): code.meaning for code in ExitCode}
    sentence = ", ".join(f"{code} {code.meaning}" for code in ExitCode)
    for text in (run_forerun("--help")[1], (ROOT / "README.md").read_text()):
        assert sentence in " ".join(text.split())


def test_documentation_names_every_verb_and_shell():
    verbs = re.findall(r"^## (\w+)$", (ROOT / "docs" / "reference" / "cli.md").read_text(), re.M)
    assert verbs == list(cli.VERBS)
    page = (ROOT / "docs" / "command-line.md").read_text()
    assert all(line in page for line in SHELLS.values())
