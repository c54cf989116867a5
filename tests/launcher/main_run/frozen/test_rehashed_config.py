"""Tests of a frozen config that was edited and whose digest was then computed again.

The config's attestations name the digest that was frozen, so they show the edit. Every verb that
acts on the config must refuse it. A person may accept the config for launches; `forerun verify`
refuses it even then.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys

import pytest
from frozen_case import freeze
from main_run import make_tiny_decision
from scripted_job import SCRIPT_HEAD
from tiny_study import run_json

from forerun._launcher.main_run import event_log
from forerun._launcher.main_run.frozen.frozen_folder import ATTESTED, find_edited
from forerun._launcher.main_run.frozen.launch_file import get_attestation_path, write_launch
from forerun._proxies.core import canon

EACH_VERB = pytest.mark.parametrize(
    "arguments",
    [
        ("verify",),
        ("launch", "--data", "CORPUS"),
        ("launch", "--data", "CORPUS", "--dry-run"),
        ("launch", "--data", "CORPUS", "--trainer", "native"),
        ("launch", "--data", "CORPUS", "--sbatch", "job.sh"),
        ("export", "--to", "native"),
        ("rehearse", "--data", "CORPUS"),
        ("watch", "--once"),
        ("explain",),
        ("estimate",),
    ],
    ids=" ".join,
)
"""A verb that acts on a frozen config, with its options. `CORPUS` stands for the corpus folder."""


@pytest.fixture
def scripted_torchrun(monkeypatch):
    """Let a script of twelve steps stand in for torchrun."""
    command = [sys.executable, "-c", SCRIPT_HEAD + "end()"]
    monkeypatch.setattr(
        "forerun._launcher.main_run.supervisor.launch.build_torchrun_command",
        lambda *_, **__: command,
    )


@pytest.fixture
def rehashed_folder(scripted_torchrun, corpus, tmp_path):
    """Folder of a config whose learning rate was edited and whose digest was computed again.

    Its attestations are still those of the frozen config.
    """
    decision = make_tiny_decision(corpus)
    folder = freeze(tmp_path / "study", decision)
    first, *remaining = decision.groups
    settings = {**first.settings, "learning_rate": 2 * first.learning_rate}
    first = dataclasses.replace(first, settings=settings)
    forged = dataclasses.replace(decision, groups=(first, *remaining))
    forged_folder = write_launch(folder.parent, forged).parent
    shutil.move(folder / "attestations", forged_folder / "attestations")
    shutil.rmtree(folder)
    return forged_folder


def run_verb(arguments, folder, corpus):
    """Run a case of `EACH_VERB` on a config's folder; return the exit code and the JSON."""
    verb, *options = [str(corpus) if word == "CORPUS" else word for word in arguments]
    return run_json(verb, folder, *options)


def assert_every_attestation_has(problems, words):
    """Assert that the attestations of a freeze have one problem each with these words."""
    assert sum(words in problem for problem in problems) == len(ATTESTED)


@EACH_VERB
def test_rehashed_config_is_refused(rehashed_folder, corpus, tmp_path, monkeypatch, arguments):
    monkeypatch.chdir(tmp_path)
    code, body = run_verb(arguments, rehashed_folder, corpus)
    assert (code, body["error"]) == (5, "TamperedError")
    assert_every_attestation_has(body["problems"], "it is for the digest")
    assert not (rehashed_folder / "run").exists()
    assert not (tmp_path / "job.sh").exists()


def test_find_edited_names_a_rehashed_config(rehashed_folder):
    problems = find_edited(rehashed_folder.parent.parent)
    assert_every_attestation_has(problems, "it is for the digest")


def test_rehashed_config_can_be_launched_once_a_person_has_accepted_it(rehashed_folder, corpus):
    launch = ("launch", rehashed_folder, "--data", corpus)
    # A person must accept both checks, and give a reason.
    assert run_json(*launch, "--accept", "evidence", "--accept", "attestations")[0] == 2
    assert run_json(*launch, "--accept", "evidence", "--reason", "checked by hand")[0] == 5
    code, body = run_json(*launch, "--accept", "attestations", "--reason", "checked by hand")
    assert (code, body["event"]) == (0, "finished")
    attested = json.loads(get_attestation_path(rehashed_folder, "accepted").read_text())
    assert attested["body"]["reason"] == "checked by hand"
    assert attested["digest"] == rehashed_folder.name
    kinds = [entry.kind for entry in event_log.read_events(rehashed_folder.parent.parent)]
    assert kinds == ["accepted", "accepted"]
    # The acceptance is valid for later launches too, but not for verify, nor for a new problem.
    assert run_json("launch", rehashed_folder, "--data", corpus)[0] == 0
    assert run_json("verify", rehashed_folder)[0] == 5
    get_attestation_path(rehashed_folder, "environment").write_text("{}")
    assert run_json("launch", rehashed_folder, "--data", corpus)[0] == 5


def test_sound_config_has_nothing_to_accept(scripted_torchrun, corpus, tmp_path):
    folder = freeze(tmp_path / "study", make_tiny_decision(corpus))
    code, body = run_json(
        "launch", folder, "--data", corpus, "--accept", "evidence", "--reason", "no need"
    )
    assert code == 2 and "nothing to accept" in body["message"]


def test_config_without_one_attestation_is_refused(scripted_torchrun, corpus, tmp_path):
    folder = freeze(tmp_path / "study", make_tiny_decision(corpus))
    get_attestation_path(folder, "evidence").unlink()
    code, body = run_json("launch", folder, "--data", corpus)
    assert code == 5 and "evidence.json is missing" in body["problems"][0]


def test_rehashed_attestations_are_refused_without_their_record_in_the_ledger(
    rehashed_folder, corpus, tmp_path
):
    """The attestations name the new digest too, but the ledger lacks the record that they name."""
    for path in (rehashed_folder / "attestations").glob("*.json"):
        value = json.loads(path.read_text())
        value["digest"] = rehashed_folder.name
        if path.stem == "evidence":
            value["body"] = {"ledger_head": "0" * 64, "run_ids": []}
        del value["sha256"]
        path.write_bytes(canon.to_pretty_json({**value, "sha256": canon.compute_content_id(value)}))
    for arguments in (
        ("launch", "--data", corpus),
        ("watch", "--once"),
        ("export", "--to", "native"),
        ("estimate",),
    ):
        code, body = run_json(arguments[0], rehashed_folder, *arguments[1:])
        assert code == 5 and "record 000000000000" in body["problems"][0]


@EACH_VERB
def test_config_without_its_attestations_is_refused(
    rehashed_folder, corpus, tmp_path, monkeypatch, arguments
):
    """The attestations show an edit, so a config without them is refused too.

    Verbs that only print a command line refuse it as well.
    """
    monkeypatch.chdir(tmp_path)
    shutil.rmtree(rehashed_folder / "attestations")
    code, body = run_verb(arguments, rehashed_folder, corpus)
    assert (code, body["error"]) == (5, "TamperedError")
    assert_every_attestation_has(body["problems"], "is missing")
    assert not (tmp_path / "job.sh").exists()
