"""Decide which requests the server of a transform refuses: those that name a strange file or a strange receiver.

Instead of sending an object's bytes, AIStore can name the file that holds them (``etl_fqn``). It can also name a node
that takes the result (``Ais-Node-Url``). The SDK's server obeys any client: it would read any file of its user, and
send results to any address, with the ETL's secret and the token for the cluster.
"""

import posixpath
import re
from collections.abc import Sequence
from urllib.parse import urlsplit

# Where a target keeps an object: MOUNTPATH/@PROVIDER[/#NAMESPACE]/BUCKET/%ob/NAME.
_OBJECT_FILE = re.compile(r"/.*/@[a-z]+(/[@#][^/]*)?/(?P<bucket>[^/]+)/%ob/.+")


def refusal(*, path: str, files: Sequence[str], receivers: Sequence[str], target: str) -> str | None:
    """Return why a request is refused, or ``None``.

    Args:
        path: The request's path, ``/BUCKET/NAME``, unquoted.
        files: The files that it names as its input, unquoted.
        receivers: The values of its headers ``Ais-Node-Url``: addresses, separated by commas.
        target: The URL of the node that started the server.

    >>> target = "http://10.0.0.7:51081/v1/etl/_object/name/secret"
    >>> refusal(path="/b/a", files=["/ais/1/@ais/b/%ob/a"], receivers=["http://10.0.0.7:51081/x"], target=target)
    >>> refusal(path="/b/a.tar", files=["/etc/passwd"], receivers=[], target=target)
    "the file '/etc/passwd' is not where a target keeps an object of the bucket 'b'"
    """
    if not path.startswith("/"):
        return f"'{path}' is not a path"  # behind the target's address it could name another host
    bucket = path.strip("/").partition("/")[0]
    for file in files:
        match = _OBJECT_FILE.fullmatch(file)
        if match is None or match["bucket"] != bucket or posixpath.normpath(file) != file:
            return f"the file '{file}' is not where a target keeps an object of the bucket '{bucket}'"
    known = urlsplit(target)
    for receiver in ",".join(receivers).split(",") if receivers else ():
        if (urlsplit(receiver.strip()).scheme, urlsplit(receiver.strip()).netloc) != (known.scheme, known.netloc):
            return (
                f"'{receiver.strip()}' is not the node that started this transform, {known.scheme}://{known.netloc}; "
                "results go there only: start the ETL without support_direct_put"
            )
    return None
