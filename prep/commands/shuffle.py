"""``dali-pipes prep shuffle``."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dali_pipes.commands.options import cluster_options, endpoint_for, format_bytes, json_option, size
from dali_pipes.commands.output import counted, fields_of, print_line, print_result
from prep.commands.options import (
    allow_missing_option,
    dry_run_option,
    jobs_option,
    of_part,
    on_option,
    overwrite_option,
    parse_shares,
    part_option,
    seed_option,
    shard_span,
    there_already,
)

if TYPE_CHECKING:
    from prep.shuffle.shuffle import ShuffleReport


_GIVEN = click.core.ParameterSource.COMMANDLINE
# Options that a dSort spec contains.
_IN_SPEC = (
    *("output", "kind", "seed", "epoch", "component", "key_type", "decreasing", "shard_bytes", "extension"),
    *("ekm", "by", "splits", "allow_missing"),
)


@click.command()
@click.argument("urls", metavar="[URL]...", nargs=-1)
@click.option(
    "--output",
    metavar="PREFIX",
    default="shuffled-",
    show_default=True,
    help="The beginning of the output's names, in the same bucket or directory; ais://BUCKET/PREFIX for another.",
)
@click.option(
    "--algorithm",
    "kind",
    type=click.Choice(["shuffle", "alphanumeric", "content", "none"]),
    default="shuffle",
    show_default=True,
    help="The order. shuffle: random, from --seed. alphanumeric: by name. content: by the content of --component. "
    "none: unchanged; only the shards' sizes change; by an exchange, because dSort does not keep the order.",
)
@seed_option("the random order")
@click.option(
    "--epoch",
    type=click.IntRange(min=0),
    help="Shuffle for this epoch: the seed is made of --seed and this number, and e000001- stands before the output's "
    "names.  [default: none]",
)
@click.option("--component", help="With content: the component to sort by, such as cls.  [default: none]")
@click.option(
    "--key-type",
    type=click.Choice(["int", "float", "string"]),
    default="string",
    show_default=True,
    help="With content: the type of that component.",
)
@click.option("--decreasing", is_flag=True, help="Reverse the order of alphanumeric and content.")
@click.option("--shard-bytes", type=size, help="Bytes of components in an output shard.  [default: the input's mean]")
@click.option(
    "--extension",
    type=click.Choice([".tar", ".tgz", ".tar.gz"]),
    help="The output's extension. Compressed shards cannot be indexed or loaded.  [default: the input's]",
)
@click.option(
    "--ekm",
    metavar="FILE|URL",
    help='An external key map, which names the shards: {"cats-{000..099}.tar": ["cat/1", "^cat/[2-9]"], ...}, or lines '
    "of key, tab, template. An entry is a key or a regular expression.  [default: none]",
)
@click.option(
    "--by",
    type=click.Choice(["class", "balanced", "folder", "split"]),
    help="Make such a map. class: separate shards for each class id. balanced: the same mixture of classes in every "
    "shard. folder: by a key's first directory. split: see --splits.  [default: none]",
)
@click.option(
    "--splits",
    metavar="NAME=SHARE,...",
    help="With --by split: train=0.9,val=0.1. A sample's split depends on its key and "
    "--seed alone: it stays when samples are added. Numbers of samples are near the shares.  [default: none]",
)
@click.option("--drop-unmapped", is_flag=True, help="With --ekm: leave out samples that the map does not name.")
@click.option(
    "--spec",
    type=click.Path(dir_okay=False, path_type=Path),
    help="A dSort spec, JSON or YAML, as `ais start dsort -f` takes it. It replaces URL and the options that it "
    "covers.  [default: none]",
)
@click.option(
    "--engine",
    type=click.Choice(["auto", "dsort", "exchange"]),
    default="auto",
    show_default=True,
    help="dsort: the cluster. exchange: worker processes, each of which puts its output shards together from ranges of "
    "the input; all bytes pass through their machines. auto: the cluster; but the exchange for directories, with --on "
    "ray or --part, or if the cluster has no dSort that works.",
)
@on_option
@jobs_option("Workers of an exchange")
@part_option("of the output shards, by an exchange; the input must be indexed")
@dry_run_option
@allow_missing_option
@overwrite_option("other shards under the output's names")
@cluster_options
@json_option
def shuffle(
    urls: tuple[str, ...],
    *,
    spec: Path | None,
    endpoint: str | None,
    embedded_dir: Path | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Write the samples of the shards at URL to new shards, in another order.

    URL is ais://BUCKET/PREFIX, ais://BUCKET/PREFIX{000000..000009}.tar or a DIRECTORY; .tar, .tgz or .tar.gz. The
    input is kept; input and output are read and compared.

    The command writes PREFIX000000.tar, ... under --output, and a copy of the class table. It deletes index files of
    other shards with these names. To finish an exchange that was interrupted, run it again.

    The same seed gives the same shards by an exchange and on the embedded node. On a cluster of several targets the
    order also depends on their timing.
    """
    context = click.get_current_context()
    common = {name: value for name, value in options.items() if name not in _IN_SPEC} | {"show_progress": not as_json}
    if spec is not None:
        _check_only_spec(context, urls)
        report = _shuffle_by_spec(spec, endpoint, embedded_dir, common)
    else:
        _check_options(context, urls, options)
        report = _shuffle_urls(urls, endpoint, embedded_dir, options, common)
    if report.dry_run and not as_json:
        if report.spec is not None:
            click.echo(json.dumps(report.spec, indent=2))
        for shard in report.planned:
            amount = f"{counted(shard['num_samples'], 'sample')}, {format_bytes(shard['num_bytes'])}"
            print_line(f"{shard['name']}: {amount}")
    line = of_part(lambda: shuffle_summary(report), options["part"], report.url, report.shards)
    print_result(line, fields_of(report), as_json=as_json)


def _shuffle_by_spec(
    path: Path, endpoint: str | None, embedded_dir: Path | None, common: dict[str, Any]
) -> "ShuffleReport":
    from prep.shuffle.request import read_spec, request_of_spec
    from prep.shuffle.shuffle import shuffle as shuffle_shards

    parsed = read_spec(path)
    with endpoint_for(f"ais://{parsed.source.name}", endpoint, embedded_dir) as answering:
        assert answering is not None
        return shuffle_shards(request_of_spec(parsed, endpoint=answering, **common))


def _shuffle_urls(
    urls: tuple[str, ...],
    endpoint: str | None,
    embedded_dir: Path | None,
    options: dict[str, Any],
    common: dict[str, Any],
) -> "ShuffleReport":
    from dali_pipes.data_set.named import list_shards
    from dali_pipes.errors import StoreError
    from dali_pipes.store.shard_names import extension_of
    from dali_pipes.store.urls import is_remote, open_store
    from prep.shuffle.key_map import Grouping, KeyMap
    from prep.shuffle.order import Algorithm
    from prep.shuffle.request import Request, epoch_prefix, epoch_seed, load_key_map
    from prep.shuffle.shuffle import shuffle as shuffle_shards

    output, seed, epoch, ekm = options["output"], options["seed"], options["epoch"], options["ekm"]
    algorithm = Algorithm(
        kind=options["kind"],
        seed=seed if epoch is None else epoch_seed(seed, epoch),
        decreasing=options["decreasing"],
        component=options["component"] or "",
        key_type=options["key_type"],
    )
    mapped: Grouping | KeyMap | None = None
    if options["by"]:
        mapped = Grouping(by=options["by"], shares=parse_shares(options["splits"], option="--splits"), seed=seed)
    with endpoint_for((*urls, ekm or ""), endpoint, embedded_dir, writes=[output]) as answering:
        try:
            shards = list_shards(urls, endpoint=answering, compressed=True, allow_missing=options["allow_missing"])
        except StoreError as exc:
            if len(urls) == 1:
                raise
            raise StoreError(f"{exc}; every URL is an input here, and --output names the output") from exc
        target, prefix = open_store(output, endpoint=answering) if is_remote(output) else (None, output)
        if ekm:
            extension = options["extension"] or extension_of(shards.names[0])
            mapped = load_key_map(ekm, endpoint=answering, extension=extension)
        request = Request(
            shards,
            output_prefix=prefix if epoch is None else epoch_prefix(prefix, epoch),
            target=target,
            algorithm=algorithm,
            shard_bytes=options["shard_bytes"],
            mapped=mapped,
            extension=options["extension"] or "",
            **common,
        )
        return shuffle_shards(request)


def _check_only_spec(context: click.Context, urls: Sequence[str]) -> None:
    """Refuse options beside --spec that the spec itself contains."""
    given = [name for name in _IN_SPEC if context.get_parameter_source(name) is _GIVEN]
    if urls or given:
        options = {parameter.name: parameter.opts[0] for parameter in context.command.params}
        found = [*(["URL"] if urls else []), *(options[name] for name in given)]
        raise click.UsageError(f"--spec replaces these; drop {', '.join(found)}, or write it into the spec.")


def _check_options(context: click.Context, urls: Sequence[str], options: dict[str, Any]) -> None:
    from dali_pipes.store.urls import is_remote

    ekm, kind = options["ekm"], options["kind"]
    if not urls:
        raise click.UsageError("Missing argument 'URL...', or --spec FILE.")
    if ekm and options["by"]:
        raise click.UsageError("--ekm and --by are two ways to choose the shards of samples; give one.")
    if options["epoch"] is not None and (ekm or kind != "shuffle"):
        what = "--ekm, which names the shards" if ekm else f"--algorithm {kind}, which is not random"
        raise click.UsageError(f"--epoch gives each epoch other names and a seed: it does not go with {what}.")
    if ekm and not is_remote(options["output"]) and context.get_parameter_source("output") is _GIVEN:
        raise click.UsageError("--ekm names the shards; drop --output.")
    if options["splits"] and not options["by"]:
        raise click.UsageError("--splits goes with --by split.")


def shuffle_summary(report: "ShuffleReport") -> str:
    """A report in one line."""
    there = 0 if report.dry_run else len(report.shards) - report.num_written
    notes = there_already(there, "shards")
    if report.num_dropped:
        notes.append(f"left out {counted(report.num_dropped, 'sample')} that the key map lacks")
    return (
        f"{'would shuffle' if report.dry_run else 'shuffled'} {counted(report.num_input_shards, 'shard')} into "
        f"{counted(len(report.shards), 'shard')}, {counted(report.num_samples, 'sample')}, "
        f"{format_bytes(report.num_bytes)} in {report.elapsed_s:.1f} s{'' if report.dry_run else ', verified'}"
        f"{' (' + ', '.join(notes) + ')' if notes else ''} -> {_output_span(report.url, report.shards)}"
    )


def _output_span(url: str, shards: Sequence[str]) -> str:
    """``ais://pets/shuffled-{000000..000003}.tar``, or the number of sets if a map made several."""
    stems = {re.sub(r"[0-9]+\.(tar|tgz|tar\.gz)$", "", shard) for shard in shards}
    if len(stems) != 1 or not shards[0].endswith(".tar") or not url.endswith(min(stems)):
        return f"{url}... ({counted(len(stems), 'set')}, '{shards[0]}' to '{shards[-1]}')"
    return shard_span(url, shards)
