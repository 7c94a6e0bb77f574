"""``dali-pipes doctor`` checks this machine; ``dali-pipes completion`` prints a script for a shell's tab completion."""

import json
import os
from pathlib import Path

import click

from dali_pipes.commands.options import json_option
from dali_pipes.errors import printable
from dali_pipes.progress import LINE_CHARS

_COLOURS = {"ok": "green", "warn": "yellow", "fail": "red"}
_PROGRAM, _VARIABLE = "dali-pipes", "_DALI_PIPES_COMPLETE"


@click.command(short_help="Check this machine, its GPU, the cluster and the cache.")
@click.option(
    "--endpoint",
    envvar="AIS_ENDPOINT",
    show_envvar=True,
    help="AIStore's proxy. The command asks for its version, dSort and ETL, and changes nothing on it.",
)
@click.option(
    "--cache",
    "cache_dir",
    type=click.Path(file_okay=False, path_type=Path),
    help="Directory for cache files.  [default: /dev/shm, the directory for temporary files]",
)
@json_option
@click.pass_context
def doctor(context: click.Context, *, endpoint: str | None, cache_dir: Path | None, as_json: bool) -> None:
    """Check versions, the GPU's driver against DALI and torch, the endpoint, the cache and limits of this machine.

    Each finding is ok, warn or fail, and says what to do. A machine without a GPU is ok: loaders run on the CPU. The
    exit code is 1 if a finding is fail.
    """
    from dali_pipes.commands.checks import examine

    findings = examine(endpoint=endpoint, cache_dir=cache_dir)
    found = {finding.status for finding in findings}
    status = next(status for status in ("fail", "warn", "ok") if status in found)
    if as_json:
        click.echo(json.dumps({"status": status, "findings": [finding._asdict() for finding in findings]}))
        context.exit(int(status == "fail"))
    colour = False if os.environ.get("NO_COLOR") else None  # None: if stdout is a terminal
    width = max(len(finding.name) for finding in findings)
    for finding in findings:
        word = click.style(f"{finding.status:4}", fg=_COLOURS[finding.status])
        click.echo(f"{word}  {finding.name:<{width}}  {printable(finding.found, max_chars=LINE_CHARS)}", color=colour)
        if finding.advice:
            click.echo(f"{'':4}  {'':<{width}}  -> {printable(finding.advice, max_chars=LINE_CHARS)}")
    context.exit(int(status == "fail"))


@click.command(short_help="Print the script for a shell's tab completion.")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print a script with which SHELL completes the commands and options of dali-pipes. Put it here:

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
