"""Write objects over HTTP, in place of the SDK.

The SDK sends a body to the proxy, which answers 307, and then sends it again to the target; and importing the SDK costs
each process a third of a second. Here the proxy gets only the head of the request, and the body goes to the target that
the proxy names.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator

from dali_pipes.errors import StoreError
from dali_pipes.store.base import Bucket
from dali_pipes.store.checksums import CHECKSUM_TYPES, DEFAULT_CHECKSUM_TYPE, NO_CHECKSUM_TYPE, new_checksum
from dali_pipes.store.cluster.objects import object_url, refusal_text
from dali_pipes.store.cluster.token import refusal_advice
from dali_pipes.store.http.client import MAX_ERROR_BYTES, NoAnswerError
from dali_pipes.store.http.rules import (
    REDIRECTS,
    RedirectError,
    cause_of,
    is_passing,
    is_silence,
    redirect_target,
    retry_after_s,
)
from dali_pipes.store.http.wire import Answer, ProtocolError
from dali_pipes.store.patience import Waiting, pause

# Tries of a body that a live target stores wrongly.
ATTEMPTS = 4
# A server answers a head at once, unless it waits for the body.
HEAD_TIMEOUT_S = 10.0


class _PassingError(Exception):
    """An attempt failed; another may succeed. ``is_wrong``: the cluster is there, and stored other bytes."""

    def __init__(self, cause: str, *, retry_after_s: float = 0.0, is_wrong: bool = False) -> None:
        super().__init__(cause)
        self.retry_after_s, self.is_wrong = retry_after_s, is_wrong


def write_object(store: Bucket, name: str, chunks: Callable[[], Iterable[memoryview]], *, num_bytes: int) -> None:
    """See `Store.write_stream`; ``chunks`` is called again for each further attempt."""
    where = f"'{store.url}/{name}' at {store.endpoint}"
    waiting = Waiting(store.patience, store.endpoint)
    num_wrong = 0
    while True:
        asked_for_s = 0.0
        try:
            _put(store, name, chunks, num_bytes)
        except _PassingError as exc:
            cause, asked_for_s = str(exc), exc.retry_after_s
            num_wrong += exc.is_wrong
        except NoAnswerError as exc:
            cause = f"the transfer broke ({cause_of(exc.cause)})"
            if not is_silence(exc.cause):
                raise StoreError(f"{where}: {cause}") from exc.cause
            store.proxies.turn_from(exc.url)
        else:
            return waiting.progress()
        if num_wrong == ATTEMPTS:
            raise StoreError(f"{where}: given up after {ATTEMPTS} attempts, the last one: {cause}")
        pause_s = waiting.next_pause_s(cause, retry_after_s=asked_for_s)
        if pause_s is None:
            raise StoreError(f"{where}: {waiting.over(cause)}")
        pause(pause_s)


def _put(store: Bucket, name: str, chunks: Callable[[], Iterable[memoryview]], num_bytes: int) -> None:
    target = _ask_where(store, name, num_bytes)
    kind = store.checksum_type if store.checksum_type in CHECKSUM_TYPES else DEFAULT_CHECKSUM_TYPE
    state = new_checksum(kind)

    def body() -> Iterator[memoryview]:
        for chunk in chunks():
            state.update(chunk)
            yield chunk

    headers = [("Content-Length", str(num_bytes))]
    with contextlib.closing(store.objects.client.ask(target, method="PUT", headers=headers, body=body())) as answer:
        _check(store, answer, name, expected=(200,))
        reported = answer.headers.get("Ais-Checksum-Value").lower()
        reported_kind = answer.headers.get("Ais-Checksum-Type").lower()
    digest = state.hexdigest()
    if kind != NO_CHECKSUM_TYPE and reported and reported_kind == kind and reported != digest:
        # Deleted, so that no later run takes it for the object.
        store.objects.client.follow(_object_url(store, name), method="DELETE").close()
        text = f"the target stored bytes with the {kind} {reported}, but {digest} was sent"
        raise _PassingError(text, is_wrong=True)


def _ask_where(store: Bucket, name: str, num_bytes: int) -> str:
    """The target's URL, from the proxy's redirect; the proxy's own URL if it waits for the body itself."""
    url = _object_url(store, name)
    # The length is the true one, because a cluster with AuthN signs it; "Expect" holds the body back. Neither side
    # can tell where the next request would begin on this connection, so it is closed.
    headers = [("Content-Length", str(num_bytes)), ("Expect", "100-continue"), ("Connection", "close")]
    try:
        answer = store.objects.client.ask(url, method="PUT", headers=headers, silence_s=HEAD_TIMEOUT_S)
    except NoAnswerError as exc:
        if exc.is_sent and isinstance(exc.cause, TimeoutError):
            return url
        raise
    with contextlib.closing(answer):
        _check(store, answer, name, expected=REDIRECTS)
        try:
            return redirect_target(url, answer.headers.get("Location"))
        except RedirectError as exc:
            raise StoreError(f"'{store.url}/{name}' at {store.endpoint}: {exc}") from None


def _check(store: Bucket, answer: Answer, name: str, *, expected: tuple[int, ...]) -> None:
    """Read the end of an answer to a PUT; raises an error for one that was not expected."""
    try:
        said = answer.read_short(MAX_ERROR_BYTES)
    except (OSError, ProtocolError) as exc:
        raise NoAnswerError(answer.url, exc, is_sent=True) from exc
    if answer.status in expected:
        store.http.note_answer(answer)
        return
    text = refusal_text(answer, said)
    if store.http.note_answer(answer, text) or is_passing(answer.status, writes=True):
        raise _PassingError(text, retry_after_s=retry_after_s(answer.headers))
    advice = refusal_advice(answer.status, text, store.http.token)
    raise StoreError(f"'{store.url}/{name}' at {store.endpoint}: {text}{advice}")


def _object_url(store: Bucket, name: str) -> str:
    return object_url(store.proxies.current, store.bucket, name, provider=store.provider)
