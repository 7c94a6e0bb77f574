"""``bench smoke``: is any loader's output wrong?"""

import click

from bench.commands.running import needs_extras
from bench.engine.options import words
from dali_pipes.commands.output import print_note


@click.command()
@click.option("--loaders", help="Comma separated names, and groups as in bench run.  [default: all]")
@needs_extras
def smoke(*, loaders: str | None) -> int:
    """Try every loader that is installed, in every mode, on 22 photos that are made for it; exit 1 if one fails.

    Each loader's outputs are compared with Pillow's and torchvision's, from files and from a bucket. It takes a warm
    turn in one process and a cold turn in two. Writes to a temporary directory only.
    """
    import tempfile
    from pathlib import Path

    from bench.compare.smoke import format_trials, named_loaders, run_smoke

    specs = None if loaders is None else named_loaders(words(loaders))
    trials = []
    with tempfile.TemporaryDirectory(prefix="dali-pipes-smoke-") as directory:
        for trial in run_smoke(Path(directory), loaders=specs):
            print_note(f"{trial.loader}, {trial.mode}: {trial.outcome} ({trial.elapsed_s:.1f} s)")
            trials.append(trial)
    click.echo(format_trials(trials))
    return int(any(trial.outcome == "failed" for trial in trials))
