"""A bucket of AIStore as a store, through the SDK.

Its requests wait for a cluster that is away: see `dali_pipes.store.cluster.client`.
"""

import contextlib
import io
import json
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar, cast
from urllib.parse import urlsplit

from dali_pipes.errors import StoreError, shown
from dali_pipes.store.base import Bucket
from dali_pipes.store.cluster.client import ais_client, prompt_client
from dali_pipes.store.cluster.listing_pages import read_pages
from dali_pipes.store.cluster.rights import refusal_advice
from dali_pipes.store.cluster.token import Token
from dali_pipes.store.cluster.transport.http_rules import is_missing, object_url
from dali_pipes.store.cluster.transport.proxies import Proxies, split_endpoints
from dali_pipes.store.entries import PROVIDERS, ObjectEntry
from dali_pipes.store.messages import cause_of, error_text, first_line, innermost, no_answer, unchained
from dali_pipes.store.patience import (
    Patience,
    PatienceOverError,
    Waiting,
    current_patience,
    pause,
    use_patience,
)
from dali_pipes.store.shard_names import check_object_name

if TYPE_CHECKING:
    from dali_pipes.fetch.objects import ObjectFetcher
    from dali_pipes.store.cluster.transfer import BucketAccess


# Whoever reads a shard takes larger pieces, which bypass the buffer.
_BUFFER_BYTES = 64 << 10

T = TypeVar("T")


class AisStore(Bucket):
    """A bucket, through the ``aistore`` SDK.

    Args:
        endpoint: AIStore's proxy; several of one cluster with commas between them.
        bucket: The bucket's name.
        provider: ``ais``, or the cloud's provider if the cluster reads the bucket from a cloud.
    """

    endpoint: str
    """The first proxy."""

    def __init__(self, endpoint: str, bucket: str, *, provider: str = "ais", proxies: Proxies | None = None) -> None:
        self.proxies = proxies or Proxies(split_endpoints(endpoint))
        self.patience = current_patience()
        self.endpoint = self.proxies.named[0]
        self.bucket = bucket
        self.provider = provider
        self.scheme = next(scheme for scheme, name in PROVIDERS.items() if name == provider)
        self.client = ais_client(endpoint, proxies=self.proxies, patience=self.patience)
        self._bulk = self.client.bucket(bucket, provider=provider)
        """Transfers objects; ``_bucket`` sends the requests that are answered at once."""
        self._bucket = type(self._bulk)(
            client=prompt_client(self._bulk.client), name=bucket, provider=self._bulk.provider
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen, (self.proxies, self.bucket, self.provider, self.patience)

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

    def list(self, prefix: str) -> Sequence[ObjectEntry]:
        from dali_pipes.store.listings import EntriesBuilder

        where = self.locate(prefix)
        with self.asking(where):
            # While objects are moved to another target, both may list one.
            listed = EntriesBuilder()
            listed.extend(read_pages(self._bucket, prefix, where=where))
        return listed.finish()

    def list_all(self, prefix: str) -> Sequence[ObjectEntry]:
        from dali_pipes.store.cluster.complete_listing import list_completely

        return list_completely(self, prefix)

    def read(self, name: str) -> bytes:
        with self.asking(self.locate(name)):
            return self._read(name)

    def _read(self, name: str) -> bytes:
        # The object is small: unless a cloud must be asked first, a long silence means that nothing answers.
        bucket = self._bucket if self.scheme == "ais" else self._bulk
        return self._patiently(lambda: cast("bytes", bucket.object(name).get_reader().read_all()))

    def _patiently(self, read: Callable[[], T]) -> T:
        """Read again while bodies break off: a session waits for heads only."""
        waiting = Waiting(self.patience, self.endpoint)
        while True:
            try:
                return read()
            except Exception as exc:  # noqa: BLE001 (raised again if it is not a broken transfer)
                self._wait_after(exc, waiting)

    def _wait_after(self, exc: Exception, waiting: Waiting) -> None:
        """Pause after a body that broke off; raises all other exceptions, and those after the patience."""
        from dali_pipes.store.cluster.transport.silence import is_silence

        has_answered, cause = self.proxies.has_answered, cause_of(exc)
        if not is_silence(exc, has_answered=has_answered):
            raise exc
        pause_s = waiting.next_pause_s(cause, has_answered=has_answered)
        if pause_s is None:
            raise waiting.over(f"the transfer broke ({cause})") if waiting.num_failures else exc
        pause(pause_s)

    def find(self, name: str) -> bytes | None:
        with self.asking(self.locate(name)), _MissingAllowed():
            return self._read(name)
        return None

    def read_range(self, name: str, *, start: int, size: int) -> bytes:
        if not size:
            return b""  # HTTP cannot express an empty range
        with self.asking(self.locate(name)):
            reader = self._bulk.object(name).get_reader(byte_range=f"bytes={start}-{start + size - 1}")
            return self._patiently(lambda: cast("bytes", reader.read_all()))

    @contextlib.contextmanager
    def open(self, name: str) -> Iterator[BinaryIO]:
        self.learn_map()
        raw = _ObjectStream(self, name)
        with contextlib.closing(raw):
            with self.asking(self.locate(name)):
                raw.connect()
            # Errors of the caller's own block are not the cluster's: `_ObjectStream.readinto` asks by itself.
            yield cast("BinaryIO", io.BufferedReader(raw, _BUFFER_BYTES))

    def write(self, name: str, data: bytes) -> None:
        with self.asking(self.locate(name)):
            self._bulk.object(name).get_writer().put_content(data)

    def write_apart(self, names: Sequence[str], data: bytes) -> None:
        """See `Store.write_apart`; the hash of a name chooses its target, so names are tried."""
        targets: set[str] = set()
        for name in names:
            self.write(name, data)
            targets.add(self.target_of(name))
            if len(targets) > 1 or "" in targets:
                return

    def target_of(self, name: str) -> str:
        """See `Bucket.target_of`: the proxy redirects to it."""
        self.learn_map()
        if self.proxies.map is not None and len(self.proxies.map.targets) < 2:
            return ""
        client = self._bucket.client
        url = object_url(self.proxies.current, self.bucket, name, provider=self.provider)
        with self.asking(self.locate(name)):
            answer = client.session_manager.session.head(url, allow_redirects=False, timeout=client.timeout)
        return str(urlsplit(answer.headers.get("Location", "")).netloc)

    def write_new(self, name: str, data: bytes, *, by: str) -> bool:
        from dali_pipes.store.cluster.claims import write_claimed

        return write_claimed(self, name, data, by=by)

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

        self.learn_map()
        props: object = None
        # An answer to HEAD has no body to say that the bucket is missing.
        with self.asking(self.url), _MissingAllowed():
            props = json.loads(self._bucket.head().get("Ais-Bucket-Props", "{}"))
        if props is None:
            raise StoreError(self._no_bucket())
        session = self._bulk.client.session_manager.session
        checksum = _checksum_type(props)
        return BucketAccess(
            proxies=self.proxies,
            patience=self.patience,
            bucket=self.bucket,
            provider=self.provider,
            url=self.url,
            **({"checksum_type": checksum} if checksum else {}),
            token=Token.from_environment(),
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

    def _has_token(self) -> bool:
        return self._bucket.client.session_manager.session.auth.token is not None

    def learn_map(self) -> None:
        """See `Bucket.learn_map`."""
        from requests import RequestException

        if self.proxies.has_asked_map:
            return
        self.proxies.has_asked_map = True
        try:
            # No waiting: a thread that fetches may call this, whose end Ctrl-C waits for.
            found = self._bucket.client.session_manager.session.cluster_map()
        except (StoreError, ValueError):
            return  # the token may not read it, or cannot be read now
        except (RequestException, OSError):
            self.proxies.has_asked_map = False
            return
        self.proxies.learn(found, has_token=self._has_token())

    def open_fetcher(self) -> "ObjectFetcher":
        from dali_pipes.fetch.answers import StoredObjects
        from dali_pipes.fetch.objects import ObjectFetcher
        from dali_pipes.fetch.transport.access import ClusterAccess

        self.learn_map()
        access = ClusterAccess.from_environment(self.endpoint, proxies=self.proxies)
        return ObjectFetcher(StoredObjects(access, self.bucket, provider=self.provider), patience=self.patience)

    def _no_bucket(self) -> str:
        names: list[str] = []
        # Whoever may not list the buckets still learns that this one is missing.
        with contextlib.suppress(Exception):
            names = sorted(bucket.name for bucket in self.client.cluster().list_buckets(provider=self.provider))
        found = f" (found: {shown([f'{self.scheme}://{name}' for name in names])})" if names else ""
        return f"no bucket '{self.url}' at {self.endpoint}; `dali-pipes prep pack` makes one{found}"

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
        except PatienceOverError as exc:
            raise StoreError(f"{at}: {exc}") from None
        except ErrBckNotFound:
            raise StoreError(self._no_bucket()) from None
        except ErrObjNotFound:
            raise StoreError(f"no object {at}") from None
        # Not "from exc" where the exception repeats the server's text: a traceback would show it as it is.
        except AISError as exc:
            text = error_text(exc)
            asked = {"method": getattr(exc.req, "method", None) or "", "url": getattr(exc.req, "url", None) or ""}
            advice = refusal_advice(exc.status_code, text, **asked, token=Token.from_environment())
            raise StoreError(f"{at}: {text}{advice}") from None
        except (requests.ConnectionError, requests.Timeout) as exc:
            raise StoreError(no_answer(self.endpoint, exc)) from unchained(innermost(exc))
        except (requests.RequestException, urllib3.exceptions.HTTPError) as exc:
            raise StoreError(f"{at}: the transfer broke ({cause_of(exc)})") from unchained(innermost(exc))
        except OSError as exc:  # a certificate's file
            raise StoreError(no_answer(self.endpoint, exc)) from unchained(exc)
        except pydantic.errors.PydanticSchemaGenerationError:
            # The SDK takes a listing that does not call itself msgpack for JSON, and has no model for that.
            raise StoreError(f"{at}: the server is not an AIStore (its listing is not msgpack)") from None
        except (pydantic.ValidationError, msgspec.MsgspecError, json.JSONDecodeError, RecursionError) as exc:
            raise StoreError(f"{at}: the server is not an AIStore ({first_line(exc)})") from None


def _checksum_type(props: object) -> str:
    """The type of a bucket's checksums; empty if its properties do not say it."""
    checksum = props.get("checksum") if isinstance(props, dict) else None
    kind = checksum.get("type") if isinstance(checksum, dict) else None
    return kind if isinstance(kind, str) else ""


class _ObjectStream(io.RawIOBase):
    """An object's bytes, front to back; when a transfer breaks, it goes on from the byte where it broke."""

    def __init__(self, store: AisStore, name: str) -> None:
        super().__init__()
        self._store, self._name = store, name
        self._raw: Any = None
        """urllib3's response: the SDK's chunked readers take four times the CPU."""
        self._position = 0
        self._version: tuple[str, ...] = ()
        self._waiting = Waiting(store.patience, store.endpoint)

    def readable(self) -> bool:
        return True

    def readinto(self, view: Any) -> int:
        with self._store.asking(self._store.locate(self._name)):
            return self._readinto(view)

    def _readinto(self, view: Any) -> int:
        while True:
            try:
                if self._raw is None:
                    self.connect()
                num = int(self._raw.readinto(view))
            except StoreError:
                raise
            except Exception as exc:  # noqa: BLE001 (raised again if it is not a broken transfer)
                self._drop()
                self._store._wait_after(exc, self._waiting)
            else:
                self._waiting.progress()
                self._position += num
                return num

    def connect(self) -> None:
        """Ask for the bytes from here on."""
        wanted = {"byte_range": f"bytes={self._position}-"} if self._position else {}
        raw: Any = self._store._bulk.object(self._name).get_reader(**wanted).raw()
        headers = ("Ais-Version", "Ais-Checksum-Type", "Ais-Checksum-Value")
        version = tuple(raw.headers.get(name, "") for name in headers)
        if self._position and (raw.status != 206 or version != self._version):
            raw.close()
            raise StoreError(f"'{self._store.locate(self._name)}' was replaced while it was read; read it again")
        self._raw, self._version = raw, version

    def _drop(self) -> None:
        raw, self._raw = self._raw, None
        if raw is not None:
            raw.close()

    def close(self) -> None:
        self._drop()
        super().close()


class _MissingAllowed:
    """Ends its ``with`` block without an error if the cluster answers 404: there is no such bucket or object."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, exc: BaseException | None, __: object) -> bool:
        from aistore.sdk.errors import AISError

        return isinstance(exc, AISError) and is_missing(exc.status_code, exc.message)


@lru_cache(maxsize=8)
def _reopen(proxies: Proxies, bucket: str, provider: str, patience: Patience) -> AisStore:
    """Open a store once in a process that unpickles it for each task."""
    with use_patience(patience):
        return AisStore(",".join(proxies.named), bucket, provider=provider, proxies=proxies)
