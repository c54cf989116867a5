"""Tests of a frozen config that was edited and hashed again.

Every verb that acts on the config must refuse it until a person accepts it.
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
from forerun._launcher.main_run.frozen.frozen_folder import find_edited
from forerun._launcher.main_run.frozen.launch_file import get_attestation_path, write_launch
from forerun._proxies.core import canon


@pytest.fixture
def rehashed_folder(corpus, tmp_path, monkeypatch):
    """Folder of a config whose learning rate was edited and whose digest was computed again.

    A scripted job of twelve steps stands in for torchrun.
    """
    line = [sys.executable, "-c", SCRIPT_HEAD + "for number in range(1, 13): step(number)\nend()"]
    monkeypatch.setattr(
        "forerun._launcher.main_run.supervisor.launch.build_torchrun_command", lambda *_, **__: line
    )
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
def test_rehashed_config_is_refused(rehashed_folder, corpus, arguments):
    verb, *options = [str(corpus) if word == "CORPUS" else word for word in arguments]
    code, body = run_json(verb, rehashed_folder, *options)
    assert (code, body["error"]) == (5, "TamperedError")
    assert sum("it is for the digest" in problem for problem in body["problems"]) == 3
    assert not (rehashed_folder / "run").exists()


def test_find_edited_names_a_rehashed_config(rehashed_folder):
    problems = find_edited(rehashed_folder.parent.parent)
    assert sum("it is for the digest" in problem for problem in problems) == 3


def test_recorded_reason_lets_a_rehashed_config_pass(rehashed_folder, corpus):
    launch = ("launch", rehashed_folder, "--data", corpus)
    # Both checks must be accepted, and with a reason.
    assert run_json(*launch, "--accept", "evidence", "--accept", "attestations")[0] == 2
    assert run_json(*launch, "--accept", "evidence", "--reason", "checked by hand")[0] == 5
    code, body = run_json(*launch, "--accept", "attestations", "--reason", "checked by hand")
    assert (code, body["event"]) == (0, "finished")
    attested = json.loads(get_attestation_path(rehashed_folder, "accepted").read_text())
    assert attested["body"]["reason"] == "checked by hand"
    assert attested["digest"] == rehashed_folder.name
    kinds = [entry.kind for entry in event_log.read_events(rehashed_folder.parent.parent)]
    assert kinds == ["accepted", "accepted"]
    # A recorded acceptance stays valid for a launch, but not for verify, nor for another problem.
    assert run_json("launch", rehashed_folder, "--data", corpus)[0] == 0
    assert run_json("verify", rehashed_folder)[0] == 5
    get_attestation_path(rehashed_folder, "environment").write_text("{}")
    assert run_json("launch", rehashed_folder, "--data", corpus)[0] == 5


def test_missing_attestation_is_refused_and_nothing_else_needs_acceptance(
    corpus, tmp_path, monkeypatch
):
    line = [sys.executable, "-c", SCRIPT_HEAD + "end()"]
    monkeypatch.setattr(
        "forerun._launcher.main_run.supervisor.launch.build_torchrun_command", lambda *_, **__: line
    )
    folder = freeze(tmp_path / "study", make_tiny_decision(corpus))
    code, body = run_json(
        "launch", folder, "--data", corpus, "--accept", "evidence", "--reason", "no need"
    )
    assert code == 2 and "nothing to accept" in body["message"]
    get_attestation_path(folder, "evidence").unlink()
    code, body = run_json("launch", folder, "--data", corpus)
    assert code == 5 and "evidence.json is missing" in body["problems"][0]


def test_rehashed_attestations_are_refused_without_their_runs_in_the_ledger(
    rehashed_folder, corpus, tmp_path
):
    """All attestations are hashed again too, but the ledger lacks the runs that they name."""
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
def test_config_without_its_attestations_is_refused(
    rehashed_folder, corpus, tmp_path, monkeypatch, arguments
):
    """The attestations prove the edit, so a config without them is refused too.

    This also holds for verbs that only print a command line.
    """
    monkeypatch.chdir(tmp_path)
    shutil.rmtree(rehashed_folder / "attestations")
    verb, *options = [str(corpus) if word == "CORPUS" else word for word in arguments]
    code, body = run_json(verb, rehashed_folder, *options)
    assert (code, body["error"]) == (5, "TamperedError")
    assert sum("is missing" in problem for problem in body["problems"]) == 3
    assert not (tmp_path / "job.sh").exists()
