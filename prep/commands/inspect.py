"""The commands ``verify``, ``info`` and ``view``: what shards hold, told on a terminal, as JSON or as a picture.

Added to `prep.commands.prep.prep` when `prep.commands.prep` has been imported, whose options they take.
"""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dali_pipes.commands.options import cluster_options, endpoint_for, format_bytes, json_option
from prep.commands.prep import counted, prep

if TYPE_CHECKING:
    from prep.inspect.info import Distribution, PhotoInfo, SetInfo
    from prep.inspect.verify import VerifyReport

__all__ = ["info", "verify", "view"]

# Characters of the longest bar of a histogram.
_BAR = 40
# Classes named on the terminal; --json has all of them.
_CLASSES = 12

urls_argument = click.argument("urls", metavar="URL...", nargs=-1, required=True)


def _values(context: click.Context, parameter: click.Parameter, text: str | None) -> tuple[int, ...] | None:
    """``"1,2,3"`` or ``"0-20,255"`` as numbers."""
    if text is None:
        return None
    found: list[int] = []
    for part in text.split(","):
        first, dash, last = (piece.strip() for piece in part.partition("-"))
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise click.BadParameter(f"expected numbers such as '1,2,3' or '0-20,255', got '{text}'")
        last = last if dash else first
        # Compared as digits first: of the longest Python makes no number, and of a long range too many.
        if max(len(first.lstrip("0")), len(last.lstrip("0"))) > 3 or max(int(first), int(last)) > 255:
            raise click.BadParameter(f"a mask's values are 0 to 255, got '{text}'")
        if int(first) > int(last):
            raise click.BadParameter(f"a range goes from its least number to its greatest, got '{part.strip()}'")
        found += range(int(first), int(last) + 1)
    return tuple(found)


@prep.command(short_help="Read every byte and decode every photo.")
@urls_argument
@click.option(
    "--decoder",
    type=click.Choice(["pillow", "dali"]),
    default="pillow",
    show_default=True,
    help="What decodes. Pillow says in words what is wrong, runs where there is no DALI, and is held to DALI's rules "
    "of how files must end; dali is what a loader decodes with on the CPU.",
)
@click.option("--mask", "masks", metavar="COMPONENT", multiple=True, help="A mask's component.  [default: by names]")
@click.option("--no-masks", is_flag=True, help="Nothing is a mask; a PNG may have any depth and colour.")
@click.option("--mask-values", metavar="1,2,3", callback=_values, help="What a mask's pixels may be.  [default: any]")
@click.option("--max-pixels", type=click.IntRange(min=1), help="Photos of more are bad.  [default: 89478485]")
@click.option("--workers", type=click.IntRange(min=1), help="Processes.  [default: one a core, fewer for few bytes]")
@click.option(
    "--quarantine",
    metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Add the bad samples to FILE, which a loader takes as exclude=; made if it is not there.",
)
@click.option("--show", default=3, show_default=True, type=click.IntRange(min=0), help="Examples shown of each kind.")
@cluster_options
@json_option
@click.pass_context
def verify(
    context: click.Context,
    urls: tuple[str, ...],
    *,
    decoder: Any,
    masks: tuple[str, ...],
    no_masks: bool,
    mask_values: tuple[int, ...] | None,
    max_pixels: int | None,
    workers: int | None,
    quarantine: Path | None,
    show: int,
    endpoint: str | None,
    embedded_dir: Path | None,
    as_json: bool,
) -> None:
    """Verify the shards at URL: read all of them, decode all photos and masks, compare what was written about them.

    URL is ais://BUCKET/PREFIX, DIRECTORY[/PREFIX], a glob of local tars, or shards with braces. Found are tars that are
    cut off or hold samples in pieces, photos that cannot be decoded, masks that are no 8-bit gray PNG, of another size
    than their photo or with other values, labels that are no integer or not in the class table, components that most
    samples have and one lacks, keys that come twice, and a manifest, shard index or column file that does not fit.

    Nothing is written but --quarantine. Exit code 0: nothing is wrong (notes do not count), 1: something is.
    """
    from dali_pipes.formats.photo_header import MAX_PIXELS
    from dali_pipes.store.urls import resolve_shards
    from prep.inspect.verify import verify as verify_shards

    if no_masks and (masks or mask_values):
        raise click.UsageError("--no-masks goes with neither --mask nor --mask-values")
    with endpoint_for(urls[0], endpoint, embedded_dir) as answering:
        report = verify_shards(
            resolve_shards(urls, endpoint=answering),
            decoder=decoder,
            masks=() if no_masks else masks or None,
            mask_values=mask_values,
            max_pixels=max_pixels or MAX_PIXELS,
            workers=workers,
            quarantine=quarantine,
            show_progress=not as_json,
        )
    if as_json:
        click.echo(json.dumps(_verify_json(report, quarantine)))
    else:
        _tell_verified(report, quarantine, show=show)
    context.exit(1 if report.num_problems else 0)


@prep.command(short_help="Classes, sizes, formats, means.")
@urls_argument
@click.option(
    "--headers",
    "num_headers",
    default=2000,
    show_default=True,
    type=click.IntRange(min=0),
    help="Photos of each component whose headers are looked at; 0: all.",
)
@click.option(
    "--pixels",
    "num_pixels",
    default=256,
    show_default=True,
    type=click.IntRange(min=0),
    help="Photos of each component that are decoded for mean and deviation; 0: none.",
)
@click.option("--seed", default=0, show_default=True, type=click.IntRange(min=0), help="What these are drawn from.")
@cluster_options
@json_option
def info(
    urls: tuple[str, ...],
    *,
    num_headers: int,
    num_pixels: int,
    seed: int,
    endpoint: str | None,
    embedded_dir: Path | None,
    as_json: bool,
) -> None:
    """Describe the shards at URL: samples, classes, photos' sizes and formats, their pixels' mean and deviation.

    URL is as for verify. Read are manifest and shard indexes, and as much of --headers and --pixels photos as is
    needed; shards that are not indexed are read in full. Nothing is written.

    Mean and deviation are of values from 0 to 1, each photo counting the same. "JPEG engine" is the share of photos
    that NVIDIA's hardware decoder takes (baseline, 8 bits, one scan, gray or 4:4:4, 4:2:2, 4:2:0, 4:4:0).
    """
    from dali_pipes.store.urls import resolve_shards
    from prep.inspect.info import describe_set

    with endpoint_for(urls[0], endpoint, embedded_dir) as answering:
        found = describe_set(
            resolve_shards(urls, endpoint=answering),
            num_headers=num_headers,
            num_pixels=num_pixels,
            seed=seed,
            show_progress=not as_json,
        )
    if as_json:
        click.echo(json.dumps(found.as_json()))
    else:
        _tell_info(found)


@prep.command(short_help="A contact sheet of some samples.")
@urls_argument
@click.argument("output", metavar="OUT.png", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--num", default=24, show_default=True, type=click.IntRange(min=1), help="Samples, at most 1000.")
@click.option("--seed", default=0, show_default=True, type=click.IntRange(min=0), help="What they are drawn from.")
@click.option("--where-label", "labels", metavar="CLASS", multiple=True, help="Of this class alone: an id or a name.")
@click.option("--keys", metavar="KEY,...", help="The samples with these keys, in this order.")
@click.option("--photo", metavar="COMPONENT", help="What is shown.  [default: a sample's first photo]")
@click.option("--mask", metavar="COMPONENT", help="What is laid over it; '' for none.  [default: its first mask]")
@cluster_options
@json_option
def view(
    urls: tuple[str, ...],
    output: Path,
    *,
    num: int,
    seed: int,
    labels: tuple[str, ...],
    keys: str | None,
    photo: str | None,
    mask: str | None,
    endpoint: str | None,
    embedded_dir: Path | None,
    as_json: bool,
) -> None:
    """Draw samples of the shards at URL into the picture OUT.png: photo, photo with its mask, label, key.

    URL is as for verify. Of shards that are indexed only what is shown is read. Written is OUT.png (or .jpg, .webp).
    """
    from dali_pipes.errors import StoreError
    from dali_pipes.store.urls import resolve_shards
    from prep.inspect.view import draw_sheet

    if output.suffix.lower() not in (".png", ".jpg", ".jpeg", ".webp"):
        raise click.BadParameter(
            f"expected a picture's name, .png, .jpg or .webp, got '{output}'", param_hint="OUT.png"
        )
    if not output.parent.is_dir():
        raise click.BadParameter(f"no directory '{output.parent}'; make it", param_hint="OUT.png")
    if keys is not None and labels:
        raise click.UsageError("--keys and --where-label exclude each other")
    named = [key for key in keys.split(",") if key] if keys is not None else []
    if keys is not None and not named:
        raise click.BadParameter(f"expected keys such as 'cat/1,cat/7', got '{keys}'", param_hint="--keys")
    with endpoint_for(urls[0], endpoint, embedded_dir) as answering:
        sheet = draw_sheet(
            resolve_shards(urls, endpoint=answering),
            num=num,
            seed=seed,
            labels=labels,
            keys=named,
            photo=photo,
            mask=mask,
            show_progress=not as_json,
        )
    try:
        sheet.picture.save(output)
    except OSError as exc:
        raise StoreError(f"cannot write '{output}': {exc.strerror or exc}") from exc
    for line in sheet.undecodable:
        click.echo(line, err=True)
    width, height = sheet.picture.size
    result = {
        "output": str(output),
        "width": width,
        "height": height,
        "keys": sheet.keys,
        "num_matching": sheet.num_matching,
        "mask_values": sheet.mask_values,
        "undecodable": sheet.undecodable,
    }
    line = f"drew {counted(len(sheet.keys), 'sample')} of {sheet.num_matching}, {width} x {height} pixels -> {output}"
    click.echo(json.dumps(result) if as_json else line)


# What is told


def _verify_json(report: "VerifyReport", quarantine: Path | None) -> dict[str, Any]:
    return {
        "url": report.url,
        "ok": not report.num_problems,
        "num_shards": report.num_shards,
        "num_samples": report.num_samples,
        "num_files": report.num_files,
        "num_decoded": report.num_decoded,
        "num_bytes": report.num_bytes,
        "decoder": report.decoder,
        "components": report.components,
        "usual": report.usual,
        "mask_values": {str(value): number for value, number in report.mask_values.items()},
        "counts": dict(report.counts),
        "num_problems": report.num_problems,
        "num_bad_samples": report.num_bad_samples,
        "findings": [finding._asdict() for finding in report.findings],
        "quarantine": None if quarantine is None else str(quarantine),
        "elapsed_s": report.elapsed_s,
    }


def _tell_verified(report: "VerifyReport", quarantine: Path | None, *, show: int) -> None:
    from prep.inspect.verify_shard import KINDS

    for kind, what in KINDS.items():
        number = report.counts[kind]
        if not number:
            continue
        _echo(f"{number:8}  {what}", fg="yellow" if kind == "note" else "red")
        examples = [finding for finding in report.findings if finding.kind == kind]
        for finding in examples[:show]:
            click.echo(f"          {finding}")
        if show and number > show:
            click.echo(f"          and {number - show} more, --json has all")
    if report.mask_values:
        values = ", ".join(f"{value} in {number}" for value, number in list(report.mask_values.items())[:_CLASSES])
        more = f" and {len(report.mask_values) - _CLASSES} more" if len(report.mask_values) > _CLASSES else ""
        click.echo(f"masks hold {values}{more}")
    rate = report.num_bytes / max(report.elapsed_s, 1e-9)
    amount = (
        f"{counted(report.num_shards, 'shard')}, {counted(report.num_samples, 'sample')}, "
        f"{counted(report.num_decoded, 'photo')} decoded by {report.decoder}, {format_bytes(report.num_bytes)} in "
        f"{report.elapsed_s:.1f} s ({format_bytes(round(rate))}/s)"
    )
    if quarantine is not None:
        click.echo(f"{counted(report.num_bad_samples, 'bad sample')} in '{quarantine}': pass exclude='{quarantine}'")
    if report.num_problems:
        _echo(
            f"{counted(report.num_problems, 'problem')}, {counted(report.num_bad_samples, 'bad sample')} in {amount}",
            fg="red",
        )
    else:
        _echo(f"nothing is wrong with {amount}", fg="green")


def _tell_info(found: "SetInfo") -> None:
    click.echo(
        f"{found.url}: {counted(found.num_shards, 'shard')}, {counted(found.num_samples, 'sample')}, "
        f"{format_bytes(found.num_bytes)}{'' if found.is_indexed else ' (not indexed: read in full)'}"
    )
    for component, number in found.components.items():
        some = "" if number == found.num_samples else f", {found.num_samples - number} samples lack it"
        click.echo(f"  {component}: {number}, {format_bytes(found.component_bytes[component])}{some}")
    if found.class_counts:
        _tell_classes(found)
    for component, photo in found.photos.items():
        _tell_photos(component, photo)


def _tell_classes(found: "SetInfo") -> None:
    counts = found.class_counts
    _echo(f"\n{len(counts)} classes of {min(counts.values())} to {max(counts.values())} samples", bold=True)
    names = {label: f"{label} {found.classes[label]}" if label in found.classes else str(label) for label in counts}
    largest = sorted(counts, key=lambda label: -counts[label])
    _tell_bars([(names[label], counts[label]) for label in largest[:_CLASSES]])
    if len(largest) > _CLASSES:
        click.echo(f"  and {len(largest) - _CLASSES} more, --json has all")


def _tell_photos(component: str, photo: "PhotoInfo") -> None:
    formats = ", ".join(f"{number} {kind}" for kind, number in photo.formats.items())
    _echo(f"\n{component}: {counted(photo.num_photos, 'mask' if photo.is_mask else 'photo')} ({formats})", bold=True)
    for what, values in (("height", photo.height), ("width", photo.width), ("bytes", photo.num_bytes)):
        if values is not None:
            click.echo(
                f"  {what:7} {values.least} to {values.greatest}, median {values.median}, "
                f"nine of ten from {values.percentile_5} to {values.percentile_95}"
            )
    if photo.short_side is not None:
        click.echo("  shorter side, pixels")
        _tell_histogram(photo.short_side)
    if photo.num_bytes is not None:
        click.echo("  bytes")
        _tell_histogram(photo.num_bytes)
    share = "" if photo.num_headers == photo.num_photos else f", of {photo.num_headers} looked at"
    click.echo("  " + ", ".join(f"{number} {kind}" for kind, number in photo.kinds.items()) + share)
    if photo.traits:
        click.echo("  " + ", ".join(f"{number} {trait}" for trait, number in photo.traits.items()) + share)
    if photo.num_headers and not photo.is_mask:
        part = photo.num_for_hardware / photo.num_headers
        click.echo(f"  JPEG engine: takes {part:.1%} ({photo.num_for_hardware} of {photo.num_headers})")
    if photo.pixels is not None and not photo.pixels.num_photos:
        click.echo(f"  pixels: none of {photo.pixels.num_undecodable} photos can be decoded; see prep verify")
    elif photo.pixels is not None:
        mean, std = (", ".join(f"{value:.4f}" for value in values) for values in (photo.pixels.mean, photo.pixels.std))
        bad = f"; {photo.pixels.num_undecodable} cannot be decoded" if photo.pixels.num_undecodable else ""
        click.echo(f"  pixels of {photo.pixels.num_photos}: mean {mean}; std {std}{bad}")


def _tell_histogram(values: "Distribution") -> None:
    edges = values.edges
    _tell_bars(
        [(f"{edges[row]} to {edges[row + 1] - 1}", number) for row, number in enumerate(values.counts)], indent=4
    )


def _tell_bars(rows: Sequence[tuple[str, int]], *, indent: int = 2) -> None:
    width, most = max(len(name) for name, _ in rows), max(1, *(number for _, number in rows))
    for name, number in rows:
        filled = round(_BAR * number / most)
        click.echo(f"{' ' * indent}{name:<{width}}  {'#' * filled}{' ' if filled else ''}{number}")


def _echo(text: str, **style: Any) -> None:
    # click leaves colours out by itself where stdout is no terminal.
    click.secho(text, color=False if os.environ.get("NO_COLOR") else None, **style)
