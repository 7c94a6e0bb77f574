"""What is the AIStore data set's own, beyond the contract of all loaders."""

import pytest

pytest.importorskip("alive_progress", reason="needs the extra aistore-pytorch")

from bench.loaders.protocol import LoaderOptions
from bench.loaders.registry import open_loader
from dali_pipes.store.shard_set import ShardSet


def test_aistore_epochs_have_orders_of_their_own(bucket: ShardSet) -> None:
    """Shards are shuffled anew each epoch; keys keep their directory, which the library's own shard reader cuts off."""
    with open_loader(
        "aistore", bucket, options=LoaderOptions(batch_size=4, num_threads=1, crop=8, device="cpu")
    ) as loader:
        orders = [[key for batch in loader.epoch() for key in batch["key"]] for _ in range(4)]
    assert len({tuple(order) for order in orders}) > 1
    assert {key.rpartition("/")[0] for key in orders[0]} == {"animals"}
