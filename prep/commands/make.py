"""``dali-pipes prep make``."""

import os
import shlex
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click

from dali_pipes.commands.options import endpoint_for, format_bytes
from dali_pipes.commands.output import counted, fields_of, print_note, print_result
from dali_pipes.progress import current_verbosity
from prep.commands.options import no_part_option, parse_shares, seed_option
from prep.commands.pack import (
    field_options,
    pack_document,
    pack_options,
    pack_summary,
    pack_to,
    root_option,
    take_fields,
)
from prep.commands.shuffle import shuffle_summary
from prep.commands.verify import is_good, print_report, verify_document
from prep.sources import Kind

if TYPE_CHECKING:
    from dali_pipes.store.base import Store
    from dali_pipes.store.shard_set import ShardSet
    from prep.make import MadeSet, Names


@click.command()
@click.argument("source")
@click.argument("dest")
@click.option(
    "--kind",
    type=click.Choice(get_args(Kind)),
    help="What SOURCE is, in the words of prep pack.  [default: found out]",
)
@click.option(
    "--split",
    metavar="NAME=SHARE,...",
    help="Make a data set of each split: train=0.9,val=0.1. A sample's split depends on its key and --seed alone: it "
    "stays when samples are added.  [default: the splits of SOURCE, else one data set]",
)
@seed_option("the shuffle and the split")
@click.option(
    "--keep-unshuffled",
    is_flag=True,
    help="Keep the packed shards in DEST/unshuffled. They go when the data sets are verified: they take the same room.",
)
@click.option("--no-verify", is_flag=True, help="Do not read and decode everything at the end.")
@field_options
@root_option
@no_part_option("its steps need each other; run pack, shuffle, index and verify with --part")
@pack_options
def make(
    source: str,
    dest: str,
    *,
    kind: Kind | None,
    split: str | None,
    seed: int,
    keep_unshuffled: bool,
    no_verify: bool,
    endpoint: str | None,
    embedded_dir: Path | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Make data sets of SOURCE in DEST: pack, shuffle, split if asked to, index and verify.

    SOURCE is a folder of photos or of class folders, the pets layout, COCO's, YOLO's, Pascal VOC's, a table,
    Hugging Face's Parquet files or tars: the command finds out which, and says so. Folders or files called train, val
    or test are splits. DEST is ais://BUCKET[/PREFIX] or DIRECTORY[/PREFIX].

    The command writes DEST/shuffled-..., or DEST/train-... and so on for splits, which are the data sets; and their
    index. The shards as packed lie in DEST/unshuffled until the data sets are verified. The command says what it does
    on stderr. On stdout is a Python program that loads the data sets. Run it again to finish what was interrupted.

    Each step is a command of its own, with more options: prep pack, prep shuffle, prep index, prep verify. The exit
    code is 1 if something is wrong with the data: for bad samples that were kept, if they are more than --max-bad.
    """
    from dali_pipes.store.cluster.endpoint import default_embedded_dir
    from dali_pipes.store.urls import open_prefix
    from prep.make import Names, check_apart, check_shares, check_unchanged, delete_packed, python_program
    from prep.sources.detect import detect

    started = time.perf_counter()
    shares = parse_shares(split, option="--split")
    fields = take_fields(options)
    check_apart(source, dest)
    check_shares(shares, seed=seed)
    found = detect(source, kind=kind)
    if shares and found.splits:
        raise ValueError(f"'{source}' has the splits {', '.join(found.splits)} already: {found.text}; drop --split")
    print_note(f"source: '{source}' is {found.text}")
    reads = [source] if found.kind == "tars" else []
    with endpoint_for(reads, endpoint, embedded_dir, writes=[dest]) as answering:
        store, base = open_prefix(dest, endpoint=answering)
        names = Names(base=base, splits=tuple(shares) or found.splits)
        check_unchanged(store, names)
        maker = _Maker(store, names, options, show_progress=not as_json)
        records = found.open(endpoint=answering, fields=fields, jobs=options["jobs"], show_progress=not as_json)
        packed = pack_to(records, store, names.packed, show_progress=not as_json, **options)
        print_note(f"pack: {pack_summary(packed)}")
        maker.document["pack"] = pack_document(packed, records)
        maker.num_bad = len(packed.skipped)
        if options["dry_run"]:
            for prefix in names.sets:
                print_note(f"shuffle, index, verify: would write {store.locate(prefix)}...")
            program = ""
        else:
            sets = maker.make_sets(packed.shards, shares, seed=seed, masks=fields.masks, verifies=not no_verify)
            if maker.is_good and not (keep_unshuffled or no_verify):
                delete_packed(store, names)
                print_note(f"deleted: {store.locate(names.packed)}, the shards before the shuffle")
            is_embedded = answering is not None and endpoint is None
            program = python_program(
                sets,
                seed=seed,
                masks=fields.masks,
                max_pixels=options["max_pixels"],
                has_bad=bool(packed.kept),
                endpoint=None if endpoint == os.environ.get("AIS_ENDPOINT") else endpoint,
                embedded_dir=embedded_dir or default_embedded_dir() if is_embedded else None,
            )
    maker.document |= {"source": {"kind": found.kind, "text": found.text}, "python": program}
    if program and maker.num_bad and maker.is_good:
        print_note(f"bad photos or samples: {maker.num_bad}; --max-bad allows them, so the exit code is 0")
    if program:
        print_note(f"ready in {time.perf_counter() - started:.1f} s; to load it:")
    if as_json:
        print_result("", maker.document, as_json=True)
    else:
        click.echo(program, nl=False)
    click.get_current_context().exit(0 if maker.is_good else 1)


class _Maker:
    """The steps after the pack; each says what it did, and adds it to the document for ``--json``."""

    def __init__(self, store: "Store", names: "Names", options: dict[str, Any], *, show_progress: bool) -> None:
        self._store, self._names, self._options = store, names, options
        self._show_progress = show_progress
        self.document: dict[str, Any] = {}
        self.is_good = True
        self.num_bad = 0
        """Records and pictures that were left out, and bad samples that are in the data sets."""

    def make_sets(
        self,
        shards: Sequence[str],
        shares: dict[str, float],
        *,
        seed: int,
        masks: Sequence[str] | None,
        verifies: bool,
    ) -> "list[MadeSet]":
        """Shuffle and split, index, verify."""
        from dali_pipes.data_set.data_set import DataSet
        from dali_pipes.errors import shown
        from dali_pipes.store.shard_set import ShardSet
        from prep.make import sets_beside, shards_of, shuffle_packed
        from prep.versions.fit import MAX_READ_BYTES, find_same_photos, same_photos_text
        from prep.versions.publish import Newest

        shuffled = shuffle_packed(
            ShardSet(store=self._store, names=tuple(shards)),
            self._names,
            seed=seed,
            shares=shares,
            overwrite=self._options["overwrite"],
            show_progress=self._show_progress,
        )
        print_note(f"shuffle: {shuffle_summary(shuffled)}")
        self.document |= {"shuffle": fields_of(shuffled), "sets": []}
        if self._options["overwrite"] and (beside := sets_beside(self._store, self._names)):
            print_note(
                f"beside them: {shown(beside)}; a data set that an earlier split made of this source shares samples "
                "with those made now: delete it"
            )
        made: list[MadeSet] = []
        known: list[Newest] = []
        for split, prefix in zip(self._names.splits or ("",), self._names.sets, strict=True):
            part = shards_of(self._store, shuffled.shards, prefix)
            made.append(self._finish(part, split, masks=masks, verifies=verifies))
            part = replace(part, manifest=made[-1].manifest)
            if same := find_same_photos(DataSet(part), known, max_bytes=MAX_READ_BYTES):
                print_note(f"equal photos in two splits: {part.url}: {same_photos_text(same, part)}")
            known.append(Newest(store=self._store, prefix=prefix, manifest=made[-1].manifest))
        return made

    def _finish(self, shards: "ShardSet", split: str, *, masks: Sequence[str] | None, verifies: bool) -> "MadeSet":
        """Index and verify one data set."""
        from dali_pipes.formats.photo_header import MAX_PIXELS
        from prep.inspect.verify import verify
        from prep.make import MadeSet, index_once

        overwrite = self._options["overwrite"]
        manifest, was_there = index_once(shards, overwrite=overwrite, show_progress=self._show_progress)
        print_note(
            f"index: {counted(manifest.num_shards, 'shard')}, {counted(manifest.num_samples, 'sample')}, "
            f"{format_bytes(manifest.total_bytes)} -> {shards.url}{' (was there already)' if was_there else ''}"
        )
        report = None
        if verifies:
            max_pixels = self._options["max_pixels"] or MAX_PIXELS
            report = verify(shards, masks=masks, max_pixels=max_pixels, show_progress=self._show_progress)
            if report.num_problems or current_verbosity() != "quiet":
                print_report(report, show=3, err=True)
            if report.num_bad_samples:
                print_note(
                    "a loader stops at a bad sample; to leave them out: dali-pipes prep verify "
                    f"{shlex.quote(shards.url)} --quarantine bad.tsv, and select=dp.Select(exclude='bad.tsv')"
                )
            self.num_bad += report.num_bad_samples
            self.is_good &= is_good(report, self._options["max_bad"])
        self.document["sets"].append(
            {
                "url": shards.url,
                "split": split,
                "num_shards": manifest.num_shards,
                "num_samples": manifest.num_samples,
                "num_bytes": manifest.total_bytes,
                "digest": manifest.digest,
                "was_indexed": was_there,
                "verify": None if report is None else verify_document(report, None),
            }
        )
        return MadeSet(url=shards.url, split=split, manifest=manifest)
