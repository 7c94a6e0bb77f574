"""URLs that name a version: what they mean, and names that only look like them."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from dali_pipes.data_set.find import Mixture
from dali_pipes.data_set.named import compare_shards, list_shards, name_shards
from dali_pipes.errors import DataError, StoreError
from dali_pipes.formats.names import manifest_name
from dali_pipes.store.cluster.ais import AisStore
from prep.index import index_shards
from prep.sources.folders import imagefolder
from tests.builders import Sample, pack, write_tar
from tests.prep.versions.sets import Place, class_folders, copy_set, make_set


def shards_of(url: str, **options: Any) -> tuple[str, ...]:
    return name_shards(url, endpoint=options.pop("endpoint", None)).names


@pytest.mark.parametrize("url", ["{folder}/s-", "{folder}", "{folder}/", "file://{folder}/s-", "{folder}/*.tar"])
def test_a_prefix_a_directory_and_a_glob_name_versions(local: Place, more: Path, url: str) -> None:
    local.add(more)
    local.remove("cat/000", "cat/001")
    local.compact()
    url = url.format(folder=Path(local.url).parent)
    old = tuple(f"s-{row:06d}.tar" for row in range(3))
    assert shards_of(f"{url}@1") == old
    assert len(shards_of(f"{url}@2")) == 4
    assert shards_of(url) == shards_of(f"{url}@4") == (*old[1:], shards_of(f"{url}@2")[3])
    assert name_shards(f"{url}@2", endpoint=None).url == f"{local.url}@2"
    with pytest.raises(StoreError, match=r"no version 9 of '.*s-' \(found: 1, 2, 3, 4\)"):
        name_shards(f"{url}@9", endpoint=None)
    # Nothing that lies there is beyond the data set: it belongs to other versions.
    for version in ("", "@1", "@2"):
        found = compare_shards(f"{url}{version}", endpoint=None)
        assert (found.missing, found.beyond) == ([], [])
    assert list_shards(f"{url}@1", endpoint=None).names == old


def test_numbers_that_leave_out_new_shards_are_said(local: Place, more: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A shard that was written anew has another name, so that numbers or a glob do not stand for it any more."""
    folder = Path(local.url).parent
    local.add(more)
    local.remove("cat/000")
    local.compact()
    for url in (local.url, f"{folder}/*.tar", str(folder), f"{local.url}00@1"):
        shards_of(url)
    assert not caplog.records
    for url in (f"{local.url}0000", f"{folder}/s-0*.tar"):
        caplog.clear()
        assert len(shards_of(url)) == 2
        assert "names 2 of 4 shards; shards that were added or written anew have other names" in caplog.text


def test_a_bucket_names_versions(bucket: AisStore, tmp_path: Path, more: Path) -> None:
    place = make_set(class_folders(tmp_path / "old", {"cat": 2}), Place(f"{bucket.url}/in/s-", bucket.endpoint))
    place.add(more, any_components=True)
    for url in (f"{bucket.url}/in/s-", f"{bucket.url}/in/", f"{bucket.url}/"):
        assert len(shards_of(url, endpoint=bucket.endpoint)) == 2
        assert len(shards_of(f"{url}@1", endpoint=bucket.endpoint)) == 1


def test_version_one_needs_no_version(local: Place) -> None:
    assert shards_of(f"{local.url}@1") == shards_of(local.url)
    with pytest.raises(StoreError, match=r"no version 2 of .* \(found: 1\)"):
        name_shards(f"{local.url}@2", endpoint=None)


def test_names_that_end_like_versions(local: Place, tmp_path: Path) -> None:
    """A directory may be called so. The beginning of shards' names is taken for a version."""
    copy_set(local, Place(f"{tmp_path}/set@2/s-", None))
    assert name_shards(f"{tmp_path}/set@2", endpoint=None).store.url == f"{tmp_path}/set@2"
    folder = tmp_path / "photos"
    folder.mkdir()
    write_tar(folder / "x@2-000000.tar", [Sample("a", {"txt": b"1"})])
    for read in (shards_of, list_shards):
        with pytest.raises(StoreError, match="there is no manifest, so there are no versions"):
            read(f"{folder}/x@2", endpoint=None)  # type: ignore[operator]
    assert shards_of(f"{folder}/x@2-{{000000..000000}}.tar") == ("x@2-000000.tar",)


@pytest.mark.parametrize(
    ("url", "error", "expected"),
    [
        ("{}000000.tar@1", ValueError, "a version is one of a data set.*'.*000000.tar' names shards; leave out '@1'"),
        ("{}{{000000..000001}}.tar@1", ValueError, "names shards"),
        ("{}@0", StoreError, "matches no .tar"),  # a name, as versions count from 1
    ],
)
def test_shards_have_no_versions(local: Place, url: str, error: type[Exception], expected: str) -> None:
    with pytest.raises(error, match=expected):
        name_shards(url.format(local.url), endpoint=None)


def test_sets_with_versions_are_named_alone(local: Place, more: Path) -> None:
    local.add(more)
    with pytest.raises(ValueError, match="is a data set with versions, and 1 more URLs are named; name it alone"):
        list_shards([local.url, f"{local.url}000000.tar"], endpoint=None)
    assert list(Mixture({"old": f"{local.url}@1"}).sets) == ["old"]


def test_versions_without_a_newest_are_refused(local: Place, more: Path) -> None:
    """A node that is away takes it from the listing, or somebody deleted it: a listing would mix versions."""
    local.add(more)
    local.store.delete(manifest_name("s-"))
    for read in (name_shards, list_shards):
        with pytest.raises(StoreError, match=r"a data set has versions, '.*manifest@1.safetensors'.*is not there"):
            read(local.url, endpoint=None)


def test_index_pack_and_shuffle_leave_versions_alone(local: Place, more: Path, tmp_path: Path) -> None:
    local.add(more)
    before = local.objects()
    with pytest.raises(StoreError, match=r"has versions \(1; 2\), .*dali-pipes prep add"):
        index_shards(list_shards(local.url, endpoint=None), overwrite=True)
    with pytest.raises(StoreError, match=r"is a data set with versions, 's-manifest@1.safetensors'"):
        make_set(more, local)
    assert local.objects() == before
    with pytest.raises(StoreError, match="is a data set with versions"):
        pack(imagefolder(more), store=local.store, prefix="s-", overwrite=True)
    assert local.objects() == before


def test_a_data_set_can_be_copied(local: Place, more: Path, tmp_path: Path) -> None:
    """Names in manifests are relative."""
    local.add(more)
    copied = copy_set(local, Place(f"{tmp_path}/elsewhere/s-", None))
    keys = local.keys()
    shutil.rmtree(Path(local.url).parent)
    assert copied.keys() == keys


def test_a_lost_shard_of_a_set_with_versions_can_be_removed(local: Place, more: Path) -> None:
    local.add(more)
    (Path(local.url).parent / "s-000001.tar").unlink()
    with pytest.raises(StoreError, match=r"dali-pipes prep remove '.*s-' --shard NAME"):
        name_shards(local.url, endpoint=None)
    local.remove(shards=["s-000001.tar"])
    assert len(name_shards(local.url, endpoint=None).names) == 3
    with pytest.raises(DataError, match=r"no shard 'x.tar'"):
        local.remove(shards=["x.tar"])
