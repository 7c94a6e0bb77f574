"""Which right of AIStore's AuthN a refused request needs, for errors."""

import re
from urllib.parse import urlsplit

from dali_pipes.store.cluster.token import FILE_VARIABLE, VARIABLE, Token

# (method, the path behind /v1/ without its names) -> AIStore's name of the right (`api/apc/access.go`).
_RIGHTS = {
    ("GET", "objects/b/o"): "GET",
    ("HEAD", "objects/b/o"): "HEAD-OBJECT",
    ("PUT", "objects/b/o"): "PUT",
    ("DELETE", "objects/b/o"): "DELETE-OBJECT",
    ("GET", "buckets/b"): "LIST-OBJECTS",
    ("GET", "buckets"): "LIST-BUCKETS",
    ("HEAD", "buckets/b"): "HEAD-BUCKET",
    ("POST", "buckets/b"): "CREATE-BUCKET",
    ("DELETE", "buckets/b"): "DESTROY-BUCKET",
    ("GET", "daemon"): "SHOW-CLUSTER",
    ("GET", "cluster"): "SHOW-CLUSTER",
    ("POST", "sort"): "ADMIN",
    ("GET", "sort"): "ADMIN",
    ("DELETE", "sort"): "ADMIN",
    ("PUT", "etl"): "ADMIN",
}


def right_for(method: str, url: str) -> str | None:
    """AIStore's name of the right that a request needs; ``None`` if it is not known.

    >>> right_for("PUT", "http://ais:51080/v1/objects/pets/a/x.tar?provider=ais")
    'PUT'
    """
    path = re.sub(r"^.*?/v1/", "", urlsplit(url).path, count=1).strip("/")
    kind, *names = path.split("/", 2)
    shape = "/".join([kind, *("bo"[: len(names)])]) if kind in ("objects", "buckets") else kind
    return _RIGHTS.get((method.upper(), shape))


def refusal_advice(status: int, text: str, *, method: str, url: str, token: Token | None) -> str:
    """What to do about an answer 401 or 403, as the end of an error's text; empty for any other status.

    Args:
        status: The answer's status.
        text: Its message.
        method: The request's method.
        url: The request's URL, at the proxy.
        token: The token that the request had.
    """
    if status == 401:
        if token is None or "token required" in text:
            return f"; log in (ais auth login), or set {FILE_VARIABLE} or {VARIABLE}"
        if "token expired" in text:
            again = "" if token.file is None else "; a running job reads the file again when it changes"
            return f"; the token in {token.source} has expired: get a new one (ais auth login){again}"
        return f"; the token in {token.source} is not valid for this cluster: get another one (ais auth login)"
    if status != 403 or "embedded node" in text:  # an embedded node knows no tokens, and says itself what to do
        return ""
    right = right_for(method, url)
    has = "the request has no token" if token is None else f"the token in {token.source} lacks a right"
    if right is None:
        return f"; {has}: ask the cluster's administrator for it"
    lacks = f"; {has}: it needs {right}" if token is None else f"; the token in {token.source} lacks the right {right}"
    ways = "; or shuffle without dSort: --engine exchange" if "/v1/sort" in url else ""
    return f"{lacks}; ask the cluster's administrator for it{ways}"
