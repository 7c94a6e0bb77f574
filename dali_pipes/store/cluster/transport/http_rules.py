"""Rules that all HTTP transfers follow: an object's URL, redirects, and when to try again."""

import contextlib
from typing import Protocol
from urllib.parse import quote, urlencode, urljoin, urlsplit

from urllib3.exceptions import InvalidHeader
from urllib3.util.retry import Retry

from dali_pipes.errors import printable

REDIRECTS = (301, 302, 303, 307, 308)

MAX_REDIRECTS = 4
_PASSING = (408, 409, 423, 425, 429)  # 409 is AIStore's "the object is being written"
_LASTING = (501, 505)
_CLUSTER_IS_FULL = 507
_SHOWN_CHARS = 60
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


def object_url(endpoint: str, bucket: str, name: str, *, provider: str, **query: str) -> str:
    """The URL of an object, as the SDK builds it; a ``..`` in its name stays.

    >>> object_url("http://localhost:51080", "pets", "a b/../x.tar", provider="ais")
    'http://localhost:51080/v1/objects/pets/a%20b/../x.tar?provider=ais'
    """
    query = {"provider": provider, **query}
    return f"{urljoin(endpoint, 'v1')}/objects/{bucket}/{quote(name)}?{urlencode(query)}"


class RedirectError(Exception):
    """A redirect must not be followed; the text says where it leads, and why not."""


def redirect_target(url: str, location: str) -> str:
    """The URL that an answer's ``Location`` names for a request to ``url``.

    Raises:
        RedirectError: If that is not the URL of a host, or leads from https to http, where everyone on the way can read
            the data.

    >>> redirect_target("http://proxy:51080/v1/objects/pets/a/../x.tar", "/v1/objects/pets/a/../x.tar?t=1")
    'http://proxy:51080/v1/objects/pets/a/../x.tar?t=1'
    """
    if location.startswith("/") and not location.startswith("//"):
        # Not urljoin, which would remove a ".." from the object's name.
        parts = urlsplit(url)
        location = f"{parts.scheme}://{parts.netloc}{location}"
    try:
        parts = urlsplit(location)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_url = False
    if not is_url or "@" in parts.netloc or not location.isascii() or not location.isprintable() or " " in location:
        raise RedirectError(
            f"redirected to '{printable(location, max_chars=_SHOWN_CHARS)}', which is not the URL of a host; does "
            "--endpoint name an AIStore?"
        )
    if url.lower().startswith("https:") and parts.scheme == "http":
        raise RedirectError(
            f"redirected from https to http, to '{printable(location, max_chars=_SHOWN_CHARS)}', where others can "
            "read and change the data; do all nodes of the cluster use TLS?"
        )
    return location


def is_passing(status: int, *, writes: bool = False) -> bool:
    """Whether another attempt may succeed after this status; a write into a full cluster may not.

    Transfers of shards wait after each of these. The SDK's requests wait only where `is_away` says so.

    >>> [is_passing(status) for status in (404, 429, 501, 503, 507)]
    [False, True, False, True, True]
    >>> is_passing(507, writes=True)
    False
    """
    if writes and status == _CLUSTER_IS_FULL:
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


class Headers(Protocol):
    """The fields of an answer's head, by any client."""

    def get(self, name: str, default: str, /) -> str: ...


def retry_after_s(headers: Headers) -> float:
    """Read the seconds that ``Retry-After`` asks for, as a number or a date; 0 without the header."""
    with contextlib.suppress(InvalidHeader, ValueError, OverflowError):
        return max(0.0, Retry().parse_retry_after(headers.get("Retry-After", "")))
    return 0.0
