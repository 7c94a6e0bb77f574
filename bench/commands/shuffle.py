"""``bench shuffle``: how far from uniform an order is."""

from pathlib import Path

import click

from bench.commands.options import at_least, json_option, tell

__all__ = ["shuffle"]


@click.command()
@click.option("--samples", default=20_000, show_default=True, type=at_least(2), help="Samples to order.")
@click.option("--num-shards", default=20, show_default=True, type=at_least(1), help="Shards they lie in.")
@click.option("--classes", default=40, show_default=True, type=at_least(2), help="Classes of the samples.")
@click.option("--batch-size", default=256, show_default=True, type=at_least(1), help="Samples a batch.")
@click.option("--seeds", default=3, show_default=True, type=at_least(1), help="Epochs to average over.")
@json_option
def shuffle(
    *, samples: int, num_shards: int, classes: int, batch_size: int, seeds: int, json_path: Path | None
) -> None:
    """Read shards that are sorted by label, shuffled by windows or by buffers; print how far from uniform it is.

    Writes its shards to a temporary directory, and nothing else but the file that --json names.
    """
    from bench.environment import check_extras

    check_extras()
    from bench.scenarios.shuffle_quality import ShuffleOptions, format_shuffle, run_shuffle

    options = ShuffleOptions(
        num_samples=samples, num_shards=num_shards, num_classes=classes, batch_size=batch_size, seeds=seeds
    )
    report = run_shuffle(options)
    tell("shuffle", report, format_shuffle(report), json_path)
