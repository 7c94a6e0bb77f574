"""Write objects over HTTP, in worker processes, in place of the SDK; and open them for reading there.

The SDK sends a body to the proxy, which answers 307, and then sends it again to the target; and importing the SDK costs
each process a third of a second. Here the proxy gets only the head of the request, and the body goes to the target that
the proxy names.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from dali_pipes.errors import StoreError
from dali_pipes.store.checksums import CHECKSUM_TYPES, DEFAULT_CHECKSUM_TYPE, NO_CHECKSUM_TYPE, new_checksum
from dali_pipes.store.cluster.objects import StoredObjects, object_url, refusal_text
from dali_pipes.store.cluster.proxies import ClusterAccess
from dali_pipes.store.cluster.token import refusal_advice
from dali_pipes.store.entries import ObjectEntry
from dali_pipes.store.http.client import MAX_ERROR_BYTES, HttpClient, NoAnswerError
from dali_pipes.store.http.objects import ObjectFetcher, ObjectFile
from dali_pipes.store.http.rules import (
    REDIRECTS,
    RedirectError,
    cause_of,
    is_away,
    is_passing,
    is_silence,
    redirect_target,
    retry_after_s,
)
from dali_pipes.store.http.wire import Answer, ProtocolError
from dali_pipes.store.patience import Patience, Waiting, current_patience, pause

# Tries of a body that a live target stores wrongly.
ATTEMPTS = 4
# A server answers a head at once, unless it waits for the body.
HEAD_TIMEOUT_S = 10.0


class _PassingError(Exception):
    """An attempt failed; another may succeed. ``is_wrong``: the cluster is there, and stored other bytes."""

    def __init__(self, cause: str, *, retry_after_s: float = 0.0, is_wrong: bool = False) -> None:
        super().__init__(cause)
        self.retry_after_s, self.is_wrong = retry_after_s, is_wrong


@dataclass(frozen=True, kw_only=True)
class BucketAccess:
    """A bucket and how to reach it. It can be pickled, so that a worker can open it."""

    http: ClusterAccess
    bucket: str
    provider: str = "ais"
    url: str
    """``ais://pets``, for messages."""
    checksum_type: str = DEFAULT_CHECKSUM_TYPE
    """The bucket's type of checksum; a target reports checksums of this type for the objects that it stores."""
    patience: Patience = field(default_factory=current_patience)

    @property
    def endpoint(self) -> str:
        """The first proxy, which stands for the cluster in messages."""
        return self.http.endpoint

    @cached_property
    def objects(self) -> ObjectFetcher:
        """Reads the bucket's objects, and has the connections."""
        return ObjectFetcher(StoredObjects(self.http, self.bucket, provider=self.provider), patience=self.patience)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "objects"}

    def file(self, name: str, *, size: int) -> ObjectFile:
        """See `StoreAccess`."""
        return ObjectFile(self, name, size)

    def known_checksum(self, entry: ObjectEntry) -> tuple[str, str] | None:
        """See `StoreAccess`."""
        # For an object in a cloud, the cluster may report a value that is not a checksum of its bytes.
        kind = self.checksum_type if self.provider == "ais" else DEFAULT_CHECKSUM_TYPE
        if entry.checksum and len(entry.checksum) == len(new_checksum(kind).hexdigest()):
            return kind, entry.checksum
        return None

    def write_stream(self, name: str, chunks: Callable[[], Iterable[memoryview]], *, num_bytes: int) -> None:
        """See `StoreAccess`; ``chunks`` is called again for each further attempt, until the patience is at its end."""
        where = f"'{self.url}/{name}' at {self.endpoint}"
        waiting, proxies = Waiting(self.patience, self.endpoint), self.http.proxies
        num_wrong = 0
        while True:
            asked, asked_for_s = proxies.current, 0.0
            try:
                self._put(name, chunks, num_bytes)
            except _PassingError as exc:
                cause, asked_for_s = str(exc), exc.retry_after_s
                num_wrong += exc.is_wrong
            except NoAnswerError as exc:
                cause = f"the transfer broke ({cause_of(exc.cause)})"
                if not is_silence(exc.cause):
                    raise StoreError(f"{where}: {cause}") from exc.cause
                if proxies.is_proxy(exc.url):
                    proxies.turn_from(asked)
            else:
                return waiting.progress()
            if num_wrong == ATTEMPTS:
                raise StoreError(f"{where}: given up after {ATTEMPTS} attempts, the last one: {cause}")
            pause_s = waiting.next_pause_s(cause, retry_after_s=asked_for_s)
            if pause_s is None:
                raise StoreError(f"{where}: {waiting.over(cause)}")
            pause(pause_s)

    def _put(self, name: str, chunks: Callable[[], Iterable[memoryview]], num_bytes: int) -> None:
        target = self._ask_where(name, num_bytes)
        kind = self.checksum_type if self.checksum_type in CHECKSUM_TYPES else DEFAULT_CHECKSUM_TYPE
        state = new_checksum(kind)

        def body() -> Iterator[memoryview]:
            for chunk in chunks():
                state.update(chunk)
                yield chunk

        headers = [("Content-Length", str(num_bytes))]
        with contextlib.closing(self._client.ask(target, method="PUT", headers=headers, body=body())) as answer:
            self._check(answer, name, expected=(200,))
            reported = answer.headers.get("Ais-Checksum-Value").lower()
            reported_kind = answer.headers.get("Ais-Checksum-Type").lower()
        digest = state.hexdigest()
        if kind != NO_CHECKSUM_TYPE and reported and reported_kind == kind and reported != digest:
            # Deleted, so that no later run takes it for the object.
            self._client.follow(self._object_url(name), method="DELETE").close()
            text = f"the target stored bytes with the {kind} {reported}, but {digest} was sent"
            raise _PassingError(text, is_wrong=True)

    def _ask_where(self, name: str, num_bytes: int) -> str:
        """The target's URL, from the proxy's redirect; the proxy's own URL if it waits for the body itself."""
        url = self._object_url(name)
        # The length is the true one, because a cluster with AuthN signs it; "Expect" holds the body back. Neither side
        # can tell where the next request would begin on this connection, so it is closed.
        headers = [("Content-Length", str(num_bytes)), ("Expect", "100-continue"), ("Connection", "close")]
        try:
            answer = self._client.ask(url, method="PUT", headers=headers, silence_s=HEAD_TIMEOUT_S)
        except NoAnswerError as exc:
            if exc.is_sent and isinstance(exc.cause, TimeoutError):
                return url
            raise
        with contextlib.closing(answer):
            self._check(answer, name, expected=REDIRECTS)
            try:
                return redirect_target(url, answer.headers.get("Location"))
            except RedirectError as exc:
                raise StoreError(f"'{self.url}/{name}' at {self.endpoint}: {exc}") from None

    @property
    def _client(self) -> HttpClient:
        return self.objects.client

    def _object_url(self, name: str) -> str:
        return object_url(self.http.proxies.current, self.bucket, name, provider=self.provider)

    def _check(self, answer: Answer, name: str, *, expected: tuple[int, ...]) -> None:
        """Read the end of an answer to a PUT; raises an error for one that was not expected."""
        try:
            said = answer.read_short(MAX_ERROR_BYTES)
        except (OSError, ProtocolError) as exc:
            raise NoAnswerError(answer.url, exc, is_sent=True) from exc
        token = self.http.token
        if answer.status in expected:
            if token is not None:
                token.note_accepted()
            return
        self.http.proxies.turn_if_starting(answer.status, answer.url)
        text = refusal_text(answer, said)
        has_expired = token is not None and token.is_replaced_soon(answer.status, text)
        if is_passing(answer.status, writes=True) or is_away(answer.status, text) or has_expired:
            raise _PassingError(text, retry_after_s=retry_after_s(answer.headers))
        advice = refusal_advice(answer.status, text, token)
        raise StoreError(f"'{self.url}/{name}' at {self.endpoint}: {text}{advice}")
