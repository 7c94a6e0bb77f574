"""``dali-pipes prep embedded``."""

import contextlib
from pathlib import Path

import click

from dali_pipes.commands.options import json_option
from prep.commands.output import print_result


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
@json_option
def embedded(directory: Path, port: int, *, allow_etl: bool, is_open: bool, as_json: bool) -> None:
    """Run the embedded AIStore-compatible node on loopback, in the foreground, and print its endpoint.

    It answers only your own processes. With --open, every user of the machine can read, replace and delete its objects
    and, with --allow-etl, run code as you. It is for first runs, tests and laptops; for more than one machine, run a
    real cluster. Ctrl-C ends it.
    """
    from prep.embedded.server import serve_forever

    def announce(endpoint: str) -> None:
        print_result(endpoint, {"endpoint": endpoint, "dir": str(directory)}, as_json=as_json)

    with contextlib.suppress(KeyboardInterrupt):
        serve_forever(directory, port=port, allow_etl=allow_etl or None, is_open=is_open, announce=announce)
