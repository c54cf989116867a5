"""What is sent to W&B arrives, or is named: real wandb against a service on this machine that fails
as services do.
"""

from types import SimpleNamespace

import pytest
from tiny_study import ask
from wandb_case import STUDY, Server, small_study

from launcher.dashboards import runs as dashboard_runs
from launcher.dashboards import wandb_writer
from launcher.dashboards.wandb_process import _describe_missing
from launcher.dashboards.wandb_writer import WandbTarget, log_runs, upload_runs

KEY = "5ec7e7" * 6 + "0000"
FIRST = f"{1:016x}"


@pytest.fixture(scope="module")
def logged(tmp_path_factory):
    """A study of two proxies, logged offline once; not to be moved, nor written into."""
    study = tmp_path_factory.mktemp("logged") / "study"
    log_runs(study, small_study())
    return study


@pytest.fixture
def login(tmp_path, monkeypatch):
    """Has the user logged in to a service; what is not sent within a moment is given up."""
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(wandb_writer, "ARRIVAL_SECONDS", 1.0)
    return lambda server: monkeypatch.setenv("WANDB_BASE_URL", server.url)


def test_what_was_logged_is_uploaded_once_and_asked_back(logged, login):
    with Server() as server:
        login(server)
        arrived = upload_runs(logged, small_study(), WandbTarget(entity="me"))
        assert (arrived.num_sent, arrived.num_there, arrived.lacking) == (3, 3, {})
        assert arrived.url == f"{server.url}/me/forerun"
        run = server.runs[FIRST]
        assert [row["train_loss_nats"] for row in run["history"].values()] == [
            8.0 / 2**step for step in range(1, 6)
        ]
        assert run["config"]["study"]["value"] == STUDY and run["of"]["group"] == "search"
        uploads = server.asked.count("UpsertBucket")
        assert upload_runs(logged, small_study(), WandbTarget(entity="me")).num_sent == 0
        assert server.asked.count("UpsertBucket") == uploads
    secrets = [
        path for path in logged.rglob("*") if path.is_file() and KEY.encode() in path.read_bytes()
    ]
    assert secrets == []


def failing(what, how, times=10**6):
    """A service that fails so often at what begins so."""
    left = times

    def refuse(asked):
        nonlocal left
        if not asked.startswith(what) or left == 0:
            return None
        left -= 1
        return how

    return refuse


@pytest.mark.slow
@pytest.mark.parametrize("how", [500, "drop"])
@pytest.mark.parametrize("what", ["file_stream", "UpsertBucket"])
def test_a_service_that_fails_for_a_while_has_all_of_it_in_the_end(logged, login, what, how):
    """What wandb gives up is named, and sent by the same command once more."""
    with Server(failing(what, how, times=2)) as server:
        login(server)
        arrived = upload_runs(logged, small_study(), WandbTarget(entity="me"))
        if how == "drop" and arrived.lacking:
            lost = len(arrived.lacking)
            arrived = upload_runs(logged, small_study(), WandbTarget(entity="me"))
            assert arrived.num_sent == lost
    assert server.refused == [what, what] and arrived.lacking == {}


def test_the_verb_ends_with_2_and_names_what_did_not_arrive(logged, login, monkeypatch):
    monkeypatch.setattr(dashboard_runs, "study_runs", lambda _: small_study())
    with Server(failing("UpsertBucket", "error")) as server:  # wandb's own command ends with 0
        login(server)
        code, body = ask("dashboards", logged, "--online", "--entity", "me")
    assert code == 2
    names = {one.run_id: one.name for one in small_study()}
    lacking = {f"{name} ({run_id})": ["the run does not exist"] for run_id, name in names.items()}
    assert body["arrived"]["lacking"] == lacking
    assert body["runs"]["num_written"] == 0 and body["url"] == f"{server.url}/me/forerun"


# What the service is asked back


def there(**changed):
    """A run as wandb's public API shows it, whole but for what was changed."""
    found = {
        "config": {"content_sha256": "c"},
        "summary_metrics": {"content_sha256": "c"},
        "historyLineCount": 4,
    }
    return SimpleNamespace(**found | changed)


WANTED = {"run_id": "r", "content": "c", "num_rows": 4}
FAULTS = {
    "the run does not exist": None,
    "its settings differ from those that were logged": {"config": {"content_sha256": "older"}},
    "its summary differs from what was logged": {"summary_metrics": {}},
    "history: 3 of 4 rows": {"historyLineCount": 3},
}


@pytest.mark.parametrize("said", FAULTS)
def test_each_thing_that_a_service_lacks_is_seen(said):
    assert _describe_missing(there(), WANTED) == []
    assert _describe_missing(None if FAULTS[said] is None else there(**FAULTS[said]), WANTED) == [
        said
    ]
