"""Sessions of the SDK that wait for a cluster that is away, and ask its other proxies meanwhile.

They also add our token, limit what answers may cost, and ignore the environment's HTTP proxies for an endpoint on this
machine, which no such proxy can reach.

The classes are not in `dali_pipes.store.cluster.client`, because importing the SDK takes half a second. They stand at
the top level of a module so that they can be pickled.
"""

import logging
from typing import Any

import requests
from aistore.sdk.session_manager import SessionManager
from requests import Response, Session
from urllib3.exceptions import ConnectTimeoutError, NewConnectionError

from dali_pipes.formats.names import read_json
from dali_pipes.store.cluster.token import Token, TokenAuth
from dali_pipes.store.cluster.transport.bounded_http import limit_answers
from dali_pipes.store.cluster.transport.http_limits import MAX_ERROR_BYTES
from dali_pipes.store.cluster.transport.http_rules import is_away, is_missing, retry_after_s
from dali_pipes.store.cluster.transport.proxies import ClusterMap, Proxies
from dali_pipes.store.cluster.transport.silence import is_silence
from dali_pipes.store.messages import answer_text, cause_of, is_loopback, wrapped_in
from dali_pipes.store.patience import Patience, Waiting, pause

_log = logging.getLogger(__name__)

# Requests that may be sent again although a server may have obeyed them already.
_REPEATABLE = ("GET", "HEAD", "PUT", "DELETE")
# A thread that fetches may ask for the map, and whoever closes its loader waits for it.
_MAP_TIMEOUT_S = 3.0


class PatientSessions(SessionManager):  # type: ignore[misc]  # the SDK publishes no types
    """Like the SDK's own, one session for each process."""

    def __init__(self, proxies: Proxies, patience: Patience, *, auth: TokenAuth, max_pool_size: int) -> None:
        self._proxies, self._patience, self._auth = proxies, patience, auth
        super().__init__(max_pool_size=max_pool_size)

    def _create_session(self) -> Session:
        plain: Session = super()._create_session()
        session = PatientSession(self._proxies, self._patience, token=self._auth.token)
        session.verify, session.cert = plain.verify, plain.cert
        limit_answers(session, pool_connections=self._max_pool_size, pool_maxsize=self._max_pool_size)
        session.auth = self._auth
        # This also holds for redirects. It turns off REQUESTS_CA_BUNDLE, too; AIS_CLIENT_CA still counts.
        session.trust_env = not is_loopback(self._proxies.named[0])
        return session


class PatientSession(Session):
    """Sends a request again, through its redirects, until the cluster answers it or the patience is at its end.

    Raises:
        PatienceOverError: If the cluster was away for too long. A request for a cluster that has never answered, and
            one without patience, ends as with `requests`.
    """

    def __init__(self, proxies: Proxies, patience: Patience, *, token: Token | None = None) -> None:
        super().__init__()
        self._proxies, self._patience, self._token = proxies, patience, token

    def request(self, method: str, url: str | bytes, *args: Any, **kwargs: Any) -> Response:
        waiting = Waiting(self._patience, self._proxies.named[0])
        while True:
            asked = self._proxies.current
            failure: requests.RequestException | None = None
            answer: Response | None = None
            asked_for_s = 0.0
            try:
                answer = super().request(method, self._proxies.rewritten(str(url)), *args, **kwargs)
            except requests.RequestException as exc:
                if not _may_pass(exc, method, kwargs.get("data"), has_answered=self._proxies.has_answered):
                    raise
                failure, cause = exc, cause_of(exc)
                if exc.request is None or self._proxies.is_proxy(str(exc.request.url)):
                    self._proxies.turn_from(asked)
            else:
                self._proxies.has_answered = True
                away = _away_text(answer, kwargs.get("data"), self._token)
                if away is None and "/v1/objects/" in str(url) and _is_missing(answer) and self._lacks_targets():
                    away = "it is not found, and a target of the cluster is missing"
                if away is None:
                    waiting.progress()
                    return answer
                cause, asked_for_s = away, retry_after_s(answer.headers)
                self._proxies.turn_if_starting(answer.status_code, str(answer.url))
            pause_s = waiting.next_pause_s(cause, retry_after_s=asked_for_s, has_answered=self._proxies.has_answered)
            if pause_s is not None:
                if answer is not None:
                    answer.close()
                _log.debug("%s %s: %s; again in %.2f s", method, url, cause, pause_s)
                pause(pause_s)
            elif waiting.num_failures:
                raise waiting.over(cause) from None
            elif failure is not None:
                raise failure
            else:
                assert answer is not None, "without a failure there is an answer"
                return answer

    def _lacks_targets(self) -> bool:
        """Whether the cluster's map lacks a target that it had before: then the target's objects are missing, too."""
        if self._proxies.map is None:
            return False
        try:
            return self._proxies.lacks_targets(self.cluster_map())
        except ValueError:
            return False
        except requests.RequestException:
            return True  # it does not answer any more, so it is changing

    def cluster_map(self) -> ClusterMap:
        """Ask for the cluster's map once; a cluster that is away is not waited for.

        Raises:
            requests.RequestException: If there is no answer.
            ValueError: If the answer is not a map: the token may not read it.
        """
        url = f"{self._proxies.current.rstrip('/')}/v1/daemon"
        answer = super().request("GET", url, params={"what": "smap"}, timeout=_MAP_TIMEOUT_S)
        return ClusterMap.from_json(read_json(answer.content))


def _may_pass(exc: requests.RequestException, method: str, body: object, *, has_answered: bool) -> bool:
    if not is_silence(exc, has_answered=has_answered) or not _can_send_again(body):
        return False
    is_unsent = any(isinstance(cause, NewConnectionError | ConnectTimeoutError) for cause in wrapped_in(exc))
    return is_unsent or method.upper() in _REPEATABLE


def _can_send_again(body: object) -> bool:
    return body is None or isinstance(body, bytes | bytearray | str | dict)


def _away_text(answer: Response, body: object, token: Token | None) -> str | None:
    """The reason if the answer says that the cluster, or a part of it, is away, or a new token; else ``None``."""
    if answer.status_code < 400 and token is not None and not answer.url.partition("?")[0].endswith("/v1/health"):
        token.note_accepted()  # a health check is answered without one
    if answer.status_code < 400 or not _can_send_again(body):
        return None
    text = _text_of(answer)
    has_expired = token is not None and token.is_replaced_soon(answer.status_code, text)
    return answer_text(answer.status_code, text) if has_expired or is_away(answer.status_code, text) else None


def _is_missing(answer: Response) -> bool:
    return answer.status_code in (400, 404) and is_missing(answer.status_code, _text_of(answer))


def _text_of(answer: Response) -> str:
    """An error's text, if it is short enough to be one of AIStore's."""
    text = answer.headers.get("Hdr-Error", "")
    length = answer.headers.get("Content-Length", "")
    if not text and length.isdecimal() and int(length) <= MAX_ERROR_BYTES:
        text = answer.text
    return text
