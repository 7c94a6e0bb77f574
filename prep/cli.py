"""The commands ``pack``, ``shuffle``, ``index`` and ``embedded``: arguments in, one line about what was done out.

Only click and the standard library are imported before a command runs. Errors are raised, and told by who called.
"""

import contextlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from prep.pack import PackReport
    from prep.records import Source

__all__ = ["format_bytes", "parse_bytes", "prep"]

Command = TypeVar("Command", bound=Callable[..., Any])

UNITS = {"": 0, "B": 0, "KiB": 10, "MiB": 20, "GiB": 30, "TiB": 40}
DECIMAL_UNITS = {"kB": 3, "KB": 3, "MB": 6, "GB": 9, "TB": 12}
# Left-out records named on the terminal; --json has all of them.
_SHOWN = 20


def parse_bytes(text: str) -> int:
    """A number of bytes: ``4096``, ``64MB`` (10**6), ``1.5GiB`` (2**30).

    Raises:
        ValueError: If it is not a positive size with a unit of these.
    """
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", text)
    unit = match[2] if match else None
    if match is None or (unit not in UNITS and unit not in DECIMAL_UNITS):
        raise ValueError(
            f"a size is a number and one of {', '.join(filter(None, [*UNITS, *DECIMAL_UNITS]))}, got '{text}'"
        )
    scale: int = 2 ** UNITS[unit] if unit in UNITS else 10 ** DECIMAL_UNITS[unit or ""]
    num_bytes = round(float(match[1]) * scale)
    if num_bytes < 1:
        raise ValueError(f"a size must be at least one byte, got '{text}'")
    return num_bytes


def format_bytes(num_bytes: int) -> str:
    """A number of bytes in the largest binary unit that leaves at least 1.

    >>> format_bytes(23173530)
    '22.1 MiB'
    """
    for unit, power in reversed(UNITS.items()):
        if power and num_bytes >= 2**power:
            return f"{num_bytes / 2**power:.1f} {unit}"
    return f"{num_bytes} B"


def size(text: str) -> int:
    """`parse_bytes` as an option's type; its name is what ``--help`` shows."""
    try:
        return parse_bytes(text)
    except ValueError as exc:
        raise click.BadParameter(str(exc)) from exc


def _all(*options: Callable[[Command], Command]) -> Callable[[Command], Command]:
    def add(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return add


cluster_options = _all(
    click.option(
        "--endpoint",
        envvar="AIS_ENDPOINT",
        show_envvar=True,
        help="AIStore's proxy, for buckets; without one, an embedded node runs on this machine for as long as needed.",
    ),
    click.option(
        "--embedded-dir",
        envvar="DALI_PIPES_EMBEDDED_DIR",
        show_envvar=True,
        type=click.Path(file_okay=False, path_type=Path),
        help="Where the embedded node stores.  [default: $XDG_DATA_HOME/dali-pipes/embedded]",
    ),
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print the result as one JSON object.")
overwrite_option = click.option("--overwrite", is_flag=True, help="Replace other shards under the output's names.")
pack_options = _all(
    click.option("--max-count", type=click.IntRange(min=1), default=10_000, show_default=True, help="Samples a shard."),
    click.option("--max-bytes", type=size, default="256MiB", show_default=True, help="Bytes a shard."),
    click.option(
        "--on-bad",
        type=click.Choice(["fail", "skip", "keep"]),
        default="fail",
        show_default=True,
        help="A photo in no format that DALI decodes, an empty file, a mask that is no 8-bit grey PNG: fail before "
        "anything is written, skip the record, or keep it as it is. (A PNG named .jpg is packed, and noted.)",
    ),
    overwrite_option,
    click.option("--dry-run", is_flag=True, help="Check and plan, write nothing."),
    cluster_options,
    json_option,
)


@click.group(short_help="Pack, shuffle and index shards.")
def prep() -> None:
    """Photos to shuffled, indexed WebDataset shards."""


@prep.group(short_help="Photos, masks and labels into shards.")
def pack() -> None:
    """Pack photos, masks and labels into WebDataset shards, original bytes kept.

    URL is where to: ais://BUCKET[/PREFIX] or DIRECTORY[/PREFIX]. A last part that ends in "-" or "_" is what the
    shards' names start with; any other is a folder, in which names start with "samples-". A bucket that is not there
    is made.

    Written are PREFIX000000.tar, PREFIX000001.tar, ... and PREFIXclasses.json. A pack that was interrupted is finished
    by running it again; shards that are there already, byte for byte, are not written again.
    """


@pack.command("pets", short_help="A directory in the layout of Oxford-IIIT Pet.")
@click.argument("directory", type=click.Path(path_type=Path))
@click.argument("url")
@click.option("--download", is_flag=True, help="Download the data set (800 MB) into DIRECTORY first, by torchvision.")
@pack_options
def pack_pets(directory: Path, url: str, *, download: bool, **options: Any) -> None:
    """Pack DIRECTORY, laid out as the Oxford-IIIT Pet data set, to URL.

    Read are images/*.jpg, annotations/trimaps/*.png and annotations/list.txt. A sample is image.jpg, trimap.png and
    cls, the class id as in the list, from 1. A record with a missing part is skipped and named.
    """
    from prep.records import download_pets, pets

    if download:
        download_pets(directory)
    _pack(pets(directory), url, **options)


@pack.command("imagefolder", short_help="A directory with a folder for each class.")
@click.argument("directory", type=click.Path(path_type=Path))
@click.argument("url")
@pack_options
def pack_imagefolder(directory: Path, url: str, **options: Any) -> None:
    """Pack DIRECTORY, which has one folder of photos for each class, to URL.

    DIRECTORY/cat/001.JPG becomes key "cat/001" with the components jpg and cls; class ids count the sorted folders
    from 0.
    """
    from prep.records import imagefolder

    _pack(imagefolder(directory), url, **options)


@pack.command("demo", short_help="Photos from scikit-image; no download.")
@click.argument("url")
@click.option("--count", type=click.IntRange(min=8), default=300, show_default=True, help="Photos to cut.")
@click.option("--seed", type=int, default=0, show_default=True, help="The same seed gives the same bytes.")
@pack_options
def pack_demo(url: str, *, count: int, seed: int, **options: Any) -> None:
    """Pack photos cut from the photographs inside scikit-image, with masks, to URL; nothing is downloaded.

    A sample is image.jpg, 150 to 1,000 pixels a side, trimap.png with the values 1, 2 and 3, and cls, which photograph
    it is, from 1.
    """
    from prep.demo_photos import demo_photos

    _pack(demo_photos(count=count, seed=seed, show_progress=True), url, **options)


@prep.command(short_help="Shuffle shards in a bucket, by dSort.")
@click.argument("urls", metavar="URL...", nargs=-1, required=True)
@click.option(
    "--output",
    "output_prefix",
    metavar="PREFIX",
    default="shuffled-",
    show_default=True,
    help="What the output's names start with, in the same bucket.",
)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="What the order is drawn from.")
@click.option("--shard-bytes", type=size, help="Bytes of components an output shard.  [default: the input's mean]")
@overwrite_option
@cluster_options
@json_option
def shuffle(
    urls: tuple[str, ...],
    *,
    output_prefix: str,
    seed: int,
    shard_bytes: int | None,
    overwrite: bool,
    endpoint: str | None,
    embedded_dir: Path | None,
    as_json: bool,
) -> None:
    """Shuffle the samples of the shards at URL into new shards, in the AIStore cluster by dSort.

    URL is ais://BUCKET/PREFIX or ais://BUCKET/PREFIX{000000..000009}.tar. The input is kept; both sides are read and
    compared. Written are PREFIX000000.tar, ... under --output, and a copy of the class table. On a cluster
    of several targets the order depends on their timing too, not on the seed alone.
    """
    from prep.shuffle import shuffle as shuffle_shards
    from prep.urls import resolve_shards

    with _endpoint_for(urls[0], endpoint, embedded_dir) as answering:
        report = shuffle_shards(
            resolve_shards(urls, endpoint=answering),
            output_prefix=output_prefix,
            seed=seed,
            shard_bytes=shard_bytes,
            overwrite=overwrite,
            show_progress=not as_json,
        )
    _tell(
        f"shuffled {_count(report.num_input_shards, 'shard')} into {_count(len(report.shards), 'shard')}, "
        f"{_count(report.num_samples, 'sample')}, {format_bytes(report.num_bytes)} in {report.elapsed_s:.1f} s, "
        f"verified -> {_span(report.url, report.shards)}",
        {
            "url": report.url,
            "shards": report.shards,
            "num_input_shards": report.num_input_shards,
            "num_samples": report.num_samples,
            "num_bytes": report.num_bytes,
            "elapsed_s": report.elapsed_s,
        },
        as_json=as_json,
    )


@prep.command(short_help="Locate every component of every sample.")
@click.argument("urls", metavar="URL...", nargs=-1, required=True)
@cluster_options
@json_option
def index(urls: tuple[str, ...], *, endpoint: str | None, embedded_dir: Path | None, as_json: bool) -> None:
    """Index the shards at URL: where each component of each sample lies, and what its header says.

    URL is ais://BUCKET/PREFIX, DIRECTORY[/PREFIX], a glob of local tars, or shards with braces. Each shard is read
    once. Written are a shard index beside each shard and, beside them all, one column file (keys and labels of all
    samples, to choose by) and, last, one manifest.
    """
    import time

    from prep.index import index_shards
    from prep.manifest import manifest_name
    from prep.urls import resolve_shards

    started = time.perf_counter()
    with _endpoint_for(urls[0], endpoint, embedded_dir) as answering:
        shards = resolve_shards(urls, endpoint=answering)
        manifest = index_shards(shards, show_progress=not as_json)
    elapsed_s = time.perf_counter() - started
    where = shards.store.locate(manifest_name(shards.prefix))
    _tell(
        f"indexed {_count(manifest.num_shards, 'shard')}, {_count(manifest.num_samples, 'sample')}, "
        f"{format_bytes(manifest.total_bytes)} in {elapsed_s:.1f} s -> {where}",
        {
            "manifest": where,
            "digest": manifest.digest,
            "num_shards": manifest.num_shards,
            "num_samples": manifest.num_samples,
            "num_bytes": manifest.total_bytes,
            "components": dict(manifest.components),
            "classes": {str(label): name for label, name in manifest.classes.items()},
            "elapsed_s": elapsed_s,
        },
        as_json=as_json,
    )


@prep.command(short_help="Run an AIStore-compatible node here.")
@click.option(
    "--dir",
    "directory",
    required=True,
    type=click.Path(file_okay=False, path_type=Path),
    help="Where the node stores; made if it is not there. Nothing is kept outside it.",
)
@click.option("--port", type=click.IntRange(0, 65535), default=0, show_default=True, help="0: any that is free.")
def embedded(directory: Path, port: int) -> None:
    """Run the embedded AIStore-compatible node on loopback, in the foreground; its endpoint is printed.

    For first runs, tests and laptops: past one machine a real cluster takes its place. Ctrl-C ends it.
    """
    from prep.embedded import serve_forever

    with contextlib.suppress(KeyboardInterrupt):
        serve_forever(directory, port=port)


def _pack(
    source: "Source",
    url: str,
    *,
    max_count: int,
    max_bytes: int,
    on_bad: Any,
    overwrite: bool,
    dry_run: bool,
    endpoint: str | None,
    embedded_dir: Path | None,
    as_json: bool,
) -> None:
    from prep.pack import open_target
    from prep.pack import pack as pack_records

    with _endpoint_for(url, endpoint, embedded_dir) as answering:
        store, prefix = open_target(url, endpoint=answering)
        report = pack_records(
            source,
            store=store,
            prefix=prefix,
            max_count=max_count,
            max_bytes=max_bytes,
            on_bad=on_bad,
            overwrite=overwrite,
            dry_run=dry_run,
            show_progress=not as_json,
        )
    _name_all("skipped", report.skipped)
    _name_all("kept as it is", report.kept)
    _name_all("noted", report.noted)
    _tell(
        _pack_line(report),
        {
            "url": report.url,
            "shards": report.shards,
            "num_written": report.num_written,
            "num_samples": report.num_samples,
            "num_bytes": report.num_bytes,
            "skipped": report.skipped,
            "kept": report.kept,
            "noted": report.noted,
            "classes": {str(label): source.classes[label] for label in sorted(source.classes)},
            "elapsed_s": report.elapsed_s,
            "dry_run": report.dry_run,
        },
        as_json=as_json,
    )


def _pack_line(report: "PackReport") -> str:
    there = len(report.shards) - report.num_written
    notes = [
        *([f"{there} of the shards were there already"] if there and not report.dry_run else []),
        *([f"skipped {len(report.skipped)}"] if report.skipped else []),
        *([f"kept {len(report.kept)} bad ones"] if report.kept else []),
    ]
    return (
        f"{'would write' if report.dry_run else 'wrote'} {_count(len(report.shards), 'shard')}, "
        f"{_count(report.num_samples, 'sample')}, {format_bytes(report.num_bytes)} in {report.elapsed_s:.1f} s"
        f"{' (' + ', '.join(notes) + ')' if notes else ''} -> {_span(report.url, report.shards)}"
    )


@contextlib.contextmanager
def _endpoint_for(url: str, endpoint: str | None, embedded_dir: Path | None) -> Iterator[str | None]:
    """An endpoint that answers where ``url`` needs one, else ``None``."""
    from prep.urls import is_remote

    if not is_remote(url):
        yield None
        return
    from prep.endpoint import cluster

    with cluster(endpoint, embedded_dir=embedded_dir) as answering:
        yield answering


def _tell(line: str, result: dict[str, Any], *, as_json: bool) -> None:
    click.echo(json.dumps(result) if as_json else line)


def _name_all(what: str, lines: Sequence[str]) -> None:
    for line in lines[:_SHOWN]:
        click.echo(f"{what}: {line}", err=True)
    if len(lines) > _SHOWN:
        click.echo(f"{what}: {len(lines) - _SHOWN} more, --json names all", err=True)


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _span(url: str, shards: Sequence[str]) -> str:
    """``ais://pets/samples-{000000..000003}.tar``."""
    numbers = [re.findall(r"[0-9]+", shard)[-1] for shard in (shards[0], shards[-1])]
    return f"{url}{numbers[0]}.tar" if len(shards) == 1 else f"{url}{{{numbers[0]}..{numbers[1]}}}.tar"
