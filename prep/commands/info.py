"""``dali-pipes prep info``."""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dali_pipes.commands.options import cluster_options, endpoint_for, format_bytes, json_option, size
from dali_pipes.commands.output import counted, print_line, print_result
from dali_pipes.errors import printable, shown
from prep.commands.options import no_part_option, on_option, recoded_text, seed_option, urls_argument

if TYPE_CHECKING:
    from dali_pipes.order.inputs import Buckets
    from prep.inspect.info import BucketsInfo, PhotoInfo, SetInfo

# Characters of the longest bar of a histogram.
_BAR = 40
# Characters of a class's name; longer names are cut.
_NAME = 60
# Classes that a terminal shows; --json has all of them.
_CLASSES = 12


@click.command()
@urls_argument
@click.option(
    "--headers",
    "num_headers",
    default=2000,
    show_default=True,
    type=click.IntRange(min=0),
    help="Photos of each component whose headers are read; 0: all.",
)
@click.option(
    "--pixels",
    "num_pixels",
    default=256,
    show_default=True,
    type=click.IntRange(min=0),
    help="Photos of each component that are decoded for mean and deviation; 0: none.",
)
@click.option(
    "--buckets",
    metavar="area=N,step=N,max_aspect=X",
    callback=lambda context, option, text: None if text is None else parse_buckets(text),
    help="Say what aspect-ratio buckets make of the photos; as of dali_pipes.buckets, also photo=NAME. area may be a "
    "product, 256*256.",
)
@click.option(
    "--batch-size",
    default=256,
    show_default=True,
    type=click.IntRange(min=1),
    help="With --buckets: samples of one step of all ranks.",
)
@click.option("--window-bytes", type=size, help="Window of the shuffle, with --buckets; all shards by default.")
@seed_option("the random choice of photos")
@on_option
@no_part_option("it reads little; run it once")
@cluster_options
@json_option
def info(
    urls: tuple[str, ...],
    *,
    endpoint: str | None,
    embedded_dir: Path | None,
    as_json: bool,
    buckets: "Buckets | None",
    batch_size: int,
    window_bytes: int | None,
    **options: Any,
) -> None:
    """Describe the shards at URL: samples, classes, photos' sizes and formats, their pixels' mean and deviation.

    URL is as for verify. The command reads the manifest, the shard indexes, and the needed parts of --headers and
    --pixels photos; shards that are not indexed are read in full. It writes nothing.

    It also says which shards the manifest lists and the store lacks, and which ones lie beside them and are in no
    manifest. The exit code is 1 if shards are missing, otherwise 0.

    Mean and deviation are of values from 0 to 1, with the same weight for each photo. "JPEG engine" is the share of
    photos that NVIDIA's hardware decoder takes (baseline, 8 bits, one scan, gray or 4:4:4, 4:2:2, 4:2:0, 4:4:0).

    With --buckets it also says for each bucket how many samples it has, the mean share of a photo's pixels that is cut
    off (it would be padding if photos were fitted in), and the samples of the short last steps of all windows, which
    DROP leaves out, with those that FILL repeats to fill these steps.
    """
    from dali_pipes.data_set.named import compare_shards
    from prep.inspect.info import describe_buckets, describe_set

    with endpoint_for(urls, endpoint, embedded_dir) as answering:
        compared = compare_shards(urls, endpoint=answering)
        found = describe_set(compared.present, show_progress=not as_json, **options)
        if buckets is not None:
            found.buckets = describe_buckets(
                compared.present, buckets, global_batch_size=batch_size, window_bytes=window_bytes
            )
    found.missing, found.beyond = compared.missing, compared.beyond
    if as_json:
        print_result("", asdict(found), as_json=True)
    else:
        _print_set(found)
    click.get_current_context().exit(1 if found.missing else 0)


def parse_buckets(text: str) -> "Buckets":
    """Read ``area=256*256,step=32,max_aspect=2,photo=jpg``.

    Raises:
        click.BadParameter: If a name is unknown, or a value impossible.
    """
    from dali_pipes.order.inputs import buckets

    kinds: dict[str, Callable[[str], Any]] = {
        "area": lambda product: math.prod(map(int, product.split("*"))),
        "step": int,
        "max_aspect": float,
        "photo": str,
    }
    values: dict[str, Any] = {}
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        if name not in kinds or not value:
            raise click.BadParameter(f"expected NAME=VALUE with one of {', '.join(kinds)}, got '{printable(part)}'")
        try:
            values[name] = kinds[name](value)
        except ValueError as exc:
            raise click.BadParameter(f"{name} must be a number, got '{printable(value)}'") from exc
    if "area" not in values:
        raise click.BadParameter("area is missing; for instance area=256*256,step=32,max_aspect=2")
    try:
        return buckets(**values)
    except ValueError as exc:
        raise click.BadParameter(str(exc)) from exc


def _print_set(found: "SetInfo") -> None:
    print_line(
        f"{found.url}: {counted(found.num_shards, 'shard')}, {counted(found.num_samples, 'sample')}, "
        f"{format_bytes(found.num_bytes)}{'' if found.is_indexed else ' (not indexed: read in full)'}"
    )
    for what, names, colour in (
        ("missing, which should be there", found.missing, "red"),
        ("there that the manifest does not list", found.beyond, "yellow"),
    ):
        if names:
            print_line(f"  {counted(len(names), 'shard')} {what}: {shown(names)}", fg=colour)
    for component, number in found.components.items():
        some = "" if number == found.num_samples else f", {found.num_samples - number} samples lack it"
        print_line(f"  {component}: {number}, {format_bytes(found.component_bytes[component])}{some}")
    for step in found.recoded:
        print_line(f"  photos when they were packed: {recoded_text(step)}")
    if found.class_counts:
        _print_classes(found)
    for component, photo in found.photos.items():
        _print_photos(component, photo)
    if found.buckets is not None:
        _print_buckets(found.buckets)


def _print_classes(found: "SetInfo") -> None:
    counts = found.class_counts
    if not any(counts.values()):
        names = [printable(found.classes.get(label, ""), max_chars=_NAME) for label in counts]
        print_line(f"\n{len(counts)} classes, but no sample has a class id (boxes may have them): {shown(names)}")
        return
    largest = sorted(counts, key=lambda label: -counts[label])
    print_line("")
    print_line(f"{len(counts)} classes of {counts[largest[-1]]} to {counts[largest[0]]} samples", bold=True)
    names = [f"{label} {printable(found.classes.get(label, ''), max_chars=_NAME)}" for label in largest[:_CLASSES]]
    _print_bars(names, [counts[label] for label in largest[:_CLASSES]])
    if len(largest) > _CLASSES:
        print_line(f"  and {len(largest) - _CLASSES} more, --json has all")


def _print_photos(component: str, photo: "PhotoInfo") -> None:
    number = counted(photo.num_photos, "mask" if photo.is_mask else "photo")
    print_line("")
    print_line(f"{component}: {number} ({_listed(photo.formats)})", bold=True)
    for what, values in (("height", photo.height), ("width", photo.width), ("bytes", photo.num_bytes)):
        if values is not None:
            print_line(
                f"  {what:7} {values.least} to {values.greatest}, median {values.median}, "
                f"nine of ten from {values.percentile_5} to {values.percentile_95}"
            )
    if photo.num_turned:
        print_line(f"  turned: {photo.num_turned} by their EXIF orientation; graphs give them upright, as counted here")
    if photo.short_side is not None:
        print_line("  shorter side, pixels")
        ranges = [f"  {low} to {high - 1}" for low, high in itertools.pairwise(photo.short_side.edges)]
        _print_bars(ranges, photo.short_side.counts)
    share = "" if photo.num_headers == photo.num_photos else f", of {photo.num_headers} looked at"
    print_line(f"  {_listed(photo.kinds)}{share}")
    if photo.num_headers and not photo.is_mask:
        part = photo.num_for_hardware / photo.num_headers
        print_line(f"  JPEG engine: takes {part:.1%} ({photo.num_for_hardware} of {photo.num_headers})")
    if (pixels := photo.pixels) is not None:
        mean, std = (", ".join(f"{value:.4f}" for value in values) for values in (pixels.mean, pixels.std))
        moments = f"mean {mean}; std {std}; " if pixels.num_photos else ""
        bad = f"{pixels.num_undecodable} cannot be decoded, see prep verify" if pixels.num_undecodable else ""
        print_line(f"  pixels of {pixels.num_photos}: {moments}{bad}".removesuffix("; "))


def _print_buckets(found: "BucketsInfo") -> None:
    print_line("")
    print_line(
        f"{printable(found.photo)}: {counted(len(found.buckets), 'bucket')}, steps of {found.global_batch_size}, "
        f"{counted(found.num_windows, 'window')}, {counted(found.num_steps, 'step')}",
        bold=True,
    )
    print_line(f"  cut off: {found.lost:.1%} of the pixels; squares would cut off {found.lost_if_square:.1%}")
    if found.num_unsized:
        print_line(f"  {counted(found.num_unsized, 'sample')} without a readable photo count as square", fg="yellow")
    print_line("  shape          samples  cut off  enlarged  DROP leaves out  FILL repeats")
    for bucket in found.buckets:
        shape = f"{bucket.height} x {bucket.width}"
        print_line(
            f"  {shape:12} {bucket.num_samples:9} {bucket.lost:8.1%} {bucket.num_enlarged:9} {bucket.num_left:16} "
            f"{bucket.num_repeated:13}"
        )


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{number} {kind}" for kind, number in counts.items())


def _print_bars(names: Sequence[str], counts: Sequence[int]) -> None:
    width, most = max(map(len, names)), max(1, *counts)
    for name, number in zip(names, counts, strict=True):
        print_line(f"  {name:<{width}}  {'#' * round(_BAR * number / most)} {number}")
