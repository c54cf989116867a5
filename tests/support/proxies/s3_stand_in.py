"""An HTTP server that answers as S3 does for the objects of one bucket.

It supports LIST, HEAD and GET with byte ranges, the requests that pyarrow's S3 client sends, and
checks no signatures. A range must state its first byte.
"""

from __future__ import annotations

import http.server
import threading
import urllib.parse
from xml.sax.saxutils import escape

LISTING_XML = (
    "<?xml version='1.0'?><ListBucketResult><Name>{bucket}</Name><IsTruncated>false</IsTruncated>"
    "<KeyCount>{number}</KeyCount>{objects}</ListBucketResult>"
)
OBJECT_XML = "<Contents><Key>{key}</Key><Size>{size}</Size></Contents>"


class S3StandIn:
    """A server that answers for one bucket until it is closed.

    Args:
        objects: Content of each object of the bucket, by key.
    """

    def __init__(self, bucket: str, objects: dict[str, bytes]) -> None:
        # Method and path of each request, such as "GET /bucket/key"
        self.requests = requests = list[str]()

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: object) -> None:
                pass

            def _answer(self, code: int, body: bytes, **headers: str) -> None:
                """Send a response, without its body if the request is HEAD."""
                self.send_response(code)
                for name, value in headers.items():
                    self.send_header(name.replace("_", "-"), value)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(body)

            def do_HEAD(self) -> None:
                self.do_GET()

            def do_GET(self) -> None:
                requests.append(f"{self.command} {self.path}")
                url = urllib.parse.urlsplit(self.path)
                query = dict(urllib.parse.parse_qsl(url.query, keep_blank_values=True))
                parts = urllib.parse.unquote(url.path).lstrip("/").split("/", 1)
                key = parts[1] if len(parts) > 1 else ""
                if parts[0] != bucket:
                    return self._answer(404, b"<Error><Code>NoSuchBucket</Code></Error>")
                if "list-type" in query:
                    prefix = query.get("prefix", "")
                    keys = sorted(key for key in objects if key.startswith(prefix))
                    rows = "".join(
                        OBJECT_XML.format(key=escape(key), size=len(objects[key])) for key in keys
                    )
                    listing = LISTING_XML.format(bucket=bucket, number=len(keys), objects=rows)
                    return self._answer(200, listing.encode())
                if not key:
                    return self._answer(200, b"")
                if key not in objects:
                    error = b"<Error><Code>NoSuchKey</Code></Error>"
                    return self._answer(404, b"" if self.command == "HEAD" else error)
                content = objects[key]
                if byte_range := self.headers.get("Range"):
                    first, _, last = byte_range.removeprefix("bytes=").partition("-")
                    part = content[int(first) : int(last) + 1 if last else None]
                    sent_range = f"bytes {first}-{int(first) + len(part) - 1}/{len(content)}"
                    return self._answer(206, part, Content_Range=sent_range)
                return self._answer(200, content)

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.endpoint = f"127.0.0.1:{self._server.server_address[1]}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
