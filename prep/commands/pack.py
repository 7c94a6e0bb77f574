"""``dali-pipes prep pack``: a command for each kind of source."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dali_pipes.commands.options import (
    cluster_options,
    endpoint_for,
    format_bytes,
    join_options,
    json_option,
    size,
)
from dali_pipes.commands.output import counted, fields_of, print_note, print_reasons, print_result, print_some
from prep.commands.options import (
    chosen_masks,
    dry_run_option,
    jobs_option,
    mask_options,
    max_bad_option,
    max_pixels_option,
    no_part_option,
    of_part,
    on_option,
    overwrite_option,
    pairs_option,
    part_option,
    recode_options,
    recoded_text,
    shard_span,
    take_recoding,
    there_already,
)

if TYPE_CHECKING:
    from dali_pipes.store.base import Store
    from prep.pack.pack import PackReport
    from prep.sources.record import Source
    from prep.sources.tables import Fields


packing_options = join_options(
    click.option(
        "--max-count", type=click.IntRange(min=1), default=10_000, show_default=True, help="Samples per shard."
    ),
    click.option("--max-bytes", type=size, default="256MiB", show_default=True, help="Bytes per shard."),
    click.option(
        "--on-bad",
        type=click.Choice(["fail", "skip", "keep"]),
        default="fail",
        show_default=True,
        help="What happens to a bad record: one with a photo that loaders refuse, with a file that is "
        "empty, missing or unreadable, or with a mask that is damaged, is not an 8-bit grey PNG, or has another size "
        "than its photo. fail: stop before anything is written. skip: leave the record out. keep: pack the record "
        "as it is, without the files that cannot be read. (A PNG named .jpg is packed, and noted.)",
    ),
    max_bad_option(
        default="10%",
        help="The most records and pictures that may be left out, as a number or a share. If there are more, nothing "
        "is written.",
    ),
    max_pixels_option,
    dry_run_option,
    recode_options,
    jobs_option("Shards in flight, each written by a process of its own"),
    cluster_options,
    json_option,
)
"""Options of all commands that pack records."""
pack_options = join_options(
    overwrite_option("other shards under the output's names"),
    click.option(
        "--copy",
        type=click.Path(file_okay=False, path_type=Path),
        help="Keep a second copy of the shards and the class table in this directory; it is written while they are "
        "sent.  [default: none]",
    ),
    packing_options,
)
_spread_options = join_options(
    part_option("all records are checked for the plan, and every N-th shard is written"), on_option
)


def take_fields(options: dict[str, Any], *, needs_labels: bool = False) -> "Fields":
    """Take the values of `field_options` and `mask_options`, and ``--root``, out of a command's options."""
    from prep.sources.tables import Fields

    is_unlabelled = options.pop("unlabelled")
    return Fields(
        **{name: options.pop(name) for name in ("components", "values", "label", "key")},
        has_labels=False if is_unlabelled else needs_labels or None,
        masks=chosen_masks(options.pop("masks"), no_masks=options.pop("no_masks")),
        root=options.pop("root", None),
    )


field_options = join_options(
    pairs_option(
        "--component",
        "components",
        metavar="NAME=COLUMN",
        help="A column, and the component that it becomes: image.jpg=path, or image=path to keep each photo's "
        "extension; may be repeated. For .txt, .json and .npy the cells are the contents, if they are not paths with "
        "this extension: caption.txt=caption, boxes.json=boxes. A photo that is not named is taken too.  [default: "
        "the only column with photos, else the first named path, image, image_path, filepath, file, file_name, "
        "filename or img]",
    ),
    pairs_option(
        "--value",
        "values",
        metavar="NAME=COLUMN",
        help="A column of contents, whatever they end in, encoded by NAME's extension: caption.txt=caption; may be "
        "repeated.  [default: none]",
    ),
    click.option(
        "--label",
        metavar="COLUMN",
        help="Class ids, or names of classes; names get ids from 0 in sorted order, if the file does not number them.  "
        "[default: the first column named label, class, cls, class_id, class_name, category or target]",
    ),
    click.option("--unlabelled", is_flag=True, help="Pack no cls."),
    click.option(
        "--key",
        metavar="COLUMN",
        help="Keys of samples.  [default: a column named key or __key__, else the path without its extension, or the "
        "Parquet file's name and the row's number]",
    ),
    mask_options,
)
root_option = click.option(
    "--root",
    type=click.Path(path_type=Path),
    help="The directory that paths in a table start from.  [default: the directory of the table]",
)


_of_directory = join_options(
    click.argument("directory", type=click.Path(path_type=Path)), click.argument("url"), _spread_options, pack_options
)


@click.group()
def pack() -> None:
    """Pack photos, masks and labels into WebDataset shards; files keep their bytes, unless photos are to be resized.

    URL is the output: ais://BUCKET[/PREFIX] or DIRECTORY[/PREFIX]. If its last part ends in "-" or "_", the shards'
    names start with it; any other is a folder, in which names start with "samples-". A missing bucket is created.

    The command writes PREFIX000000.tar, PREFIX000001.tar, ... and, in the folder .dali-pipes, a class table. Run an
    interrupted pack again to finish it: shards that are already complete are not written again.
    """


@pack.command("pets", short_help="A directory in the layout of Oxford-IIIT Pet.")
@click.argument("directory", type=click.Path(path_type=Path))
@click.argument("url")
@click.option("--download", is_flag=True, help="Download the data set (800 MB) into DIRECTORY first, by torchvision.")
@_spread_options
@pack_options
def pack_pets(directory: Path, url: str, *, download: bool, **options: Any) -> None:
    """Pack DIRECTORY, laid out as the Oxford-IIIT Pet data set, to URL.

    The command reads images/*.jpg, annotations/trimaps/*.png and annotations/list.txt. A sample has image.jpg,
    trimap.png and cls, the class id of the list, from 1. A record with a missing part is skipped and named.
    """
    from prep.sources.folders import download_pets, pets

    if download:
        download_pets(directory)
    _pack(pets(directory), url, **options)


@pack.command("coco", short_help="A directory in the layout of COCO: photos with boxes.")
@_of_directory
def pack_coco(directory: Path, url: str, **options: Any) -> None:
    """Pack the photos and boxes of DIRECTORY, laid out as COCO, to URL.

    The command reads annotations/instances_*.json, or _annotations.coco.json beside the photos. A sample has the
    photo and boxes.json, which dali_pipes.detection reads; classes keep COCO's ids. Photos that no file lists are left
    out and named. A photo that is missing, or has a box that does not lie on it, is broken: see --on-bad.
    """
    from prep.sources.coco import coco

    _pack(coco(directory), url, **options)


@pack.command("yolo", short_help="A directory in the layout of YOLO: photos with boxes.")
@_of_directory
def pack_yolo(directory: Path, url: str, **options: Any) -> None:
    """Pack the photos and boxes of DIRECTORY, laid out as YOLO, to URL.

    The command reads images/, labels/*.txt and the names of data.yaml. A sample has the photo and boxes.json, which
    dali_pipes.detection reads, with boxes in pixels of the upright photo. A photo without a label file has no boxes. A
    polygon becomes the box around it. A record with a line of another form is broken: see --on-bad.
    """
    from prep.sources.yolo import yolo

    _pack(yolo(directory), url, **options)


@pack.command("voc", short_help="A directory in the layout of Pascal VOC: photos with boxes and masks.")
@_of_directory
def pack_voc(directory: Path, url: str, **options: Any) -> None:
    """Pack the photos, boxes and masks of DIRECTORY, laid out as Pascal VOC, to URL.

    The command reads JPEGImages/, Annotations/*.xml, ImageSets/Main/ and SegmentationClass/; or photos with XML files
    beside them. A sample has the photo and boxes.json, which dali_pipes.detection reads, and mask.png if there is one:
    grey, with a class id for each pixel. Class ids are VOC's, from 1. A record with a broken XML file, or one for a
    photo of another size, is broken: see --on-bad.
    """
    from prep.sources.voc import voc

    _pack(voc(directory), url, **options)


@pack.command("imagefolder", short_help="A directory with a folder for each class.")
@_of_directory
def pack_imagefolder(directory: Path, url: str, **options: Any) -> None:
    """Pack DIRECTORY, which has one folder of photos for each class, to URL.

    DIRECTORY/cat/001.JPG becomes key "cat/001" with the components jpg and cls; class ids number the sorted folders
    that have photos from 0. Files named .jpeg become jpg, too. Two photos of one key, a.jpg and a.gif, are a bad
    record: see --on-bad. Files that are not photos are left out and named. Links are followed; one that leads to a
    folder found elsewhere as well is an error.
    """
    from prep.sources.folders import imagefolder

    _pack(imagefolder(directory, show_progress=not options["as_json"]), url, **options)


@pack.command("photos", short_help="A directory of photos without classes.")
@_of_directory
def pack_photos(directory: Path, url: str, **options: Any) -> None:
    """Pack the photos in DIRECTORY, and in all folders below it, to URL.

    DIRECTORY/2019/001.JPEG becomes key "2019/001" with the component jpg; there is no cls. Files that are not photos
    are left out and named. Links are followed, as by imagefolder.
    """
    from prep.sources.folders import photo_folder

    _pack(photo_folder(directory), url, **options)


@pack.command("demo", short_help="Photos from scikit-image; no download.")
@click.argument("url")
@click.option("--count", type=click.IntRange(min=8), default=300, show_default=True, help="Photos to cut.")
@click.option("--seed", type=int, default=0, show_default=True, help="The same seed gives the same bytes.")
@_spread_options
@pack_options
def pack_demo(url: str, *, count: int, seed: int, **options: Any) -> None:
    """Pack photos cut from the photographs inside scikit-image, with masks, to URL; nothing is downloaded.

    A sample has image.jpg, with sides of 150 to 1,000 pixels, trimap.png with the values 1, 2 and 3, and cls, the
    number of the photograph, from 1.
    """
    from prep.sources.demo_photos import demo_photos

    _pack(demo_photos(count=count, seed=seed, show_progress=not options["as_json"]), url, **options)


@pack.command("table", short_help="A CSV, JSON or Parquet list.")
@click.argument("file", type=click.Path(path_type=Path))
@click.argument("url")
@field_options
@root_option
@_spread_options
@pack_options
def pack_table(file: Path, url: str, **options: Any) -> None:
    """Pack the files that FILE lists to URL, one sample a row, in the list's order.

    FILE is .csv or .tsv, whose first row names the columns, .json (a list of objects), .jsonl, .ndjson or .parquet
    (which needs pyarrow). If the columns are named "path" and "label", no option is needed. --on-bad decides what
    happens to rows whose file is missing.
    """
    from prep.sources.tables import table

    fields = take_fields(options, needs_labels=True)
    _pack(table(file, fields), url, **options)


@pack.command("hf", short_help="Hugging Face's Parquet files, with photos in them.")
@click.argument("files", metavar="FILES...", type=click.Path(path_type=Path), nargs=-1, required=True)
@click.argument("url")
@field_options
@_spread_options
@pack_options
def pack_hf(files: tuple[Path, ...], url: str, **options: Any) -> None:
    """Pack the rows of FILES, Parquet files with photos in them, to URL; photos keep their bytes.

    FILES are as Hugging Face's datasets writes them: a column of photos has bytes, or a path. A directory stands for
    all .parquet files in it and below it. If the files are of several splits (train-..., test-...), keys begin with
    the split's name: prep shuffle --by folder separates them. This needs pyarrow.
    """
    from prep.sources.hf import find_parquet, hf

    fields = take_fields(options)
    source = hf(find_parquet(files), fields, jobs=options["jobs"], show_progress=not options["as_json"])
    _pack(source, url, **options)


@pack.command("tars", short_help="Tars, into shards of another size.")
@click.argument("tars", metavar="TARS...", nargs=-1, required=True)
@click.argument("url")
@_spread_options
@pack_options
def pack_tars(tars: tuple[str, ...], url: str, **options: Any) -> None:
    """Pack the samples of TARS into shards of another size, to URL.

    TARS is a directory, a glob, a prefix or shards with braces, local or in a bucket. The names end in .tar, .tgz or
    .tar.gz; compressed tars are unpacked while they are read. Members keep their bytes, and samples and members keep
    their order; times and owners are not kept. The class table beside TARS is copied. URL must be another place or
    prefix.
    """
    pack_shards(tars, url, **options)


def pack_shards(tars: tuple[str, ...], url: str, **options: Any) -> None:
    """Pack the samples of tars to a URL and print the report."""
    from dali_pipes.data_set.named import list_shards
    from prep.sources.tars import tars as read_tars

    with endpoint_for(tars, options["endpoint"], options["embedded_dir"], writes=[url]) as answering:
        shards = list_shards(tars, endpoint=answering, compressed=True)
        source = read_tars(shards, jobs=options["jobs"], show_progress=not options["as_json"])
        _pack(source, url, **{**options, "endpoint": answering})


def _pack(
    source: "Source", url: str, *, endpoint: str | None, embedded_dir: Path | None, as_json: bool, **options: Any
) -> None:
    """Pack a source to a URL and print the report."""
    from prep.pack.pack import open_target
    from prep.part import ALL

    with endpoint_for((), endpoint, embedded_dir, writes=[url]) as answering:
        store, prefix = open_target(url, endpoint=answering)
        report = pack_to(source, store, prefix, show_progress=not as_json, **options)
    line = of_part(lambda: pack_summary(report), options.get("part", ALL), report.url, report.shards)
    print_result(line, pack_document(report, source), as_json=as_json)


def pack_to(source: "Source", store: "Store", prefix: str, **options: Any) -> "PackReport":
    """Pack a source under a prefix, with the values of `pack_options`, and print what was left out or noted."""
    from prep.pack.pack import PackJob
    from prep.pack.pack import pack as pack_records

    report = pack_records(source, PackJob(store=store, prefix=prefix, recode=take_recoding(options), **options))
    print_packed(report, source)
    return report


def print_packed(report: "PackReport", source: "Source") -> None:
    """Print what was left out or noted."""
    from prep.left_out import count_reasons

    print_some("skipped", report.skipped)
    print_reasons("left out", report.reasons)
    print_reasons("no pictures", count_reasons(report.others))
    print_some("kept as it is", report.kept)
    print_some("noted", report.noted)
    if source.unused:
        print_note(f"columns not packed: {', '.join(source.unused)}; to take one: --component NAME=COLUMN")
    print_some("recoded", [recoded_text(step) for step in report.recoded[len(source.steps) :]])


def pack_document(report: "PackReport", source: "Source") -> dict[str, Any]:
    """A report as part of a JSON document."""
    classes = {str(label): report.classes[label] for label in sorted(report.classes)}
    recoded = list(map(asdict, report.recoded))
    return fields_of(report) | {"classes": classes, "unused": list(source.unused), "recoded": recoded}


def pack_summary(report: "PackReport") -> str:
    """A report in one line."""
    notes = []
    if not report.dry_run:
        notes += there_already(len(report.shards) - report.num_written, "shards")
        notes += [f"copied {report.num_copied} to '{report.copy}'"] if report.copy else []
    notes += [f"left out {len(report.skipped)}"] if report.skipped else []
    notes += [f"kept {len(report.kept)} bad ones"] if report.kept else []
    return (
        f"{'would write' if report.dry_run else 'wrote'} {counted(len(report.shards), 'shard')}, "
        f"{counted(report.num_samples, 'sample')}, {format_bytes(report.num_bytes)} in {report.elapsed_s:.1f} s"
        f"{' (' + ', '.join(notes) + ')' if notes else ''} -> {shard_span(report.url, report.shards)}"
    )


@click.command()
@click.argument("urls", metavar="URL...", nargs=-1, required=True)
@click.argument("out")
@no_part_option("each part would recode all photos, to learn their sizes")
@pack_options
def recode(urls: tuple[str, ...], out: str, **options: Any) -> None:
    """Resize, optimize or convert the photos of the shards at URL, and pack them to OUT.

    URL is ais://BUCKET/PREFIX, DIRECTORY[/PREFIX], a glob of local tars, or shards with braces; OUT is as for pack, and
    another place or prefix. Samples keep their keys, order and other components; shards are filled anew, up to
    --max-count and --max-bytes. Give at least one of --short-side, --max-side, --optimize and --convert.

    It is "prep pack tars" with these options. Index the new shards afterwards.
    """
    if not any(options[name] for name in ("short_side", "max_side", "optimize", "convert")):
        raise click.UsageError("nothing to do; give --short-side, --max-side, --optimize or --convert")
    pack_shards(urls, out, **options)
