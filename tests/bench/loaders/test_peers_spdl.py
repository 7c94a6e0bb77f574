"""What is SPDL's own, beyond the contract of all loaders: its threads, its order, what it makes of an error."""

import threading
from pathlib import Path

import pytest
import torch

pytest.importorskip("spdl.pipeline", reason="needs the extra spdl")

from PIL import UnidentifiedImageError

from bench.loaders.protocol import LoaderOptions
from bench.loaders.registry import open_loader
from dali_pipes.store.shard_set import ShardSet
from dali_pipes.store.urls import resolve_shards
from tests.shards import make_samples, write_tar

ONE_THREAD = LoaderOptions(batch_size=4, num_threads=1, crop=8, device="cpu")


def test_spdl_closed_leaves_no_thread_and_torch_as_it_was(shards: ShardSet, options: LoaderOptions) -> None:
    """In mid-epoch too, its iterator still held: what runs in this process is this process's."""
    torch.set_num_threads(2)
    before = set(threading.enumerate())
    with open_loader("spdl", shards, options=options) as loader:
        held = loader.epoch()
        next(held)
        assert torch.get_num_threads() == 1
        assert len(set(threading.enumerate()) - before) > options.num_threads
    assert set(threading.enumerate()) <= before
    assert torch.get_num_threads() == 2
    del held


@pytest.fixture
def broken(tmp_path: Path) -> ShardSet:
    samples = make_samples([(12, 12)] * 12)
    samples[9].components["image.jpg"] = b"no photo"
    write_tar(tmp_path / "pets-000000.tar", samples)
    return resolve_shards(tmp_path, endpoint=None)


def test_spdl_broken_photo_is_an_error_with_its_own_reason(broken: ShardSet) -> None:
    """By default it logs what fails and leaves it out, and its error says only which stage failed."""
    seen: list[str] = []
    with open_loader("spdl", broken, options=ONE_THREAD) as loader:
        epoch = loader.epoch()
        seen += next(epoch)["key"] + next(epoch)["key"]
        with pytest.raises(UnidentifiedImageError):
            next(epoch)
    assert seen == [f"s{row:05d}" for row in range(8)], "the two batches before it came"


def test_spdl_left_before_a_broken_photo_closes_in_silence(broken: ShardSet) -> None:
    """What failed in a batch that nobody asked for is nobody's error."""
    with open_loader("spdl", broken, options=ONE_THREAD) as loader:
        next(loader.epoch())
