"""The commands ``pack``, ``shuffle``, ``index`` and ``embedded``: arguments in, one line about what was done out.

Only click and the standard library are imported before a command runs. Errors are raised, and told by who called.
"""

import contextlib
import importlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dali_pipes.commands.options import cluster_options, endpoint_for, format_bytes, join_options, json_option, size

if TYPE_CHECKING:
    from prep.pack.pack import PackReport
    from prep.sources.record import Source

__all__ = [
    "prep",
]


_GIVEN = click.core.ParameterSource.COMMANDLINE
# Left-out records named on the terminal; --json has all of them.
_SHOWN = 20


def pairs(context: click.Context, option: click.Parameter, texts: Sequence[str]) -> dict[str, str]:
    """``NAME=WHAT`` of an option that may be given several times."""
    pairs: dict[str, str] = {}
    for text in texts:
        name, mark, what = text.partition("=")
        if name in pairs:
            raise click.BadParameter(f"'{name}' is given twice")
        if not (name and mark and what):
            raise click.BadParameter(f"expected {option.metavar}, got '{text}'")
        pairs[name] = what
    return pairs


overwrite_option = click.option("--overwrite", is_flag=True, help="Replace other shards under the output's names.")
pack_options = join_options(
    click.option("--max-count", type=click.IntRange(min=1), default=10_000, show_default=True, help="Samples a shard."),
    click.option("--max-bytes", type=size, default="256MiB", show_default=True, help="Bytes a shard."),
    click.option(
        "--on-bad",
        type=click.Choice(["fail", "skip", "keep"]),
        default="fail",
        show_default=True,
        help="A photo in no format that DALI decodes, an empty file or one that cannot be read, a mask that is no "
        "8-bit grey PNG, damaged or of another size than its photo: fail before anything is written, skip the record, "
        "or keep it as it is, without what cannot be read. (A PNG named .jpg is packed, and noted.)",
    ),
    overwrite_option,
    click.option("--dry-run", is_flag=True, help="Check and plan, write nothing."),
    click.option(
        "--copy",
        type=click.Path(file_okay=False, path_type=Path),
        help="Keep a second copy of shards and class table in this directory, written as they are sent.  "
        "[default: none]",
    ),
    click.option(
        "--jobs",
        type=click.IntRange(min=1),
        help="Shards in flight, each written by a process of its own.  [default: the cores, at most 16]",
    ),
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
    from prep.sources.pets import download_pets, pets

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
    from prep.sources.imagefolder import imagefolder

    _pack(imagefolder(directory, show_progress=not options["as_json"]), url, **options)


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
    from prep.sources.demo_photos import demo_photos

    _pack(demo_photos(count=count, seed=seed, show_progress=not options["as_json"]), url, **options)


@pack.command("table", short_help="A CSV, JSON or Parquet list.")
@click.argument("file", type=click.Path(path_type=Path))
@click.argument("url")
@click.option(
    "--component",
    "components",
    metavar="NAME=COLUMN",
    multiple=True,
    callback=pairs,
    help="A column of paths, and the component that the files become: image.jpg=path, or image=path to keep each "
    "file's extension; may be repeated.  [default: the first column named path, image, image_path, filepath, file, "
    "file_name, filename or img, each file under its extension]",
)
@click.option(
    "--value",
    "values",
    metavar="NAME=COLUMN",
    multiple=True,
    callback=pairs,
    help="A column whose cells are written themselves: caption.txt=caption; may be repeated.  [default: none]",
)
@click.option(
    "--label",
    metavar="COLUMN",
    help="Class ids, or names of classes, which get ids from 0 in sorted order.  [default: the first column named "
    "label, class, cls, class_id, class_name, category or target]",
)
@click.option("--unlabelled", is_flag=True, help="Pack no cls.")
@click.option(
    "--key",
    metavar="COLUMN",
    help="Keys of samples.  [default: a column named key or __key__, else the path without its extension]",
)
@click.option(
    "--root",
    type=click.Path(path_type=Path),
    help="What paths in the list start from.  [default: the directory of FILE]",
)
@click.option(
    "--mask",
    "masks",
    metavar="COMPONENT",
    multiple=True,
    help="A component of class ids a pixel, which must be an 8-bit grey PNG that can be decoded, of its photo's size; "
    "may be repeated.  [default: by names, as prep verify has it]",
)
@click.option("--no-masks", is_flag=True, help="Nothing is a mask; a PNG may have any depth, colour and size.")
@pack_options
def pack_table(
    file: Path,
    url: str,
    *,
    components: dict[str, str],
    values: dict[str, str],
    label: str | None,
    unlabelled: bool,
    key: str | None,
    root: Path | None,
    masks: tuple[str, ...],
    no_masks: bool,
    **options: Any,
) -> None:
    """Pack the files that FILE lists, one sample a row, in its order, to URL.

    FILE is .csv or .tsv, whose first row names the columns, .json (a list of objects), .jsonl, .ndjson or .parquet
    (which needs pyarrow). With columns named "path" and "label" no option is needed. Of a row whose file is not there
    --on-bad says what becomes.
    """
    from prep.sources.tables import table

    if no_masks and masks:
        raise click.UsageError("--no-masks and --mask exclude each other")
    wanted: dict[str, Any] = {"components": components, "values": values, "label": label, "key": key, "root": root}
    wanted["masks"] = () if no_masks else masks or None
    _pack(table(file, has_labels=not unlabelled, **wanted), url, **options)


@pack.command("tars", short_help="Tars, into shards of another size.")
@click.argument("tars", metavar="TARS...", nargs=-1, required=True)
@click.argument("url")
@pack_options
def pack_tars(tars: tuple[str, ...], url: str, **options: Any) -> None:
    """Pack the samples of TARS into shards of another size, to URL.

    TARS is a directory, a glob, a prefix or shards with braces, local or in a bucket; .tar, or .tgz and .tar.gz, which
    are unpacked on the way. Members keep their bytes, and samples and members their order; times and owners are not
    kept. The class table beside TARS goes along. URL must be another place or prefix.
    """
    from dali_pipes.store.urls import is_remote, resolve_shards
    from prep.sources.tars import tars as read_tars

    place = next(filter(is_remote, (*tars, url)), url)
    with endpoint_for(place, options["endpoint"], options["embedded_dir"]) as answering:
        shards = resolve_shards(tars, endpoint=answering, compressed=True)
        source = read_tars(shards, jobs=options["jobs"], show_progress=not options["as_json"])
        _pack(source, url, **{**options, "endpoint": answering})


@pack.command("tfrecords", short_help="TFRecord files of tf.train.Example.")
@click.argument("files", metavar="FILES...", type=click.Path(path_type=Path), nargs=-1, required=True)
@click.argument("url")
@click.option(
    "--component",
    "components",
    metavar="NAME=FEATURE",
    multiple=True,
    callback=pairs,
    help="A feature whose bytes become a component: image.jpg=image/encoded; may be repeated.  [default: the first of "
    "image/encoded, image, image_raw, jpeg and img, named jpg, png, ... by its bytes]",
)
@click.option(
    "--value",
    "values",
    metavar="NAME=FEATURE",
    multiple=True,
    callback=pairs,
    help="A feature that is written as a value: caption.txt=image/caption; may be repeated.  [default: none]",
)
@click.option(
    "--label",
    metavar="FEATURE",
    help="Class ids, or names of classes.  [default: the first of image/class/label, label, image/label and "
    "class/label; names from image/class/text, class/text or label/text]",
)
@click.option("--unlabelled", is_flag=True, help="Pack no cls.")
@click.option(
    "--key", metavar="FEATURE", help="Keys of samples, such as image/filename.  [default: file's name/record's number]"
)
@pack_options
def pack_tfrecords(
    files: tuple[Path, ...],
    url: str,
    *,
    components: dict[str, str],
    values: dict[str, str],
    label: str | None,
    unlabelled: bool,
    key: str | None,
    **options: Any,
) -> None:
    """Pack the records of FILES, TFRecord files of tf.train.Example, to URL; photos keep their bytes.

    A directory stands for the files in it that have "tfrecord" in their names. Checksums are verified; a damaged
    record is named by file and byte, and left out with --on-bad skip. TensorFlow is not needed.
    """
    from prep.sources.tfrecords import find_tfrecords, tfrecords

    wanted: dict[str, Any] = {"components": components, "values": values, "label": label, "key": key}
    progress: dict[str, Any] = {"jobs": options["jobs"], "show_progress": not options["as_json"]}
    _pack(tfrecords(find_tfrecords(files), has_labels=not unlabelled, **wanted, **progress), url, **options)


@prep.command(short_help="Shuffle, sort or regroup shards: by dSort, or from here.")
@click.argument("urls", metavar="[URL]...", nargs=-1)
@click.option(
    "--output",
    metavar="PREFIX",
    default="shuffled-",
    show_default=True,
    help="What the output's names start with, in the same bucket or directory; ais://BUCKET/PREFIX for another.",
)
@click.option(
    "--algorithm",
    "kind",
    type=click.Choice(["shuffle", "alphanumeric", "content", "none"]),
    default="shuffle",
    show_default=True,
    help="The order: drawn from --seed, by name, by what --component holds, or as it is (new sizes only).",
)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="What the order is drawn from.")
@click.option(
    "--epoch",
    type=click.IntRange(min=0),
    help="Shuffle for this epoch: --seed and this number make the seed, and e000001- stands before the output's "
    "names.  [default: none]",
)
@click.option("--component", help="With content: the component to sort by, such as cls.  [default: none]")
@click.option(
    "--key-type",
    type=click.Choice(["int", "float", "string"]),
    default="string",
    show_default=True,
    help="With content: what that component holds.",
)
@click.option("--decreasing", is_flag=True, help="With alphanumeric and content: the last first.")
@click.option("--shard-bytes", type=size, help="Bytes of components an output shard.  [default: the input's mean]")
@click.option(
    "--extension",
    type=click.Choice([".tar", ".tgz", ".tar.gz"]),
    help="Of the output; compressed shards can be neither indexed nor trained from.  [default: the input's]",
)
@click.option(
    "--ekm",
    metavar="FILE|URL",
    help='An external key map, which names the shards: {"cats-{000..099}.tar": ["cat/1", "^cat/[2-9]"], ...}, or lines '
    "of key, tab, template. An entry is a key or a regular expression.  [default: none]",
)
@click.option(
    "--by",
    type=click.Choice(["class", "balanced", "folder", "split"]),
    help="Make such a map: class, shards of their own for each class id; balanced, the same mixture of classes in "
    "every shard; folder, by a key's first directory; split, as --splits says.  [default: none]",
)
@click.option("--splits", metavar="NAME=SHARE,...", help="With --by split: train=0.9,val=0.1.  [default: none]")
@click.option("--drop-unmapped", is_flag=True, help="With --ekm: leave out samples that it has nothing for.")
@click.option(
    "--spec",
    type=click.Path(dir_okay=False, path_type=Path),
    help="A dSort spec, JSON or YAML, as `ais start dsort -f` takes it, in place of URL and of what it says.  "
    "[default: none]",
)
@click.option(
    "--engine",
    type=click.Choice(["auto", "dsort", "client"]),
    default="auto",
    show_default=True,
    help="dsort: the cluster. client: this machine, through which all bytes pass. auto: the cluster, and this machine "
    "where that has no dSort that works.",
)
@click.option(
    "--spool-dir",
    type=click.Path(file_okay=False, path_type=Path),
    help="Where this machine puts shards together.  [default: $TMPDIR; a directory's shards beside them]",
)
@click.option("--dry-run", is_flag=True, help="Check, print the spec and the planned shards, write nothing.")
@overwrite_option
@cluster_options
@json_option
@click.pass_context
def shuffle(
    context: click.Context,
    urls: tuple[str, ...],
    *,
    output: str,
    kind: str,
    seed: int,
    epoch: int | None,
    component: str | None,
    key_type: str,
    decreasing: bool,
    shard_bytes: int | None,
    extension: str | None,
    ekm: str | None,
    by: str | None,
    splits: str | None,
    drop_unmapped: bool,
    spec: Path | None,
    engine: Any,
    spool_dir: Path | None,
    dry_run: bool,
    overwrite: bool,
    endpoint: str | None,
    embedded_dir: Path | None,
    as_json: bool,
) -> None:
    """Write the samples of the shards at URL to new shards, in another order.

    URL is ais://BUCKET/PREFIX, ais://BUCKET/PREFIX{000000..000009}.tar or a DIRECTORY; .tar, .tgz or .tar.gz. The
    input is kept; both sides are read and compared. Written are PREFIX000000.tar, ... under --output, and a copy of the
    class table; what described other shards of these names is deleted. From this machine a run that was interrupted is
    finished by running it again.

    The same seed gives the same shards, from here and on the embedded node; on a cluster of several targets the order
    depends on their timing too.
    """
    from dali_pipes.store.shard_names import extension_of
    from dali_pipes.store.urls import is_remote, open_store, resolve_shards
    from prep.shuffle.input import epoch_prefix, epoch_seed, load_key_map
    from prep.shuffle.key_map import Grouping
    from prep.shuffle.order import Algorithm
    from prep.shuffle.shuffle import shuffle as shuffle_shards
    from prep.shuffle.shuffle import shuffle_spec

    common: dict[str, Any] = {
        "drop_unmapped": drop_unmapped,
        "engine": engine,
        "overwrite": overwrite,
        "dry_run": dry_run,
        "spool_dir": spool_dir,
        "show_progress": not as_json,
    }
    if spec is not None:
        from prep.shuffle.dsort_spec import read_spec

        _refuse_beside_spec(context, urls)
        parsed = read_spec(spec)
        with endpoint_for(f"ais://{parsed.source.name}", endpoint, embedded_dir) as answering:
            assert answering is not None
            report = shuffle_spec(parsed, endpoint=answering, **common)
    else:
        if not urls:
            raise click.UsageError("Missing argument 'URL...', or --spec FILE.")
        if ekm and by:
            raise click.UsageError("--ekm and --by are two ways to say which shards samples go to; give one.")
        if epoch is not None and (ekm or kind != "shuffle"):
            what = "--ekm, which names the shards" if ekm else f"--algorithm {kind}, which draws nothing"
            raise click.UsageError(
                f"--epoch makes other names, and a seed, for each epoch: it does not go with {what}."
            )
        if ekm and not is_remote(output) and context.get_parameter_source("output") is _GIVEN:
            raise click.UsageError("--ekm names the shards; drop --output.")
        algorithm = Algorithm(
            kind=kind,
            seed=seed if epoch is None else epoch_seed(seed, epoch),
            decreasing=decreasing,
            component=component or "",
            key_type=key_type,
        )
        grouping = Grouping(by=by, shares=_parse_shares(splits)) if by else None
        if splits and not by:
            raise click.UsageError("--splits goes with --by split.")
        remote = next((url for url in (*urls, output, ekm or "") if is_remote(url)), "")
        with endpoint_for(remote, endpoint, embedded_dir) as answering:
            shards = resolve_shards(urls, endpoint=answering, compressed=True)
            target, prefix = open_store(output, endpoint=answering) if is_remote(output) else (None, output)
            key_map = None
            if ekm:
                ending = extension or extension_of(shards.names[0])
                key_map = load_key_map(ekm, endpoint=answering, extension=ending)
            report = shuffle_shards(
                shards,
                output_prefix=prefix if epoch is None else epoch_prefix(prefix, epoch),
                target=target,
                seed=algorithm.seed,
                algorithm=algorithm,
                shard_bytes=shard_bytes,
                mapped=key_map or grouping,
                extension=extension,
                **common,
            )
    if dry_run and not as_json:
        if report.spec is not None:
            click.echo(json.dumps(report.spec, indent=2))
        for shard in report.planned:
            click.echo(
                f"{shard['name']}: {counted(shard['num_samples'], 'sample')}, {format_bytes(shard['num_bytes'])}"
            )
    there = len(report.shards) - report.num_written
    notes = [
        *([f"{there} of the shards were there already"] if there and not dry_run else []),
        *([f"left out {counted(report.num_dropped, 'sample')} that the key map lacks"] if report.num_dropped else []),
    ]
    tell(
        f"{'would shuffle' if dry_run else 'shuffled'} {counted(report.num_input_shards, 'shard')} into "
        f"{counted(len(report.shards), 'shard')}, {counted(report.num_samples, 'sample')}, "
        f"{format_bytes(report.num_bytes)} in {report.elapsed_s:.1f} s"
        f"{'' if dry_run else ', verified'}{' (' + ', '.join(notes) + ')' if notes else ''}"
        f" -> {_shuffled_span(report.url, report.shards)}",
        {
            "url": report.url,
            "shards": report.shards,
            "num_input_shards": report.num_input_shards,
            "num_samples": report.num_samples,
            "num_dropped": report.num_dropped,
            "num_bytes": report.num_bytes,
            "num_written": report.num_written,
            "engine": report.engine,
            "dry_run": report.dry_run,
            "planned": report.planned,
            "spec": report.spec,
            "elapsed_s": report.elapsed_s,
        },
        as_json=as_json,
    )


def _refuse_beside_spec(context: click.Context, urls: Sequence[str]) -> None:
    """A spec says what goes in, what comes out and in which order."""
    said = [
        *("output", "kind", "seed", "epoch", "component", "key_type", "decreasing", "shard_bytes", "extension"),
        *("ekm", "by", "splits"),
    ]
    given = [name for name in said if context.get_parameter_source(name) is _GIVEN]
    if urls or given:
        options = {parameter.name: parameter.opts[0] for parameter in context.command.params}
        found = [*(["URL"] if urls else []), *(options[name] for name in given)]
        raise click.UsageError(f"--spec says it all; drop {', '.join(found)}, or write it into the spec.")


def _parse_shares(text: str | None) -> dict[str, float]:
    """``train=0.9,val=0.1`` as a table."""
    shares: dict[str, float] = {}
    for part in (text or "").split(",") if text else ():
        name, equals, share = part.partition("=")
        try:
            value = float(share) if equals and name.strip() not in shares else -1.0
        except ValueError:
            value = -1.0
        if value < 0:
            raise click.UsageError(f"--splits are names and shares, train=0.9,val=0.1, got '{text}'.")
        shares[name.strip()] = value
    return shares


def _shuffled_span(url: str, shards: Sequence[str]) -> str:
    """``ais://pets/shuffled-{000000..000003}.tar``, or the number of sets where a map made several."""
    stems = {re.sub(r"[0-9]+\.(tar|tgz|tar\.gz)$", "", shard) for shard in shards}
    if len(stems) != 1 or not shards[0].endswith(".tar") or not url.endswith(min(stems)):
        return f"{url}... ({counted(len(stems), 'set')}, '{shards[0]}' to '{shards[-1]}')"
    return shard_span(url, shards)


@prep.command(short_help="Locate every component of every sample.")
@click.argument("urls", metavar="URL...", nargs=-1, required=True)
@click.option(
    "--etl",
    metavar="NAME",
    help="Index the shards as this running ETL of the cluster gives them, for loader(..., etl=NAME).  "
    "[default: as they are stored]",
)
@cluster_options
@json_option
def index(
    urls: tuple[str, ...], *, etl: str | None, endpoint: str | None, embedded_dir: Path | None, as_json: bool
) -> None:
    """Index the shards at URL: where each component of each sample lies, and what its header says.

    URL is ais://BUCKET/PREFIX, DIRECTORY[/PREFIX], a glob of local tars, or shards with braces. Each shard is read
    once. Written are a shard index beside each shard and, beside them all, one column file (keys and labels of all
    samples, to choose by) and, last, one manifest. With --etl each shard is read through the ETL, and these files carry
    its name: they lie beside those of the shards as they are stored.
    """
    import time

    from dali_pipes.formats.names import manifest_name
    from dali_pipes.store.etl import through_etl
    from dali_pipes.store.urls import is_remote, resolve_shards
    from prep.index import index_shards

    started = time.perf_counter()
    if etl is not None and endpoint is None and is_remote(urls[0]):
        raise click.UsageError("--etl NAME needs --endpoint; an embedded node's ETLs end with it.")
    with endpoint_for(urls[0], endpoint, embedded_dir) as answering:
        shards = resolve_shards(urls, endpoint=answering)
        if etl is not None:
            shards = through_etl(shards, etl)
        manifest = index_shards(shards, show_progress=not as_json)
    elapsed_s = time.perf_counter() - started
    where = shards.store.locate(manifest_name(shards.prefix))
    tell(
        f"indexed {counted(manifest.num_shards, 'shard')}, {counted(manifest.num_samples, 'sample')}, "
        f"{format_bytes(manifest.total_bytes)} in {elapsed_s:.1f} s -> {where}",
        {
            "manifest": where,
            "digest": manifest.digest,
            "num_shards": manifest.num_shards,
            "num_samples": manifest.num_samples,
            "num_bytes": manifest.total_bytes,
            "etl": etl,
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
@click.option("--allow-etl", is_flag=True, help="Let whoever reaches the port run transforms as you: see prep etl.")
@json_option
def embedded(directory: Path, port: int, *, allow_etl: bool, as_json: bool) -> None:
    """Run the embedded AIStore-compatible node on loopback, in the foreground; its endpoint is printed.

    For first runs, tests and laptops: past one machine a real cluster takes its place. Ctrl-C ends it.
    """
    from prep.embedded.server import serve_forever

    def announce(endpoint: str) -> None:
        tell(endpoint, {"endpoint": endpoint, "dir": str(directory)}, as_json=as_json)

    with contextlib.suppress(KeyboardInterrupt):
        serve_forever(directory, port=port, allow_etl=allow_etl or None, announce=announce)


def _pack(
    source: "Source",
    url: str,
    *,
    max_count: int,
    max_bytes: int,
    on_bad: Any,
    overwrite: bool,
    dry_run: bool,
    copy: Path | None,
    jobs: int | None,
    endpoint: str | None,
    embedded_dir: Path | None,
    as_json: bool,
) -> None:
    from prep.pack.pack import open_target
    from prep.pack.pack import pack as pack_records

    with endpoint_for(url, endpoint, embedded_dir) as answering:
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
            copy=copy,
            jobs=jobs,
            show_progress=not as_json,
        )
    name_all("skipped", report.skipped)
    name_all("kept as it is", report.kept)
    name_all("noted", report.noted)
    tell(
        _pack_line(report),
        {
            "url": report.url,
            "shards": report.shards,
            "num_written": report.num_written,
            "copy": report.copy,
            "num_copied": report.num_copied,
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
        *([f"copied {report.num_copied} to '{report.copy}'"] if report.copy and not report.dry_run else []),
        *([f"skipped {len(report.skipped)}"] if report.skipped else []),
        *([f"kept {len(report.kept)} bad ones"] if report.kept else []),
    ]
    return (
        f"{'would write' if report.dry_run else 'wrote'} {counted(len(report.shards), 'shard')}, "
        f"{counted(report.num_samples, 'sample')}, {format_bytes(report.num_bytes)} in {report.elapsed_s:.1f} s"
        f"{' (' + ', '.join(notes) + ')' if notes else ''} -> {shard_span(report.url, report.shards)}"
    )


def tell(line: str, result: dict[str, Any], *, as_json: bool) -> None:
    click.echo(json.dumps(result) if as_json else line)


def name_all(what: str, lines: Sequence[str]) -> None:
    for line in lines[:_SHOWN]:
        click.echo(f"{what}: {line}", err=True)
    if len(lines) > _SHOWN:
        click.echo(f"{what}: {len(lines) - _SHOWN} more, --json names all", err=True)


def counted(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def shard_span(url: str, shards: Sequence[str]) -> str:
    """``ais://pets/samples-{000000..000003}.tar``."""
    numbers = [re.findall(r"[0-9]+", shard)[-1] for shard in (shards[0], shards[-1])]
    return f"{url}{numbers[0]}.tar" if len(shards) == 1 else f"{url}{{{numbers[0]}..{numbers[1]}}}.tar"


# verify, info and view, and export: they take their options from here.
importlib.import_module("prep.commands.inspect")


importlib.import_module("prep.commands.export")


# transform and etl: the same.
importlib.import_module("prep.commands.etl")
