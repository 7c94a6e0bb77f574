"""Serve one transform, as in a pod of AIStore's ETL: ``python -m prep.etl TRANSFORM``."""

import argparse
import os
import sys
import threading
from collections.abc import Sequence

from prep.etl.transforms import load_transform


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM; returns 1 if it cannot serve, 2 if there is no such transform."""
    parser = argparse.ArgumentParser(prog="python -m prep.etl", description=__doc__)
    parser.add_argument("transform", metavar="TRANSFORM", help="pets, or MODULE:FUNCTION")
    parser.add_argument("--host", default="0.0.0.0", help="all interfaces, for the target beside the pod")  # noqa: S104
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--owner", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.owner is not None:
        threading.Thread(target=_watch, args=(args.owner,), daemon=True).start()
    try:
        transform = load_transform(args.transform)
    except ValueError as exc:
        print(f"error: {exc}", file=sys.stderr)
        return 2
    from prep.etl.server import ShardServer

    try:
        ShardServer(transform, host=args.host, port=args.port).start()
    except OSError as exc:
        print(f"error: cannot serve on {args.host}:{args.port}: {exc}", file=sys.stderr)
        return 1
    return 0


def _watch(owner: int) -> None:
    from dali_pipes.store.cluster.embedded_node import end_with_owner  # of no use in the image

    end_with_owner(owner)
    os._exit(0)  # nothing here outlives a request


if __name__ == "__main__":
    sys.exit(main())
