"""The commands ``transform`` and ``etl``: a function of a sample applied to shards, from here or by a cluster's ETL.

Added to `prep.commands.prep.prep` when `prep.commands.prep` has been imported, whose options they take.
"""

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, cast

import click

from dali_pipes.commands.options import Command, cluster_options, endpoint_for, format_bytes, json_option
from prep.commands.prep import counted, prep

if TYPE_CHECKING:
    from dali_pipes.store.ais import AisStore
    from prep.etl.local import TransformReport

__all__ = ["etl", "transform"]

_FUNCTION_HELP = (
    "pets, the tutorial's transform, or MODULE:FUNCTION, of a module in the current directory or installed."
)

output_overwrite_option = click.option("--overwrite", is_flag=True, help="Replace what is there under these names.")
image_option = click.option(
    "--image",
    envvar="DALI_PIPES_ETL_IMAGE",
    show_envvar=True,
    default="dali-pipes-etl:latest",
    show_default=True,
    help="What the cluster's pods run: deploy/etl builds it. The embedded node runs this Python.",
)


def _which(command: Command) -> Command:
    """By which ETL: one that runs, or one for this command."""
    options: list[Callable[[Command], Command]] = [
        click.option("--etl", "name", metavar="NAME", help="A running ETL; see etl start."),
        click.option("--function", metavar="TRANSFORM", help=f"Start one for this command alone. {_FUNCTION_HELP}"),
        image_option,
    ]
    for option in reversed(options):
        command = option(command)
    return command


@prep.command(short_help="Apply a function to every sample, from here.")
@click.argument("urls", metavar="URL... OUT", nargs=-1, required=True)
@click.option("--function", metavar="TRANSFORM", required=True, help=_FUNCTION_HELP)
@output_overwrite_option
@click.option("--jobs", type=click.IntRange(min=1), help="Processes.  [default: the cores, at most 16]")
@cluster_options
@json_option
def transform(
    urls: tuple[str, ...],
    *,
    function: str,
    overwrite: bool,
    jobs: int | None,
    endpoint: str | None,
    embedded_dir: Path | None,
    as_json: bool,
) -> None:
    """Transform the shards at URL into OUT, with no ETL: the bytes are those that a cluster's ETL makes.

    URL is ais://BUCKET/PREFIX, DIRECTORY[/PREFIX], a glob of local tars, or shards with braces; OUT is
    ais://BUCKET[/PREFIX] or DIRECTORY[/PREFIX], made if it is not there. Shards keep their names and samples their keys
    and order. The function takes a dict of component to bytes and returns another; an empty one leaves the sample out.

    Written are the shards and, where there is one, the class table; index them afterwards.
    """
    from dali_pipes.store.urls import is_remote, resolve_shards
    from prep.etl.local import open_output, transform_shards

    *inputs, out = _inputs_and_output(urls)
    remote = next((url for url in (*inputs, out) if is_remote(url)), inputs[0])
    with endpoint_for(remote, endpoint, embedded_dir) as answering:
        report = transform_shards(
            resolve_shards(inputs, endpoint=answering),
            open_output(out, endpoint=answering),
            transform=function,
            overwrite=overwrite,
            jobs=jobs,
            endpoint=answering,
            show_progress=not as_json,
        )
    _tell_report(report, function, as_json=as_json)


@prep.group(short_help="Transforms inside the cluster.")
def etl() -> None:
    """Transform shards inside the cluster: AIStore's ETL, which needs Kubernetes, or an embedded node that may.

    A loader reads through a running ETL, loader(..., etl=NAME), once prep index --etl NAME has indexed what it gives.
    get and run take a running ETL, --etl NAME, or start one for themselves, --function TRANSFORM. Without an endpoint
    they start an embedded node, which runs the transform as a process on this machine. One that was started by hand
    runs transforms if DALI_PIPES_EMBEDDED_ETL=1 stood in its environment: whoever reaches its port on loopback may then
    have any function run that this user can. With no ETL at all: prep transform.
    """


@etl.command("start", short_help="Start an ETL and leave it running.")
@click.argument("name")
@click.option("--function", metavar="TRANSFORM", required=True, help="pets, or MODULE:FUNCTION that the image has.")
@image_option
@click.option("--endpoint", envvar="AIS_ENDPOINT", show_envvar=True, required=True, help="AIStore's proxy.")
@json_option
def start_command(name: str, *, function: str, image: str, endpoint: str, as_json: bool) -> None:
    """Start the ETL NAME (6 to 32 of a-z, 0-9 and -), and wait until its pods answer; etl stop NAME ends it."""
    from prep.etl.cluster import start_etl

    start_etl(_any_bucket(endpoint), name, transform=function, image=image)
    line = f"ETL '{name}' runs {function} at {endpoint}"
    click.echo(json.dumps({"etl": name, "function": function, "image": image}) if as_json else line)


@etl.command("stop", short_help="End an ETL and forget it.")
@click.argument("name")
@click.option("--endpoint", envvar="AIS_ENDPOINT", show_envvar=True, required=True, help="AIStore's proxy.")
@json_option
def stop_command(name: str, *, endpoint: str, as_json: bool) -> None:
    """Stop the ETL NAME and delete it."""
    from prep.etl.cluster import stop_etl

    stop_etl(_any_bucket(endpoint), name)
    click.echo(json.dumps({"etl": name}) if as_json else f"stopped ETL '{name}' at {endpoint}")


@etl.command("get", short_help="Read one shard through an ETL.")
@click.argument("url")
@click.argument("file", metavar="FILE", type=click.Path(dir_okay=False, path_type=Path))
@_which
@cluster_options
@json_option
def get_command(
    url: str,
    file: Path,
    *,
    name: str | None,
    function: str | None,
    image: str,
    endpoint: str | None,
    embedded_dir: Path | None,
    as_json: bool,
) -> None:
    """Read the shard at URL, ais://BUCKET/NAME.tar, transformed, into FILE; nothing is stored in the cluster."""
    from dali_pipes.errors import StoreError
    from dali_pipes.store.urls import open_store
    from prep.etl.cluster import get_transformed

    if not file.parent.is_dir():
        raise click.BadParameter(f"no directory '{file.parent}'; make it", param_hint="FILE")
    with _cluster(url, endpoint, embedded_dir, function) as answering:
        store, shard = open_store(url, endpoint=answering)
        if not shard.endswith(".tar"):
            raise ValueError(f"'{url}' names no shard; expected one such as ais://pets/samples-000000.tar")
        with _running(cast("AisStore", store), name, function, image) as running:
            partial = file.with_name(f".partial-{file.name}")
            try:
                with partial.open("wb") as stream:
                    num_bytes = get_transformed(cast("AisStore", store), shard, stream, etl=running)
                partial.rename(file)
            except OSError as exc:
                raise StoreError(f"cannot write '{file}': {exc.strerror or exc}") from exc
            finally:
                partial.unlink(missing_ok=True)
    result = {"url": url, "file": str(file), "etl": name, "function": function, "num_bytes": num_bytes}
    click.echo(json.dumps(result) if as_json else f"read {url} through ETL, {format_bytes(num_bytes)} -> {file}")


@etl.command("run", short_help="Transform shards, bucket to bucket.")
@click.argument("urls", metavar="URL... OUT", nargs=-1, required=True)
@_which
@output_overwrite_option
@cluster_options
@json_option
def run_command(
    urls: tuple[str, ...],
    *,
    name: str | None,
    function: str | None,
    image: str,
    overwrite: bool,
    endpoint: str | None,
    embedded_dir: Path | None,
    as_json: bool,
) -> None:
    """Transform the shards at URL into OUT, ais://BUCKET[/PREFIX], inside the cluster; returns when all are there.

    URL is ais://BUCKET/PREFIX or shards with braces. Other objects beside them are left alone. Shards keep their
    names, which come after PREFIX. Written are the shards and, where there is one, the class table.
    """
    from dali_pipes.store.urls import is_remote, resolve_shards
    from prep.etl.cluster import run_offline
    from prep.etl.local import open_output

    *inputs, out = _inputs_and_output(urls)
    if local := next((url for url in (*inputs, out) if not is_remote(url)), None):
        raise ValueError(
            f"'{local}' is no bucket, a cluster's ETL goes from bucket to bucket; here: dali-pipes prep transform"
        )
    with _cluster(inputs[0], endpoint, embedded_dir, function) as answering:
        shards = resolve_shards(inputs, endpoint=answering)
        with _running(cast("AisStore", shards.store), name, function, image) as running:
            output = open_output(out, endpoint=answering)
            report = run_offline(shards, output, etl=running, overwrite=overwrite, show_progress=not as_json)
    _tell_report(report, function or running, as_json=as_json)


@contextlib.contextmanager
def _cluster(url: str, endpoint: str | None, embedded_dir: Path | None, function: str | None) -> Iterator[str]:
    """An endpoint; an embedded node of this command's own may run what the command was given."""
    from dali_pipes.store.embedded_node import ALLOW_ETL
    from dali_pipes.store.urls import is_remote
    from prep.etl.transforms import load_transform

    if not is_remote(url):
        raise ValueError(f"'{url}' is no bucket, an ETL reads from one; here: dali-pipes prep transform")
    before = os.environ.get(ALLOW_ETL)
    if endpoint is None:
        if function is None:
            raise click.UsageError("--etl NAME needs --endpoint; an embedded node's ETLs end with it: --function")
        load_transform(function)
        os.environ[ALLOW_ETL] = "1"  # to the node, which inherits it
    try:
        with endpoint_for(url, endpoint, embedded_dir) as answering:
            yield cast("str", answering)
    finally:
        if endpoint is None:
            os.environ.pop(ALLOW_ETL)
            os.environ.update({ALLOW_ETL: before} if before is not None else {})


@contextlib.contextmanager
def _running(store: "AisStore", name: str | None, function: str | None, image: str) -> Iterator[str]:
    """The name of the ETL that is asked for."""
    from prep.etl.cluster import running_etl

    if (name is None) == (function is None):
        raise click.UsageError("expected --etl NAME or --function TRANSFORM, one of them")
    if name is not None:
        yield name
    else:
        with running_etl(store, transform=cast("str", function), image=image) as started:
            yield started


def _any_bucket(endpoint: str) -> "AisStore":
    """What asks the cluster; no bucket's name is in what is asked."""
    from dali_pipes.store.ais import AisStore, check_endpoint

    check_endpoint(endpoint)
    return AisStore(endpoint, "etl")


def _inputs_and_output(urls: tuple[str, ...]) -> tuple[str, ...]:
    if len(urls) < 2:
        raise click.UsageError("expected URL... and OUT")
    return urls


def _tell_report(report: "TransformReport", what: str, *, as_json: bool) -> None:
    result = {
        "url": report.url,
        "shards": report.shards,
        "num_bytes": report.num_bytes,
        "elapsed_s": report.elapsed_s,
        "transform": what,
        "job": report.job,
    }
    line = (
        f"transformed {counted(len(report.shards), 'shard')} by {what}, {format_bytes(report.num_bytes)} in "
        f"{report.elapsed_s:.1f} s -> {report.url}"
    )
    click.echo(json.dumps(result) if as_json else line)
