"""What a shell is offered, through the protocol that its script speaks, and in bash itself."""

import contextlib
import io
import json
import subprocess
import sys

import pytest
from tiny_study import forerun

from launcher.cli import cli
from launcher.verbs.doctor import SHELLS

HEAVY = {
    "torch",
    "ray",
    "optuna",
    "wandb",
    "mup",
    "matplotlib",
    "scipy",
    "pydantic",
    "pyarrow",
    "rich",
}


@pytest.fixture
def offered(monkeypatch):
    """Types and words that are offered after a line, its last word unfinished."""

    def ask(*words):
        monkeypatch.setenv("_FORERUN_COMPLETE", "bash_complete")
        monkeypatch.setenv("COMP_WORDS", " ".join(["forerun", *words]))
        monkeypatch.setenv("COMP_CWORD", str(len(words)))
        with (
            contextlib.redirect_stdout(io.TextIOWrapper(io.BytesIO())) as out,
            pytest.raises(SystemExit) as stop,
        ):
            cli.main([])
        out.seek(0)
        assert stop.value.code == 0
        return [tuple(line.split(",", 1)) for line in out.read().splitlines()]

    return ask


def test_verbs_are_offered_without_loading_any(offered):
    assert offered("st") == [("plain", "status")]
    assert {word for _, word in offered("")} == set(cli._VERBS)
    assert offered("--he") == [("plain", "--help")]
    assert ("plain", "--version") in offered("--")
    assert offered("nothing-like-it") == [("",)]


def test_options_and_choices_of_a_verb(offered):
    assert ("plain", "--bootstrap") in offered("fit", "--")
    assert offered("fit", "--form", "chin") == [("plain", "chinchilla")]
    assert offered("completion", "") == [("plain", shell) for shell in SHELLS]


@pytest.mark.parametrize("shell", SHELLS)
def test_the_script_of_every_shell(shell):
    code, out, err = forerun("completion", shell)
    assert (code, err) == (0, "")
    assert f"_FORERUN_COMPLETE={shell}_complete" in out
    code, printed, _ = forerun("completion", shell, "--json")
    assert (code, json.loads(printed)) == (
        0,
        {"shell": shell, "line": SHELLS[shell], "script": out.removesuffix("\n")},
    )
    assert SHELLS[shell] in forerun("completion", "--help")[1]


def test_no_help_and_no_key_press_loads_anything_heavy():
    """Every verb's own module, in one fresh interpreter."""
    code = (
        "import sys, click\nfrom launcher.cli import cli\n"
        "for verb in cli._VERBS:\n    cli.cli.get_command(None, "
        "verb).get_help(click.Context(cli.cli))\n"
        "    print(verb, *{name.split('.')[0] for name in sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = {line.split()[0]: HEAVY & set(line.split()[1:]) for line in done.stdout.splitlines()}
    assert loaded == {verb: set() for verb in cli._VERBS}
