"""Answers of a server: a fetch gives the right bytes or an error of ours, and the next answer is not poisoned."""

import tempfile
import threading
from abc import abstractmethod
from collections.abc import Sequence
from typing import Literal
from zlib import crc32

import xxhash

from dali_pipes.cache.extents import Extent
from dali_pipes.errors import PipesError
from dali_pipes.fetch.fetcher import Wanted
from dali_pipes.store.cluster import ais
from dali_pipes.store.cluster.ais import AisStore
from dali_pipes.store.cluster.objects import StoredObjects
from dali_pipes.store.cluster.proxies import ClusterAccess
from dali_pipes.store.http.objects import ObjectFetcher, RetryPolicy
from dali_pipes.store.patience import Patience, use_patience
from tests.fuzz.seeds.http_answers import BODY, listing_answers, object_answers
from tests.fuzz.target import BrokenPromiseError, Target
from tests.scripted import ScriptedServer, Visit

# An answer that ends too early, on a connection that stays open, costs this time.
# More than a busy machine needs to answer.
SILENCE_S = 0.5
PATIENCE = Patience(patience_s=2.0, longest_pause_s=0.001)


class _Answers(Target):
    """A server whose next answer is the input, in pieces; ``_honest`` answers all other requests."""

    def __init__(self) -> None:
        self._input: bytes | None = None
        self._is_sent = threading.Event()
        self._server = ScriptedServer(self._answer, None)

    def close(self) -> None:
        self._server.close()

    def _serve_next(self, data: bytes) -> None:
        self._is_sent.clear()
        self._input = data

    def _answer(self, visit: Visit) -> None:
        self._server.requests.clear()
        data, self._input = self._input, None
        if data is None:
            visit.send(self._honest(visit.request))
            return
        try:
            draw = crc32(data)
            step = (len(data), 1 + draw % 700, 1 + draw % 7)[draw % 3] or 1
            for start in range(0, len(data), max(step, len(data) // 300)):
                visit.send(data[start : start + max(step, len(data) // 300)])
            if draw % 16:  # a few connections stay open
                visit.hang_up()
        finally:
            self._is_sent.set()

    @abstractmethod
    def _honest(self, request: bytes) -> bytes:
        """The right answer to a request."""


class ObjectAnswers(_Answers):
    """The fetch client."""

    name = "http-answers"

    def __init__(self) -> None:
        super().__init__()
        source = StoredObjects(ClusterAccess(endpoint=self._server.endpoint), "b")
        retry = RetryPolicy(attempts=2, max_broken=4, silence_s=SILENCE_S, connect_timeout_s=SILENCE_S)
        self._fetcher = ObjectFetcher(source, retry=retry, patience=PATIENCE)
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 (closed by close)
        self._wanted = Wanted("o", Extent(self._file.fileno(), 0, len(BODY)), xxhash.xxh64_intdigest(BODY))

    def close(self) -> None:
        self._fetcher.close()
        self._file.close()
        super().close()

    def seeds(self) -> Sequence[bytes]:
        return object_answers()

    def check(self, data: bytes) -> Literal["taken", "refused"]:
        self._serve_next(data)
        try:
            self._fetch()
        except PipesError:
            result: Literal["taken", "refused"] = "refused"
        else:
            result = "taken"
        if not self._is_sent.wait(30):
            raise BrokenPromiseError("the answer was not read, nor its connection closed")
        self._fetch()  # from an honest server, on the same connection if it is kept
        return result

    def _fetch(self) -> None:
        self._wanted.extent.write(bytes(len(BODY)), 0)
        if not self._fetcher.fetch([self._wanted]) or self._wanted.extent.read(0, len(BODY)) != BODY:
            raise BrokenPromiseError("other bytes were delivered")

    def _honest(self, request: bytes) -> bytes:
        asked = request.partition(b"Range: bytes=")[2].partition(b"\r\n")[0]
        if not asked:
            return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(BODY), BODY)
        start, last = (int(number) for number in asked.split(b"-"))
        place = b"Content-Range: bytes %d-%d/%d\r\n" % (start, last, len(BODY))
        body = BODY[start : last + 1]
        return b"HTTP/1.1 206 Partial Content\r\n%bContent-Length: %d\r\n\r\n%b" % (place, len(body), body)


class ListingAnswers(_Answers):
    """What the SDK reads."""

    name = "http-listings"

    def __init__(self) -> None:
        super().__init__()
        ais.SILENCE_S = SILENCE_S
        with use_patience(PATIENCE):
            self._store = AisStore(self._server.endpoint, "b")

    def seeds(self) -> Sequence[bytes]:
        return listing_answers()

    def check(self, data: bytes) -> Literal["taken", "refused"]:
        self._serve_next(data)
        try:
            entries = self._store.list("a/")
        except PipesError:
            return "refused"
        for entry in entries:
            if not entry.name or entry.size < 0:
                raise BrokenPromiseError(f"an entry that cannot be one: {entry}")
        return "taken"

    def _honest(self, request: bytes) -> bytes:
        return listing_answers()[0]
