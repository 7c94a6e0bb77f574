"""``bench resume``: the first batch after a resume against that of an epoch's start."""

from typing import TYPE_CHECKING

import click

from bench.commands.options import ScenarioArguments, at_least, opened_shards, scenario_options, tell

if TYPE_CHECKING:
    from typing import Unpack

__all__ = ["resume"]


@click.command()
@scenario_options(
    reads="What to load",
    repeats=9,
    turns="Turns of each scenario.",
    cache="Where the images lie; the server of the cold turns keeps the samples there too.",
)
@click.option(
    "--cold-shards",
    default=40,
    show_default=True,
    type=at_least(1),
    help="Shards that the samples are packed into for the cold turns.",
)
@click.option("--cold-windows", default=5, show_default=True, type=at_least(1), help="Shuffle windows that these make.")
def resume(*, cold_shards: int, cold_windows: int, **given: "Unpack[ScenarioArguments]") -> None:
    """Time the first batch after a resume in mid-epoch against that of an epoch's start, warm and cold.

    Reads --shards. The cold turns load a copy of them, from a server that answers, in one of the scenarios, for no
    shard but those that the first batch names. Writes nothing but the file that --json names.
    """
    from bench.environment import check_extras

    check_extras()
    from bench.loaders import available_cores
    from bench.scenarios.resume import ResumeOptions, format_resume, run_resume

    options = ResumeOptions(
        repeats=given["repeats"],
        batch_size=given["batch_size"],
        num_threads=given["num_threads"] or available_cores(),
        device=given["device"],
        crop=given["crop"],
        cold_shards=cold_shards,
        cold_windows=cold_windows,
        cache=given["cache"],
    )
    with opened_shards(given["shards"], endpoint=given["endpoint"], embedded_dir=given["embedded_dir"]) as (found, _):
        report = run_resume(options, found)
    tell("resume", report, format_resume(report), given["json_path"])
