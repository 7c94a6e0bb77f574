"""``dali-pipes prep info``."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dali_pipes.commands.options import cluster_options, endpoint_for, format_bytes, json_option
from dali_pipes.commands.output import print_line
from dali_pipes.errors import printable, shown
from prep.commands.options import seed_option, urls_argument
from prep.commands.output import counted, print_result

if TYPE_CHECKING:
    from prep.inspect.info import Distribution, PhotoInfo, SetInfo


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
@seed_option("the random choice of photos")
@cluster_options
@json_option
def info(
    urls: tuple[str, ...], *, endpoint: str | None, embedded_dir: Path | None, as_json: bool, **options: Any
) -> None:
    """Describe the shards at URL: samples, classes, photos' sizes and formats, their pixels' mean and deviation.

    URL is as for verify. The command reads the manifest, the shard indexes, and the needed parts of --headers and
    --pixels photos; shards that are not indexed are read in full. It writes nothing.

    It also says which shards the manifest lists and the store lacks, and which ones lie beside them and are in no
    manifest. The exit code is 1 if shards are missing, otherwise 0.

    Mean and deviation are of values from 0 to 1, with the same weight for each photo. "JPEG engine" is the share of
    photos that NVIDIA's hardware decoder takes (baseline, 8 bits, one scan, gray or 4:4:4, 4:2:2, 4:2:0, 4:4:0).
    """
    from dali_pipes.data_set.named import compare_shards
    from prep.inspect.info import describe_set

    with endpoint_for(urls, endpoint, embedded_dir) as answering:
        compared = compare_shards(urls, endpoint=answering)
        found = describe_set(compared.present, show_progress=not as_json, **options)
    found.missing, found.beyond = compared.missing, compared.beyond
    if as_json:
        print_result("", found.as_json(), as_json=True)
    else:
        _print_set(found)
    click.get_current_context().exit(1 if found.missing else 0)


def _print_set(found: "SetInfo") -> None:
    print_line(
        f"{found.url}: {counted(found.num_shards, 'shard')}, {counted(found.num_samples, 'sample')}, "
        f"{format_bytes(found.num_bytes)}{'' if found.is_indexed else ' (not indexed: read in full)'}"
    )
    for number, what, names, colour in (
        (len(found.missing), "missing, which the manifest lists", found.missing, "red"),
        (len(found.beyond), "there that the manifest does not list", found.beyond, "yellow"),
    ):
        if number:
            print_line(f"  {counted(number, 'shard')} {what}: {shown(names)}", fg=colour)
    for component, number in found.components.items():
        some = "" if number == found.num_samples else f", {found.num_samples - number} samples lack it"
        print_line(f"  {component}: {number}, {format_bytes(found.component_bytes[component])}{some}")
    if found.class_counts:
        _print_classes(found)
    for component, photo in found.photos.items():
        _print_photos(component, photo)


def _print_classes(found: "SetInfo") -> None:
    counts = found.class_counts
    print_line("")
    print_line(f"{len(counts)} classes of {min(counts.values())} to {max(counts.values())} samples", bold=True)
    names = {label: f"{label} {printable(found.classes.get(label, ''), max_chars=_NAME)}".rstrip() for label in counts}
    largest = sorted(counts, key=lambda label: -counts[label])
    _print_bars([(names[label], counts[label]) for label in largest[:_CLASSES]])
    if len(largest) > _CLASSES:
        print_line(f"  and {len(largest) - _CLASSES} more, --json has all")


def _print_photos(component: str, photo: "PhotoInfo") -> None:
    formats = _listed(photo.formats)
    number = counted(photo.num_photos, "mask" if photo.is_mask else "photo")
    print_line("")
    print_line(f"{component}: {number} ({formats})", bold=True)
    for what, values in (("height", photo.height), ("width", photo.width), ("bytes", photo.num_bytes)):
        if values is not None:
            print_line(
                f"  {what:7} {values.least} to {values.greatest}, median {values.median}, "
                f"nine of ten from {values.percentile_5} to {values.percentile_95}"
            )
    for title, distribution in (("shorter side, pixels", photo.short_side), ("bytes", photo.num_bytes)):
        if distribution is not None:
            print_line(f"  {title}")
            _print_histogram(distribution)
    share = "" if photo.num_headers == photo.num_photos else f", of {photo.num_headers} looked at"
    print_line(f"  {_listed(photo.kinds)}{share}")
    if photo.traits:
        print_line(f"  {_listed(photo.traits)}{share}")
    if photo.num_headers and not photo.is_mask:
        part = photo.num_for_hardware / photo.num_headers
        print_line(f"  JPEG engine: takes {part:.1%} ({photo.num_for_hardware} of {photo.num_headers})")
    pixels = photo.pixels
    if pixels is not None and not pixels.num_photos:
        print_line(f"  pixels: none of {pixels.num_undecodable} photos can be decoded; see prep verify")
    elif pixels is not None:
        mean, std = (", ".join(f"{value:.4f}" for value in values) for values in (pixels.mean, pixels.std))
        bad = f"; {pixels.num_undecodable} cannot be decoded" if pixels.num_undecodable else ""
        print_line(f"  pixels of {pixels.num_photos}: mean {mean}; std {std}{bad}")


def _listed(counts: "dict[str, int]") -> str:
    return ", ".join(f"{number} {kind}" for kind, number in counts.items())


def _print_histogram(values: "Distribution") -> None:
    edges = values.edges
    rows = [(f"{edges[row]} to {edges[row + 1] - 1}", number) for row, number in enumerate(values.counts)]
    _print_bars(rows, indent=4)


def _print_bars(rows: Sequence[tuple[str, int]], *, indent: int = 2) -> None:
    width, most = max(len(name) for name, _ in rows), max(1, *(number for _, number in rows))
    for name, number in rows:
        filled = round(_BAR * number / most)
        print_line(f"{' ' * indent}{name:<{width}}  {'#' * filled}{' ' if filled else ''}{number}")
