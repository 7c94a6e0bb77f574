"""Read objects by GET: into extents, into memory, or as a stream, and check their bytes on the way.

What differs between stores is in an `ObjectSource`. A redirect, such as that of AIStore's proxy to the target that has
the object, is followed once, and used for all ranges of the object. When a transfer breaks, the object is asked for
again, from the byte where it broke if it is still the same object. An error that another attempt cannot mend is raised
at once. An object with a manifest is whole only if its XXH64 is the manifest's, whatever the store reported on the way.

A store that is away costs time, not the read: `dali_pipes.store.patience.Patience` says how long. A store that answers
wrongly gets the few attempts of `RetryPolicy`.

# Note [threads]: each object, and each range of one, has a thread while it is read. Bytes go from the socket through
# one buffer into the file. A transfer inside the kernel (``splice``), driven by an event loop, cost a tenth less CPU
# time, and four times the code.
"""

import contextlib
import io
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

from dali_pipes.cache.extents import BLOCK_BYTES
from dali_pipes.errors import StoreError
from dali_pipes.fetch.fetcher import Wanted
from dali_pipes.store.checksums import DEFAULT_CHECKSUM_TYPE, new_checksum
from dali_pipes.store.http.answers import (
    MAX_ANSWER_BYTES,
    MAX_OBJECT_BYTES,
    FaultError,
    MissingObjectError,
    NoRangesError,
    ObjectPart,
    ObjectSource,
    WantedObject,
)
from dali_pipes.store.http.client import CONNECT_TIMEOUT_S, SILENCE_S, HttpClient, NoAnswerError, read_end
from dali_pipes.store.http.rules import RedirectError, cause_of, is_silence
from dali_pipes.store.http.wire import STOP_CHECK_S, Answer, ProtocolError, Stopped, StoppedError, TooSlowError
from dali_pipes.store.patience import Patience, Waiting, current_patience, is_told_to_end, pause

_log = logging.getLogger(__name__)

RANGE_BYTES = 16 << 20
"""The least size of a range, if an object is read in several: a smaller one ends before its connection is fast."""
MAX_SKIPPED_BYTES = 1 << 20
"""Gaps up to this size, such as headers between members, are read and dropped; for a larger one a request is sent."""


@dataclass(frozen=True, kw_only=True)
class RetryPolicy:
    """Rules for a store that is there, and sends wrong answers."""

    attempts: int = 6
    """The read fails after this number of consecutive wrong answers without a byte that can be used."""
    max_broken: int = 40
    """The read of one object, or of one range of it, fails after this number of answers that broke off."""
    connect_timeout_s: float = CONNECT_TIMEOUT_S
    silence_s: float = SILENCE_S


class ObjectFetcher:
    """Reads objects of one source. Owns connections, which stay open between objects.

    `fetch` belongs to one thread; `read` and `open` are for any.
    """

    def __init__(
        self, source: ObjectSource, *, retry: RetryPolicy | None = None, patience: Patience | None = None
    ) -> None:
        self.source, self.retry = source, retry or RetryPolicy()
        self.patience = patience or current_patience()
        self.client = HttpClient(source.access, connect_timeout_s=self.retry.connect_timeout_s)
        self._reads_ranges = source.sends_ranges

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections. Can be called twice."""
        self.client.close()

    def read(
        self,
        name: str,
        *,
        start: int = 0,
        size: int | None = None,
        max_bytes: int | None = None,
        silence_s: float | None = None,
    ) -> bytes:
        """All bytes of an object, or ``[start, start + size)``; fewer if it ends before.

        Raises:
            MissingObjectError: If there is no such object.
            StoreError: If it cannot be read, or has more than ``max_bytes`` (default: `MAX_OBJECT_BYTES`, and
                `MAX_ANSWER_BYTES` if nobody announces the length).
        """
        stop = None if size is None else start + size
        part = ObjectPart(self.wanted(name), start, stop, is_stream=size is not None or start > 0)
        block, data = _block(size), bytearray()
        with Reading(self, part, silence_s=silence_s) as reading:
            reading.begin()
            limit = max_bytes or (MAX_ANSWER_BYTES if part.stop is None else MAX_OBJECT_BYTES)
            is_short = (part.stop or 0) - start <= limit
            while is_short and (num := reading.read_into(block)):
                del data[part.position - num - start :]  # of an attempt that was in vain
                data += block[:num]
                is_short = len(data) <= limit
        if not is_short:
            raise StoreError(f"{part.item.address}: it has more than {limit} bytes, too many for memory")
        return bytes(data)

    def open(self, name: str) -> "Reading":
        """A stream of an object's bytes; the first ones are asked for now."""
        reading = Reading(self, ObjectPart(self.wanted(name), is_stream=True))
        try:
            reading.begin()
        except BaseException:
            reading.close()
            raise
        return reading

    def wanted(self, name: str, size: int | None = None, checksum: int | None = None) -> WantedObject:
        """An object; ``size`` and ``checksum`` are those of the manifest that describes it."""
        return WantedObject(name, self.source.where(name), self.source.access.endpoint, size, checksum)

    def fetch(self, wanted: Sequence[Wanted], *, stopped: Stopped = is_told_to_end, num_connections: int = 1) -> bool:
        """GET objects into their extents, all at the same time: a shard's index does not wait for the shard.

        An object takes as many of its ``num_connections`` as have `RANGE_BYTES` or more to read. See
        `dali_pipes.fetch.fetcher.Fetcher`.
        """

        def bring(one: Wanted, stopped: Stopped) -> None:
            one.reported(partial(self._fetch_object, one, num_connections, stopped))

        try:
            with _Helpers(stopped) as helpers:
                for one in wanted[1:]:
                    helpers.start(partial(bring, one))
                for one in wanted[:1]:
                    bring(one, helpers.is_stopped)
                helpers.wait()
        except StoppedError:
            return False
        return True

    def _fetch_object(self, one: Wanted, num_connections: int, stopped: Stopped) -> None:
        size = one.extent.size
        num_parts = min(num_connections, size // RANGE_BYTES) if self._reads_ranges else 1
        has_failed = False
        if num_parts > 1:
            try:
                self._fetch_ranges(one, num_parts, stopped)
            except NoRangesError as exc:
                _log.info("'%s': %s; reading in one piece", self.source.where(one.name), exc)
                has_failed = True
            else:
                return
        part = ObjectPart(self.wanted(one.name, size, one.checksum), stop=size)
        with Reading(self, part, stopped=stopped) as reading:
            reading.fill(one)
        if has_failed:
            self._reads_ranges = False

    def _fetch_ranges(self, one: Wanted, num_parts: int, stopped: Stopped) -> None:
        """Read several ranges at a time. The first one's answer tells the object's version; then the others start."""
        size, step = one.extent.size, -(-one.extent.size // num_parts)
        item = self.wanted(one.name, size, one.checksum)
        first, *others = (
            ObjectPart(item, start, min(start + step, size), is_range=True) for start in range(0, size, step)
        )

        def fill(part: ObjectPart, stopped: Stopped) -> None:
            with Reading(self, part, stopped=stopped) as reading:
                reading.fill(one)

        with _Helpers(stopped) as helpers, Reading(self, first, stopped=helpers.is_stopped) as reading:
            reading.begin()
            for part in others:
                helpers.start(partial(fill, part))
            reading.fill(one)
            helpers.wait()
        state, block = new_checksum(DEFAULT_CHECKSUM_TYPE), _block(size)
        for position in range(0, size, len(block)):
            if stopped():
                raise StoppedError
            num = one.extent.read_into(block[: size - position], position)
            state.update(block[:num])
        if state.hexdigest() != item.expected:
            raise NoRangesError("its ranges do not make up the manifest's checksum")


class Reading(io.RawIOBase):
    """One part of an object, read front to back in as many attempts as patience and policy allow; not seekable."""

    def __init__(
        self,
        fetcher: ObjectFetcher,
        part: ObjectPart,
        *,
        silence_s: float | None = None,
        stopped: Stopped = is_told_to_end,
    ) -> None:
        super().__init__()
        self.item, self.part = part.item, part
        self._fetcher, self._source = fetcher, fetcher.source
        self._silence_s = silence_s or fetcher.retry.silence_s
        self._stopped = stopped
        self._answer: Answer | None = None
        self._is_over = False
        self._waiting = Waiting(fetcher.patience, self.item.endpoint, service=self._source.service)
        self._num_broken = self._num_wrong = 0
        self._furthest_before = 0

    def close(self) -> None:
        """Give the connection back, or close it in the middle of a body. Can be called twice."""
        self._end_attempt()
        super().close()

    def readable(self) -> bool:
        return True

    def readinto(self, view: Any) -> int:
        return self.read_into(memoryview(view).cast("B"))

    def begin(self) -> None:
        """Wait for the head of the answer."""
        self._attempt(self._open)

    def read_into(self, into: memoryview) -> int:
        """Read the next bytes of the part and return their number; 0 at its end, when all checks have passed.

        They end before ``part.position``. That may begin anew at the part's start, unless the part is a stream.
        """
        return 0 if self._is_over or not into else self._attempt(partial(self._receive, into))

    def fill(self, one: Wanted) -> None:
        """Read all bytes into the object's extent."""
        part = self.part
        block = _block(None if part.stop is None else part.stop - part.start)
        while num := self.read_into(block):
            one.extent.write(block[:num], part.position - num)
            one.received(num)

    def _end_attempt(self) -> None:
        answer, self._answer = self._answer, None
        if answer is not None:
            answer.close()

    def _attempt(self, act: Callable[[], int]) -> int:
        """Call a step of the reading again until it succeeds, or patience or policy end the attempts."""
        while True:
            if self._stopped():
                raise StoppedError
            try:
                return act()
            except MissingObjectError as exc:
                self._end_attempt()
                if not self._source.may_come_back(self.item, self._fetcher.client, stopped=self._stopped):
                    raise
                fault = FaultError(f"{exc.said}, while the cluster lacks a target or moves objects", is_away=True)
            except FaultError as exc:
                fault = exc
            self._end_attempt()
            if self.part.is_stream and self.part.furthest and not self._source.sends_ranges:
                raise StoreError(f"{self.item.address}: the transfer broke ({fault}); run the command again") from fault
            self._pause_after(fault)

    def _open(self) -> int:
        if self._answer is not None and self._answer.is_inherited:
            self._end_attempt()
        if self._answer is None:
            self._furthest_before = self.part.furthest
            if not self._source.sends_ranges:
                self._restart()
            self._answer = self._ask()
            self._source.has_answered = True
            try:
                self._source.check_head(self.part, self._answer)
            except ProtocolError as exc:
                raise FaultError(cause_of(exc)) from exc
        return 0

    def _restart(self) -> None:
        if self.part.is_stream and self.part.position > self.part.start:
            raise self.item.replaced_meanwhile()
        self.part.restart()

    def _ask(self) -> Answer:
        """Follow redirects to the answer that brings the object."""
        asked = self._source.request(self.part)
        try:
            answer = self._fetcher.client.follow(
                asked.url,
                headers=self.part.range_header(),
                own_headers=asked.headers,
                silence_s=self._silence_s,
                stopped=self._stopped,
            )
        except NoAnswerError as exc:
            raise self._source.unanswered(self.item, exc) from exc.cause
        except RedirectError as exc:
            raise StoreError(f"{self.item.address}: {exc}") from None
        if answer.status in (200, 206):
            self.item.target = answer.url
            return answer
        try:
            said = read_end(answer)
        except NoAnswerError as exc:
            text = f"{answer.status} {answer.reason}, and {cause_of(exc.cause)}"
            raise FaultError(text, is_away=is_silence(exc.cause)) from exc
        raise self._source.refusal(self.part, asked, answer, said)

    def _receive(self, into: memoryview) -> int:
        part = self.part
        self._open()
        answer = self._answer
        assert answer is not None
        try:
            if part.stop is None or part.position < part.stop:
                num = answer.receive(into if part.stop is None else into[: part.stop - part.position])
                if num:
                    part.take(into[:num])
                    return num
                if part.stop is not None:
                    raise self._source.short_body(part)
            # Only a body whose length was not announced is incomplete here.
            elif not (part.is_stream or answer.is_complete) and answer.receive(memoryview(bytearray(1))):
                raise self._source.long_body(part)
        except (OSError, ProtocolError) as exc:
            if part.position == part.stop:
                self._restart()  # all bytes came, but not the announced end: no byte is left to resume from
            is_slow = isinstance(exc, TooSlowError)
            raise FaultError(cause_of(exc), is_away=is_silence(exc), is_fruitless=is_slow) from exc
        self._end_attempt()
        if not part.is_range:
            self._source.check_bytes(part)
        self._waiting.progress()
        self._is_over = True
        return 0

    def _pause_after(self, fault: FaultError) -> None:
        """Wait before the next attempt; raises the error after the last one."""
        item, part, source, policy = self.item, self.part, self._source, self._fetcher.retry
        part.num_attempts += 1
        has_moved = part.furthest > self._furthest_before and not fault.is_fruitless and source.sends_ranges
        if has_moved:
            self._waiting.progress()
            self._num_broken, self._num_wrong = self._num_broken + 1, 0
        elif not fault.is_away:
            self._num_wrong += 1
        pause_s: float | None
        if fault.is_away and not has_moved:
            # The bytes of a manifest's objects are waited for in any case: the store has answered when it was opened.
            has_answered = item.checksum is not None or source.has_answered
            cause = f"'{item.where}': {fault}"
            pause_s = self._waiting.next_pause_s(cause, retry_after_s=fault.retry_after_s, has_answered=has_answered)
            if pause_s is None and not has_answered:
                raise source.nobody_there(item, fault) from None
        else:
            pause_s = max(self._waiting.brief_pause_s(), fault.retry_after_s)
        if pause_s is None or self._num_wrong >= policy.attempts or self._num_broken >= policy.max_broken:
            tried, advice = f"{part.num_attempts} attempts in {time.monotonic() - item.started:.1f} s", ""
            if pause_s is None:
                patience = self._fetcher.patience
                tried += f" (patience: {patience.patience_s:g} s without progress)"
                advice = f"; {patience.advice}"
            what = f"{item.address}: given up after {tried}, the last one: {fault}"
            raise source.given_up(part, fault, what, advice) from fault
        # The server may be gone, or may have lost the object; the first URL knows.
        item.target = None
        _log.info("'%s': attempt %d: %s; the next in %.2f s", item.where, part.num_attempts, fault, pause_s)
        until = time.monotonic() + pause_s
        while (remaining_s := until - time.monotonic()) > 0:
            if self._stopped():
                raise StoppedError
            pause(min(remaining_s, STOP_CHECK_S))


class ObjectFile:
    """An object of ``size`` bytes, read over gaps and back, as long as it is not replaced. It pickles.

    Two of one object are equal. ``access`` is the store: ``url``, and ``objects``, its `ObjectFetcher` in each process.
    """

    def __init__(self, access: Any, name: str, size: int) -> None:
        self._access, self._name, self._size = access, name, size
        self._item: WantedObject | None = None
        self._reading: Reading | None = None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ObjectFile) and self.url == other.url

    def __hash__(self) -> int:
        return hash(self.url)

    @property
    def url(self) -> str:
        """The object's URL."""
        return f"{self._access.url}/{self._name}"

    def __reduce__(self) -> tuple[Any, ...]:
        return ObjectFile, (self._access, self._name, self._size)

    def read_into(self, view: memoryview, *, offset: int) -> int:
        """Read into ``view`` and return the number of bytes: at least one, or 0 at the object's end.

        Raises the errors of `ObjectFetcher.read`.
        """
        if offset >= self._size or not view:
            return 0
        try:
            # A reading that is there, or shortly before.
            reading = self._reading
            if reading is None or not 0 <= offset - reading.part.position <= MAX_SKIPPED_BYTES:
                self.close()
                objects = self._access.objects
                self._item = self._item or objects.wanted(self._name)
                part = ObjectPart(self._item, offset, self._size, is_stream=True)
                self._reading = reading = Reading(objects, part)
            block = _block(offset - reading.part.position)
            while gap := offset - reading.part.position:
                if not reading.read_into(block[:gap]):
                    raise reading.item.replaced_meanwhile()
            if not (num := reading.read_into(view)):
                raise reading.item.replaced_meanwhile()
            return num
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the request. Can be called twice; a later read sends a new request."""
        reading, self._reading = self._reading, None
        if reading is not None:
            reading.close()


class _Helpers:
    """Threads that work beside the one that made them, and end with its ``with`` block."""

    def __init__(self, stopped: Stopped) -> None:
        self._stopped = stopped
        self._is_ending = threading.Event()
        self._threads: list[threading.Thread] = []
        self._errors: list[BaseException] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._is_ending.set()
        for thread in self._threads:
            thread.join()

    def start(self, work: Callable[[Stopped], None]) -> None:
        """Begin work, which gets the function that tells it to stop."""

        def run() -> None:
            try:
                with contextlib.suppress(StoppedError):
                    work(self._is_ending.is_set)
            except BaseException as exc:  # noqa: BLE001 (raised in the thread that waits)
                self._errors.append(exc)

        thread = threading.Thread(target=run, name="dali-pipes-transfer", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the process may not start more threads
            work(self._stopped)
        else:
            self._threads.append(thread)

    def is_stopped(self) -> bool:
        """Whether the owner's work is to stop; raises the error of a thread."""
        if self._errors:
            raise self._errors[0]
        return self._stopped()

    def wait(self) -> None:
        """Wait for all threads; `StoppedError` if they are to stop."""
        for thread in self._threads:
            while thread.is_alive():
                if self.is_stopped():
                    raise StoppedError
                thread.join(STOP_CHECK_S)
        if self._errors:
            raise self._errors[0]


def _block(num_bytes: int | None) -> memoryview:
    """Memory for so many bytes, but for `BLOCK_BYTES` at most."""
    return memoryview(bytearray(max(1, BLOCK_BYTES if num_bytes is None else min(BLOCK_BYTES, num_bytes))))
