"""Turn answers and exceptions of AIStore, its SDK and `requests` into texts for errors."""

import contextlib
import http.client
import ipaddress
import json
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from dali_pipes.errors import printable
from dali_pipes.store.cluster.transport.tls_errors import cut_hint, tls_text

if TYPE_CHECKING:
    from aistore.sdk.errors import AISError


# The longest part of an answer's text that an error repeats: some servers answer with a whole page.
MAX_TEXT = 500
# Of a line of an exception's text.
_LINE_CHARS = 500


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
    text = printable(message_of(text) or reason, max_chars=MAX_TEXT)
    return f"{status} {text or http.client.responses.get(status, 'without a reason')}"


def message_of(text: str) -> str:
    """The message in AIStore's JSON, or the text itself if it is not such JSON; in one line."""
    with contextlib.suppress(ValueError, TypeError, KeyError, RecursionError):
        text = str(json.loads(text)["message"])
    return " ".join(text.split())


def check_endpoint_url(endpoint: str) -> None:
    """Raise a `ValueError` if an endpoint is not a URL, or holds a password; the error does not repeat a password."""
    try:
        parts = urlsplit(endpoint)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_url = False
    if "@" in endpoint:
        host = endpoint.rpartition("@")[2]
        raise ValueError(
            f"the endpoint at '{printable(host)}' must not hold a password; set AIS_AUTHN_TOKEN to a token"
        )
    if not is_url:
        raise ValueError(f"endpoint must be a URL such as http://localhost:51080, got '{printable(endpoint)}'")


def is_loopback(endpoint: str) -> bool:
    """Whether an endpoint is on this machine, where no proxy can reach it."""
    with contextlib.suppress(ValueError):
        host = urlsplit(endpoint).hostname or ""
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    return False


def no_answer(endpoint: str, exc: Exception) -> str:
    """The text for an exception of `requests` that means that nothing answered, or not as expected."""
    import requests

    if text := tls_text(innermost(exc)):
        return f"{endpoint} {text}"
    if isinstance(exc, OSError) and not isinstance(exc, requests.RequestException):
        return f"cannot connect to {endpoint}: {first_line(exc)}; check AIS_CLIENT_CA, AIS_CRT and AIS_CRT_KEY"
    if isinstance(exc, requests.exceptions.ProxyError):
        return (
            f"no answer from AIStore at {endpoint} through the proxy {_proxy_of(endpoint)} ({cause_of(exc)}); "
            "name the host in NO_PROXY to reach it directly, or pass another --endpoint"
        )
    hint = cut_hint(innermost(exc), endpoint, has_certificate="AIS_CRT" in os.environ)
    return (
        f"no answer from AIStore at {endpoint} ({cause_of(exc)}){hint}; is it running? pass endpoint= (--endpoint), or "
        "set AIS_ENDPOINT"
    )


def cause_of(exc: BaseException) -> str:
    """The message of the innermost exception, typically the socket's, inside those of `requests` and `urllib3`."""
    return first_line(innermost(exc)).rpartition("): ")[2]


def innermost(exc: BaseException) -> BaseException:
    """The exception that `requests` and `urllib3` wrapped."""
    return list(wrapped_in(exc))[-1]


def wrapped_in(exc: BaseException) -> Iterator[BaseException]:
    """The exception, the one that it wraps, and so on to the innermost."""
    # requests wraps urllib3's error, which wraps the socket's: "HTTPConnection(...): Failed to ...".
    inner: BaseException | None = exc
    while inner is not None:
        yield inner
        wrapped = (getattr(inner, "reason", None), getattr(inner, "original_error", None), *inner.args)
        inner = next((value for value in wrapped if isinstance(value, BaseException)), None)


def unchained(exc: BaseException) -> BaseException:
    """The exception without those that led to it. Raise errors from it: one refused connection has a chain of four."""
    exc.__cause__ = exc.__context__ = None
    return exc


def first_line(exc: BaseException) -> str:
    return printable(next(iter(str(exc).splitlines()), type(exc).__name__), max_chars=_LINE_CHARS)


def _proxy_of(endpoint: str) -> str:
    """The proxy that the environment names for an endpoint, without a password."""
    from requests.utils import get_environ_proxies, select_proxy

    proxy = str(select_proxy(endpoint, get_environ_proxies(endpoint)))
    scheme, mark, rest = proxy.rpartition("://")
    return f"'{scheme}{mark}{rest.rpartition('@')[2]}'"


def damaged(where: str, cause: str, *, target: str, bucket: str) -> str:
    """The text for an object of AIStore whose bytes on a target's disk have changed; ``target`` may be empty."""
    at = f" on the disk of the target at {target}" if target else " on its target's disk"
    return (
        f"'{where}' is damaged{at}: {cause}; write it again. A bucket with mirroring or erasure coding mends it when "
        f"it is read after 'ais bucket props set {bucket} checksum.validate_warm_get=true'; without copies, AIStore "
        "deletes the damaged object then"
    )
