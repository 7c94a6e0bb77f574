"""Fetch objects by GET into extents, and count and check their bytes on the way.

What differs between AIStore and clouds is in an `ObjectSource`. A redirect, such as that of AIStore's proxy to the
target that has the object, is followed once, and used for all ranges of the object. When a transfer breaks, the object
is asked for again, from the byte where it broke if it is still the same object. An error that another attempt cannot
mend is raised at once. An object is whole only if its XXH64 is the manifest's, whatever the store reported on the way.

A store that is away costs time, not the fetch: `dali_pipes.store.patience.Patience` says how long. A store that answers
wrongly gets the few attempts of `RetryPolicy`.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self
from urllib.parse import urlsplit

from dali_pipes.errors import StoreError
from dali_pipes.fetch.fetcher import Wanted
from dali_pipes.fetch.parts import (
    BodyWriter,
    FaultError,
    FetchedObject,
    MissingObjectError,
    NoRangesError,
    ObjectPart,
    hash_extent,
)
from dali_pipes.fetch.source import ObjectSource, cause_of, is_silence
from dali_pipes.fetch.transport.connection_pool import ConnectionPool, origin_of
from dali_pipes.fetch.transport.event_loop import NOW, EventLoop, Task, Wait
from dali_pipes.fetch.transport.http1 import AnswerBody, HttpConnection
from dali_pipes.fetch.transport.http_head import Answer
from dali_pipes.store.cluster.transport.http_limits import ProtocolError, TooSlowError
from dali_pipes.store.cluster.transport.http_rules import MAX_REDIRECTS, REDIRECTS
from dali_pipes.store.patience import Patience, Waiting, current_patience

_log = logging.getLogger(__name__)

RANGE_BYTES = 16 << 20
"""The least size of a range, if an object is read in several: a smaller one ends before its connection is fast."""


@dataclass(frozen=True, kw_only=True)
class RetryPolicy:
    """Rules for a store that is there, and sends wrong answers."""

    attempts: int = 6
    """The fetch fails after this number of consecutive wrong answers without a byte that can be used."""
    max_broken: int = 40
    """The fetch of one object, or of one range of it, fails after this number of answers that broke off."""
    connect_timeout_s: float = 3.0
    silence_s: float = 60.0
    """The longest pause without a byte: a target under load, or one that asks a cloud first, may take long."""

    def __post_init__(self) -> None:
        for name in ("attempts", "max_broken", "connect_timeout_s", "silence_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")


class ObjectFetcher:
    """Fetches objects of one source; belongs to one thread. Owns connections, which stay open between objects."""

    def __init__(
        self, source: ObjectSource, *, retry: RetryPolicy | None = None, patience: Patience | None = None
    ) -> None:
        self._source, self._access, self._retry = source, source.access, retry or RetryPolicy()
        self._patience = patience or current_patience()
        self._pool = ConnectionPool(
            source.access, connect_timeout_s=self._retry.connect_timeout_s, silence_s=self._retry.silence_s
        )
        self._writer = BodyWriter()
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
        for one in wanted:
            where, size = self._source.where(one.name), one.extent.size
            item = FetchedObject(one.name, where, self._access.endpoint, one.extent, one.checksum, one.received)
            num_parts = min(num_connections, size // RANGE_BYTES)
            if num_parts > 1:
                loop.start(self._fetch_parts(item, one, num_parts, loop))
            else:
                loop.start(self._fetch_whole(item, one))
        return loop.run(stopped)

    def _fetch_whole(self, item: FetchedObject, one: Wanted) -> Task[None]:
        """Read an object in one piece, and report its end."""
        try:
            yield from self._fetch_part(item, ObjectPart(0, one.extent.size, is_range=False))
        except NoRangesError:
            raise
        except Exception as exc:
            if one.report is None:
                raise
            one.report(exc)
        else:
            if one.report is not None:
                one.report(None)

    def _fetch_parts(self, item: FetchedObject, one: Wanted, num_parts: int, loop: EventLoop) -> Task[None]:
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
                if one.report is not None:
                    one.report(None)

        yield from read(first)

    def _fetch_part(
        self, item: FetchedObject, part: ObjectPart, *, on_head: Callable[[], None] = lambda: None
    ) -> Task[None]:
        """Make attempts until one succeeds, or patience or policy end them."""
        waiting = Waiting(self._patience, self._access.endpoint, service=self._source.service)
        num_attempts = num_broken = num_wrong = 0
        while True:
            num_received = part.num_received
            try:
                yield from self._attempt(item, part, on_head)
                waiting.progress()
                return
            except MissingObjectError as exc:
                if not (yield from self._source.may_come_back(item, self._pool)):
                    raise
                fault = FaultError(f"{exc.said}, while the cluster lacks a target or moves objects", is_away=True)
            except FaultError as exc:
                fault = exc
            num_attempts += 1
            has_moved = self._source.sends_ranges and part.num_received > num_received and not fault.is_fruitless
            pause_s: float | None
            if has_moved:
                waiting.progress()
                num_broken, num_wrong = num_broken + 1, 0
            elif not fault.is_away:
                num_wrong += 1
            if fault.is_away and not has_moved:
                pause_s = waiting.next_pause_s(f"'{item.where}': {fault}", retry_after_s=fault.retry_after_s)
            else:
                pause_s = max(waiting.brief_pause_s(), fault.retry_after_s)
            if pause_s is None or num_wrong >= self._retry.attempts or num_broken >= self._retry.max_broken:
                tried = f"{num_attempts} attempts in {time.monotonic() - item.started:.1f} s"
                if pause_s is None:
                    tried += f" (patience: {self._patience.patience_s:g} s without progress)"
                raise self._source.given_up(
                    item,
                    f"{item.address}: given up after {tried}, the last one: {fault}",
                    fault,
                    num_attempts=num_attempts,
                    advice=f"; {self._patience.advice}" if pause_s is None else "",
                ) from fault
            # The server may be gone, or may have lost the object; the first URL knows.
            item.target = None
            _log.info("'%s': attempt %d: %s; the next in %.2f s", item.where, num_attempts, fault, pause_s)
            yield Wait(None, 0, time.monotonic() + pause_s)

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
            is_slow = isinstance(exc, TooSlowError)
            raise FaultError(cause_of(exc), is_away=is_silence(exc), is_fruitless=is_slow) from exc
        finally:
            self._pool.give_back(connection)
        if not part.is_range:
            self._source.check_bytes(item, part)

    def _ask(self, item: FetchedObject, part: ObjectPart) -> Task[tuple[HttpConnection, Answer, AnswerBody]]:
        """Follow redirects to the answer that brings the object; the caller gives its connection back."""
        is_known = item.target is not None
        asked = self._source.request(item, part)
        url, own_host = asked.url, origin_of(urlsplit(asked.url))
        byte_range = (part.position, part.stop) if part.is_range or part.position else None
        for _ in range(MAX_REDIRECTS):
            headers = asked.headers if origin_of(urlsplit(url)) == own_host else ()
            try:
                connection, answer = yield from self._pool.get(url, byte_range=byte_range, headers=headers)
            except (OSError, ProtocolError) as exc:
                raise self._source.unanswered(item, asked, url, exc) from exc
            try:
                body = AnswerBody(connection, answer)
                if answer.status in (200, 206):
                    item.target = url
                    return connection, answer, body
                said = yield from body.read_short()
            except (OSError, ProtocolError) as exc:
                connection.close()
                text = f"{answer.status} {answer.reason}, and {cause_of(exc)}"
                raise FaultError(text, is_away=is_silence(exc)) from exc
            except BaseException:
                connection.close()
                raise
            self._pool.give_back(connection)
            if answer.status not in REDIRECTS:
                raise self._source.refusal(item, part, answer, said, asked=asked, url=url, is_known=is_known)
            url = self._source.redirected_url(item, url, answer)
        raise StoreError(f"{item.address}: redirected {MAX_REDIRECTS} times")

    def _receive(self, item: FetchedObject, part: ObjectPart, body: AnswerBody) -> Task[None]:
        while part.position < part.stop:
            num = yield from self._writer.write_next(body, item.extent, part)
            if not num:
                raise self._source.short_body(item, part)
            part.advance(num)
            item.received(num)
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
        if cause := self._source.other_checksum(item, hashes):
            raise NoRangesError(item, cause)
