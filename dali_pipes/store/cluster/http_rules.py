"""Rules that all HTTP transfers follow: an object's URL, redirects, when to try again, and no token in messages."""

from urllib.parse import quote, urlencode, urljoin, urlsplit

REDIRECTS = (301, 302, 303, 307, 308)

_PASSING = (408, 409, 423, 425, 429)  # 409 is AIStore's "the object is being written"
_LASTING = (501, 505)
_CLUSTER_IS_FULL = 507


def object_url(endpoint: str, bucket: str, name: str, *, provider: str, **query: str) -> str:
    """The URL of an object, as the SDK builds it; a ``..`` in its name stays.

    >>> object_url("http://localhost:51080", "pets", "a b/../x.tar", provider="ais")
    'http://localhost:51080/v1/objects/pets/a%20b/../x.tar?provider=ais'
    """
    query = {"provider": provider, **query}
    return f"{urljoin(endpoint, 'v1')}/objects/{bucket}/{quote(name)}?{urlencode(query)}"


def redirect_target(url: str, location: str) -> str | None:
    """The URL that an answer's ``Location`` names for a request to ``url``; ``None`` if it is not the URL of a host.

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
    return location if is_url and location.isascii() and location.isprintable() and " " not in location else None


def is_passing(status: int, *, writes: bool = False) -> bool:
    """Whether another attempt may succeed after this status; a write into a full cluster may not.

    >>> [is_passing(status) for status in (404, 429, 501, 503, 507)]
    [False, True, False, True, True]
    >>> is_passing(507, writes=True)
    False
    """
    if writes and status == _CLUSTER_IS_FULL:
        return False
    return status in _PASSING or (status >= 500 and status not in _LASTING)


def without_token(text: str, token: str | None) -> str:
    """A server's text with the token masked, in case it repeats the request."""
    return text.replace(token, "***") if token else text
