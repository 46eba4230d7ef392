"""Serves read-only pages about a commit log over HTTP, and decides who may see them."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import logging
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, urlencode
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from rmq_spark._core.report.live_page import POLICY, document, notice
from rmq_spark._core.report.shared_look import Seen, SharedLooks
from rmq_spark._core.vocabulary.text import duration
from rmq_spark.errors import HalfBatchNotFoundError, MessageError, OptionError, TopicNotFoundError

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIEnvironment

logger = logging.getLogger(__name__)

TOKEN_CHARS_MIN = 16
CONNECTIONS_MAX = 64
REQUEST_S_MAX = 10.0
"""Most seconds that a client may take to send its request, or to read the answer."""
ENDS_S = 0.5
"""Most seconds until the server notices that it is to end."""
FIELDS_MAX = 16
SLOW_S = 1.0
STALE_S = 10.0
"""Age from which what was seen last is shown as such, while a new look runs."""
NOT_FOUND = (OptionError, HalfBatchNotFoundError, TopicNotFoundError, MessageError)
"""Errors of what was asked, not of the log."""
HEADERS = (
    ("Content-Type", "text/html; charset=utf-8"),
    ("Content-Security-Policy", POLICY),
    ("X-Content-Type-Options", "nosniff"),
    ("Referrer-Policy", "no-referrer"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
    ("Cache-Control", "no-store"),
)
_STATUS = {200: "OK", 202: "Accepted", 303: "See Other", 400: "Bad Request", 401: "Unauthorized", 403: "Forbidden",
           404: "Not Found", 405: "Method Not Allowed", 503: "Service Unavailable"}  # fmt: skip

Query = Mapping[str, str]


@dataclass(frozen=True)
class View:
    """A page of the log.

    Attributes
    ----------
    look : callable
        Reads the log, and returns the page's main part.
    every_s : int
        Seconds after which a browser asks again; 0: it does not.
    fields : sequence of str
        The fields of an address that reach ``look``. Others are left out.
    """

    look: Callable[[Query], str]
    every_s: int = 0
    fields: Sequence[str] = ()


@dataclass(frozen=True)
class Door:
    """Who may look.

    Attributes
    ----------
    host : str
        The address to listen at.
    names : sequence of str
        Further names in the header ``Host``, such as a proxy's.
    token : str, optional
        What a viewer has to know.

    Raises
    ------
    OptionError
        When other machines could look without a token.
    """

    host: str = "127.0.0.1"
    names: Sequence[str] = ()
    token: str | None = None

    def __post_init__(self) -> None:
        if self.token is not None and len(self.token) < TOKEN_CHARS_MIN:
            raise OptionError(
                f"the token has {len(self.token)} characters: at least {TOKEN_CHARS_MIN} are expected. "
                "openssl rand -hex 16 makes one"
            )
        if self.token is None and (self.names or not _is_loopback(self.host)):
            reached = f"under the name {self.names[0]!r}" if self.names else f"at {self.host!r}"
            raise OptionError(
                f"{reached} other machines could read the log, and there is no token. Set TXMQ_SERVE_TOKEN (openssl "
                "rand -hex 16 makes one), or stay at 127.0.0.1 and reach it by ssh -L"
            )

    def knows(self, host: str) -> bool:
        """Return True when a ``Host`` header is ours. A foreign one is a page of another site whose name was pointed
        at this machine. An address is no name, so nobody can point it elsewhere."""
        name = host.rpartition(":")[0] if ":" in host and not host.endswith("]") else host
        name = name.strip("[]").lower()
        if name in {"localhost", self.host.lower(), *(known.lower() for known in self.names)}:
            return True
        if _is_loopback(self.host):
            return _is_loopback(name)
        return _is_address(name) or name in {socket.gethostname().lower(), socket.getfqdn().lower()}

    @property
    def proof(self) -> str:
        """What a browser keeps as a cookie in place of the token."""
        return hmac.new(str(self.token).encode(), b"txmq serve", hashlib.sha256).hexdigest()


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _is_loopback(host: str) -> bool:
    return host == "localhost" or (_is_address(host) and ipaddress.ip_address(host).is_loopback)


class LivePages:
    """A WSGI application with the pages of one commit log.

    Parameters
    ----------
    log : str
        The log's name on the pages, without secrets.
    views : mapping of str to View
        By path. Nothing else is served.
    door : Door
    sentence_of : callable
        Says an error on one line, without secrets.
    """

    def __init__(
        self, log: str, views: Mapping[str, View], door: Door, sentence_of: Callable[[Exception], str]
    ) -> None:
        self._log, self._views, self._door, self._sentence_of = log, views, door, sentence_of
        self.looks = SharedLooks[str]()

    def __call__(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        try:
            status, headers, text = self._answer(environ)
        except Exception as problem:
            logger.warning("a page could not be shown: %s", self._sentence_of(problem))
            status, headers, text = 503, [], self._notice("Not shown", self._sentence_of(problem))
        body = text.encode("utf-8", "replace")
        start_response(f"{status} {_STATUS[status]}", [*HEADERS, ("Content-Length", str(len(body))), *headers])
        return [] if environ["REQUEST_METHOD"] == "HEAD" else [body]

    def _answer(self, environ: WSGIEnvironment) -> tuple[int, list[tuple[str, str]], str]:
        if not self._door.knows(environ.get("HTTP_HOST", "")):
            return (
                403,
                [],
                self._notice(
                    "Another host", "The header Host names another server. Give its name to txmq serve --name."
                ),
            )
        if environ["REQUEST_METHOD"] not in ("GET", "HEAD"):
            return 405, [("Allow", "GET, HEAD")], self._notice("Only to look at", "Nothing can be changed here.")
        path = environ.get("PATH_INFO", "/")
        try:
            query = dict(parse_qsl(environ.get("QUERY_STRING", ""), max_num_fields=FIELDS_MAX, errors="strict"))
        except ValueError:
            return 400, [], self._notice("Not understood", "The address has fields that are no text in UTF-8.")
        if self._door.token is not None:
            if hmac.compare_digest(query.pop("token", "").encode(), self._door.token.encode()):
                return 303, self._let_in(environ, path, query), ""
            if not self._has_proof(environ):
                sentence = (
                    "Open this address once with ?token=, followed by the token that txmq serve was started with."
                )
                return 401, [], self._notice("A token is needed", sentence)
        view = self._views.get(path)
        if view is None:
            return 404, [], self._notice("No such page", f"There are only {', '.join(self._views)}.")
        return self._page(view, path, {name: query[name] for name in view.fields if name in query})

    def _page(self, view: View, path: str, query: Query) -> tuple[int, list[tuple[str, str]], str]:
        look = self.looks.of((path, *query.items()), lambda: view.look(query), limited=bool(view.fields))
        if look is None:
            return 503, [("Retry-After", "5")], self._notice("Busy", "Many others search now. Load this page again.")
        seen = look.ask()
        main, note, every_s = seen.value, _note_of(seen), view.every_s
        if seen.problem is not None:
            sentence = self._sentence_of(seen.problem)
            if isinstance(seen.problem, NOT_FOUND):
                return 404, [], document(self._log, notice("Not found", sentence), "", searched=query)
            main = notice("The log cannot be read", sentence) + (main or "")
        elif main is None:
            sentence = "The commit log or its store is slow. The page comes by itself as soon as it has answered."
            main, every_s = notice("Still reading", sentence), every_s or 3
        status = 503 if seen.problem is not None else 200 if seen.value is not None else 202
        is_stale = seen.value is not None and seen.running_s is not None and seen.age_s >= STALE_S
        every_s = every_s or (3 if is_stale else 0)
        return status, [], document(self._log, main, note, searched=query, every_s=every_s, is_stale=is_stale)

    def _notice(self, title: str, sentence: str) -> str:
        return document(self._log, notice(title, sentence), "")

    def _let_in(self, environ: WSGIEnvironment, path: str, query: Query) -> list[tuple[str, str]]:
        """Return the headers that keep the proof in the browser, and take the token out of the address."""
        place = f"{path if path in self._views else '/'}{f'?{urlencode(query)}' if query else ''}"
        cookie = f"{_cookie_name(environ)}={self._door.proof}; HttpOnly; SameSite=Strict; Path=/"
        return [("Location", place), ("Set-Cookie", cookie)]

    def _has_proof(self, environ: WSGIEnvironment) -> bool:
        bearer = environ.get("HTTP_AUTHORIZATION", "").removeprefix("Bearer ")
        # Other programs of this machine set cookies that SimpleCookie refuses, and it would drop ours with them.
        cookies = dict(part.strip().partition("=")[::2] for part in environ.get("HTTP_COOKIE", "").split(";"))
        cookie = cookies.get(_cookie_name(environ), "")
        return hmac.compare_digest(bearer.encode(), str(self._door.token).encode()) or hmac.compare_digest(
            cookie.encode(), self._door.proof.encode()
        )


def _cookie_name(environ: WSGIEnvironment) -> str:
    """Return a name by the port: cookies of one machine's ports are not kept apart."""
    return f"txmq-{environ['SERVER_PORT']}"


def _note_of(seen: Seen[str]) -> str:
    slow = "" if seen.running_s is None else f" A look has been running for {duration(seen.running_s)}."
    if seen.value is None:
        return slow.strip()
    return f"Looked at {f'{duration(seen.age_s)} ago' if seen.age_s >= SLOW_S else 'just now'}.{slow}"


class _Server(ThreadingMixIn, WSGIServer):
    """A thread for each connection, and at most :data:`CONNECTIONS_MAX` of them."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 1024  # with fewer, a burst of viewers loses connections

    def __init__(self, *arguments: Any) -> None:
        self._free = threading.BoundedSemaphore(CONNECTIONS_MAX)
        self._ends = False
        super().__init__(*arguments)

    def process_request(self, request: Any, client_address: Any) -> None:
        while not self._free.acquire(timeout=ENDS_S):
            if self._ends:
                self.shutdown_request(request)
                return
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread has begun that would release it
            self._free.release()
            raise

    def shutdown(self) -> None:
        self._ends = True
        super().shutdown()

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        logger.debug("a connection ended early", exc_info=True)

    def server_bind(self) -> None:
        """Bind without asking for the machine's name, which may take seconds."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of before are in TIME_WAIT
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]
        self.setup_environ()


class _IPv6Server(_Server):
    address_family = socket.AF_INET6


class _Handler(WSGIRequestHandler):
    timeout = REQUEST_S_MAX

    def handle(self) -> None:
        """Answer one request. The time-out of a socket is that of one read, which a byte now and then renews."""
        timer = threading.Timer(REQUEST_S_MAX, self._stop_reading)
        timer.daemon = True
        timer.start()
        try:
            super().handle()
        finally:
            timer.cancel()

    def _stop_reading(self) -> None:
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RD)

    def log_message(self, format: str, *args: Any) -> None:
        """Log no request: its address may hold a token or a key."""


@contextmanager
def serving(pages: LivePages, host: str, port: int) -> Iterator[str]:
    """Serve pages while a ``with`` statement runs, and yield the URL.

    Raises
    ------
    OptionError
        When the address or port cannot be used.
    """
    server_class = _IPv6Server if ":" in host else _Server
    try:
        server = server_class((host, port), _Handler)
    except (OSError, UnicodeError) as problem:
        raise OptionError(f"nothing can listen at {host}:{port}: {problem}. Choose another port or address") from None
    server.set_app(pages)
    thread = threading.Thread(target=server.serve_forever, args=(ENDS_S,), name="txmq serve", daemon=True)
    thread.start()
    try:
        yield f"http://{f'[{host}]' if ':' in host else host}:{server.server_port}/"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
        pages.looks.join(REQUEST_S_MAX)
