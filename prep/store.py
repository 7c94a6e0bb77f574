"""Where shards live: a bucket of AIStore, through the SDK, or a local directory; one face for both.

Object names are relative to the bucket or directory. Nothing here retries for longer than a person waits: the SDK's own
policy retries a refused connection, and a missing object, for about a minute.
"""

import contextlib
import http.client
import ipaddress
import json
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol, cast
from urllib.parse import urlsplit

from prep.errors import StoreError

if TYPE_CHECKING:
    from aistore import Client
    from aistore.sdk.errors import AISError
    from aistore.sdk.request_client import RequestClient
    from aistore.sdk.retry_config import RetryConfig

    from prep.transfer import BucketAccess

__all__ = [
    "PROVIDERS",
    "AisStore",
    "LocalStore",
    "ObjectEntry",
    "Store",
    "ais_client",
    "answer_text",
    "cause_of",
    "check_endpoint",
    "error_text",
    "is_loopback",
]

# One try of a connection, in seconds, and how often a broken one is made anew: together under the ten seconds in which
# an endpoint that does not answer must be reported.
CONNECT_TIMEOUT_S = 3.0
NETWORK_ATTEMPTS = 3
# Silence after which an answer is given up: of a listing, HEAD or the like, which is not asked for again, and of an
# object's bytes, which a target under load, or one that fetches them from a cloud first, may take long to send.
ANSWER_TIMEOUT_S = 10.0
READ_TIMEOUT_S = 60.0
# Connections kept open to one host: more than the threads that read at a time.
MAX_POOL_SIZE = 32

# Of what a server says; some answer an error with a page.
MAX_TEXT = 500

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

    def find(self, name: str) -> bytes | None:
        """All bytes of a (small) object, ``None`` where there is none: one request, where `size` and `read` are two."""

    def read_range(self, name: str, *, start: int, size: int) -> bytes:
        """The object's bytes ``[start, start + size)``; fewer where it ends before."""

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

    def find(self, name: str) -> bytes | None:
        return self.read(name) if (self.directory / name).is_file() else None

    def read_range(self, name: str, *, start: int, size: int) -> bytes:
        with self.open(name) as stream:
            stream.seek(start)
            return stream.read(size)

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

    def write_stream(self, name: str, chunks: "Callable[[], Iterable[memoryview]]", *, num_bytes: int) -> None:
        """Create or replace a file from a stream; what ``chunks`` raises comes through as it is."""
        with self._replacing(name) as stream:
            for chunk in chunks():
                stream.write(chunk)
        assert self.size(name) == num_bytes, "the stream's length was announced"

    @contextlib.contextmanager
    def _replacing(self, name: str) -> Iterator[BinaryIO]:
        target = self.directory / name
        # Named before it is made: a worker may be told to end at any point in between.
        partial = target.parent / f".partial-{secrets.token_hex(8)}"
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                with partial.open("xb") as stream:
                    yield stream
                    stream.flush()
                    partial.chmod(0o644)
                    partial.rename(target)
            except BaseException:
                partial.unlink(missing_ok=True)
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
        self.provider = provider
        self.scheme = next(scheme for scheme, name in PROVIDERS.items() if name == provider)
        self.client = client or ais_client(endpoint)
        self._bulk = self.client.bucket(bucket, provider=provider)
        """For bytes of objects; ``_bucket`` is for all that is answered at once."""
        self._bucket = type(self._bulk)(client=_prompt(self._bulk.client), name=bucket, provider=self._bulk.provider)

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
            return self._read(name)

    def _read(self, name: str) -> bytes:
        # Small: silence for long says that nobody is there, where no cloud has to be asked first.
        bucket = self._bucket if self.scheme == "ais" else self._bulk
        return cast("bytes", bucket.object(name).get_reader().read_all())

    def find(self, name: str) -> bytes | None:
        from aistore.sdk.errors import AISError

        with self.asking(self.locate(name)):
            try:
                return self._read(name)
            except AISError as exc:
                if exc.status_code == 404:
                    return None
                raise

    def read_range(self, name: str, *, start: int, size: int) -> bytes:
        if not size:
            return b""  # no range says "nothing"
        with self.asking(self.locate(name)):
            reader = self._bulk.object(name).get_reader(byte_range=f"bytes={start}-{start + size - 1}")
            return cast("bytes", reader.read_all())

    @contextlib.contextmanager
    def open(self, name: str) -> Iterator[BinaryIO]:
        # raw(): urllib3's response. The SDK's chunked readers cost four times the CPU.
        with self.asking(self.locate(name)):
            raw: Any = self._bulk.object(name).get_reader().raw()
        with self.asking(self.locate(name)), contextlib.closing(raw):
            yield cast("BinaryIO", raw)

    def write(self, name: str, data: bytes) -> None:
        with self.asking(self.locate(name)):
            self._bulk.object(name).get_writer().put_content(data)

    def upload(self, name: str, path: Path) -> None:
        # Not the SDK's put_file, which sends the body to the proxy first.
        def chunks() -> Iterator[memoryview]:
            view = memoryview(bytearray(1 << 20))
            try:
                with path.open("rb", buffering=0) as stream:
                    while num := stream.readinto(view):
                        yield view[:num]
            except OSError as exc:
                raise StoreError(f"cannot read '{path}': {exc.strerror or exc}") from exc

        try:
            num_bytes = path.stat().st_size
        except OSError as exc:
            raise StoreError(f"cannot read '{path}': {exc.strerror or exc}") from exc
        self.access().write_stream(name, chunks, num_bytes=num_bytes)

    def access(self) -> "BucketAccess":
        """What reads and writes this bucket's objects without the SDK; for other processes, too.

        TLS, token and proxies are those of the SDK's session.
        """
        from aistore.sdk.errors import AISError

        from prep.transfer import BucketAccess

        with self.asking(self.url):
            try:
                props = json.loads(self._bucket.head().get("Ais-Bucket-Props", "{}"))
            except AISError as exc:
                if exc.status_code == 404:  # HEAD's has no body to tell what is missing
                    raise StoreError(self._no_bucket()) from exc
                raise
        session = self._bulk.client.session_manager.session
        checksum = props.get("checksum", {}).get("type", "")
        return BucketAccess(
            endpoint=self.endpoint,
            bucket=self.bucket,
            provider=self.provider,
            url=self.url,
            **({"checksum_type": checksum} if checksum else {}),
            token=self._bulk.client.token or None,
            verify=session.verify,
            cert=session.cert,
            uses_environment=session.trust_env,
        )

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

    def _no_bucket(self) -> str:
        return f"no bucket '{self.url}' at {self.endpoint}; `dali-pipes prep pack` makes one"

    @contextlib.contextmanager
    def asking(self, where: str) -> Iterator[None]:
        """Turn what the SDK and its transport raise inside into one line that says where and what to do."""
        import msgspec
        import pydantic
        import requests
        import urllib3
        from aistore.sdk.errors import AISError, ErrBckNotFound, ErrObjNotFound

        try:
            yield
        except ErrBckNotFound as exc:
            raise StoreError(self._no_bucket()) from exc
        except ErrObjNotFound as exc:
            raise StoreError(f"no object '{where}' at {self.endpoint}") from exc
        except AISError as exc:
            raise StoreError(f"'{where}' at {self.endpoint}: {error_text(exc)}") from exc
        except (requests.ConnectionError, requests.Timeout) as exc:
            raise StoreError(_no_answer(self.endpoint, exc)) from exc
        except (requests.RequestException, urllib3.exceptions.HTTPError) as exc:
            raise StoreError(f"'{where}' at {self.endpoint}: the transfer broke ({exc})") from exc
        except pydantic.errors.PydanticSchemaGenerationError as exc:
            # The SDK takes a listing that does not call itself msgpack for JSON, and has no model for that.
            text = f"'{where}' at {self.endpoint}: what answers is no AIStore (its listing is no msgpack)"
            raise StoreError(text) from exc
        except (pydantic.ValidationError, msgspec.MsgspecError, json.JSONDecodeError) as exc:
            raise StoreError(f"'{where}' at {self.endpoint}: what answers is no AIStore ({_first_line(exc)})") from exc


def ais_client(endpoint: str) -> "Client":
    """The SDK's client with retries that end within seconds; TLS and token as the SDK's environment variables say.

    A loopback endpoint is reached directly, whatever proxy the environment names.
    """
    from aistore import Client

    client = Client(
        endpoint,
        retry_config=_retry_config(retries_silence=True),
        timeout=(CONNECT_TIMEOUT_S, READ_TIMEOUT_S),
        max_pool_size=MAX_POOL_SIZE,
    )
    if is_loopback(endpoint):
        from prep.direct_sessions import DirectSessions

        requesting = client.cluster().client
        requesting.session_manager = DirectSessions(retry=requesting.session_manager.retry, max_pool_size=MAX_POOL_SIZE)
    return client


def _prompt(bulk: "RequestClient") -> "RequestClient":
    """A client over the same connections that gives up on an answer which does not come at once."""
    from aistore.sdk.request_client import RequestClient

    return RequestClient(
        bulk.base_url,
        session_manager=bulk.session_manager,
        timeout=(CONNECT_TIMEOUT_S, ANSWER_TIMEOUT_S),
        token=bulk.token,
        retry_config=_retry_config(retries_silence=False),
    )


def _retry_config(*, retries_silence: bool) -> "RetryConfig":
    from aistore.sdk.retry_config import ColdGetConf, RetryConfig
    from aistore.sdk.utils import is_read_timeout
    from requests.exceptions import ChunkedEncodingError, ConnectionError, ConnectTimeout
    from tenacity import Retrying, retry_if_exception, stop_after_attempt, wait_random_exponential
    from urllib3.util.retry import Retry

    def is_worth_a_retry(exc: BaseException) -> bool:
        # Not AISRetryableError: a missing object stays missing.
        is_broken = isinstance(exc, (ConnectTimeout, ChunkedEncodingError, ConnectionError))
        return is_broken and (retries_silence or not is_read_timeout(exc))

    return RetryConfig(
        http_retry=Retry(total=3, backoff_factor=0.3, status_forcelist=[429, 502, 503, 504], connect=0, read=0),
        network_retry=Retrying(
            wait=wait_random_exponential(multiplier=0.2, max=1),
            stop=stop_after_attempt(NETWORK_ATTEMPTS),
            retry=retry_if_exception(is_worth_a_retry),
            reraise=True,
        ),
        cold_get_conf=ColdGetConf(),
    )


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
        session = ais_client(endpoint).cluster().client.session_manager.session
        url = f"{endpoint.rstrip('/')}/v1/health"
        answer = session.get(url, params={"prr": "true"}, timeout=CONNECT_TIMEOUT_S)
    except (requests.RequestException, ValueError) as exc:
        raise StoreError(_no_answer(endpoint, exc)) from exc
    if answer.status_code != 200:
        raise StoreError(
            f"{endpoint} answers {answer.status_code} to a health check, a ready AIStore proxy answers 200; "
            "is it still starting? pass --endpoint or set AIS_ENDPOINT"
        )
    if not any(name.lower().startswith("ais-") for name in answer.headers):
        raise StoreError(
            f"what answers at {endpoint} is no AIStore: its health check has no Ais-* header; "
            "pass --endpoint or set AIS_ENDPOINT"
        )


def error_text(exc: "AISError") -> str:
    """Status and reason of an answer: its JSON's message, the header that HEAD has instead, or HTTP's own words.

    >>> from types import SimpleNamespace
    >>> error_text(SimpleNamespace(status_code=403, message=""))
    '403 Forbidden'
    """
    response = getattr(getattr(exc, "__cause__", None) or getattr(exc, "__context__", None), "response", None)
    text = exc.message or (response.headers.get("Hdr-Error", "") if response is not None else "")
    return answer_text(exc.status_code, text)


def answer_text(status: int, text: str, *, reason: str = "") -> str:
    """A status, and what AIStore says of it: its JSON's message, else the text in one line, else HTTP's own words.

    >>> answer_text(404, '{"message": "ais://b/o does not exist"}')
    '404 ais://b/o does not exist'
    """
    with contextlib.suppress(ValueError, TypeError, KeyError):
        text = str(json.loads(text)["message"])
    text = " ".join(text.split())[:MAX_TEXT]
    return f"{status} {text or reason or http.client.responses.get(status, 'without a reason')}"


def is_loopback(endpoint: str) -> bool:
    """Whether an endpoint is on this machine, where no proxy can reach it."""
    with contextlib.suppress(ValueError):
        host = urlsplit(endpoint).hostname or ""
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    return False


def _no_answer(endpoint: str, exc: Exception) -> str:
    import requests

    if isinstance(exc, requests.exceptions.ProxyError):
        return (
            f"no answer from AIStore at {endpoint} through the proxy {_proxy_of(endpoint)} ({cause_of(exc)}); "
            "name the host in NO_PROXY to reach it directly, or pass another --endpoint"
        )
    return f"no answer from AIStore at {endpoint} ({cause_of(exc)}); is it running? pass --endpoint or set AIS_ENDPOINT"


def cause_of(exc: BaseException) -> str:
    """What the socket said, of what `requests` and `urllib3` made of it."""
    # requests wraps urllib3, which wraps what the socket said: "HTTPConnection(...): Failed to ...".
    inner: BaseException | None = exc
    while inner is not None:
        exc = inner
        wrapped = (getattr(exc, "reason", None), getattr(exc, "original_error", None), *exc.args)
        inner = next((value for value in wrapped if isinstance(value, BaseException)), None)
    return _first_line(exc).rpartition("): ")[2]


def _proxy_of(endpoint: str) -> str:
    """The proxy that the environment names for an endpoint, without a password."""
    from requests.utils import get_environ_proxies, select_proxy

    proxy = str(select_proxy(endpoint, get_environ_proxies(endpoint)))
    scheme, mark, rest = proxy.rpartition("://")
    return f"'{scheme}{mark}{rest.rpartition('@')[2]}'"


def _first_line(exc: BaseException) -> str:
    return next(iter(str(exc).splitlines()), type(exc).__name__)
