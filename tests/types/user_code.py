"""The errors that a type checker finds in a user's program. `mypy` checks this file; no test runs it.

A line that must be refused carries an ignore with the error's code: mypy reports an ignore that is not needed.
"""

from typing import assert_type

import torch
from nvidia.dali import fn

import dali_pipes as dp


def train(device: torch.device) -> None:
    """Batches by name; arguments as other libraries write them."""
    graph = dp.segmentation(crop=(224, 224), dtype="float16", layout="HWC")
    with dp.loader("shards", graph, batch_size=8, last_batch_policy="drop", device=device) as loader:
        assert_type(loader, dp.Loader)
        for (batch,) in loader:
            assert_type(batch, dp.BatchDict)
            assert_type(batch["image"], torch.Tensor)
            assert_type(batch["mask"], torch.Tensor)
            assert_type(batch["key"], list[str])
        for one in loader.as_dicts():
            assert_type(one["label"], torch.Tensor)
            plain: dict[str, object] = {**one}
            plain.clear()


def own_shapes() -> None:
    """Load photos in their own shapes; a packed output comes with the place of each sample (``cu_seqlens``)."""
    select = dp.Select(buckets=dp.buckets(area=256 * 256, step=32, max_aspect=2))
    dp.loader("shards", dp.bucketed(place="centre", text="txt"), batch_size=8, select=select)

    def graph(components: dp.Components, random: dp.Random) -> dict[str, object]:
        return {"files": components.packed(components["image.jpg"])}

    for (batch,) in dp.loader("shards", graph, batch_size=64):
        assert_type(batch["cu_seqlens"], torch.Tensor)


def own(components: dp.Components, random: dp.Random) -> dict[str, object]:
    """A user's own graph, with output names that our graphs do not have."""
    return {"heights": components["image.jpg"], "noise": fn.random.uniform()}


def own_names() -> None:
    for (batch,) in dp.loader("shards", own, batch_size=8):
        print(batch["heights"].shape, batch.keys())


def refused() -> None:
    """Values and names that do not exist."""
    graph = dp.classification_train(dtype="float64")  # type: ignore[arg-type]
    dp.loader("shards", graph)  # type: ignore[call-arg]
    dp.loader("shards", dp.segmentation, batch_size=8)  # type: ignore[arg-type]
    dp.Cache(verify="sometimes")  # type: ignore[arg-type]
    dp.loader("shards", graph, batch_size=8, num_workers=4)  # type: ignore[call-arg]
    dp.loader("shards", graph, batch_size=8, shuffle="yes")  # type: ignore[arg-type]
    dp.Decode(reader="mmap")  # type: ignore[arg-type]
    dp.Outputs(labels="names")  # type: ignore[arg-type]
    dp.BadSamples(on_error="skip")  # type: ignore[arg-type]
