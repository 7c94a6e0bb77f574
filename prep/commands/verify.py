"""``dali-pipes prep verify``."""

import re
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dali_pipes.commands.options import cluster_options, endpoint_for, format_bytes, json_option
from dali_pipes.commands.output import counted, fields_of, print_line, print_result
from prep.commands.options import (
    chosen_masks,
    mask_options,
    max_bad_option,
    max_pixels_option,
    on_option,
    part_option,
    print_empty_part,
    urls_argument,
)

if TYPE_CHECKING:
    from prep.inspect.verify import VerifyReport
    from prep.left_out import MaxBad
    from prep.part import JobPart


# Mask values that a terminal shows; --json has all of them.
_SHOWN_VALUES = 12
_SHOWN_REASONS = 8


def _parse_values(context: click.Context, parameter: click.Parameter, text: str | None) -> tuple[int, ...] | None:
    """``"1,2,3"`` or ``"0-20,255"`` as numbers."""
    if text is None:
        return None
    found: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*([0-9]{1,3})(?:-([0-9]{1,3}))?\s*", part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if not first <= last <= 255:
            raise click.BadParameter(f"expected numbers from 0 to 255 such as '1,2,3' or '0-20,255', got '{text}'")
        found += range(first, last + 1)
    return tuple(found)


@click.command()
@urls_argument
@click.option(
    "--decoder",
    type=click.Choice(["pillow", "dali"]),
    help="dali: the decoder that loaders use on the CPU, so that verify refuses just what they refuse. pillow: needs "
    "no DALI; of a hundred damaged photos the two may judge one differently.  [default: dali, if it is installed]",
)
@mask_options
@click.option(
    "--mask-values", metavar="1,2,3", callback=_parse_values, help="Values that a mask may have.  [default: any]"
)
@max_pixels_option
@max_bad_option(
    default="0",
    help="The most bad samples with which the exit code is 0, as a number or a share. Faults of shards and index files "
    "always count.",
)
@click.option(
    "--workers", type=click.IntRange(min=1), help="Processes.  [default: one for each core, fewer for few bytes]"
)
@click.option(
    "--quarantine",
    metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Add the bad samples to FILE, a list for a loader's Select(exclude=...); created if it does not exist.",
)
@on_option
@part_option("every N-th shard; keys that occur twice, and rare components, are compared within the part")
@click.option("--show", default=3, show_default=True, type=click.IntRange(min=0), help="Examples shown of each kind.")
@cluster_options
@json_option
def verify(
    urls: tuple[str, ...],
    *,
    masks: tuple[str, ...],
    no_masks: bool,
    max_pixels: int | None,
    quarantine: Path | None,
    show: int,
    max_bad: "MaxBad",
    part: "JobPart",
    endpoint: str | None,
    embedded_dir: Path | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Verify the shards at URL: read all of them, decode all photos and masks, and compare the index files with them.

    URL is ais://BUCKET/PREFIX, DIRECTORY[/PREFIX], a glob of local tars, or shards with braces. The command finds tars
    that are cut off or hold samples in pieces; photos that cannot be decoded; masks that are not 8-bit grey PNGs, or
    have another size than their photo, or other values; labels that are not integers or not in the class table; samples
    without a component that most have; keys that occur twice; a manifest, shard index or column file that does not fit
    the shards; shards that the manifest lists and the store lacks, and shards beside them that no manifest lists.

    It writes only the --quarantine file. The exit code is 0 if nothing is wrong (notes do not count) or only so many
    samples are bad as --max-bad allows, otherwise 1.
    """
    from dali_pipes.data_set.named import compare_shards
    from dali_pipes.formats.photo_header import MAX_PIXELS
    from prep.inspect.verify import verify as verify_shards

    if no_masks and options["mask_values"]:
        raise click.UsageError("--no-masks and --mask-values exclude each other")
    with endpoint_for(urls, endpoint, embedded_dir) as answering:
        compared = compare_shards(urls, endpoint=answering)
        is_first, own = part.number == 1, part.of_shards(compared.present)
        if not own.names:
            print_empty_part(part, own.url, as_json=as_json)
            return
        report = verify_shards(
            own,
            # What concerns the set as a whole is told once, by part 1.
            missing=compared.missing if is_first else (),
            beyond=compared.beyond if is_first else (),
            masks=chosen_masks(masks, no_masks=no_masks),
            max_pixels=max_pixels or MAX_PIXELS,
            quarantine=quarantine,
            show_progress=not as_json,
            **options,
        )
    if as_json:
        print_result("", verify_document(report, quarantine), as_json=True)
    else:
        print_report(report, quarantine, show=show)
    click.get_current_context().exit(0 if is_good(report, max_bad) else 1)


def is_good(report: "VerifyReport", max_bad: "MaxBad") -> bool:
    """Whether nothing is wrong but for a few samples."""
    are_few = max_bad.allows(report.num_bad_samples, of=report.num_samples)
    return not report.num_problems or (are_few and not report.num_set_problems)


def verify_document(report: "VerifyReport", quarantine: Path | None) -> dict[str, Any]:
    return fields_of(report) | {
        "ok": not report.num_problems,
        "num_problems": report.num_problems,
        "findings": [finding._asdict() for finding in report.findings],
        "quarantine": None if quarantine is None else str(quarantine),
    }


def print_report(report: "VerifyReport", quarantine: Path | None = None, *, show: int, err: bool = False) -> None:
    """Print what is wrong, ``show`` examples of each kind, and one line on all; to stderr if ``err``."""
    from prep.inspect.findings import KINDS

    for kind in filter(report.counts.get, KINDS):
        number = report.counts[kind]
        print_line(f"{number:8}  {KINDS[kind]}", err=err, fg="yellow" if kind == "note" else "red")
        reasons = report.reasons.get(kind, Counter[str]()).most_common(_SHOWN_REASONS)
        lines = [f"{times} x {reason}" for reason, times in reasons] if len(reasons) > 1 else []
        lines += [str(finding) for finding in report.findings if finding.kind == kind][:show]
        if show and number > show:
            lines.append(f"and {number - show} more, --json has all")
        for line in lines:
            print_line(f"          {line}", err=err)
    if report.mask_values:
        values = [f"{value} in {number}" for value, number in report.mask_values.items()]
        more = f" and {len(values) - _SHOWN_VALUES} more" if len(values) > _SHOWN_VALUES else ""
        print_line(f"masks hold {', '.join(values[:_SHOWN_VALUES])}{more}", err=err)
    bad = counted(report.num_bad_samples, "bad sample")
    if quarantine is not None:
        print_line(f"{bad} in '{quarantine}': pass select=dali_pipes.Select(exclude='{quarantine}')", err=err)
    amount = (
        f"{counted(report.num_shards, 'shard')}, {counted(report.num_samples, 'sample')}, "
        f"{counted(report.num_decoded, 'photo')} decoded by {report.decoder}, {format_bytes(report.num_bytes)} in "
        f"{report.elapsed_s:.1f} s"
    )
    wrong = f"{counted(report.num_problems, 'problem')}, {bad} in" if report.num_problems else "nothing is wrong with"
    print_line(f"{wrong} {amount}", err=err, fg="red" if report.num_problems else "green")
