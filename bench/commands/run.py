"""``bench run`` and ``bench sweep``: compare loaders on the same shards, then time them."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from bench.commands.running import needs_extras, run_and_tell
from bench.engine.options import at_least, json_option, opened_shards, words
from bench.loaders.registry import LOADERS
from dali_pipes.commands.options import cluster_options, join_options
from dali_pipes.commands.output import print_note

if TYPE_CHECKING:
    from bench.loaders.registry import Recipe

_TIMEOUT_S = 1800.0
"""`bench.compare.turn.TIMEOUT_S`, which ``--help`` shows without loading it."""
_AU_REPEATS = 3
_AU_RECIPES: "Mapping[str, Sequence[Recipe]]" = {
    "both": ("classification", "encoded"),
    "decoded": ("classification",),
    "files": ("encoded",),
}
"""What ``--au-photos`` stands for, as recipes."""
_MILLISECONDS = click.FloatRange(min=0, max=60_000, max_open=True)

timing_options = join_options(
    click.option(
        "--shards",
        "data",
        required=True,
        help="What to read: ais:// or s3://bucket/prefix, a glob of local tars, or a directory.",
    ),
    click.option(
        "--loaders",
        default="dali,webloader,memory",
        help=f"Comma separated names: {', '.join(LOADERS)}; webloader:turbo has its own decoder. all, peers, "
        "dali-decode and python-decode stand for all installed loaders of that kind.",
    ),
    click.option("--baseline", help="Show ratios to this loader.  [default: webloader, else the first]"),
    click.option(
        "--repeats",
        default=7,
        type=at_least(1),
        help="Turns of each loader; they are interleaved. A 95 % interval needs 6.",
    ),
    click.option(
        "--epochs", default=1, type=at_least(1), help="Timed epochs of each turn, after one that is not timed."
    ),
    click.option("--batch-size", default=64, type=at_least(1), help="Samples a batch of each rank."),
    click.option(
        "--num-threads",
        "threads",
        type=at_least(1),
        help="DALI's threads, or worker processes of each rank.  [default: the cores, shared by the ranks]",
    ),
    click.option("--device", default="auto", type=click.Choice(["auto", "cpu", "gpu"])),
    click.option(
        "--recipe",
        type=click.Choice(["segmentation", "classification", "encoded"]),
        help="What loaders make of a sample: a centre crop of photo and mask; a given crop of the photo of any "
        "size and place, resized and flipped; or nothing: the bytes of the photo's file.  "
        "[default: segmentation if the data set has masks]",
    ),
    click.option(
        "--crop", type=at_least(1), help="Side of the image.  [default: 350 for segmentation, 224 for classification]"
    ),
    click.option(
        "--ranks", default=1, type=at_least(1), help="Processes, each with its own loader over its share of the shards."
    ),
    click.option(
        "--cache",
        default="warm",
        type=click.Choice(["warm", "cold"]),
        help="cold: time the first epoch, with opening; before it, the files are dropped from the page cache.",
    ),
    click.option(
        "--compute-ms",
        default=0.0,
        type=_MILLISECONDS,
        help="Emulate a training step of this length: asleep on a CPU, at work on a GPU.",
    ),
    click.option(
        "--latency-ms",
        type=_MILLISECONDS,
        help="Add this delay to each request. Local shards are copied, and a server of our own serves them.",
    ),
    click.option("--direct", is_flag=True, help="Put no gateway before a cluster: no bytes are counted or delayed."),
    click.option(
        "--samples", "num_samples", type=at_least(1), help="Repeat the samples up to this number, in new shards."
    ),
    click.option("--num-shards", "shards", type=at_least(1), help="Pack the samples into this number of new shards."),
    click.option("--photo-side", type=at_least(1), help="Scale photos and masks to this longer side."),
    click.option("--photo", help="Component that holds the photo.  [default: the only one]"),
    click.option("--mask", help="Component that holds the mask.  [default: the only one]"),
    click.option(
        "--seed", default=7, type=at_least(0), help="Order of the shards and samples, for loaders that have one."
    ),
    click.option(
        "--timeout-s",
        default=_TIMEOUT_S,
        type=click.FloatRange(min=0, min_open=True),
        help="Limit of a turn, and of comparing a loader's outputs; a loader that takes longer has failed.",
    ),
    click.option(
        "--work",
        type=click.Path(path_type=Path),
        help="Directory for packed, served and converted shards.  [default: the directory for temporary files]",
    ),
    json_option,
    cluster_options,
)
"""Options that `bench run` and `bench sweep` share."""


_au_options = join_options(
    click.option(
        "--au",
        metavar="ACCELERATOR",
        help="Find how many of these accelerators each loader feeds, by emulation as in MLPerf Storage: resnet50_h100, "
        "resnet50_a100, retinanet_b200, retinanet_mi355, or NAME:BATCH:SECONDS. Other options that begin with --au "
        "need it. --repeats is then the number of searches, by default 3.",
    ),
    click.option(
        "--au-photos",
        default="both",
        type=click.Choice(list(_AU_RECIPES)),
        help="Whether loaders decode a crop of each photo, or hand over the bytes of its file.",
    ),
    click.option(
        "--au-target",
        default=0.9,
        type=click.FloatRange(min=0, max=1, min_open=True),
        help="An accelerator is fed if its utilisation is at least this.",
    ),
    click.option(
        "--au-most",
        default=64,
        type=at_least(1),
        help="Try no more accelerators than this; each needs a shard and 2 batches.",
    ),
    click.option(
        "--au-steps",
        default=20,
        type=at_least(1),
        help="Steps of each accelerator in a trial, at least; MLPerf has 500.",
    ),
)
_NOT_WITH_AU = ("batch_size", "compute_ms", "ranks", "epochs", "cache", "baseline", "recipe", "mask")
"""Options that the accelerators decide."""


@click.command()
@timing_options
@_au_options
@needs_extras
def run(**given: Any) -> None:
    """Compare each loader's outputs with Pillow's and torchvision's, then time the loaders, and print a table.

    Reads the shards. Writes the file that --json names, and, until the end, packed, served and converted shards
    under --work. A loader of another project that fails is left out, the others are timed, and the command ends with 1.
    If Ctrl-C, or a failure of one of our own loaders, ends the run early, the complete rounds before that are printed
    and written, too.

    With --au the loaders feed emulated accelerators instead: their number grows until they wait too much for batches.
    """
    of_au = {name: given.pop(name) for name in ("au", "au_photos", "au_target", "au_most", "au_steps")}
    asked = [name for name in (*of_au, *_NOT_WITH_AU) if _is_on_command_line(name)]
    if of_au["au"] is None:
        if needing := [name for name in asked if name in of_au]:
            raise ValueError(f"--{needing[0].replace('_', '-')} needs --au ACCELERATOR")
        time_loaders(given, over=())
        return
    if wrong := [name for name in asked if name in _NOT_WITH_AU]:
        flag = next(one for one in click.get_current_context().command.params if one.name == wrong[0]).opts[-1]
        raise ValueError(f"--au excludes {flag}: the accelerators decide it; drop one of them")
    if not _is_on_command_line("repeats"):
        given["repeats"] = _AU_REPEATS
    time_loaders(given, over=(), of_au=of_au)


@click.command()
@click.option(
    "--over",
    required=True,
    multiple=True,
    metavar="NAME=VALUE,...",
    help="What to vary: threads, ranks, batch-size, crop, photo-side, shards, latency-ms, compute-ms or cache. Given "
    "several times: every combination.",
)
@timing_options
@needs_extras
def sweep(over: tuple[str, ...], **given: Any) -> None:
    """Time loaders as `bench run` does, under every setting that --over names, in turns.

    \b
    dali-pipes bench sweep --shards ais://pets/shuffled- --over latency-ms=0,20,100
    dali-pipes bench sweep --shards pets/ --over ranks=1,2,4 --over cache=cold,warm
    dali-pipes bench sweep --shards pets/ --samples 20000 --over shards=10,100,1000,10000

    Reads the shards. Writes the file that --json names, and, until the end, packed, served and converted shards
    under --work. If Ctrl-C or a failing loader ends the run early, the complete rounds before that are printed and
    written, too.
    """
    time_loaders(given, over=over)


def _is_on_command_line(name: str) -> bool:
    return click.get_current_context().get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE


def time_loaders(given: dict[str, Any], *, over: Sequence[str], of_au: Mapping[str, Any] | None = None) -> None:
    """Check everything that was asked for, then run it and report.

    ``of_au`` holds the values of the options that begin with ``--au``; without it loaders feed no accelerators.
    """
    from bench.compare.au import Accelerator, AuScenario
    from bench.compare.run import LoaderScenario, check_specs
    from bench.compare.settings import TurnSetting, sweep
    from bench.loaders.protocol import LoaderOptions
    from bench.loaders.recipe import choose_recipe
    from bench.loaders.registry import CROPS
    from bench.loaders.selection import LoaderSpec, select_loaders
    from bench.tools.folders import check_writable

    def some(*names: str) -> dict[str, Any]:
        return {name: given[name] for name in names}

    accelerator = None if of_au is None else Accelerator.parse(of_au["au"])
    base = TurnSetting(
        **some("threads", "batch_size", "ranks", "cache", "compute_ms", "latency_ms", "shards", "photo_side")
    )
    sweep(base, over)  # refuses what is wrong before any shard is read
    baseline = None if given["baseline"] is None else LoaderSpec.parse(given["baseline"])
    if given["work"] is not None:
        check_writable(given["work"])
    with opened_shards(given["data"], endpoint=given["endpoint"], embedded_dir=given["embedded_dir"]) as (found, node):
        recipe: Recipe | None = given["recipe"] if of_au is None else "classification"
        chosen = choose_recipe(found, recipe=recipe, **some("photo", "mask"))
        crop = given["crop"] or CROPS[chosen.recipe]
        settings = sweep(replace(base, crop=crop), over)
        if recipe is None:
            mask = f", the mask '{chosen.mask}'" if chosen.mask else ""
            print_note(f"recipe: {chosen.recipe}; the photo is '{chosen.photo}'{mask}")
        # With a latency, loaders read local shards from a bucket too: from a copy on our server.
        is_served = any(setting.latency_ms is not None for setting in settings)
        selection = select_loaders(words(given["loaders"]), shards=None if is_served else found)
        for line in selection.skipped:
            print_note(line)
        check_specs(selection.specs, baseline, is_served=is_served)
        fields: dict[str, Any] = {
            "shards": found,
            "loaders": selection.specs,
            "options": LoaderOptions(crop=crop, **chosen._asdict(), **some("batch_size", "seed", "device")),
            "settings": settings,
            "baseline": baseline,
            "bystanders": node,
            **some("repeats", "epochs", "num_samples", "direct", "work", "seed", "timeout_s"),
        }
        scenario = LoaderScenario(**fields)
        if of_au is not None and accelerator is not None:
            searched = {name: of_au[f"au_{name}"] for name in ("target", "most", "steps")}
            recipes = _AU_RECIPES[of_au["au_photos"]]
            scenario = AuScenario(accelerator=accelerator, recipes=recipes, **searched, **fields)
        run_and_tell(scenario, json_path=given["json_path"])
