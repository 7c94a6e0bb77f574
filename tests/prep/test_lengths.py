"""Whatever iterates says before how often it will: sources, tables, templates, columns, sets of shards."""

import importlib
import inspect
import pkgutil
from collections.abc import Iterable, Sized
from pathlib import Path

import pytest
import webdataset

import dali_pipes.formats
import prep
from dali_pipes.data_set.indexing import find_columns, find_manifest
from dali_pipes.formats.tar_reader import ArchiveReader
from dali_pipes.store.local import LocalStore
from dali_pipes.store.shard_names import Template
from dali_pipes.store.urls import resolve_shards
from prep.index import index_shards
from prep.sources.demo_photos import demo_photos
from prep.sources.imagefolder import imagefolder
from prep.sources.pets import pets
from prep.sources.record import Source
from prep.sources.tars import tars
from tests.builders import pack
from tests.sources import encode_photo, table, write_pets

# Modules that are programs: importing one runs it.
PROGRAMS = {"prep.__main__"}


def _classes() -> dict[str, type]:
    """All classes of prep and of the formats, those with an underscore, too."""
    places = ((prep.__path__, "prep."), (dali_pipes.formats.__path__, "dali_pipes.formats."))
    names = [module.name for path, prefix in places for module in pkgutil.walk_packages(path, prefix)]
    return {
        f"{name}.{found.__qualname__}": found
        for name in names
        if name not in PROGRAMS
        for found in vars(importlib.import_module(name)).values()
        if inspect.isclass(found) and found.__module__ == name
    }


def test_every_class_that_iterates_has_a_length_or_says_why_not() -> None:
    """A new one without either fails here."""
    iterating = {name: found for name, found in _classes().items() if issubclass(found, Iterable)}
    assert {
        "dali_pipes.formats.texts.Texts",
        "prep.sources.tables._Rows",
        "dali_pipes.formats.tar_reader.ArchiveReader",
    } <= set(iterating)
    without = {
        name
        for name, found in iterating.items()
        if not issubclass(found, Sized) and not any("no len()" in (base.__doc__ or "") for base in found.__mro__)
    }
    assert without == set()
    assert not issubclass(ArchiveReader, Sized), "a tar has no table of contents"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Photos in two folders, and a list of them."""
    for number in range(5):
        path = tmp_path / "in" / ("cat", "dog")[number % 2] / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encode_photo(seed=number))
    paths = sorted(path.relative_to(tmp_path / "in") for path in (tmp_path / "in").rglob("*.jpg"))
    (tmp_path / "in" / "list.csv").write_text("path,label\n" + "".join(f"{path},1\n" for path in paths))
    return tmp_path / "in"


def _source(kind: str, folder: Path) -> Source:
    root = folder.parent
    if kind == "pets":
        return pets(write_pets(root / "pets", {f"beagle_{number}": 1 for number in range(7)}))
    if kind == "imagefolder":
        return imagefolder(folder)
    if kind == "demo":
        return demo_photos(count=9)
    if kind == "table":
        return table(folder / "list.csv")
    pack(imagefolder(folder), store=LocalStore(root / "shards"), max_count=2)
    shards = resolve_shards(root / "shards", endpoint=None)
    return tars(shards)


@pytest.mark.parametrize(
    ("kind", "expected"), [("pets", 7), ("imagefolder", 5), ("demo", 9), ("table", 5), ("tars", 5)]
)
def test_a_source_and_what_is_packed_of_it_are_counted_before(kind: str, expected: int, folder: Path) -> None:
    """The records, what a pack says of them before it writes, and what is in the shards."""
    source = _source(kind, folder)
    assert len(source.records) == expected == sum(1 for _ in source.records)
    out = LocalStore(folder.parent / "out")
    planned = pack(source, store=out, max_count=3, dry_run=True)
    assert (planned.num_samples, len(planned.shards)) == (expected, -(-expected // 3))
    done = pack(source, store=out, max_count=3)
    assert (done.num_samples, done.shards, done.num_bytes) == (expected, planned.shards, planned.num_bytes)
    urls = [out.locate(name) for name in done.shards]
    assert sum(1 for _ in webdataset.WebDataset(urls, shardshuffle=False)) == expected


def test_a_set_of_shards_is_counted_by_its_manifest(folder: Path) -> None:
    """Samples, keys and labels, of the whole set and of each shard: nothing of a shard is read for it."""
    store = LocalStore(folder.parent / "shards")
    pack(imagefolder(folder), store=store, max_count=2)
    shards = resolve_shards(store.directory, endpoint=None)
    index_shards(shards)
    for name in shards.names:
        store.delete(name)
    manifest = find_manifest(shards)
    assert manifest is not None
    columns = find_columns(shards, manifest)
    assert columns is not None
    assert manifest.num_samples == len(columns) == len(columns.keys) == sum(1 for _ in columns.keys) == 5
    assert manifest.samples.tolist() == [2, 2, 1]


@pytest.mark.parametrize("text", ["a-{000..127}", "a-{0..8..2}-b-{1..3}", "a-{7..7}", "plain"])
def test_a_template_is_as_long_as_its_names(text: str) -> None:
    template = Template.parse(text)
    assert len(template) == sum(1 for _ in template.names())
