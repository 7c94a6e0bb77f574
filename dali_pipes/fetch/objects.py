"""Fetch an object: GETs out, its bytes into an extent, counted and checked on the way.

A cluster's proxy answers with the URL of the target that has the object; that is followed once, and used for all ranges
of the object. What breaks is asked for again, from the byte where it broke if it is still the same object. What cannot
be mended is told at once. An object is whole only when its XXH64 is the manifest's, whatever was reported on the way.
"""

import contextlib
import logging
import os
import random
import ssl
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

from dali_pipes.cache.extents import Extent
from dali_pipes.errors import CacheError, DataError, StoreError
from dali_pipes.fetch.connection_pool import ClusterAccess, ConnectionPool, host_of, is_token_for
from dali_pipes.fetch.http1 import NOW, Answer, Body, HttpConnection, Loop, Pipe, ProtocolError, Steps, Wait
from dali_pipes.fetch.stager import Wanted
from dali_pipes.store.base import PROVIDERS
from dali_pipes.store.checksums import CHECKSUM_TYPES, DEFAULT_CHECKSUM_TYPE, NO_CHECKSUM_TYPE, Checksum, new_checksum
from dali_pipes.store.messages import answer_text

__all__ = ["RANGE_BYTES", "ObjectFetcher", "RetryPolicy", "is_token_for"]

_log = logging.getLogger(__name__)

RANGE_BYTES = 16 << 20
"""A range, of an object that is read in several, has at least this: less ends before a connection is up to speed."""

BLOCK_BYTES = 256 << 10  # hashed while it is still in the processor's cache
MAX_REDIRECTS = 4
MAX_RETRY_AFTER_S = 60.0

_REDIRECTS = (301, 302, 303, 307, 308)
_PASSING = (408, 409, 423, 425, 429)  # 409 is AIStore's "the object is being written"
_NOT_PASSING = (501, 505)
_XXH64_TYPES = (DEFAULT_CHECKSUM_TYPE, "xxhash")  # AIStore has two implementations of it, and a name for each
_WANTS_CERTIFICATE = "if it wants a client's certificate, set AIS_CRT and AIS_CRT_KEY"


@dataclass(frozen=True, kw_only=True)
class RetryPolicy:
    """How long a fetch goes on when something breaks."""

    attempts: int = 6
    """In a row in which no byte came, or all came and were wrong."""
    max_attempts: int = 40
    """All together, of one object or one range of it."""
    base_s: float = 0.1
    cap_s: float = 5.0
    """Before the next attempt, after n in a row: a random time up to ``base_s * 2 ** n``, at most ``cap_s``."""
    connect_timeout_s: float = 3.0
    silence_s: float = 60.0
    """Without a byte: a target under load, or one that asks a cloud first, may take long."""

    def __post_init__(self) -> None:
        """Refuse what cannot be."""
        for name in ("attempts", "max_attempts", "connect_timeout_s", "silence_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        if not 0 <= self.base_s <= self.cap_s:
            raise ValueError(f"base_s must be in [0, cap_s], got base_s={self.base_s} with cap_s={self.cap_s}")


class _FaultError(Exception):
    """An attempt failed; another may do."""

    def __init__(self, cause: str, *, retry_after_s: float = 0.0, is_fruitless: bool = False) -> None:
        super().__init__(cause)
        self.retry_after_s, self.is_fruitless = retry_after_s, is_fruitless


class _NoRangesError(Exception):
    """The object must be read in one piece."""

    def __init__(self, item: "_Object", cause: str, *, is_lasting: bool = False) -> None:
        super().__init__(cause)
        self.where = item.where
        self.is_lasting = is_lasting
        """The same is to be expected of the bucket's other objects."""


@dataclass
class _Object:
    """One object being fetched."""

    name: str
    where: str
    """``ais://pets/x.tar``, for messages."""
    extent: Extent
    checksum: int
    started: float = field(default_factory=time.monotonic)
    target: str | None = None
    """Where the proxy's redirect led; the object's other ranges go there at once."""
    version: tuple[str, ...] | None = None
    """Version, and AIStore's own checksum: type and value, as the first answer reported them."""
    wrong_digest: str | None = None
    """XXH64 of what came last, where it was not the manifest's."""

    def hashes(self) -> list[Checksum]:
        """The manifest's, and AIStore's own if it is another one that we know."""
        kind = self.version[1] if self.version else ""
        is_other = kind in CHECKSUM_TYPES and kind not in (*_XXH64_TYPES, NO_CHECKSUM_TYPE)
        return [new_checksum(DEFAULT_CHECKSUM_TYPE), *([new_checksum(kind)] if is_other else [])]


@dataclass
class _Part:
    """Bytes ``[start, stop)`` of it, read front to back by one connection at a time."""

    start: int
    stop: int
    is_range: bool
    """One of several, hashed at the end; an only one is hashed as it comes."""
    position: int = 0
    """The next byte that is missing."""
    hashes: list[Checksum] = field(default_factory=list)
    """Of the bytes up to there."""
    num_received: int = 0
    """Over all attempts."""

    def restart(self) -> None:
        """Nothing of it is there."""
        self.position = self.start
        self.hashes = []


class ObjectFetcher:
    """Fetches objects of one bucket; owned by one thread. Owns connections, which stay open between objects.

    What is otherwise where shards are read through an ETL is in `dali_pipes.fetch.through_etl`.

    Args:
        connection: The cluster.
        bucket: Its name.
        provider: ``ais``, or the cloud's from which the cluster reads it.
        retry: How long to go on when something breaks.
    """

    _resumes = True
    """Whether an object that broke off is read on from there."""
    _other_bytes = "it was replaced since: put it back, or index the shards anew: dali-pipes prep index URL"
    """Why an object is not what the manifest says, and what to do."""

    def __init__(
        self, connection: ClusterAccess, bucket: str, *, provider: str = "ais", retry: RetryPolicy | None = None
    ) -> None:
        self._connection, self._bucket, self._provider = connection, bucket, provider
        self._retry = retry or RetryPolicy()
        scheme = next((scheme for scheme, name in PROVIDERS.items() if name == provider), provider)
        self._url = f"{scheme}://{bucket}"
        self._lines = ConnectionPool(
            connection, connect_timeout_s=self._retry.connect_timeout_s, silence_s=self._retry.silence_s
        )
        self._pipes: list[Pipe] = []
        """Those that nobody uses at present."""
        self._jitter = random.Random()
        self._reads_ranges = True
        self._can_splice = True
        self._noted_types: set[str] = set()
        # Between its filling and its storing nobody else has a turn.
        self._block = memoryview(bytearray(BLOCK_BYTES))

    def __enter__(self) -> Self:
        """Itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close."""
        self.close()

    def close(self) -> None:
        """Close all connections. Can be called twice."""
        self._lines.close()
        while self._pipes:
            self._pipes.pop().close()

    def fetch(
        self,
        wanted: Sequence[Wanted],
        *,
        stopped: Callable[[], bool] = lambda: False,
        num_connections: int = 1,
    ) -> bool:
        """GET objects into their extents, all at the same time: a shard's index does not wait for the shard.

        Args:
            wanted: Objects of the bucket.
            stopped: Asked at least every 100 ms, whatever is waited for; ``True`` gives up.
            num_connections: For each object; as many as have ``RANGE_BYTES`` or more to read.

        Returns:
            Whether all are whole and verified; ``False`` only if ``stopped``.

        Raises:
            CacheError: If bytes cannot be stored.
            DataError: If an object is not what the manifest says.
            StoreError: If one cannot be had.
        """
        try:
            return self._fetch(wanted, stopped, num_connections if self._reads_ranges else 1)
        except _NoRangesError as exc:
            _log.info("'%s': %s; reading in one piece", exc.where, exc)
            is_lasting = exc.is_lasting
        is_whole = self._fetch(wanted, stopped, 1)
        if is_whole and is_lasting:
            self._reads_ranges = False
        return is_whole

    def _fetch(self, wanted: Sequence[Wanted], stopped: Callable[[], bool], num_connections: int) -> bool:
        loop = Loop()
        for name, extent, checksum in wanted:
            item = self._object(name, extent, checksum)
            num_parts = min(num_connections, extent.size // RANGE_BYTES)
            if num_parts > 1:
                loop.start(self._fetch_parts(item, num_parts, loop))
            else:
                loop.start(self._fetch_part(item, _Part(0, extent.size, is_range=False)))
        return loop.run(stopped)

    def _object(self, name: str, extent: Extent, checksum: int) -> _Object:
        return _Object(name, f"{self._url}/{name}", extent, checksum)

    def _object_url(self, item: _Object) -> str:
        return self._connection.object_url(self._bucket, item.name, provider=self._provider)

    def _fetch_parts(self, item: _Object, num_parts: int, loop: Loop) -> Steps[None]:
        """Several ranges at a time. The first one's answer says which object it is; then the others start."""
        size, step = item.extent.size, -(-item.extent.size // num_parts)
        first, *others = (_Part(start, min(start + step, size), True, start) for start in range(0, size, step))
        num_left = len(others) + 1

        def start_others() -> None:
            while others:
                loop.start(read(others.pop(0)))

        def read(part: _Part) -> Steps[None]:
            nonlocal num_left
            yield from self._fetch_part(item, part, on_head=start_others)
            num_left -= 1
            if not num_left:
                yield from self._check_whole(item)

        yield from read(first)

    def _fetch_part(self, item: _Object, part: _Part, *, on_head: Callable[[], None] = lambda: None) -> Steps[None]:
        """Attempts, until one succeeds or none will."""
        num_attempts = num_fruitless = 0
        while True:
            num_received = part.num_received
            try:
                yield from self._attempt(item, part, on_head)
                return
            except _FaultError as exc:
                fault = exc
            num_attempts += 1
            has_moved = self._resumes and part.num_received > num_received and not fault.is_fruitless
            num_fruitless = 0 if has_moved else num_fruitless + 1
            if num_fruitless >= self._retry.attempts or num_attempts >= self._retry.max_attempts:
                raise self._given_up(item, num_attempts, fault) from fault
            # Full jitter: clients that were sent away together do not come back together.
            longest_s = min(self._retry.cap_s, self._retry.base_s * 2.0**num_fruitless)
            wait_s = max(self._jitter.uniform(0, longest_s), min(fault.retry_after_s, MAX_RETRY_AFTER_S))
            # The target may be gone, or may not have the object any more; the proxy knows.
            item.target = None
            _log.info("'%s': attempt %d: %s; the next in %.2f s", item.where, num_attempts, fault, wait_s)
            yield Wait(None, 0, time.monotonic() + wait_s)

    def _given_up(self, item: _Object, num_attempts: int, fault: _FaultError) -> Exception:
        return StoreError(
            f"'{item.where}' at {self._connection.endpoint}: given up after {num_attempts} attempts in "
            f"{time.monotonic() - item.started:.1f} s, the last one: {fault}; is the cluster well? AIS_ENDPOINT or "
            "--endpoint names it"
        )

    def _attempt(self, item: _Object, part: _Part, on_head: Callable[[], None]) -> Steps[None]:
        if not self._resumes:
            part.restart()
        line, answer, body = yield from self._ask(item, part)
        try:
            self._check_head(item, part, answer)
            on_head()
            yield from self._land(item, part, body)
        except (OSError, ProtocolError) as exc:
            if part.position == part.stop:
                part.restart()  # all came, but not the end that was announced: there is no byte to go on from
            raise _FaultError(_text_of(exc)) from exc
        finally:
            self._lines.give_back(line)
        if not part.is_range:
            self._check_digests(item, part)

    # Questions

    def _ask(self, item: _Object, part: _Part) -> Steps[tuple[HttpConnection, Answer, Body]]:
        """The answer that has the object, redirects followed; its connection is the caller's to give back."""
        is_known = item.target is not None
        url = item.target or self._object_url(item)
        byte_range = (part.position, part.stop) if part.is_range or part.position else None
        for _ in range(MAX_REDIRECTS):
            try:
                line, answer = yield from self._lines.get(url, byte_range=byte_range)
            except (OSError, ProtocolError) as exc:
                raise self._broken(item, url, exc) from exc
            try:
                body = Body(line, answer)
                if answer.status in (200, 206):
                    item.target = url
                    return line, answer, body
                text = yield from body.read_aside()
            except (OSError, ProtocolError) as exc:
                line.close()
                raise _FaultError(f"{answer.status} {answer.reason}, and {_text_of(exc)}") from exc
            except BaseException:
                line.close()
                raise
            self._lines.give_back(line)
            if answer.status not in _REDIRECTS:
                raise self._refusal(item, answer, text, is_known=is_known)
            url = self._redirected(item, url, answer)
        raise StoreError(f"'{item.where}' at {self._connection.endpoint}: redirected {MAX_REDIRECTS} times")

    def _redirected(self, item: _Object, url: str, answer: Answer) -> str:
        location = answer.headers.get("Location", "")
        if location.startswith("/") and not location.startswith("//"):
            # Not urljoin, which would fold the name.
            parts = urlsplit(url)
            location = f"{parts.scheme}://{parts.netloc}{location}"
        try:
            parts = urlsplit(location)
            is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:
            is_url = False
        if not is_url or not location.isascii() or not location.isprintable() or " " in location:
            raise StoreError(
                f"'{item.where}' at {self._connection.endpoint}: {host_of(url)} redirects to what is no URL of a host, "
                f"'{self._masked(location[:40])}'; does --endpoint name an AIStore?"
            )
        return location

    def _broken(self, item: _Object, url: str, exc: Exception) -> Exception:
        """What to raise for a connection that could not be made, or brought no answer."""
        where = f"'{item.where}' at {self._connection.endpoint}: {host_of(url)}"
        reason = (getattr(exc, "reason", None) or "") if isinstance(exc, ssl.SSLError) else ""
        if isinstance(exc, ssl.SSLCertVerificationError):
            return StoreError(
                f"{where} shows a certificate that cannot be trusted ({exc.verify_message}); "
                "set AIS_CLIENT_CA to the file of the CA that signed it"
            )
        if "ALERT" in reason or "CERTIFICATE" in reason:
            return StoreError(f"{where} refuses the TLS connection ({_words(reason)}); {_WANTS_CERTIFICATE}")
        if reason in ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "RECORD_LAYER_FAILURE"):
            return StoreError(f"{where} does not speak TLS ({_words(reason)}); is its endpoint an http:// one?")
        # An alert may be lost with the connection.
        is_cut = isinstance(exc, (ssl.SSLEOFError, ConnectionResetError, BrokenPipeError)) and url.startswith("https:")
        hint = f" ({_WANTS_CERTIFICATE})" if is_cut and not self._connection.client_cert else ""
        return _FaultError(f"no answer from {host_of(url)}: {_text_of(exc)}{hint}")

    def _refusal(self, item: _Object, answer: Answer, body: bytes, *, is_known: bool) -> Exception:
        """What to raise for an answer that is not the object."""
        text = self._masked(_reason(answer, body))
        is_passing = answer.status in _PASSING or (answer.status >= 500 and answer.status not in _NOT_PASSING)
        # A target that another range was sent to may have been relieved of the object since.
        if is_passing or is_known:
            return _FaultError(text, retry_after_s=_retry_after_s(answer))
        if answer.status == 416 and (size := _size_of(answer)) not in (None, item.extent.size):
            return self._wrong_size(item, f"{size} bytes")
        match answer.status:
            case 401 | 403 if self._connection.token:
                advice = "; the token in AIS_AUTHN_TOKEN may have expired, or may not read this bucket"
            case 401 | 403:
                advice = "; set AIS_AUTHN_TOKEN to a token that may read this bucket"
            case 404:
                advice = "; was it deleted? index the shards anew: dali-pipes prep index URL"
            case _:
                advice = ""
        return StoreError(f"'{item.where}' at {self._connection.endpoint}: {text}{advice}")

    def _masked(self, text: str) -> str:
        """What a server says, in case that it repeats what it was sent."""
        return text.replace(self._connection.token, "***") if self._connection.token else text

    # Answers

    def _check_head(self, item: _Object, part: _Part, answer: Answer) -> None:
        """Refuse what is not these bytes of this object, before one of them is written."""
        size, is_whole = item.extent.size, answer.status == 200
        kind, value = (answer.headers.get(f"Ais-Checksum-{what}", "").lower() for what in ("Type", "Value"))
        version = (answer.headers.get("Ais-Version", ""), kind, value)
        # A bucket may be set to report, with a range, the range's own checksum: only that of the whole is proof.
        is_other = kind in _XXH64_TYPES and value != f"{item.checksum:016x}"
        if is_whole:
            found = answer.length
        else:
            first, stop, found = _content_range(answer)
            if found in (None, size) and ((first, stop) != (part.position, part.stop) or answer.length != stop - first):
                part.restart()
                raise _FaultError(f"asked for bytes {part.position} to {part.stop - 1}, it sends other ones")
        if found is not None and found != size:
            raise self._wrong_size(item, f"{found} bytes")
        if is_whole and is_other:
            raise self._replaced(item, value)
        if part.is_range:
            if is_whole:
                raise _NoRangesError(item, "the server does not send ranges", is_lasting=True)
            if is_other or item.version not in (None, version):
                raise _NoRangesError(item, "a range reports another version or checksum", is_lasting=is_other)
        elif is_whole:
            # Also where a range was asked for: all of it comes again.
            part.restart()
        elif version != item.version:
            part.restart()
            raise _FaultError("its version or checksum changed while it was read")
        item.version = version
        if not part.is_range and not part.hashes:
            part.hashes = item.hashes()
        if kind and kind not in CHECKSUM_TYPES and kind not in self._noted_types:
            self._noted_types.add(kind)
            _log.debug("'%s': AIStore reports a checksum of the unknown type '%s'; not compared", item.where, kind)

    def _land(self, item: _Object, part: _Part, body: Body) -> Steps[None]:
        """The body to its place."""
        while part.position < part.stop:
            if self._can_splice and body.can_splice:
                num = yield from self._splice(item.extent, part, body)
            else:
                num = yield from body.receive(self._block[: part.stop - part.position])
                item.extent.write(self._block[:num], part.position)
                for state in part.hashes:
                    state.update(self._block[:num])
            if not num:
                raise self._short(item, part)
            part.position += num
            part.num_received += num
            yield NOW
        # Only where no length was announced.
        if not body.is_complete and (yield from body.receive(self._block)):
            raise self._long(item, part)

    def _short(self, item: _Object, part: _Part) -> Exception:
        """What to raise for a body that ended early, as if that were its end."""
        return _FaultError(f"its body ends after {part.position} of {item.extent.size} bytes")

    def _long(self, item: _Object, part: _Part) -> Exception:
        """What to raise for a body that goes on."""
        return DataError(f"'{item.where}' has more than {item.extent.size} bytes, the manifest's; {self._other_bytes}")

    def _splice(self, extent: Extent, part: _Part, body: Body) -> Steps[int]:
        """The next bytes through a pipe into the file, and from there, while they are in the cache, into the hash."""
        pipe = self._pipes.pop() if self._pipes else Pipe()
        try:
            num = yield from body.splice(pipe)
            self._store(extent, part.position, num, pipe)
        except CacheError:
            pipe.close()  # something is left in it
            raise
        except BaseException:
            self._pipes.append(pipe)
            raise
        self._pipes.append(pipe)
        if part.hashes:
            stop = part.position + num
            for position in range(part.position, stop, BLOCK_BYTES):
                _update(part.hashes, extent.read(position, min(BLOCK_BYTES, stop - position)))
        return num

    def _store(self, extent: Extent, position: int, num: int, pipe: Pipe) -> None:
        stop = position + num
        try:
            while position < stop:
                position += os.splice(pipe.source, extent.file, stop - position, offset_dst=extent.start + position)
        except OSError:
            # By hand: that says what is wrong with the disk, or works where a file system cannot be spliced to.
            while position < stop:
                block = os.read(pipe.source, stop - position)
                extent.write(block, position)
                position += len(block)
            self._can_splice = False

    def _check_whole(self, item: _Object) -> Steps[None]:
        """Hash what came in ranges."""
        hashes = item.hashes()
        for position in range(0, item.extent.size, BLOCK_BYTES):
            _update(hashes, item.extent.read(position, BLOCK_BYTES))
            yield NOW
        if hashes[0].hexdigest() != f"{item.checksum:016x}":
            raise _NoRangesError(item, "its ranges do not make up the manifest's checksum")
        if cause := self._differs(item, hashes):
            raise _NoRangesError(item, cause)

    def _check_digests(self, item: _Object, part: _Part) -> None:
        """Hold what came against AIStore's checksum and the manifest's."""
        hashes, digest = part.hashes, part.hashes[0].hexdigest()
        kind = item.version[1] if item.version else ""
        part.restart()
        if cause := self._differs(item, hashes):
            raise _FaultError(cause, is_fruitless=True)
        if digest == f"{item.checksum:016x}":
            return
        # AIStore's own checksum is right, or the same came twice: it is what is stored there.
        if len(hashes) > 1 or (kind not in _XXH64_TYPES and digest == item.wrong_digest):
            raise self._replaced(item, digest)
        item.wrong_digest = digest
        raise _FaultError(
            f"its bytes have the xxhash2 {digest}, the manifest says {item.checksum:016x}", is_fruitless=True
        )

    @staticmethod
    def _differs(item: _Object, hashes: list[Checksum]) -> str | None:
        if len(hashes) < 2 or item.version is None or hashes[1].hexdigest() == item.version[2]:
            return None
        return f"its bytes have the {item.version[1]} {hashes[1].hexdigest()}, AIStore reports {item.version[2]}"

    def _replaced(self, item: _Object, digest: str) -> DataError:
        return DataError(
            f"'{item.where}' has the xxhash2 {digest}, the manifest says {item.checksum:016x}; {self._other_bytes}"
        )

    def _wrong_size(self, item: _Object, found: str) -> DataError:
        return DataError(f"'{item.where}' has {found}, the manifest says {item.extent.size}; {self._other_bytes}")


def _update(hashes: list[Checksum], data: bytes) -> None:
    for state in hashes:
        state.update(data)


def _content_range(answer: Answer) -> tuple[int, int, int | None]:
    """``[start, stop)`` and the whole's size, from ``Content-Range: bytes 0-511/20480``.

    Raises:
        ProtocolError: If there is none.
    """
    text = answer.headers.get("Content-Range", "")
    unit, _, numbers = text.partition(" ")
    span, _, size = numbers.partition("/")
    first, _, last = span.partition("-")
    with contextlib.suppress(ValueError):
        if unit.lower() == "bytes":
            return int(first), int(last) + 1, None if size == "*" else int(size)
    raise ProtocolError("it sends a range and does not say which")


def _size_of(answer: Answer) -> int | None:
    """The whole's size, from the ``Content-Range: bytes */20480`` of a refused range."""
    size = answer.headers.get("Content-Range", "").partition("bytes */")[2]
    return int(size) if size.isascii() and size.isdigit() else None


def _reason(answer: Answer, body: bytes) -> str:
    """Status and reason: the message of AIStore's JSON, which HEAD has in a header, else HTTP's own words."""
    text = body.decode(errors="replace") or answer.headers.get("Hdr-Error", "")
    return answer_text(answer.status, text, reason=answer.reason)


def _retry_after_s(answer: Answer) -> float:
    """Seconds that ``Retry-After`` asks for, as a number or a date; 0 where it is not there."""
    text = answer.headers.get("Retry-After", "").strip()
    if text.isascii() and text.isdigit():
        return float(text)
    try:
        return max(0.0, (parsedate_to_datetime(text) - datetime.now(UTC)).total_seconds())
    except (ValueError, TypeError):
        return 0.0


def _text_of(exc: Exception) -> str:
    return (exc.strerror if isinstance(exc, OSError) else None) or str(exc) or type(exc).__name__


def _words(reason: str) -> str:
    return reason.replace("_", " ").lower()
