"""A bucket of AIStore as a store, through the SDK.

Retries end within seconds, so that a user gets an answer. (The SDK's own policy retries a refused connection, and a
missing object, for about a minute.)
"""

import contextlib
import json
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

from dali_pipes.errors import StoreError
from dali_pipes.store.base import Bucket
from dali_pipes.store.entries import PROVIDERS, ObjectEntry
from dali_pipes.store.messages import cause_of, error_text, first_line, innermost, is_loopback, no_answer, unchained
from dali_pipes.store.shard_names import check_object_name

if TYPE_CHECKING:
    from aistore import Client
    from aistore.sdk.request_client import RequestClient
    from aistore.sdk.retry_config import RetryConfig

    from dali_pipes.fetch.objects import ObjectFetcher
    from dali_pipes.store.cluster.transfer import BucketAccess


# The time for one attempt to connect, and the number of attempts. An endpoint that does not answer must be reported
# within ten seconds.
CONNECT_TIMEOUT_S = 3.0
NETWORK_ATTEMPTS = 3
# The longest silence while a listing, HEAD or similar answer is awaited. These requests are not repeated.
ANSWER_TIMEOUT_S = 10.0
# The longest silence of an object's bytes: a target may be under load, or read them from a cloud first.
READ_TIMEOUT_S = 60.0
# Connections kept open to one host: more than the number of threads that read.
MAX_POOL_SIZE = 32


class AisStore(Bucket):
    """A bucket, through the ``aistore`` SDK.

    Args:
        endpoint: AIStore's proxy.
        bucket: The bucket's name.
        provider: ``ais``, or the cloud's provider if the cluster reads the bucket from a cloud.
    """

    endpoint: str

    def __init__(self, endpoint: str, bucket: str, *, provider: str = "ais") -> None:
        self.endpoint = endpoint
        self.bucket = bucket
        self.provider = provider
        self.scheme = next(scheme for scheme, name in PROVIDERS.items() if name == provider)
        self.client = ais_client(endpoint)
        self._bulk = self.client.bucket(bucket, provider=provider)
        """Transfers objects; ``_bucket`` sends the requests that are answered at once."""
        self._bucket = type(self._bulk)(client=_prompt(self._bulk.client), name=bucket, provider=self._bulk.provider)

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen, (self.endpoint, self.bucket, self.provider)

    @property
    def cluster(self) -> "AisStore":
        return self

    @property
    def url(self) -> str:
        return f"{self.scheme}://{self.bucket}"

    def locate(self, name: str) -> str:
        return f"{self.url}/{name}"

    def check_name(self, name: str) -> None:
        check_object_name(name, url=self.locate(name))

    def exists(self) -> bool:
        with self.asking(self.url), _MissingAllowed():
            self._bucket.head()
            return True
        return False

    def create(self) -> None:
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
        # The object is small: unless a cloud must be asked first, a long silence means that nothing answers.
        bucket = self._bucket if self.scheme == "ais" else self._bulk
        return cast("bytes", bucket.object(name).get_reader().read_all())

    def find(self, name: str) -> bytes | None:
        with self.asking(self.locate(name)), _MissingAllowed():
            return self._read(name)
        return None

    def read_range(self, name: str, *, start: int, size: int) -> bytes:
        if not size:
            return b""  # HTTP cannot express an empty range
        with self.asking(self.locate(name)):
            reader = self._bulk.object(name).get_reader(byte_range=f"bytes={start}-{start + size - 1}")
            return cast("bytes", reader.read_all())

    @contextlib.contextmanager
    def open(self, name: str) -> Iterator[BinaryIO]:
        # raw() is urllib3's response. The SDK's chunked readers take four times the CPU.
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
        """See `Store.access`. TLS settings, token and proxies are those of the SDK's session."""
        from dali_pipes.store.cluster.transfer import BucketAccess

        props: dict[str, Any] | None = None
        # An answer to HEAD has no body to say that the bucket is missing.
        with self.asking(self.url), _MissingAllowed():
            props = json.loads(self._bucket.head().get("Ais-Bucket-Props", "{}"))
        if props is None:
            raise StoreError(self._no_bucket())
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
        with self.asking(self.locate(name)), _MissingAllowed():
            # The SDK reads this attribute from Content-Length.
            return int(self._bucket.object(name).head().size)
        return None

    def delete(self, name: str) -> None:
        with self.asking(self.locate(name)), _MissingAllowed():
            self._bucket.object(name).delete()

    def open_fetcher(self) -> "ObjectFetcher":
        from dali_pipes.fetch.answers import StoredObjects
        from dali_pipes.fetch.connection_pool import ClusterAccess
        from dali_pipes.fetch.objects import ObjectFetcher

        access = ClusterAccess.from_environment(self.endpoint)
        return ObjectFetcher(StoredObjects(access, self.bucket, provider=self.provider))

    def _no_bucket(self) -> str:
        return f"no bucket '{self.url}' at {self.endpoint}; `dali-pipes prep pack` makes one"

    @contextlib.contextmanager
    def asking(self, where: str) -> Iterator[None]:
        import msgspec
        import pydantic
        import requests
        import urllib3
        from aistore.sdk.errors import AISError, ErrBckNotFound, ErrObjNotFound

        at = f"'{where}' at {self.endpoint}"
        try:
            yield
        except ErrBckNotFound as exc:
            raise StoreError(self._no_bucket()) from unchained(exc)
        except ErrObjNotFound as exc:
            raise StoreError(f"no object {at}") from unchained(exc)
        except AISError as exc:
            raise StoreError(f"{at}: {error_text(exc)}") from unchained(exc)
        except (requests.ConnectionError, requests.Timeout) as exc:
            raise StoreError(no_answer(self.endpoint, exc)) from unchained(innermost(exc))
        except (requests.RequestException, urllib3.exceptions.HTTPError) as exc:
            raise StoreError(f"{at}: the transfer broke ({cause_of(exc)})") from unchained(innermost(exc))
        except pydantic.errors.PydanticSchemaGenerationError as exc:
            # The SDK takes a listing that does not call itself msgpack for JSON, and has no model for that.
            raise StoreError(f"{at}: the server is not an AIStore (its listing is not msgpack)") from unchained(exc)
        except (pydantic.ValidationError, msgspec.MsgspecError, json.JSONDecodeError) as exc:
            raise StoreError(f"{at}: the server is not an AIStore ({first_line(exc)})") from unchained(exc)


class _MissingAllowed:
    """Ends its ``with`` block without an error if the cluster answers 404: there is no such bucket or object."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, exc: BaseException | None, __: object) -> bool:
        from aistore.sdk.errors import AISError

        return isinstance(exc, AISError) and exc.status_code == 404


@lru_cache(maxsize=8)
def _reopen(endpoint: str, bucket: str, provider: str) -> AisStore:
    """Open a store once in a process that unpickles it for each task."""
    return AisStore(endpoint, bucket, provider=provider)


def ais_client(endpoint: str) -> "Client":
    """The SDK's client, with retries that end within seconds. TLS and token come from the SDK's environment variables.

    A loopback endpoint is reached directly, even if the environment names a proxy.
    """
    from aistore import Client

    client = Client(
        endpoint,
        retry_config=_retry_config(retries_silence=True),
        timeout=(CONNECT_TIMEOUT_S, READ_TIMEOUT_S),
        max_pool_size=MAX_POOL_SIZE,
    )
    if is_loopback(endpoint):
        from dali_pipes.store.cluster.direct_sessions import DirectSessions

        requesting = client.cluster().client
        requesting.session_manager = DirectSessions(retry=requesting.session_manager.retry, max_pool_size=MAX_POOL_SIZE)
    return client


def _prompt(bulk: "RequestClient") -> "RequestClient":
    """A client over the same connections with a shorter timeout for answers."""
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
        # AISRetryableError is not retried: a missing object stays missing.
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
        StoreError: If nothing answers there within three seconds, or the server is not a ready AIStore.
        ValueError: If ``endpoint`` is not a URL.
    """
    import requests

    if not endpoint.startswith(("http://", "https://")):
        raise ValueError(f"endpoint must be a URL such as http://localhost:51080, got '{endpoint}'")
    try:
        session = ais_client(endpoint).cluster().client.session_manager.session
        url = f"{endpoint.rstrip('/')}/v1/health"
        answer = session.get(url, params={"prr": "true"}, timeout=CONNECT_TIMEOUT_S)
    except (requests.RequestException, ValueError) as exc:
        raise StoreError(no_answer(endpoint, exc)) from unchained(innermost(exc))
    if answer.status_code != 200:
        raise StoreError(
            f"{endpoint} answers {answer.status_code} to a health check, a ready AIStore proxy answers 200; "
            "is it still starting? pass endpoint= (--endpoint), or set AIS_ENDPOINT"
        )
    if not any(name.lower().startswith("ais-") for name in answer.headers):
        raise StoreError(
            f"the server at {endpoint} is not an AIStore: its health check has no Ais-* header; "
            "pass endpoint= (--endpoint), or set AIS_ENDPOINT"
        )
