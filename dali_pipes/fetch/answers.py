"""AIStore's answers about an object: whether they are its bytes, and which error or new attempt follows."""

import logging
from urllib.parse import urlsplit

from dali_pipes.errors import DataError, StoreError, printable
from dali_pipes.fetch.missing import may_come_back
from dali_pipes.fetch.parts import FaultError, FetchedObject, MissingObjectError, ObjectPart, ObjectRequest, Version
from dali_pipes.fetch.source import INDEX_ANEW, REPLACED, ObjectSource
from dali_pipes.fetch.transport.access import ClusterAccess
from dali_pipes.fetch.transport.connection_pool import ConnectionPool
from dali_pipes.fetch.transport.event_loop import Task
from dali_pipes.fetch.transport.http_head import Answer
from dali_pipes.store.checksums import CHECKSUM_TYPES
from dali_pipes.store.cluster.rights import refusal_advice
from dali_pipes.store.cluster.transport.http_rules import is_away, is_missing, is_passing, object_url, retry_after_s
from dali_pipes.store.entries import PROVIDERS
from dali_pipes.store.messages import answer_text, damaged
from dali_pipes.store.shard_set import missing_advice

_log = logging.getLogger(__name__)


class StoredObjects(ObjectSource):
    """The objects of a bucket of AIStore, as they are stored.

    ``provider`` is ``ais``, or the cloud from which the cluster reads the bucket.
    `dali_pipes.fetch.through_etl.TransformedShards` has other rules.
    """

    service = "AIStore"
    access: ClusterAccess

    def __init__(self, access: ClusterAccess, bucket: str, *, provider: str = "ais", changed: str = REPLACED) -> None:
        super().__init__(access, changed=changed)
        self._bucket, self._provider = bucket, provider
        self._scheme = next((scheme for scheme, name in PROVIDERS.items() if name == provider), provider)
        self._query: dict[str, str] = {}
        self._noted_types: set[str] = set()

    def where(self, name: str) -> str:
        """The object, for messages: ``ais://pets/x.tar``."""
        return f"{self._scheme}://{self._bucket}/{name}"

    def request(self, item: FetchedObject, part: ObjectPart) -> ObjectRequest:
        """The URL at the target that is known, else at the proxy."""
        return ObjectRequest(item.target or self._url(item.name))

    def version_of(self, answer: Answer) -> Version:
        """AIStore's version, and its own checksum."""
        kind, value = (answer.headers.get(f"Ais-Checksum-{what}").lower() for what in ("Type", "Value"))
        if kind and kind not in CHECKSUM_TYPES and kind not in self._noted_types:
            self._noted_types.add(kind)
            _log.debug("AIStore reports a checksum of the unknown type '%s'; not compared", printable(kind))
        return Version(answer.headers.get("Ais-Version"), kind, value)

    def may_come_back(self, item: FetchedObject, pool: ConnectionPool) -> Task[bool]:
        """See `dali_pipes.fetch.missing`."""
        return (yield from may_come_back(item, self.access, pool))

    def unanswered(self, item: FetchedObject, asked: ObjectRequest, url: str, exc: Exception) -> Exception:
        """See `ObjectSource.unanswered`; another proxy is asked next."""
        if self.access.proxies.is_proxy(url):
            self.access.proxies.turn_if_at(asked.url)
        return super().unanswered(item, asked, url, exc)

    def refusal(
        self,
        item: FetchedObject,
        part: ObjectPart,
        answer: Answer,
        body: bytes,
        *,
        asked: ObjectRequest,
        url: str,
        is_known: bool,
    ) -> Exception:
        """See `ObjectSource.refusal`; a target that sent other parts is known."""
        self.access.proxies.turn_if_starting(answer.status, url)
        text = refusal_text(answer, body)
        # The target may have given the object away since it sent another part.
        token = self.access.token
        has_expired = token is not None and token.is_replaced_soon(answer.status, text)
        if is_passing(answer.status) or is_known or is_away(answer.status, text) or has_expired:
            return FaultError(text, retry_after_s=retry_after_s(answer.headers), is_away=True)
        if (wrong := self._refused_range(item, answer)) is not None:
            return wrong
        match answer.status:
            case 401 | 403:
                url = self._url(item.name)
                advice = refusal_advice(answer.status, text, method="GET", url=url, token=token)
            case _ if is_missing(answer.status, text):
                told = f"{item.address}: {text}; was it deleted? "
                if b"BckNotFound" in body:
                    return StoreError(f"{told}put the bucket back")
                advice = INDEX_ANEW if item.name.endswith(".safetensors") else missing_advice()
                return MissingObjectError(f"{told}{advice}", said=text)
            case _:
                advice = ""
        return StoreError(f"{item.address}: {text}{advice}")

    def damaged(self, item: FetchedObject, cause: str) -> DataError:
        """See `ObjectSource.damaged`."""
        target = urlsplit(item.target or "").netloc
        return DataError(damaged(item.where, cause, target=target, bucket=self.where("").rstrip("/")))

    def given_up(
        self, item: FetchedObject, what: str, fault: FaultError, *, num_attempts: int, advice: str
    ) -> Exception:
        """See `ObjectSource.given_up`."""
        return StoreError(f"{what}; is the cluster well? AIS_ENDPOINT or --endpoint names it{advice}")

    def _url(self, name: str) -> str:
        """The URL to ask the proxy for."""
        return object_url(self.access.proxies.current, self._bucket, name, provider=self._provider, **self._query)


def refusal_text(answer: Answer, body: bytes) -> str:
    """Status and reason: the message in AIStore's JSON, which HEAD has in a header, else HTTP's own words."""
    text = body.decode(errors="replace") or answer.headers.get("Hdr-Error")
    return answer_text(answer.status, text, reason=answer.reason)
