"""Azurite, Microsoft's emulator of Azure Blob Storage. npm fetches it once into the user's cache folder."""

from __future__ import annotations

import base64
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow.fs as pafs

from tests.torture.stores.processes import cached, started

VERSION = "3.37.0"
ACCOUNT = "txmqtests"


@dataclass(frozen=True)
class AzureServer:
    """A running server with one storage account."""

    endpoint: str
    key: str = field(repr=False)
    log: Path

    @property
    def secrets(self) -> list[str]:
        return [self.key]

    def bucket(self, name: str) -> str:
        """Make a container and return its URI."""
        files = self._files()
        if files.get_file_info(name).type == pafs.FileType.NotFound:
            files.create_dir(name)
        return f"abfss://{name}@{ACCOUNT}.dfs.core.windows.net"

    def storage_options(self, endpoint: str | None = None) -> dict[str, str]:
        """What delta-rs must be told, for the server itself or for a proxy in front of it."""
        return {
            "AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT,
            "AZURE_STORAGE_ACCOUNT_KEY": self.key,
            "AZURE_STORAGE_ENDPOINT": f"{endpoint or self.endpoint}/{ACCOUNT}",
            "AZURE_ALLOW_HTTP": "true",
        }

    def wrong_options(self) -> dict[str, str]:
        """Options with a secret that is another one than the server's."""
        return {**self.storage_options(), "AZURE_STORAGE_ACCOUNT_KEY": base64.b64encode(b"a wrong secret").decode()}

    def objects(self, uri: str) -> list[str]:
        """The objects under a URI, relative to it."""
        container, _, folder = uri.partition("://")[2].partition("/")
        root = f"{container.partition('@')[0]}/{folder}"
        found = self._files().get_file_info(pafs.FileSelector(root, allow_not_found=True, recursive=True))
        return sorted(info.path.removeprefix(f"{root}/") for info in found if info.type == pafs.FileType.File)

    def _files(self) -> pafs.AzureFileSystem:
        address = self.endpoint.removeprefix("http://")
        return pafs.AzureFileSystem(
            ACCOUNT, account_key=self.key, blob_storage_authority=address, dfs_storage_authority=address,
            blob_storage_scheme="http", dfs_storage_scheme="http",
        )  # fmt: skip


def _fetch(folder: Path) -> tuple[Sequence[str], dict[str, str]]:
    options = ["--ignore-scripts", "--no-audit", "--no-fund", "--omit=dev"]
    return ["npm", "install", "--prefix", str(folder), *options, f"azurite@{VERSION}"], {}


@contextmanager
def running(folder: Path) -> Iterator[AzureServer]:
    """A server on a free port that keeps its containers below this folder, with an account of its own.

    Raises
    ------
    NoEmulatorError
    """
    program = cached(f"azurite-{VERSION}", _fetch, "node_modules/azurite/dist/src/blob/main.js")
    folder.mkdir(parents=True)
    key = base64.b64encode(secrets.token_bytes(64)).decode()

    def command(port: int) -> list[str]:
        options = ["--disableTelemetry", "--skipApiVersionCheck", "--location", str(folder)]
        return ["node", str(program), "--blobPort", str(port), *options]

    log = folder / "server.log"
    with started(command, "/", log, {"AZURITE_ACCOUNTS": f"{ACCOUNT}:{key}"}) as port:
        yield AzureServer(f"http://127.0.0.1:{port}", key, log)
