"""The command line ``dali-pipes``: its commands, its logging and its exit codes."""

import atexit
import contextlib
import contextvars
import logging
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any

import click

from dali_pipes.commands.options import LazyGroup, with_verbosity
from dali_pipes.commands.output import print_line
from dali_pipes.errors import PipesError
from dali_pipes.progress import current_verbosity, log_to_stderr, use_verbosity

INTERRUPTED = 130
"""The exit code after Ctrl-C: 128 + SIGINT, as shells report it."""
_AGAIN_S = 0.05
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


@click.group(cls=LazyGroup, lazy=_COMMANDS, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="dali-pipes")
def cli() -> None:
    """The fast path from an object store to the GPU's image decoder.

    Results go to stdout, logs and progress to stderr. Exit code 0: done, 1: failed, 2: wrong arguments.
    """
    if os.environ.get("NO_COLOR"):  # https://no-color.org
        click.get_current_context().color = False
    log_to_stderr()


with_verbosity(cli)


def main(argv: list[str] | None = None) -> int:
    """Run a command and return its exit code; an error is one line on stderr.

    ``argv`` holds the arguments without the program's name; by default those of the process, which ends afterwards.
    """
    if argv is not None:
        return _run(argv)
    code = _run(sys.argv[1:])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the command is over, and its exit code stands
    if code == INTERRUPTED:
        # Everything is closed by now. Python's normal exit would need some seconds to unload torch and DALI.
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):
                stream.flush()
        os._exit(code)
    return code


def _run(argv: Sequence[str]) -> int:
    said = current_verbosity()
    previous = signal.signal(signal.SIGTERM, _terminate)
    try:
        # In a context of its own: the command's patience must not stay with a program that calls this function.
        run = contextvars.copy_context().run
        with _interruptions_kept():
            result = run(cli.main, args=list(argv), prog_name="dali-pipes", standalone_mode=False)
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
        return INTERRUPTED
    except ValueError as exc:  # this project raises it for a bad argument
        return _fail(str(exc), code=2)
    except (PipesError, OSError) as exc:
        return _fail(str(exc), code=1)
    except Exception as exc:  # noqa: BLE001 (a bug: still one line, and how to get the traceback)
        return _fail(f"internal: {type(exc).__name__}: {exc}; run it again with -v and report its output", code=1)
    finally:
        signal.signal(signal.SIGTERM, previous)
        use_verbosity(said)
    return result if isinstance(result, int) else 0


def _fail(text: str, *, code: int) -> int:
    if current_verbosity() == "verbose":
        logging.getLogger(__name__).exception("failed")
    print_line(f"error: {text}", err=True)
    return code


# Ctrl-C raises an exception wherever Python is. If Python is in a finalizer, it only reports the exception, and the
# command would go on: so it is raised again a moment later. While Python imports a C++ module, an exception would abort
# the process: Ctrl-C waits for the import.
@contextlib.contextmanager
def _interruptions_kept() -> Iterator[None]:
    lost: list[BaseException] = []
    report = sys.unraisablehook

    def delay(interruption: BaseException) -> None:
        lost.append(interruption)
        signal.setitimer(signal.ITIMER_REAL, _AGAIN_S)

    def keep(unraisable: Any) -> None:
        if isinstance(unraisable.exc_value, KeyboardInterrupt | SystemExit):
            delay(unraisable.exc_value)
        else:
            report(unraisable)

    def interrupt(signum: int, frame: FrameType | None) -> None:
        if signum == signal.SIGALRM and not lost:
            return
        interruption = lost.pop() if signum == signal.SIGALRM else KeyboardInterrupt()
        if not _loads_library(frame):
            raise interruption
        delay(interruption)

    previous = signal.signal(signal.SIGALRM, interrupt)
    if is_default := signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else Ctrl-C may be ignored
        signal.signal(signal.SIGINT, interrupt)
    sys.unraisablehook = keep
    try:
        yield
    finally:
        sys.unraisablehook = report
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
        if is_default:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def _loads_library(frame: FrameType | None) -> bool:
    """Whether the frame is below the import of a module that is a shared library."""
    while frame is not None:
        if frame.f_code.co_qualname in ("ExtensionFileLoader.create_module", "ExtensionFileLoader.exec_module"):
            return True
        frame = frame.f_back
    return False


def _terminate(signum: int, frame: object) -> None:
    """End the program as Ctrl-C does, so that context managers close their processes and files."""
    raise SystemExit(128 + signum)


if __name__ == "__main__":
    sys.exit(main())
