"""`prep remove` and `prep compact`: every reader sees the rest, and old versions stay."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import dali_pipes as dp
from dali_pipes.data_set.data_set import DataSet
from dali_pipes.data_set.named import list_shards, name_shards
from dali_pipes.errors import DataError
from dali_pipes.formats.manifest import Manifest
from dali_pipes.formats.names import index_name, version_name
from prep.inspect.info import describe_set
from prep.inspect.verify import verify
from tests.prep.commands.calls import json_of_prep, run_prep
from tests.prep.versions.sets import Place, copy_set
from tests.prep.versions.test_add import NEW_KEYS, OLD_KEYS
from tests.shards import read_tar


def read_keys(shards: Any, **options: Any) -> list[str]:
    settings: dict[str, Any] = {"batch_size": 2, "device": "cpu", "decode": dp.Decode(threads=1)} | options
    with dp.loader(shards, dp.classification_train(crop=8), outputs=dp.Outputs(keys=True), **settings) as loader:
        keys = [key for (batch,) in loader for key in batch["key"]]
        assert loader.num_samples == len(keys)
        assert len(loader) == -(-len(keys) // settings["batch_size"])
    return keys


def said(*arguments: Any) -> str:
    return run_prep(*arguments).stdout


def test_add_remove_compact_and_log_in_a_row(place: Place, more: Path) -> None:
    """Each command prints text lines or JSON; the log lists the commands."""
    cluster = ["--endpoint", place.endpoint] if place.endpoint else []
    added = said("add", more, place.url, "--known", "skip", *cluster)
    assert "added 1 shard, 2 samples" in added
    assert "1 new class: 'bee' (3)" in added
    assert f"'{place.newest().url}@2' has 4 shards, 8 samples" in added
    assert "nothing to add" in said("add", more, place.url, "--known", "skip", *cluster)
    assert "would remove 1 sample" in said("remove", place.url, "--key", "cat/000", "--dry-run", *cluster)
    assert "removed 1 sample" in said("remove", place.url, "--key", "cat/000", *cluster)
    assert "nothing to remove" in said("remove", place.url, "--key", "cat/000", *cluster)
    assert "would write 1 shard anew without 1 sample" in said("compact", place.url, "--dry-run", *cluster)
    assert json_of_prep("compact", place.url, *cluster)["num_rewritten"] == 1
    found = json_of_prep("diff", f"{place.url}@1", place.url, *cluster)
    assert found["added_keys"] == NEW_KEYS
    assert found["removed_keys"] == ["cat/000"]
    assert (found["num_moved"], found["added_classes"], found["is_equal"]) == (1, {"3": "bee"}, False)
    shown = said("diff", f"{place.url}@1", place.url, *cluster)
    assert "+ class 3 bee\n" in shown
    assert "- key cat/000\n" in shown
    assert "are equal" in said("diff", f"{place.url}@4", place.url, *cluster)
    assert "deleted older versions: 1, 2, 3, " in said("compact", place.url, "--drop-old", *cluster)
    log = said("log", place.url, *cluster).splitlines()
    assert [line.split()[0] for line in log[1:]] == ["@4", "@3", "@2", "@1"]
    assert ["(deleted)" in line for line in log[1:]] == [False, True, True, True]
    versions = json_of_prep("log", place.url, *cluster)["versions"]
    assert [version["num_samples"] for version in versions] == [6, 8, 7, 7]
    assert versions[1]["command"].startswith("dali-pipes prep add ")
    assert versions[1]["command"].endswith(" --known skip")


def test_removed_samples_are_in_no_epoch(place: Place, more: Path) -> None:
    place.add(more)
    report = place.remove("cat/000", "dog/050")
    assert (report.version, report.num_removed, report.num_samples, report.num_shards) == (3, 2, 6, 4)
    left = [key for key in [*OLD_KEYS, *NEW_KEYS] if key not in ("cat/000", "dog/050")]
    options = {"endpoint": place.endpoint}
    assert sorted(read_keys(place.url, **options)) == sorted(left)
    assert read_keys(f"{place.url}@2", shuffle=False, **options) == [*OLD_KEYS, *NEW_KEYS]
    assert read_keys(f"{place.url}@1", shuffle=False, **options) == OLD_KEYS
    assert len({place.open(f"@{version}").manifest.digest for version in (1, 2, 3)}) == 3


def test_removal_goes_with_choices_and_mixtures(local: Place) -> None:
    local.remove("cat/000")
    url = local.url
    assert read_keys(url, select=dp.Select(where=lambda columns: columns.labels == 0)) == ["cat/001"]
    assert sorted(read_keys(url, select=dp.Select(oversample={0: 3, 1: 0}))) == ["cat/001"] * 3 + OLD_KEYS[4:]
    mixed = read_keys(dp.Mixture({"new": url, "old": f"{url}@1"}), shuffle=False)
    assert sorted(mixed) == sorted([*(f"new/{key}" for key in OLD_KEYS[1:]), *(f"old/{key}" for key in OLD_KEYS)])
    assert read_keys(f"{url}000000.tar") == ["cat/001"]


def test_a_listed_shard_and_a_list_of_keys_are_removed(local: Place, tmp_path: Path) -> None:
    (tmp_path / "bad.txt").write_text("# seen\ns-000000.tar\tcat/001\nowl/000\n")
    report = local.remove(lists=[tmp_path / "bad.txt"], shards=["s-000001.tar"])
    assert (report.num_removed, report.num_removed_shards, report.num_samples) == (4, 1, 2)
    assert local.keys() == ["cat/000", "owl/001"]
    whole = local.open().whole
    assert (whole.components, whole.photos) == ({"cls": 4, "jpg": 4}, {"jpg": {"JPEG": 4}})  # as the shards hold them
    assert whole.labels == {"min": 0, "max": 2}
    again = local.remove("owl/000", shards=["s-000001.tar"])
    assert (again.version, again.num_removed, again.num_removed_shards) == (2, 0, 0)


def test_impossible_removals_write_nothing(local: Place) -> None:
    before = local.objects()
    for keys, shards, expected in (
        (["cat/9"], [], "^--key: key 'cat/9' is not in .*; name other keys$"),
        ([], ["s-000009.tar"], "no shard 's-000009.tar' in .*, version 1; expected names such as"),
        (OLD_KEYS, [], "none of the 6 samples of .* is left"),
        ([], [f"s-00000{row}.tar" for row in range(3)], "no sample of .* is left without these"),
    ):
        with pytest.raises((DataError, ValueError), match=expected):
            local.remove(*keys, shards=shards)
    assert local.objects() == before


def test_info_and_verify_see_the_rest(local: Place) -> None:
    """A sample that is bad and removed is no problem any more."""
    shards = name_shards(local.url, endpoint=None)
    index = local.open().manifest.shard_index(0, local.store.read(index_name("s-000000.tar")), where="i")
    start, data = int(index.offsets["jpg"][0]), bytearray(local.store.read("s-000000.tar"))
    data[start : start + 2] = b"xx"
    local.store.write("s-000000.tar", bytes(data))
    assert verify(shards, workers=1, decoder="pillow").counts["photo"] == 1
    local.remove("cat/000")
    shards = name_shards(local.url, endpoint=None)
    report = verify(shards, workers=1, decoder="pillow")
    assert (report.num_samples, report.num_bad_samples, report.counts["photo"]) == (5, 0, 0)
    info = describe_set(shards)
    assert (info.num_samples, info.class_counts, info.photos["jpg"].num_photos) == (5, {0: 1, 1: 2, 2: 2}, 5)


def test_added_shards_that_are_named_alone_are_without_removed_samples(place: Place, more: Path) -> None:
    """Their names share more text than the manifest's prefix; to index them anew would bring the samples back."""
    place.add(more, max_count=1)
    place.remove("bee/050")
    names = [name for name in place.newest().manifest.names if "-add-" in name]
    shards = [place.store.locate(name) for name in names]
    for urls in (shards, f"{place.url}add-", *([[f"{place.url}add-*.tar"]] if place.endpoint is None else [])):
        data_set = DataSet(name_shards(urls, endpoint=place.endpoint))
        assert (data_set.whole.version, data_set.manifest.num_kept) == (3, 1)
        with pytest.raises(DataError, match="still hold samples that were removed"):
            list_shards(urls, endpoint=place.endpoint)
    place.remove(shards=[names[1]])
    with pytest.raises(DataError, match=f"lists 4 shards, not '{names[1]}'"):
        DataSet(name_shards([shards[1]], endpoint=place.endpoint))


def test_a_list_of_data_sets_is_refused_where_samples_were_removed(local: Place, tmp_path: Path) -> None:
    """Several data sets have no manifest in common, so nothing would say which samples were removed."""
    other = copy_set(local, Place(f"{tmp_path}/other/s-", None))
    other.remove("cat/000")
    for url in (f"{local.url}@1", other.url):
        with pytest.raises(ValueError, match=r"removed samples, and 1 more URLs are named; name it alone, or make a"):
            name_shards([url, f"{tmp_path}/third/s-000000.tar"], endpoint=None)
    parts = [f"{other.url}000000.tar", f"{other.url}000001"]
    assert DataSet(name_shards(parts, endpoint=None)).manifest.num_kept == 3


def test_what_reads_whole_shards_refuses_removed_samples(local: Place) -> None:
    """Shuffle, transform and others would bring them back."""
    local.remove("cat/000")
    with pytest.raises(DataError, match=r"still hold samples that were removed .*dali-pipes prep compact"):
        list_shards(local.url, endpoint=None)
    with pytest.raises(DataError, match="still hold samples that were removed"):
        list_shards([f"{local.url}000000.tar", f"{local.url}000001.tar"], endpoint=None)
    assert len(list_shards(f"{local.url}@1", endpoint=None).names) == 3
    assert list_shards(f"{local.url}000002.tar", endpoint=None).names == ("s-000002.tar",)
    local.compact()
    assert len(list_shards(local.url, endpoint=None).names) == 3


def members(place: Place, shard: str) -> dict[str, bytes]:
    return dict(read_tar(place.store.read(shard)))


def test_compact_deletes_older_versions_only_when_asked(place: Place, more: Path) -> None:
    place.add(more)
    place.remove("cat/000")
    keys = place.keys()
    planned = place.compact(drop_old=True, dry_run=True)
    assert planned.dropped_versions == (1, 2)
    assert sorted(planned.deleted) == sorted(place.store.locate(version_name("s-", version)) for version in (1, 2))
    report = place.compact(drop_old=True)
    assert report.dropped_versions == (1, 2, 3)
    gone = {name.rpartition("/")[2] for name in report.deleted}
    assert {"s-000000.tar", "s-000000.index.safetensors", "s-columns.safetensors"} <= gone
    assert not gone & {name.rpartition("/")[2] for name in place.objects()}
    assert place.keys() == keys
    assert place.newest().manifest.history[0].version == 1  # the log still tells of them
    assert verify(name_shards(place.url, endpoint=place.endpoint), workers=1).num_problems == 0


def test_a_damaged_shard_is_not_written_anew(local: Place) -> None:
    """Its damage would get a checksum of its own."""
    local.remove("cat/000")
    data = bytearray(local.store.read("s-000000.tar"))
    data[-3000] ^= 1
    local.store.write("s-000000.tar", bytes(data))
    with pytest.raises(DataError, match=r"shard '.*s-000000.tar' has .*; the manifest says .*prep remove --shard"):
        local.compact()
    assert local.newest().manifest.version == 2


@given(st.lists(st.integers(0, 5), max_size=6), st.data())
def test_rows_of_a_manifest_keep_their_removed_samples(counts: list[int], data: st.DataObject) -> None:
    """Against a list of (shard, number in it)."""
    samples = np.array(counts, np.int64)
    everything = [(shard, number) for shard, count in enumerate(counts) for number in range(count)]
    removed = sorted(data.draw(st.sets(st.integers(0, max(len(everything) - 1, 0))))) if everything else []
    rows = data.draw(st.permutations(range(len(counts))))[: data.draw(st.integers(0, len(counts)))]
    manifest = Manifest(
        names=[f"{shard}.tar" for shard in range(len(counts))],
        shard_bytes=samples,
        checksums=samples.astype(np.uint64),
        samples=samples,
        index_bytes=samples,
        index_checksums=samples.astype(np.uint64),
        removed=np.array(removed, np.int64),
        version=2,
    )
    gone = {everything[ordinal] for ordinal in removed}
    taken = manifest.take(np.array(rows, np.int64))
    order = [(shard, number) for shard in rows for number in range(counts[shard])]
    assert taken.removed.tolist() == [place for place, sample in enumerate(order) if sample in gone]
    for row, shard in enumerate(rows):
        expected = [number for number in range(counts[shard]) if (shard, number) in gone]
        assert taken.removed_in(row).tolist() == expected
        assert taken.num_removed[row] == len(expected)
