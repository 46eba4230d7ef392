"""Settings of a company's S3: encryption, a proxy, a private certificate authority, credentials that are renewed. Data
files and commits follow them alike."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

import rmq_spark as txmq
from rmq_spark.errors import StorageError
from tests.support.half_batches import another, bodies, commit, prepare
from tests.torture.s3.proxy import NEW_OBJECTS, proxy
from tests.torture.s3.server import REGION, ROOT, S3Server, built, running

pytestmark = pytest.mark.long
PUTS = re.compile("s3_(PutObject|CreateMultipartUpload) ")
KEY = "arn:aws:kms:us-east-1:1:key/shop"


def use(uri: str, options: dict[str, str]) -> txmq.CommitLog:
    log = txmq.CommitLog.create(uri, storage_options=options)
    log.create_topic("orders", 1)
    commit(log, prepare(log, 0))
    log.drain()
    assert len(bodies(another(log))) == 5
    return log


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"AWS_SERVER_SIDE_ENCRYPTION": "AES256"}, "AES256"),
        ({"AWS_SERVER_SIDE_ENCRYPTION": "aws:kms", "AWS_SSE_KMS_KEY_ID": KEY}, f"aws:kms {KEY}"),
    ],
)
@pytest.mark.parametrize("said", ["options", "environment"])
def test_each_new_object_is_put_with_the_encryption_that_is_asked_for(
    s3: S3Server, uri: str, settings: dict[str, str], named: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = settings if said == "options" else {}
    if said == "environment":
        for name, value in settings.items():
            monkeypatch.setenv(name, value)
    with proxy(s3.endpoint) as between:
        use(f"{uri}-{named[:3]}-{said}", {**s3.storage_options(between.endpoint), **given})
        counts = between.taken()
    encrypted = {what for what, _ in counts if what.startswith("encrypted by ")}
    assert encrypted == {f"encrypted by {named}"}
    assert {table for what, table in counts if what in encrypted} >= {"half", "op", "topics"}


@pytest.mark.parametrize("said", ["option", "environment", "environment, but not for this host"])
def test_all_requests_go_through_the_proxy_that_is_named(
    s3: S3Server, uri: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = s3.storage_options()
    with proxy(s3.endpoint) as between:
        if said == "option":
            options["AWS_PROXY_URL"] = between.endpoint
        else:
            monkeypatch.setenv("http_proxy", between.endpoint)
        if said.endswith("host"):
            monkeypatch.setenv("no_proxy", "127.0.0.1")
        where = f"{uri}-{said[:6]}-{len(said)}"
        use(where, options)
        monkeypatch.delenv("http_proxy", raising=False)
        counts = between.taken()
    through = sum(count for (what, _), count in counts.items() if what in NEW_OBJECTS)
    puts = [line for line in s3.requests() if f"/{where.removeprefix('s3://')}/" in line and PUTS.search(line)]
    assert puts
    assert through == (0 if said.endswith("host") else len(puts))


# ---------------------------------------------------------------- a private certificate authority
@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a certificate authority (``ca.pem``), and a certificate of its for localhost."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is missing, which makes certificates")
    folder = tmp_path_factory.mktemp("authority")
    (folder / "names").write_text("subjectAltName=DNS:localhost")
    for command in (
        "req -x509 -newkey rsa:2048 -nodes -keyout ca.key -out ca.pem -days 2 -subj /CN=authority",
        "req -newkey rsa:2048 -nodes -keyout server.key -out server.csr -subj /CN=localhost",
        "x509 -req -in server.csr -CA ca.pem -CAkey ca.key -CAcreateserial -out server.pem -days 2 -extfile names",
    ):
        subprocess.run(["openssl", *command.split()], cwd=folder, check=True, capture_output=True)
    return folder


def test_a_private_certificate_authority_is_trusted_by_data_files_and_commits(
    authority: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(tmp_path / "server", (authority / "server.pem", authority / "server.key")) as server:
        uri = server.bucket("shop")
        options = {**server.storage_options(), "max_retries": "0"}
        with pytest.raises(StorageError, match="certificate"):
            txmq.CommitLog.create(f"{uri}/unknown", storage_options=options)
        assert server.objects(uri) == []
        use(f"{uri}/option", {**options, "certificate_path": str(authority / "ca.pem")})
        monkeypatch.setenv("SSL_CERT_FILE", str(authority / "ca.pem"))
        use(f"{uri}/environment", options)
        with pytest.raises(StorageError, match="no-such-file"):
            txmq.CommitLog.create(f"{uri}/gone", storage_options={**options, "certificate_path": "/no-such-file"})


# ---------------------------------------------------------------- credentials that are renewed
LIFETIME_S = 20
"""Of the credentials. delta-rs and Amazon's own code ask for new ones at, or some seconds before, their end."""


@contextmanager
def two_users(folder: Path) -> Iterator[tuple[S3Server, Callable[..., None]]]:
    """A server with the users ``first`` and ``other``, and its administration."""
    (folder / "users").mkdir()
    with running(folder / "server", more=["--iam-dir", str(folder / "users")]) as server:

        def administer(*arguments: str) -> None:
            keys = ["--access", server.access_key, "--secret", server.secret_key, "--region", REGION]
            command = [str(built()), "admin", *keys, "--endpoint-url", server.endpoint, *arguments]
            subprocess.run(command, check=True, capture_output=True)

        for user in ("first", "other"):
            administer("create-user", "--access", user, "--secret", user * 2, "--role", "admin")
        yield server, administer


@pytest.mark.parametrize("way", ["container", "credential_process"])
def test_an_open_log_goes_on_when_its_credentials_are_renewed(
    tmp_path: Path, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, process = tmp_path / "now", [sys.executable, "-m", "tests.torture.s3.credentials"]
    now.write_text("first firstfirst")
    with two_users(tmp_path) as (server, administer), ExitStack() as stack:
        options = {"AWS_REGION": REGION, "AWS_ENDPOINT_URL": server.endpoint, "AWS_ALLOW_HTTP": "true"}
        monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        if way == "container":
            asked = stack.enter_context(
                subprocess.Popen([*process, str(now), str(LIFETIME_S)], cwd=ROOT, stdout=subprocess.PIPE, text=True)
            )
            stack.callback(asked.terminate)
            assert asked.stdout is not None
            (tmp_path / "token").write_text("a-token")
            monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", asked.stdout.readline().strip())
            monkeypatch.setenv("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", str(tmp_path / "token"))
        else:
            monkeypatch.setenv("PYTHONPATH", str(ROOT))
            line = " ".join([*process, str(now), str(LIFETIME_S), "--once"])
            (tmp_path / "config").write_text(f"[default]\ncredential_process = {line}\n")
            monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
            options["AWS_FORCE_CREDENTIAL_LOAD"] = "true"  # as delta-rs does by itself where no endpoint is given
        log = use(f"{server.bucket('shop')}/log", options)
        now.write_text("other otherother")
        time.sleep(LIFETIME_S + 1)
        administer("delete-user", "--access", "first")
        for batch_id in (1, 2):
            commit(log, prepare(log, batch_id))
        log.drain()
        assert len(bodies(log)) == 15
