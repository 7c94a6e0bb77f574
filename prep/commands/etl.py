"""``dali-pipes prep transform`` and ``prep etl``: transforms on this machine, and inside a cluster."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from dali_pipes.commands.options import cluster_options, endpoint_for, format_bytes, join_options, json_option
from dali_pipes.commands.output import counted, fields_of, print_result
from prep.commands.options import jobs_option, on_option, overwrite_option, part_option, print_empty_part

if TYPE_CHECKING:
    from dali_pipes.store.base import Bucket
    from prep.etl.run import TransformReport
    from prep.part import JobPart


_FUNCTION_HELP = (
    "pets, the tutorial's transform, or MODULE:FUNCTION, of a module in the current directory or installed."
)

_replace_option = overwrite_option("what is there under these names")


@click.command()
@click.argument("urls", metavar="URL...", nargs=-1, required=True)
@click.argument("out")
@click.option("--function", metavar="TRANSFORM", required=True, help=_FUNCTION_HELP)
@_replace_option
@jobs_option("Processes")
@on_option
@part_option("every N-th shard")
@cluster_options
@json_option
def transform(
    urls: tuple[str, ...],
    out: str,
    *,
    function: str,
    part: "JobPart",
    endpoint: str | None,
    embedded_dir: Path | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Transform the shards at URL into OUT without an ETL: the bytes are the same as those of a cluster's ETL.

    URL is ais://BUCKET/PREFIX, DIRECTORY[/PREFIX], a glob of local tars, or shards with braces; OUT is
    ais://BUCKET[/PREFIX] or DIRECTORY[/PREFIX], created if it does not exist. Shards keep their names, and samples keep
    their keys and order. The function takes a dict of component to bytes and returns another; an empty one leaves the
    sample out.

    The command writes the shards and, if there is one, the class table; index them afterwards.
    """
    from dali_pipes.data_set.named import list_shards
    from prep.etl.run import open_output, transform_shards

    with endpoint_for(urls, endpoint, embedded_dir, writes=[out]) as answering:
        shards = list_shards(urls, endpoint=answering)
        own = part.of_shards(shards)
        if not own.names:
            print_empty_part(part, own.url, as_json=as_json)
            return
        output = open_output(out, endpoint=answering)
        report = transform_shards(own, output, transform=function, whole=shards, show_progress=not as_json, **options)
    _print_report(report, function, as_json=as_json)


def _print_report(report: "TransformReport", what: str, *, as_json: bool) -> None:
    """Print the result of ``what``, a function or an ETL."""
    line = (
        f"transformed {counted(len(report.shards), 'shard')} by {what}, {format_bytes(report.num_bytes)} in "
        f"{report.elapsed_s:.1f} s -> {report.url}"
    )
    print_result(line, fields_of(report) | {"transform": what}, as_json=as_json)


_image_option = click.option(
    "--image",
    envvar="DALI_PIPES_ETL_IMAGE",
    show_envvar=True,
    default="dali-pipes-etl:0.1.0",
    show_default=True,
    help="The container image of the cluster's pods; deploy/etl builds it. The embedded node runs this Python instead.",
)
_endpoint_option = click.option(
    "--endpoint", envvar="AIS_ENDPOINT", show_envvar=True, required=True, help="AIStore's proxy."
)
# The ETL: a running one, or one that is started for this command.
_etl_options = join_options(
    click.option("--etl", "name", metavar="NAME", help="A running ETL; see etl start."),
    click.option("--function", metavar="TRANSFORM", help=f"Start one for this command alone. {_FUNCTION_HELP}"),
    _image_option,
)


@click.group()
def etl() -> None:
    """Transform shards inside the cluster, by AIStore's ETL, which needs Kubernetes, or by an embedded node.

    A loader can read through a running ETL, loader(dp.Shards(urls, etl=NAME)), after prep index --etl NAME has indexed
    the transformed shards. get and run take a running ETL, --etl NAME, or start one for themselves, --function
    TRANSFORM. Without an endpoint they start an embedded node, which runs the transform as a process on this machine.
    That node runs this function and no other. An embedded node that was started by hand with --allow-etl, or with
    DALI_PIPES_EMBEDDED_ETL=1, runs any function, for processes of its own user. prep transform needs no ETL.
    """


@etl.command("start", short_help="Start an ETL and leave it running.")
@click.argument("name")
@click.option("--function", metavar="TRANSFORM", required=True, help="pets, or a MODULE:FUNCTION of the image.")
@_image_option
@_endpoint_option
@json_option
def start_command(name: str, *, function: str, image: str, endpoint: str, as_json: bool) -> None:
    """Start the ETL NAME (6 to 32 characters: a-z, 0-9 and -) and wait until its pods answer; etl stop NAME ends it."""
    from prep.etl.run import start_etl

    start_etl(_any_bucket(endpoint), name, transform=function, image=image)
    line = f"ETL '{name}' runs {function} at {endpoint}"
    print_result(line, {"etl": name, "function": function, "image": image}, as_json=as_json)


@etl.command("stop", short_help="End an ETL and forget it.")
@click.argument("name")
@_endpoint_option
@json_option
def stop_command(name: str, *, endpoint: str, as_json: bool) -> None:
    """Stop the ETL NAME and delete it."""
    from prep.etl.run import stop_etl

    stop_etl(_any_bucket(endpoint), name)
    print_result(f"stopped ETL '{name}' at {endpoint}", {"etl": name}, as_json=as_json)


@etl.command("get", short_help="Read one shard through an ETL.")
@click.argument("url")
@click.argument("file", metavar="FILE", type=click.Path(dir_okay=False, path_type=Path))
@_etl_options
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
    """Read the shard at URL, ais://BUCKET/NAME.tar, through an ETL into FILE; the cluster stores nothing."""
    from dali_pipes.store.local import LocalStore
    from dali_pipes.store.urls import open_store
    from prep.etl.run import get_transformed

    if not file.parent.is_dir():
        raise click.BadParameter(f"no directory '{file.parent}'; make it", param_hint="FILE")
    if not url.endswith(".tar"):
        raise ValueError(f"'{url}' names no shard; expected one such as ais://pets/samples-000000.tar")
    with _running_etl(url, endpoint, embedded_dir, name, function, image) as (answering, running):
        store, shard = open_store(url, endpoint=answering)
        bucket = store.need_cluster("an ETL reads from a bucket")
        with LocalStore(file.parent).replacing(file.name) as stream:
            num_bytes = get_transformed(bucket, shard, stream, etl=running)
    result = {"url": url, "file": str(file), "etl": name, "function": function, "num_bytes": num_bytes}
    print_result(f"read {url} through ETL, {format_bytes(num_bytes)} -> {file}", result, as_json=as_json)


@etl.command("run", short_help="Transform shards, bucket to bucket.")
@click.argument("urls", metavar="URL...", nargs=-1, required=True)
@click.argument("out")
@_etl_options
@_replace_option
@cluster_options
@json_option
def run_command(
    urls: tuple[str, ...],
    out: str,
    *,
    name: str | None,
    function: str | None,
    image: str,
    overwrite: bool,
    endpoint: str | None,
    embedded_dir: Path | None,
    as_json: bool,
) -> None:
    """Transform the shards at URL into OUT, ais://BUCKET[/PREFIX], inside the cluster, and wait until all are there.

    URL is ais://BUCKET/PREFIX or shards with braces; other objects beside them are left alone. Shards keep their names,
    which follow PREFIX. The command writes the shards and, if there is one, the class table.
    """
    from dali_pipes.data_set.named import list_shards
    from dali_pipes.store.urls import is_remote
    from prep.etl.run import open_output, run_offline

    if local := next((url for url in (*urls, out) if not is_remote(url)), None):
        raise ValueError(
            f"'{local}' is not a bucket, a cluster's ETL goes from bucket to bucket; here: dali-pipes prep transform"
        )
    with _running_etl(urls[0], endpoint, embedded_dir, name, function, image) as (answering, running):
        shards = list_shards(urls, endpoint=answering)
        output = open_output(out, endpoint=answering)
        report = run_offline(shards, output, etl=running, overwrite=overwrite, show_progress=not as_json)
    _print_report(report, function or running, as_json=as_json)


@contextlib.contextmanager
def _running_etl(
    url: str, endpoint: str | None, embedded_dir: Path | None, name: str | None, function: str | None, image: str
) -> Iterator[tuple[str, str]]:
    """Yield an endpoint and the name of an ETL: the running one, or one that runs until this ends.

    If this command starts an embedded node, the node may run this function, and no other.
    """
    from dali_pipes.store.urls import is_remote
    from prep.etl.run import running_etl
    from prep.etl.transforms import load_transform

    if not is_remote(url):
        raise ValueError(f"'{url}' is not a bucket, an ETL reads from one; here: dali-pipes prep transform")
    if (name is None) == (function is None):
        raise click.UsageError("expected --etl NAME or --function TRANSFORM, one of them")
    if endpoint is None:
        if function is None:
            raise click.UsageError("--etl NAME needs --endpoint; an embedded node's ETLs end with it: use --function")
        load_transform(function)
    with endpoint_for(url, endpoint, embedded_dir, etl_function=function) as answering:
        assert answering is not None, "a bucket has one"
        if name is not None:
            yield answering, name
        else:
            with running_etl(_any_bucket(answering), transform=cast("str", function), image=image) as started:
                yield answering, started


def _any_bucket(endpoint: str) -> "Bucket":
    """A store for requests to the cluster that need no bucket."""
    from dali_pipes.store.cluster.ais import AisStore
    from dali_pipes.store.cluster.endpoint import check_endpoint

    check_endpoint(endpoint)
    return AisStore(endpoint, "etl")
