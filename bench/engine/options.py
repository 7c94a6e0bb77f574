"""Options of ``bench``, as fields of a scenario or of several commands; and the command that runs a scenario.

Only click is imported before a command runs.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import MISSING, field, fields, is_dataclass, replace
from inspect import get_annotations, getdoc
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dali_pipes.commands.options import cluster_options, join_options
from dali_pipes.errors import PipesError, shown

if TYPE_CHECKING:
    from bench.engine.scenario import Scenario
    from dali_pipes.store.shard_set import ShardSet

FORMS = "ais://bucket/prefix, a glob of local tars, or a directory."


def at_least(minimum: int) -> click.IntRange:
    return click.IntRange(min=minimum)


def words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",")]


class ListOption(click.ParamType[tuple[Any, ...]]):
    """The type of an option that takes several values of one ``kind``, ``str``, ``int`` or ``float``, separated by
    commas.
    """

    name = "text"

    def __init__(self, kind: type[str] | type[int] | type[float]) -> None:
        self.kind = kind

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[Any, ...]:
        """Return the values; an error names the option."""
        try:
            return tuple(self.kind(word) for word in words(value)) if isinstance(value, str) else value
        except ValueError:
            expected = "whole numbers" if self.kind is int else "numbers"
            option = "" if param is None else f"{param.opts[0]} "
            raise ValueError(f"{option}must be {expected} with commas between them, got '{value}'") from None


def option(
    default: Any = None,
    *,
    help: str | None = None,
    type: Any = None,
    name: str | None = None,
    factory: Callable[[], Any] | None = None,
    required: bool = False,
) -> Any:
    """Make a field of a scenario that is also an option of the scenario's command.

    ``default`` is as a user would type it, such as ``"64MiB"``; the field's default is the converted value.
    ``MISSING``: there is none. ``type`` is as for `click.option`; of a whole number, values must be at least 1.
    ``name`` is the option's name, if it differs from the field's. ``factory`` makes the field's default, which
    ``--help`` does not show. ``required``: the option must be given, although the field has a default.
    """
    if type is None and default.__class__ is int:
        type = at_least(1)
    attributes = {"name": name, "help": help, "type": type, "required": required or default is MISSING}
    if default is not None and default is not MISSING:
        attributes |= {"default": default, "is_flag": isinstance(default, bool)}
        default = click.types.convert_type(type, default)(default)
    if factory is not None:
        return field(default_factory=factory, metadata=attributes)
    return field(default=default, metadata=attributes)


def cache_option(help: str) -> Any:
    """Make the field ``work`` with the option ``--cache``: the directory for the files of a benchmark."""
    return option("/dev/shm", name="--cache", type=click.Path(path_type=Path), help=help)  # noqa: S108 (ours is made in it)


def field_options(kind: type) -> dict[str, Callable[..., Any]]:
    """Return the decorator of each field's option, by field name; the fields of base classes come first."""
    found: dict[str, dict[str, Any]] = {}
    for owner in filter(is_dataclass, reversed(kind.__mro__)):
        metadata = {one.name: dict(one.metadata) for one in fields(owner)}
        found |= {name: metadata[name] for name in get_annotations(owner) if metadata.get(name)}
    return {
        name: click.option(attributes.pop("name") or f"--{name.replace('_', '-')}", name, **attributes)
        for name, attributes in found.items()
    }


def _check_target(context: click.Context, parameter: click.Parameter, path: Path | None) -> Path | None:
    """Refuse a file that could not be written before anything is timed."""
    from bench.reports.record import check_target

    if path is not None and str(path) != "-":
        check_target(path, option=parameter.opts[0])
    return path


def target_option(*names: str, help: str) -> Callable[[Any], Any]:
    """Make an option for a file that is written at the end; before anything starts, check that it can be written."""
    return click.option(*names, type=click.Path(path_type=Path), callback=_check_target, help=help)


json_option = join_options(
    target_option("--json", "json_path", help="Write the record here."),
    click.option(
        "--publish",
        is_flag=True,
        help="Write it only if it may be published: the code is a commit's, and, where there is a baseline, no row's "
        "95 % interval of samples/s or CPU time is wider than 10 % of its median. For that, turns are added, up to "
        "five times --repeats.",
    ),
)


@contextlib.contextmanager
def opened_shards(
    shards: str, *, endpoint: str | None, embedded_dir: Path | None
) -> "Iterator[tuple[ShardSet, set[int]]]":
    """Open shards; yields them and the processes that were started to serve them, such as an embedded node."""
    from bench.tools.processes import child_pids
    from dali_pipes.commands.options import endpoint_for
    from dali_pipes.data_set.named import name_shards, without_removals
    from dali_pipes.errors import DataError

    with contextlib.ExitStack() as stack:
        before = child_pids()
        url = stack.enter_context(endpoint_for(shards, endpoint, embedded_dir))
        # Other loaders read whole shards.
        named = without_removals(name_shards(shards, endpoint=url))
        if named.version is not None:
            raise DataError(
                f"'{named.url}': benchmarks take the newest version of a data set, because other loaders know of no "
                f"versions; name it without @{named.version}"
            )
        yield named, child_pids() - before


def scenario_command(kind: "type[Scenario[Any, Any, Any]]") -> click.Command:
    """Make the command that runs a scenario: ``kind`` is its name, the class's docstring the help.

    The fields that were made by `option` are its options. With a field ``shards``, the command opens the shards that it
    names.
    """
    options = field_options(kind)
    reads_shards = "shards" in options

    @click.command(kind.kind, help=getdoc(kind))
    @join_options(*options.values(), json_option, *([cluster_options] if reads_shards else []))
    def command(*, json_path: Path | None, publish: bool, **given: Any) -> None:
        where = {name: given.pop(name) for name in ("endpoint", "embedded_dir") if reads_shards}
        shards = given.pop("shards", None)
        # A field whose option was not given has its own default.
        scenario: Any = kind(**{name: value for name, value in given.items() if value is not None})
        with contextlib.ExitStack() as stack:
            # Wrong settings were already refused, before anything is opened.
            if shards is not None:
                found, _ = stack.enter_context(opened_shards(shards, **where))
                scenario = replace(scenario, shards=found)
            run_and_tell(scenario, json_path=json_path, publish=publish)

    return command


def run_and_tell(scenario: "Scenario[Any, Any, Any]", *, json_path: Path | None, publish: bool = False) -> None:
    """Run a scenario, print its table, and write the record where that was asked for.

    If Ctrl-C, or a turn that fails, ends it early, the whole rounds before that are printed and written, too. Nothing
    is written if it cannot be published and ``publish`` is set.
    """
    from bench.engine.scenario import run_scenario
    from bench.reports.summary import differing
    from bench.tools.environment import describe_commit

    if publish and json_path is None:
        raise ValueError("--publish needs a file for the record: --json FILE")
    if publish and describe_commit()["is_dirty"] is not False:
        raise ValueError("--publish needs a git checkout whose code is a commit's; commit your changes first")

    def keep(report: dict[str, Any]) -> None:
        _tell(report, json_path=None if publish else json_path)
        where = "above; --json FILE writes them" if json_path is None else f"in '{json_path}'"
        where = "above; not written, because a record to publish is whole" if publish else where
        click.echo(
            f"stopped in {report['stopped'] or 'its last moment'}; kept: {report['num_rounds']} whole rounds, {where}",
            err=True,
        )

    is_steady = (lambda report: bool(report.get("failed")) or not differing(report)) if publish else None
    report = run_scenario(scenario, keep=keep, is_steady=is_steady)
    unsteady, failed = differing(report) if publish else [], report.get("failed")
    _tell(report, json_path=None if unsteady or (publish and failed) else json_path)
    if unsteady:
        raise PipesError(
            f"not written: the repeats differ by more than 10 % in {shown(unsteady)}; a fixed loop took "
            f"{min(report['quiet_ms'])} to {max(report['quiet_ms'])} ms between the turns, longer where other programs "
            "ran; end them, or raise --repeats"
        )
    if failed:
        names = dict.fromkeys(row["loader"] for row in failed)
        unwritten = "; the record is not written, because one to publish is whole" if publish else ""
        raise PipesError(
            f"failed, and left out of the table: {shown([*names])}; the notes below the table say why{unwritten}"
        )


def _tell(report: dict[str, Any], *, json_path: Path | None) -> None:
    """Print the table first: it is on the terminal even if the file cannot be written."""
    from bench.reports.record import write_record
    from bench.reports.tables import report_text

    click.echo(report_text(report))
    if json_path is not None:
        write_record(report, json_path)
