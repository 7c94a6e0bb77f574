"""The command line ``dali-pipes``: its commands, its logging and its exit codes."""

import contextvars
import logging
import os
import signal
import sys
from typing import Any

import click

from dali_pipes.commands.lazy import LazyGroup
from dali_pipes.commands.output import LINE_CHARS, print_line
from dali_pipes.errors import PipesError, printable

_COMMANDS = {
    "bench": ("bench.cli:bench", "Time loaders on the same shards, after comparing what they give."),
    "cache": ("dali_pipes.commands.cache:cache", "List, fill and empty the cache files of this node's loaders."),
    "completion": ("dali_pipes.commands.doctor:completion", "Print the script for a shell's tab completion."),
    "demo": ("bench.demo:demo", "Run all steps on real photos: pack, dSort, index, DALI, against WebLoader."),
    "doctor": ("dali_pipes.commands.doctor:doctor", "Check this machine, its GPU, the cluster and the cache."),
    "profile": ("dali_pipes.commands.profile:profile", "Show where a loader's time goes, and which setting to change."),
    "prep": ("prep.commands.group:prep", "Pack photos into shards, shuffle them with dSort, index them."),
    "tune": ("dali_pipes.commands.tune:tune", "Find the threads and the share of the JPEG engines for this machine."),
}


class _PrintableFormatter(logging.Formatter):
    """Shows what a terminal would obey as escapes: a message is one line, a traceback keeps its own lines."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 (logging's name)
        return printable(super().formatMessage(record), max_chars=LINE_CHARS)

    def formatException(self, ei: Any) -> str:  # noqa: N802 (logging's name)
        return "\n".join(printable(line, max_chars=LINE_CHARS) for line in super().formatException(ei).split("\n"))


@click.group(cls=LazyGroup, lazy=_COMMANDS, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="dali-pipes")
@click.option("-v", "--verbose", is_flag=True, help="Log each step to stderr.")
def cli(verbose: bool) -> None:
    """The fast path from an object store to the GPU's image decoder.

    Results go to stdout, logs and progress to stderr. Exit code 0: done, 1: failed, 2: wrong arguments.
    """
    if os.environ.get("NO_COLOR"):  # https://no-color.org
        click.get_current_context().color = False
    handler = logging.StreamHandler()
    handler.setFormatter(_PrintableFormatter("%(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.INFO if verbose else logging.WARNING, handlers=[handler])


def main(argv: list[str] | None = None) -> int:
    """Run a command and return its exit code; an error is one line on stderr.

    ``argv`` holds the arguments without the program's name; by default those of the process.
    """
    previous = signal.signal(signal.SIGTERM, _terminate)
    try:
        # In a context of its own: the command's patience must not stay with a program that calls this function.
        run = contextvars.copy_context().run
        result = run(cli.main, args=argv, prog_name="dali-pipes", standalone_mode=False)
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
    except ValueError as exc:  # this project raises it for a bad argument
        return _fail(str(exc), code=2)
    except (PipesError, OSError) as exc:
        return _fail(str(exc), code=1)
    except Exception as exc:  # noqa: BLE001 (a bug: still one line, and how to get the traceback)
        return _fail(f"internal: {type(exc).__name__}: {exc}; run it again with -v and report its output", code=1)
    finally:
        signal.signal(signal.SIGTERM, previous)
    return result if isinstance(result, int) else 0


def _fail(text: str, *, code: int) -> int:
    if logging.getLogger().isEnabledFor(logging.INFO):
        logging.getLogger(__name__).exception("failed")
    print_line(f"error: {text}", err=True)
    return code


def _terminate(signum: int, frame: object) -> None:
    """End the program as Ctrl-C does, so that context managers close their processes and files."""
    raise SystemExit(128 + signum)


if __name__ == "__main__":
    sys.exit(main())
