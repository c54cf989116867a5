"""What the tests of the W&B window share: a small record, a reader of what was written, and a server that takes it."""

import gzip
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from launcher.dashboard_record import Record, Table
from proxies.external.wandb_run import WandbRun

RUN_ID = "0123456789abcdef"


def small_record(num_rows=3, num_values=1):
    rows = tuple((32 * 2 ** (i % 3), -5.0 - i, None if i % 2 else "ok") for i in range(num_rows))
    return Record(
        run_id=RUN_ID, name="study 01234567", config={"proxy": {"base_width": 32}},
        summary={"transfer/width/learning_rate/outcome": "holds", **{f"n{i}": i + 0.5 for i in range(num_values)}},
        tables={"optima": Table(columns=("size", "log2_value", "status"), rows=rows)},
        pictures={"valleys-mup": "<!doctype html><p>a valley</p>"},
    )  # fmt: skip


def read_run(path):
    """config, summary, and history rows of a run's folder, as wandb's own message types read them."""
    from wandb.proto import wandb_internal_pb2

    (file,) = path.glob("run-*.wandb")
    reader = WandbRun(file, frozenset())
    reader._pending = file.read_bytes()
    config, summary, rows = {}, {}, []
    for raw in reader._records():
        record = wandb_internal_pb2.Record.FromString(raw)
        for item in record.run.config.update:
            config[item.key] = json.loads(item.value_json)
        for item in record.summary.update:
            summary[item.key or ".".join(item.nested_key)] = json.loads(item.value_json)
        if record.WhichOneof("record_type") == "history":
            rows.append({".".join(i.nested_key) or i.key: json.loads(i.value_json) for i in record.history.item})
    return config, summary, rows


def media(path, rows, key):
    """The text of a table or picture that was logged."""
    (name,) = (row[f"{key}.path"] for row in rows if f"{key}.path" in row)
    return (Path(path) / "files" / name).read_text()


class Server(ThreadingHTTPServer):
    """As much of W&B's service as one run with tables and pictures asks for; all that came is kept."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.asked, self.put, self.streamed = [], {}, []

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

    def do_PUT(self):
        self.server.put[self.path.removeprefix("/put/")] = self._body()
        self._say({})

    def do_GET(self):
        self.server.asked.append(self.path)
        self._say({})

    def do_POST(self):
        body = self._body()
        if self.path.endswith("/file_stream"):
            self.server.streamed.append(json.loads(body))
        if self.path != "/graphql":
            self.server.asked.append(self.path)
            self._say({})
            return
        query = json.loads(body)
        name = (query.get("operationName") or query["query"].split("(")[0]).split()[-1]
        self.server.asked.append(name)
        self._say({"data": self._answer(name, query.get("variables") or {})})

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

    def _say(self, answer):
        body = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _answer(self, name, asked):
        put, project = f"{self.server.url}/put/", {"id": "p", "name": "forerun", "entity": {"id": "e", "name": "me"}}
        bucket = {"id": "r", "name": asked.get("name"), "displayName": "d", "config": "{}", "sweepName": None,
                  "project": project, "historyLineCount": 0}  # fmt: skip
        manifest = {"id": "m", "file": {"id": "f", "name": "n", "displayName": "n", "uploadUrl": f"{put}manifest",
                    "uploadHeaders": []}}  # fmt: skip
        named = [file["name"] for file in asked.get("input", {}).get("artifactFiles", [])]
        files = [{"node": {"id": "f", "name": n, "displayName": n, "uploadUrl": f"{put}artifact/{n}", "storagePath": n,
                           "uploadHeaders": [], "uploadMultipartUrls": None, "artifact": {"id": "a"}}}
                 for n in named]  # fmt: skip
        uploads = [{"name": n, "uploadUrl": put + n} for n in asked.get("files") or []]
        return {
            "UpsertBucket": {"upsertBucket": {"bucket": bucket, "inserted": True}},
            "Viewer": {"viewer": {"id": "u", "entity": "me", "username": "me", "flags": "{}", "teams": {"edges": []}}},
            "ServerFeaturesQuery": {"serverInfo": {"features": []}},
            "ArtifactType": {"project": {"artifact": {"artifactType": {"name": "run_table"}}}},
            "CreateArtifact": {"createArtifact": {"artifact": {"id": "a", "state": "PENDING", "artifactSequence":
                               {"id": "s", "latestArtifact": None}}}},
            "CreateArtifactManifest": {"createArtifactManifest": {"artifactManifest": manifest}},
            "CreateArtifactFiles": {"createArtifactFiles": {"files": {"edges": files}}},
            "CommitArtifact": {"commitArtifact": {"artifact": {"id": "a", "digest": "d"}}},
            "CreateRunFiles": {"createRunFiles": {"runID": "r", "uploadHeaders": [], "files": uploads}},
        }.get(name, {})  # fmt: skip
