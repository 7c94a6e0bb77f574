"""``dali-pipes prep recode``: the photos of shards, resized, optimized or converted, in new shards."""

from typing import Any

import click

from prep.commands.options import no_part_option
from prep.commands.pack import pack_options, pack_shards


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
