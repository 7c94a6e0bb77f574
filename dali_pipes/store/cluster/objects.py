"""AIStore's answers about an object: whether they are its bytes, and which error or new attempt follows."""

import logging
import time
from urllib.parse import quote, urlencode, urljoin, urlsplit

from dali_pipes.errors import DataError, StoreError, printable
from dali_pipes.store.base import PROVIDERS
from dali_pipes.store.checksums import CHECKSUM_TYPES, damaged
from dali_pipes.store.cluster.access import SETTLED_S, ClusterAccess, ask_json, refusal_advice, unreached
from dali_pipes.store.http.answers import (
    INDEX_ANEW,
    REPLACED,
    FaultError,
    MissingObjectError,
    ObjectPart,
    ObjectRequest,
    ObjectSource,
    Version,
    WantedObject,
)
from dali_pipes.store.http.client import HttpClient, NoAnswerError
from dali_pipes.store.http.rules import answer_text, is_missing, is_passing, retry_after_s
from dali_pipes.store.http.wire import Answer, Stopped
from dali_pipes.store.shard_names import BucketParts
from dali_pipes.store.shard_set import missing_advice

_log = logging.getLogger(__name__)


def object_url(endpoint: str, bucket: str, name: str, *, provider: str, **query: str) -> str:
    """The URL of an object, as the SDK builds it; a ``..`` in its name stays.

    >>> object_url("http://localhost:51080", "pets", "a b/../x.tar", provider="ais")
    'http://localhost:51080/v1/objects/pets/a%20b/../x.tar?provider=ais'
    """
    parts = BucketParts.parse(bucket)
    query = {"provider": provider, **parts.query, **query}
    return f"{urljoin(endpoint, 'v1')}/objects/{parts.bucket}/{quote(name)}?{urlencode(query)}"


class StoredObjects(ObjectSource):
    """The objects of a bucket of AIStore, as they are stored.

    ``provider`` is ``ais``, or the cloud from which the cluster reads the bucket.
    `dali_pipes.store.cluster.transformed.TransformedShards` has other rules.
    """

    service = "AIStore"
    question = "is the cluster well? AIS_ENDPOINT or --endpoint names it"
    access: ClusterAccess

    def __init__(self, access: ClusterAccess, bucket: str, *, provider: str = "ais", changed: str = REPLACED) -> None:
        super().__init__(access, changed=changed)
        self._bucket, self._provider = bucket, provider
        self._scheme = next((scheme for scheme, name in PROVIDERS.items() if name == provider), provider)
        self._query: dict[str, str] = {}
        self._noted_types: set[str] = set()

    def where(self, name: str) -> str:
        return f"{self._scheme}://{self._bucket}/{name}"

    def request(self, part: ObjectPart) -> ObjectRequest:
        """The URL at the target that is known, else at the proxy."""
        return ObjectRequest(part.item.target or self._url(part.item.name))

    def version_of(self, answer: Answer) -> Version:
        kind, value = (answer.headers.get(f"Ais-Checksum-{what}").lower() for what in ("Type", "Value"))
        if kind and kind not in CHECKSUM_TYPES and kind not in self._noted_types:
            self._noted_types.add(kind)
            _log.debug("AIStore reports a checksum of the unknown type '%s'; not compared", printable(kind))
        return Version(answer.headers.get("Ais-Version"), kind, value)

    @property
    def has_answered(self) -> bool:
        """See `ObjectSource`; the store's other clients share it."""
        return self.access.proxies.has_answered

    @has_answered.setter
    def has_answered(self, value: bool) -> None:
        self.access.proxies.has_answered = value

    def check_head(self, part: ObjectPart, answer: Answer) -> None:
        self.access.note_answer(answer)
        super().check_head(part, answer)

    def may_come_back(self, item: WantedObject, client: HttpClient, *, stopped: Stopped) -> bool:
        """Whether the cluster has changed since the last look, lacks a target, or rebalances, or does not answer.

        While a target restarts, the cluster's map lacks it, and its objects are missing (404). After it has joined
        again, or another one took its place, a rebalance moves objects. Only a cluster that is complete and at rest
        lacks an object for good. Without an earlier look, which `Bucket.learn_map` takes, only a rebalance can tell.
        """
        proxies = self.access.proxies
        if item.checksum is None and proxies.map is None:
            return False  # no manifest promises the object
        try:
            found = proxies.ask_map(client, stopped=stopped)
            if found is None:
                return False
            if item.checksum is None:
                return proxies.lacks_targets(found)
            kind = b'{"kind":"rebalance"}'
            status = ask_json(client, proxies.current, "cluster?what=status", body=kind, stopped=stopped)
        except NoAnswerError:
            return True
        except ValueError:
            return False
        before, now = proxies.map, time.monotonic()
        proxies.learn(found, has_token=bool(self.access.token))
        if item.map_version is None:
            item.map_version = found.version if before is None else before.version
        if item.map_version != found.version:
            item.map_version, item.settles_at = found.version, now + SETTLED_S
        is_rebalancing = isinstance(status, dict) and status.get("end_time") == 0
        return is_rebalancing or proxies.lacks_targets(found) or now < item.settles_at

    def unanswered(self, item: WantedObject, exc: NoAnswerError) -> Exception:
        """See `ObjectSource.unanswered`; another proxy is asked next."""
        self.access.proxies.turn_from(exc.url)
        return super().unanswered(item, exc)

    def nobody_there(self, item: WantedObject, fault: FaultError) -> StoreError:
        return unreached(self.access, self._url(item.name), fault.__cause__ or fault)

    def refusal(self, part: ObjectPart, asked: ObjectRequest, answer: Answer, body: bytes) -> Exception:
        item, text = part.item, refusal_text(answer, body)
        is_cluster_away = self.access.note_answer(answer, text)
        # A target that has sent another part may have given the object away since. A transfer of a shard or a range
        # waits after any trouble; a small object only for a cluster that is away.
        is_transfer = item.checksum is not None or (part.is_stream and part.stop is not None)
        is_passed = is_transfer and is_passing(answer.status)
        if is_passed or item.target is not None or is_cluster_away:
            return FaultError(text, retry_after_s=retry_after_s(answer.headers), is_away=True)
        self._check_refused_range(item, answer)
        told = f"{item.address}: {text}"
        if is_missing(answer.status, text):
            if b"BckNotFound" in body:
                return MissingObjectError(f"{told}; was it deleted? put the bucket back", said=text, is_bucket=True)
            advice = INDEX_ANEW if item.name.endswith(".safetensors") else missing_advice()
            return MissingObjectError(f"{told}; was it deleted? {advice}", said=text)
        return StoreError(told + refusal_advice(answer.status, text, self.access.token))

    def damaged(self, item: WantedObject, cause: str) -> DataError:
        target = urlsplit(item.target or "").netloc
        return DataError(damaged(item.where, cause, target=target, bucket=self.where("").rstrip("/")))

    def _url(self, name: str) -> str:
        """The URL to ask the proxy for."""
        return object_url(self.access.proxies.current, self._bucket, name, provider=self._provider, **self._query)


def refusal_text(answer: Answer, body: bytes) -> str:
    """Status and reason: see `answer_text`. HEAD has the message in a header."""
    text = body.decode(errors="replace") or answer.headers.get("Hdr-Error")
    return answer_text(answer.status, text, reason=answer.reason)
