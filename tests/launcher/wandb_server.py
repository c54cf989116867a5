"""As much of W&B's service as runs, their reading back and workspaces ask for, on this machine
alone.
"""

import gzip
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

VIEWER = {
    "id": "u",
    "entity": "me",
    "username": "me",
    "email": "",
    "name": "u",
    "flags": "{}",
    "teams": {"edges": []},
}
PAGE = {"__typename": "PageInfo", "endCursor": None, "hasNextPage": False}
WHEN = "2026-01-01T00:00:00"
RUN = {
    "state": "finished",
    "sweepName": None,
    "commit": None,
    "readOnly": False,
    "createdAt": WHEN,
    "heartbeatAt": WHEN,
    "description": None,
    "notes": None,
    "systemMetrics": "{}",
    "projectId": "1",
    "historyKeys": None,
    "user": {"name": "u", "username": "u"},
}


class Server(ThreadingHTTPServer):
    """What came is kept; what is asked back is told from it.

    `refuse` says of a GraphQL operation's name, or of `file_stream` and `PUT name`, how it fails:
    `error` (an answer that says so), `drop` (the connection ends midway), or a status; None: it
    does not.
    """

    daemon_threads = True

    def __init__(self, refuse=lambda what: None):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.refuse = refuse
        self.asked, self.put, self.streamed, self.views = [], {}, [], []
        self.runs, self.refused = {}, []
        self.guard = threading.Lock()

    def __enter__(self):
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_):
        self.shutdown()
        self.server_close()

    def handle_error(self, request, client_address):
        """A client that was cut off is no error of ours."""

    def run(self, name):
        return self.runs.setdefault(
            name, {"config": {}, "summary": {}, "history": {}, "files": {}, "of": {}}
        )


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_PUT(self):
        where, body = urlsplit(self.path), self._body()
        name = unquote(where.path).removeprefix("/put/")
        if self._fails(f"PUT {name}"):
            return
        with self.server.guard:
            self.server.put[name] = body
            for run in parse_qs(where.query).get("run", []):
                self.server.run(run)["files"][name] = len(body)
        self._say({})

    def do_GET(self):
        self.server.asked.append(self.path)
        self._say({})

    def do_POST(self):
        body = self._body()
        if self.path.endswith("/file_stream"):
            if not self._fails("file_stream"):
                with self.server.guard:
                    self._stream(self.path.split("/")[-2], json.loads(body))
                self._say({})
        elif self.path != "/graphql":
            self.server.asked.append(self.path)
            self._say({})
        else:
            query = json.loads(body)
            name = (
                query.get("operationName")
                or re.search(r"(?:query|mutation)\s+(\w+)", query["query"])[1]
            )
            self.server.asked.append(name)
            if not self._fails(name):
                with self.server.guard:
                    answer = _answer(self.server, name, query.get("variables") or {})
                self._say({"data": answer})

    def _fails(self, what):
        how = self.server.refuse(what)
        if how is None:
            return False
        self.server.refused.append(what)
        if how == "drop":
            if self.command != "PUT":  # of that the status is the whole answer
                self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n{")
            self.close_connection = True
        elif how == "error":
            self._say({"data": None, "errors": [{"message": "refused"}]})
        else:
            self._say({"error": "broken"}, how)
        return True

    def _stream(self, name, body):
        run, files = self.server.run(name), body.get("files") or {}
        self.server.streamed.append(body)
        history = files.get("wandb-history.jsonl", {"offset": 0, "content": []})
        for number, line in enumerate(history["content"], history["offset"]):
            run["history"][number] = json.loads(line)
        for line in files.get("wandb-summary.json", {}).get("content", []):
            run["summary"] = json.loads(line)

    def _body(self):
        body = b""
        if self.headers.get("Transfer-Encoding") == "chunked":
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        else:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        return gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body

    def _say(self, answer, status=200):
        body = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def _answer(server, name, asked):
    project = {"id": "p", "internalId": "1", "name": "forerun", "entity": {"id": "e", "name": "me"}}
    does = {
        "UpsertBucket": _upsert,
        "CreateRunFiles": _run_files,
        "Runs": _runs,
        "UpsertView2": _view,
    }
    if name in does:
        return does[name](server, asked, project)
    return {
        "Viewer": {"viewer": VIEWER},
        "GetViewer": {"viewer": VIEWER},
        "GetDefaultEntity": {"viewer": VIEWER},
        "ServerFeaturesQuery": {"serverInfo": {"features": []}},
    }.get(name, {})


def _upsert(server, asked, project):
    run = server.run(asked["name"])
    if asked.get("config"):
        run["config"] = json.loads(asked["config"])
    given = {
        "displayName": asked.get("displayName"),
        "group": asked.get("groupName"),
        "jobType": asked.get("jobType"),
        "tags": asked.get("tags"),
    }
    run["of"] |= {key: value for key, value in given.items() if value or key not in run["of"]}
    bucket = {
        "id": asked["name"],
        "name": asked["name"],
        "displayName": "d",
        "config": "{}",
        "sweepName": None,
        "project": project,
        "historyLineCount": 0,
    }
    return {"upsertBucket": {"bucket": bucket, "inserted": True}}


def _run_files(server, asked, project):
    run = asked.get("runName") or asked.get("run") or asked.get("name")
    files = [
        {"name": name, "uploadUrl": f"{server.url}/put/{name}?run={run}"}
        for name in asked.get("files") or []
    ]
    return {"createRunFiles": {"runID": run, "uploadHeaders": [], "files": files}}


def _runs(server, asked, project):
    wanted = json.loads(asked.get("filters") or "{}").get("config.study")
    edges = [
        {
            "cursor": name,
            "node": {
                **RUN,
                **run["of"],
                "id": name,
                "name": name,
                "config": json.dumps(run["config"]),
                "summaryMetrics": json.dumps(run["summary"]),
                "historyLineCount": len(run["history"]),
            },
        }
        for name, run in server.runs.items()
        if wanted is None or run["config"].get("study", {}).get("value") == wanted
    ]
    found = {"edges": edges, "pageInfo": PAGE}
    return {
        "project": {**project, "runCount": len(edges), "readOnly": False, "runs": found}
        if server.runs
        else None
    }


def _view(server, asked, project):
    server.views.append(asked)
    view = {"id": asked.get("id") or f"view{len(server.views)}", "name": asked["name"]}
    return {"upsertView": {"view": view, "inserted": True}}
