"""A run that W&B has online, asked through its public API: a server here answers as theirs does."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from watched_case import DIGEST, loss_at

from launcher.base.wandb_calls import DashboardError, fetch_history
from launcher.watch.logs import sources
from launcher.watch.logs.keys import Keys
from launcher.watch.logs.readings import Readings
from launcher.watch.logs.sources import source_of

RUN = {
    "id": "r", "name": "abc", "displayName": "d", "state": "running", "config": "{}", "group": None, "sweepName": None,
    "jobType": None, "commit": None, "readOnly": False, "createdAt": "2026-01-01T00:00:00", "heartbeatAt": None,
    "description": None, "notes": None, "systemMetrics": "{}", "summaryMetrics": "{}", "projectId": "1", "tags": [],
    "user": {"name": "u", "username": "u"},
}  # fmt: skip
VIEWER = {"id": "u", "entity": "me", "username": "me", "email": "", "flags": "{}", "teams": {"edges": []}}


class Wandb(ThreadingHTTPServer):
    """As much of W&B's service as reading a run's history asks for."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.rows, self.known = [], True

    def __enter__(self):
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_):
        self.shutdown()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"]))).get("variables") or {}
        bounds = [asked.get(name) for name in ("minStep", "maxStep")]
        rows = self.server.rows
        if None not in bounds:
            rows = [row for row in rows if bounds[0] <= row["_step"] < bounds[1]]
        newest = self.server.rows[-1]["_step"] if self.server.rows else -1
        run = {**RUN, "historyLineCount": len(rows), "history": [json.dumps(row) for row in rows],
               "parquetHistory": {"liveData": rows, "parquetUrls": []},
               "historyKeys": {"keys": {}, "sets": [], "lastStep": newest}}  # fmt: skip
        project = {"internalId": "1", "run": run if self.server.known else None}
        answer = json.dumps({"data": {"viewer": VIEWER, "project": project, "serverInfo": {"features": []}}}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)


@pytest.fixture
def server(monkeypatch):
    with Wandb() as server:
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
        yield server


def test_an_online_run_is_read_on_where_it_was_left(server, monkeypatch):
    monkeypatch.setattr(sources, "LEAST_SECONDS", 0.0)
    keys = Keys({})
    following = Readings(source_of("me/forerun/abc", keys), keys, DIGEST, 100)

    def rows(last):
        found = [{"_step": s, "_timestamp": 1e9 + s, "train/loss": loss_at(s), "gpu": 7.0} for s in range(1, last + 1)]
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
