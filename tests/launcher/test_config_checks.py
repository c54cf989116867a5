"""A config that was edited and hashed again: every verb that acts on it refuses it, unless somebody
accepts it.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys

import pytest
from main_run import tiny_decision
from scripted_job import HEAD
from test_launching import freeze
from tiny_study import ask

from launcher.base import chronicle
from launcher.frozen.frozen_folder import edited
from launcher.frozen.launch_file import path_of, write_launch
from proxies.core import canon


@pytest.fixture
def rehashed_folder(corpus, tmp_path, monkeypatch):
    """Return the folder of a config with an edited learning rate, whose digest was computed
    again.
    """
    line = [sys.executable, "-c", HEAD + "for number in range(1, 13): step(number)\nend()"]
    monkeypatch.setattr("launcher.supervisor.launch.torchrun_command", lambda *_, **__: line)
    decision = tiny_decision(corpus)
    folder = freeze(tmp_path / "study", decision)
    first, *remaining = decision.groups
    settings = {**first.settings, "learning_rate": 2 * first.learning_rate}
    first = dataclasses.replace(first, settings=settings)
    forged = dataclasses.replace(decision, groups=(first, *remaining))
    forged_folder = write_launch(folder.parent, forged).parent
    shutil.move(folder / "attestations", forged_folder / "attestations")
    shutil.rmtree(folder)
    return forged_folder


@pytest.mark.parametrize(
    "arguments",
    [
        ("verify",),
        ("launch", "--data", "CORPUS"),
        ("launch", "--data", "CORPUS", "--dry-run"),
        ("export", "--to", "native"),
        ("rehearse", "--data", "CORPUS"),
        ("watch", "--once"),
        ("explain",),
        ("estimate",),
    ],
    ids=" ".join,
)
def test_a_config_that_was_hashed_again_is_refused(rehashed_folder, corpus, arguments):
    verb, *options = [str(corpus) if word == "CORPUS" else word for word in arguments]
    code, body = ask(verb, rehashed_folder, *options)
    assert (code, body["error"]) == (5, "TamperedError")
    assert sum("it is for the digest" in problem for problem in body["problems"]) == 3
    assert not (rehashed_folder / "run").exists()


def test_main_runs_of_such_a_config_are_refused_and_reports_name_it(rehashed_folder):
    assert (
        sum("it is for the digest" in problem for problem in edited(rehashed_folder.parent.parent))
        == 3
    )


def test_only_a_reason_on_record_lets_it_pass(rehashed_folder, corpus):
    launch = ("launch", rehashed_folder, "--data", corpus)
    assert ask(*launch, "--accept", "evidence", "--accept", "attestations")[0] == 2, (
        "a reason is needed"
    )
    assert ask(*launch, "--accept", "evidence", "--reason", "checked by hand")[0] == 5, (
        "one check is left"
    )
    code, body = ask(*launch, "--accept", "attestations", "--reason", "checked by hand")
    assert (code, body["event"]) == (0, "finished")
    attested = json.loads(path_of(rehashed_folder, "accepted").read_text())
    assert (
        attested["body"]["reason"] == "checked by hand"
        and attested["digest"] == rehashed_folder.name
    )
    kinds = [entry.kind for entry in chronicle.entries(rehashed_folder.parent.parent)]
    assert kinds == ["accepted", "accepted"]
    assert ask("launch", rehashed_folder, "--data", corpus)[0] == 0, (
        "what is on record stays accepted"
    )
    assert ask("verify", rehashed_folder)[0] == 5, "verify proves, it accepts nothing"
    path_of(rehashed_folder, "environment").write_text("{}")
    assert ask("launch", rehashed_folder, "--data", corpus)[0] == 5, (
        "another problem was not accepted"
    )


def test_a_sound_config_needs_what_freezing_attests(corpus, tmp_path, monkeypatch):
    line = [sys.executable, "-c", HEAD + "end()"]
    monkeypatch.setattr("launcher.supervisor.launch.torchrun_command", lambda *_, **__: line)
    folder = freeze(tmp_path / "study", tiny_decision(corpus))
    code, body = ask(
        "launch", folder, "--data", corpus, "--accept", "evidence", "--reason", "no need"
    )
    assert code == 2 and "nothing to accept" in body["message"]
    path_of(folder, "evidence").unlink()
    code, body = ask("launch", folder, "--data", corpus)
    assert code == 5 and "evidence.json is missing" in body["problems"][0]


def test_the_ledger_must_hold_the_evidence(rehashed_folder, corpus, tmp_path):
    """Hash all attestations again as well: the study's ledger still lacks the runs that they
    name.
    """
    for path in (rehashed_folder / "attestations").glob("*.json"):
        value = json.loads(path.read_text())
        value["digest"] = rehashed_folder.name
        if path.stem == "evidence":
            value["body"] = {"ledger_head": "0" * 64, "run_ids": []}
        del value["sha256"]
        path.write_bytes(canon.pretty({**value, "sha256": canon.content_id(value)}))
    for arguments in (
        ("launch", "--data", corpus),
        ("watch", "--once"),
        ("export", "--to", "native"),
        ("estimate",),
    ):
        code, body = ask(arguments[0], rehashed_folder, *arguments[1:])
        assert code == 5 and "record 000000000000" in body["problems"][0]


@pytest.mark.parametrize(
    "arguments",
    [
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
def test_a_config_without_its_attestations_is_refused(
    rehashed_folder, corpus, tmp_path, monkeypatch, arguments
):
    """Removing what proves an edit must not make it pass, also where a line is printed that runs
    elsewhere.
    """
    monkeypatch.chdir(tmp_path)
    shutil.rmtree(rehashed_folder / "attestations")
    verb, *options = [str(corpus) if word == "CORPUS" else word for word in arguments]
    code, body = ask(verb, rehashed_folder, *options)
    assert (code, body["error"]) == (5, "TamperedError")
    assert sum("is missing" in problem for problem in body["problems"]) == 3
    assert not (tmp_path / "job.sh").exists()
