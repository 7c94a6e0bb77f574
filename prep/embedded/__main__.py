"""Run the embedded node: ``python -m prep.embedded --dir DIR``, by hand or as the child of ``start``."""

import argparse
import os
import sys
import threading
from pathlib import Path

from dali_pipes.errors import StoreError
from dali_pipes.processes.programs import end_with_owner
from prep.embedded.server import serve_forever


def main(argv: list[str] | None = None) -> int:
    """Serve until interrupted; return 1 if the node cannot start."""
    parser = argparse.ArgumentParser(prog="python -m prep.embedded", description=__doc__)
    parser.add_argument("--dir", type=Path, required=True, help="the folder that holds buckets and objects")
    parser.add_argument("--port", type=int, default=0, help="on 127.0.0.1; 0, the default, takes a free one")
    transforms = parser.add_mutually_exclusive_group()
    transforms.add_argument("--allow-etl", action="store_true", help="allow clients to run transforms as you")
    transforms.add_argument("--etl-function", metavar="TRANSFORM", help="allow clients to run this transform, no other")
    parser.add_argument("--open", action="store_true", help="answer processes of other users of this machine, too")
    parser.add_argument("--latency-s", type=float, default=0.0, help="seconds to wait before each request is answered")
    parser.add_argument("--owner", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.owner is not None:
        threading.Thread(target=_watch, args=(args.owner,), daemon=True).start()
    try:
        serve_forever(
            args.dir,
            args.port,
            allow_etl=args.allow_etl or None,
            etl_function=args.etl_function,
            is_open=args.open,
            latency_s=args.latency_s,
        )
    except KeyboardInterrupt:
        return 0
    except (OSError, OverflowError, StoreError) as exc:
        print(f"cannot serve '{args.dir}' on 127.0.0.1:{args.port}: {exc}", file=sys.stderr)
        return 1
    return 0


def _watch(owner: int) -> None:
    end_with_owner(owner)
    os._exit(0)  # connections and jobs end at once; the files on disk are complete at any moment


if __name__ == "__main__":
    sys.exit(main())
