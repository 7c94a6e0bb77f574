"""The transport of the SDK's sessions: our HTTP client, which waits for a cluster that is away, and has limits.

The classes are not in `dali_pipes.store.cluster.ais`, because importing the SDK takes half a second.
"""

import io
from typing import Any

from aistore.sdk.session_manager import SessionManager
from requests import PreparedRequest, Response, Session
from requests.adapters import BaseAdapter
from requests.structures import CaseInsensitiveDict
from requests.utils import get_encoding_from_headers

from dali_pipes.errors import StoreError
from dali_pipes.store.cluster.access import ClusterAccess
from dali_pipes.store.http.answers import MAX_ANSWER_BYTES, MAX_OBJECT_BYTES
from dali_pipes.store.http.client import SILENCE_S, HttpClient, NoAnswerError, read_end
from dali_pipes.store.http.rules import RedirectError, answer_text, cause_of, is_missing, is_silence, retry_after_s
from dali_pipes.store.http.wire import Answer, ProtocolError
from dali_pipes.store.patience import Patience, Waiting, pause

MAX_REFUSAL_BYTES = 1 << 20
"""The body of an answer other than 2xx."""
# Requests that may be sent again although a server may have obeyed them already.
_REPEATABLE = ("GET", "HEAD", "PUT", "DELETE")
# Fields of a head that our client writes itself.
_OURS = ("User-Agent", "Accept-Encoding", "Connection", "Content-Length", "Transfer-Encoding")


class PatientSessions(SessionManager):  # type: ignore[misc]  # the SDK publishes no types
    """Like the SDK's own, one session for each process."""

    def __init__(self, access: ClusterAccess, patience: Patience) -> None:
        self._access, self._patience = access, patience
        super().__init__()

    def _create_session(self) -> Session:
        session = Session()
        session.trust_env = False  # the transport knows the environment's proxies and certificates
        for scheme in ("http://", "https://"):
            session.mount(scheme, PatientTransport(self._access, self._patience))
        return session


class PatientTransport(BaseAdapter):
    """Sends a request again, through its redirects, until the cluster answers it or the patience is at its end."""

    def __init__(self, access: ClusterAccess, patience: Patience) -> None:
        super().__init__()
        self._client = HttpClient(access)
        self._access, self._proxies, self._patience = access, access.proxies, patience

    def close(self) -> None:
        """Close the idle connections."""
        self._client.close()

    def send(  # type: ignore[override]
        self, request: PreparedRequest, stream: bool = False, timeout: Any = None, **_: object
    ) -> Response:
        """Send a request, and read its whole answer.

        Raises:
            NoAnswerError: If nobody answered, and waiting is no help: the cluster has never answered, or answers
                wrongly, or may have obeyed a request that must not be repeated.
            PatienceOverError: If the cluster was away for too long.
            StoreError: If the answer leads to where it must not.
        """
        silence_s = (timeout[1] if isinstance(timeout, tuple) else timeout) or SILENCE_S
        waiting, body = Waiting(self._patience, self._proxies.named[0]), _bytes_of(request.body)
        while True:
            asked_for_s = 0.0
            found: Response | None = None
            failure: NoAnswerError | None = None
            try:
                answer, content = self._ask(request, body, silence_s, is_stream=stream)
            except NoAnswerError as exc:
                failure, cause = exc, cause_of(exc.cause)
                if not is_silence(exc.cause) or (exc.is_sent and request.method not in _REPEATABLE):
                    raise
                self._proxies.turn_from(exc.url)
            else:
                found = _response(request, answer, content)
                away = self._away_text(answer, content)
                if away is None:
                    waiting.progress()
                    return found
                cause, asked_for_s = away, retry_after_s(answer.headers)
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

    def _ask(self, request: PreparedRequest, body: bytes, silence_s: float, *, is_stream: bool) -> tuple[Answer, bytes]:
        url, method = self._proxies.rewritten(str(request.url)), str(request.method)
        headers = [(name, str(value)) for name, value in request.headers.items() if name not in _OURS]
        try:
            answer = self._client.follow(url, method=method, headers=headers, body=body, silence_s=silence_s)
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
            found = self._proxies.ask_map(self._client)
        except ValueError:
            return None
        except NoAnswerError:
            found = None  # it does not answer any more, so it is changing
        else:
            if found is None or not self._proxies.lacks_targets(found):
                return None
        return "it is not found, and a target of the cluster is missing"


def _response(request: PreparedRequest, answer: Answer, content: bytes) -> Response:
    response = Response()
    response.status_code, response.reason, response.url = answer.status, answer.reason, answer.url
    response.headers = CaseInsensitiveDict(answer.headers.items())
    response.encoding = get_encoding_from_headers(response.headers)
    response.raw, response.request = io.BytesIO(content), request
    return response


def _bytes_of(body: Any) -> bytes:
    """A request's body, which can be sent again: the SDK sends texts, bytes, or what has a method ``read``."""
    if body is None:
        return b""
    if isinstance(body, str):
        return body.encode()
    return bytes(body.read() if hasattr(body, "read") else body)
