"""Tests of shell completion, through the protocol that the shells' scripts use."""

import contextlib
import io
import json
import subprocess
import sys

import pytest
from tiny_study import run_forerun

from forerun._launcher.cli import cli
from forerun._launcher.cli.verbs.doctor import SHELLS

HEAVY_PACKAGES = {
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
"""Packages that take long to import."""


@pytest.fixture
def complete(monkeypatch):
    """Function that returns the completions, as (type, word), of a line's unfinished last word."""

    def complete_line(*words):
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

    return complete_line


def test_completion_offers_verbs_and_global_options(complete):
    assert complete("st") == [("plain", "status")]
    assert {word for _, word in complete("")} == set(cli.VERBS)
    assert complete("--he") == [("plain", "--help")]
    assert ("plain", "--version") in complete("--")
    assert complete("nothing-like-it") == [("",)]


def test_completion_offers_options_and_choices_of_a_verb(complete):
    assert ("plain", "--bootstrap") in complete("fit", "--")
    assert complete("fit", "--form", "chin") == [("plain", "chinchilla")]
    assert complete("completion", "") == [("plain", shell) for shell in SHELLS]


@pytest.mark.parametrize("shell", SHELLS)
def test_completion_prints_the_script_of_each_shell(shell):
    code, out, err = run_forerun("completion", shell)
    assert (code, err) == (0, "")
    assert f"_FORERUN_COMPLETE={shell}_complete" in out
    code, printed, _ = run_forerun("completion", shell, "--json")
    assert (code, json.loads(printed)) == (
        0,
        {"shell": shell, "line": SHELLS[shell], "script": out.removesuffix("\n")},
    )
    assert SHELLS[shell] in run_forerun("completion", "--help")[1]


SHOW_ALL_HELP = """
import sys, click
from forerun._launcher.cli import cli

for verb in cli.VERBS:
    cli.cli.get_command(None, verb).get_help(click.Context(cli.cli))
    print(verb, *{name.split(".")[0] for name in sys.modules})
"""
"""A program that prints each verb with the packages that are loaded after its help was made."""


def test_help_of_no_verb_imports_a_heavy_package():
    """Completion imports the same modules, so that a key press stays fast."""
    done = subprocess.run(
        [sys.executable, "-c", SHOW_ALL_HELP], capture_output=True, text=True, check=True
    )
    heavy_packages_by_verb = {}
    for line in done.stdout.splitlines():
        verb, *packages = line.split()
        assert "click" in packages, "loaded packages are listed"
        heavy_packages_by_verb[verb] = HEAVY_PACKAGES & set(packages)
    assert heavy_packages_by_verb == {verb: set() for verb in cli.VERBS}
