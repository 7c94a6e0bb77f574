"""``dali-pipes bench``: compare and time loaders on the same shards."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from prep.cli import cluster_options, size

if TYPE_CHECKING:
    from bench.loaders import Device

__all__ = ["bench"]


def _check_target(context: click.Context, parameter: click.Parameter, path: Path | None) -> Path | None:
    """Refuse a record that could not be written before anything is timed."""
    from bench.record import check_target

    if path is not None:
        check_target(path)
    return path


def _tell(report: Mapping[str, Any], text: str, json_path: Path | None) -> None:
    """Print what was measured, and write the record where one was asked for."""
    from bench.record import write_record

    click.echo(text)
    if json_path is not None:
        write_record(report, json_path)


json_option = click.option(
    "--json",
    "json_path",
    default=None,
    type=click.Path(path_type=Path),
    callback=_check_target,
    help="Write the record here.",
)


@click.group()
def bench() -> None:
    """Time DALI against its peers, on the same shards, batches and clock."""


@bench.command()
@click.option(
    "--shards", required=True, help="What to read: ais://bucket/prefix, a glob of local tars, or a directory."
)
@click.option(
    "--loaders",
    default="dali,webloader,memory",
    show_default=True,
    help="Comma separated: dali, memory, webloader, webloader-tutorial; webloader:turbo has its own decoder.",
)
@click.option(
    "--repeats",
    default=3,
    show_default=True,
    type=click.IntRange(min=1),
    help="Openings of each loader; they take turns.",
)
@click.option(
    "--epochs",
    default=1,
    show_default=True,
    type=click.IntRange(min=1),
    help="Epochs timed in each opening, after the first, which is not.",
)
@click.option("--batch-size", default=64, show_default=True, type=click.IntRange(min=1), help="Samples a batch.")
@click.option(
    "--num-threads",
    default=None,
    type=click.IntRange(min=1),
    help="DALI's threads, or worker processes.  [default: cores]",
)
@click.option(
    "--decode",
    default="pil",
    show_default=True,
    type=click.Choice(["pil", "turbo"]),
    help="What webloader decodes with.",
)
@click.option("--device", default="auto", show_default=True, type=click.Choice(["auto", "cpu", "gpu"]))
@click.option("--crop", default=350, show_default=True, type=click.IntRange(min=1), help="Side of the centre crop.")
@click.option("--photo", default="image.jpg", show_default=True, help="Component that holds the photo.")
@click.option("--mask", default="trimap.png", show_default=True, help="Component that holds the mask.")
@click.option(
    "--seed", default=7, show_default=True, type=click.IntRange(min=0), help="Order of the shards and samples."
)
@click.option(
    "--repeat-samples",
    default=None,
    type=click.IntRange(min=1),
    help="Write this many samples, the given ones over and over, to a temporary directory, and read those.",
)
@json_option
@cluster_options
def run(
    *,
    shards: str,
    loaders: str,
    repeats: int,
    epochs: int,
    batch_size: int,
    num_threads: int | None,
    decode: str,
    device: "Device",
    crop: int,
    photo: str,
    mask: str,
    seed: int,
    repeat_samples: int | None,
    json_path: Path | None,
    endpoint: str | None,
    embedded_dir: Path | None,
) -> None:
    """Hold each loader's outputs against Pillow and torchvision, then time them, and print a table.

    Reads the shards. Writes nothing but the file that --json names.
    """
    import contextlib
    import tempfile

    from bench.environment import check_extras

    check_extras()

    from bench.loaders import LoaderOptions, LoaderSpec, available_cores
    from bench.processes import child_pids
    from bench.repeat import repeat_shards
    from bench.report import format_table
    from bench.run import run_benchmark
    from prep.endpoint import cluster
    from prep.urls import is_remote, resolve_shards

    specs = [LoaderSpec.parse(text.strip()) for text in loaders.split(",")]
    options = LoaderOptions(
        batch_size=batch_size,
        num_threads=available_cores() if num_threads is None else num_threads,
        crop=crop,
        decode=decode,
        photo=photo,
        mask=mask,
        seed=seed,
        device=device,
    )
    with contextlib.ExitStack() as stack:
        before = child_pids()
        url = stack.enter_context(cluster(endpoint, embedded_dir=embedded_dir)) if is_remote(shards) else None
        node = child_pids() - before
        found = resolve_shards(shards, endpoint=url)
        if repeat_samples is not None:
            from prep.index import index_shards

            directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="dali-pipes-bench-"))
            found = repeat_shards(found, num_samples=repeat_samples, directory=Path(directory))
            index_shards(found)
        report = run_benchmark(found, specs, options=options, repeats=repeats, epochs=epochs, bystanders=node)
    # The table first: it is on the terminal whatever becomes of the file.
    _tell(report, format_table(report["records"]), json_path)


@bench.command()
@click.option("--object-bytes", default="64MiB", show_default=True, type=size, help="Bytes an object.")
@click.option("--num-objects", default=16, show_default=True, type=click.IntRange(min=1), help="Objects a turn.")
@click.option("--connections", default=8, show_default=True, type=click.IntRange(min=1), help="Objects in flight.")
@click.option("--repeats", default=5, show_default=True, type=click.IntRange(min=1), help="Turns of each client.")
@click.option("--clients", default=None, help="Comma separated: ours, sdk, curl.  [default: all that are there]")
@click.option(
    "--cache",
    default=Path("/dev/shm"),  # noqa: S108 (a directory of our own is made there)
    show_default=True,
    type=click.Path(path_type=Path),
    help="Where images and curl's files are written; the own server keeps its objects there too.",
)
@click.option(
    "--endpoint", default=None, help="AIStore's proxy, to fetch from a cluster.  [default: a server of our own]"
)
@json_option
def fetch(
    *,
    object_bytes: int,
    num_objects: int,
    connections: int,
    repeats: int,
    clients: str | None,
    cache: Path,
    endpoint: str | None,
    json_path: Path | None,
) -> None:
    """Fetch the same objects with our transport, the SDK and curl, in turns; print speed and CPU of each.

    Ours verifies checksums and stores into an image, the SDK's read_all() keeps bytes in memory, curl writes files.
    Makes the bucket ais://dali-pipes-bench-fetch, on a server of its own or on the cluster that --endpoint names, and
    destroys it at the end. Writes nothing else but the file that --json names.
    """
    from bench.environment import check_extras

    check_extras()
    from bench.fetch import CLIENT_NAMES, FetchOptions, format_fetch, run_fetch
    from bench.fetch_client import find_curl

    chosen = _words(clients) if clients is not None else list(CLIENT_NAMES)
    if clients is None and find_curl() is None:
        chosen.remove("curl")
        click.echo("no program 'curl' in PATH: left out", err=True)
    options = FetchOptions(
        object_bytes=object_bytes,
        num_objects=num_objects,
        connections=connections,
        repeats=repeats,
        clients=chosen,
        cache=cache,
        endpoint=endpoint,
    )
    report = run_fetch(options)
    _tell(report, format_fetch(report), json_path)


@bench.command()
@click.option("--shards", default=None, help="Samples to repeat.  [default: the demo photos]")
@click.option("--samples", default=10_000, show_default=True, type=click.IntRange(min=1), help="Samples to load.")
@click.option(
    "--num-shards", default=40, show_default=True, type=click.IntRange(min=1), help="Shards that they are packed into."
)
@click.option("--repeats", default=3, show_default=True, type=click.IntRange(min=1), help="Turns of each combination.")
@click.option(
    "--epochs",
    default=1,
    show_default=True,
    type=click.IntRange(min=1),
    help="Epochs timed in each turn, after the cold one, which has its own figures.",
)
@click.option("--batch-size", default=64, show_default=True, type=click.IntRange(min=1), help="Samples a batch.")
@click.option("--num-threads", default=None, type=click.IntRange(min=1), help="DALI's threads.  [default: cores]")
@click.option("--device", default="auto", show_default=True, type=click.Choice(["auto", "cpu", "gpu"]))
@click.option("--crop", default=350, show_default=True, type=click.IntRange(min=1), help="Side of the centre crop.")
@click.option("--fractions", default="1.0,0.2", show_default=True, help="Sizes of the cache, as shares of the data.")
@click.option(
    "--latencies-ms",
    default="0,20",
    show_default=True,
    help="Milliseconds added to each request, redirects included.",
)
@click.option("--ramp-up", is_flag=True, help="Start each epoch with windows of 1, 2, 4, ... shards.")
@click.option(
    "--cache",
    default=Path("/dev/shm"),  # noqa: S108 (a directory of our own is made there)
    show_default=True,
    type=click.Path(path_type=Path),
    help="Where the images lie; the server keeps the data set there too.",
)
@json_option
@cluster_options
def windows(
    *,
    shards: str | None,
    samples: int,
    num_shards: int,
    repeats: int,
    epochs: int,
    batch_size: int,
    num_threads: int | None,
    device: "Device",
    crop: int,
    fractions: str,
    latencies_ms: str,
    ramp_up: bool,
    cache: Path,
    json_path: Path | None,
    endpoint: str | None,
    embedded_dir: Path | None,
) -> None:
    """Load a data set through caches that hold all of it or a part, near and far from its server; print who waits.

    Reads --shards, once, from where --endpoint says. What is loaded is a copy of them on a server of its own, which is
    slowed by --latencies-ms. Writes nothing but the file that --json names.
    """
    import contextlib

    from bench.environment import check_extras

    check_extras()
    from bench.loaders import available_cores
    from bench.windows import WindowsOptions, format_windows, run_windows
    from prep.endpoint import cluster
    from prep.urls import is_remote, resolve_shards

    options = WindowsOptions(
        samples=samples,
        num_shards=num_shards,
        repeats=repeats,
        epochs=epochs,
        batch_size=batch_size,
        num_threads=num_threads or available_cores(),
        crop=crop,
        device=device,
        fractions=_numbers("--fractions", fractions),
        latencies_ms=_numbers("--latencies-ms", latencies_ms),
        ramp_up=ramp_up,
        cache=cache,
    )
    with contextlib.ExitStack() as stack:
        found = None
        if shards is not None:
            remote = is_remote(shards)
            url = stack.enter_context(cluster(endpoint, embedded_dir=embedded_dir)) if remote else None
            found = resolve_shards(shards, endpoint=url)
        report = run_windows(options, shards=found)
    _tell(report, format_windows(report), json_path)


@bench.command()
@click.option(
    "--shards", required=True, help="What to load: ais://bucket/prefix, a glob of local tars, or a directory."
)
@click.option("--repeats", default=9, show_default=True, type=click.IntRange(min=1), help="Turns of each scenario.")
@click.option("--batch-size", default=64, show_default=True, type=click.IntRange(min=1), help="Samples a batch.")
@click.option("--num-threads", default=None, type=click.IntRange(min=1), help="DALI's threads.  [default: cores]")
@click.option("--device", default="auto", show_default=True, type=click.Choice(["auto", "cpu", "gpu"]))
@click.option("--crop", default=350, show_default=True, type=click.IntRange(min=1), help="Side of the centre crop.")
@click.option(
    "--cold-shards",
    default=40,
    show_default=True,
    type=click.IntRange(min=1),
    help="Shards that the samples are packed into for the cold turns.",
)
@click.option(
    "--cold-windows", default=5, show_default=True, type=click.IntRange(min=1), help="Shuffle windows that these make."
)
@click.option(
    "--cache",
    default=Path("/dev/shm"),  # noqa: S108 (a directory of our own is made there)
    show_default=True,
    type=click.Path(path_type=Path),
    help="Where the images lie; the server of the cold turns keeps the samples there too.",
)
@json_option
@cluster_options
def resume(
    *,
    shards: str,
    repeats: int,
    batch_size: int,
    num_threads: int | None,
    device: "Device",
    crop: int,
    cold_shards: int,
    cold_windows: int,
    cache: Path,
    json_path: Path | None,
    endpoint: str | None,
    embedded_dir: Path | None,
) -> None:
    """Time the first batch after a resume in mid-epoch against that of an epoch's start, warm and cold.

    Reads --shards. The cold turns load a copy of them, from a server that answers, in half of the turns, for no shard
    but those that the first batch names. Writes nothing but the file that --json names.
    """
    import contextlib

    from bench.environment import check_extras

    check_extras()
    from bench.loaders import available_cores
    from bench.resume import ResumeOptions, format_resume, run_resume
    from prep.endpoint import cluster
    from prep.urls import is_remote, resolve_shards

    options = ResumeOptions(
        repeats=repeats,
        batch_size=batch_size,
        num_threads=num_threads or available_cores(),
        device=device,
        crop=crop,
        cold_shards=cold_shards,
        cold_windows=cold_windows,
        cache=cache,
    )
    with contextlib.ExitStack() as stack:
        url = stack.enter_context(cluster(endpoint, embedded_dir=embedded_dir)) if is_remote(shards) else None
        report = run_resume(options, resolve_shards(shards, endpoint=url))
    _tell(report, format_resume(report), json_path)


@bench.command()
@click.option("--num-shards", default="100,10000,1000000", show_default=True, help="Sizes of the simulated data set.")
@click.option("--window-shards", default="10,100", show_default=True, help="Shards of a shuffle window.")
@click.option("--repeats", default=3, show_default=True, type=click.IntRange(min=1), help="Processes for each pair.")
@json_option
def scale(*, num_shards: str, window_shards: str, repeats: int, json_path: Path | None) -> None:
    """Time what comes before the first sample for data sets of up to a million shards, and what a window costs.

    Reads nothing: manifests of shards that do not exist are made, 1,000 samples in each. Writes nothing but the file
    that --json names.
    """
    from bench.environment import check_extras

    check_extras()
    from bench.scale import ScaleOptions, format_scale, run_scale

    options = ScaleOptions(
        num_shards=_integers("--num-shards", num_shards),
        window_shards=_integers("--window-shards", window_shards),
        repeats=repeats,
    )
    report = run_scale(options)
    _tell(report, format_scale(report), json_path)


@bench.command()
@click.option("--samples", default=20_000, show_default=True, type=click.IntRange(min=2), help="Samples to order.")
@click.option("--num-shards", default=20, show_default=True, type=click.IntRange(min=1), help="Shards they lie in.")
@click.option("--classes", default=40, show_default=True, type=click.IntRange(min=2), help="Classes of the samples.")
@click.option("--batch-size", default=256, show_default=True, type=click.IntRange(min=1), help="Samples a batch.")
@click.option("--seeds", default=3, show_default=True, type=click.IntRange(min=1), help="Epochs to average over.")
@json_option
def shuffle(
    *, samples: int, num_shards: int, classes: int, batch_size: int, seeds: int, json_path: Path | None
) -> None:
    """Read shards that are sorted by label, shuffled by windows or by buffers; print how far from uniform it is.

    Writes its shards to a temporary directory, and nothing else but the file that --json names.
    """
    from bench.environment import check_extras

    check_extras()
    from bench.shuffle_quality import ShuffleOptions, format_shuffle, run_shuffle

    options = ShuffleOptions(
        num_samples=samples, num_shards=num_shards, num_classes=classes, batch_size=batch_size, seeds=seeds
    )
    report = run_shuffle(options)
    _tell(report, format_shuffle(report), json_path)


@bench.command()
@click.option(
    "--pets",
    required=True,
    type=click.Path(path_type=Path),
    help="A directory in the layout of Oxford-IIIT Pet; its records are repeated.",
)
@click.option("--samples", default=10_000, show_default=True, type=click.IntRange(min=1), help="Samples to pack.")
@click.option("--max-bytes", default="256MiB", show_default=True, type=size, help="Bytes a shard.")
@click.option(
    "--jobs", default=None, type=click.IntRange(min=1), help="Shards in flight.  [default: the cores, at most 16]"
)
@click.option("--repeats", default=5, show_default=True, type=click.IntRange(min=1), help="Turns of each packer.")
@click.option(
    "--cache",
    default=Path("/dev/shm"),  # noqa: S108 (a directory of our own is made there)
    show_default=True,
    type=click.Path(path_type=Path),
    help="Where the files and tar's shards are written; the own server keeps its objects there too.",
)
@click.option("--endpoint", default=None, help="AIStore's proxy, to pack to a cluster.  [default: a server of our own]")
@json_option
def pack(
    *,
    pets: Path,
    samples: int,
    max_bytes: int,
    jobs: int | None,
    repeats: int,
    cache: Path,
    endpoint: str | None,
    json_path: Path | None,
) -> None:
    """Pack the same files with `prep pack`, and with tar and curl, in turns; print speed and CPU of each.

    Makes the bucket ais://dali-pipes-bench-pack, on a server of its own or on the cluster that --endpoint names, and
    destroys it at the end. Writes nothing else but the files under --cache, and the one that --json names.
    """
    from bench.environment import check_extras

    check_extras()
    from bench.pack import PackOptions, format_pack, run_pack

    options = PackOptions(
        pets=pets,
        num_samples=samples,
        max_bytes=max_bytes,
        jobs=jobs,
        repeats=repeats,
        cache=cache,
        endpoint=endpoint,
    )
    report = run_pack(options)
    _tell(report, format_pack(report), json_path)


@bench.command()
@click.option(
    "--shards", required=True, help="What to write and read: ais://bucket/prefix, a glob of local tars, or a directory."
)
@click.option(
    "--repeats", default=6, show_default=True, type=click.IntRange(min=1), help="Turns of each writer and reader."
)
@click.option(
    "--epochs", default=2, show_default=True, type=click.IntRange(min=1), help="Epochs that are decoded in each turn."
)
@click.option("--batch-size", default=64, show_default=True, type=click.IntRange(min=1), help="Samples a batch.")
@click.option("--num-threads", default=None, type=click.IntRange(min=1), help="DALI's threads.  [default: cores]")
@click.option("--device", default="auto", show_default=True, type=click.Choice(["auto", "cpu", "gpu"]))
@click.option("--crop", default=350, show_default=True, type=click.IntRange(min=1), help="Side of the centre crop.")
@click.option("--photo", default="image.jpg", show_default=True, help="Component that holds the photo.")
@click.option("--mask", default="trimap.png", show_default=True, help="Component that holds the mask.")
@click.option(
    "--seed",
    default=7,
    show_default=True,
    type=click.IntRange(min=0),
    help="Order of our loader; the others have none.",
)
@click.option(
    "--cache",
    default=Path("/dev/shm"),  # noqa: S108 (a directory of our own is made there)
    show_default=True,
    type=click.Path(path_type=Path),
    help="Where tars and TFRecord files are written, and read from.",
)
@json_option
@cluster_options
def tfrecord(
    *,
    shards: str,
    repeats: int,
    epochs: int,
    batch_size: int,
    num_threads: int | None,
    device: "Device",
    crop: int,
    photo: str,
    mask: str,
    seed: int,
    cache: Path,
    json_path: Path | None,
    endpoint: str | None,
    embedded_dir: Path | None,
) -> None:
    """Write the same samples as tars and as TFRecord files, then read and decode them: ours, and DALI's own readers.

    Reads --shards, which must be indexed. Each reader's outputs are held against Pillow and torchvision before
    anything is timed. Writes into a directory under --cache, which is deleted at the end, and the file that --json
    names.
    """
    import contextlib

    from bench.environment import check_extras

    check_extras()
    from bench.loaders import LoaderOptions, available_cores
    from bench.tfrecord import TfrecordOptions, format_tfrecord, run_tfrecord
    from prep.endpoint import cluster
    from prep.urls import is_remote, resolve_shards

    options = TfrecordOptions(
        loaders=LoaderOptions(
            batch_size=batch_size,
            num_threads=num_threads or available_cores(),
            crop=crop,
            photo=photo,
            mask=mask,
            seed=seed,
            device=device,
        ),
        repeats=repeats,
        epochs=epochs,
        cache=cache,
    )
    with contextlib.ExitStack() as stack:
        url = stack.enter_context(cluster(endpoint, embedded_dir=embedded_dir)) if is_remote(shards) else None
        report = run_tfrecord(options, resolve_shards(shards, endpoint=url))
    _tell(report, format_tfrecord(report), json_path)


@bench.command()
@click.argument("record", type=click.Path(path_type=Path))
@click.option("--markdown", is_flag=True, help="A table for a document.")
def table(*, record: Path, markdown: bool) -> None:
    """Print the table of RECORD, a file that `bench run --json` wrote."""
    import json

    from bench.report import format_table

    try:
        shown = format_table(json.loads(record.read_text())["records"], markdown=markdown)
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as exc:
        found = f"{type(exc).__name__}: {exc}"
        raise ValueError(f"'{record}': expected a file that `bench run --json` wrote ({found})") from exc
    click.echo(shown)


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",")]


def _numbers(option: str, text: str) -> list[float]:
    try:
        return [float(word) for word in _words(text)]
    except ValueError:
        raise ValueError(f"{option} must be numbers with commas between them, got '{text}'") from None


def _integers(option: str, text: str) -> list[int]:
    try:
        return [int(word) for word in _words(text)]
    except ValueError:
        raise ValueError(f"{option} must be whole numbers with commas between them, got '{text}'") from None
