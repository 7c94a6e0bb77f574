"""``repr`` shows a loader along the data path, before and after its first batch, closed, and before it is opened."""

from functools import partial
from pathlib import Path

from dali_pipes.errors import keep_secret
from tests import loaders

open_loader = partial(loaders.open_loader, seed=7)
ORDER = "Shuffle(window_bytes='all', ramp_up=False, slices=1, enabled=True)"


def test_repr_shows_the_path(small_shards: Path) -> None:
    """The manifest's digest stands for the version of the data."""
    with open_loader(small_shards) as loader:
        digest = loader.parts.inputs.manifest.digest[:12]
        next(loader)
        text = repr(loader)
    assert text.splitlines() == [
        f"Loader of {small_shards}/s-",
        f"  data set  manifest {digest}, version 1, 23 samples in 4 shards, 0 left out",
        "  rank      0 of 1, by default",
        f"  order     seed 7, {ORDER}",
        "  batches   of 4 samples, PARTIAL",
        "  epoch     0, 4 of 23 samples delivered, 6 batches",
        "  outputs   image, mask, label, key",
        "  device    cpu",
    ]
    assert repr(loader) == text.replace("s-\n", "s-, closed\n", 1)


def test_repr_masks_secrets(small_shards: Path, tmp_path: Path) -> None:
    """A token that stands in a path, as it may in a URL."""
    keep_secret("token-of-the-cluster")
    link = tmp_path / "token-of-the-cluster"
    link.symlink_to(small_shards)
    for rank in (None, "late"):
        with open_loader(link, rank=rank) as loader:
            assert f"{tmp_path}/***" in repr(loader)
            assert link.name not in repr(loader)
