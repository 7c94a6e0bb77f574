"""Where shards live: a bucket of AIStore, through the SDK, or a local directory; one face for both.

Object names are relative to the bucket or directory. Nothing here retries for longer than a person waits: the SDK's own
policy retries a refused connection, and a missing object, for about a minute.
"""

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol, cast

from prep.errors import StoreError

if TYPE_CHECKING:
    from aistore import Client

__all__ = ["AisStore", "LocalStore", "ObjectEntry", "Store", "ais_client", "check_endpoint"]

# One try of a connection and of a read, in seconds, and how often a broken one is tried again: together under the ten
# seconds in which an endpoint that does not answer must be reported.
CONNECT_TIMEOUT_S = 3.0
READ_TIMEOUT_S = 60.0
NETWORK_ATTEMPTS = 3

PROVIDERS = {"ais": "ais", "s3": "aws", "gs": "gcp", "az": "azure"}
"""URL scheme to AIS provider: a bucket of a cloud is read through the cluster that has it as a backend."""


@dataclass(frozen=True, kw_only=True)
class ObjectEntry:
    """One row of a listing."""

    name: str
    size: int
    checksum: str | None
    """``xxhash2`` in hexadecimal where the store knows it, else ``None``."""


class Store(Protocol):
    """A bucket or a directory. All methods raise `StoreError` with the object's URL in the text."""

    @property
    def url(self) -> str:
        """``ais://pets`` or the directory's path; no slash at the end."""

    def locate(self, name: str) -> str:
        """The URL or path of one object, for messages and for what reads it directly."""

    def list(self, prefix: str) -> "list[ObjectEntry]":
        """The objects whose name starts with ``prefix``, by name; of a directory, files in the prefix's folder only."""

    def read(self, name: str) -> bytes:
        """All bytes of a (small) object."""

    def open(self, name: str) -> contextlib.AbstractContextManager[BinaryIO]:
        """A stream of the object's bytes, front to back, not seekable."""

    def write(self, name: str, data: bytes) -> None:
        """Create or replace an object; readers see all of it or nothing."""

    def upload(self, name: str, path: Path) -> None:
        """Create or replace an object from a file."""

    def size(self, name: str) -> int | None:
        """Bytes of an object, ``None`` where there is none."""

    def delete(self, name: str) -> None:
        """Remove an object; one that is not there is no error."""


class LocalStore:
    """A directory of files. Writes go to a temporary name and are renamed."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    @property
    def url(self) -> str:
        return str(self.directory)

    def locate(self, name: str) -> str:
        return str(self.directory / name)

    def list(self, prefix: str) -> list[ObjectEntry]:
        folder = self.directory / prefix.rpartition("/")[0]
        if not folder.is_dir():
            return []
        # Not the folders below: a bucket lists itself, a directory may be the root of everything.
        files = (path for path in folder.iterdir() if path.is_file() and not path.name.startswith("."))
        named = ((str(path.relative_to(self.directory)), path) for path in files)
        return [
            ObjectEntry(name=name, size=path.stat().st_size, checksum=None)
            for name, path in sorted(named)
            if name.startswith(prefix)
        ]

    def read(self, name: str) -> bytes:
        with self.open(name) as stream:
            return stream.read()

    @contextlib.contextmanager
    def open(self, name: str) -> Iterator[BinaryIO]:
        try:
            stream = (self.directory / name).open("rb")
        except OSError as exc:
            raise StoreError(f"cannot read '{self.locate(name)}': {exc.strerror or exc}") from exc
        with stream:
            yield stream

    def write(self, name: str, data: bytes) -> None:
        with self._replacing(name) as stream:
            stream.write(data)

    def upload(self, name: str, path: Path) -> None:
        with path.open("rb") as source, self._replacing(name) as stream:
            shutil.copyfileobj(source, stream, 1 << 20)

    @contextlib.contextmanager
    def _replacing(self, name: str) -> Iterator[BinaryIO]:
        target = self.directory / name
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=target.parent, prefix=".partial-", delete=False) as stream:
                try:
                    yield cast("BinaryIO", stream)
                    stream.flush()
                    Path(stream.name).chmod(0o644)
                    Path(stream.name).rename(target)
                except BaseException:
                    Path(stream.name).unlink(missing_ok=True)
                    raise
        except OSError as exc:
            raise StoreError(f"cannot write '{self.locate(name)}': {exc.strerror or exc}") from exc

    def size(self, name: str) -> int | None:
        path = self.directory / name
        return path.stat().st_size if path.is_file() else None

    def delete(self, name: str) -> None:
        (self.directory / name).unlink(missing_ok=True)


class AisStore:
    """A bucket, through the ``aistore`` SDK."""

    def __init__(self, endpoint: str, bucket: str, *, provider: str = "ais", client: "Client | None" = None) -> None:
        self.endpoint = endpoint
        self.bucket = bucket
        self.scheme = next(scheme for scheme, name in PROVIDERS.items() if name == provider)
        self.client = client or ais_client(endpoint)
        self._bucket = self.client.bucket(bucket, provider=provider)

    @property
    def url(self) -> str:
        return f"{self.scheme}://{self.bucket}"

    def locate(self, name: str) -> str:
        return f"{self.url}/{name}"

    def exists(self) -> bool:
        """Whether the bucket is there."""
        from aistore.sdk.errors import AISError

        with self.asking(self.url):
            try:
                self._bucket.head()
            except AISError as exc:
                if exc.status_code == 404:
                    return False
                raise
        return True

    def create(self) -> None:
        """Make the bucket; one that is there already is kept as it is."""
        with self.asking(self.url):
            self._bucket.create(exist_ok=True)

    def list(self, prefix: str) -> list[ObjectEntry]:
        with self.asking(self.locate(prefix)):
            entries = self._bucket.list_all_objects(prefix=prefix, props="name,size,checksum")
        listed = (ObjectEntry(name=e.name, size=int(e.size), checksum=e.checksum or None) for e in entries)
        return sorted(listed, key=lambda entry: entry.name)

    def read(self, name: str) -> bytes:
        with self.asking(self.locate(name)):
            return cast("bytes", self._bucket.object(name).get_reader().read_all())

    @contextlib.contextmanager
    def open(self, name: str) -> Iterator[BinaryIO]:
        # raw(): urllib3's response. The SDK's chunked readers cost four times the CPU.
        with self.asking(self.locate(name)):
            raw: Any = self._bucket.object(name).get_reader().raw()
        with self.asking(self.locate(name)), contextlib.closing(raw):
            yield cast("BinaryIO", raw)

    def write(self, name: str, data: bytes) -> None:
        with self.asking(self.locate(name)):
            self._bucket.object(name).get_writer().put_content(data)

    def upload(self, name: str, path: Path) -> None:
        with self.asking(self.locate(name)):
            self._bucket.object(name).get_writer().put_file(path)

    def size(self, name: str) -> int | None:
        from aistore.sdk.errors import AISError

        with self.asking(self.locate(name)):
            try:
                # An attribute of the answer's headers; .size is read from Content-Length.
                return int(self._bucket.object(name).head().size)
            except AISError as exc:
                if exc.status_code == 404:
                    return None
                raise

    def delete(self, name: str) -> None:
        from aistore.sdk.errors import AISError

        with self.asking(self.locate(name)):
            try:
                self._bucket.object(name).delete()
            except AISError as exc:
                if exc.status_code != 404:
                    raise

    @contextlib.contextmanager
    def asking(self, where: str) -> Iterator[None]:
        """Turn what the SDK and its transport raise inside into one line that says where and what to do."""
        import requests
        import urllib3
        from aistore.sdk.errors import AISError, ErrBckNotFound, ErrObjNotFound

        try:
            yield
        except ErrBckNotFound as exc:
            raise StoreError(f"no bucket '{self.url}' at {self.endpoint}; `dali-pipes prep pack` makes one") from exc
        except ErrObjNotFound as exc:
            raise StoreError(f"no object '{where}' at {self.endpoint}") from exc
        except AISError as exc:
            raise StoreError(f"'{where}' at {self.endpoint}: {exc.status_code} {exc.message}") from exc
        except (requests.ConnectionError, requests.Timeout) as exc:
            raise StoreError(_no_answer(self.endpoint, exc)) from exc
        except (requests.RequestException, urllib3.exceptions.HTTPError) as exc:
            raise StoreError(f"'{where}' at {self.endpoint}: the transfer broke ({exc})") from exc


def ais_client(endpoint: str) -> "Client":
    """The SDK's client with retries that end within seconds; TLS and token as the SDK's environment variables say."""
    from aistore import Client
    from aistore.sdk.retry_config import ColdGetConf, RetryConfig
    from requests.exceptions import ChunkedEncodingError, ConnectionError, ConnectTimeout
    from tenacity import Retrying, retry_if_exception_type, stop_after_attempt, wait_random_exponential
    from urllib3.util.retry import Retry

    retry = RetryConfig(
        http_retry=Retry(total=3, backoff_factor=0.3, status_forcelist=[429, 502, 503, 504], connect=0, read=0),
        network_retry=Retrying(
            wait=wait_random_exponential(multiplier=0.2, max=1),
            stop=stop_after_attempt(NETWORK_ATTEMPTS),
            # Not AISRetryableError: a missing object stays missing.
            retry=retry_if_exception_type((ConnectTimeout, ChunkedEncodingError, ConnectionError)),
            reraise=True,
        ),
        cold_get_conf=ColdGetConf(),
    )
    return Client(endpoint, retry_config=retry, timeout=(CONNECT_TIMEOUT_S, READ_TIMEOUT_S), max_pool_size=32)


def check_endpoint(endpoint: str) -> None:
    """Ask the cluster for its health once.

    Raises:
        StoreError: If nothing answers there within three seconds, or what answers is not a ready AIStore.
        ValueError: If ``endpoint`` is no URL.
    """
    import requests

    if not endpoint.startswith(("http://", "https://")):
        raise ValueError(f"endpoint must be a URL such as http://localhost:51080, got '{endpoint}'")
    try:
        answer = (
            ais_client(endpoint)
            .cluster()
            .client.session_manager.session.get(
                f"{endpoint.rstrip('/')}/v1/health", params={"prr": "true"}, timeout=CONNECT_TIMEOUT_S
            )
        )
    except (requests.RequestException, ValueError) as exc:
        raise StoreError(_no_answer(endpoint, exc)) from exc
    if answer.status_code != 200:
        raise StoreError(
            f"{endpoint} answers {answer.status_code} to a health check, a ready AIStore proxy answers 200; "
            "is it still starting? pass --endpoint or set AIS_ENDPOINT"
        )


def _no_answer(endpoint: str, exc: Exception) -> str:
    # requests wraps urllib3, which wraps what the socket said: "HTTPConnection(...): Failed to ...".
    cause: object = exc.args[0] if exc.args else exc
    reason = str(getattr(cause, "reason", cause)).rpartition("): ")[2]
    return f"no answer from AIStore at {endpoint} ({reason}); is it running? pass --endpoint or set AIS_ENDPOINT"
