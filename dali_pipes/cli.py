"""The command line: one word a package, each loaded only when it is called, so that --help answers at once."""

import importlib
import logging
import os
import signal
import sys

import click

__all__ = ["main"]

_COMMANDS = {
    "bench": ("bench.cli", "bench", "Time loaders on the same shards, after comparing what they give."),
    "cache": ("dali_pipes.commands.cache", "cache", "See, fill and empty the shards that loaders on this node share."),
    "completion": (
        "dali_pipes.commands.doctor",
        "completion",
        "Print the script by which a shell completes words.",
    ),
    "demo": ("bench.demo", "demo", "The main job on real photos: pack, dSort, index, DALI, against WebLoader."),
    "doctor": ("dali_pipes.commands.doctor", "doctor", "Whether this machine, its GPU, cluster and cache fit."),
    "profile": ("dali_pipes.commands.profile", "profile", "Where a loader's time goes, and what to turn."),
    "prep": ("prep.commands.prep", "prep", "Pack photos into shards, shuffle them with dSort, index them."),
    "tune": (
        "dali_pipes.commands.tune",
        "tune",
        "Find the threads and the share of the JPEG engines for this machine.",
    ),
}


class _Lazy(click.Group):
    """A group that knows its commands' names and first lines without importing them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module, attribute, _ = _COMMANDS[cmd_name]
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, help_text) for name, (_, _, help_text) in sorted(_COMMANDS.items())])


@click.group(cls=_Lazy, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="dali-pipes")
@click.option("-v", "--verbose", is_flag=True, help="Log what is done, to stderr.")
def cli(verbose: bool) -> None:
    """The fast path from an object store to the GPU's image decoder.

    Results go to stdout, logs and progress to stderr. Exit code 0: done, 1: failed, 2: misused.
    """
    if os.environ.get("NO_COLOR"):  # https://no-color.org
        click.get_current_context().color = False
    logging.basicConfig(
        level=logging.INFO if verbose else logging.WARNING, format="%(levelname)s %(name)s: %(message)s"
    )


def main(argv: list[str] | None = None) -> int:
    """Run a command; what it refuses or fails at is one line on stderr.

    Args:
        argv: Arguments without the program's name; the process's own where ``None``.

    Returns:
        The exit code.
    """
    from dali_pipes.errors import PipesError

    previous = signal.signal(signal.SIGTERM, _terminate)
    try:
        result = cli.main(args=argv, prog_name="dali-pipes", standalone_mode=False)
    except click.exceptions.Exit as exc:
        return exc.exit_code
    except click.UsageError as exc:
        exc.show()
        return 2
    except click.ClickException as exc:
        exc.show()
        return 1
    except (KeyboardInterrupt, click.Abort):
        click.echo("error: interrupted", err=True)
        return 130  # 128 + SIGINT, as shells report it
    except ValueError as exc:  # an argument's value, by the style of this project's own code
        return _fail(str(exc), code=2)
    except (PipesError, OSError) as exc:
        return _fail(str(exc), code=1)
    except Exception as exc:  # noqa: BLE001 (a bug: still one line, and where to find the rest)
        return _fail(f"internal: {type(exc).__name__}: {exc}; run it with -v and report what that shows", code=1)
    finally:
        signal.signal(signal.SIGTERM, previous)
    return result if isinstance(result, int) else 0


def _fail(text: str, *, code: int) -> int:
    if logging.getLogger().isEnabledFor(logging.INFO):
        logging.getLogger(__name__).exception("failed")
    click.echo(f"error: {text}", err=True)
    return code


def _terminate(signum: int, frame: object) -> None:
    """End as on Ctrl-C: what owns processes and files gives them back."""
    raise SystemExit(128 + signum)


if __name__ == "__main__":
    sys.exit(main())
