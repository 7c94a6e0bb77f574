"""A bucket of AIStore as a store: our clients ask, list, read and write shards; the SDK does the rest.

All wait for a cluster that is away: `dali_pipes.store.cluster.client`, `dali_pipes.store.http.objects`.

Importing the SDK costs each process a third of a second, so a loader never uses it. And it would send a body to the
proxy, which answers 307, and then again to the target. Here the proxy gets only the head of a request, and the body
goes to the target that the proxy names.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, BinaryIO
from urllib.parse import quote, urlsplit

from dali_pipes.errors import StoreError, shown
from dali_pipes.formats.names import read_json
from dali_pipes.store.base import PROVIDERS, Bucket
from dali_pipes.store.checksums import CHECKSUM_TYPES, DEFAULT_CHECKSUM_TYPE, NO_CHECKSUM_TYPE, new_checksum
from dali_pipes.store.cluster.access import ClusterAccess, Proxies, refusal_advice, split_endpoints, unreached
from dali_pipes.store.cluster.client import ClusterClient, NotAisError, RefusedError
from dali_pipes.store.cluster.get_batch import BatchRequests
from dali_pipes.store.cluster.listing import list_completely, read_pages, write_claimed
from dali_pipes.store.cluster.objects import StoredObjects, object_url, refusal_text
from dali_pipes.store.http.answers import FaultError, MissingObjectError
from dali_pipes.store.http.client import CONNECT_TIMEOUT_S, PROMPT_S, SILENCE_S, NoAnswerError, read_end
from dali_pipes.store.http.objects import ObjectFetcher
from dali_pipes.store.http.rules import (
    REDIRECTS,
    RedirectError,
    cause_of,
    is_passing,
    is_silence,
    redirect_target,
    retry_after_s,
)
from dali_pipes.store.http.wire import Answer
from dali_pipes.store.patience import IMPATIENT, Patience, PatienceOverError, Waiting, current_patience, pause
from dali_pipes.store.ranges import Way
from dali_pipes.store.shard_names import BucketParts, ObjectEntry

if TYPE_CHECKING:
    from aistore import Client

WRONG_ATTEMPTS = 4
"""Tries of a body that a live target stores wrongly."""
HEAD_TIMEOUT_S = 10.0
"""A server answers a head at once, unless it waits for the body."""
# A thread that fetches may ask for the map, and whoever closes its loader waits for it.
_MAP_TIMEOUT_S = 3.0


class AisStore(Bucket):
    """A bucket of a cluster.

    Args:
        endpoint: AIStore's proxy; several of one cluster with commas between them.
        bucket: The bucket's name; in a namespace ``#NAME/BUCKET``, ``@CLUSTER/BUCKET`` or ``@CLUSTER#NAME/BUCKET``.
        provider: ``ais``, or the cloud's provider if the cluster reads the bucket from a cloud.
    """

    endpoint: str

    def __init__(
        self,
        endpoint: str,
        bucket: str,
        *,
        provider: str = "ais",
        http: ClusterAccess | None = None,
        checksum_type: str = DEFAULT_CHECKSUM_TYPE,
        patience: Patience | None = None,
    ) -> None:
        self.http = http or ClusterAccess.from_environment(endpoint)
        self.proxies = self.http.proxies
        self.patience = patience or current_patience()
        self.endpoint = self.proxies.named[0]
        self.bucket, self.provider, self.checksum_type = bucket, provider, checksum_type
        self.scheme = next(scheme for scheme, name in PROVIDERS.items() if name == provider)

    def __reduce__(self) -> tuple[Any, ...]:
        same = partial(AisStore, provider=self.provider, checksum_type=self.checksum_type, patience=self.patience)
        return partial(same, http=self.http), (self.http.endpoint, self.bucket)

    @cached_property
    def client(self) -> "Client":
        """The SDK's client, made when it is used: importing the SDK takes half a second."""
        return ais_client(",".join(self.proxies.named), proxies=self.proxies, patience=self.patience)

    @cached_property
    def sdk_bucket(self) -> Any:
        from aistore.sdk.namespace import Namespace

        name, uuid, namespace = self.parts
        within = Namespace(uuid=uuid, name=namespace) if uuid or namespace else None
        return self.client.bucket(name, provider=self.provider, namespace=within)

    @cached_property
    def requests(self) -> ClusterClient:
        return ClusterClient(self.http, self.patience, http=self.objects.client)

    @contextlib.contextmanager
    def by_sdk(self, where: str) -> Iterator[Any]:
        from dali_pipes.store.cluster.sessions import sdk_errors

        with self.asking(where), sdk_errors():
            yield self.sdk_bucket

    @property
    def cluster(self) -> "AisStore":
        return self

    @property
    def url(self) -> str:
        return f"{self.scheme}://{self.bucket}"

    def exists(self) -> bool:
        return self._props() is not None

    def _props(self) -> Any:
        """The bucket's properties, as it says them; ``None`` if there is no such bucket."""
        # An answer to HEAD has no body to say that the bucket is missing.
        with self.asking(self.url), _MissingAllowed():
            answer, _ = self.requests.call(f"buckets/{self.parts.bucket}", method="HEAD", **self.query)
            with contextlib.suppress(ValueError):
                return read_json(answer.headers.get("Ais-Bucket-Props", "{}"))
            raise NotAisError("a bucket's properties are not JSON")
        return None

    def has_backend(self) -> bool:
        if (props := self._props()) is None:
            raise StoreError(self._no_bucket())
        behind = props.get("backend_bck") if isinstance(props, dict) else None
        return self.provider != "ais" or bool(self.parts.uuid or (isinstance(behind, dict) and behind.get("name")))

    def create(self) -> None:
        with self.asking(self.url):
            try:
                self.requests.call(
                    f"buckets/{self.parts.bucket}", {"action": "create-bck"}, method="POST", **self.query
                )
            except RefusedError as exc:
                if exc.status != 409:  # there is one
                    raise

    def list(self, prefix: str) -> Sequence[ObjectEntry]:
        from dali_pipes.store.listings import EntriesBuilder

        where = self.locate(prefix)
        with self.asking(where):
            # While objects are moved to another target, both may list one.
            listed = EntriesBuilder(where)
            for page in read_pages(self, prefix, where=where):
                listed.extend(page)
        return listed.finish()

    def list_all(self, prefix: str) -> Sequence[ObjectEntry]:
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
        return ObjectFetcher(StoredObjects(self.http, self.bucket, provider=self.provider), patience=self.patience)

    @cached_property
    def _batches(self) -> BatchRequests:
        return BatchRequests(self.objects.client, self.proxies, self.parts.bucket, query=self.query)

    def range_ways(self) -> Sequence[Way]:
        return self._batches.ways

    @property
    def _access(self) -> ClusterAccess:
        """The cluster, with today's settings of the environment."""
        return ClusterAccess.from_environment(self.endpoint, proxies=self.proxies)

    def write(self, name: str, data: bytes) -> None:
        with self.by_sdk(self.locate(name)) as bucket:
            bucket.object(name).get_writer().put_content(data)

    def write_stream(self, name: str, chunks: Callable[[], Iterable[memoryview]], *, num_bytes: int) -> None:
        where = f"'{self.locate(name)}' at {self.endpoint}"
        waiting, num_wrong = Waiting(self.patience, self.endpoint), 0
        while True:
            try:
                self._put(name, chunks, num_bytes)
                return waiting.progress()
            except FaultError as exc:
                fault, num_wrong = exc, num_wrong + exc.is_fruitless
            except NoAnswerError as exc:
                fault = FaultError(f"the transfer broke ({cause_of(exc.cause)})")
                if not is_silence(exc.cause):
                    raise StoreError(f"{where}: {fault}") from exc.cause
                self.proxies.turn_from(exc.url)
            if num_wrong == WRONG_ATTEMPTS:
                raise StoreError(f"{where}: given up after {num_wrong} attempts, the last one: {fault}")
            pause_s = waiting.next_pause_s(str(fault), retry_after_s=fault.retry_after_s)
            if pause_s is None:
                raise StoreError(f"{where}: {waiting.over(str(fault))}")
            pause(pause_s)

    def _put(self, name: str, chunks: Callable[[], Iterable[memoryview]], num_bytes: int) -> None:
        url, client = object_url(self.proxies.current, self.bucket, name, provider=self.provider), self.objects.client
        kind = self.checksum_type if self.checksum_type in CHECKSUM_TYPES else DEFAULT_CHECKSUM_TYPE
        state = new_checksum(kind)

        def body() -> Iterator[memoryview]:
            for chunk in chunks():
                state.update(chunk)
                yield chunk

        # The length is the true one, because a cluster with AuthN signs it; "Expect" holds the body back. Neither side
        # can tell where the next request would begin on this connection, so it is closed.
        length = ("Content-Length", str(num_bytes))
        headers = [length, ("Expect", "100-continue"), ("Connection", "close")]
        target = url
        try:
            answer = client.ask(url, method="PUT", headers=headers, silence_s=HEAD_TIMEOUT_S)
        except NoAnswerError as exc:
            if not (exc.is_sent and isinstance(exc.cause, TimeoutError)):
                raise
        else:
            self._check_put(answer, name, expected=REDIRECTS)
            try:
                target = redirect_target(url, answer.headers.get("Location"))
            except RedirectError as exc:
                raise StoreError(f"'{self.locate(name)}' at {self.endpoint}: {exc}") from None
        answer = client.ask(target, method="PUT", headers=[length], body=body())
        self._check_put(answer, name, expected=(200,))
        reported_kind, reported = (answer.headers.get(f"Ais-Checksum-{what}").lower() for what in ("Type", "Value"))
        digest = state.hexdigest()
        if kind != NO_CHECKSUM_TYPE and reported and reported_kind == kind and reported != digest:
            client.follow(url, method="DELETE").close()  # so that no later run takes it for the object
            text = f"the target stored bytes with the {kind} {reported}, but {digest} was sent"
            raise FaultError(text, is_fruitless=True)

    def _check_put(self, answer: Answer, name: str, *, expected: tuple[int, ...]) -> None:
        """Read the end of an answer to a PUT; raises an error for one that was not expected."""
        text = refusal_text(answer, read_end(answer))
        is_expected = answer.status in expected
        is_away = self.http.note_answer(answer, "" if is_expected else text)
        if is_expected:
            return
        if is_away or is_passing(answer.status, writes=True):
            raise FaultError(text, retry_after_s=retry_after_s(answer.headers))
        advice = refusal_advice(answer.status, text, self.http.token)
        raise StoreError(f"'{self.locate(name)}' at {self.endpoint}: {text}{advice}")

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
        return write_claimed(self, name, data, by=by)

    def access(self) -> "AisStore":
        """See `Store.access`; with the environment's settings of now, and the bucket's type of checksum."""
        self.learn_map()
        if (props := self._props()) is None:
            raise StoreError(self._no_bucket())
        return AisStore(
            self.endpoint,
            self.bucket,
            provider=self.provider,
            http=self._access,
            checksum_type=_checksum_type(props),
            patience=self.patience,
        )

    def size(self, name: str) -> int | None:
        with self.asking(self.locate(name)), _MissingAllowed():
            path = f"objects/{self.parts.bucket}/{quote(name)}"
            return self.requests.call(path, method="HEAD", **self.query, props="name,size")[0].length
        return None

    def delete(self, name: str) -> None:
        with self.asking(self.locate(name)), _MissingAllowed():
            self.requests.call(f"objects/{self.parts.bucket}/{quote(name)}", method="DELETE", **self.query)

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
            found = self.requests.json("buckets", {"action": "list"}, provider=self.provider)
            parts = [(bucket["name"], *map(bucket["namespace"].get, ("uuid", "name"))) for bucket in found]
            names = sorted(BucketParts(*each).text for each in parts)
        others = f" (found: {shown([f'{self.scheme}://{name}' for name in names])})" if names else ""
        return f"no bucket '{self.url}' at {self.endpoint}; `dali-pipes prep pack` makes one{others}"

    @contextlib.contextmanager
    def asking(self, where: str) -> Iterator[None]:
        at = f"'{where}' at {self.endpoint}"
        try:
            yield
        except PatienceOverError as exc:
            raise StoreError(f"{at}: {exc}") from None
        except RefusedError as exc:
            advice = refusal_advice(exc.status, str(exc), self.http.token)
            raise StoreError(self._no_bucket() if exc.is_bucket_missing else f"{at}: {exc}{advice}") from None
        except NoAnswerError as exc:
            if self.proxies.has_answered and not isinstance(exc.cause, OSError):
                raise StoreError(f"{at}: the transfer broke ({cause_of(exc.cause)})") from exc.cause
            raise unreached(self.http, exc.url, exc.cause) from exc.cause
        except NotAisError as exc:
            raise StoreError(f"{at}: the server is not an AIStore ({exc})") from None


def _checksum_type(props: object) -> str:
    """The type of a bucket's checksums; the default if its properties do not say it."""
    checksum = props.get("checksum") if isinstance(props, dict) else None
    kind = checksum.get("type") if isinstance(checksum, dict) else None
    return kind if isinstance(kind, str) and kind else DEFAULT_CHECKSUM_TYPE


class _MissingAllowed:
    """Ends its ``with`` block without an error if the cluster answers that there is no such bucket or object."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, exc: BaseException | None, __: object) -> bool:
        return isinstance(exc, RefusedError) and exc.is_missing


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
