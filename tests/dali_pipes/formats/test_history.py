"""What a manifest says of the versions of its data set: read as it was written, and checked."""

from dataclasses import replace

import numpy as np
import pytest

from dali_pipes.errors import DataError
from dali_pipes.formats.column_file import save_columns
from dali_pipes.formats.manifest import MANIFEST_KIND, MANIFEST_VERSION, Change, Manifest, ShardsPart
from dali_pipes.formats.texts import pack_texts
from tests.simulated import manifest_of

CHANGES = tuple(
    Change(version=version, date="2026-03-01T12:00:00Z", what="add", token="0123456789", command="prep add x",
           num_samples=5 * version, num_shards=version, digest="ab")
    for version in (1, 2)
)  # fmt: skip


@pytest.fixture
def changed() -> Manifest:
    return manifest_of(
        [5, 5],
        version=2,
        parts=(ShardsPart("", 1), ShardsPart("add-0123456789-", 1)),
        history=CHANGES,
        removed=np.array([0, 7]),
    )


def test_a_version_is_read_as_it_was_written(changed: Manifest) -> None:
    read = Manifest.from_bytes(changed.to_bytes(), where="m")
    assert (read.version, read.parts, read.history) == (2, changed.parts, CHANGES)
    assert read.removed.tolist() == [0, 7]
    assert (read.num_samples, read.num_kept) == (10, 8)
    assert read.digest == changed.digest


def test_a_data_set_that_never_changed_is_written_as_before() -> None:
    """Readers of any time read it, and its digest stays."""
    data = manifest_of([5, 5]).to_bytes()
    assert b"data_version" not in data
    assert b"history" not in data
    read = Manifest.from_bytes(data, where="m")
    assert (read.version, read.parts, read.history, len(read.removed)) == (1, (), (), 0)
    assert read.digest == read.shards_digest


def test_digests_tell_removed_samples_apart(changed: Manifest) -> None:
    others = [replace(changed, removed=np.array(removed, np.int64)) for removed in ([], [0], [0, 8])]
    assert len({manifest.digest for manifest in (changed, *others)}) == 4
    assert len({manifest.shards_digest for manifest in (changed, *others)}) == 1


def header_of(manifest: Manifest, **changes: object) -> bytes:
    """The manifest's file with other entries in its header."""
    name_bytes, name_ends = pack_texts(manifest.names)
    columns = {
        "name/bytes": name_bytes, "name/ends": name_ends, "bytes": manifest.shard_bytes,
        "checksum": manifest.checksums, "samples": manifest.samples, "index_bytes": manifest.index_bytes,
        "index_checksum": manifest.index_checksums, "removed": manifest.removed,
    }  # fmt: skip
    header = {
        "kind": MANIFEST_KIND, "version": MANIFEST_VERSION, "components": {}, "photos": {}, "labels": {}, "classes": {},
        "turned": {},
        "data_version": 2, "parts": [list(part) for part in manifest.parts],
        "history": [change._asdict() for change in manifest.history],
    }  # fmt: skip
    return save_columns(columns, header | changes)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"data_version": 1}, "'data_version' to be a whole number above 1"),
        ({"data_version": 2**62}, "'history' to be the changes up to version"),
        ({"parts": [["", 1]]}, "'parts' of 2 shards, as many as it lists, found 1"),
        ({"parts": [["../up-", 2]]}, "'parts' to be names and numbers of shards"),
        ({"parts": [["", -2], ["", 4]]}, "'parts' to be names and numbers of shards"),
        ({"parts": [["", True], ["", 1]]}, "'parts' to be names and numbers of shards"),
        ({"parts": {"": 2}}, "'parts' to be names and numbers of shards"),
        ({"history": []}, "'history' to be the changes up to version 2"),
        ({"history": [CHANGES[1]._asdict(), CHANGES[0]._asdict()]}, "'history' to be the changes"),
        ({"history": [CHANGES[0]._asdict(), {"version": 2}]}, "'history' to be the changes"),
        ({"history": [CHANGES[0]._asdict(), CHANGES[1]._asdict() | {"date": 3}]}, "'history' to be the changes"),
        ({"history": [CHANGES[0]._asdict(), CHANGES[1]._asdict() | {"command": "\ud800"}]}, "'history' to be the"),
    ],
)
def test_impossible_entries_are_refused(changed: Manifest, changes: dict[str, object], expected: str) -> None:
    assert Manifest.from_bytes(header_of(changed), where="m").version == 2
    with pytest.raises(DataError, match=expected):
        Manifest.from_bytes(header_of(changed, **changes), where="m")


@pytest.mark.parametrize("removed", [[7, 0], [3, 3], [-1], [10]])
def test_impossible_removals_are_refused(changed: Manifest, removed: list[int]) -> None:
    data = header_of(replace(changed, removed=np.array(removed, np.int64)))
    with pytest.raises(DataError, match="column 'removed' of sorted ordinals below 10"):
        Manifest.from_bytes(data, where="m")
