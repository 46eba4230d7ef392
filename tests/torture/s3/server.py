"""A real S3 server for tests: versitygw, which serves a folder over S3 and honours conditional puts.

It is built from its sources with Go, once for each version, into the user's cache folder.
"""

from __future__ import annotations

import os
import secrets
import shutil
import ssl
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.maven import free_ports
from tests.torture.stores.processes import stop

VERSION = "v1.8.0"
"""Its puts with If-None-Match take a lock: of two at the same time one fails, which older versions did not promise."""
PACKAGE = "github.com/versity/versitygw/cmd/versitygw"
REGION = "us-east-1"
ROOT = Path(__file__).parents[3]

BUILD_S_MAX = 1_800
START_S_MAX = 60
PORT_TRIES = 3


class NoS3ServerError(Exception):
    """There is no S3 server here: Go is missing, or could not build one."""


@dataclass(frozen=True)
class S3Server:
    """A running server.

    Attributes
    ----------
    endpoint : str
        ``http://127.0.0.1:<port>``
    folder : Path
        What it serves: a folder a bucket, a file an object.
    log : Path
        One line a request: what the server says of it.
    """

    endpoint: str
    access_key: str
    secret_key: str = field(repr=False)
    folder: Path
    log: Path

    def bucket(self, name: str) -> str:
        """Make a bucket and return its URI."""
        (self.folder / name).mkdir(exist_ok=True)
        return f"s3://{name}"

    def storage_options(self, endpoint: str | None = None) -> dict[str, str]:
        """What delta-rs must be told, for the server itself or for a proxy in front of it."""
        return {
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_REGION": REGION,
            "AWS_ENDPOINT_URL": endpoint or self.endpoint,
            "AWS_ALLOW_HTTP": "true",
            "AWS_CONDITIONAL_PUT": "etag",
        }

    @property
    def secrets(self) -> list[str]:
        return [self.access_key, self.secret_key]

    def wrong_options(self) -> dict[str, str]:
        """Options with a secret that is another one than the server's."""
        return {**self.storage_options(), "AWS_SECRET_ACCESS_KEY": "a-secret-that-is-wrong"}

    def objects(self, uri: str) -> list[str]:
        """The objects under a URI, relative to it."""
        root = self.folder / uri.removeprefix("s3://")
        return sorted(str(p.relative_to(root)) for p in root.rglob("*") if p.is_file() and ".sgwtmp" not in p.parts)

    def requests(self) -> list[str]:
        """The lines of the access log so far."""
        return self.log.read_text().splitlines() if self.log.exists() else []


def built() -> Path:
    """The server's program, built when it is not in the cache yet.

    Raises
    ------
    NoS3ServerError
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rmq_spark" / f"versitygw-{VERSION}"
    program = cache / "versitygw"
    if program.exists():
        return program
    go = shutil.which("go")
    if go is None:
        raise NoS3ServerError(f"Go is missing, which builds the S3 server: install it, or put versitygw at {program}")
    cache.mkdir(parents=True, exist_ok=True)
    # Built beside its place and moved there, so that two test runs at once never meet half a program.
    with tempfile.TemporaryDirectory(dir=cache) as beside:
        command = [go, "install", "-ldflags=-s -w", f"{PACKAGE}@{VERSION}"]
        try:
            subprocess.run(
                command, env={**os.environ, "GOBIN": beside}, check=True, capture_output=True, timeout=BUILD_S_MAX
            )
        except subprocess.TimeoutExpired:
            raise NoS3ServerError(f"{' '.join(command)} took more than {BUILD_S_MAX} s") from None
        except subprocess.CalledProcessError as problem:
            last = problem.stderr.decode(errors="replace").strip().splitlines()[-5:]
            raise NoS3ServerError(f"{' '.join(command)} failed: {' / '.join(last)}") from None
        os.replace(Path(beside) / "versitygw", program)
    return program


@contextmanager
def running(folder: Path, certificate: tuple[Path, Path] | None = None, more: Sequence[str] = ()) -> Iterator[S3Server]:
    """A server on a free port that keeps its objects below this folder, with credentials of its own.

    Parameters
    ----------
    certificate : (Path, Path), optional
        The files of a certificate for ``localhost`` and of its key. With them the server speaks TLS alone.
    more : sequence of str, optional
        More of the server's options.

    Raises
    ------
    NoS3ServerError
        When there is no program, or it does not start.
    """
    program = built()
    data = folder / "buckets"
    data.mkdir(parents=True)
    for tries in range(PORT_TRIES):
        [port] = free_ports(1)
        server = S3Server(
            endpoint=f"https://localhost:{port}" if certificate else f"http://127.0.0.1:{port}",
            access_key=secrets.token_hex(10),
            secret_key=secrets.token_hex(20),
            folder=data,
            log=folder / "access.log",
        )
        with (folder / f"server.{tries}.log").open("wb") as said:
            process = subprocess.Popen(
                _command(program, port, server, certificate, more), env=_environment(server), stdout=said, stderr=said
            )
        try:
            if _answers(server, process):
                yield server
                return
        finally:
            stop(process)
    said_last = (folder / f"server.{PORT_TRIES - 1}.log").read_text(errors="replace")[-500:]
    raise NoS3ServerError(f"versitygw {VERSION} does not start: {said_last.strip()}")


def _command(
    program: Path, port: int, server: S3Server, certificate: tuple[Path, Path] | None, more: Sequence[str]
) -> list[str]:
    command = [str(program), "--port", f"127.0.0.1:{port}", "--region", REGION, "--quiet", *more]
    if certificate:
        command += ["--cert", str(certificate[0]), "--key", str(certificate[1])]
    command += ["--health", "/health", "--access-log", str(server.log), "posix"]
    if not _has_attributes(server.folder):
        sidecar = server.folder.parent / "attributes"
        sidecar.mkdir(exist_ok=True)
        command += ["--sidecar", str(sidecar)]
    return [*command, str(server.folder)]


def _environment(server: S3Server) -> dict[str, str]:
    # Not as arguments, which every user of the machine can see.
    return {**os.environ, "ROOT_ACCESS_KEY": server.access_key, "ROOT_SECRET_KEY": server.secret_key}


def _has_attributes(folder: Path) -> bool:
    """True when files here can have extended attributes, where the server keeps an object's ETag."""
    try:
        os.setxattr(folder, "user.txmq", b"1")
        os.removexattr(folder, "user.txmq")
    except (OSError, AttributeError):
        return False
    return True


def _answers(server: S3Server, process: subprocess.Popen[bytes]) -> bool:
    deadline = time.monotonic() + START_S_MAX
    while time.monotonic() < deadline and process.poll() is None:
        try:
            context = ssl._create_unverified_context() if server.endpoint.startswith("https:") else None
            with urllib.request.urlopen(f"{server.endpoint}/health", timeout=1, context=context):
                return True
        except (urllib.error.URLError, OSError):
            time.sleep(0.05)
    return False
