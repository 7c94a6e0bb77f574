"""Judge a cluster's answers about an object: whether they are its bytes, and which error or new attempt follows."""

import logging

from dali_pipes.errors import DataError, StoreError, printable
from dali_pipes.fetch.parts import XXH64_TYPES, FaultError, FetchedObject, MissingObjectError, NoRangesError, ObjectPart
from dali_pipes.fetch.transport.connection_pool import ClusterAccess, host_of
from dali_pipes.fetch.transport.http_head import Answer
from dali_pipes.store.checksums import CHECKSUM_TYPES, Checksum
from dali_pipes.store.cluster.rights import refusal_advice
from dali_pipes.store.cluster.transport.http_limits import ProtocolError, TooSlowError, decimal
from dali_pipes.store.cluster.transport.http_rules import (
    RedirectError,
    is_away,
    is_missing,
    is_passing,
    object_url,
    redirect_target,
    retry_after_s,
)
from dali_pipes.store.cluster.transport.tls_errors import cut_hint, tls_text
from dali_pipes.store.entries import PROVIDERS
from dali_pipes.store.messages import answer_text
from dali_pipes.store.shard_set import missing_advice

_log = logging.getLogger(__name__)

_INDEX_ANEW = "put it back, or index the shards anew: dali-pipes prep index URL"
_REPLACED = f"it was replaced since: {_INDEX_ANEW}"


class StoredObjects:
    """The objects of a bucket, as they are stored: how to ask for them, and how to judge the answers.

    A wrong answer becomes a `FaultError` if another attempt may succeed, else an error for the user.
    `dali_pipes.fetch.through_etl.TransformedShards` has other rules.

    ``provider`` is ``ais``, or the cloud from which the cluster reads the bucket; ``changed`` is advice for the user
    about an object that differs from the manifest.
    """

    sends_ranges = True
    """Whether a range of an object can be asked for; if not, each attempt starts at the first byte."""

    def __init__(self, access: ClusterAccess, bucket: str, *, provider: str = "ais", changed: str = _REPLACED) -> None:
        self.access = access
        self._bucket, self._provider, self._changed = bucket, provider, changed
        self._scheme = next((scheme for scheme, name in PROVIDERS.items() if name == provider), provider)
        self._query: dict[str, str] = {}
        self._noted_types: set[str] = set()

    def where(self, name: str) -> str:
        """The object, for messages: ``ais://pets/x.tar``."""
        return f"{self._scheme}://{self._bucket}/{name}"

    def url(self, name: str) -> str:
        """The URL to ask the proxy for."""
        return object_url(self.access.proxies.current, self._bucket, name, provider=self._provider, **self._query)

    def check_head(self, item: FetchedObject, part: ObjectPart, answer: Answer) -> None:
        """Raise an error for an answer that does not bring the part, before a byte of it is written."""
        is_whole = answer.status == 200
        kind, value = (answer.headers.get(f"Ais-Checksum-{what}").lower() for what in ("Type", "Value"))
        version = (answer.headers.get("Ais-Version"), kind, value)
        # A bucket can be set to report the checksum of a range with the range: only that of a whole object is proof.
        is_other = kind in XXH64_TYPES and value != f"{item.checksum:016x}"
        self._check_size(item, part, answer)
        if is_whole and is_other:
            raise self._replaced(item, value)
        if part.is_range:
            if is_whole:
                raise NoRangesError(item, "the server does not send ranges", is_lasting=True)
            if is_other or item.version not in (None, version):
                raise NoRangesError(item, "a range reports another version or checksum", is_lasting=is_other)
        elif is_whole:
            part.restart()  # also if a range was asked for: all of it comes again
        elif version != item.version:
            part.restart()
            raise FaultError("its version or checksum changed while it was read", is_fruitless=True)
        item.version = version
        if not part.is_range and not part.hashes:
            part.hashes = item.hashes()
        if kind and kind not in CHECKSUM_TYPES and kind not in self._noted_types:
            self._noted_types.add(kind)
            _log.debug(
                "'%s': AIStore reports a checksum of the unknown type '%s'; not compared", item.where, printable(kind)
            )

    def check_bytes(self, item: FetchedObject, part: ObjectPart) -> None:
        """Raise an error if an object that was read in one part has another checksum."""
        hashes, found = part.hashes, (part.position, part.hashes[0].hexdigest())
        part.restart()
        if cause := other_checksum(item, hashes):
            raise FaultError(cause, is_fruitless=True)
        if found[1] == f"{item.checksum:016x}":
            return
        # AIStore's own checksum is right, or the same bytes came twice: so the stored object has these bytes.
        if len(hashes) > 1 or (item.checksum_type not in XXH64_TYPES and item.wrong[-1:] == [found]):
            raise self._replaced(item, found[1])
        item.wrong.append(found)
        raise FaultError(item.differs(found[1]), is_fruitless=True)

    def refusal(self, item: FetchedObject, answer: Answer, body: bytes, *, is_known: bool) -> Exception:
        """The error for an answer that is not the object; ``is_known``: its target sent other parts before."""
        text = refusal_text(answer, body)
        # The target may have given the object away since it sent another part.
        token = self.access.token
        has_expired = token is not None and token.is_replaced_soon(answer.status, text)
        if is_passing(answer.status) or is_known or is_away(answer.status, text) or has_expired:
            return FaultError(text, retry_after_s=retry_after_s(answer.headers), is_away=True)
        if answer.status == 416 and (size := _size_of(answer)) not in (None, item.extent.size):
            return self._wrong_size(item, size)
        match answer.status:
            case 401 | 403:
                url = self.url(item.name)
                advice = refusal_advice(answer.status, text, method="GET", url=url, token=token)
            case _ if is_missing(answer.status, text):
                told = f"{item.address}: {text}; was it deleted? "
                if b"BckNotFound" in body:
                    return StoreError(f"{told}put the bucket back")
                advice = _INDEX_ANEW if item.name.endswith(".safetensors") else missing_advice()
                return MissingObjectError(f"{told}{advice}", said=text)
            case _:
                advice = ""
        return StoreError(f"{item.address}: {text}{advice}")

    def short_body(self, item: FetchedObject, part: ObjectPart) -> Exception:
        """The error for a body that ended properly, but early."""
        return FaultError(f"its body ends after {part.position} of {item.extent.size} bytes")

    def long_body(self, item: FetchedObject, part: ObjectPart) -> Exception:
        """The error for a body that continues after the object's last byte."""
        return DataError(f"'{item.where}' has more than {item.extent.size} bytes, the manifest's; {self._changed}")

    def given_up(
        self, item: FetchedObject, what: str, fault: FaultError, *, num_attempts: int, advice: str
    ) -> Exception:
        """The error after the last attempt.

        ``what`` says how many there were and how the last one failed; ``advice`` how to go on later.
        """
        return StoreError(f"{what}; is the cluster well? AIS_ENDPOINT or --endpoint names it{advice}")

    def _check_length(self, item: FetchedObject, found: int | None) -> None:
        """Raise a `DataError` if an answer reports another size than the manifest's."""
        if found not in (None, item.extent.size):
            raise self._wrong_size(item, found)

    def _check_size(self, item: FetchedObject, part: ObjectPart, answer: Answer) -> None:
        found = answer.length
        if answer.status != 200:
            first, stop, found = _content_range(answer)
            is_asked = (first, stop) == (part.position, part.stop) and answer.length == stop - first
            if found in (None, item.extent.size) and not is_asked:
                part.restart()
                raise FaultError(f"asked for bytes {part.position} to {part.stop - 1}, it sends other ones")
        self._check_length(item, found)

    def _replaced(self, item: FetchedObject, digest: str) -> DataError:
        return DataError(
            f"'{item.where}' has the xxhash2 {digest}, the manifest says {item.checksum:016x}; {self._changed}"
        )

    def _wrong_size(self, item: FetchedObject, found: int | None) -> DataError:
        return DataError(f"'{item.where}' has {found} bytes, the manifest says {item.extent.size}; {self._changed}")


def broken(access: ClusterAccess, item: FetchedObject, url: str, exc: Exception) -> Exception:
    """The error for a connection that could not be made, or brought no answer."""
    where = f"{item.address}: {host_of(url)}"
    if text := tls_text(exc):
        return StoreError(f"{where} {text}")
    hint = cut_hint(exc, url, has_certificate=access.client_cert is not None)
    return FaultError(f"no answer from {host_of(url)}: {cause_of(exc)}{hint}", is_away=is_silence(exc))


def is_silence(exc: Exception) -> bool:
    """Whether an exception of a connection means that a server is away. One that answers, too slowly, is not.

    `dali_pipes.store.cluster.transport.silence.is_silence` is the same for exceptions of `requests`.
    """
    return isinstance(exc, OSError) and not isinstance(exc, TooSlowError)


def redirected_url(item: FetchedObject, url: str, answer: Answer) -> str:
    """Find where a redirect leads; a `StoreError` if it must not be followed."""
    try:
        return redirect_target(url, answer.headers.get("Location"))
    except RedirectError as exc:
        raise StoreError(f"{item.address}: {host_of(url)}: {exc}") from None


def other_checksum(item: FetchedObject, hashes: list[Checksum]) -> str | None:
    """Describe the difference if the received bytes do not have the checksum that AIStore reports, else ``None``."""
    if len(hashes) < 2 or item.version is None or hashes[1].hexdigest() == item.version[2]:
        return None
    return f"its bytes have the {item.version[1]} {hashes[1].hexdigest()}, AIStore reports {item.version[2]}"


def refusal_text(answer: Answer, body: bytes) -> str:
    """Status and reason: the message in AIStore's JSON, which HEAD has in a header, else HTTP's own words."""
    text = body.decode(errors="replace") or answer.headers.get("Hdr-Error")
    return answer_text(answer.status, text, reason=answer.reason)


def cause_of(exc: Exception) -> str:
    """Say in short what an exception of a connection means."""
    return (exc.strerror if isinstance(exc, OSError) else None) or str(exc) or type(exc).__name__


def _content_range(answer: Answer) -> tuple[int, int, int | None]:
    """Read ``[start, stop)`` and the size of the whole object from ``Content-Range: bytes 0-511/20480``."""
    unit, _, numbers = answer.headers.get("Content-Range").partition(" ")
    span, _, size = numbers.partition("/")
    first, last = (decimal(number) for number in (*span.split("-"), "")[:2])
    if unit.lower() != "bytes" or first is None or last is None or (size != "*" and decimal(size) is None):
        raise ProtocolError("it sends a range and does not say which")
    return first, last + 1, decimal(size)


def _size_of(answer: Answer) -> int | None:
    """Read the size of the whole object from the ``Content-Range: bytes */20480`` of a refused range."""
    return decimal(answer.headers.get("Content-Range").partition("bytes */")[2])
