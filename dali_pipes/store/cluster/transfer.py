"""Write and read the bytes of objects over HTTP, in worker processes, in place of the SDK.

The SDK sends a body to the proxy, which answers 307, and then sends it again to the target; and importing the SDK costs
each process a third of a second. Here the proxy gets only the head of the request, and the body goes to the target that
the proxy names. The sessions are those of `requests`, like the SDK's, with the TLS settings and token of the SDK.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar, cast

from dali_pipes.errors import StoreError
from dali_pipes.store.base import StoredFile
from dali_pipes.store.checksums import CHECKSUM_TYPES, DEFAULT_CHECKSUM_TYPE, NO_CHECKSUM_TYPE, new_checksum
from dali_pipes.store.cluster.rights import refusal_advice
from dali_pipes.store.cluster.token import Token, TokenAuth
from dali_pipes.store.cluster.transport.http_rules import (
    REDIRECTS,
    RedirectError,
    is_away,
    is_passing,
    object_url,
    redirect_target,
    retry_after_s,
)
from dali_pipes.store.cluster.transport.proxies import Proxies
from dali_pipes.store.entries import ObjectEntry
from dali_pipes.store.messages import answer_text, cause_of, innermost, unchained
from dali_pipes.store.patience import Patience, Waiting, current_patience, pause

if TYPE_CHECKING:
    from requests import Response, Session


T = TypeVar("T")

# Tries of a body that a live target stores wrongly.
ATTEMPTS = 4
# `urllib3` applies this to each piece of a body; a target that writes to slow disks pauses between pieces.
BODY_TIMEOUT_S = 60.0
# A server answers a head at once, unless it waits for the body.
HEAD_TIMEOUT_S = 10.0
CONNECT_TIMEOUT_S = 3.0

# Gaps up to this size, such as headers between members, are read and dropped; for a larger one a new request is sent.
MAX_SKIPPED_BYTES = 1 << 20


class _PassingError(Exception):
    """An attempt failed; another may succeed. ``is_wrong``: the cluster is there, and stored other bytes."""

    def __init__(self, cause: str, *, retry_after_s: float = 0.0, is_wrong: bool = False) -> None:
        super().__init__(cause)
        self.retry_after_s, self.is_wrong = retry_after_s, is_wrong


@dataclass(frozen=True, kw_only=True)
class BucketAccess:
    """A bucket and how to reach it. It can be pickled, so that a worker can open it."""

    proxies: Proxies
    bucket: str
    provider: str = "ais"
    url: str
    """``ais://pets``, for messages."""
    checksum_type: str = DEFAULT_CHECKSUM_TYPE
    """The bucket's type of checksum; a target reports checksums of this type for the objects that it stores."""
    token: Token | None = None
    verify: bool | str = True
    """The certificates to trust, as in `requests`."""
    cert: Any = None
    uses_environment: bool = True
    """Whether to use the environment's proxies; false on loopback."""
    patience: Patience = field(default_factory=current_patience)

    @property
    def endpoint(self) -> str:
        """The first proxy, which stands for the cluster in messages."""
        return self.proxies.named[0]

    @cached_property
    def _session(self) -> "Session":
        from requests import Session

        from dali_pipes.store.cluster.transport.bounded_http import limit_answers

        session = Session()
        limit_answers(session)
        session.verify, session.cert, session.trust_env = self.verify, self.cert, self.uses_environment
        session.auth = TokenAuth(self.token, self.proxies.named)
        return session

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_session"}

    def write_stream(self, name: str, chunks: Callable[[], Iterable[memoryview]], *, num_bytes: int) -> None:
        """See `StoreAccess`; ``chunks`` is called again for each further attempt."""
        self._attempt(name, lambda: self._put(name, chunks, num_bytes))

    def _attempt(self, name: str, request: Callable[[], T], waiting: "Waiting | None" = None) -> T:
        """Send a request until it succeeds, or the patience is at its end."""
        from requests import RequestException

        from dali_pipes.store.cluster.transport.silence import is_silence

        where = f"'{self.url}/{name}' at {self.endpoint}"
        goes_on = waiting is not None
        waiting = waiting or Waiting(self.patience, self.endpoint)
        num_wrong = 0
        while True:
            asked, asked_for_s = self.proxies.current, 0.0
            try:
                result = request()
            except _PassingError as exc:
                cause, asked_for_s = str(exc), exc.retry_after_s
                num_wrong += exc.is_wrong
            except RequestException as exc:
                if not is_silence(exc, has_answered=True):
                    raise StoreError(f"{where}: the transfer broke ({cause_of(exc)})") from unchained(innermost(exc))
                cause = f"the transfer broke ({cause_of(exc)})"
                if exc.request is None or self.proxies.is_proxy(str(exc.request.url)):
                    self.proxies.turn_from(asked)
            else:
                if not goes_on:
                    waiting.progress()
                return result
            if num_wrong == ATTEMPTS:
                raise StoreError(f"{where}: given up after {ATTEMPTS} attempts, the last one: {cause}")
            pause_s = waiting.next_pause_s(cause, retry_after_s=asked_for_s)
            if pause_s is None:
                raise StoreError(f"{where}: {waiting.over(cause)}")
            pause(pause_s)

    def _put(self, name: str, chunks: Callable[[], Iterable[memoryview]], num_bytes: int) -> None:
        target = self._ask_where(name, num_bytes)
        kind = self.checksum_type if self.checksum_type in CHECKSUM_TYPES else DEFAULT_CHECKSUM_TYPE
        body = _Body(chunks(), num_bytes, kind)
        timeout = (BODY_TIMEOUT_S, BODY_TIMEOUT_S)
        with self._session.put(
            target, data=cast("Iterable[bytes]", body), timeout=timeout, allow_redirects=False
        ) as answer:
            self._check(answer, name, expected=(200,))
            reported = answer.headers.get("Ais-Checksum-Value", "").lower()
            reported_kind = answer.headers.get("Ais-Checksum-Type", "").lower()
        digest = body.hexdigest()
        if kind != NO_CHECKSUM_TYPE and reported and reported_kind == kind and reported != digest:
            # Deleted, so that no later run takes it for the object.
            self._session.delete(self._object_url(name), timeout=timeout)
            text = f"the target stored bytes with the {kind} {reported}, but {digest} was sent"
            raise _PassingError(text, is_wrong=True)

    def _ask_where(self, name: str, num_bytes: int) -> str:
        """The target's URL, from the proxy's redirect; the proxy's own URL if it waits for the body itself."""
        from requests import ReadTimeout

        url = self._object_url(name)
        # The length is the true one, because a cluster with AuthN signs it; "Expect" holds the body back. Neither side
        # can tell where the next request would begin on this connection, so it is closed.
        headers = {"Content-Length": str(num_bytes), "Expect": "100-continue", "Connection": "close"}
        timeout = (CONNECT_TIMEOUT_S, HEAD_TIMEOUT_S)
        try:
            with self._session.put(url, headers=headers, timeout=timeout, allow_redirects=False) as answer:
                self._check(answer, name, expected=REDIRECTS)
                location = answer.headers.get("Location", "")
        except ReadTimeout:
            return url
        try:
            return redirect_target(url, location)
        except RedirectError as exc:
            raise StoreError(f"'{self.url}/{name}' at {self.endpoint}: {exc}") from None

    def read_range(self, name: str, *, start: int, stop: int, waiting: "Waiting | None" = None) -> "Response":
        """The answer whose body is the object's bytes ``[start, stop)``; the caller closes it.

        ``waiting`` counts on for a read whose body broke off before; only bytes end it.
        """
        headers = {"Range": f"bytes={start}-{stop - 1}", "Accept-Encoding": "identity"}
        timeout = (CONNECT_TIMEOUT_S, BODY_TIMEOUT_S)

        def get() -> "Response":
            answer = self._session.get(self._object_url(name), headers=headers, stream=True, timeout=timeout)
            self._check(answer, name, expected=(206,))
            return answer

        return self._attempt(name, get, waiting)

    def file(self, name: str, *, size: int) -> "RemoteFile":
        """See `StoreAccess`."""
        return RemoteFile(self, name, size)

    def known_checksum(self, entry: ObjectEntry) -> tuple[str, str] | None:
        """See `StoreAccess`."""
        # For an object in a cloud, the cluster may report a value that is not a checksum of its bytes.
        kind = self.checksum_type if self.provider == "ais" else DEFAULT_CHECKSUM_TYPE
        if entry.checksum and len(entry.checksum) == len(new_checksum(kind).hexdigest()):
            return kind, entry.checksum
        return None

    def _object_url(self, name: str) -> str:
        return object_url(self.proxies.current, self.bucket, name, provider=self.provider)

    def _check(self, answer: "Response", name: str, *, expected: tuple[int, ...]) -> None:
        if answer.status_code in expected:
            if self.token is not None:
                self.token.note_accepted()
            return
        self.proxies.turn_if_starting(answer.status_code, str(answer.url))
        text = answer_text(answer.status_code, answer.text or answer.headers.get("Hdr-Error", ""))
        is_write = answer.request.method == "PUT"
        has_expired = self.token is not None and self.token.is_replaced_soon(answer.status_code, text)
        if is_passing(answer.status_code, writes=is_write) or is_away(answer.status_code, text) or has_expired:
            raise _PassingError(text, retry_after_s=retry_after_s(answer.headers))
        asked = answer.request
        advice = refusal_advice(
            answer.status_code, text, method=asked.method or "", url=asked.url or "", token=self.token
        )
        raise StoreError(f"'{self.url}/{name}' at {self.endpoint}: {text}{advice}")


class RemoteFile(StoredFile):
    """An object of ``size`` bytes of a cluster's bucket."""

    def __init__(self, access: BucketAccess, name: str, size: int) -> None:
        self._access, self._name, self._size = access, name, size
        self._answer: Response | None = None
        self._position = 0
        self._version = ""
        self._waiting = Waiting(access.patience, access.endpoint)

    @property
    def url(self) -> str:
        return f"{self._access.url}/{self._name}"

    def __getstate__(self) -> tuple[BucketAccess, str, int]:
        return self._access, self._name, self._size

    def __setstate__(self, state: tuple[BucketAccess, str, int]) -> None:
        self.__init__(*state)  # type: ignore[misc]  # without the open answer

    def read_into(self, view: memoryview, *, offset: int) -> int:
        """Read into ``view`` and return the number of bytes: at least one, or 0 at the object's end."""
        from dali_pipes.store.cluster.transport.silence import is_silence

        if offset >= self._size:
            return 0
        while True:
            try:
                num = self._read_into(view, offset)
            except Exception as exc:
                self.close()
                if not _is_transport(exc):
                    raise
                cause = f"the transfer broke ({cause_of(exc)})"
                where = f"'{self.url}' at {self._access.endpoint}"
                if not is_silence(exc, has_answered=True):
                    raise StoreError(f"{where}: {cause}") from unchained(innermost(exc))
                if (pause_s := self._waiting.next_pause_s(cause)) is None:
                    raise StoreError(f"{where}: {self._waiting.over(cause)}") from unchained(innermost(exc))
                pause(pause_s)
            else:
                self._waiting.progress()
                return num

    def _read_into(self, view: memoryview, offset: int) -> int:
        if self._answer is None or not 0 <= offset - self._position <= MAX_SKIPPED_BYTES:
            self.close()
            self._answer = self._access.read_range(self._name, start=offset, stop=self._size, waiting=self._waiting)
            self._position = offset
            # Not the checksum: a bucket can be set to report that of the range.
            version = self._answer.headers.get("Ais-Version", "")
            if version != (self._version or version):
                raise StoreError(f"'{self.url}' was replaced while it was read; run the command again")
            self._version = version
        skipped = offset - self._position
        while skipped and (block := self._answer.raw.read(skipped)):
            skipped -= len(block)
        num = 0 if skipped else int(self._answer.raw.readinto(view))
        self._position = offset + num
        return num

    def close(self) -> None:
        """End the request. Can be called twice; a later read sends a new request."""
        if self._answer is not None:
            self._answer.close()
        self._answer = None


class _Body:
    """A stream of known length that `requests` sends piece by piece; afterwards it knows the checksum."""

    def __init__(self, chunks: Iterable[memoryview], num_bytes: int, kind: str) -> None:
        self._chunks, self._num_bytes = chunks, num_bytes
        self._state = new_checksum(kind)

    def __len__(self) -> int:
        return self._num_bytes

    def __iter__(self) -> Iterator[memoryview]:
        for chunk in self._chunks:
            self._state.update(chunk)
            yield chunk

    def hexdigest(self) -> str:
        return self._state.hexdigest()


def _is_transport(exc: Exception) -> bool:
    from requests import RequestException
    from urllib3.exceptions import HTTPError

    return isinstance(exc, (RequestException, HTTPError, OSError))
