"""Tests of the names by which a user refers to studies and frozen configs on the command line."""

from pathlib import Path

import click
import pytest
from tiny_study import run_forerun

from forerun._launcher.cli import cli
from forerun._launcher.cli.verbs.exports import verify
from forerun._launcher.cli.verbs.repair import repair
from forerun._launcher.cli.verbs.status import status
from forerun._launcher.main_run.frozen.config_names import (
    StudyNameError,
    find_default_study,
    find_frozen_config,
    find_study,
    shorten_config_name,
)

FIRST_DIGEST, SECOND_DIGEST = "ab" + "0" * 62, "ac" + "1" * 62


@pytest.fixture
def work_dir(tmp_path, monkeypatch):
    """An empty folder that is the working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def make_frozen_study(study, *digests):
    """Make a study with a frozen folder for each digest; return the folder that holds them."""
    (study / "frozen").mkdir(parents=True, exist_ok=True)
    (study / "ledger.db").touch()
    for digest in digests:
        (study / "frozen" / digest).mkdir()
        (study / "frozen" / digest / "launch.json").write_text("{}")
    return study / "frozen"


def test_default_study_is_the_one_in_the_working_directory(work_dir):
    assert str(find_default_study()) == "study"
    (work_dir / "ledger.db").touch()
    assert str(find_default_study()) == "."
    (work_dir / "study").mkdir()
    assert str(find_default_study()) == "study"


def test_frozen_config_has_several_names(work_dir):
    frozen = make_frozen_study(work_dir / "study", FIRST_DIGEST)
    for text in (
        None,
        "a",
        "ab0",
        FIRST_DIGEST,
        "latest",
        "study",
        "study/ab",
        "study/latest",
        "study/frozen/ab",
    ):
        assert find_frozen_config(text).resolve() == frozen / FIRST_DIGEST
        assert find_study(text).resolve() == work_dir / "study"
    assert shorten_config_name(frozen / FIRST_DIGEST / "launch.json") == str(
        frozen / FIRST_DIGEST[:12]
    )
    assert find_frozen_config(shorten_config_name(frozen / FIRST_DIGEST)) == frozen / FIRST_DIGEST


def test_ambiguous_name_is_refused_with_both_candidates(work_dir):
    make_frozen_study(work_dir / "study", FIRST_DIGEST, SECOND_DIGEST)
    for text in (None, "a", "study"):
        with pytest.raises(StudyNameError) as error:
            find_frozen_config(text)
        assert FIRST_DIGEST[:12] in str(error.value) and SECOND_DIGEST[:12] in str(error.value)
    assert find_frozen_config("ac").name == SECOND_DIGEST
    assert find_frozen_config("latest").name == SECOND_DIGEST, "written last"
    similar_digest = FIRST_DIGEST[:-1] + "1"
    make_frozen_study(work_dir / "study", similar_digest)
    with pytest.raises(StudyNameError) as error:
        find_frozen_config("ab")
    for digest in (FIRST_DIGEST, similar_digest):
        assert digest in str(error.value), "the short names are equal"


def test_existing_path_wins_over_a_name(work_dir):
    make_frozen_study(work_dir / "study", FIRST_DIGEST)
    for word in ("ab", "latest"):
        (work_dir / word).mkdir()
        assert str(find_frozen_config(word)) == word


@pytest.mark.parametrize("text", ["b", "nothing", "other/ab", "abzz"])
def test_unknown_name_is_refused(work_dir, text):
    make_frozen_study(work_dir / "study", FIRST_DIGEST)
    with pytest.raises(StudyNameError, match="no such path"):
        find_frozen_config(text)
    code, _, err = run_forerun("verify", text)
    assert (code, "no such path" in err) == (2, True)


def test_new_study_may_be_named_like_the_start_of_a_digest(work_dir):
    make_frozen_study(work_dir / "study", FIRST_DIGEST)
    command = cli.cli.get_command(click.Context(cli.cli), "run")
    assert str(command.make_context("run", ["--study", "ab"]).params["study_dir"]) == "ab"


def test_every_verb_of_a_study_has_a_study_option():
    """`status --study x` was once refused although `run --study x` works."""
    context = click.Context(cli.cli)
    verbs_without_study = {
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
        options = set()
        for param in command.params:
            if isinstance(param, click.Option):
                options.update(param.opts)
        assert ("--study" in options) == (verb not in verbs_without_study), verb


def test_study_can_be_given_by_position_or_by_option(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    study_dirs = []
    for name, verb in (("status", status), ("repair", repair)):
        monkeypatch.setattr(verb, "callback", lambda study_dir, **_: study_dirs.append(study_dir))
        for words in (["x"], ["--study", "x"], ["x", "--study", "x"], []):
            assert run_forerun(name, *words)[0] == 0
        code, _, err = run_forerun(name, "x", "--study", "y")
        assert code == 2 and "x and --study y are two studies" in err
    assert study_dirs == 2 * [Path("x"), Path("x"), Path("x"), Path("study")]


def test_frozen_config_is_looked_up_in_the_named_study(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folders, config = [], tmp_path / "other" / "frozen" / ("ab" + "0" * 62)
    config.mkdir(parents=True)
    (config / "launch.json").write_text("{}")
    monkeypatch.setattr(verify, "callback", lambda frozen, **_: folders.append(frozen.resolve()))
    for words in (
        ["--study", "other"],
        ["latest", "--study", "other"],
        ["--study", "other", "ab00"],
        ["other/ab"],
    ):
        assert run_forerun("verify", *words)[0] == 0, words
    assert folders == 4 * [config]
    assert run_forerun("verify", "latest")[0] == 2
