"""``dali-pipes prep view``."""

from pathlib import Path
from typing import Any

import click

from dali_pipes.commands.options import cluster_options, endpoint_for, format_bytes, json_option
from dali_pipes.commands.output import PAGES, check_output, counted, print_line, print_result, writing
from prep.commands.options import allow_missing_option, seed_option

_PICTURES = (".png", ".jpg", ".jpeg", ".webp")


@click.command()
@click.argument("arguments", metavar="URL... [OUT]", nargs=-1, required=True)
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    help="The file to write, as OUT: .html is a page, .png, .jpg or .webp a picture.",
)
@click.option(
    # A picture of a thousand is 53,000 pixels high.
    "--num",
    type=click.IntRange(1, 1000),
    help="Samples, at most 1000.  [default: 24 in a picture, 200 on a page]",
)
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
@click.option(
    "--quarantine",
    "quarantines",
    metavar="FILE",
    multiple=True,
    help="A list of bad samples of verify or a training: a page shows it with its causes; may be repeated.",
)
@allow_missing_option
@cluster_options
@json_option
def view(
    arguments: tuple[str, ...],
    *,
    output: Path | None,
    num: int | None,
    keys: str | None,
    labels: tuple[str, ...],
    quarantines: tuple[str, ...],
    allow_missing: bool,
    endpoint: str | None,
    embedded_dir: Path | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Show samples of the shards at URL, as a page or as a picture.

    `view URL -o page.html` writes a page that needs no other file and no network: class balance, sizes, aspects,
    formats, what is bad and why, and some samples with masks, boxes and captions, which can be filtered by class and
    key. Boxes are those that the graph for detection takes; a caption is a component, or a text in JSON, whose name is
    caption, text or txt. The page takes at most 48 KiB for each sample, and 4 MiB.

    `view URL OUT.png` draws a contact sheet: photo, photo with its mask, label, key.

    URL is as for verify. Of indexed shards, only the samples that are shown are read, and for a page all shard indexes.
    Photos are shown upright. The command writes the one file.
    """
    from dali_pipes.data_set.named import name_shards
    from dali_pipes.formats.quarantine import read_exclusions
    from prep.inspect.contact_sheet import draw_sheet
    from prep.inspect.samples import ShowOptions
    from prep.inspect.view_page import view_page

    urls = arguments
    if output is None:
        if len(arguments) < 2:
            raise click.UsageError("Missing argument 'OUT': name the file to write, such as -o page.html")
        urls, output = arguments[:-1], Path(arguments[-1])
    expected = "a page's name, .html, or a picture's name, .png, .jpg or .webp"
    check_output(output, endings=(*_PICTURES, *PAGES), expected=expected, option="OUT")
    is_page = output.suffix.lower() in PAGES
    if keys is not None and labels:
        raise click.UsageError("--keys and --where-label exclude each other")
    named = [key for key in (keys or "").split(",") if key]
    if keys is not None and not named:
        raise click.BadParameter(f"expected keys such as 'cat/1,cat/7', got '{keys}'", param_hint="--keys")
    if quarantines and not is_page:
        raise click.UsageError("--quarantine is for a page: name one, -o page.html")
    known_bad = read_exclusions(quarantines)
    shown = ShowOptions(num=num or (200 if is_page else 24), labels=labels, keys=named, **options)
    with endpoint_for(urls, endpoint, embedded_dir) as answering:
        shards = name_shards(urls, endpoint=answering, allow_missing=allow_missing)
        if is_page:
            page = view_page(shards, shown, known_bad=known_bad, show_progress=not as_json)
        else:
            sheet = draw_sheet(shards, shown, show_progress=not as_json)
    drawn = page if is_page else sheet
    document: dict[str, Any] = {"output": str(output), "keys": drawn.keys, "num_matching": drawn.num_matching}
    samples = f"{counted(len(drawn.keys), 'sample')} of {drawn.num_matching}"
    with writing(output):
        if is_page:
            num_bytes = output.write_bytes(page.html.encode())
            line = f"wrote {samples}, {sum(page.bad.values())} bad or missing, {format_bytes(num_bytes)}"
            document |= {"num_bytes": num_bytes, "bad": page.bad}
        else:
            sheet.picture.save(output)
            width, height = sheet.picture.size
            line = f"drew {samples}, {width} x {height} pixels"
            document |= {"width": width, "height": height, "undecodable": sheet.undecodable}
            for text in sheet.undecodable:
                print_line(text, err=True)
    print_result(f"{line} -> {output}", document, as_json=as_json)
