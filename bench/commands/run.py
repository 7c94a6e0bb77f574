"""``bench run`` and ``bench sweep``: compare loaders on the same shards, then time them."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, get_args

import click

from bench.compare.au import Accelerator, AuScenario
from bench.compare.run import LoaderScenario, check_specs
from bench.compare.settings import TurnSetting
from bench.compare.settings import sweep as settings_of
from bench.engine.options import at_least, field_options, json_option, opened_shards, run_and_tell, words
from bench.loaders.protocol import CROPS, DECODES, PARTS, Dtype, LoaderOptions, Recipe
from bench.loaders.recipe import choose_recipe
from bench.loaders.registry import LOADERS, LoaderSpec, select_loaders
from bench.tools.folders import check_writable
from dali_pipes.commands.options import cluster_options, join_options
from dali_pipes.commands.output import print_note

_AU_RECIPES: Mapping[str, Sequence[Recipe]] = {
    "both": ("classification", "encoded"),
    "decoded": ("classification",),
    "files": ("encoded",),
}
_OF_SETTING, _OF_SCENARIO = field_options(TurnSetting), field_options(LoaderScenario)
_OF_SEARCH = {name: made for name, made in field_options(AuScenario).items() if name not in _OF_SCENARIO}

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
        help=f"Comma separated names: {', '.join(LOADERS)}. NAME:DECODE chooses the decoder of a peer without DALI: "
        f"{', '.join(DECODES)}; the first is the default, the last the fastest. all, peers, dali-decode and "
        "python-decode stand for all installed loaders of that kind.",
    ),
    click.option("--baseline", help="Show ratios to this loader.  [default: webloader, else the first]"),
    click.option("--device", default="auto", type=click.Choice(["auto", "cpu", "gpu"])),
    click.option(
        "--recipe",
        type=click.Choice(list(PARTS)),
        help="What loaders make of a sample: a centre crop of photo and mask; a given crop of the photo of any "
        "size and place, resized and flipped; the centre of the resized photo, as for evaluation; or nothing: the "
        "bytes of the photo's file.  [default: segmentation if the data set has masks, else classification]",
    ),
    click.option(
        "--dtype",
        default="float32",
        type=click.Choice(get_args(Dtype)),
        help="Of images: normalised float32, or uint8, which the model normalises.",
    ),
    click.option("--crop", type=at_least(1), help="Side of the image.  [default: 350 for segmentation, else 224]"),
    click.option("--photo", help="Component that holds the photo.  [default: the only one]"),
    click.option("--mask", help="Component that holds the mask.  [default: the only one]"),
    *_OF_SETTING.values(),
    *_OF_SCENARIO.values(),
    json_option,
    cluster_options,
)


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
    *_OF_SEARCH.values(),
)
_NOT_WITH_AU = ("batch_size", "compute_ms", "ranks", "epochs", "cache", "baseline", "recipe", "mask")


@click.command()
@timing_options
@_au_options
def run(**given: Any) -> None:
    """Compare each loader's outputs with Pillow's and torchvision's, then time the loaders, and print a table.

    Reads the shards. Writes the file that --json names, and, until the end, packed, served and converted shards
    under --work. A loader of another project that fails is left out, the others are timed, and the command ends with 1.
    If Ctrl-C, or a failure of one of our own loaders, ends the run early, the complete rounds before that are printed
    and written, too.

    With --au the loaders feed emulated accelerators instead: their number grows until they wait too much for batches.
    """
    of_au = {name: given.pop(name) for name in ("au", "au_photos", *_OF_SEARCH)}
    context, typed = click.get_current_context(), click.core.ParameterSource.COMMANDLINE
    flags = {
        one.name: one.opts[-1] for one in context.command.params if context.get_parameter_source(str(one.name)) is typed
    }
    if of_au["au"] is None:
        if needing := [flag for name, flag in flags.items() if name in of_au]:
            raise ValueError(f"{needing[0]} needs --au ACCELERATOR")
        time_loaders(given, over=())
        return
    if wrong := [flag for name, flag in flags.items() if name in _NOT_WITH_AU]:
        raise ValueError(f"--au excludes {wrong[0]}: the accelerators decide it; drop one of them")
    if "repeats" not in flags:
        given["repeats"] = AuScenario.repeats
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


def time_loaders(given: dict[str, Any], *, over: Sequence[str], of_au: Mapping[str, Any] | None = None) -> None:
    """Check everything that was asked for, then run it and report; ``of_au`` holds the options that begin with --au."""
    accelerator = None if of_au is None else Accelerator.parse(of_au["au"])
    base = TurnSetting(**{name: given[name] for name in _OF_SETTING})
    settings_of(base, over)  # refuses what is wrong before any shard is read
    baseline = None if given["baseline"] is None else LoaderSpec.parse(given["baseline"])
    if given["work"] is not None:
        check_writable(given["work"])
    with opened_shards(given["data"], endpoint=given["endpoint"], embedded_dir=given["embedded_dir"]) as (found, node):
        recipe: Recipe | None = given["recipe"] if of_au is None else "classification"
        chosen = choose_recipe(found, recipe=recipe, photo=given["photo"], mask=given["mask"])
        crop = given["crop"] or CROPS[chosen.recipe]
        settings = settings_of(replace(base, crop=crop), over)
        if recipe is None:
            mask = f", the mask '{chosen.mask}'" if chosen.mask else ""
            print_note(f"recipe: {chosen.recipe}; the photo is '{chosen.photo}'{mask}")
        # With a latency, loaders read local shards from a bucket too: from a copy on our server.
        is_served = any(setting.latency_ms is not None for setting in settings)
        specs, skipped = select_loaders(words(given["loaders"]), shards=None if is_served else found)
        for line in skipped:
            print_note(line)
        check_specs(specs, baseline, is_served=is_served)
        shared = {name: given[name] for name in ("batch_size", "seed", "device", "dtype")}
        fields: dict[str, Any] = {
            "shards": found,
            "loaders": specs,
            "options": LoaderOptions(crop=crop, **chosen._asdict(), **shared),
            "settings": settings,
            "baseline": baseline,
            "bystanders": node,
            **{name: given[name] for name in _OF_SCENARIO},
        }
        if of_au is None or accelerator is None:
            scenario = LoaderScenario(**fields)
        else:
            fields |= {"recipes": _AU_RECIPES[of_au["au_photos"]], **{name: of_au[name] for name in _OF_SEARCH}}
            scenario = AuScenario(accelerator=accelerator, **fields)
        run_and_tell(scenario, json_path=given["json_path"], publish=given["publish"])
