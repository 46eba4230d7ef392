"""An HTTP proxy in front of an object store: it counts requests, and can make of an S3 server one that always
overwrites, or one that answers with old lists, and of any store one that answers late, or whose answers to commits get
lost.

It is a process of its own, because delta-rs keeps Python's lock during some of its requests.
"""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

ROOT = Path(__file__).parents[3]
CONDITIONS = ("if-none-match", "x-goog-if-generation-match")
ENCRYPTION = "x-amz-server-side-encryption"
NEW_OBJECTS = ("put", "put if absent", "begin parts")
COUNTS = "/proxy/counts"
PASSED_ON_S_MAX = 60
STOP_S_MAX = 10

Counts = Counter[tuple[str, str]]
"""Requests by (what was asked for, table): ``("list", "half")``, ``("put if absent", "op")``, … Beside it, new objects
by how S3 is asked to encrypt them: ``("encrypted by AES256", "op")``."""


class S3Proxy:
    """A running proxy, seen from the test."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint

    def taken(self) -> Counts:
        """The requests since the last call."""
        with urllib.request.urlopen(f"{self.endpoint}{COUNTS}", timeout=PASSED_ON_S_MAX) as answer:
            return Counter({(what, table): count for what, table, count in json.load(answer)})


@contextmanager
def proxy(
    server: str, overwriting: Path | None = None, old_lists: bool = False, lossy: bool = False, delay_s: float = 0.0
) -> Iterator[S3Proxy]:
    """A proxy in front of a server.

    Parameters
    ----------
    server : str
        ``http://host:port``
    overwriting : Path, optional
        The folder that the server serves. An object that is in the way of a conditional put is removed first, so the
        store behaves as one that does not know the condition. (The header cannot be left out: it is signed.)
    old_lists : bool, optional
        Whether each list is answered as it was answered first.
    lossy : bool, optional
        Whether the connection breaks in place of the answer to the first conditional put of each object, which the
        store has made by then. These are counted as ``"lost"``.
    delay_s : float, optional
        Seconds by which each answer comes later.
    """
    mode = ["overwriting", str(overwriting)] if overwriting else ["old lists"] if old_lists else []
    mode += ["lossy"] if lossy else []
    mode += ["delay", str(delay_s)] if delay_s else []
    command = [sys.executable, "-m", "tests.torture.s3.proxy", server, *mode]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield S3Proxy(process.stdout.readline().strip())
    finally:
        process.terminate()
        process.wait(STOP_S_MAX)


# ---------------------------------------------------------------- in the process
class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, server: str, overwriting: Path | None, old_lists: bool, lossy: bool, delay_s: float) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.server = urlsplit(server).netloc
        self.overwriting, self.old_lists, self.lossy = overwriting, old_lists, lossy
        self.delay_s = delay_s
        self.lost: set[str] = set()
        self.lists: dict[str, tuple[http.client.HTTPResponse, bytes]] = {}
        self.counts: Counts = Counter()
        self.lock = threading.Lock()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of a client that went away: delta-rs leaves off requests whose answer it no longer needs."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    """Passes a request on as it is, so that its signature stays good."""

    protocol_version = "HTTP/1.1"
    wbufsize = -1  # an answer in one piece
    server: _Server

    def handle_expect_100(self) -> bool:
        goes_on = super().handle_expect_100()
        self.wfile.flush()
        return goes_on

    def _pass_on(self) -> None:
        body = self._body()
        time.sleep(self.server.delay_s)
        if self.path.startswith("http://"):  # it is asked as a forward proxy
            self.path = self.path.removeprefix("http://").partition("/")[2].join(("/", ""))
        is_conditional = any(name in self.headers for name in CONDITIONS)
        what = _what(self.command, self.path, is_conditional)
        with self.server.lock:
            self.server.counts[what, _table(self.path)] += 1
            if what in NEW_OBJECTS:
                self.server.counts[f"encrypted by {self._encryption()}", _table(self.path)] += 1
        if is_conditional and self.server.overwriting is not None:
            with self.server.lock:  # nobody else's put comes in between
                (self.server.overwriting / unquote(urlsplit(self.path).path).lstrip("/")).unlink(missing_ok=True)
                answer, content = self._ask(body)
        elif self.server.old_lists and _what(self.command, self.path, False) == "list":
            with self.server.lock:
                if self.path not in self.server.lists:
                    self.server.lists[self.path] = self._ask(body)
            answer, content = self.server.lists[self.path]
        else:
            answer, content = self._ask(body)
        if is_conditional and self.server.lossy and self._loses_answer():
            return
        self.send_response_only(answer.status, answer.reason)
        for name, value in answer.getheaders():
            if name.lower() not in ("transfer-encoding", "connection", "content-length"):
                self.send_header(name, value)
        # The length of what a HEAD asks about is not that of the empty body.
        length = answer.getheader("Content-Length") if self.command == "HEAD" else str(len(content))
        self._end(length or "0", content)

    def _encryption(self) -> str:
        named = (self.headers.get(f"{ENCRYPTION}{more}") for more in ("", "-aws-kms-key-id"))
        return " ".join(value for value in named if value) or "default"

    def _loses_answer(self) -> bool:
        """Break the connection when this is the first conditional put of the object."""
        place = urlsplit(self.path).path
        with self.server.lock:
            if place in self.server.lost:
                return False
            self.server.lost.add(place)
            self.server.counts["lost", _table(self.path)] += 1
        self.close_connection = True
        return True

    def _body(self) -> bytes:
        """The body as it came, in chunks when it came in chunks."""
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts: list[bytes] = []
        size = 1
        while size:
            parts.append(self.rfile.readline())
            size = int(parts[-1].split(b";")[0], 16)
            parts.append(self.rfile.read(size) + self.rfile.readline())
        return b"".join(parts)

    def _ask(self, body: bytes) -> tuple[http.client.HTTPResponse, bytes]:
        connection = http.client.HTTPConnection(self.server.server, timeout=PASSED_ON_S_MAX)
        try:
            connection.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                connection.putheader(name, value)
            connection.endheaders(body)
            answer = connection.getresponse()
            return answer, answer.read()
        finally:
            connection.close()

    def _end(self, length: str, content: bytes) -> None:
        self.send_header("Content-Length", length)
        self.end_headers()
        self.wfile.write(content)
        self.wfile.flush()

    def do_GET(self) -> None:
        if self.path != COUNTS:
            self._pass_on()
            return
        with self.server.lock:
            taken, self.server.counts = self.server.counts, Counter()
        content = json.dumps([[*key, count] for key, count in taken.items()]).encode()
        self.send_response_only(200)
        self._end(str(len(content)), content)

    do_PUT = do_POST = do_DELETE = do_HEAD = _pass_on

    def log_message(self, format: str, *args: object) -> None:
        pass


def _what(method: str, path: str, conditional: bool) -> str:
    query = parse_qs(urlsplit(path).query, keep_blank_values=True)
    if method == "GET":
        return "list" if "list-type" in query else "get"
    if method == "PUT":
        return "put if absent" if conditional else "put part" if "partNumber" in query else "put"
    if method == "POST":
        return "begin parts" if "uploads" in query else "end parts" if "uploadId" in query else "delete many"
    return method.lower()


def _table(path: str) -> str:
    parts = urlsplit(path)
    place = unquote(parse_qs(parts.query).get("prefix", [parts.path])[0])
    return next((t for t in ("half", "op", "topics") if f"/{t}/" in f"{place}/"), "other")


def main() -> None:
    address, *mode = sys.argv[1:]
    overwriting = Path(mode[1]) if mode[:1] == ["overwriting"] else None
    delay_s = float(mode[mode.index("delay") + 1]) if "delay" in mode else 0.0
    server = _Server(address, overwriting, "old lists" in mode, "lossy" in mode, delay_s)
    print(f"http://127.0.0.1:{server.server_address[1]}", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
