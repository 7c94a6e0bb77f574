"""Turn answers and exceptions of AIStore and its SDK into texts for errors."""

import contextlib
import http.client
import ipaddress
import json
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from dali_pipes.errors import printable

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


def first_line(exc: BaseException) -> str:
    return printable(next(iter(str(exc).splitlines()), type(exc).__name__), max_chars=_LINE_CHARS)


def damaged(where: str, cause: str, *, target: str, bucket: str) -> str:
    """The text for an object of AIStore whose bytes on a target's disk have changed; ``target`` may be empty."""
    at = f" on the disk of the target at {target}" if target else " on its target's disk"
    return (
        f"'{where}' is damaged{at}: {cause}; write it again. A bucket with mirroring or erasure coding mends it when "
        f"it is read after 'ais bucket props set {bucket} checksum.validate_warm_get=true'; without copies, AIStore "
        "deletes the damaged object then"
    )
