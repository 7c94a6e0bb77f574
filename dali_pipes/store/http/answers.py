"""Judge answers about an object by HTTP's rules: whether they are its bytes, and which error or new attempt follows.

Each store with objects on a server has an `ObjectSource`: how to ask for them, and what its refusals mean.
"""

import math
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import NamedTuple

from dali_pipes.errors import DataError, StoreError, printable
from dali_pipes.store.checksums import (
    CHECKSUM_TYPES,
    DEFAULT_CHECKSUM_TYPE,
    NO_CHECKSUM_TYPE,
    XXH64_TYPES,
    Checksum,
    new_checksum,
)
from dali_pipes.store.http.client import HttpAccess, HttpClient, NoAnswerError, host_of
from dali_pipes.store.http.rules import cause_of, cut_hint, is_silence, tls_text
from dali_pipes.store.http.wire import Answer, ProtocolError, Stopped, decimal

INDEX_ANEW = "put it back, or index the shards anew: dali-pipes prep index URL"
REPLACED = f"it was replaced since: {INDEX_ANEW} --anew"
MAX_OBJECT_BYTES = 4 << 30
"""An object that is read into memory: a manifest, a column file, a shard index."""
MAX_ANSWER_BYTES = 64 << 20
"""The same for one whose length nobody announced, and for answers that are no objects, such as a listing's page."""

_IDENTITY = ("", "identity")


class ObjectRequest(NamedTuple):
    """What to ask for to get an object."""

    url: str
    headers: tuple[tuple[str, str], ...] = ()
    """Fields of the request's head, for the URL's own host alone."""
    expires_s: float = math.inf
    """Seconds for which its signature is good."""

    def __repr__(self) -> str:
        return f"ObjectRequest({printable(self.url)!r})"


class Version(NamedTuple):
    """What an answer says of an object's version; empty where it says nothing."""

    version: str
    checksum_type: str = ""
    checksum: str = ""


class FaultError(Exception):
    """An attempt failed; another one may succeed.

    The server asked for a pause of ``retry_after_s``. ``is_away``: the store, or a part of it, does not serve the
    object now; otherwise the store gave a wrong answer. ``is_fruitless``: the bytes that came are of no use, or too
    few to continue.
    """

    def __init__(
        self, cause: str, *, retry_after_s: float = 0.0, is_away: bool = False, is_fruitless: bool = False
    ) -> None:
        super().__init__(printable(cause, max_chars=1000))
        self.retry_after_s, self.is_away, self.is_fruitless = retry_after_s, is_away, is_fruitless


class MissingObjectError(StoreError):
    """The store does not find an object; ``said`` is its answer."""

    def __init__(self, text: str, *, said: str = "", is_bucket: bool = False) -> None:  # defaults: it can be pickled
        super().__init__(text)
        self.said, self.is_bucket = said, is_bucket


class NoRangesError(Exception):
    """The object must be read in one piece."""


@dataclass
class WantedObject:
    """An object that is being read, perhaps in several parts at a time."""

    name: str
    where: str
    """``ais://pets/x.tar``, for messages."""
    endpoint: str
    size: int | None = None
    """From the manifest; else from the first answer."""
    checksum: int | None = None
    """XXH64, from the manifest; ``None`` for an object that no manifest describes."""
    started: float = field(default_factory=time.monotonic)
    target: str | None = None
    """The URL that brought bytes, after redirects; other ranges of the object are read there at once."""
    version: Version | None = None
    """As the first answer reported it."""
    signed: ObjectRequest | None = None
    """What is asked for, if that has a signature that can expire; all ranges use it."""
    signed_until: float = math.inf
    num_refused: int = 0
    """Signatures that were refused, one after the other."""
    map_version: int | None = None
    """The version of the cluster's map when it was last looked at for this object."""
    settles_at: float = 0.0
    """`time.monotonic()` until which a change of the map may explain that the object is missing."""
    wrong: list[tuple[int, str]] = field(default_factory=list)
    """Bodies that ended properly but differ from the manifest: number of bytes and XXH64 of each."""

    @property
    def address(self) -> str:
        """Object and store, for messages."""
        return f"'{self.where}' at {self.endpoint}"

    def new_hash(self) -> Checksum | None:
        """The checksum to take of the bytes: the manifest's; without one, the store's own, if it is of a known type."""
        kind = DEFAULT_CHECKSUM_TYPE
        if self.checksum is None:
            kind = self.version.checksum_type if self.version else NO_CHECKSUM_TYPE
        return new_checksum(kind) if kind in CHECKSUM_TYPES and kind != NO_CHECKSUM_TYPE else None

    @property
    def expected(self) -> str:
        """The checksum that the bytes must have, in hexadecimal: see `new_hash`."""
        return f"{self.checksum:016x}" if self.checksum is not None or self.version is None else self.version.checksum

    def replaced_meanwhile(self) -> StoreError:
        """The error for a reader who has taken bytes of another version already."""
        return StoreError(f"'{self.where}' was replaced while it was read; run the command again")


@dataclass
class ObjectPart:
    """Bytes ``[start, stop)`` of an object, read front to back by one connection at a time."""

    item: WantedObject
    start: int = 0
    stop: int | None = None
    """``None``: the object's end, as soon as an answer says it."""
    is_range: bool = False
    """Whether it is one of several parts, which are hashed together at the end. A single part is hashed at once."""
    is_stream: bool = False
    """Whether somebody uses its bytes as they come, so that they cannot come again. They are not hashed."""
    position: int = field(init=False)
    """The next byte that is missing."""
    hash: Checksum | None = field(default=None, init=False)
    """The checksum of the bytes before ``position``; ``None`` if it is not taken."""
    furthest: int = field(default=0, init=False)
    """The furthest ``position`` of all attempts."""
    num_attempts: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.position = self.start

    def range_header(self) -> list[tuple[str, str]]:
        """The field that asks for the bytes that are missing; none for the whole object."""
        if not self.position and (self.stop is None or not (self.is_range or self.is_stream)):
            return []
        return [("Range", f"bytes={self.position}-{'' if self.stop is None else self.stop - 1}")]

    def restart(self) -> None:
        """Forget the bytes that came."""
        self.position = self.start
        self.hash = None

    def take(self, data: memoryview) -> None:
        """Count and hash bytes that came."""
        self.position += len(data)
        self.furthest = max(self.furthest, self.position)
        if self.hash is not None:
            self.hash.update(data)


class ObjectSource(ABC):
    """The objects of a store: how to ask for them, and how to judge the answers.

    A wrong answer becomes a `FaultError` if another attempt may succeed, else an error for the user. ``changed`` is
    advice for the user about an object that differs from the manifest.
    """

    sends_ranges = True
    """Whether a range of an object can be asked for; if not, each attempt starts at the first byte."""
    service: str
    """What the store is, for messages: ``AIStore``."""
    question: str
    """What to look at if the last attempt failed, for messages."""
    has_answered = False
    """Whether the server has ever answered: then it is away if it does not, and not misspelt."""

    def __init__(self, access: HttpAccess, *, changed: str = REPLACED) -> None:
        self.access = access
        self._changed = changed

    @abstractmethod
    def where(self, name: str) -> str:
        """The object, for messages: ``ais://pets/x.tar``."""

    @abstractmethod
    def request(self, part: ObjectPart) -> ObjectRequest:
        """What to ask for."""

    @abstractmethod
    def version_of(self, answer: Answer) -> Version:
        """What an answer says of the object's version."""

    @abstractmethod
    def refusal(self, part: ObjectPart, asked: ObjectRequest, answer: Answer, body: bytes) -> Exception:
        """The error for an answer that is not the object, and that begins with ``body``.

        ``answer`` is of another URL than asked for after a redirect.
        """

    @abstractmethod
    def nobody_there(self, item: WantedObject, fault: FaultError) -> StoreError:
        """The error for a server that has never answered."""

    def given_up(self, part: ObjectPart, fault: FaultError, what: str, advice: str) -> Exception:
        """The error after the last attempt: ``what`` happened, and ``advice`` how to go on later."""
        return StoreError(f"{what}; {self.question}{advice}")

    def may_come_back(self, item: WantedObject, client: HttpClient, *, stopped: Stopped) -> bool:
        """Whether an object that was not found may be found later."""
        return False

    def unanswered(self, item: WantedObject, exc: NoAnswerError) -> Exception:
        """The error for a connection that could not be made, or brought no answer."""
        if text := tls_text(exc.cause, ca_variable=self.access.ca_variable):
            return StoreError(f"{item.address}: {host_of(exc.url)} {text}")
        hint = cut_hint(exc.cause, exc.url, has_certificate=self.access.client_cert is not None)
        text = f"no answer from {host_of(exc.url)}: {cause_of(exc.cause)}{hint}"
        return FaultError(text, is_away=is_silence(exc.cause))

    def check_head(self, part: ObjectPart, answer: Answer) -> None:
        """Raise an error for an answer that does not bring the part, before a byte of it is used."""
        item, version, is_whole = part.item, self.version_of(answer), answer.status == 200
        # A bucket can be set to report the checksum of a range with the range: only that of a whole object is proof.
        is_other = (
            item.checksum is not None
            and version.checksum_type in XXH64_TYPES
            and version.checksum != f"{item.checksum:016x}"
        )
        if item.checksum is None and (encoding := answer.headers.get("Content-Encoding")) not in _IDENTITY:
            raise StoreError(
                f"{item.address}: it came with the Content-Encoding '{printable(encoding)}'; upload it without one"
            )
        self._check_size(part, answer)
        if is_whole and is_other:
            raise self._replaced(item, version.checksum)
        if part.is_stream:
            if item.version is not None and item.version.version != version.version:
                raise item.replaced_meanwhile()
        elif part.is_range:
            if is_whole or is_other or item.version not in (None, version):
                raise NoRangesError("an answer is no range, or of another version")
        elif is_whole:
            part.restart()  # also if a range was asked for: all of it comes again
        elif version != item.version:
            part.restart()
            raise FaultError("its version or checksum changed while it was read", is_fruitless=True)
        item.version = version
        if not (part.is_range or part.is_stream or part.hash):
            part.hash = item.new_hash()

    def check_bytes(self, part: ObjectPart) -> None:
        """Raise an error if an object that was read in one part has another checksum."""
        item = part.item
        if part.hash is None or (digest := part.hash.hexdigest()) == item.expected:
            return
        found = (part.position, digest)
        part.restart()
        expected = "the manifest says" if item.checksum is not None else f"{self.service} reports"
        cause = f"its bytes have the checksum {digest}, {expected} {item.expected}"
        if item.wrong[-1:] != [found]:
            item.wrong.append(found)
            raise FaultError(cause, is_fruitless=True)
        # The same bytes came twice: so the stored object has these bytes.
        if item.version is not None and item.version.checksum == item.expected:
            raise self.damaged(item, cause)
        raise self._replaced(item, digest)

    def damaged(self, item: WantedObject, cause: str) -> DataError:
        """The error for an object whose stored bytes are not those of which the store has the checksum."""
        return DataError(f"'{item.where}' is damaged where it is stored: {cause}; write it again")

    def short_body(self, part: ObjectPart) -> Exception:
        """The error for a body that ended properly, but early."""
        return FaultError(f"its body ends after {part.position} of {part.item.size} bytes")

    def long_body(self, part: ObjectPart) -> Exception:
        """The error for a body that continues after the object's last byte."""
        return DataError(f"'{part.item.where}' has more than {part.item.size} bytes, the manifest's; {self._changed}")

    def _check_size(self, part: ObjectPart, answer: Answer) -> None:
        """Learn the sizes of part and object, or compare them."""
        item, found = part.item, answer.length
        if answer.status == 200:
            if part.is_stream and part.position:
                raise StoreError(f"{item.address}: the server does not send ranges of objects")
            if item.checksum is None and not part.is_stream:
                item.size = part.stop = None  # all of it comes again, perhaps as another version
            stop = found
        else:
            first, stop, found = _content_range(answer)
            expected = stop if part.stop is None else part.stop if found is None else min(part.stop, found)
            is_asked = (first, stop) == (part.position, expected) and answer.length == stop - first
            if (item.size is None or found in (None, item.size)) and not is_asked:
                if not part.is_stream:
                    part.restart()
                raise FaultError(f"asked for bytes {part.position} to {(part.stop or 0) - 1}, it sends other ones")
        self._check_length(item, found)
        if not part.is_range and stop is not None:
            part.stop = stop if part.stop is None else min(part.stop, stop)
        if item.size is None and not part.is_stream:
            item.size = found

    def _check_length(self, item: WantedObject, found: int | None) -> None:
        """Raise a `DataError` if an answer reports another size than the manifest's, or the first answer's."""
        if found is None or item.size in (None, found):
            return
        if item.checksum is None:
            raise DataError(f"'{item.where}' was replaced while it was read: it has {found} bytes, not {item.size}")
        raise DataError(f"'{item.where}' has {found} bytes, the manifest says {item.size}; {self._changed}")

    def _check_refused_range(self, item: WantedObject, answer: Answer) -> None:
        """The same for a range that was refused, because the object has another size."""
        if answer.status == 416:
            self._check_length(item, decimal(answer.headers.get("Content-Range").partition("bytes */")[2]))

    def _replaced(self, item: WantedObject, digest: str) -> DataError:
        return DataError(
            f"'{item.where}' has the xxhash2 {digest}, the manifest says {item.checksum:016x}; {self._changed}"
        )


def _content_range(answer: Answer) -> tuple[int, int, int | None]:
    """Read ``[start, stop)`` and the size of the whole object from ``Content-Range: bytes 0-511/20480``."""
    unit, _, numbers = answer.headers.get("Content-Range").partition(" ")
    span, _, size = numbers.partition("/")
    first, last = (decimal(number) for number in (*span.split("-"), "")[:2])
    if unit.lower() != "bytes" or first is None or last is None or (size != "*" and decimal(size) is None):
        raise ProtocolError("it sends a range and does not say which")
    return first, last + 1, decimal(size)
