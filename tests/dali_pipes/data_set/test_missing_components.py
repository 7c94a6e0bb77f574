"""Samples that lack a component: an error, or skipped."""

from pathlib import Path

import pytest

import dali_pipes as dp
from tests.loaders import keys_of, open_loader
from tests.shards import make_samples, write_shards


def test_missing_components_are_an_error_or_skipped(tmp_path: Path) -> None:
    """Only the components that the graph takes must be there: mask and label, or the label alone. Lengths are exact."""
    samples = make_samples([(30, 24)] * 12)
    for row in range(0, 12, 3):
        del samples[row].components["trimap.png"]
    for row in (5, 6):
        del samples[row].components["cls"]
    shards, graph, select = (
        write_shards(tmp_path, samples, per_shard=5),
        dp.segmentation(crop=16),
        dp.Select(missing="skip"),
    )
    with pytest.raises(dp.DataError, match=r"key 's00000': no component 'trimap.png' \(found: cls, image.jpg\)"):
        open_loader(shards, graph)
    with open_loader(shards, graph, select=select, batch_size=3) as loader:
        assert sorted(keys_of(loader)) == [f"s{i:05d}" for i in (1, 2, 4, 7, 8, 10, 11)]
        assert (loader.num_samples, len(loader)) == (7, 3)
    with open_loader(shards, dp.classification_train(crop=8), select=select) as loader:
        assert sorted(keys_of(loader)) == [f"s{i:05d}" for i in range(12) if i not in (5, 6)]
