"""A bucket of AIStore as a store: the SDK asks, lists and writes, and our client reads.

Both wait for a cluster that is away: `dali_pipes.store.cluster.sessions`, `dali_pipes.store.http.objects`.
"""

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, BinaryIO
from urllib.parse import urlsplit

from dali_pipes.errors import StoreError, shown
from dali_pipes.store.base import Bucket
from dali_pipes.store.checksums import DEFAULT_CHECKSUM_TYPE, new_checksum
from dali_pipes.store.cluster.listing import read_pages
from dali_pipes.store.cluster.objects import StoredObjects, object_url
from dali_pipes.store.cluster.proxies import ClusterAccess, Proxies, split_endpoints, unreached
from dali_pipes.store.cluster.token import Token, refusal_advice
from dali_pipes.store.cluster.transfer import write_object
from dali_pipes.store.entries import PROVIDERS, ObjectEntry
from dali_pipes.store.http.answers import MissingObjectError
from dali_pipes.store.http.client import CONNECT_TIMEOUT_S, PROMPT_S, SILENCE_S, NoAnswerError
from dali_pipes.store.http.objects import ObjectFetcher
from dali_pipes.store.http.rules import cause_of, is_missing
from dali_pipes.store.messages import error_text, first_line
from dali_pipes.store.patience import IMPATIENT, Patience, PatienceOverError, current_patience, use_patience

if TYPE_CHECKING:
    from aistore import Client

# A thread that fetches may ask for the map, and whoever closes its loader waits for it.
_MAP_TIMEOUT_S = 3.0


class AisStore(Bucket):
    """A bucket of a cluster.

    Args:
        endpoint: AIStore's proxy; several of one cluster with commas between them.
        bucket: The bucket's name.
        provider: ``ais``, or the cloud's provider if the cluster reads the bucket from a cloud.
    """

    endpoint: str
    """The first proxy."""

    def __init__(
        self,
        endpoint: str,
        bucket: str,
        *,
        provider: str = "ais",
        http: ClusterAccess | None = None,
        checksum_type: str = DEFAULT_CHECKSUM_TYPE,
    ) -> None:
        self.http = http or ClusterAccess.from_environment(endpoint)
        self.proxies = self.http.proxies
        self.patience = current_patience()
        self.endpoint = self.proxies.named[0]
        self.bucket, self.provider, self.checksum_type = bucket, provider, checksum_type
        self.scheme = next(scheme for scheme, name in PROVIDERS.items() if name == provider)

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen, (self.http, self.bucket, self.provider, self.checksum_type, self.patience)

    @cached_property
    def client(self) -> "Client":
        """The SDK's client, made when it is used: importing the SDK takes half a second."""
        return ais_client(",".join(self.proxies.named), proxies=self.proxies, patience=self.patience)

    @cached_property
    def _bucket(self) -> Any:
        return self.client.bucket(self.bucket, provider=self.provider)

    @property
    def cluster(self) -> "AisStore":
        return self

    @property
    def url(self) -> str:
        return f"{self.scheme}://{self.bucket}"

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
            listed = EntriesBuilder(where)
            for page in read_pages(self._bucket, prefix, where=where):
                listed.extend(page)
        return listed.finish()

    def list_all(self, prefix: str) -> Sequence[ObjectEntry]:
        from dali_pipes.store.cluster.listing import list_completely

        return list_completely(self, prefix)

    @property
    def prompt_s(self) -> float | None:  # type: ignore[override]
        # A small object: unless a cloud must be asked first, a long silence means that nothing answers.
        return PROMPT_S if self.scheme == "ais" else None

    def open(self, name: str) -> contextlib.AbstractContextManager[BinaryIO]:
        self.learn_map()
        return super().open(name)

    def missing(self, name: str, exc: MissingObjectError) -> StoreError:
        return StoreError(self._no_bucket() if exc.is_bucket else f"no object '{self.locate(name)}' at {self.endpoint}")

    @cached_property
    def objects(self) -> ObjectFetcher:
        """Reads the bucket's objects; any thread may use it."""
        return ObjectFetcher(StoredObjects(self.http, self.bucket, provider=self.provider), patience=self.patience)

    @property
    def _access(self) -> ClusterAccess:
        """The cluster, with today's settings of the environment."""
        return ClusterAccess.from_environment(self.endpoint, proxies=self.proxies)

    def write(self, name: str, data: bytes) -> None:
        with self.asking(self.locate(name)):
            self._bucket.object(name).get_writer().put_content(data)

    def write_stream(self, name: str, chunks: Callable[[], Iterable[memoryview]], *, num_bytes: int) -> None:
        write_object(self, name, chunks, num_bytes=num_bytes)

    def known_checksum(self, entry: ObjectEntry) -> tuple[str, str] | None:
        # For an object in a cloud, the cluster may report a value that is not a checksum of its bytes.
        kind = self.checksum_type if self.provider == "ais" else DEFAULT_CHECKSUM_TYPE
        if entry.checksum and len(entry.checksum) == len(new_checksum(kind).hexdigest()):
            return kind, entry.checksum
        return None

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
        url = object_url(self.proxies.current, self.bucket, name, provider=self.provider)
        with (
            self.asking(self.locate(name)),
            contextlib.closing(self.objects.client.ask(url, method="HEAD", silence_s=PROMPT_S)) as answer,
        ):
            return str(urlsplit(answer.headers.get("Location")).netloc)

    def write_new(self, name: str, data: bytes, *, by: str) -> bool:
        from dali_pipes.store.cluster.listing import write_claimed

        return write_claimed(self, name, data, by=by)

    def access(self) -> "AisStore":
        """See `Store.access`; with the environment's settings of now, and the bucket's type of checksum."""
        self.learn_map()
        props: object = None
        # An answer to HEAD has no body to say that the bucket is missing.
        with self.asking(self.url), _MissingAllowed():
            props = json.loads(self._bucket.head().get("Ais-Bucket-Props", "{}"))
        if props is None:
            raise StoreError(self._no_bucket())
        kind = _checksum_type(props) or DEFAULT_CHECKSUM_TYPE
        with use_patience(self.patience):
            return AisStore(self.endpoint, self.bucket, provider=self.provider, http=self._access, checksum_type=kind)

    def size(self, name: str) -> int | None:
        with self.asking(self.locate(name)), _MissingAllowed():
            # The SDK reads this attribute from Content-Length.
            return int(self._bucket.object(name).head().size)
        return None

    def delete(self, name: str) -> None:
        with self.asking(self.locate(name)), _MissingAllowed():
            self._bucket.object(name).delete()

    def learn_map(self) -> None:
        if self.proxies.has_asked_map:
            return
        self.proxies.has_asked_map = True
        try:
            # No waiting: a thread that fetches may call this, whose end Ctrl-C waits for.
            found = self.proxies.ask_map(self.objects.client, timeout_s=_MAP_TIMEOUT_S)
        except (StoreError, ValueError):
            return  # the token cannot be read now, or this is no map
        except NoAnswerError:
            self.proxies.has_asked_map = False
            return
        if found is not None:  # else the token may not read it
            self.proxies.learn(found, has_token=bool(self._access.token))

    def open_fetcher(self) -> ObjectFetcher:
        self.learn_map()
        return ObjectFetcher(StoredObjects(self._access, self.bucket, provider=self.provider), patience=self.patience)

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
            advice = refusal_advice(exc.status_code, text, Token.from_environment())
            raise StoreError(f"{at}: {text}{advice}") from None
        except NoAnswerError as exc:
            if self.proxies.has_answered and not isinstance(exc.cause, OSError):
                raise StoreError(f"{at}: the transfer broke ({cause_of(exc.cause)})") from exc.cause
            raise unreached(self._access, exc.url, exc.cause) from exc.cause
        except requests.RequestException as exc:
            raise StoreError(f"{at}: the transfer broke ({first_line(exc)})") from None
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


class _MissingAllowed:
    """Ends its ``with`` block without an error if the cluster answers 404: there is no such bucket or object."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, exc: BaseException | None, __: object) -> bool:
        from aistore.sdk.errors import AISError

        return isinstance(exc, AISError) and is_missing(exc.status_code, exc.message)


def _reopen(http: ClusterAccess, bucket: str, provider: str, checksum_type: str, patience: Patience) -> AisStore:
    with use_patience(patience):
        return AisStore(http.endpoint, bucket, provider=provider, http=http, checksum_type=checksum_type)


def open_bucket(scheme: str, bucket: str) -> AisStore:
    """Refuse a bucket without an endpoint; with one, `dali_pipes.store.urls.open_store` opens it."""
    raise ValueError(f"'{scheme}://{bucket}' is in a bucket of AIStore, and no endpoint is given; set AIS_ENDPOINT")


def ais_client(endpoint: str, *, proxies: Proxies | None = None, patience: Patience = IMPATIENT) -> "Client":
    """The SDK's client, whose requests go through our HTTP client and wait as ``patience`` says.

    Token and TLS: `ClusterAccess.from_environment`.
    """
    from aistore import Client
    from aistore.sdk.retry_config import ColdGetConf, RetryConfig
    from tenacity import Retrying, stop_after_attempt
    from urllib3.util.retry import Retry

    from dali_pipes.store.cluster.sessions import PatientSessions

    proxies = proxies or Proxies(split_endpoints(endpoint))
    # The SDK's own retries also repeat requests for missing objects, for about a minute.
    no_retries = RetryConfig(
        http_retry=Retry(total=0),
        network_retry=Retrying(stop=stop_after_attempt(1), reraise=True),
        cold_get_conf=ColdGetConf(),
    )
    client = Client(proxies.named[0], retry_config=no_retries, timeout=(CONNECT_TIMEOUT_S, SILENCE_S))
    requesting = client.cluster().client
    requesting.token = ""  # the SDK would send the token that it found at the start, for ever
    requesting.session_manager = PatientSessions(ClusterAccess.from_environment(endpoint, proxies=proxies), patience)
    return client
