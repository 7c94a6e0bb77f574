"""The manifest is the truth: which shards a URL names, and what is said of those that are not there."""

from pathlib import Path

import pytest

import dali_pipes as dp
from dali_pipes.data_set.data_set import DataSet
from dali_pipes.data_set.named import compare_shards, list_shards, name_shards
from dali_pipes.errors import DataError, StoreError
from dali_pipes.formats.names import manifest_name
from dali_pipes.store.cluster.ais import AisStore
from dali_pipes.store.shard_names import ObjectEntry
from dali_pipes.store.urls import ShardUrls, resolve_shards
from prep.index import index_shards
from tests.shards import fill_bucket, make_samples, write_shards, write_tar

NAMES = tuple(f"s-{row:06d}.tar" for row in range(4))
LACKING = NAMES[2]


@pytest.fixture
def filled(bucket: AisStore, four_shards: Path) -> AisStore:
    """The same shards, with their manifest and indexes, in a bucket."""
    fill_bucket(bucket, four_shards)
    return bucket


@pytest.fixture
def unlisted(filled: AisStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Listings fail from now on."""

    def refuse(self: AisStore, prefix: str) -> list[ObjectEntry]:
        raise AssertionError(f"'{prefix}' is listed")

    monkeypatch.setattr(AisStore, "list", refuse)


def loader(shards: ShardUrls | dp.Mixture, **options: object) -> dp.Loader:
    return dp.loader(shards, dp.segmentation(crop=16), batch_size=4, device="cpu", **options)  # type: ignore[arg-type]


def num_delivered(opened: dp.Loader) -> int:
    with opened:
        return sum(len(batch[0]["label"]) for batch in opened)


@pytest.mark.usefixtures("unlisted")
@pytest.mark.parametrize(
    ("rest", "names"),
    [
        ("s-", NAMES),
        ("s-00000", NAMES),  # the manifest's prefix without the digits that count
        ("s-000001", NAMES[1:2]),
    ],
)
def test_prefix_in_a_bucket_is_answered_by_its_manifest_without_a_listing(
    filled: AisStore, rest: str, names: tuple[str, ...]
) -> None:
    filled.delete(LACKING)
    shards = name_shards(f"{filled.url}/{rest}", endpoint=filled.endpoint)
    assert shards.names == names
    assert shards.url == f"{filled.url}/s-"
    assert DataSet(shards).manifest.num_samples == 3 * len(names)


def test_loader_of_a_bucket_that_lacks_a_shard_names_it_and_does_not_end_early(filled: AisStore) -> None:
    """Without the manifest's word it would deliver 9 of 12 samples."""
    filled.delete(LACKING)
    opened = loader(f"{filled.url}/s-", endpoint=filled.endpoint)
    assert opened.num_samples == 12
    with pytest.raises(StoreError, match=rf"{filled.url}/{LACKING}.* put it back; .*allow_missing=True"):
        num_delivered(opened)


def test_indexes_without_their_manifest_are_not_taken_for_a_data_set(filled: AisStore) -> None:
    """A node that is away takes the manifest with it, and some of the shards. An interrupted index looks the same."""
    filled.delete(manifest_name("s-"))
    with pytest.raises(StoreError, match=r"4 shards have an index, and there is no manifest.*prep index 'ais://.*/s-'"):
        name_shards(f"{filled.url}/s-", endpoint=filled.endpoint)
    assert list_shards(f"{filled.url}/s-", endpoint=filled.endpoint).names == NAMES
    filled.delete(LACKING)
    with pytest.raises(StoreError, match=r"4 shards have an index, and there is no manifest; is a node .* away"):
        list_shards(f"{filled.url}/s-", endpoint=filled.endpoint)


def test_missing_file_of_a_list_and_of_a_mixture_is_named(four_shards: Path, tmp_path: Path) -> None:
    (four_shards / LACKING).unlink()
    other = write_shards(tmp_path / "other", make_samples([(30, 30)] * 2, first=50), per_shard=2)
    with pytest.raises(StoreError, match=LACKING):
        loader([four_shards / name for name in NAMES])
    with pytest.raises(StoreError, match=f"data set 'pets': no shard '{four_shards}/{LACKING}'"):
        loader(dp.Mixture({"other": other, "pets": four_shards}))
    allowed = loader(dp.Mixture({"other": other, "pets": four_shards}), select=dp.Select(allow_missing=True))
    assert allowed.num_samples == 2 + 9


def test_shard_beside_the_manifest_is_not_read_and_is_told(four_shards: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_tar(four_shards / "s-000004.tar", make_samples([(30, 30)], first=90))
    assert name_shards(four_shards, endpoint=None).names == NAMES
    assert (
        f"'{four_shards}/s-': 1 shards are not in its manifest, and are not read: '{four_shards}/s-000004.tar'"
        in caplog.text
    )
    with pytest.raises(DataError, match=r"lists 4 shards, not 's-000004.tar'; index them"):
        loader(f"{four_shards}/s-{{000000..000004}}.tar")


def test_glob_over_several_data_sets_is_refused(four_shards: Path) -> None:
    """The manifest of one of them does not say which shards the glob stands for."""
    write_tar(four_shards / "t-000000.tar", make_samples([(30, 30)], first=90))
    for named in (name_shards, list_shards):
        with pytest.raises(ValueError, match=r"shards of several sets, .* name the data sets in a dali_pipes.Mixture"):
            named(four_shards / "*.tar", endpoint=None)


def test_one_manifest_of_several_in_a_bucket_is_that_of_the_prefix(filled: AisStore) -> None:
    """A longer prefix is another data set; a prefix of two sets is refused, as before."""
    filled.write("s-val-000000.tar", filled.read(NAMES[0]))
    index_shards(resolve_shards(f"{filled.url}/s-val-", endpoint=filled.endpoint))
    assert name_shards(f"{filled.url}/s-", endpoint=filled.endpoint).names == NAMES
    assert name_shards(f"{filled.url}/s-val-", endpoint=filled.endpoint).names == ("s-val-000000.tar",)
    with pytest.raises(ValueError, match="holds shards of several sets"):
        name_shards(f"{filled.url}/s", endpoint=filled.endpoint)
    assert compare_shards(f"{filled.url}/s-", endpoint=filled.endpoint).beyond == []


def test_compare_names_what_is_missing_and_what_is_beyond(filled: AisStore, four_shards: Path) -> None:
    filled.delete(LACKING)
    filled.write("s-000007.tar", b"x")
    (four_shards / LACKING).unlink()
    (four_shards / "s-000007.tar").touch()
    for url, endpoint in (
        (f"{filled.url}/s-", filled.endpoint),
        (f"{filled.url}/", filled.endpoint),
        (four_shards, None),
    ):
        present, missing, beyond = compare_shards(url, endpoint=endpoint)
        where = filled.url if endpoint else str(four_shards)
        assert present.names == tuple(name for name in NAMES if name != LACKING)
        assert (missing, beyond) == ([f"{where}/{LACKING}"], [f"{where}/s-000007.tar"])
    (four_shards / manifest_name("s-")).write_bytes(b"no manifest")
    assert compare_shards(four_shards, endpoint=None).present.names == tuple(
        sorted({*NAMES, "s-000007.tar"} - {LACKING})
    )
    with pytest.raises(DataError, match="manifest"):
        name_shards(four_shards, endpoint=None)
