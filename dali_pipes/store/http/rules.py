"""What an answer or a failed connection means: follow a redirect, try again, wait, or say why not."""

import contextlib
import http.client
import json
import ssl
import time
from email.utils import parsedate_to_datetime
from urllib.parse import urlsplit

from dali_pipes.errors import printable
from dali_pipes.store.http.wire import Headers, TooSlowError, decimal

REDIRECTS = (301, 302, 303, 307, 308)
MAX_REDIRECTS = 4
_PASSING = (408, 409, 423, 425, 429)  # 409 is AIStore's "the object is being written"
_LASTING = (501, 505)
_AWAY = (408, 425, 429, 502, 503, 504)
# What nodes say with another status while they start, stop, or wait for each other.
_AWAY_TEXTS = (
    "no storage targets in the cluster",
    "no proxies (gateways) in the cluster",
    "starting up",
    "not ready yet",
    "connection refused",
    "connection reset by peer",
)
_WANTS_CERTIFICATE = "if it wants a client's certificate, set AIS_CRT and AIS_CRT_KEY"
_MAX_TEXT = 500  # of an answer that an error repeats: some servers answer with a whole page


class RedirectError(Exception):
    """A redirect must not be followed; the text says where it leads, and why not."""


def is_server_url(url: str) -> bool:
    """Whether a text is the URL of something on a host, without a password."""
    try:
        parts = urlsplit(url)
        (parts.hostname or "").encode("idna")  # an error for a name that no resolver takes, such as "a..b"
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False
    return is_url and "@" not in parts.netloc and url.isascii() and url.isprintable() and " " not in url


def redirect_target(url: str, location: str) -> str:
    """The URL that an answer's ``Location`` names for a request to ``url``.

    Raises:
        RedirectError: If that is not the URL of a host, or leads from https to http, where everyone on the way can read
            the data.

    >>> redirect_target("http://proxy:51080/v1/objects/pets/a/../x.tar", "/v1/objects/pets/a/../x.tar?t=1")
    'http://proxy:51080/v1/objects/pets/a/../x.tar?t=1'
    """
    parts = urlsplit(url)
    if location.startswith("/") and not location.startswith("//"):
        # Not urljoin, which would remove a ".." from the object's name.
        location = f"{parts.scheme}://{parts.netloc}{location}"
    shown = printable(location, max_chars=60)
    if not is_server_url(location):
        raise RedirectError(
            f"redirected to '{shown}', which is not the URL of a host; does --endpoint name an AIStore?"
        )
    if parts.scheme == "https" and not location.lower().startswith("https:"):
        raise RedirectError(
            f"redirected from https to http, to '{shown}', where others can read and change the data; do all nodes of "
            "the cluster use TLS?"
        )
    return location


def is_passing(status: int, *, writes: bool = False) -> bool:
    """Whether another attempt may succeed after this status; a write into a full cluster may not.

    Transfers of shards wait after each of these. The SDK's requests wait only where `is_away` says so.

    >>> [is_passing(status) for status in (404, 429, 501, 503, 507)]
    [False, True, False, True, True]
    """
    if writes and status == 507:
        return False
    return status in _PASSING or (status >= 500 and status not in _LASTING)


def is_missing(status: int, text: str) -> bool:
    """Whether an answer means that there is no such object: a bucket with erasure coding says it in its own way.

    >>> is_missing(400, "failed to EC-recover ais://b/o, err: no metafile")
    True
    """
    return status == 404 or (status == 400 and "failed to EC-recover" in text and "no metafile" in text)


def is_away(status: int, text: str) -> bool:
    """Whether an answer means that the cluster, or a part of it, is away for a while; ``text`` is its reason.

    >>> [is_away(429, ""), is_away(400, "no storage targets in the cluster"), is_away(400, "bad request")]
    [True, True, False]
    """
    return status in _AWAY or (status in (400, 404, 500) and any(said in text.lower() for said in _AWAY_TEXTS))


def retry_after_s(headers: Headers) -> float:
    """Read the seconds that ``Retry-After`` asks for, as a number or a date; 0 without the header."""
    text = headers.get("Retry-After").strip()
    seconds = decimal(text)
    if seconds is None:
        with contextlib.suppress(ValueError, OverflowError):
            seconds = int(parsedate_to_datetime(text).timestamp() - time.time())
    return float(max(0, seconds or 0))


def is_silence(exc: Exception) -> bool:
    """Whether an exception of a connection means that a server is away.

    One that answers too slowly is there, and one whose certificate is not trusted does not become another.

    >>> broken = ssl.SSLError(1, "")
    >>> broken.reason = "DECRYPTION_FAILED_OR_BAD_RECORD_MAC"  # a bit that changed on the way
    >>> is_silence(broken)
    True
    """
    return isinstance(exc, OSError) and not isinstance(exc, TooSlowError) and tls_text(exc) is None


def cause_of(exc: BaseException) -> str:
    """Say in short what an exception of a connection means."""
    return (exc.strerror if isinstance(exc, OSError) else None) or str(exc) or type(exc).__name__


def tls_text(exc: BaseException, *, ca_variable: str = "AIS_CLIENT_CA") -> str | None:
    """The end of an error's text, after the server's name; ``None`` if the exception is not about certificates or TLS.

    ``ca_variable`` is the environment variable that names the certificates to trust.

    >>> exc = ssl.SSLCertVerificationError(1, "")
    >>> exc.verify_message = "self-signed certificate"
    >>> tls_text(exc).partition(";")[0]
    'shows a certificate that cannot be trusted (self-signed certificate)'
    """
    if isinstance(exc, ssl.SSLCertVerificationError):
        return (
            f"shows a certificate that cannot be trusted ({exc.verify_message}); "
            f"set {ca_variable} to the file of the CA that signed it"
        )
    if not isinstance(exc, ssl.SSLError) or isinstance(exc, ssl.SSLEOFError):
        return None
    reason = exc.reason or ""
    words = reason.replace("_", " ").lower()
    if reason in ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "RECORD_LAYER_FAILURE"):
        return f"does not speak TLS ({words}); should the endpoint begin with http://?"
    if not any(word in reason for word in ("ALERT", "CERTIFICATE", "PEM", "KEY_VALUES")):
        return None  # a connection that was closed, or bytes that broke on the way
    return f"cannot be reached over TLS ({words}); check {ca_variable}; {_WANTS_CERTIFICATE}"


def cut_hint(exc: BaseException, url: str, *, has_certificate: bool) -> str:
    """The hint for a connection that a server cut, in brackets; empty if TLS cannot be the reason.

    A server that wants a client's certificate sends an alert, which may be lost with the connection.
    """
    is_cut = isinstance(exc, (ssl.SSLEOFError, ConnectionResetError, BrokenPipeError)) and url.startswith("https:")
    return f" ({_WANTS_CERTIFICATE})" if is_cut and not has_certificate else ""


def answer_text(status: int, text: str, *, reason: str = "") -> str:
    """A status and its reason: the message in AIStore's JSON, else the text in one line, else HTTP's own words.

    >>> answer_text(404, '{"message": "ais://b/o does not exist"}')
    '404 ais://b/o does not exist'
    """
    text = printable(message_of(text) or reason, max_chars=_MAX_TEXT)
    return f"{status} {text or http.client.responses.get(status, 'without a reason')}"


def message_of(text: str) -> str:
    """The message in AIStore's JSON, or the text itself if it is not such JSON; in one line."""
    with contextlib.suppress(ValueError, TypeError, KeyError, RecursionError):
        text = str(json.loads(text)["message"])
    return " ".join(text.split())
