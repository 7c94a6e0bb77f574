"""``dali-pipes doctor`` checks this machine; ``dali-pipes completion`` prints a script for a shell's tab completion."""

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dali_pipes.commands.options import json_option
from dali_pipes.errors import printable
from dali_pipes.progress import LINE_CHARS

if TYPE_CHECKING:
    from dali_pipes.commands.checks.findings import Finding, Findings


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
    from dali_pipes.commands.checks.findings import worst

    findings = examine(endpoint=endpoint, cache_dir=cache_dir)
    status = worst(findings)
    if as_json:
        click.echo(json.dumps({"status": status, "findings": [asdict(finding) for finding in findings]}))
        context.exit(int(status == "fail"))
    colour = False if os.environ.get("NO_COLOR") else None  # None: if stdout is a terminal
    width = max(len(finding.name) for finding in findings)
    for finding in findings:
        word = click.style(f"{finding.status:4}", fg=_COLOURS[finding.status])
        click.echo(f"{word}  {finding.name:<{width}}  {printable(finding.found, max_chars=LINE_CHARS)}", color=colour)
        if finding.advice:
            click.echo(f"{'':4}  {'':<{width}}  -> {printable(finding.advice, max_chars=LINE_CHARS)}")
    context.exit(int(status == "fail"))


def examine(
    *, endpoint: str | None, cache_dir: Path | None = None, environment: Mapping[str, str] = os.environ
) -> "list[Finding]":
    """Run all checks of this machine; this takes less than three seconds if the endpoint answers or refuses at once."""
    from dali_pipes.commands.checks import cluster, cores, node, software
    from dali_pipes.commands.checks.findings import warn

    checks: list[Callable[[], Findings]] = [
        software.check_python,
        software.check_packages,
        software.check_dali,
        software.check_cuda,
        software.check_gpu,
        lambda: cores.check_cores(environment),
        lambda: cluster.check_cluster(endpoint),
        lambda: cluster.check_proxies(endpoint, environment),
        lambda: node.check_caches(cache_dir),
        node.check_memory,
        node.check_open_files,
        node.check_reader,
        node.check_clock,
    ]
    findings: list[Finding] = []
    for check in checks:
        try:
            findings += check()
        except Exception as exc:  # noqa: BLE001 (the other checks are still useful)
            text = " ".join(f"{type(exc).__name__}: {exc}".split())
            findings.append(warn("doctor", f"a check failed: {text}", "report this text"))
    return findings


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
