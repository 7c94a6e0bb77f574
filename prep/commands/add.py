"""``dali-pipes prep add``."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click

from dali_pipes.commands.options import endpoint_for, format_bytes
from dali_pipes.commands.output import counted, fields_of, print_result
from prep.commands.options import (
    command_line,
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
    "--compare-keys/--no-compare-keys",
    default=True,
    show_default=True,
    help="Read the column files of the data set and of the others in its folder, about 20 bytes a sample, to find keys "
    "that they have, and warn of photos that the data set has under other keys. Without this, samples may get into a "
    "data set twice, or into two splits.",
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

    The data set's own shards are not changed, and of them only photos are read that may equal added ones. Older
    versions stay: DATASET@1 is the first. Loaders that name no version read the newest from when they are opened. Class
    ids never change; new classes get new ids.

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
    print_result(_line(report), fields_of(report) | {"packed": packed}, as_json=as_json)


def _line(report: "AddReport") -> str:
    packed = report.packed
    now = f"{counted(report.num_shards, 'shard')}, {counted(report.num_samples, 'sample')}"
    if packed is None:
        if report.elsewhere:
            others = ", ".join(f"{number} of them in '{url}'" for url, number in report.elsewhere.items())
            return f"nothing to add: all keys are known, {others}; '{report.url}@{report.version}' has {now}"
        return f"nothing to add: '{report.url}@{report.version}' has these samples already; it has {now}"
    notes = [f"left out {len(packed.skipped)}"] if packed.skipped else []
    notes += [] if packed.dry_run else there_already(len(packed.shards) - packed.num_written, "shards")
    notes += [f"{counted(report.num_known, 'key')} known"] if report.num_known else []
    notes += [f"{counted(number, 'key')} known in '{url}'" for url, number in report.elsewhere.items()]
    if classes := [f"'{name}' ({label})" for label, name in report.new_classes.items()]:
        more = f" and {len(classes) - 5} more" if len(classes) > 5 else ""
        notes.append(f"{counted(len(classes), 'new class', 'new classes')}: {', '.join(classes[:5])}{more}")
    has = f" to '{report.url}', which has" if report.dry_run else f" -> '{report.url}@{report.version}' has"
    return (
        f"{'would add' if report.dry_run else 'added'} {counted(len(packed.shards), 'shard')}, "
        f"{counted(packed.num_samples, 'sample')}, {format_bytes(packed.num_bytes)} in {report.elapsed_s:.1f} s"
        f"{' (' + '; '.join(notes) + ')' if notes else ''}{has} {now}"
    )
