"""The sessions of AIStore's SDK, whose requests our client sends. The SDK's errors become those of our requests.

Nobody imports this at the top of a module, because importing the SDK takes half a second.
"""

import contextlib
import io
import json
from collections.abc import Iterator
from typing import Any

import pydantic
from aistore.sdk.errors import AISError
from aistore.sdk.session_manager import SessionManager
from requests import PreparedRequest, RequestException, Response, Session
from requests.adapters import BaseAdapter
from requests.structures import CaseInsensitiveDict
from requests.utils import get_encoding_from_headers

from dali_pipes.store.cluster.access import ClusterAccess
from dali_pipes.store.cluster.client import ClusterClient, NotAisError, RefusedError
from dali_pipes.store.http.client import SILENCE_S
from dali_pipes.store.http.wire import Answer
from dali_pipes.store.patience import Patience

# Fields of a head that our client writes itself.
_OURS = ("User-Agent", "Accept-Encoding", "Connection", "Content-Length", "Transfer-Encoding")


@contextlib.contextmanager
def sdk_errors() -> Iterator[None]:
    """Turn the SDK's errors into those of `ClusterClient`; `Bucket.asking` turns these into a `StoreError`."""
    try:
        yield
    # Not "from exc": the exceptions repeat the server's text, and a traceback would show it as it is.
    except AISError as exc:
        response = getattr(exc.__cause__, "response", None)  # HEAD has the message in a header
        said = exc.message or (response.headers.get("Hdr-Error", "") if response is not None else "")
        raise RefusedError(exc.status_code, said) from None
    except (RequestException, pydantic.ValidationError, json.JSONDecodeError, RecursionError) as exc:
        raise NotAisError(exc) from None


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
    """Sends requests as `ClusterClient.ask` does, and raises what it raises."""

    def __init__(self, access: ClusterAccess, patience: Patience) -> None:
        super().__init__()
        self._client = ClusterClient(access, patience)

    def close(self) -> None:
        """Close the idle connections."""
        self._client.http.close()

    def send(  # type: ignore[override]
        self, request: PreparedRequest, stream: bool = False, timeout: Any = None, **_: object
    ) -> Response:
        """Send a request, and read its whole answer."""
        answer, content = self._client.ask(
            str(request.url),
            method=str(request.method),
            headers=[(name, str(value)) for name, value in request.headers.items() if name not in _OURS],
            body=_bytes_of(request.body),
            silence_s=(timeout[1] if isinstance(timeout, tuple) else timeout) or SILENCE_S,
            is_stream=stream,
        )
        return _response(request, answer, content)


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
