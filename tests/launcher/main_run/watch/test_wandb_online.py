"""Tests of reading an online W&B run through the public API, against a fake service."""

import json

import pytest
import wandb_server
from watched_case import compute_loss_at, make_reader

from forerun._launcher.main_run.wandb_client import DashboardError, fetch_history
from forerun._launcher.main_run.watch.logs import sources

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


def answer_history_query(server, name, variables):
    """Answer the queries that reading a run's history sends."""
    first, end = variables.get("minStep"), variables.get("maxStep")
    rows = server.rows
    if first is not None and end is not None:
        rows = [row for row in rows if first <= row["_step"] < end]
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
    """A fake service with one run, whose rows a test sets; `known` is false for an unknown run."""
    monkeypatch.setattr(wandb_server, "_answer_query", answer_history_query)
    with wandb_server.Server() as server:
        server.rows, server.known = [], True
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
        yield server


def test_online_run_is_read_from_where_the_last_read_ended(server, monkeypatch):
    monkeypatch.setattr(sources, "MIN_POLL_SECONDS", 0.0)
    reader = make_reader("me/forerun/abc")

    def make_rows(last):
        rows = [
            {"_step": s, "_timestamp": 1e9 + s, "train/loss": compute_loss_at(s), "gpu": 7.0}
            for s in range(1, last + 1)
        ]
        return [*rows, {"_step": last + 1, "_timestamp": 2e9, "gpu": 7.0}]

    server.rows = make_rows(10)
    reading = reader.read()
    assert reading.columns.train_loss_nats.tolist() == [
        compute_loss_at(step) for step in range(1, 11)
    ]
    assert reading.columns.newest_at == 1e9 + 10
    server.rows = make_rows(14)
    reading = reader.read()
    assert reading.columns.steps.tolist() == list(range(1, 15))
    assert not any("again" in note for note in reading.notes)


def test_unknown_wandb_run_is_an_error(server):
    server.known = False
    with pytest.raises(DashboardError, match=r"wandb failed: .*Could not find run"):
        fetch_history("me/forerun/abc", {"loss"}, 0)
