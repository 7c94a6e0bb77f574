"""Options that several commands of ``dali-pipes prep`` take, and the words of their results.

Only click is imported before a command runs.
"""

import re
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from dali_pipes.commands.options import Command, format_bytes, join_options
from dali_pipes.commands.output import print_result
from dali_pipes.errors import printable

if TYPE_CHECKING:
    from dali_pipes.formats.manifest import RecodedStep
    from prep.part import JobPart
    from prep.recode.photos import Recoding


urls_argument = click.argument("urls", metavar="URL...", nargs=-1, required=True)


def jobs_option(what: str) -> Callable[[Command], Command]:
    """``--jobs``: the number of worker processes."""
    return click.option(
        "--jobs", type=click.IntRange(min=1), help=f"{what}.  [default: the number of cores, at most 16]"
    )


def overwrite_option(what: str) -> Callable[[Command], Command]:
    """``--overwrite``: replace existing files or objects."""
    return click.option("--overwrite", is_flag=True, help=f"Replace {what}.")


def seed_option(what: str) -> Callable[[Command], Command]:
    """``--seed`` of a random choice."""
    return click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help=f"Seed of {what}.")


allow_missing_option = click.option(
    "--allow-missing",
    is_flag=True,
    help="Leave out shards that should be there and are not (by the manifest, or by the record of the command that "
    "wrote them), and log their names.  [default: an error]",
)

dry_run_option = click.option("--dry-run", is_flag=True, help="Check, print what would be written, and write nothing.")

max_pixels_option = click.option(
    "--max-pixels", type=click.IntRange(min=1), help="Photos with more pixels are bad.  [default: 89478485]"
)


def _parsed(context: click.Context, option: click.Parameter, text: str) -> Any:
    from prep.left_out import MaxBad
    from prep.part import JobPart

    try:
        return JobPart.parse(text) if option.name == "part" else MaxBad.parse(text)
    except ValueError as exc:
        raise click.BadParameter(str(exc)) from exc


def max_bad_option(*, default: str, help: str) -> Callable[[Command], Command]:
    """``--max-bad``: the command gets a `prep.left_out.MaxBad`."""
    return click.option("--max-bad", metavar="N|P%", default=default, show_default=True, callback=_parsed, help=help)


def _use_ray_environment(context: click.Context, option: click.Parameter, path: Path | None) -> None:
    from prep.workers import RAY_ENVIRONMENT

    token = RAY_ENVIRONMENT.set(path)
    context.call_on_close(lambda: RAY_ENVIRONMENT.reset(token))


def on_option(command: Command) -> Command:
    """``--on`` and ``--runtime-env``, which `prep.workers.open_workers` gets to know by itself."""
    command = click.option(
        "--runtime-env",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        expose_value=False,
        callback=_use_ray_environment,
        help="With --on ray: a file (YAML or JSON) with Ray's runtime_env, such as packages that its nodes lack.  "
        "[default: none]",
    )(command)
    return click.option(
        "--on",
        type=click.Choice(["processes", "ray"]),
        default="processes",
        show_default=True,
        help="Who works: processes of this machine, or the Ray cluster that RAY_ADDRESS names; without RAY_ADDRESS, a "
        "Ray on this machine.",
    )(command)


def part_option(what: str) -> Callable[[Command], Command]:
    """``--part I/N``: the command gets a `prep.part.JobPart`."""
    return click.option(
        "--part",
        metavar="I/N",
        default="1/1",
        show_default=True,
        callback=_parsed,
        help=f"Do part I of N, counted from 1, for N processes that share no more than the store: {what}.",
    )


def no_part_option(why: str) -> Callable[[Command], Command]:
    """``--part`` of a command that has no parts: a usage error that says why."""

    def refuse(context: click.Context, option: click.Parameter, text: str | None) -> None:
        if text is not None:
            raise click.UsageError(f"{context.info_name} has no --part: {why}.")

    return click.option("--part", hidden=True, expose_value=False, callback=refuse)


mask_options = join_options(
    click.option(
        "--mask",
        "masks",
        metavar="COMPONENT",
        multiple=True,
        help="A component that holds a class id for each pixel: an 8-bit grey PNG that can be decoded and has its "
        "photo's size; may be repeated.  [default: found by their names]",
    ),
    click.option("--no-masks", is_flag=True, help="Nothing is a mask; a PNG may have any depth, colour and size."),
)


recode_options = join_options(
    click.option(
        "--short-side",
        type=click.IntRange(1, 65_500),
        metavar="PIXELS",
        help="Resize photos whose shorter side is longer than this; they become JPEGs. No photo is enlarged.  "
        "[default: none]",
    ),
    click.option(
        "--max-side",
        type=click.IntRange(1, 65_500),
        metavar="PIXELS",
        help="Resize photos whose longer side is longer than this. With --short-side, both hold.  [default: none]",
    ),
    click.option(
        "--quality",
        type=click.IntRange(1, 100),
        help="JPEG quality of photos that are resized or converted.  [default: 90]",
    ),
    click.option(
        "--masks",
        "mask_rule",
        type=click.Choice(["nearest"]),
        help="Resize masks to their photo's new size; each pixel takes the value of the nearest one.  [default: a mask "
        "is an error if photos are resized]",
    ),
    click.option(
        "--optimize",
        is_flag=True,
        help="Rewrite JPEGs without loss: as baseline JPEGs, which a GPU's JPEG engine takes, without previews and "
        "other markers. The EXIF orientation and a colour profile other than sRGB stay. PNG masks are rewritten, so "
        "that they are decoded faster. Pixels stay equal. Needs the program jpegtran.",
    ),
    click.option(
        "--convert",
        is_flag=True,
        help="Make upright JPEGs of photos that loaders do not decode: HEIC, AVIF, TIFF, JPEG 2000, GIF and animated "
        "PNG (the first picture). HEIC needs pillow-heif: pip install 'dali-pipes[heif]'.",
    ),
    click.option(
        "--spool-dir",
        type=click.Path(file_okay=False, path_type=Path),
        help="A directory on local disk that holds the photos of --short-side, --max-side, --optimize and --convert "
        "until they are packed.  [default: a folder in the output's directory; for a bucket, the temporary directory]",
    ),
)


def take_recoding(options: dict[str, Any]) -> "Recoding":
    """Take the values of `recode_options`, except ``--spool-dir``, out of a command's options."""
    from prep.recode.photos import DEFAULT_QUALITY, Recoding

    given = {name: options.pop(name) for name in ("short_side", "max_side", "optimize", "convert")}
    quality, masks = options.pop("quality"), options.pop("mask_rule")
    encodes = given["short_side"] or given["max_side"]
    if quality is not None and not (encodes or given["convert"]):
        raise click.UsageError("--quality is for photos of --short-side, --max-side and --convert; give one of them")
    if masks is not None and not encodes:
        raise click.UsageError("--masks says how masks are resized; give --short-side or --max-side too")
    return Recoding(**given, quality=DEFAULT_QUALITY if quality is None else quality, masks=masks)


def chosen_masks(masks: tuple[str, ...], *, no_masks: bool) -> tuple[str, ...] | None:
    """The components that `mask_options` name; ``None`` to find them by their names."""
    if no_masks and masks:
        raise click.UsageError("--no-masks and --mask exclude each other")
    return () if no_masks else masks or None


def pairs_option(name: str, *names: str, **arguments: Any) -> Callable[[Command], Command]:
    """An option ``NAME=WHAT`` that may be repeated; the command gets a dict."""
    return click.option(name, *names, multiple=True, callback=_parse_pairs, **arguments)


def _parse_pairs(context: click.Context, option: click.Parameter, texts: Sequence[str]) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for text in texts:
        name, _, what = text.partition("=")
        if not (name and what):
            raise click.BadParameter(f"expected {option.metavar}, got '{text}'")
        if name in pairs:
            raise click.BadParameter(f"'{name}' is given twice")
        pairs[name] = what
    return pairs


def parse_shares(text: str | None, *, option: str) -> dict[str, float]:
    """The value of an option, ``train=0.9,val=0.1``, as a table."""
    shares: dict[str, float] = {}
    for part in text.split(",") if text else ():
        name, equals, share = part.partition("=")
        try:
            value = float(share) if equals and name.strip() not in shares else -1.0
        except ValueError:
            value = -1.0
        if value < 0:
            raise click.UsageError(f"{option} takes names and shares, train=0.9,val=0.1, got '{text}'.")
        shares[name.strip()] = value
    return shares


# Options that say where and how a command runs, and change nothing of what it writes.
_LOCAL = frozenset({"endpoint", "embedded_dir", "as_json", "jobs", "dry_run", "spool_dir"})


def command_line(context: click.Context) -> str:
    """The command as it was typed, for the history of a data set; without the options that say how it runs here.

    The home directory is written ``~``, so that no name of a user is kept.
    """
    words = context.command_path.split()
    for option in context.command.params:
        given = option.name is not None and context.get_parameter_source(option.name) is ParameterSource.COMMANDLINE
        if option.name is None or not given or option.name not in context.params or option.name in _LOCAL:
            continue
        value = context.params[option.name]
        flag = [] if isinstance(option, click.Argument) else [option.opts[0]]
        if isinstance(value, dict):
            value = [f"{name}={what}" for name, what in value.items()]
        for one in value if isinstance(value, list | tuple) else [value]:
            words += flag if one is True else [*flag, str(one)]
    line, home = shlex.join(words), str(Path.home())
    # Some containers have the home directory "/".
    return line if home == "/" else re.sub(rf"{re.escape(home)}(?=[/\s']|$)", "~", line)


def there_already(number: int, what: str) -> list[str]:
    """A note on the outputs that an earlier run had written."""
    return [f"{number} of the {what} were there already"] if number else []


def recoded_text(step: "RecodedStep") -> str:
    """What was done to photos, in one line.

    >>> from dali_pipes.formats.manifest import RecodedStep
    >>> settings = {"short_side": 256, "quality": 90}
    >>> counts = {"resized": 9, "kept": 1}
    >>> recoded_text(RecodedStep(settings=settings, counts=counts, bytes_before=4 << 20, bytes_after=1 << 20))
    'quality=90, short_side=256: 9 resized, 1 kept; 4.0 MiB became 1.0 MiB'
    """
    settings = ", ".join(name if value is True else f"{name}={value}" for name, value in sorted(step.settings.items()))
    by_number = sorted(step.counts.items(), key=lambda count: (-count[1], count[0]))
    counts = ", ".join(f"{number} {action}" for action, number in by_number)
    sizes = f"{format_bytes(step.bytes_before)} became {format_bytes(step.bytes_after)}"
    return printable(f"{settings}: {counts}; {sizes}", max_chars=500)


def shard_span(url: str, shards: Sequence[str]) -> str:
    """The URL of a set of shards.

    >>> shard_span("ais://pets/samples-", ["samples-000000.tar", "samples-000003.tar"])
    'ais://pets/samples-{000000..000003}.tar'
    """
    numbers = [re.findall(r"[0-9]+", shard)[-1] for shard in (shards[0], shards[-1])]
    return f"{url}{numbers[0]}.tar" if len(shards) == 1 else f"{url}{{{numbers[0]}..{numbers[1]}}}.tar"


def print_empty_part(part: "JobPart", url: str, *, as_json: bool) -> None:
    """Say that a part of a job has no shard: there are fewer shards than parts."""
    print_result(of_part(str, part, url, ()), {"part": str(part), "shards": []}, as_json=as_json)


def of_part(summary: Callable[[], str], part: "JobPart", url: str, shards: Sequence[str]) -> str:
    """The line that reports a job, ``summary()`` and its part, if it is one of several."""
    if not shards:
        return f"nothing to do: part {part} of '{url}' has no shard"
    return summary() if part.is_all else f"{summary()} (part {part} of these)"
