"""Turn answers and exceptions of AIStore, its SDK and `requests` into texts for errors."""

import contextlib
import http.client
import ipaddress
import json
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from aistore.sdk.errors import AISError


# The longest part of an answer's text that an error repeats: some servers answer with a whole page.
MAX_TEXT = 500


def error_text(exc: "AISError") -> str:
    """Status and reason of an answer: its JSON's message, the header that replaces it for HEAD, or HTTP's own words.

    >>> from types import SimpleNamespace
    >>> error_text(SimpleNamespace(status_code=403, message=""))
    '403 Forbidden'
    """
    response = getattr(getattr(exc, "__cause__", None) or getattr(exc, "__context__", None), "response", None)
    text = exc.message or (response.headers.get("Hdr-Error", "") if response is not None else "")
    return answer_text(exc.status_code, text)


def answer_text(status: int, text: str, *, reason: str = "") -> str:
    """A status and its reason: the message in AIStore's JSON, else the text in one line, else HTTP's own words.

    >>> answer_text(404, '{"message": "ais://b/o does not exist"}')
    '404 ais://b/o does not exist'
    """
    text = message_of(text)[:MAX_TEXT]
    return f"{status} {text or reason or http.client.responses.get(status, 'without a reason')}"


def message_of(text: str) -> str:
    """The message in AIStore's JSON, or the text itself if it is not such JSON; in one line."""
    with contextlib.suppress(ValueError, TypeError, KeyError):
        text = str(json.loads(text)["message"])
    return " ".join(text.split())


def is_loopback(endpoint: str) -> bool:
    """Whether an endpoint is on this machine, where no proxy can reach it."""
    with contextlib.suppress(ValueError):
        host = urlsplit(endpoint).hostname or ""
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    return False


def no_answer(endpoint: str, exc: Exception) -> str:
    """The text for an exception of `requests` that means that nothing answered."""
    import requests

    if isinstance(exc, requests.exceptions.ProxyError):
        return (
            f"no answer from AIStore at {endpoint} through the proxy {_proxy_of(endpoint)} ({cause_of(exc)}); "
            "name the host in NO_PROXY to reach it directly, or pass another --endpoint"
        )
    return (
        f"no answer from AIStore at {endpoint} ({cause_of(exc)}); is it running? pass endpoint= (--endpoint), or set "
        "AIS_ENDPOINT"
    )


def cause_of(exc: BaseException) -> str:
    """The message of the innermost exception, typically the socket's, inside those of `requests` and `urllib3`."""
    return first_line(innermost(exc)).rpartition("): ")[2]


def innermost(exc: BaseException) -> BaseException:
    """The exception that `requests` and `urllib3` wrapped."""
    # requests wraps urllib3's error, which wraps the socket's: "HTTPConnection(...): Failed to ...".
    inner: BaseException | None = exc
    while inner is not None:
        exc = inner
        wrapped = (getattr(exc, "reason", None), getattr(exc, "original_error", None), *exc.args)
        inner = next((value for value in wrapped if isinstance(value, BaseException)), None)
    return exc


def unchained(exc: BaseException) -> BaseException:
    """The exception without those that led to it. Raise errors from it: one refused connection has a chain of four."""
    exc.__cause__ = exc.__context__ = None
    return exc


def first_line(exc: BaseException) -> str:
    return next(iter(str(exc).splitlines()), type(exc).__name__)


def _proxy_of(endpoint: str) -> str:
    """The proxy that the environment names for an endpoint, without a password."""
    from requests.utils import get_environ_proxies, select_proxy

    proxy = str(select_proxy(endpoint, get_environ_proxies(endpoint)))
    scheme, mark, rest = proxy.rpartition("://")
    return f"'{scheme}{mark}{rest.rpartition('@')[2]}'"
