"""Fetch objects by GET into extents, and count and check their bytes on the way.

A cluster's proxy redirects to the target that has the object. The redirect is followed once, and used for all ranges of
the object. When a transfer breaks, the object is asked for again, from the byte where it broke if it is still the same
object. An error that another attempt cannot mend is raised at once. An object is whole only if its XXH64 is the
manifest's, whatever AIStore reported on the way.
"""

import logging
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

from dali_pipes.errors import StoreError
from dali_pipes.fetch.answers import StoredObjects, broken, cause_of, other_checksum, redirected_url
from dali_pipes.fetch.connection_pool import ConnectionPool
from dali_pipes.fetch.event_loop import NOW, EventLoop, Task, Wait
from dali_pipes.fetch.fetcher import Wanted
from dali_pipes.fetch.http1 import Answer, AnswerBody, HttpConnection, ProtocolError
from dali_pipes.fetch.parts import BodyWriter, FaultError, FetchedObject, NoRangesError, ObjectPart, hash_extent
from dali_pipes.store.cluster.http_rules import REDIRECTS

_log = logging.getLogger(__name__)

RANGE_BYTES = 16 << 20
"""The least size of a range, if an object is read in several: a smaller one ends before its connection is fast."""
MAX_REDIRECTS = 4
MAX_RETRY_AFTER_S = 60.0


@dataclass(frozen=True, kw_only=True)
class RetryPolicy:
    """Rules for how long a fetch continues when transfers break."""

    attempts: int = 6
    """The fetch fails after this number of consecutive attempts without a byte that can be used."""
    max_attempts: int = 40
    """The fetch of one object, or of one range of it, fails after this number of attempts."""
    base_s: float = 0.1
    cap_s: float = 5.0
    """Pause after n such attempts: a random time up to ``base_s * 2 ** n``, at most ``cap_s``."""
    connect_timeout_s: float = 3.0
    silence_s: float = 60.0
    """The longest pause without a byte: a target under load, or one that asks a cloud first, may take long."""

    def __post_init__(self) -> None:
        for name in ("attempts", "max_attempts", "connect_timeout_s", "silence_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        if not 0 <= self.base_s <= self.cap_s:
            raise ValueError(f"base_s must be in [0, cap_s], got base_s={self.base_s} with cap_s={self.cap_s}")


class ObjectFetcher:
    """Fetches objects of one source; belongs to one thread. Owns connections, which stay open between objects."""

    def __init__(self, source: StoredObjects, *, retry: RetryPolicy | None = None) -> None:
        self._source, self._access, self._retry = source, source.access, retry or RetryPolicy()
        self._pool = ConnectionPool(
            source.access, connect_timeout_s=self._retry.connect_timeout_s, silence_s=self._retry.silence_s
        )
        self._writer = BodyWriter()
        self._jitter = random.Random()
        self._reads_ranges = source.sends_ranges

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections. Can be called twice."""
        self._pool.close()
        self._writer.close()

    def fetch(
        self,
        wanted: Sequence[Wanted],
        *,
        stopped: Callable[[], bool] = lambda: False,
        num_connections: int = 1,
    ) -> bool:
        """GET objects into their extents, all at the same time: a shard's index does not wait for the shard.

        An object takes as many of its ``num_connections`` as have `RANGE_BYTES` or more to read. See
        `dali_pipes.fetch.fetcher.Fetcher`.
        """
        try:
            return self._fetch(wanted, stopped, num_connections if self._reads_ranges else 1)
        except NoRangesError as exc:
            _log.info("'%s': %s; reading in one piece", exc.where, exc)
            is_lasting = exc.is_lasting
        is_whole = self._fetch(wanted, stopped, 1)
        if is_whole and is_lasting:
            self._reads_ranges = False
        return is_whole

    def _fetch(self, wanted: Sequence[Wanted], stopped: Callable[[], bool], num_connections: int) -> bool:
        loop = EventLoop()
        for name, extent, checksum in wanted:
            item = FetchedObject(name, self._source.where(name), self._access.endpoint, extent, checksum)
            num_parts = min(num_connections, extent.size // RANGE_BYTES)
            if num_parts > 1:
                loop.start(self._fetch_parts(item, num_parts, loop))
            else:
                loop.start(self._fetch_part(item, ObjectPart(0, extent.size, is_range=False)))
        return loop.run(stopped)

    def _fetch_parts(self, item: FetchedObject, num_parts: int, loop: EventLoop) -> Task[None]:
        """Read several ranges at a time. The first one's answer tells the object's version; then the others start."""
        size, step = item.extent.size, -(-item.extent.size // num_parts)
        first, *others = (ObjectPart(start, min(start + step, size), True, start) for start in range(0, size, step))
        num_left = len(others) + 1

        def start_others() -> None:
            while others:
                loop.start(read(others.pop(0)))

        def read(part: ObjectPart) -> Task[None]:
            nonlocal num_left
            yield from self._fetch_part(item, part, on_head=start_others)
            num_left -= 1
            if not num_left:
                yield from self._check_whole(item)

        yield from read(first)

    def _fetch_part(
        self, item: FetchedObject, part: ObjectPart, *, on_head: Callable[[], None] = lambda: None
    ) -> Task[None]:
        """Make attempts until one succeeds or the policy ends them."""
        num_attempts = num_fruitless = 0
        while True:
            num_received = part.num_received
            try:
                yield from self._attempt(item, part, on_head)
                return
            except FaultError as exc:
                fault = exc
            num_attempts += 1
            has_moved = self._source.sends_ranges and part.num_received > num_received and not fault.is_fruitless
            num_fruitless = 0 if has_moved else num_fruitless + 1
            if num_fruitless >= self._retry.attempts or num_attempts >= self._retry.max_attempts:
                elapsed_s = time.monotonic() - item.started
                tried = f"given up after {num_attempts} attempts in {elapsed_s:.1f} s, the last one: {fault}"
                raise self._source.given_up(
                    item, f"{item.address}: {tried}", fault, num_attempts=num_attempts
                ) from fault
            # Full jitter: clients that failed at the same time do not come back at the same time.
            longest_s = min(self._retry.cap_s, self._retry.base_s * 2.0**num_fruitless)
            wait_s = max(self._jitter.uniform(0, longest_s), min(fault.retry_after_s, MAX_RETRY_AFTER_S))
            # The target may be gone, or may have lost the object; the proxy knows.
            item.target = None
            _log.info("'%s': attempt %d: %s; the next in %.2f s", item.where, num_attempts, fault, wait_s)
            yield Wait(None, 0, time.monotonic() + wait_s)

    def _attempt(self, item: FetchedObject, part: ObjectPart, on_head: Callable[[], None]) -> Task[None]:
        if not self._source.sends_ranges:
            part.restart()
        connection, answer, body = yield from self._ask(item, part)
        try:
            self._source.check_head(item, part, answer)
            on_head()
            yield from self._receive(item, part, body)
        except (OSError, ProtocolError) as exc:
            if part.position == part.stop:
                part.restart()  # all bytes came, but not the announced end: no byte is left to resume from
            raise FaultError(cause_of(exc)) from exc
        finally:
            self._pool.give_back(connection)
        if not part.is_range:
            self._source.check_bytes(item, part)

    def _ask(self, item: FetchedObject, part: ObjectPart) -> Task[tuple[HttpConnection, Answer, AnswerBody]]:
        """Follow redirects to the answer that brings the object; the caller gives its connection back."""
        is_known = item.target is not None
        url = item.target or self._source.url(item.name)
        byte_range = (part.position, part.stop) if part.is_range or part.position else None
        for _ in range(MAX_REDIRECTS):
            try:
                connection, answer = yield from self._pool.get(url, byte_range=byte_range)
            except (OSError, ProtocolError) as exc:
                raise broken(self._access, item, url, exc) from exc
            try:
                body = AnswerBody(connection, answer)
                if answer.status in (200, 206):
                    item.target = url
                    return connection, answer, body
                text = yield from body.read_error()
            except (OSError, ProtocolError) as exc:
                connection.close()
                raise FaultError(f"{answer.status} {answer.reason}, and {cause_of(exc)}") from exc
            except BaseException:
                connection.close()
                raise
            self._pool.give_back(connection)
            if answer.status not in REDIRECTS:
                raise self._source.refusal(item, answer, text, is_known=is_known)
            url = redirected_url(self._access, item, url, answer)
        raise StoreError(f"{item.address}: redirected {MAX_REDIRECTS} times")

    def _receive(self, item: FetchedObject, part: ObjectPart, body: AnswerBody) -> Task[None]:
        while part.position < part.stop:
            num = yield from self._writer.write_next(body, item.extent, part)
            if not num:
                raise self._source.short_body(item, part)
            part.advance(num)
            yield NOW
        # Only a body whose length was not announced is incomplete here.
        if not body.is_complete and (yield from body.receive(memoryview(bytearray(1)))):
            raise self._source.long_body(item, part)

    def _check_whole(self, item: FetchedObject) -> Task[None]:
        """Compare the checksums of an object that was read in ranges."""
        hashes = item.hashes()
        yield from hash_extent(item.extent, hashes)
        if hashes[0].hexdigest() != f"{item.checksum:016x}":
            raise NoRangesError(item, "its ranges do not make up the manifest's checksum")
        if cause := other_checksum(item, hashes):
            raise NoRangesError(item, cause)
