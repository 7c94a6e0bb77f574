"""The commands ``doctor`` and ``completion``: whether this machine fits, and a shell that knows the commands."""

import json
import os
from dataclasses import asdict
from pathlib import Path

import click

from dali_pipes.commands.options import json_option

__all__ = ["completion", "doctor"]

_COLOURS = {"ok": "green", "warn": "yellow", "fail": "red"}
_PROGRAM, _VARIABLE = "dali-pipes", "_DALI_PIPES_COMPLETE"


@click.command(short_help="Whether this machine, its GPU, cluster and cache fit.")
@click.option(
    "--endpoint",
    envvar="AIS_ENDPOINT",
    show_envvar=True,
    help="AIStore's proxy, to be asked for its version, dSort and ETL; nothing on it is changed.",
)
@click.option(
    "--cache",
    "cache_dir",
    type=click.Path(file_okay=False, path_type=Path),
    help="Where images are to lie.  [default: /dev/shm, the directory for temporary files]",
)
@json_option
@click.pass_context
def doctor(context: click.Context, *, endpoint: str | None, cache_dir: Path | None, as_json: bool) -> None:
    """Look at this machine: versions, GPU driver against what DALI and torch were built for, endpoint, cache, limits.

    Each finding is ok, warn or fail, with what to do. A machine without a GPU is ok: loaders run on the CPU. Exit code
    1 where something is fail.
    """
    from dali_pipes.commands.examine import examine, worst

    findings = examine(endpoint=endpoint, cache_dir=cache_dir)
    status = worst(findings)
    if as_json:
        click.echo(json.dumps({"status": status, "findings": [asdict(finding) for finding in findings]}))
        context.exit(int(status == "fail"))
    colour = False if os.environ.get("NO_COLOR") else None  # None: by whether stdout is a terminal
    width = max(len(finding.name) for finding in findings)
    for finding in findings:
        word = click.style(f"{finding.status:4}", fg=_COLOURS[finding.status])
        click.echo(f"{word}  {finding.name:<{width}}  {finding.found}", color=colour)
        if finding.advice:
            click.echo(f"{'':4}  {'':<{width}}  -> {finding.advice}")
    context.exit(int(status == "fail"))


@click.command(short_help="A script that completes commands in your shell.")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print the script by which SHELL completes dali-pipes' commands and options. Where it goes:

    \b
    bash  dali-pipes completion bash > ~/.local/share/bash-completion/completions/dali-pipes
    zsh   dali-pipes completion zsh > ~/.zfunc/_dali-pipes
          (with "fpath+=~/.zfunc" before "compinit" in ~/.zshrc)
    fish  dali-pipes completion fish > ~/.config/fish/completions/dali-pipes.fish
    """
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    assert kind is not None, "click has all three"
    click.echo(kind(context.find_root().command, {}, _PROGRAM, _VARIABLE).source())
