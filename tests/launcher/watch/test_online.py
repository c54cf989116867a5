"""A run that W&B has online, asked through its public API: a server here answers as theirs does."""

import json

import pytest
import wandb_server
from watched_case import loss_at, reader

from launcher.base.wandb_calls import DashboardError, fetch_history
from launcher.watch.logs import sources

RUN = {
    **wandb_server.RUN,
    "id": "r",
    "name": "abc",
    "displayName": "d",
    "state": "running",
    "config": "{}",
    "group": None,
    "jobType": None,
    "summaryMetrics": "{}",
    "tags": [],
}


def answer(server, name, asked):
    """What reading a run's history asks for."""
    bounds = [asked.get(name) for name in ("minStep", "maxStep")]
    rows = server.rows
    if None not in bounds:
        rows = [row for row in rows if bounds[0] <= row["_step"] < bounds[1]]
    newest = server.rows[-1]["_step"] if server.rows else -1
    run = {
        **RUN,
        "historyLineCount": len(rows),
        "history": [json.dumps(row) for row in rows],
        "parquetHistory": {"liveData": rows, "parquetUrls": []},
        "historyKeys": {"keys": {}, "sets": [], "lastStep": newest},
    }
    project = {"internalId": "1", "run": run if server.known else None}
    return {"viewer": wandb_server.VIEWER, "project": project, "serverInfo": {"features": []}}


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr(wandb_server, "_answer", answer)
    with wandb_server.Server() as server:
        server.rows, server.known = [], True
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
        yield server


def test_an_online_run_is_read_on_where_it_was_left(server, monkeypatch):
    monkeypatch.setattr(sources, "LEAST_SECONDS", 0.0)
    following = reader("me/forerun/abc")

    def rows(last):
        found = [
            {"_step": s, "_timestamp": 1e9 + s, "train/loss": loss_at(s), "gpu": 7.0}
            for s in range(1, last + 1)
        ]
        return [*found, {"_step": last + 1, "_timestamp": 2e9, "gpu": 7.0}]

    server.rows = rows(10)
    reading = following.read()
    assert reading.columns.train_loss_nats.tolist() == [loss_at(step) for step in range(1, 11)]
    assert reading.columns.newest_at == 1e9 + 10
    server.rows = rows(14)
    reading = following.read()
    assert reading.columns.steps.tolist() == list(range(1, 15))
    assert not any("again" in note for note in reading.notes)


def test_a_run_that_w_and_b_does_not_have(server):
    server.known = False
    with pytest.raises(DashboardError, match=r"wandb failed: .*Could not find run"):
        fetch_history("me/forerun/abc", {"loss"}, 0)
