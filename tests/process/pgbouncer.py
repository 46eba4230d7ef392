"""A PgBouncer in transaction mode before a PostgreSQL server: its program comes from the machine's packages."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import sqlalchemy as sa

START_S_MAX = 30.0
NEED_PGBOUNCER = "no pgbouncer on the PATH or in /usr/sbin: apt-get install pgbouncer"

SETTINGS = """
[databases]
* = host={server} user={user}

[pgbouncer]
listen_addr =
listen_port = 6432
unix_socket_dir = {folder}
auth_type = any
pool_mode = transaction
default_pool_size = {connections}
logfile = {folder}/log
pidfile = {folder}/pid
"""


class NoPgBouncerError(Exception):
    """There is no PgBouncer on this machine."""


@contextmanager
def running(postgres: sa.URL, connections: int = 3) -> Iterator[sa.URL]:
    """A pooler that hands so many connections to a server from one transaction to the next, and its URL."""
    program = shutil.which("pgbouncer", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")
    if program is None:
        raise NoPgBouncerError(NEED_PGBOUNCER)
    with tempfile.TemporaryDirectory(prefix="pgbouncer") as folder:
        settings = Path(folder, "settings.ini")
        settings.write_text(
            SETTINGS.format(
                server=postgres.query["host"], user=postgres.username, folder=folder, connections=connections
            )
        )
        as_user = []
        if os.getuid() == 0:  # it refuses to run as root, and nobody but the server's own user may reach the socket
            owner = pwd.getpwuid(Path(str(postgres.query["host"])).stat().st_uid)
            os.chown(folder, owner.pw_uid, owner.pw_gid)
            as_user = ["-u", owner.pw_name]
        pooler = subprocess.Popen(
            [program, "-q", *as_user, str(settings)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        url = postgres.set(query={"host": folder, "port": "6432"})
        try:
            _wait_for(pooler, url, Path(folder, "log"))
            yield url
        finally:
            pooler.kill()
            pooler.wait()


def _wait_for(pooler: subprocess.Popen[bytes], url: sa.URL, log: Path) -> None:
    engine = sa.create_engine(url, poolclass=sa.NullPool)
    deadline = time.monotonic() + START_S_MAX
    while True:
        try:
            with engine.connect():
                return
        except sa.exc.OperationalError:
            if pooler.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"PgBouncer does not answer: {log.read_text() if log.exists() else ''}") from None
            time.sleep(0.05)
