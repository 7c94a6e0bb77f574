"""``dali-pipes prep embedded``."""

import contextlib
import os
import threading
import time
from pathlib import Path
from typing import Any

import click

from dali_pipes.commands.options import json_option
from dali_pipes.commands.output import print_result
from dali_pipes.errors import StoreError
from dali_pipes.processes.programs import end_with_owner
from dali_pipes.store.cluster.embedded_node import ALLOW_ETL


@click.command()
@click.option(
    "--dir",
    "directory",
    required=True,
    type=click.Path(file_okay=False, path_type=Path),
    help="The node's directory, for you alone; created if it does not exist. The node writes nothing outside it.",
)
@click.option("--port", type=click.IntRange(0, 65535), default=0, show_default=True, help="0: any free port.")
@click.option("--allow-etl", is_flag=True, help="Let clients run transforms as you: see prep etl.")
@click.option("--open", "is_open", is_flag=True, help="Answer processes of other users of this machine, too.")
@click.option("--etl-function", hidden=True, help="Let clients run this transform, and no other.")
@click.option("--latency-s", type=float, default=0.0, hidden=True, help="Seconds before each request is answered.")
@click.option("--owner", type=int, hidden=True, help="End with the process of this number.")
@json_option
def embedded(
    directory: Path,
    port: int,
    *,
    allow_etl: bool,
    is_open: bool,
    etl_function: str | None,
    latency_s: float,
    owner: int | None,
    as_json: bool,
) -> None:
    """Run the embedded AIStore-compatible node on loopback, in the foreground, and print its endpoint.

    It answers only your own processes. With --open, every user of the machine can read, replace and delete its objects
    and, with --allow-etl, run code as you. It is for first runs, tests and laptops; for more than one machine, run a
    real cluster. Ctrl-C ends it.
    """
    from prep.embedded.server import NodeServer
    from prep.embedded.storage import Storage

    if owner is not None:
        threading.Thread(target=_end_with, args=(owner,), daemon=True).start()
    allow_etl |= etl_function is None and os.environ.get(ALLOW_ETL) == "1"
    os.umask(0o077)  # files are for this user alone
    options: dict[str, Any] = {"allow_etl": allow_etl, "etl_function": etl_function, "is_open": is_open}
    if latency_s:
        options["before_request"] = lambda _: time.sleep(latency_s)
    with contextlib.suppress(KeyboardInterrupt):
        try:
            with Storage(directory) as storage, NodeServer(storage, port=port, **options) as server:
                if is_open:
                    able = "read, replace and delete its objects"
                    able += ", and run any code as you, by ETL" if allow_etl else ""
                    click.echo(f"warning: --open: every user of this machine can {able}", err=True)
                result = {"endpoint": server.endpoint, "dir": str(directory)}
                print_result(server.endpoint, result, as_json=as_json)
                server.serve_forever()
        except (OSError, OverflowError) as exc:
            raise StoreError(f"cannot serve '{directory}' on 127.0.0.1:{port}: {exc}") from exc


def _end_with(owner: int) -> None:
    end_with_owner(owner)
    os._exit(0)  # connections and jobs end at once; the files on disk are complete at any moment
