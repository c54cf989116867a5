"""Names of studies and frozen configs as people type them; the keys of a plan, explained."""

import json
from pathlib import Path

import click
import pytest
from tiny_study import forerun

from launcher.base.study_names import (
    StudyNameError,
    default_study,
    frozen_named,
    shown_name,
    study_named,
)
from launcher.cli import cli
from launcher.plan.writing import SHOWN
from launcher.verbs.exports import verify
from launcher.verbs.repair import repair
from launcher.verbs.status import status

ONE, TWO = "ab" + "0" * 62, "ac" + "1" * 62


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def freeze(study, *digests):
    (study / "frozen").mkdir(parents=True, exist_ok=True)
    (study / "ledger.db").touch()
    for digest in digests:
        (study / "frozen" / digest).mkdir()
        (study / "frozen" / digest / "launch.json").write_text("{}")
    return study / "frozen"


def test_nothing_means_the_study_here(here):
    assert str(default_study()) == "study"
    (here / "ledger.db").touch()
    assert str(default_study()) == "."
    (here / "study").mkdir()
    assert str(default_study()) == "study"


def test_names_of_a_frozen_config(here):
    frozen = freeze(here / "study", ONE)
    for text in (
        None,
        "a",
        "ab0",
        ONE,
        "latest",
        "study",
        "study/ab",
        "study/latest",
        "study/frozen/ab",
    ):
        assert frozen_named(text).resolve() == frozen / ONE
        assert study_named(text).resolve() == here / "study"
    assert shown_name(frozen / ONE / "launch.json") == str(frozen / ONE[:12])
    assert frozen_named(shown_name(frozen / ONE)) == frozen / ONE


def test_what_fits_two_is_refused_with_both_names(here):
    freeze(here / "study", ONE, TWO)
    for text in (None, "a", "study"):
        with pytest.raises(StudyNameError) as error:
            frozen_named(text)
        assert ONE[:12] in str(error.value) and TWO[:12] in str(error.value)
    assert frozen_named("ac").name == TWO
    assert frozen_named("latest").name == TWO  # which was written last
    near = ONE[:-1] + "1"
    freeze(here / "study", near)
    with pytest.raises(StudyNameError) as error:
        frozen_named("ab")
    assert ONE in str(error.value) and near in str(error.value), "cut short, they would be one name"


def test_a_path_that_exists_wins_over_a_word(here):
    freeze(here / "study", ONE)
    for word in ("ab", "latest"):
        (here / word).mkdir()
        assert str(frozen_named(word)) == word


@pytest.mark.parametrize("text", ["b", "nothing", "other/ab", "abzz"])
def test_a_name_of_nothing_says_what_there_is(here, text):
    freeze(here / "study", ONE)
    with pytest.raises(StudyNameError, match="no such path"):
        frozen_named(text)
    code, _, err = forerun("verify", text)
    assert (code, "no such path" in err) == (2, True)


def test_explain_plan_names_every_key_once():
    code, out, _ = forerun("explain", "plan", "--json")
    keys = [one["key"] for one in json.loads(out)["keys"]]
    assert code == 0 and len(keys) == len(set(keys)) and set(keys) >= SHOWN
    (one,) = json.loads(forerun("explain", "plan", "num_trials", "--json")[1])["keys"]
    assert (one["key"], one["default"]) == ("search.num_trials", "24")
    assert [
        one["key"] for one in json.loads(forerun("explain", "plan", "seed", "--json")[1])["keys"]
    ] == ["search.seed", "ladder.seed", "launch.seed"]
    code, _, err = forerun("explain", "plan", "num_trails")
    assert (code, "search.num_trials" in err) == (2, True)


def test_explain_shows_a_studys_own_value_and_names_the_plans_key(here):
    code, _, err = forerun("explain", "learning_rate")
    assert (code, "forerun explain plan learning_rate" in err) == (2, True)
    (here / "study").mkdir(exist_ok=True)
    (here / "study" / "plan.toml").write_text("[search]\nnum_trials = 17\n")
    (one,) = json.loads(forerun("explain", "plan", "num_trials", "--json")[1])["keys"]
    assert (one["study_value"], one["default"]) == ("17", "24")
    assert forerun("explain", "plan", "num_trials")[1].startswith("search.num_trials = 17 ")
    (here / "study" / "plan.toml").write_text("[search\n")
    assert forerun("explain", "plan", "num_trials")[0] == 0, "a plan to be mended is no obstacle"


def test_ctrl_c_of_a_view_says_that_nothing_was_stopped(here, monkeypatch):
    def interrupted(_):
        raise KeyboardInterrupt

    monkeypatch.setattr("launcher.verbs.status._show_live", interrupted)
    code, _, err = forerun("status", "study", "--follow")
    assert (code, "nothing was stopped" in err) == (130, True)


def test_a_quick_plan_shows_what_people_change(here):
    code, out, _ = forerun("init", "--quick", "--json")
    assert (code, json.loads(out)["preset"]) == (0, "demo")
    lines = [
        line
        for line in (here / "plan.toml").read_text().splitlines()
        if " = " in line and line[0] != "#"
    ]
    assert len(lines) <= 50 and any(line.startswith("learning_rate") for line in lines)


def test_a_new_study_may_be_called_as_a_digest_begins(here):
    freeze(here / "study", ONE)
    command = cli.cli.get_command(click.Context(cli.cli), "run")
    assert str(command.make_context("run", ["--study", "ab"]).params["study_dir"]) == "ab"


def test_every_verb_of_a_study_takes_it_by_option_too():
    """`status --study x` was refused where `run --study x` works."""
    context = click.Context(cli.cli)
    without = {
        "demo",
        "init",
        "validate",
        "tokenize",
        "fit",
        "predict",
        "allocate",
        "flops",
        "completion",
    }
    for verb in cli.cli.list_commands(context):
        command = cli.cli.get_command(context, verb)
        options = {
            name
            for param in command.params
            if isinstance(param, click.Option)
            for name in param.opts
        }
        assert ("--study" in options) == (verb not in without), verb


def test_a_study_is_the_same_by_position_and_by_option(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    kept = []
    for name, verb in (("status", status), ("repair", repair)):
        monkeypatch.setattr(verb, "callback", lambda study_dir, **_: kept.append(study_dir))
        for words in (["x"], ["--study", "x"], ["x", "--study", "x"], []):
            assert forerun(name, *words)[0] == 0
        code, _, err = forerun(name, "x", "--study", "y")
        assert code == 2 and "x and --study y are two studies" in err
    assert kept == 2 * [Path("x"), Path("x"), Path("x"), Path("study")]


def test_a_frozen_config_is_looked_up_in_the_study_that_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    kept, config = [], tmp_path / "other" / "frozen" / ("ab" + "0" * 62)
    config.mkdir(parents=True)
    (config / "launch.json").write_text("{}")
    monkeypatch.setattr(verify, "callback", lambda frozen, **_: kept.append(frozen.resolve()))
    for words in (
        ["--study", "other"],
        ["latest", "--study", "other"],
        ["--study", "other", "ab00"],
        ["other/ab"],
    ):
        assert forerun("verify", *words)[0] == 0, words
    assert kept == 4 * [config]
    assert forerun("verify", "latest")[0] == 2
