"""``dali-pipes prep add``, ``remove``, ``relabel``, ``compact``, ``diff`` and ``log``: versions of a data set."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click

from dali_pipes.commands.options import cluster_options, endpoint_for, format_bytes, json_option
from dali_pipes.commands.output import counted, fields_of, print_line, print_result, print_some
from prep.commands.options import (
    command_line,
    dry_run_option,
    jobs_option,
    no_part_option,
    on_option,
    pairs_option,
    take_recoding,
    there_already,
)
from prep.commands.pack import pack_document, packing_options, print_packed
from prep.sources import Kind

if TYPE_CHECKING:
    from prep.versions.add import AddReport

_SHOWN = 20


@click.command()
@click.argument("source")
@click.argument("dataset")
@click.option("--kind", type=click.Choice(get_args(Kind)), help="What SOURCE is.  [default: found out, and said]")
@pairs_option(
    "--component",
    "components",
    metavar="NAME=COLUMN",
    help="A column that becomes a component; see prep pack.",
)
@click.option("--label", metavar="COLUMN", help="The column with class ids, or names of classes.")
@click.option("--key", metavar="COLUMN", help="The column with the keys of samples.")
@click.option(
    "--known",
    type=click.Choice(["fail", "skip"]),
    default="fail",
    show_default=True,
    help="What happens to records whose key the data set has, or another one in its folder, such as the other split. "
    "fail: stop before anything is written, unless an earlier run of this command added them. skip: leave them out, so "
    "that a source that has grown can be added again and again.",
)
@click.option(
    "--shared-keys",
    "shares_keys",
    is_flag=True,
    help="Add records whose key another data set of the folder has: both hold data of the same samples.",
)
@click.option(
    "--same-photos",
    type=click.Choice(["add", "skip", "fail"]),
    default="add",
    show_default=True,
    help="What happens to samples whose photos the data set, or another one in its folder, has under other keys: "
    "the same bytes, after recoding. add: add them, with a warning. skip: leave them out, and name them. fail: add "
    "nothing. Photos of SOURCE are not compared with each other, and those of a dry run with none.",
)
@click.option(
    "--compare-keys/--no-compare-keys",
    default=True,
    show_default=True,
    help="Read the column files of the data set and of the others in its folder, about 20 bytes a sample, to find keys "
    "and photos that they have. Without this, samples may get into a data set twice, or into two splits. A command "
    "that is run again always compares keys.",
)
@click.option(
    "--any-components", is_flag=True, help="Allow records that lack a component which every sample of DATASET has."
)
@packing_options
@on_option
@no_part_option("it makes one version of the data set; --jobs and --on ray share its work")
def add(
    source: str,
    dataset: str,
    *,
    kind: Kind | None,
    components: dict[str, str],
    label: str | None,
    key: str | None,
    known: str,
    jobs: int | None,
    endpoint: str | None,
    embedded_dir: Path | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Add the samples of SOURCE to DATASET: pack and index new shards, and write a new version of the data set.

    SOURCE is what prep pack takes: class folders, photos, the pets layout, a table, Hugging Face's Parquet files
    or tars. A folder of photos that is called as a class of DATASET, or the only one in SOURCE, is a
    class folder. DATASET is an indexed data set: ais://BUCKET/PREFIX or DIRECTORY[/PREFIX].

    The data set's own shards are neither changed nor read. Older versions stay: DATASET@1 is the first. Loaders that
    name no version read the newest from when they are opened. Class ids never change; new classes get new ids.

    Run an interrupted command again to finish it. If another command wrote a version meanwhile, this one says so, and
    can be run again.
    """
    from dali_pipes.commands.output import print_note
    from prep.sources.detect import detect
    from prep.sources.tables import Fields
    from prep.versions.add import add as add_records
    from prep.versions.publish import open_newest

    with endpoint_for([source, dataset], endpoint, embedded_dir, writes=[dataset]) as answering:
        old = open_newest(dataset, endpoint=answering)
        found = detect(source, kind=kind, classes=old.manifest.classes.values())
        if not as_json:
            print_note(f"'{source}' is {found.text}")
        fields = Fields(components=components, label=label, key=key)
        records = found.open(endpoint=answering, fields=fields, jobs=jobs, show_progress=not as_json)
        report = add_records(
            records,
            old,
            recode=take_recoding(options),
            command=command_line(click.get_current_context()),
            skip_known=known == "skip",
            jobs=jobs,
            show_progress=not as_json,
            **options,
        )
    if report.packed is not None:
        print_packed(report.packed, records)
    packed = None if report.packed is None else pack_document(report.packed, records)
    print_result(_added_line(report), fields_of(report) | {"packed": packed}, as_json=as_json)


def _added_line(report: "AddReport", verb: str = "add", did: str = "added", has: str = "these samples") -> str:
    packed = report.packed
    now = f"{counted(report.num_shards, 'shard')}, {counted(report.num_samples, 'sample')}"
    if packed is None:
        if report.num_same_photos:
            same = counted(report.num_same_photos, "photo")
            return f"nothing to add: {same} there under other keys; '{report.url}@{report.version}' has {now}"
        if report.elsewhere:
            others = ", ".join(f"{number} of them in '{url}'" for url, number in report.elsewhere.items())
            return f"nothing to add: all keys are known, {others}; '{report.url}@{report.version}' has {now}"
        return f"nothing to {verb}: '{report.url}@{report.version}' has {has} already; it has {now}"
    notes = [f"left out {len(packed.skipped)}"] if packed.skipped else []
    notes += [] if packed.dry_run else there_already(len(packed.shards) - packed.num_written, "shards")
    notes += [f"{counted(report.num_known, 'key')} known"] if report.num_known else []
    notes += [f"{counted(report.num_same_photos, 'photo')} there under other keys"] if report.num_same_photos else []
    notes += [f"{counted(number, 'key')} known in '{url}'" for url, number in report.elsewhere.items()]
    if classes := [f"'{name}' ({label})" for label, name in report.new_classes.items()]:
        more = f" and {len(classes) - 5} more" if len(classes) > 5 else ""
        notes.append(f"{counted(len(classes), 'new class', 'new classes')}: {', '.join(classes[:5])}{more}")
    sizes = [counted(len(packed.shards), "shard"), counted(packed.num_samples, "sample")][:: 1 if verb == "add" else -1]
    has = f" to '{report.url}', which has" if report.dry_run else f" -> '{report.url}@{report.version}' has"
    return (
        f"{f'would {verb}' if report.dry_run else did} {', '.join(sizes)}, {format_bytes(packed.num_bytes)} in "
        f"{report.elapsed_s:.1f} s{' (' + '; '.join(notes) + ')' if notes else ''}{has} {now}"
    )


@click.command()
@click.argument("dataset")
@click.option("--key", "keys", metavar="KEY", multiple=True, help="A sample's key; may be repeated.")
@click.option(
    "--list",
    "lists",
    metavar="FILE",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    multiple=True,
    help="A list of samples: KEY or SHARD<tab>KEY on each line, or a quarantine file, as a loader's "
    "Select(exclude=...) takes them; may be repeated.",
)
@click.option("--shard", "shards", metavar="NAME", multiple=True, help="A shard with all its samples; may be repeated.")
@dry_run_option
@no_part_option("it writes one manifest")
@cluster_options
@json_option
def remove(
    dataset: str, *, dry_run: bool, endpoint: str | None, embedded_dir: Path | None, as_json: bool, **named: Any
) -> None:
    """Remove samples from DATASET: write a new version of the data set without them.

    DATASET is an indexed data set: ais://BUCKET/PREFIX or DIRECTORY[/PREFIX]. No shard is written: the new version's
    manifest says which samples are left out of every epoch. dali-pipes of an earlier version refuses such a manifest.
    Older versions stay, with the samples. To write shards without them, and to delete older versions: prep compact.
    """
    from prep.versions.publish import open_newest
    from prep.versions.remove import remove as remove_samples

    if not any(named.values()):
        raise click.UsageError("name samples with --key or --list, or shards with --shard")
    with endpoint_for([dataset], endpoint, embedded_dir, writes=[dataset]) as answering:
        newest, command = open_newest(dataset, endpoint=answering), command_line(click.get_current_context())
        report = remove_samples(newest, command=command, dry_run=dry_run, **named)
    did = "nothing to remove: the data set lacks these already"
    if report.num_removed or report.num_removed_shards:
        did = f"{'would remove' if dry_run else 'removed'} {counted(report.num_removed, 'sample')}"
        did += f", with {counted(report.num_removed_shards, 'shard')}" if report.num_removed_shards else ""
    now = f"{counted(report.num_shards, 'shard')}, {counted(report.num_samples, 'sample')}"
    has = "' would have" if dry_run else f"@{report.version}' has"
    print_result(f"{did} -> '{report.url}{has} {now}", fields_of(report), as_json=as_json)


@click.command()
@click.argument("first", metavar="A")
@click.argument("second", metavar="B")
@cluster_options
@json_option
def diff(first: str, second: str, *, endpoint: str | None, embedded_dir: Path | None, as_json: bool) -> None:
    """Say what B has and A has not, and the other way round: keys of samples, shards and classes.

    A and B are versions of a data set, such as ais://pets/shuffled-@2 and ais://pets/shuffled-, or two data sets. Only
    manifests and column files are read. The exit code is 0, whatever is found.
    """
    from dali_pipes.data_set.named import name_shards
    from prep.versions.diff import compare_sets

    with endpoint_for([first, second], endpoint, embedded_dir) as answering:
        found = compare_sets(name_shards(first, endpoint=answering), name_shards(second, endpoint=answering))
    lists = {
        "+ class": [f"{label} {name}" for label, name in found.added_classes.items()],
        "- class": [f"{label} {name}" for label, name in found.removed_classes.items()],
        "~ class": [f"{label} {old} -> {new}" for label, (old, new) in found.renamed_classes.items()],
        "+ shard": found.added_shards,
        "- shard": found.removed_shards,
        "+ key": found.added_keys,
        "- key": found.removed_keys,
        "~ key": [f"{key} class {old} -> {new}" for key, (old, new) in found.relabelled_keys.items()],
    }
    for what, names in ({} if as_json else lists).items():
        for name in names[:_SHOWN]:
            print_line(f"{what} {name}")
        if len(names) > _SHOWN:
            print_line(f"{what}: {len(names) - _SHOWN} more, --json names all")
    summary = (
        f"{counted(len(found.added_keys), 'sample')} added, {len(found.removed_keys)} removed, "
        f"{len(found.relabelled_keys)} relabelled, {found.num_moved} in another shard; "
        f"{counted(len(found.added_shards), 'shard')} added, {len(found.removed_shards)} removed; "
        f"{counted(len(found.added_classes), 'class', 'classes')} added, {len(found.removed_classes)} removed"
    )
    line = f"'{found.urls[0]}' and '{found.urls[1]}' are equal" if found.is_equal else summary
    print_result(line, fields_of(found) | {"is_equal": found.is_equal}, as_json=as_json)


@click.command()
@click.argument("dataset")
@click.argument("labels", required=False, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@pairs_option("--rename", "renames", metavar="OLD=NEW", help="A class's name and its new name; may be repeated.")
@click.option("--new-classes", is_flag=True, help="Names that DATASET lacks become new classes, with new ids.")
@dry_run_option
@jobs_option("Shards in flight, each written by a process of its own")
@no_part_option("it makes one version of the data set")
@cluster_options
@json_option
def relabel(
    dataset: str, labels: Path | None, *, endpoint: str | None, embedded_dir: Path | None, as_json: bool, **options: Any
) -> None:
    """Give samples of DATASET other classes, or its classes other names, as a new version of the data set.

    LABELS is a table with the columns key and class: names, or if all are integers, ids. Only its samples are written.
    """
    from prep.versions import publish, relabel

    renames = options.pop("renames")
    if (labels is None) != bool(renames) or (renames and options["new_classes"]):
        raise click.UsageError("give either LABELS, maybe with --new-classes, or --rename")
    with endpoint_for([dataset], endpoint, embedded_dir, writes=[dataset]) as answering:
        newest, command = publish.open_newest(dataset, endpoint=answering), command_line(click.get_current_context())
        if labels is not None:
            report = relabel.relabel(newest, labels, command=command, show_progress=not as_json, **options)
            line = _added_line(report, "relabel", "relabelled", "these classes")
            document = fields_of(report) | {"packed": report.packed and fields_of(report.packed)}
        else:
            version = relabel.rename(newest, renames, command=command, dry_run=options["dry_run"])
            pairs = ", ".join(f"'{old}' to '{new}'" for old, new in renames.items() if old != new) or "nothing"
            line = f"{'would rename' if options['dry_run'] else 'renamed'} {pairs} -> '{newest.url}@{version}'"
            document = {"url": newest.url, "version": version, "renamed": renames}
    print_result(line, document, as_json=as_json)


@click.command()
@click.argument("dataset")
@click.option(
    "--drop-old",
    is_flag=True,
    help="Afterwards, delete all older versions: their manifests, and the shards and index files that the newest "
    "version does not have. Jobs that read them fail. What is deleted is named; see it first with --dry-run.",
)
@dry_run_option
@jobs_option("Shards in flight, each written by a process of its own")
@no_part_option("it makes one version of the data set")
@cluster_options
@json_option
def compact(
    dataset: str, *, endpoint: str | None, embedded_dir: Path | None, as_json: bool, dry_run: bool, **options: Any
) -> None:
    """Write the shards of DATASET that hold removed samples anew, without them, as a new version of the data set.

    Only these shards are read and compared with their checksums. The order of the other samples stays. Older versions
    stay, too, until --drop-old.
    """
    from prep.versions.publish import open_newest
    from prep.versions.remove import compact as compact_shards

    with endpoint_for([dataset], endpoint, embedded_dir, writes=[dataset]) as answering:
        newest, command = open_newest(dataset, endpoint=answering), command_line(click.get_current_context())
        report = compact_shards(newest, command=command, dry_run=dry_run, show_progress=not as_json, **options)
    print_some("would delete" if dry_run else "deleted", report.deleted)
    if report.num_rewritten:
        sizes = f"{format_bytes(report.bytes_before)} -> {format_bytes(report.bytes_after)}"
        line = (
            f"{'would write' if dry_run else 'wrote'} {counted(report.num_rewritten, 'shard')} anew without "
            f"{counted(report.num_removed, 'sample')}, {sizes}"
        )
    else:
        line = "nothing to compact: no shard holds a removed sample"
    if options["drop_old"]:
        versions = ", ".join(map(str, report.dropped_versions)) or "none"
        line += (
            f"; {'would delete' if dry_run else 'deleted'} older versions: {versions}, "
            f"{counted(len(report.deleted), 'object')}"
        )
    print_result(f"{line} -> '{report.url}@{report.version}'", fields_of(report), as_json=as_json)


@click.command()
@click.argument("dataset")
@cluster_options
@json_option
def log(dataset: str, *, endpoint: str | None, embedded_dir: Path | None, as_json: bool) -> None:
    """List the versions of DATASET, the newest first: when and by which command each was made, and what it has.

    DATASET is an indexed data set: ais://BUCKET/PREFIX or DIRECTORY[/PREFIX]. Only manifests are read.
    """
    from dali_pipes.data_set.indexing import stored_versions
    from dali_pipes.data_set.named import name_shards
    from dali_pipes.errors import DataError
    from prep.versions.publish import history_of

    with endpoint_for([dataset], endpoint, embedded_dir) as answering:
        shards = name_shards(dataset, endpoint=answering)
        manifest = shards.manifest
        if manifest is None:
            raise DataError(f"'{shards.url}' has no manifest, so it has no versions; index it: {shards.index_command}")
        stored = {*stored_versions(shards.store, shards.prefix), manifest.version}
    history = history_of(manifest)
    if as_json:
        rows = [change._asdict() | {"stored": change.version in stored} for change in history]
        print_result("", {"url": shards.url, "versions": rows}, as_json=True)
        return
    print_line(f"'{shards.store.locate(shards.prefix)}': {counted(len(history), 'version')}")
    befores = [0, *(change.num_samples for change in history)]
    for change, before in zip(history[::-1], befores[-2::-1], strict=True):
        samples = f"{counted(change.num_samples, 'sample')} ({change.num_samples - before:+})"
        size, gone = (
            f"{counted(change.num_shards, 'shard')}, {samples}",
            "" if change.version in stored else "  (deleted)",
        )
        line = f"@{change.version}  {change.date or '-':20}  {change.what:7}  {size}  {change.command}{gone}"
        print_line(line.rstrip())
