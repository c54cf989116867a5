"""What every verb keeps, generated from the command line itself: JSON, exit codes, and where they
are written down.
"""

import re
from pathlib import Path

import click
import pytest
from tiny_study import ask, forerun

from launcher.cli import cli
from launcher.verbs.doctor import SHELLS
from proxies.core.errors import ExitCode

ROOT = Path(__file__).parents[2]
COMMANDS = {verb: cli.cli.get_command(click.Context(cli.cli), verb) for verb in cli._VERBS}
NONSENSE = "no/such/thimble"


def wrong_line(verb):
    """Every argument and every option that must be given, given something that is not there."""
    words = [verb]
    for param in COMMANDS[verb].params:
        if isinstance(param, click.Argument):
            words.append(NONSENSE)
        elif param.required:
            words += [param.opts[0], NONSENSE]
    return words


ASKING_NOTHING = {verb for verb in COMMANDS if wrong_line(verb) == [verb]}
"""Nothing typed is wrong for them; an option that is none is."""
NAMES_ANOTHER = {"note", "allocate"}
"""The first misses a study, the second a budget: that is said before the fit is looked for."""


@pytest.mark.parametrize("verb", COMMANDS)
def test_a_wrong_option_is_one_json_object(verb, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, body = ask(verb, "--no-such-option")
    assert (code, body["exit_code"], body["error"]) == (2, 2, "NoSuchOption")
    assert "--no-such-option" in body["message"] and body["problems"] == [body["message"]]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("verb", sorted(set(COMMANDS) - ASKING_NOTHING))
def test_what_is_not_there_is_one_json_object(verb, tmp_path, monkeypatch):
    """`ask` parses the whole of stdout as one object, and looks for no traceback."""
    monkeypatch.chdir(tmp_path)
    code, body = ask(*wrong_line(verb))
    assert (code, body["exit_code"]) == (2, 2)
    assert {"error", "message", "problems"} < set(body) and "This is a bug" not in body["message"]
    assert "thimble" in body["message"] or verb in NAMES_ANOTHER, "the value is named"
    assert list(tmp_path.iterdir()) == [], "what is refused leaves nothing behind"


def test_few_verbs_ask_for_nothing():
    """Else the test above would look at nothing."""
    assert {"demo", "doctor", "init", "flops"} == ASKING_NOTHING


def test_exit_codes_are_written_down_as_they_are():
    """In docs/command-line.md as a table, in README and in --help as a sentence."""
    page = (ROOT / "docs" / "command-line.md").read_text()
    table = {int(code): said for code, said in re.findall(r"^\| (\d+) \| ([^|]+?) \|", page, re.M)}
    assert table == {int(code): code.meaning for code in ExitCode}
    sentence = ", ".join(f"{code} {code.meaning}" for code in ExitCode)
    for text in (forerun("--help")[1], (ROOT / "README.md").read_text()):
        assert sentence in " ".join(text.split())


def test_the_pages_of_the_command_line_name_every_verb_and_shell():
    verbs = re.findall(r"^## (\w+)$", (ROOT / "docs" / "reference" / "cli.md").read_text(), re.M)
    assert verbs == list(cli._VERBS)
    page = (ROOT / "docs" / "command-line.md").read_text()
    assert all(line in page for line in SHELLS.values())
