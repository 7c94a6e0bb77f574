"""`dp.samples` has the loader's order and selection, works in worker processes and with buckets, and checks bytes."""

import os
import pickle
from pathlib import Path

import numpy as np
import pytest

import dali_pipes as dp
from dali_pipes.store.cluster.ais import AisStore
from tests.lazy import Lazy
from tests.loaders import keys_of, open_loader
from tests.shards import Sample, fill_bucket, make_samples, write_shards

torch = Lazy("torch")


@pytest.fixture
def made() -> list[Sample]:
    samples = make_samples([(20, 16)] * 10)
    del samples[3].components["cls"]
    samples[4].components["text.json"] = b"{}"
    return samples


@pytest.fixture
def shards(tmp_path: Path, made: list[Sample]) -> Path:
    return write_shards(tmp_path / "set", made, per_shard=3)


def as_read(sample: Sample) -> dict[str, object]:
    read: dict[str, object] = {"__key__": sample.key, **sample.components}
    return read | ({"cls": int(sample.components["cls"])} if "cls" in sample.components else {})


def test_samples_are_those_of_the_tars_in_the_order_of_ordinals(shards: Path, made: list[Sample]) -> None:
    samples = dp.samples(shards)
    expected = [as_read(one) for one in made]
    assert len(samples) == 10
    assert [*samples] == expected
    numbers = [7, -1, 0, 7, np.int64(4)]
    assert samples.__getitems__(numbers) == [expected[number] for number in numbers]
    for number in (10, -11):
        with pytest.raises(IndexError, match=f"no sample {number}: there are 10"):
            samples[number]


def test_selection_is_the_loaders(shards: Path, made: list[Sample], tmp_path: Path) -> None:
    (tmp_path / "bad.txt").write_text(f"{made[3].key}\n")
    select = dp.Select(where=lambda columns: columns.keys != made[8].key, exclude=tmp_path / "bad.txt")
    samples = dp.samples(shards, select=select)
    with open_loader(shards, shuffle=False, select=select) as loader:
        assert [sample["__key__"] for sample in samples] == keys_of(loader)
    assert len(pickle.loads(pickle.dumps(samples))) == 8
    with pytest.raises(ValueError, match="samples are selected by exclude, where and allow_missing alone"):
        dp.samples(shards, select=dp.Select(epoch_samples=3))


def test_samples_of_a_bucket_and_of_a_mixture(shards: Path, bucket: AisStore, made: list[Sample]) -> None:
    """In a mixture a key is SET/KEY, as in a loader."""
    bucket.create()
    fill_bucket(bucket, shards)
    expected = [as_read(one) for one in made]
    samples = dp.samples(bucket.url, endpoint=bucket.endpoint)
    assert samples.__getitems__(range(10)) == expected
    samples = dp.samples(dp.Mixture({"one": bucket.url, "two": shards}), endpoint=bucket.endpoint)
    both = [one | {"__key__": f"{set_}/{one['__key__']}"} for set_ in ("one", "two") for one in expected]
    assert samples.__getitems__(range(20)) == both


@pytest.mark.parametrize("num_workers", [0, 2])
def test_dataloader_reads_in_its_workers(shards: Path, made: list[Sample], num_workers: int) -> None:
    samples = dp.samples(shards)
    samples[0]  # what is open in this process is not used in another
    loading = torch.utils.data.DataLoader(
        samples, batch_size=4, shuffle=True, num_workers=num_workers, collate_fn=lambda batch: (os.getpid(), batch)
    )
    batches = [*loading]
    assert (os.getpid() in {pid for pid, _ in batches}) == (num_workers == 0)
    read = sorted((one for _, batch in batches for one in batch), key=lambda one: one["__key__"])
    assert read == [as_read(one) for one in made]


def test_a_sample_that_has_rotted_is_named_and_the_others_are_read(shards: Path, made: list[Sample]) -> None:
    path = shards / "s-000001.tar"
    data = bytearray(path.read_bytes())
    data[data.index(made[4].components["image.jpg"]) + 100] ^= 1
    path.write_bytes(data)
    samples = dp.samples(shards)
    assert samples.__getitems__([3, 5, 9]) == [as_read(made[number]) for number in (3, 5, 9)]
    with pytest.raises(dp.DataError, match=f"s-000001.tar', key '{made[4].key}': component 'image.jpg' has other"):
        samples.__getitems__([3, 4])
