"""A stand-in for an S3 server: lists, heads and ranges of the objects of one bucket, as AWS's own
client asks for them.

No real store: it checks no signature and knows nothing else of S3. The client is real, pyarrow's.
"""

from __future__ import annotations

import http.server
import threading
import urllib.parse
from xml.sax.saxutils import escape

LIST = (
    "<?xml version='1.0'?><ListBucketResult><Name>{bucket}</Name><IsTruncated>false</IsTruncated>"
    "<KeyCount>{number}</KeyCount>{objects}</ListBucketResult>"
)
OBJECT = "<Contents><Key>{key}</Key><Size>{size}</Size></Contents>"


class Server:
    """Serves `objects` by key, in a bucket of that name, until it is closed."""

    def __init__(self, bucket: str, objects: dict[str, bytes]) -> None:
        self.asked = asked = list[str]()

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: object) -> None:
                pass

            def _answer(
                self, code: int, body: bytes, *, size: int | None = None, **headers: str
            ) -> None:
                self.send_response(code)
                for name, value in headers.items():
                    self.send_header(name.replace("_", "-"), value)
                self.send_header("Content-Length", str(len(body) if size is None else size))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(body)

            def do_HEAD(self) -> None:
                self.do_GET()

            def do_GET(self) -> None:
                asked.append(f"{self.command} {self.path}")
                url = urllib.parse.urlsplit(self.path)
                query = dict(urllib.parse.parse_qsl(url.query, keep_blank_values=True))
                parts = urllib.parse.unquote(url.path).lstrip("/").split("/", 1)
                key = parts[1] if len(parts) > 1 else ""
                if parts[0] != bucket:
                    return self._answer(404, b"<Error><Code>NoSuchBucket</Code></Error>")
                if "list-type" in query:
                    prefix = query.get("prefix", "")
                    found = {k: v for k, v in objects.items() if k.startswith(prefix)}
                    rows = "".join(
                        OBJECT.format(key=escape(k), size=len(v)) for k, v in sorted(found.items())
                    )
                    return self._answer(
                        200, LIST.format(bucket=bucket, number=len(found), objects=rows).encode()
                    )
                if not key:
                    return self._answer(200, b"")
                if key not in objects:
                    return self._answer(
                        404,
                        b"" if self.command == "HEAD" else b"<Error><Code>NoSuchKey</Code></Error>",
                    )
                content = objects[key]
                if ranged := self.headers.get("Range"):
                    low, _, high = ranged.removeprefix("bytes=").partition("-")
                    part = content[int(low) : int(high) + 1 if high else None]
                    span = f"bytes {low}-{int(low) + len(part) - 1}/{len(content)}"
                    return self._answer(206, part, Content_Range=span)
                return self._answer(200, content, size=len(content))

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.endpoint = f"127.0.0.1:{self._server.server_address[1]}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
