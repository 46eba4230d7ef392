"""A MariaDB server for tests: its program comes from the machine's packages (``mariadb-server-core``)."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import sqlalchemy as sa

START_S_MAX = 60.0
NEED_MARIADB = "no mariadbd on the PATH or in /usr/sbin: apt-get install mariadb-server-core"

# The files are thrown away with the tests: nobody needs them on the disk in time. Nobody else can reach the socket.
SETTINGS = """
--no-defaults --skip-grant-tables --skip-networking --skip-log-bin --performance-schema=off
--innodb-buffer-pool-size=32M --innodb-log-file-size=8M --innodb-temp-data-file-path=ibtmp1:4M:autoextend
--innodb-flush-log-at-trx-commit=0 --innodb-flush-method=nosync --debug-no-sync --sync-frm=off
--character-set-server=utf8mb4
""".split()


class NoMariadbError(Exception):
    """There is no MariaDB server on this machine."""


@contextmanager
def running() -> Iterator[sa.URL]:
    """A server, and the URL of its empty database ``shop``."""
    program = shutil.which("mariadbd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")
    if program is None:
        raise NoMariadbError(NEED_MARIADB)
    # A socket's name has at most 107 characters.
    with tempfile.TemporaryDirectory(prefix="mariadb") as folder:
        socket = Path(folder, "socket")
        Path(folder, "data").mkdir()
        files = [f"--datadir={folder}/data", f"--socket={socket}", f"--pid-file={folder}/pid"]
        user = ["--user=root"] if os.getuid() == 0 else []
        with Path(folder, "log").open("wb") as log:
            server = subprocess.Popen([program, *SETTINGS, *files, *user], stdout=log, stderr=subprocess.STDOUT)
        try:
            yield _with_database(server, socket, Path(folder, "log"))
        finally:
            server.kill()
            server.wait()


def _with_database(server: subprocess.Popen[bytes], socket: Path, log: Path) -> sa.URL:
    query = {"unix_socket": str(socket)}
    url = sa.URL.create("mariadb+pymysql", username="root", host="localhost", query=query)
    engine = sa.create_engine(url, poolclass=sa.NullPool)
    deadline = time.monotonic() + START_S_MAX
    while True:
        try:
            with engine.begin() as connection:
                connection.exec_driver_sql("CREATE DATABASE shop CHARACTER SET utf8mb4")
            return url.set(database="shop")
        except sa.exc.OperationalError:
            if server.poll() is not None or time.monotonic() > deadline:
                raise NoMariadbError(f"{server.args} did not start: {log.read_text()[-2000:]}") from None
            time.sleep(0.05)
