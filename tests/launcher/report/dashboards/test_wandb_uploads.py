"""Tests of uploads to W&B: the upload is verified, and runs that did not arrive are named.

The real wandb library talks to a fake service on this machine, which can fail on purpose.
"""

from types import SimpleNamespace

import pytest
from tiny_study import run_json
from wandb_case import STUDY, Server, make_study_records

from forerun._launcher.report.dashboards import runs as dashboard_runs
from forerun._launcher.report.dashboards import wandb_writer
from forerun._launcher.report.dashboards.wandb_process import list_missing_parts
from forerun._launcher.report.dashboards.wandb_writer import WandbTarget, log_runs, upload_runs

KEY = "5ec7e7" * 6 + "0000"
"""API key of the user, which must not be written to any file."""
FIRST_RUN_ID = f"{1:016x}"


@pytest.fixture(scope="module")
def logged_study(tmp_path_factory):
    """Folder of a study with two proxy runs, logged offline; tests must not change its files."""
    study = tmp_path_factory.mktemp("logged") / "study"
    log_runs(study, make_study_records())
    return study


@pytest.fixture
def login(tmp_path, monkeypatch):
    """Function that logs the user in to a fake service, with a short time limit for uploads."""
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(wandb_writer, "ARRIVAL_SECONDS", 1.0)
    return lambda server: monkeypatch.setenv("WANDB_BASE_URL", server.url)


def test_logged_runs_are_uploaded_once_and_verified(logged_study, login):
    with Server() as server:
        login(server)
        arrived = upload_runs(logged_study, make_study_records(), WandbTarget(entity="me"))
        # The three runs are the study itself and its two proxies.
        assert (arrived.num_sent, arrived.num_there, arrived.lacking) == (3, 3, {})
        assert arrived.url == f"{server.url}/me/forerun"
        run = server.runs[FIRST_RUN_ID]
        assert [row["train_loss_nats"] for row in run["history"].values()] == [
            8.0 / 2**step for step in range(1, 6)
        ]
        assert run["config"]["study"]["value"] == STUDY and run["attributes"]["group"] == "search"
        uploads = server.asked.count("UpsertBucket")
        assert (
            upload_runs(logged_study, make_study_records(), WandbTarget(entity="me")).num_sent == 0
        )
        assert server.asked.count("UpsertBucket") == uploads
    files = [path for path in logged_study.rglob("*") if path.is_file()]
    assert [path for path in files if KEY.encode() in path.read_bytes()] == []


def make_failure(request, failure, times=10**6):
    """Return a function that makes the service fail at its first requests of a kind.

    Args:
        request: Beginning of the names of the requests, such as `UpsertBucket`.
        failure: HTTP status of the answer, such as 500; `drop` if the connection ends midway;
            `error` for an answer with status 200 that reports an error.
        times: Number of requests that fail; by default, all.
    """
    failures_left = times

    def refuse(name):
        nonlocal failures_left
        if not name.startswith(request) or failures_left == 0:
            return None
        failures_left -= 1
        return failure

    return refuse


@pytest.mark.slow
@pytest.mark.parametrize("failure", [500, "drop"])
@pytest.mark.parametrize("request_kind", ["file_stream", "UpsertBucket"])
def test_upload_completes_after_failures_of_the_service(logged_study, login, request_kind, failure):
    """If wandb gives up on a run, `lacking` names the run, and a second upload sends it.

    wandb itself repeats a request that fails with an HTTP status.
    """
    with Server(make_failure(request_kind, failure, times=2)) as server:
        login(server)
        arrived = upload_runs(logged_study, make_study_records(), WandbTarget(entity="me"))
        if failure == "drop" and arrived.lacking:
            num_lacking = len(arrived.lacking)
            arrived = upload_runs(logged_study, make_study_records(), WandbTarget(entity="me"))
            assert arrived.num_sent == num_lacking
    assert server.refused == [request_kind, request_kind] and arrived.lacking == {}


def test_verb_exits_with_2_and_names_runs_that_did_not_arrive(logged_study, login, monkeypatch):
    """The command `wandb sync` exits with 0 in this case."""
    monkeypatch.setattr(dashboard_runs, "list_study_runs", lambda _: make_study_records())
    with Server(make_failure("UpsertBucket", "error")) as server:
        login(server)
        code, body = run_json("dashboards", logged_study, "--online", "--entity", "me")
    assert code == 2
    expected = {
        f"{run.name} ({run.run_id})": ["the run does not exist"] for run in make_study_records()
    }
    assert body["arrived"]["lacking"] == expected
    assert body["runs"]["num_written"] == 0 and body["url"] == f"{server.url}/me/forerun"


# ---- The check after an upload ----


def make_remote_run(**changes):
    """Return a run as wandb's public API shows it, complete except for the changes."""
    attributes = {
        "config": {"content_sha256": "c"},
        "summary_metrics": {"content_sha256": "c"},
        "historyLineCount": 4,
    }
    return SimpleNamespace(**attributes | changes)


LOGGED = {"run_id": "r", "content": "c", "num_rows": 4}
FAULTS = {
    "the run does not exist": None,
    "its settings differ from those that were logged": {"config": {"content_sha256": "older"}},
    "its summary differs from what was logged": {"summary_metrics": {}},
    "history: 3 of 4 rows": {"historyLineCount": 3},
}


@pytest.mark.parametrize("sentence", FAULTS)
def test_each_part_of_a_run_that_the_service_lacks_is_described(sentence):
    assert list_missing_parts(make_remote_run(), LOGGED) == []
    changes = FAULTS[sentence]
    remote_run = None if changes is None else make_remote_run(**changes)
    assert list_missing_parts(remote_run, LOGGED) == [sentence]
