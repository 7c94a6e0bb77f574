"""Bytes of objects over HTTP: a stream out by PUT, a range in by GET; what workers use in place of the SDK.

The SDK sends a body to the proxy, which answers 307, and then again to the target; and importing it costs each process
a third of a second. Here the proxy is shown the head alone and the body goes to the target that it names. Sessions are
`requests`', as the SDK's, with the TLS settings and the token that the SDK found.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import quote, urlencode, urljoin

from dali_pipes.errors import StoreError
from dali_pipes.store.checksums import CHECKSUM_TYPES, DEFAULT_CHECKSUM_TYPE, NO_CHECKSUM_TYPE, new_checksum

if TYPE_CHECKING:
    from requests import Response, Session

__all__ = ["BucketAccess", "RemoteFile"]

ATTEMPTS = 4
# Before attempt n comes a pause of n times this.
PAUSE_S = 0.5
# While a body is on its way `urllib3` counts this for each piece; a target that writes to slow disks pauses.
BODY_TIMEOUT_S = 60.0
# The head alone is answered at once, or by somebody who waits for the body.
HEAD_TIMEOUT_S = 10.0
CONNECT_TIMEOUT_S = 3.0

_REDIRECTS = (301, 302, 303, 307, 308)
_PASSING = (408, 409, 423, 425, 429, 500, 502, 503, 504)
# Skipped rather than asked for anew: headers between the members that are read.
MAX_SKIPPED_BYTES = 1 << 20


class _PassingError(Exception):
    """Another attempt may do."""


@dataclass(frozen=True, kw_only=True)
class BucketAccess:
    """A bucket and how it is reached; pickles, so that a worker can open it."""

    endpoint: str
    bucket: str
    provider: str = "ais"
    url: str
    """``ais://pets``, for messages."""
    checksum_type: str = DEFAULT_CHECKSUM_TYPE
    """The bucket's: what a target reports of an object that it stored."""
    token: str | None = field(default=None, repr=False)
    verify: bool | str = True
    """Whose certificates to trust, as `requests` has it."""
    cert: Any = None
    uses_environment: bool = True
    """Whether the environment's proxies count; not on loopback."""

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
        """Create or replace an object from a stream; it is there whole or not at all.

        Args:
            name: The object's.
            chunks: Begins the stream; again for another attempt.
            num_bytes: Of the whole stream.

        Raises:
            StoreError: If the object cannot be stored. What ``chunks`` raises comes through as it is.
        """
        from requests import RequestException

        started = time.monotonic()
        cause = ""
        for attempt in range(ATTEMPTS):
            time.sleep(attempt * PAUSE_S)
            try:
                self._put(name, chunks, num_bytes)
                return
            except _PassingError as exc:
                cause = str(exc)
            except RequestException as exc:
                cause = f"the transfer broke ({_innermost(exc)})"
        raise StoreError(
            f"'{self.url}/{name}' at {self.endpoint}: given up after {ATTEMPTS} attempts in "
            f"{time.monotonic() - started:.1f} s, the last one: {cause}; is the cluster well? what is stored is kept: "
            "run it again to write the rest"
        )

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
            # Not left for another run to find there.
            self._session.delete(self._object_url(name), timeout=timeout)
            raise _PassingError(f"the target stored bytes with the {kind} {reported}, sent were such with {digest}")

    def _ask_where(self, name: str, num_bytes: int) -> str:
        """The target's URL, from the proxy's redirect; the proxy's own where it waits for the body itself."""
        from requests import ReadTimeout

        url = self._object_url(name)
        # The true length, of which a cluster with AuthN computes a signature; without the body, which "Expect" holds
        # back. Neither side can tell where on this connection the next request begins: it is closed.
        headers = {"Content-Length": str(num_bytes), "Expect": "100-continue", "Connection": "close"}
        timeout = (CONNECT_TIMEOUT_S, HEAD_TIMEOUT_S)
        try:
            with self._session.put(url, headers=headers, timeout=timeout, allow_redirects=False) as answer:
                if answer.status_code not in _REDIRECTS:
                    self._check(answer, name, expected=_REDIRECTS)
                return urljoin(url, answer.headers.get("Location", ""))
        except ReadTimeout:
            return url

    def read_range(self, name: str, *, start: int, stop: int) -> "Response":
        """The answer whose body are the object's bytes ``[start, stop)``; the caller closes it."""
        from requests import RequestException

        headers = {"Range": f"bytes={start}-{stop - 1}", "Accept-Encoding": "identity"}
        cause = ""
        for attempt in range(ATTEMPTS):
            time.sleep(attempt * PAUSE_S)
            try:
                answer = self._session.get(
                    self._object_url(name), headers=headers, stream=True, timeout=(CONNECT_TIMEOUT_S, BODY_TIMEOUT_S)
                )
                self._check(answer, name, expected=(206,))
                return answer
            except _PassingError as exc:
                cause = str(exc)
            except RequestException as exc:
                cause = f"the transfer broke ({_innermost(exc)})"
        raise StoreError(
            f"no answer from AIStore at {self.endpoint}: '{self.url}/{name}' could not be read: {cause}; is it running?"
        )

    def _object_url(self, name: str) -> str:
        query = urlencode({"provider": self.provider})
        return f"{urljoin(self.endpoint, 'v1')}/objects/{self.bucket}/{quote(name)}?{query}"

    def _check(self, answer: "Response", name: str, *, expected: tuple[int, ...]) -> None:
        if answer.status_code in expected:
            return
        from dali_pipes.store.messages import answer_text

        text = answer_text(answer.status_code, answer.text or answer.headers.get("Hdr-Error", ""))
        if self.token:
            text = text.replace(self.token, "***")
        if answer.status_code in _PASSING:
            raise _PassingError(text)
        advice = "; set AIS_AUTHN_TOKEN to a token that may write there" if answer.status_code in (401, 403) else ""
        raise StoreError(f"'{self.url}/{name}' at {self.endpoint}: {text}{advice}")


class RemoteFile:
    """An object that is read front to back, gaps skipped; equal to another of the same object.

    Args:
        access: The bucket's.
        name: The object's.
        size: Its bytes.
    """

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
        self.__init__(*state)  # type: ignore[misc]  # nothing of an open answer is carried along

    def read_into(self, view: memoryview, *, offset: int) -> int:
        """Bytes read, at least one; 0 at the object's end.

        Raises:
            StoreError: If it cannot be read.
        """
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
            raise StoreError(
                f"'{self.url}' at {self._access.endpoint}: the transfer broke ({_innermost(exc)})"
            ) from exc
        self._position = offset + num
        return num

    def close(self) -> None:
        """Can be called twice; reading opens it anew."""
        if self._answer is not None:
            self._answer.close()
        self._answer = None


class _Body:
    """A stream with its length, which `requests` sends piece by piece, and its checksum afterwards."""

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


def _innermost(exc: BaseException) -> str:
    from dali_pipes.store.messages import cause_of

    return cause_of(exc)
