"""``dali-pipes prep log``."""

from pathlib import Path

import click

from dali_pipes.commands.options import cluster_options, endpoint_for, json_option
from dali_pipes.commands.output import counted, print_line, print_result


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

    with endpoint_for([dataset], endpoint, embedded_dir) as answering:
        shards = name_shards(dataset, endpoint=answering)
        manifest = shards.manifest
        if manifest is None:
            raise DataError(f"'{shards.url}' has no manifest, so it has no versions; index it: {shards.index_command}")
        stored = {*stored_versions(shards.store, shards.prefix), manifest.version}
    rows = [change._asdict() | {"stored": change.version in stored} for change in manifest.history]
    if not rows:
        rows = [
            {
                "version": 1, "date": "", "what": "index", "token": "", "command": "", "stored": True,
                "num_samples": manifest.num_kept, "num_shards": manifest.num_shards, "digest": "",
            }
        ]  # fmt: skip
    lines = [f"'{shards.store.locate(shards.prefix)}': {counted(len(rows), 'version')}"]
    before = {"num_samples": 0}
    for row in rows:
        gained = row["num_samples"] - before["num_samples"]
        size = f"{counted(row['num_shards'], 'shard')}, {counted(row['num_samples'], 'sample')} ({gained:+})"
        gone = "" if row["stored"] else "  (deleted)"
        lines.insert(1, f"@{row['version']}  {row['date'] or '-':20}  {row['what']:7}  {size}  {row['command']}{gone}")
        before = row
    if not as_json:
        for line in lines[:-1]:
            print_line(line.rstrip())
    print_result(lines[-1].rstrip(), {"url": shards.url, "versions": rows}, as_json=as_json)
