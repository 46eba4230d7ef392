"""fake-gcs-server, an emulator of Google Cloud Storage. It is built with Go, once, into the user's cache folder.

delta-rs puts and lists by Google's XML API, of which the emulator has only reads. So a front of ours
(``google_front.py``) stands before it, and makes puts and lists requests of the JSON API.
"""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.torture.stores.processes import STOP_S_MAX, cached, started

VERSION = "v1.56.1"
PACKAGE = "github.com/fsouza/fake-gcs-server"
ROOT = Path(__file__).parents[3]


@dataclass(frozen=True)
class GoogleServer:
    """A running emulator.

    Attributes
    ----------
    endpoint : str
        The front, which delta-rs talks to.
    emulator : str
        The emulator itself.
    """

    endpoint: str
    emulator: str
    log: Path

    @property
    def secrets(self) -> list[str]:
        return []

    def bucket(self, name: str) -> str:
        """Make a bucket and return its URI."""
        body = json.dumps({"name": name}).encode()
        request = urllib.request.Request(
            f"{self.emulator}/storage/v1/b?project=tests", body, {"Content-Type": "application/json"}
        )
        try:
            urllib.request.urlopen(request).close()
        except urllib.error.HTTPError as problem:
            if problem.code != 409:  # it is there
                raise
        return f"gs://{name}"

    def storage_options(self, endpoint: str | None = None) -> dict[str, str]:
        """What delta-rs must be told, for the server itself or for a proxy in front of it."""
        account = {"gcs_base_url": endpoint or self.endpoint, "disable_oauth": True}
        account |= {"client_email": "", "private_key": "", "private_key_id": ""}
        return {"GOOGLE_SERVICE_ACCOUNT_KEY": json.dumps(account), "GOOGLE_ALLOW_HTTP": "true"}

    def objects(self, uri: str) -> list[str]:
        """The objects under a URI, relative to it."""
        bucket, _, folder = uri.removeprefix("gs://").partition("/")
        prefix = urllib.parse.quote(f"{folder}/")
        with urllib.request.urlopen(f"{self.emulator}/storage/v1/b/{bucket}/o?prefix={prefix}") as answer:
            return sorted(item["name"].removeprefix(f"{folder}/") for item in json.load(answer).get("items", []))


def _fetch(folder: Path) -> tuple[Sequence[str], dict[str, str]]:
    return ["go", "install", "-ldflags=-s -w", f"{PACKAGE}@{VERSION}"], {"GOBIN": str(folder)}


@contextmanager
def running(folder: Path) -> Iterator[GoogleServer]:
    """An emulator and its front on free ports, which keep their buckets below this folder.

    Raises
    ------
    NoEmulatorError
    """
    program = cached(f"fake-gcs-server-{VERSION}", _fetch, "fake-gcs-server")
    folder.mkdir(parents=True)

    def command(port: int) -> list[str]:
        where = ["-host", "127.0.0.1", "-port", str(port), "-public-host", f"127.0.0.1:{port}"]
        return [str(program), "-scheme", "http", *where, "-filesystem-root", str(folder / "buckets")]

    log = folder / "server.log"
    with started(command, "/_internal/healthcheck", log) as port:
        emulator = f"http://127.0.0.1:{port}"
        front = subprocess.Popen(
            [sys.executable, "-m", "tests.torture.stores.google_front", emulator],
            cwd=ROOT, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        try:
            assert front.stdout is not None
            yield GoogleServer(front.stdout.readline().strip(), emulator, log)
        finally:
            front.terminate()
            front.wait(STOP_S_MAX)
