"""Judge answers about an object by HTTP's rules: whether they are its bytes, and which error or new attempt follows.

`dali_pipes.fetch.answers.StoredObjects` adds the rules of AIStore, `dali_pipes.fetch.clouds.CloudObjects` those of
clouds and web servers.
"""

from abc import ABC, abstractmethod

from dali_pipes.errors import DataError, StoreError
from dali_pipes.fetch.parts import (
    FaultError,
    FetchedObject,
    NoRangesError,
    ObjectPart,
    ObjectRequest,
    Version,
)
from dali_pipes.fetch.transport.access import HttpAccess
from dali_pipes.fetch.transport.connection_pool import ConnectionPool, host_of
from dali_pipes.fetch.transport.event_loop import Task
from dali_pipes.fetch.transport.http_head import Answer
from dali_pipes.store.checksums import XXH64_TYPES, Checksum
from dali_pipes.store.cluster.transport.http_limits import ProtocolError, TooSlowError, decimal
from dali_pipes.store.cluster.transport.http_rules import RedirectError, redirect_target
from dali_pipes.store.cluster.transport.tls_errors import cut_hint, tls_text

INDEX_ANEW = "put it back, or index the shards anew: dali-pipes prep index URL"
REPLACED = f"it was replaced since: {INDEX_ANEW} --anew"


class ObjectSource(ABC):
    """The objects of a store: how to ask for them, and how to judge the answers.

    A wrong answer becomes a `FaultError` if another attempt may succeed, else an error for the user. ``changed`` is
    advice for the user about an object that differs from the manifest.
    """

    sends_ranges = True
    """Whether a range of an object can be asked for; if not, each attempt starts at the first byte."""
    service: str
    """What the store is, for messages: ``AIStore``."""

    def __init__(self, access: HttpAccess, *, changed: str = REPLACED) -> None:
        self.access = access
        self._changed = changed

    @abstractmethod
    def where(self, name: str) -> str:
        """The object, for messages: ``ais://pets/x.tar``."""

    @abstractmethod
    def request(self, item: FetchedObject, part: ObjectPart) -> ObjectRequest:
        """What to ask for."""

    @abstractmethod
    def version_of(self, answer: Answer) -> Version:
        """What an answer says of the object's version."""

    @abstractmethod
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
        """The error for an answer that is not the object.

        Args:
            item: The object.
            part: The part of it that was asked for.
            answer: The answer's head.
            body: The beginning of its body.
            asked: What was asked for first.
            url: Who answered: another URL after a redirect.
            is_known: The server sent other parts before.
        """

    @abstractmethod
    def given_up(
        self, item: FetchedObject, what: str, fault: FaultError, *, num_attempts: int, advice: str
    ) -> Exception:
        """The error after the last attempt.

        ``what`` says how many there were and how the last one failed; ``advice`` how to go on later.
        """

    def may_come_back(self, item: FetchedObject, pool: ConnectionPool) -> Task[bool]:
        """Whether an object that was not found may be found later."""
        yield from ()  # a task, as with other stores, that does not wait
        return False

    def redirected_url(self, item: FetchedObject, url: str, answer: Answer) -> str:
        """Find where a redirect leads; a `StoreError` if it must not be followed."""
        try:
            return redirect_target(url, answer.headers.get("Location"))
        except RedirectError as exc:
            raise StoreError(f"{item.address}: {host_of(url)}: {exc}") from None

    def unanswered(self, item: FetchedObject, asked: ObjectRequest, url: str, exc: Exception) -> Exception:
        """The error for a connection that could not be made, or brought no answer."""
        where = f"{item.address}: {host_of(url)}"
        if text := tls_text(exc, ca_variable=self.access.ca_variable):
            return StoreError(f"{where} {text}")
        hint = cut_hint(exc, url, has_certificate=self.access.client_cert is not None)
        return FaultError(f"no answer from {host_of(url)}: {cause_of(exc)}{hint}", is_away=is_silence(exc))

    def check_head(self, item: FetchedObject, part: ObjectPart, answer: Answer) -> None:
        """Raise an error for an answer that does not bring the part, before a byte of it is written."""
        is_whole = answer.status == 200
        version = self.version_of(answer)
        # A bucket can be set to report the checksum of a range with the range: only that of a whole object is proof.
        is_other = version.checksum_type in XXH64_TYPES and version.checksum != f"{item.checksum:016x}"
        self._check_size(item, part, answer)
        if is_whole and is_other:
            raise self._replaced(item, version.checksum)
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

    def check_bytes(self, item: FetchedObject, part: ObjectPart) -> None:
        """Raise an error if an object that was read in one part has another checksum."""
        hashes, found = part.hashes, (part.position, part.hashes[0].hexdigest())
        part.restart()
        cause = self.other_checksum(item, hashes)
        if cause is None and found[1] == f"{item.checksum:016x}":
            return
        # The same bytes came twice: so the stored object has these bytes.
        is_stored = item.wrong[-1:] == [found]
        # The store's own checksum is right, or it has none: another object has taken the name.
        if cause is None and (len(hashes) > 1 or (item.checksum_type not in XXH64_TYPES and is_stored)):
            raise self._replaced(item, found[1])
        cause = cause or item.differs(found[1])
        if is_stored:
            raise self.damaged(item, cause)
        item.wrong.append(found)
        raise FaultError(cause, is_fruitless=True)

    def damaged(self, item: FetchedObject, cause: str) -> DataError:
        """The error for an object whose stored bytes are not those of which the store has the checksum."""
        return DataError(f"'{item.where}' is damaged where it is stored: {cause}; write it again")

    def other_checksum(self, item: FetchedObject, hashes: list[Checksum]) -> str | None:
        """Describe the difference if the received bytes do not have the checksum that the store reports."""
        if len(hashes) < 2 or item.version is None or hashes[1].hexdigest() == item.version.checksum:
            return None
        kind, reported = item.version.checksum_type, item.version.checksum
        return f"its bytes have the {kind} {hashes[1].hexdigest()}, {self.service} reports {reported}"

    def short_body(self, item: FetchedObject, part: ObjectPart) -> Exception:
        """The error for a body that ended properly, but early."""
        return FaultError(f"its body ends after {part.position} of {item.extent.size} bytes")

    def long_body(self, item: FetchedObject, part: ObjectPart) -> Exception:
        """The error for a body that continues after the object's last byte."""
        return DataError(f"'{item.where}' has more than {item.extent.size} bytes, the manifest's; {self._changed}")

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

    def _refused_range(self, item: FetchedObject, answer: Answer) -> DataError | None:
        """The error for a range that was refused because the object has another size."""
        if answer.status == 416 and (size := _size_of(answer)) not in (None, item.extent.size):
            return self._wrong_size(item, size)
        return None


def is_silence(exc: Exception) -> bool:
    """Whether an exception of a connection means that a server is away. One that answers, too slowly, is not.

    `dali_pipes.store.cluster.transport.silence.is_silence` is the same for exceptions of `requests`.
    """
    return isinstance(exc, OSError) and not isinstance(exc, TooSlowError)


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
