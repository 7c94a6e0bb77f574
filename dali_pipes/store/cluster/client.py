"""Send small requests to a cluster: wait while it is away, follow redirects, limit what an answer may hold.

The sessions of the SDK send their requests here, too: `dali_pipes.store.cluster.sessions`.
"""

import json
from typing import Any, NamedTuple
from urllib.parse import urlencode, urljoin

from dali_pipes.errors import StoreError, printable
from dali_pipes.formats.names import read_json
from dali_pipes.store.cluster.access import ClusterAccess, Proxies
from dali_pipes.store.http.answers import MAX_ANSWER_BYTES, MAX_OBJECT_BYTES
from dali_pipes.store.http.client import SILENCE_S, Fields, HttpClient, NoAnswerError, read_end
from dali_pipes.store.http.rules import (
    RedirectError,
    answer_text,
    cause_of,
    is_missing,
    is_silence,
    message_of,
    retry_after_s,
)
from dali_pipes.store.http.wire import Answer, ProtocolError
from dali_pipes.store.patience import Patience, Waiting, pause

MAX_REFUSAL_BYTES = 1 << 20
"""The body of an answer other than 2xx."""
# Methods of requests that may be sent twice: the second one changes nothing, also if a server has obeyed the first one.
_REPEATABLE = ("GET", "HEAD", "PUT", "DELETE")


class RefusedError(Exception):
    """The cluster refused a request, with a status of 400 or more and a text: its own, in JSON, or HTTP's."""

    def __init__(self, status: int, said: str) -> None:
        super().__init__(answer_text(status, said))
        self.status, self.reason = status, message_of(said)
        self.is_missing = is_missing(status, said)
        self.is_bucket_missing = status == 404 and "BckNotFound" in said


class NotAisError(Exception):
    """An answer is not one of AIStore; the text is the first line of the cause's."""

    def __init__(self, cause: object) -> None:
        super().__init__(printable(next(iter(str(cause).splitlines()), type(cause).__name__), max_chars=500))


class TargetJob(NamedTuple):
    """A job of the cluster, or the part of it that one target does."""

    id: str
    started: str
    is_running: bool
    is_aborted: bool
    error: str
    """Why it was aborted, or what went wrong; empty for nothing."""
    num_objects: int
    num_bytes: int


class ClusterClient:
    """Sends a request again, through its redirects, until the cluster answers it or the patience is at its end."""

    def __init__(self, access: ClusterAccess, patience: Patience, *, http: HttpClient | None = None) -> None:
        self.http = http or HttpClient(access)
        self._access, self._patience = access, patience

    @property
    def _proxies(self) -> Proxies:
        return self._access.proxies

    def json(self, path: str, value: object = None, *, method: str = "GET", **query: str) -> Any:
        """The JSON that the cluster answers; `NotAisError` if it is none. See `call`."""
        _, content = self.call(path, value, method=method, **query)
        try:
            return read_json(content)
        except ValueError as exc:
            raise NotAisError(exc) from None

    def jobs(self, *, kind: str = "", job: str = "") -> list[list[TargetJob]]:
        """The jobs of a kind, or the one with an id, as each target knows them. See `call`."""
        found = self.json("cluster", {"ID": job, "Kind": kind}, what="qryxstats")
        try:
            return [[_job(snap) for snap in snaps or ()] for snaps in found.values()]
        except (AttributeError, LookupError, TypeError, ValueError):
            raise NotAisError("this is no list of jobs") from None

    def call(self, path: str, value: object = None, *, method: str = "GET", **query: str) -> tuple[Answer, bytes]:
        """Send a request to ``/v1/`` and a path, with ``value`` as JSON; see `ask`. A refusal is a `RefusedError`."""
        url = f"{urljoin(self._proxies.current, 'v1')}/{path}{f'?{urlencode(query)}' if query else ''}"
        body = b"" if value is None else json.dumps(value).encode()
        headers = [("Content-Type", "application/json")]
        answer, content = self.ask(url, method=method, headers=headers, body=body, silence_s=SILENCE_S)
        if answer.status >= 400:
            raise RefusedError(answer.status, content.decode(errors="replace") or answer.headers.get("Hdr-Error"))
        return answer, content

    def ask(
        self,
        url: str,
        *,
        method: str = "GET",
        headers: Fields = (),
        body: bytes = b"",
        silence_s: float = SILENCE_S,
        is_stream: bool = False,
    ) -> tuple[Answer, bytes]:
        """Send a request, and read its whole answer, whatever its status.

        Raises:
            NoAnswerError: If nobody answered, and waiting is no help: the cluster has never answered, or answers
                wrongly, or may have obeyed a request that must not be repeated.
            PatienceOverError: If the cluster was away for too long.
            StoreError: If the answer leads to where it must not.
        """
        waiting, headers = Waiting(self._patience, self._proxies.named[0]), list(headers)
        while True:
            asked_for_s = 0.0
            found: tuple[Answer, bytes] | None = None
            failure: NoAnswerError | None = None
            try:
                found = self._ask_once(self._proxies.rewritten(url), method, headers, body, silence_s, is_stream)
            except NoAnswerError as exc:
                failure, cause = exc, cause_of(exc.cause)
                if not is_silence(exc.cause) or (exc.is_sent and method not in _REPEATABLE):
                    raise
                self._proxies.turn_from(exc.url)
            else:
                away = self._away_text(*found)
                if away is None:
                    waiting.progress()
                    return found
                cause, asked_for_s = away, retry_after_s(found[0].headers)
            pause_s = waiting.next_pause_s(cause, retry_after_s=asked_for_s, has_answered=self._proxies.has_answered)
            if pause_s is not None:
                pause(pause_s)
            elif waiting.num_failures:
                raise waiting.over(cause) from None
            elif failure is not None:
                raise failure
            else:
                assert found is not None, "without a failure there is an answer"
                return found

    def _ask_once(
        self, url: str, method: str, headers: list[tuple[str, str]], body: bytes, silence_s: float, is_stream: bool
    ) -> tuple[Answer, bytes]:
        try:
            answer = self.http.follow(url, method=method, headers=headers, body=body, silence_s=silence_s)
        except RedirectError as exc:
            raise StoreError(f"{self._access.endpoint}: {exc}") from None
        # An object that the SDK reads, perhaps through an ETL, which may not announce its length.
        is_object = is_stream or (method == "GET" and "/v1/objects/" in answer.url and answer.length is not None)
        limit = MAX_REFUSAL_BYTES if answer.status >= 300 else MAX_OBJECT_BYTES if is_object else MAX_ANSWER_BYTES
        too_long, wrong = f"its answer has more than {limit} bytes", ""
        if answer.headers.get("Content-Encoding", "identity").lower() != "identity" and not answer.is_complete:
            wrong = "its answer is compressed, though it was asked for the bytes as they are"
        elif method != "HEAD" and (answer.length or 0) > limit:
            wrong = too_long
        content = b"" if wrong else read_end(answer, limit)
        if wrong or len(content) > limit:
            answer.close()
            raise NoAnswerError(answer.url, ProtocolError(wrong or too_long), is_sent=True)
        return answer, content

    def _away_text(self, answer: Answer, body: bytes) -> str | None:
        """The reason if the answer says that the cluster, or a part of it, is away, or a new token; else ``None``."""
        text = answer.headers.get("Hdr-Error") or body.decode(errors="replace") if answer.status >= 400 else ""
        if self._access.note_answer(answer, text):
            return answer_text(answer.status, text)
        if "/v1/objects/" not in answer.url or not is_missing(answer.status, text) or self._proxies.map is None:
            return None
        # While the cluster's map lacks a target that it had before, the target's objects are missing, too.
        try:
            found = self._proxies.ask_map(self.http)
        except ValueError:
            return None
        except NoAnswerError:
            found = None  # it does not answer any more, so it is changing
        else:
            if found is None or not self._proxies.lacks_targets(found):
                return None
        return "it is not found, and a target of the cluster is missing"


def _job(snap: dict[str, Any]) -> TargetJob:
    ended, stats = snap["end-time"], snap.get("stats") or {}
    return TargetJob(
        id=str(snap["id"]),
        started=str(snap["start-time"]),
        is_running=not ended or ended.startswith("0001-"),  # Go's zero time
        is_aborted=bool(snap.get("aborted") or snap.get("abort-err")),
        error=str(snap.get("abort-err") or snap.get("err") or ""),
        num_objects=int(stats.get("loc-objs", 0)),
        num_bytes=int(stats.get("loc-bytes", 0)),
    )
