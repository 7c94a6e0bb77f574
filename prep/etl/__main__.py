"""Serve one transform, as in a pod of AIStore's ETL: ``python -m prep.etl TRANSFORM``.

The SDK's multi-threaded server needs no packages beside the SDK (its others need FastAPI or Flask). A shard is
transformed completely before the server answers. The SDK's streaming mode sends the status 200 first, so a transform
that fails later would look like a short shard.
"""

import argparse
import posixpath
import re
import sys
from collections.abc import Sequence
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from aistore.sdk.etl.webserver.http_multi_threaded_server import HTTPMultiThreadedServer

from dali_pipes.errors import DataError
from prep.etl.transforms import ShardTransform, load_transform

# Where a target keeps an object: MOUNTPATH/@PROVIDER[/#NAMESPACE]/BUCKET/%ob/NAME.
_OBJECT_FILE = re.compile(r"/.*/@[a-z]+(/[@#][^/]*)?/(?P<bucket>[^/]+)/%ob/.+")


class ShardServer(HTTPMultiThreadedServer):  # type: ignore[misc]  # the SDK publishes no types
    """Serves one transform; `start` returns at SIGTERM.

    Raises:
        OSError: If ``AIS_TARGET_URL`` is not set. AIStore sets it in the pods that it starts.
    """

    def __init__(self, of: ShardTransform, *, host: str, port: int) -> None:
        super().__init__(host=host, port=port)
        self._of = of

    def transform(self, data: bytes, path: str, etl_args: str) -> bytes:
        return self._of.transform(data, path, etl_args)

    def get_mime_type(self) -> str:
        return "application/x-tar"

    class RequestHandler(HTTPMultiThreadedServer.RequestHandler):  # type: ignore[misc]  # the same
        """The SDK's handler; but it takes bytes from its node and gives them back to its node only.

        And errors name the shard, where the SDK's answer to PUT is empty.
        """

        def parse_request(self) -> bool:
            if not super().parse_request():
                return False
            url = urlsplit(self.path)
            reason = refusal(
                path=unquote(url.path),
                files=[unquote(file) for file in parse_qs(url.query).get("etl_fqn", [])],
                receivers=self.headers.get_all("Ais-Node-Url", []),
                target=self.server.etl_server.host_target,
            )
            if reason is not None:
                self.send_error(403, reason)
            return reason is None

        def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
            """Answer with an error as plain text in the body, because a status line cannot hold all letters."""
            cause = sys.exception()
            text = str(cause) if isinstance(cause, DataError | ValueError) else message or explain or ""
            body = text.encode()
            self.send_response(422 if isinstance(cause, DataError | ValueError) else code)
            self.send_header("Content-Type", "text/plain; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Log nothing: the SDK logs failures."""


def refusal(*, path: str, files: Sequence[str], receivers: Sequence[str], target: str) -> str | None:
    """Return why a request is refused, because it names a strange file or receiver; ``None``: it is not.

    Instead of sending an object's bytes, AIStore can name the file that holds them (``etl_fqn``). It can also name a
    node that takes the result (``Ais-Node-Url``). The SDK's server obeys any client: it would read any file of its
    user, and send results to any address, with the ETL's secret and the token for the cluster.

    ``path`` and ``files`` are unquoted; ``receivers`` are the headers; ``target`` is the node that started the server.

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
    for receiver in (part.strip() for value in receivers for part in value.split(",")):
        if (urlsplit(receiver).scheme, urlsplit(receiver).netloc) != (known.scheme, known.netloc):
            return (
                f"'{receiver}' is not the node that started this transform, {known.scheme}://{known.netloc}; "
                "results go there only: start the ETL without support_direct_put"
            )
    return None


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM; return 1 if the server cannot start, 2 for an unknown transform."""
    parser = argparse.ArgumentParser(prog="python -m prep.etl", description="Serve one transform for AIStore's ETL.")
    parser.add_argument("transform", metavar="TRANSFORM", help="pets, or MODULE:FUNCTION")
    parser.add_argument("--host", default="0.0.0.0", help="all interfaces, for the target beside the pod")  # noqa: S104
    parser.add_argument("--port", type=int, default=8000, help="AIStore expects 8000, the default")
    args = parser.parse_args(argv)
    try:
        ShardServer(load_transform(args.transform), host=args.host, port=args.port).start()
    except ValueError as exc:
        print(f"error: {exc}", file=sys.stderr)
        return 2
    except OSError as exc:
        print(f"error: cannot serve on {args.host}:{args.port}: {exc}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
