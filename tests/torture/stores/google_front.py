"""Stands before fake-gcs-server and makes puts, uploads in parts and lists of Google's XML API requests of its JSON
API, which alone the emulator serves. Gets, heads and deletes pass as they are.

``python -m tests.torture.stores.google_front http://127.0.0.1:4443`` prints its own address.
"""

from __future__ import annotations

import http.client
import itertools
import json
import sys
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlencode, urlsplit
from xml.sax.saxutils import escape

CONDITION = "x-goog-if-generation-match"
PASSED_ON_S_MAX = 60


class _Front(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def __init__(self, emulator: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.emulator = urlsplit(emulator).netloc
        self.uploads: dict[str, dict[int, bytes]] = {}
        self.numbers = itertools.count(1)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of a client that went away: delta-rs leaves off requests whose answer it no longer needs."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # an answer in one piece
    server: _Front

    def _ask(
        self, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None
    ) -> tuple[http.client.HTTPResponse, bytes]:
        connection = http.client.HTTPConnection(self.server.emulator, timeout=PASSED_ON_S_MAX)
        try:
            connection.request(method, path, body, dict(headers or {}))
            answer = connection.getresponse()
            return answer, answer.read()
        finally:
            connection.close()

    def _place(self) -> tuple[str, str, dict[str, str]]:
        """The bucket, the object and the query of the request."""
        parts = urlsplit(self.path)
        bucket, _, name = parts.path.lstrip("/").partition("/")
        query = parse_qs(parts.query, keep_blank_values=True)
        return bucket, unquote(name), {key: values[0] for key, values in query.items()}

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def _answer(self, status: int, headers: Mapping[str, str], content: bytes = b"") -> None:
        self.send_response_only(status)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)
        self.wfile.flush()

    def _put(self, bucket: str, name: str, content: bytes) -> tuple[int, dict[str, str], bytes]:
        query = {"uploadType": "media", "name": name}
        if CONDITION in self.headers:
            query["ifGenerationMatch"] = self.headers[CONDITION]
        answer, said = self._ask("POST", f"/upload/storage/v1/b/{bucket}/o?{urlencode(query)}", content)
        if answer.status != 200:
            return answer.status, {}, said
        made = json.loads(said)
        return 200, {"ETag": f'"{made["etag"]}"', "x-goog-generation": made["generation"]}, b""

    def do_PUT(self) -> None:
        bucket, name, query = self._place()
        body = self._body()
        if "partNumber" in query:
            self.server.uploads[query["uploadId"]][int(query["partNumber"])] = body
            self._answer(200, {"ETag": f'"{len(body)}"'})
        else:
            self._answer(*self._put(bucket, name, body))

    def do_POST(self) -> None:
        bucket, name, query = self._place()
        self._body()
        if "uploads" in query:
            upload = str(next(self.server.numbers))
            self.server.uploads[upload] = {}
            self._xml("InitiateMultipartUploadResult", f"<UploadId>{upload}</UploadId>")
            return
        parts = self.server.uploads.pop(query["uploadId"])
        status, headers, said = self._put(bucket, name, b"".join(parts[number] for number in sorted(parts)))
        if status == 200:
            self._xml("CompleteMultipartUploadResult", f"<ETag>{escape(headers['ETag'])}</ETag>", headers)
        else:
            self._answer(status, headers, said)

    def do_GET(self) -> None:
        bucket, name, query = self._place()
        if name:
            self._pass_on()
        else:
            self._list(bucket, query)

    def do_DELETE(self) -> None:
        _, _, query = self._place()
        if "uploadId" in query:
            self.server.uploads.pop(query["uploadId"], None)
            self._answer(204, {})
        else:
            self._pass_on()

    def do_HEAD(self) -> None:
        self._pass_on()

    def _pass_on(self) -> None:
        bucket, name, _ = self._place()
        kept = {k: v for k, v in self.headers.items() if k.lower() not in ("host", "accept-encoding")}
        answer, content = self._ask(self.command, f"/{bucket}/{quote(name)}", self._body(), kept)
        headers = {k: v for k, v in answer.getheaders() if k.lower() not in ("transfer-encoding", "connection")}
        self._answer(204 if self.command == "DELETE" and answer.status == 200 else answer.status, headers, content)

    def _list(self, bucket: str, query: Mapping[str, str]) -> None:
        asked = {"prefix": query.get("prefix", ""), "delimiter": query.get("delimiter", "")}
        after = query.get("start-after", "")
        asked |= {"startOffset": after, "pageToken": query.get("continuation-token", "")}
        answer, said = self._ask("GET", f"/storage/v1/b/{bucket}/o?{urlencode({k: v for k, v in asked.items() if v})}")
        if answer.status != 200:
            self._answer(answer.status, {}, said)
            return
        page = json.loads(said)
        content = "".join(
            f"<Contents><Key>{escape(item['name'])}</Key><Size>{item['size']}</Size><ETag>{item['etag']}</ETag>"
            f"<LastModified>{item['updated']}</LastModified></Contents>"
            for item in page.get("items", [])
            if item["name"] > after  # startOffset includes it
        )
        for prefix in page.get("prefixes", []):
            content += f"<CommonPrefixes><Prefix>{escape(prefix)}</Prefix></CommonPrefixes>"
        if "nextPageToken" in page:
            content += f"<NextContinuationToken>{escape(page['nextPageToken'])}</NextContinuationToken>"
        self._xml("ListBucketResult", content)

    def _xml(self, kind: str, content: str, headers: Mapping[str, str] | None = None) -> None:
        text = f'<?xml version="1.0" encoding="UTF-8"?><{kind}>{content}</{kind}>'
        self._answer(200, {"Content-Type": "application/xml", **(headers or {})}, text.encode())

    def log_message(self, format: str, *args: object) -> None:
        pass


def main() -> None:
    front = _Front(sys.argv[1])
    print(f"http://127.0.0.1:{front.server_address[1]}", flush=True)
    front.serve_forever()


if __name__ == "__main__":
    main()
