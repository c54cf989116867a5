"""A fake of the W&B service on this machine: runs, their files and history, and workspaces."""

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
CREATED_AT = "2026-01-01T00:00:00"
RUN = {
    "state": "finished",
    "sweepName": None,
    "commit": None,
    "readOnly": False,
    "createdAt": CREATED_AT,
    "heartbeatAt": CREATED_AT,
    "description": None,
    "notes": None,
    "systemMetrics": "{}",
    "projectId": "1",
    "historyKeys": None,
    "user": {"name": "u", "username": "u"},
}


class Server(ThreadingHTTPServer):
    """A service that stores what it receives and answers queries from it.

    `refuse` takes the name of a GraphQL operation, `file_stream`, or `PUT name`, and returns how
    the request fails: `error` (an answer with errors), `drop` (the connection ends midway), or an
    HTTP status; None if it does not fail.
    """

    daemon_threads = True

    def __init__(self, refuse=lambda request: None):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.refuse = refuse
        self.asked, self.refused = [], []
        """Requests in order: all except uploads and file streams; all that failed on purpose."""
        self.put, self.streamed, self.views = {}, [], []
        """Content of uploaded files by name, bodies of file streams, and variables of
        workspaces."""
        self.runs = {}
        """Stored runs by name; see `get_run`."""
        self.lock = threading.Lock()

    def __enter__(self):
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_):
        self.shutdown()
        self.server_close()

    def handle_error(self, request, client_address):
        """Ignore errors of connections that were dropped on purpose."""

    def get_run(self, name):
        """Return the stored run of this name, which is created if it does not exist."""
        return self.runs.setdefault(
            name, {"config": {}, "summary": {}, "history": {}, "files": {}, "attributes": {}}
        )


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_PUT(self):
        where, body = urlsplit(self.path), self._read_body()
        name = unquote(where.path).removeprefix("/put/")
        if self._fails(f"PUT {name}"):
            return
        with self.server.lock:
            self.server.put[name] = body
            for run in parse_qs(where.query).get("run", []):
                self.server.get_run(run)["files"][name] = len(body)
        self._respond({})

    def do_GET(self):
        self.server.asked.append(self.path)
        self._respond({})

    def do_POST(self):
        body = self._read_body()
        if self.path.endswith("/file_stream"):
            if not self._fails("file_stream"):
                with self.server.lock:
                    self._store_stream(self.path.split("/")[-2], json.loads(body))
                self._respond({})
        elif self.path != "/graphql":
            self.server.asked.append(self.path)
            self._respond({})
        else:
            query = json.loads(body)
            name = (
                query.get("operationName")
                or re.search(r"(?:query|mutation)\s+(\w+)", query["query"])[1]
            )
            self.server.asked.append(name)
            if not self._fails(name):
                with self.server.lock:
                    answer = _answer_query(self.server, name, query.get("variables") or {})
                self._respond({"data": answer})

    def _fails(self, request):
        """Return whether the request fails, after sending the failure."""
        failure = self.server.refuse(request)
        if failure is None:
            return False
        self.server.refused.append(request)
        if failure == "drop":
            if self.command != "PUT":  # the answer to PUT is only its status
                self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n{")
            self.close_connection = True
        elif failure == "error":
            self._respond({"data": None, "errors": [{"message": "refused"}]})
        else:
            self._respond({"error": "broken"}, failure)
        return True

    def _store_stream(self, name, body):
        """Store the rows of history and the summary that a file stream carries."""
        run, files = self.server.get_run(name), body.get("files") or {}
        self.server.streamed.append(body)
        history = files.get("wandb-history.jsonl", {"offset": 0, "content": []})
        for number, line in enumerate(history["content"], history["offset"]):
            run["history"][number] = json.loads(line)
        for line in files.get("wandb-summary.json", {}).get("content", []):
            run["summary"] = json.loads(line)

    def _read_body(self):
        """Read the request's body, which may be chunked or compressed."""
        body = b""
        if self.headers.get("Transfer-Encoding") == "chunked":
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        else:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        return gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body

    def _respond(self, answer, status=200):
        """Send an answer as JSON."""
        body = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def _answer_query(server, name, variables):
    """Return the answer to a GraphQL operation; an unknown one has an empty answer."""
    project = {"id": "p", "internalId": "1", "name": "forerun", "entity": {"id": "e", "name": "me"}}
    answer_functions = {
        "UpsertBucket": _update_run,
        "CreateRunFiles": _create_run_files,
        "Runs": _list_runs,
        "UpsertView2": _store_view,
    }
    if name in answer_functions:
        return answer_functions[name](server, variables, project)
    return {
        "Viewer": {"viewer": VIEWER},
        "GetViewer": {"viewer": VIEWER},
        "GetDefaultEntity": {"viewer": VIEWER},
        "ServerFeaturesQuery": {"serverInfo": {"features": []}},
    }.get(name, {})


def _update_run(server, variables, project):
    """Create a run or update its settings."""
    run = server.get_run(variables["name"])
    if variables.get("config"):
        run["config"] = json.loads(variables["config"])
    attributes = {
        "displayName": variables.get("displayName"),
        "group": variables.get("groupName"),
        "jobType": variables.get("jobType"),
        "tags": variables.get("tags"),
    }
    for key, value in attributes.items():
        if value or key not in run["attributes"]:
            run["attributes"][key] = value
    bucket = {
        "id": variables["name"],
        "name": variables["name"],
        "displayName": "d",
        "config": "{}",
        "sweepName": None,
        "project": project,
        "historyLineCount": 0,
    }
    return {"upsertBucket": {"bucket": bucket, "inserted": True}}


def _create_run_files(server, variables, project):
    """Return the addresses to which a run's files are sent."""
    run = variables.get("runName") or variables.get("run") or variables.get("name")
    files = [
        {"name": name, "uploadUrl": f"{server.url}/put/{name}?run={run}"}
        for name in variables.get("files") or []
    ]
    return {"createRunFiles": {"runID": run, "uploadHeaders": [], "files": files}}


def _list_runs(server, variables, project):
    """Return the stored runs, of one study if the query filters by it."""
    study = json.loads(variables.get("filters") or "{}").get("config.study")
    edges = []
    for name, run in server.runs.items():
        if study is not None and run["config"].get("study", {}).get("value") != study:
            continue
        node = {
            **RUN,
            **run["attributes"],
            "id": name,
            "name": name,
            "config": json.dumps(run["config"]),
            "summaryMetrics": json.dumps(run["summary"]),
            "historyLineCount": len(run["history"]),
        }
        edges.append({"cursor": name, "node": node})
    if not server.runs:
        return {"project": None}
    runs = {"edges": edges, "pageInfo": PAGE}
    return {"project": {**project, "runCount": len(edges), "readOnly": False, "runs": runs}}


def _store_view(server, variables, project):
    """Store a workspace."""
    server.views.append(variables)
    view = {"id": variables.get("id") or f"view{len(server.views)}", "name": variables["name"]}
    return {"upsertView": {"view": view, "inserted": True}}
