"""Built-in graphs find photo, mask and label of a data set themselves, or say what they found."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import dali_pipes as dp
from dali_pipes.errors import DataError
from tests.lazy import Lazy
from tests.loaders import open_loader
from tests.shards import Sample, mask_bytes, photo_bytes, write_shards

torch = Lazy("torch")

GRAPHS = ("segmentation", "classification_train", "classification_eval")


def samples_of(*components: Sequence[str]) -> list[Sample]:
    """A sample for each sequence of component names, with photos, masks and labels of its number."""

    def data(name: str, number: int) -> bytes:
        if name == "cls":
            return str(number).encode()
        return mask_bytes(number, 40, 30) if name.endswith("png") else photo_bytes(number, 40, 30)

    return [Sample(f"s{i}", {name: data(name, i) for name in names}) for i, names in enumerate(components)]


def first_batch(shards: Any, graph: Any, **options: Any) -> dict[str, Any]:
    with open_loader(shards, graph, shuffle=False, **options) as loader:
        return dict(next(loader)[0])


def test_mask_is_called_as_the_user_says(tmp_path: Path) -> None:
    """``mask`` by default."""
    shards = write_shards(tmp_path, samples_of(*[("jpg", "trimap.png")] * 4), per_shard=2)
    assert list(first_batch(shards, dp.segmentation(crop=24))) == ["image", "mask", "key"]
    assert list(first_batch(shards, dp.segmentation(crop=24, mask_output="trimap"))) == ["image", "trimap", "key"]
    for name in ("", "image", "label"):
        with pytest.raises(ValueError, match=f"mask_output must be a name other than .* got '{name}'"):
            dp.segmentation(mask_output=name)


@pytest.mark.parametrize(("name", "missing"), list(zip(GRAPHS, ("error", "skip", "empty"), strict=True)))
def test_data_set_without_labels_gives_none(tmp_path: Path, name: str, missing: Any) -> None:
    """All graphs, whatever is done with incomplete samples."""
    shards = write_shards(tmp_path, samples_of(*[("jpg", "png")] * 4), per_shard=2)
    batch = first_batch(shards, getattr(dp, name)(crop=24), select=dp.Select(missing=missing))
    assert list(batch) == (["image", "mask", "key"] if name == "segmentation" else ["image", "key"])
    assert len(batch["key"]) == 4


def test_some_labels_are_treated_as_before(tmp_path: Path) -> None:
    """An error that says what to do; or left out; or -1."""
    shards = write_shards(tmp_path, samples_of(("cls", "jpg"), ("jpg",), ("cls", "jpg")), per_shard=2)
    graph = dp.classification_eval(resize=24, crop=24)
    with pytest.raises(
        DataError, match=r"key 's1': no component 'cls' \(found: jpg\); .*pass select=Select\(missing='empty'\)"
    ):
        first_batch(shards, graph)
    assert first_batch(shards, graph, select=dp.Select(missing="empty"))["label"].tolist() == [0, -1, 2]
    assert first_batch(shards, graph, select=dp.Select(missing="skip"), batch_size=2)["label"].tolist() == [0, 2]


def test_faces_say_that_there_is_no_label(tmp_path: Path) -> None:
    """Those that need one, with the reason."""
    shards = write_shards(tmp_path, samples_of(*[("jpg",)] * 4), per_shard=2)
    with open_loader(shards, dp.classification_train(crop=24)) as loader:
        advice = "there is no 'label': the built-in graphs give it if samples have a component 'cls'"
        for arguments in ({"output_map": ["data", "label"]}, {"column_labels": True}):
            with pytest.raises(ValueError, match=advice):
                loader.as_dali(**arguments)
        for outputs in (("image", "label"), {"pixel_values": "image", "labels": "label"}):
            with pytest.raises(ValueError, match=advice):
                next(iter(loader.as_dataloader(outputs=outputs)))


@pytest.mark.parametrize(
    ("components", "missing", "text"),
    [
        ([("txt",)] * 2, "error", "expected a component that is a photo by its name, found 'txt'"),
        # The counts add up, and yet a sample has both.
        (
            [("jpg", "jpeg"), ("txt",)],
            "skip",
            "key 's0': expected one of the components 'jpeg', 'jpg', found 'jpeg', 'jpg'; name the component",
        ),
        ([("jpg", "jpeg"), ("txt",)], "error", "key 's0': expected one of the components 'jpeg', 'jpg', found"),
        ([("txt",), ("jpg", "jpeg")], "error", "key 's0': expected one of the components 'jpeg', 'jpg', found 'txt'"),
    ],
)
def test_unclear_photo_is_refused_before_the_first_batch(
    tmp_path: Path, components: list[tuple[str, ...]], missing: Any, text: str
) -> None:
    """The candidates are named."""
    shards = write_shards(tmp_path, samples_of(*components), per_shard=1)
    with pytest.raises(DataError, match=text):
        first_batch(shards, dp.classification_train(crop=24), batch_size=1, select=dp.Select(missing=missing))


def test_data_sets_of_a_mixture_have_names_of_their_own(tmp_path: Path) -> None:
    """``image.jpg`` here and ``jpg`` there; masks likewise."""
    first = write_shards(tmp_path / "a", samples_of(*[("cls", "image.jpg", "trimap.png")] * 2), per_shard=2)
    second = write_shards(tmp_path / "b", samples_of(*[("cls", "jpg", "png")] * 2), per_shard=2)
    batch = first_batch(dp.Mixture({"a": first, "b": second}), dp.segmentation(crop=24))
    assert sorted(batch["key"]) == ["a/s0", "a/s1", "b/s0", "b/s1"]
    images = dict(zip(batch["key"], batch["image"], strict=True))
    masks = dict(zip(batch["key"], batch["mask"], strict=True))
    for key in ("s0", "s1"):  # both sets hold the same photos and masks
        assert torch.equal(images[f"a/{key}"], images[f"b/{key}"])
        assert torch.equal(masks[f"a/{key}"], masks[f"b/{key}"])
