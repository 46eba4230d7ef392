"""A proxy before a database's socket, which lets a connection end at a COMMIT, or all of them at once."""

from __future__ import annotations

import socket
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import sqlalchemy as sa

NEVER_ARRIVES = "the COMMIT never arrives"
NEVER_ANSWERED = "the answer never arrives"
_BYTES = 1 << 16


class CuttingProxy:
    """Hands bytes on between clients and a server. :attr:`at_commit` says what becomes of the next COMMIT."""

    def __init__(self, server: str, listener: socket.socket) -> None:
        self.at_commit: str | None = None
        self._server = server
        self._listener = listener
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """End all connections, as a proxy does with idle ones."""
        while self._open:
            _end(self._open.pop())

    def _accept(self) -> None:
        with suppress(OSError):  # the test is over
            while True:
                client, _ = self._listener.accept()
                server = socket.socket(socket.AF_UNIX)
                server.connect(self._server)
                self._open += [client, server]
                for source, target, asks in (client, server, True), (server, client, False):
                    threading.Thread(target=self._hand_on, args=(source, target, asks), daemon=True).start()

    def _hand_on(self, source: socket.socket, target: socket.socket, asks: bool) -> None:
        with suppress(OSError):
            while data := source.recv(_BYTES):
                if asks and self.at_commit and b"COMMIT" in data:
                    fate, self.at_commit = self.at_commit, None
                    if fate == NEVER_ANSWERED:
                        _end(source)
                        target.sendall(data)
                        target.recv(_BYTES)  # the server has committed; the client is gone
                    break
                target.sendall(data)
        _end(source)
        _end(target)


def _end(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()


@contextmanager
def running(url: sa.URL) -> Iterator[tuple[CuttingProxy, sa.URL]]:
    """A proxy before the server of a URL, and the URL behind which it stands."""
    with tempfile.TemporaryDirectory(prefix="proxy") as folder, socket.socket(socket.AF_UNIX) as listener:
        if url.get_backend_name() == "postgresql":
            server, own = f"{url.query['host']}/.s.PGSQL.5432", f"{folder}/.s.PGSQL.5432"
            through = url.update_query_dict({"host": folder})
        else:
            server, own = str(url.query["unix_socket"]), f"{folder}/socket"
            through = url.update_query_dict({"unix_socket": own})
        listener.bind(own)
        listener.listen()
        proxy = CuttingProxy(server, listener)
        try:
            yield proxy, through
        finally:
            proxy.cut()
