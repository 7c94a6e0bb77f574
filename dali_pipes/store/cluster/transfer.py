"""Write and read the bytes of objects over HTTP, in worker processes, in place of the SDK.

The SDK sends a body to the proxy, which answers 307, and then sends it again to the target; and importing the SDK costs
each process a third of a second. Here the proxy gets only the head of the request, and the body goes to the target that
the proxy names. The sessions are those of `requests`, like the SDK's, with the TLS settings and token of the SDK.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar, cast

from dali_pipes.errors import StoreError
from dali_pipes.store.checksums import CHECKSUM_TYPES, DEFAULT_CHECKSUM_TYPE, NO_CHECKSUM_TYPE, new_checksum
from dali_pipes.store.cluster.http_rules import REDIRECTS, is_passing, object_url, redirect_target, without_token
from dali_pipes.store.entries import ObjectEntry
from dali_pipes.store.messages import answer_text, cause_of, innermost, unchained

if TYPE_CHECKING:
    from requests import Response, Session


T = TypeVar("T")

ATTEMPTS = 4
# Attempt n, counted from 0, starts after a pause of n times this.
PAUSE_S = 0.5
# `urllib3` applies this to each piece of a body; a target that writes to slow disks pauses between pieces.
BODY_TIMEOUT_S = 60.0
# A server answers a head at once, unless it waits for the body.
HEAD_TIMEOUT_S = 10.0
CONNECT_TIMEOUT_S = 3.0

# Gaps up to this size, such as headers between members, are read and dropped; for a larger one a new request is sent.
MAX_SKIPPED_BYTES = 1 << 20


class _PassingError(Exception):
    """An attempt failed; another may succeed."""


@dataclass(frozen=True, kw_only=True)
class BucketAccess:
    """A bucket and how to reach it. It can be pickled, so that a worker can open it."""

    endpoint: str
    bucket: str
    provider: str = "ais"
    url: str
    """``ais://pets``, for messages."""
    checksum_type: str = DEFAULT_CHECKSUM_TYPE
    """The bucket's type of checksum; a target reports checksums of this type for the objects that it stores."""
    token: str | None = field(default=None, repr=False)
    verify: bool | str = True
    """The certificates to trust, as in `requests`."""
    cert: Any = None
    uses_environment: bool = True
    """Whether to use the environment's proxies; false on loopback."""

    @cached_property
    def _session(self) -> "Session":
        from requests import Session

        session = Session()
        session.verify, session.cert, session.trust_env = self.verify, self.cert, self.uses_environment
        if self.token:
            session.headers["Authorization"] = f"Bearer {self.token}"
        return session

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_session"}

    def write_stream(self, name: str, chunks: Callable[[], Iterable[memoryview]], *, num_bytes: int) -> None:
        """See `StoreAccess`; ``chunks`` is called again for each further attempt."""
        started = time.monotonic()
        try:
            _attempt(lambda: self._put(name, chunks, num_bytes))
        except _PassingError as exc:
            raise StoreError(
                f"'{self.url}/{name}' at {self.endpoint}: given up after {ATTEMPTS} attempts in "
                f"{time.monotonic() - started:.1f} s, the last one: {exc}; is the cluster well? stored objects are "
                "kept: run it again to write the rest"
            ) from None

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
            raise _PassingError(f"the target stored bytes with the {kind} {reported}, but {digest} was sent")

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
        target = redirect_target(url, location)
        if target is None:
            raise StoreError(
                f"'{self.url}/{name}' at {self.endpoint}: redirected to "
                f"'{without_token(location[:40], self.token)}', which is not the URL of a host; does --endpoint name "
                "an AIStore?"
            )
        return target

    def read_range(self, name: str, *, start: int, stop: int) -> "Response":
        """The answer whose body is the object's bytes ``[start, stop)``; the caller closes it."""
        headers = {"Range": f"bytes={start}-{stop - 1}", "Accept-Encoding": "identity"}
        timeout = (CONNECT_TIMEOUT_S, BODY_TIMEOUT_S)

        def get() -> "Response":
            answer = self._session.get(self._object_url(name), headers=headers, stream=True, timeout=timeout)
            self._check(answer, name, expected=(206,))
            return answer

        try:
            return _attempt(get)
        except _PassingError as exc:
            raise StoreError(
                f"no answer from AIStore at {self.endpoint}: '{self.url}/{name}' could not be read: {exc}; "
                "is it running?"
            ) from None

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
        return object_url(self.endpoint, self.bucket, name, provider=self.provider)

    def _check(self, answer: "Response", name: str, *, expected: tuple[int, ...]) -> None:
        if answer.status_code in expected:
            return
        text = answer_text(answer.status_code, answer.text or answer.headers.get("Hdr-Error", ""))
        text = without_token(text, self.token)
        if is_passing(answer.status_code, writes=answer.request.method == "PUT"):
            raise _PassingError(text)
        advice = "; set AIS_AUTHN_TOKEN to a token that may write there" if answer.status_code in (401, 403) else ""
        raise StoreError(f"'{self.url}/{name}' at {self.endpoint}: {text}{advice}")


class RemoteFile:
    """An object of ``size`` bytes that is read from front to back, skipping gaps. Two of the same object are equal."""

    def __init__(self, access: BucketAccess, name: str, size: int) -> None:
        self._access, self._name, self._size = access, name, size
        self._answer: Response | None = None
        self._position = 0

    @property
    def url(self) -> str:
        return f"{self._access.url}/{self._name}"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RemoteFile) and self.url == other.url

    def __hash__(self) -> int:
        return hash(self.url)

    def __getstate__(self) -> tuple[BucketAccess, str, int]:
        return self._access, self._name, self._size

    def __setstate__(self, state: tuple[BucketAccess, str, int]) -> None:
        self.__init__(*state)  # type: ignore[misc]  # without the open answer

    def read_into(self, view: memoryview, *, offset: int) -> int:
        """Read into ``view`` and return the number of bytes: at least one, or 0 at the object's end."""
        if offset >= self._size:
            return 0
        if self._answer is None or not 0 <= offset - self._position <= MAX_SKIPPED_BYTES:
            self.close()
            self._answer = self._access.read_range(self._name, start=offset, stop=self._size)
            self._position = offset
        skipped = offset - self._position
        num = 0
        try:
            while skipped and (block := self._answer.raw.read(skipped)):
                skipped -= len(block)
            num = 0 if skipped else int(self._answer.raw.readinto(view))
        except Exception as exc:
            if not _is_transport(exc):
                raise
            self.close()
            text = f"'{self.url}' at {self._access.endpoint}: the transfer broke ({cause_of(exc)})"
            raise StoreError(text) from unchained(innermost(exc))
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


def _attempt(request: Callable[[], T]) -> T:
    """Send a request, up to `ATTEMPTS` times; then raise `_PassingError` with the reason of the last failure."""
    from requests import RequestException

    cause = ""
    for attempt in range(ATTEMPTS):
        time.sleep(attempt * PAUSE_S)
        try:
            return request()
        except _PassingError as exc:
            cause = str(exc)
        except RequestException as exc:
            cause = f"the transfer broke ({cause_of(exc)})"
    raise _PassingError(cause)


def _is_transport(exc: Exception) -> bool:
    from requests import RequestException
    from urllib3.exceptions import HTTPError

    return isinstance(exc, (RequestException, HTTPError, OSError))
