"""An S3 server and an Azure server as the cloud that the environment names."""

import base64
import contextlib
import hashlib
import hmac
import os
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from email.utils import formatdate
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.programs import free_port
from tests.servers.programs import find_program, serving

S3_KEYS = ("test-user", "test-secret-key")
# The account that Microsoft publishes for its emulators.
AZURE_ACCOUNT = "devstoreaccount1"
AZURE_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
KINDS = ("s3", "az")


class Cloud(NamedTuple):
    """A server that stands for a cloud."""

    scheme: str
    endpoint: str
    environment: Mapping[str, str]
    """The variables that name it, with its keys."""
    make_bucket: Callable[[str], None]


@contextlib.contextmanager
def s3_cloud(folder: Path) -> Iterator[Cloud]:
    """versitygw, a gateway of S3 over a directory."""
    program = find_program("versitygw")
    address = f"127.0.0.1:{free_port()}"
    keys = ["--access", S3_KEYS[0], "--secret", S3_KEYS[1]]
    command = [program, "--quiet", "--keep-alive", "--port", address, *keys, "posix", str(folder)]
    with serving(command, address):
        endpoint = f"http://{address}"
        environment = {
            "AWS_ENDPOINT_URL": endpoint,
            "AWS_ACCESS_KEY_ID": S3_KEYS[0],
            "AWS_SECRET_ACCESS_KEY": S3_KEYS[1],
            "AWS_REGION": "us-east-1",
        }
        yield Cloud("s3", endpoint, environment, lambda name: (folder / name).mkdir(exist_ok=True))


@contextlib.contextmanager
def azure_cloud(folder: Path) -> Iterator[Cloud]:
    """Azurite, Microsoft's emulator of Azure Blob Storage."""
    program = find_program("azurite-blob")
    address = f"127.0.0.1:{free_port()}"
    host, _, port = address.partition(":")
    options = ["--silent", "--disableTelemetry", "--skipApiVersionCheck", "--location", str(folder)]
    with serving([program, "--blobHost", host, "--blobPort", port, *options], address):
        endpoint = f"http://{address}/{AZURE_ACCOUNT}"
        environment = {
            "AZURE_STORAGE_CONNECTION_STRING": (
                f"DefaultEndpointsProtocol=http;AccountName={AZURE_ACCOUNT};AccountKey={AZURE_KEY};"
                f"BlobEndpoint={endpoint};"
            )
        }
        yield Cloud("az", endpoint, environment, lambda name: _make_container(endpoint, name))


def _make_container(endpoint: str, name: str) -> None:
    """``Create Container``, signed by the shared key."""
    date, version = formatdate(usegmt=True), "2021-08-06"
    head = f"x-ms-date:{date}\nx-ms-version:{version}\n"
    text = "PUT" + "\n" * 12 + f"{head}/{AZURE_ACCOUNT}/{AZURE_ACCOUNT}/{name}\nrestype:container"
    digest = hmac.new(base64.b64decode(AZURE_KEY), text.encode(), hashlib.sha256).digest()
    headers = {
        "x-ms-date": date,
        "x-ms-version": version,
        "Authorization": f"SharedKey {AZURE_ACCOUNT}:{base64.b64encode(digest).decode()}",
    }
    request = urllib.request.Request(f"{endpoint}/{name}?restype=container", method="PUT", headers=headers)
    urllib.request.urlopen(request).close()


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cloud]:
    with s3_cloud(tmp_path_factory.mktemp("s3")) as running:
        yield running


@pytest.fixture(scope="session")
def azure_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cloud]:
    with azure_cloud(tmp_path_factory.mktemp("azure")) as running:
        yield running


_FIXTURES = {"s3": "s3_server", "az": "azure_server"}


def cloud_bucket(kind: str, request: pytest.FixtureRequest) -> str:
    """``s3://NAME`` of a new bucket of a server that the environment names during the test."""
    cloud: Cloud = request.getfixturevalue(_FIXTURES[kind])
    monkeypatch: pytest.MonkeyPatch = request.getfixturevalue("monkeypatch")
    # Whatever the machine's own settings are.
    for name in [name for name in os.environ if name.startswith(("AWS_", "AZURE_"))]:
        monkeypatch.delenv(name)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, os.devnull)
    for name, value in cloud.environment.items():
        monkeypatch.setenv(name, value)
    name = f"b{hashlib.sha256(request.node.nodeid.encode()).hexdigest()[:20]}"
    cloud.make_bucket(name)
    return f"{kind}://{name}"
