"""``dali-pipes prep view``."""

from pathlib import Path
from typing import Any

import click

from dali_pipes.commands.options import cluster_options, endpoint_for, json_option
from dali_pipes.commands.output import print_line
from prep.commands.options import allow_missing_option, seed_option, urls_argument
from prep.commands.output import counted, print_result


@click.command()
@urls_argument
@click.argument("output", metavar="OUT.png", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--num", default=24, show_default=True, type=click.IntRange(min=1), help="Samples, at most 1000.")
@seed_option("the random choice")
@click.option(
    "--where-label",
    "labels",
    metavar="CLASS",
    multiple=True,
    help="Only samples of this class, an id or a name; may be repeated.",
)
@click.option("--keys", metavar="KEY,...", help="The samples with these keys, in this order.")
@click.option(
    "--photo", metavar="COMPONENT", help="The photo to show.  [default: a sample's first photo that is not a mask]"
)
@click.option("--mask", metavar="COMPONENT", help="The mask to lay over it; '' for none.  [default: its first mask]")
@allow_missing_option
@cluster_options
@json_option
def view(
    urls: tuple[str, ...],
    output: Path,
    *,
    labels: tuple[str, ...],
    keys: str | None,
    allow_missing: bool,
    endpoint: str | None,
    embedded_dir: Path | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Draw samples of the shards at URL into the picture OUT.png: photo, photo with its mask, label, key.

    URL is as for verify. Of indexed shards, only the samples that are shown are read. The command writes OUT.png (or
    .jpg, .webp).
    """
    from dali_pipes.data_set.named import name_shards
    from dali_pipes.errors import StoreError
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
    with endpoint_for(urls, endpoint, embedded_dir) as answering:
        shards = name_shards(urls, endpoint=answering, allow_missing=allow_missing)
        sheet = draw_sheet(shards, labels=labels, keys=named, show_progress=not as_json, **options)
    try:
        sheet.picture.save(output)
    except OSError as exc:
        raise StoreError(f"cannot write '{output}': {exc.strerror or exc}") from exc
    for line in sheet.undecodable:
        print_line(line, err=True)
    width, height = sheet.picture.size
    print_result(
        f"drew {counted(len(sheet.keys), 'sample')} of {sheet.num_matching}, {width} x {height} pixels -> {output}",
        {
            "output": str(output),
            "width": width,
            "height": height,
            "keys": sheet.keys,
            "num_matching": sheet.num_matching,
            "mask_values": sheet.mask_values,
            "undecodable": sheet.undecodable,
        },
        as_json=as_json,
    )
