"""A loader with a budget of tokens: patches, offsets, every photo once, resuming, and what is refused."""

import io
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import dali_pipes as dp
from dali_pipes.graph.inputs import Components
from dali_pipes.graph.random import Random
from tests.conftest import Sample, make_samples, write_shards

BUDGET = dp.token_budget(max_tokens=300, patch=8, max_photo_tokens=96)
SIZES = [(60 + 37 * row % 90, 20 + 53 * row % 130) for row in range(50)]
EXACT: dict[str, Any] = {"flip": 0, "dtype": "uint8"}


@pytest.fixture(scope="module")
def samples() -> list[Sample]:
    return make_samples(SIZES)


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory, samples: list[Sample]) -> Path:
    return write_shards(tmp_path_factory.mktemp("tokens"), samples, per_shard=9)


def open_loader(shards: Path, graph: Any = None, *, batch_size: int = 16, **options: Any) -> dp.Loader:
    settings: dict[str, Any] = {
        "seed": 5,
        "device": "cpu",
        "decode": dp.Decode(threads=1),
        "select": dp.Select(tokens=BUDGET),
        "outputs": dp.Outputs(keys=True, valid=True),
    } | options
    return dp.loader(str(shards), graph or dp.patches(**EXACT), batch_size=batch_size, **settings)


def photos(batch: dict[str, Any]) -> dict[str, np.ndarray]:
    """Key -> the photo, put together again from its patches: uint8 [rows * 8, columns * 8, 3]."""
    offsets = batch["cu_seqlens"].tolist()
    assert offsets[0] == 0
    assert offsets[-1] == len(batch["patches"]) <= BUDGET.max_tokens
    assert batch["cu_seqlens"].dtype == torch.int32
    found = {}
    for number, (key, (rows, columns)) in enumerate(zip(batch["key"], batch["grid"].tolist(), strict=True)):
        own = batch["patches"][offsets[number] : offsets[number + 1]]
        assert own.shape == (rows * columns, 3 * 8 * 8)
        whole = own.reshape(rows, columns, 3, 8, 8).permute(0, 3, 1, 4, 2)
        found[key] = whole.reshape(rows * 8, columns * 8, 3).numpy()
    return found


def valid(batch: dict[str, Any]) -> list[str]:
    return [key for key, counts in zip(batch["key"], batch["valid"].tolist(), strict=True) if counts]


@pytest.mark.parametrize("policy", ["PARTIAL", "FILL", "DROP"])
@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("window", ["all", 100_000])
def test_every_photo_comes_once_within_the_budget(shards: Path, policy: str, world_size: int, window: Any) -> None:
    """All ranks have as many batches; the patches of a photo are the photo, resized."""
    options = {"last_batch_policy": policy, "shuffle": dp.Shuffle(window_bytes=window)}
    ranks = [open_loader(shards, rank=rank, world_size=world_size, **options) for rank in range(world_size)]
    lengths = {len(loader) for loader in ranks}
    steps = [[batch for (batch,) in step] for step in zip(*ranks, strict=True)]
    assert lengths == {len(steps)}
    keys = Counter(key for step in steps for batch in step for key in valid(batch))
    assert set(keys.values()) == {1}
    assert len(keys) == len(SIZES) or policy == "DROP"
    assert len(keys) > 0.6 * len(SIZES)
    for step in steps:
        for batch in step:
            for key, photo in photos(batch).items():
                width, height = SIZES[int(key[1:])]
                (grid,) = BUDGET.grids(np.array([height]), np.array([width])).tolist()
                assert [side // 8 for side in photo.shape[:2]] == grid
    for loader in ranks:
        loader.close()


def test_pixels_and_labels_are_those_of_the_photos(shards: Path, samples: list[Sample]) -> None:
    """As Pillow resizes them, to a few grey levels; in both layouts; normalised as the other graphs do."""
    with (
        open_loader(shards) as plain,
        open_loader(shards, dp.patches(**EXACT, layout="HWC")) as other,
        open_loader(shards, dp.patches(flip=0, mean=(0.5, 0, 0), std=(2, 1, 1))) as normalised,
    ):
        for (batch,), (turned,), (scaled,) in zip(plain, other, normalised, strict=True):
            for (key, found), label in zip(photos(batch).items(), batch["label"].tolist(), strict=True):
                components = samples[int(key[1:])].components
                photo = Image.open(io.BytesIO(components["image.jpg"]))
                height, width = found.shape[:2]
                expected = np.asarray(photo.resize((width, height), Image.Resampling.BILINEAR), np.int32)
                assert np.abs(expected - found).mean() < 4
                assert label == int(components["cls"])
            channels = batch["patches"].reshape(-1, 3, 64)
            assert torch.equal(turned["patches"].reshape(-1, 64, 3).permute(0, 2, 1), channels)
            red, green = scaled["patches"].reshape(-1, 3, 64)[:, :2].unbind(1)
            assert torch.allclose(red, (channels[:, 0] / 255 - 0.5) / 2, atol=0.01)
            assert torch.allclose(green, channels[:, 1] / 255, atol=0.01)


@pytest.mark.parametrize("policy", ["PARTIAL", "FILL", "DROP"])
@pytest.mark.parametrize("window", ["all", 100_000])
def test_resume_at_every_step_gives_the_rest(shards: Path, policy: str, window: Any) -> None:
    """The state, as JSON, after each batch; with the same number of ranks, and with two."""
    options = {"last_batch_policy": policy, "shuffle": dp.Shuffle(window_bytes=window)}
    with open_loader(shards, **options) as whole, open_loader(shards, **options) as other:
        ranks = [open_loader(shards, rank=rank, world_size=2, **options) for rank in range(2)]
        epochs = [[batch["key"] for (batch,) in whole] for _ in range(2)]
        whole.set_epoch(0)
        for num in range(len(epochs[0]) + 1):
            if num:
                next(whole)
            state = json.loads(json.dumps(whole.state_dict()))
            other.load_state_dict(state)
            assert (len(other), other.num_batches_left) == (len(epochs[0]), len(epochs[0]) - num)
            rest = [batch["key"] for (batch,) in other]
            assert rest == (epochs[0][num:] or epochs[1])
            if num % 4 == 1 and num < len(epochs[0]):
                for rank in ranks:
                    rank.load_state_dict(state)
                dealt = [valid(batch) for step in zip(*ranks, strict=True) for (batch,) in step]
                dealt = [keys for keys in dealt if keys]
                assert dealt == rest if policy != "DROP" else dealt == [k for k in rest if k in dealt]
        for rank in ranks:
            rank.close()


def test_state_of_other_batches_is_refused(shards: Path) -> None:
    with open_loader(shards) as loader:
        next(loader)
        state = loader.state_dict()
        assert (state["version"], state["group_size"], state["shapes"]["kind"]) == (4, 16, "tokens")
    with pytest.raises(dp.StateError, match="with batch_size 16, this loader has 8, which groups the samples in other"):
        open_loader(shards, batch_size=8, state=state)
    other = dp.Select(tokens=dp.token_budget(max_tokens=301, patch=8, max_photo_tokens=96))
    with pytest.raises(dp.StateError, match=r"the state has shapes=.*max_tokens=300.*, this loader shapes=.*301"):
        open_loader(shards, select=other, state=state)
    with pytest.raises(dp.StateError, match=r"the state has shapes=TokenBudget.*, this loader shapes=Buckets"):
        open_loader(shards, dp.bucketed(), select=dp.Select(buckets=dp.buckets(area=64 * 64)), state=state)


def test_batch_size_is_the_largest_number_of_photos(shards: Path) -> None:
    with open_loader(shards, batch_size=2) as loader:
        sizes = Counter(len(batch["key"]) for (batch,) in loader)
    assert sizes == {2: 25}, "two photos of at most 96 patches fit 300"


def test_batch_decoded_in_parts_is_the_same(shards: Path) -> None:
    """A batch with many pixels is decoded in several parts; patches and offsets are joined."""
    with (
        open_loader(shards) as whole,
        open_loader(shards, decode=dp.Decode(threads=1, max_batch_pixels=20_000)) as parts,
    ):
        for (expected,), (found,) in zip(whole, parts, strict=True):
            assert torch.equal(expected["patches"], found["patches"])
            assert torch.equal(expected["cu_seqlens"], found["cu_seqlens"])


def test_photo_in_the_place_of_a_bad_one_stays_within_the_budget(tmp_path: Path, samples: list[Sample]) -> None:
    """Also in the place of a photo without any header, which counts as one patch."""
    broken = [replace(sample, components=dict(sample.components)) for sample in samples[:20]]
    broken[7].components["image.jpg"] = broken[7].components["image.jpg"][:400]
    broken[11].components["image.jpg"] = b"no photo"
    shards = write_shards(tmp_path / "shards", broken, per_shard=6)
    bad = dp.BadSamples(on_error="substitute", quarantine=tmp_path / "bad.tsv")
    budget = dp.token_budget(max_tokens=96, patch=8, max_photo_tokens=96)
    with open_loader(shards, bad_samples=bad, select=dp.Select(tokens=budget)) as loader:
        for (batch,) in loader:
            assert batch["cu_seqlens"][-1] == len(batch["patches"]) <= 96
        assert loader.num_substituted == 2


@pytest.mark.parametrize("face", ["as_dataloader", "as_dicts", "as_dataset", "as_dali"])
def test_faces_pass_patches_through(shards: Path, face: str) -> None:
    with open_loader(shards) as loader:
        batches = getattr(loader, face)()
        length = len(batches)
        found = [batch[0] if isinstance(batch, list) else batch for batch in batches]
    assert length == len(found)
    assert sum(len(photos(batch)) for batch in found) == len(SIZES)


def test_outputs_by_name_of_a_face(shards: Path) -> None:
    with open_loader(shards) as loader:
        for patches, offsets in loader.as_dataloader(outputs=("patches", "cu_seqlens")):
            assert offsets[-1] == len(patches)


def test_packed_output_of_a_graph_of_the_users_own(shards: Path, samples: list[Sample]) -> None:
    """Any ragged node can be packed, without a budget, too; one for a graph."""

    def graph(components: Components, random: Random) -> dict[str, Any]:
        return {"bytes": components.packed(components["image.jpg"])}

    with open_loader(shards, graph, batch_size=7, select=dp.Select()) as loader:
        for (batch,) in loader:
            offsets = batch["cu_seqlens"].tolist()
            for number, key in enumerate(batch["key"]):
                own = batch["bytes"][offsets[number] : offsets[number + 1]]
                assert bytes(own.numpy()) == samples[int(key[1:])].components["image.jpg"]

    def twice(components: Components, random: Random) -> dict[str, Any]:
        node = components["image.jpg"]
        return {"a": components.packed(node), "b": components.packed(node)}

    def named(components: Components, random: Random) -> dict[str, Any]:
        return {"a": components.packed(components["image.jpg"]), "cu_seqlens": components.label}

    with pytest.raises(ValueError, match="a graph can have one packed output, got a, b; return the others padded"):
        open_loader(shards, twice, select=dp.Select())
    with pytest.raises(
        ValueError, match="'cu_seqlens' is added beside the packed output 'a'; rename that of the graph"
    ):
        open_loader(shards, named, select=dp.Select())


def test_what_cannot_be_is_refused(shards: Path) -> None:
    with pytest.raises(ValueError, match=r"the loader has none; pass select=dali_pipes.Select\(tokens="):
        open_loader(shards, select=dp.Select())
    with pytest.raises(ValueError, match=r"the loader has no buckets; pass select=dali_pipes.Select\(buckets="):
        open_loader(shards, dp.bucketed())
    with pytest.raises(ValueError, match="buckets and tokens group the same photos in two ways; pass one of them"):
        dp.Select(tokens=BUDGET, buckets=dp.buckets(area=64 * 64))
    with pytest.raises(ValueError, match="buckets and tokens need slices=1, got 2"):
        open_loader(shards, shuffle=dp.Shuffle(slices=2))


@pytest.mark.gpu
def test_patches_of_a_gpu_are_those_of_the_cpu(gpu: None, shards: Path) -> None:
    """On its device, offsets included; other decoders, so to a few grey levels."""
    with open_loader(shards) as cpu, open_loader(shards, device="gpu") as other:
        for (expected,), (found,) in zip(cpu, other, strict=True):
            assert found["key"] == expected["key"]
            assert {tensor.device.type for tensor in found.values() if isinstance(tensor, torch.Tensor)} == {"cuda"}
            assert torch.equal(found["cu_seqlens"].cpu(), expected["cu_seqlens"])
            assert torch.equal(found["grid"].cpu(), expected["grid"])
            assert (found["patches"].cpu().float() - expected["patches"].float()).abs().mean() < 4
