"""What the GPU's JPEG engines are told before the first batch, and the batch that is decoded first."""

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from nvidia.dali import fn

import dali_pipes as dp
from dali_pipes.formats.photo_header import PHOTO_FORMATS
from dali_pipes.graph import definition
from dali_pipes.graph.definition import size_hint
from dali_pipes.reader.batch import Places


def photos(*sizes: tuple[int, int], kind: str = "JPEG") -> Places:
    height, width = np.array(sizes, np.int64).reshape(-1, 2).T
    return Places(height * 0, height, height, width, np.full(len(sizes), PHOTO_FORMATS.index(kind)), height * 0 + 1)


@pytest.mark.parametrize(
    ("given", "max_pixels", "expected"),
    [
        ([photos((30, 20), (10, 40))], 10**6, (30, 40)),  # neither photo is as large
        ([photos((30, 20)), photos((5, 100))], 10**6, (30, 100)),  # alternatives of a component
        ([photos((30, 20), (200, 300))], 10**6, (30, 20)),  # 60,000 pixels a sample are not preallocated
        ([photos((30, 20), (100, 90))], 8999, (30, 20)),  # is bad
        ([photos((30, 20), (100, 90))], 9000, (100, 90)),
        ([photos((200, 300))], 10**6, None),  # none fits
        ([photos((30, 20), kind="PNG")], 10**6, None),  # engines decode JPEGs only
        ([photos()], 10**6, None),  # nor is there any photo
        ([], 10**6, None),  # a decoder of something else
        ([photos((0, 0), (30, 20))], 10**6, (30, 20)),  # a header that cannot be read
    ],
)
def test_size_hint_is_of_the_largest_photos_that_memory_allows(
    monkeypatch: pytest.MonkeyPatch, given: list[Places], max_pixels: int, expected: tuple[int, int] | None
) -> None:
    """Here for 8 photos of 10,000 pixels."""
    monkeypatch.setattr(definition, "MAX_PREALLOCATED_BYTES", 3 * 8 * 10_000)
    assert size_hint(given, batch_size=8, max_pixels=max_pixels) == expected


def test_a_short_first_batch_is_decoded_after_a_full_one(small_shards: Path) -> None:
    """Of a loader that resumes into the last batch of an epoch; what is delivered does not change."""
    sizes: list[int] = []

    def count(photos: Any) -> Any:
        sizes.append(len(photos))
        return photos

    def graph(components: dp.Components, random: dp.Random) -> dict[str, Any]:
        del random
        photo = fn.decoders.image(components["image.jpg"], device=components.device)
        small = fn.resize(photo, size=(8, 8))
        return {"image": fn.python_function(small, function=count, batch_processing=True), "label": components.label}

    def resumed(*, starts_full: bool) -> tuple[list[int], list[dict[str, Any]]]:
        sizes.clear()
        with contextlib.closing(
            dp.loader(
                small_shards,
                graph,
                batch_size=10,
                device="cpu",
                state=state,
                bad_samples=dp.BadSamples(max_pixels=10_000),
                cache=dp.Cache(show_progress=False),
            )
        ) as loader:
            loader.parts.decode.starts_full = starts_full  # as on a GPU
            batches = [batch for (batch,) in loader]
            batches += [batch for (batch,) in loader]
        return list(sizes), batches

    with dp.loader(small_shards, graph, batch_size=10, device="cpu", cache=dp.Cache(show_progress=False)) as loader:
        list(zip(range(2), loader, strict=False))
        state = loader.state_dict()
    plain, expected = resumed(starts_full=False)
    decoded, found = resumed(starts_full=True)
    assert decoded == [10, *plain], plain
    assert [len(batch["label"]) for batch in found] == [3, 10, 10, 3]
    for batch, wanted in zip(found, expected, strict=True):
        assert all((batch[name] == wanted[name]).all() for name in ("image", "label"))


def test_a_full_first_batch_is_decoded_once(small_shards: Path) -> None:
    """Nothing is decoded in vain where the first batch is a full one."""
    fed: list[int] = []
    with dp.loader(
        small_shards, dp.classification_eval(crop=8, resize=8), batch_size=10, device="cpu", shuffle=False,
        cache=dp.Cache(show_progress=False),
    ) as loader:  # fmt: skip
        loader.parts.decode.starts_full = True
        real = loader.parts.decode.feed

        def feed() -> Any:
            inputs = real()
            fed.append(0 if inputs is None else len(inputs.batch))
            return inputs

        loader.parts.decode.feed = feed
        assert [len(batch["label"]) for (batch,) in loader] == [10, 10, 3]
        assert not loader.parts.decode.starts_full
    assert fed == [10, 10, 3]
