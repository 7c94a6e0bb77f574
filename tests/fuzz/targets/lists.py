"""Lists that users hand over: samples to pack, samples to leave out, key maps and dSort's specs.

Each reader takes a list or refuses it with an error of ours; the test then uses each list as the command does.
"""

import json
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from dali_pipes.data_set.data_set import DataSet
from dali_pipes.data_set.exclusions import excluded_ordinals
from dali_pipes.errors import PipesError
from dali_pipes.formats.quarantine import Quarantine, read_exclusions
from dali_pipes.store.urls import resolve_shards
from prep.shuffle.key_map import parse_key_map
from prep.shuffle.request import read_spec
from prep.sources.record import as_entry
from tests.fuzz.target import BrokenPromiseError
from tests.fuzz.targets.files import parquet
from tests.fuzz.targets.texts import SHARD, Readers
from tests.shards import make_samples, photo_bytes, table, write_shards

SPECS = ("spec.json", "spec.yaml")
TABLES = ("t.csv", "t.tsv", "t.json", "t.jsonl", "t.parquet")
MEMBERS = tuple(f"s{number:05d}.jpg" for number in range(5))


class Lists(Readers):
    """All readers of lists; the photos that the lists name exist."""

    num_daily = 100

    def seeds(self) -> Sequence[bytes]:
        return [*exclusions(self.folder), *tables(), *KEY_MAPS, json.dumps(SPEC).encode(), YAML_SPEC]

    def readers(self, data: bytes) -> dict[str, Callable[[], Any]]:
        for name in ("bad.tsv", *SPECS, *TABLES):
            (self.folder / name).write_bytes(data)
        return {
            "exclusions": partial(_left_out, self._data_set, self.folder / "bad.tsv"),
            "key map": lambda: _assigned(data),
            **{name: partial(read_spec, self.folder / name) for name in SPECS},
            **{name: partial(_packed, self.folder / name) for name in TABLES},
        }

    @cached_property
    def _data_set(self) -> DataSet:
        for number in range(3):
            (self.folder / f"{number}.jpg").write_bytes(photo_bytes(number, 9, 8))
        shards = write_shards(self.folder / "shards", make_samples([(9, 8)] * 5), per_shard=3)
        return DataSet(resolve_shards(shards, endpoint=None))


def exclusions(folder: Path) -> list[bytes]:
    """A quarantine of two bad samples, and a list that a person wrote."""
    path = folder / "seed.tsv"
    listed = Quarantine(path, manifest="0" * 64)
    listed.add(SHARD, "s00000", "image.jpg", "cannot be decoded")
    listed.add(SHARD, "s00001", "", "gone")
    return [path.read_bytes(), b"# by hand\ns00002\ns-000001.tar\ts00003\n"]


def tables() -> list[bytes]:
    """Tables of photos: CSV, TSV, JSON, JSON lines and Parquet."""
    rows = [{"path": f"{number}.jpg", "label": number, "boxes": [1, 2]} for number in range(3)]
    lines = "\n".join(map(json.dumps, rows)).encode()
    return [
        b"path,label\n0.jpg,0\n1.jpg,1\n",
        b"path\tlabel\n0.jpg\t0\n",
        json.dumps(rows).encode(),
        lines,
        parquet(rows),
    ]


KEY_MAPS = [
    json.dumps({"cats-{00..09}.tar": ["s00000", "^s0000[1-9]"]}).encode(),
    b"s00000\tcats-{00..01}.tar\ns00001\tdogs-{00..01}.tar\n",
]
SPEC = {
    "input_bck": {"name": "b"}, "input_format": {"template": "s-{0..1}"}, "output_format": "o-{0..9}",
    "input_extension": ".tar", "output_shard_size": "1MB", "algorithm": {"kind": "shuffle", "seed": "7"},
}  # fmt: skip
YAML_SPEC = (
    b"input_bck: {name: b}\ninput_format: {template: 's-{0..1}'}\noutput_format: 'o-{0..9}'\n"
    b"input_extension: .tar\noutput_shard_size: 1MB\n"
)


def _packed(path: Path) -> None:
    """All records become entries of a tar."""
    source = table(path, has_labels=None)
    for record in source.records:
        name, parts = as_entry(record, source)
        if not record.key or not parts:
            raise BrokenPromiseError(f"a record without key or component: {name!r}")


def _left_out(data_set: DataSet, path: Path) -> None:
    """A loader leaves out the listed samples, and adds a bad one to the list."""
    listed = read_exclusions(path)
    with Quarantine(path, manifest="0" * 64) as kept:
        kept.add("new.tar", "new", "jpg", "a cause")
    again = read_exclusions(path)
    if again[: len(listed)] != listed or (again[-1].shard, again[-1].key) != ("new.tar", "new"):
        raise BrokenPromiseError("the list is another one after a sample was added")
    try:
        excluded = excluded_ordinals(data_set, entries=listed).excluded
    except ValueError as exc:  # the list leaves out every sample
        raise PipesError(str(exc)) from exc
    if not {entry.key for entry in listed} >= {f"s{ordinal:05d}" for ordinal in excluded.tolist()}:
        raise BrokenPromiseError(f"samples {excluded.tolist()} are left out and not listed")


def _assigned(data: bytes) -> None:
    """Samples are assigned, and cut into shards."""
    keys = parse_key_map(data, where="map")
    rows = keys.assign(MEMBERS)
    shards = keys.cut(rows, [1024] * len(MEMBERS), target=1500)
    if sorted(place for *_, places in shards for place in places) != [at for at, row in enumerate(rows) if row >= 0]:
        raise BrokenPromiseError(f"samples {rows} are cut into {shards}")
