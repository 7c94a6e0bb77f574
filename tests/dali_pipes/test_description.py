"""``repr`` shows a loader along the data path, before and after its first batch, closed, and before it is opened."""

import re
from functools import partial
from pathlib import Path

import dali_pipes as dp
from dali_pipes.errors import keep_secret
from tests import builders

open_loader = partial(builders.open_loader, seed=7)


def test_repr_shows_the_path(small_shards: Path, tmp_path: Path) -> None:
    """The manifest's digest stands for the version of the data."""
    with open_loader(small_shards, cache=dp.Cache(directory=tmp_path, max_bytes=1 << 20)) as loader:
        digest = loader.parts.inputs.manifest.digest[:12]
        before = repr(loader)
        reserved = f"{loader.parts.share.reserved / 2**20:.1f} MiB"
        next(loader)
        after = repr(loader)
    lines = [
        f"Loader of {small_shards}/s-",
        f"  data set  manifest {digest}, 23 samples in 4 shards",
        "  rank      0 of 1, the only process",
        "  order     seed 7, shuffled as a whole",
        "  batches   of 4 samples, PARTIAL; 6 in epoch 0, 0 of 23 samples delivered",
        f"  cache     {tmp_path}, {reserved} reserved of 1.0 MiB",
        "  outputs   image, mask, label, key (their shapes are known after the first batch)",
        "  device    cpu",
    ]
    assert before.splitlines() == lines
    lines[4] = lines[4].replace(", 0 of", ", 4 of")
    lines[6] = "  outputs   image float32 [4, 3, 16, 16], mask uint8 [4, 1, 16, 16], label int64 [4], key list of str"
    assert after.splitlines() == lines
    assert repr(loader) == after.replace("s-\n", "s-, closed\n", 1)


def test_repr_names_the_options_of_the_order(small_shards: Path) -> None:
    options = {"shuffle": dp.Shuffle(window_bytes=3 << 20, ramp_up=True, slices=2), "rank": 0, "world_size": 1}
    chosen = dp.Select(epoch_samples=10, where=lambda columns: columns.labels > 1)
    with open_loader(small_shards, select=chosen, **options) as loader:
        text = repr(loader)
    assert "order     seed 7, shuffled in windows of 3.0 MiB, ramp-up, 2 slices, 10 samples an epoch" in text
    assert re.search(r"23 samples in 4 shards, \d samples left out", text)
    assert "rank      0 of 1, by arguments" in text


def test_repr_of_a_late_loader_does_not_open_it(small_shards: Path) -> None:
    loader = open_loader(small_shards, rank="late", shuffle=False)
    assert repr(loader).splitlines() == [
        f"Loader of {small_shards}, not opened yet",
        "  rank      late: found when the length or the first batch is asked for",
        "  order     the manifest's, not shuffled",
        "  batches   of 4 samples, PARTIAL",
        "  device    cpu",
    ]
    assert not loader.is_open
    loader.close()
    assert repr(loader).startswith(f"Loader of {small_shards}, closed, and never opened\n")


def test_repr_masks_secrets(small_shards: Path, tmp_path: Path) -> None:
    """A token that stands in a path, as it may in a URL."""
    secret = "token-of-the-cluster"
    keep_secret(secret)
    link = tmp_path / secret
    link.symlink_to(small_shards)
    for rank in (None, "late"):
        with open_loader(link, rank=rank) as loader:
            assert secret not in repr(loader)
            assert "***" in repr(loader)
