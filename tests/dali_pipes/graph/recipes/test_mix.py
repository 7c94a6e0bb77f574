"""MixUp and CutMix of a batch, against torchvision's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dali_pipes as dp
from tests.lazy import Lazy

torch, v2, mix = Lazy("torch"), Lazy("torchvision.transforms.v2"), Lazy("dali_pipes.graph.recipes.mix")

NUM_CLASSES = 7
HEIGHT, WIDTH = 12, 17
ROWS = [
    [0, 0.3, 0.1, 0.9],
    [0, 1.0, 0.0, 0.0],
    [0, 0.0, 0.5, 0.5],
    [1, 0.5, 0.5, 0.5],
    [1, 0.9, 0.01, 0.99],  # the photo's edges cut the rectangle
    [1, 0.0, 0.5, 0.5],  # the rectangle is the whole photo
    [1, 1.0, 0.3, 0.3],  # the rectangle is empty
    [1, 0.2, 0.97, 0.02],
]


def batch_of(numbers: list[list[float]]) -> dict[str, Any]:
    torch.manual_seed(2)
    image = torch.randn(len(numbers), 3, HEIGHT, WIDTH)
    return {"image": image, "label": torch.randint(NUM_CLASSES, (len(numbers),)), "mix": torch.tensor(numbers)}


def mixed_by_torchvision(batch: dict[str, Any], row: list[float]) -> tuple[torch.Tensor, torch.Tensor]:
    """Photos and labels for the numbers of one row, with torchvision's own arithmetic."""
    is_cutmix, share, centre_row, centre_column = row
    image, label = batch["image"], batch["label"]
    parameters: dict[str, Any] = {"labels": label, "batch_size": len(label), "lam": share}
    transform = v2.MixUp(num_classes=NUM_CLASSES)
    if is_cutmix:
        transform = v2.CutMix(num_classes=NUM_CLASSES)
        # From `v2.CutMix.make_params`, for a given centre.
        radius = 0.5 * np.sqrt(1 - share)
        x, y = int(centre_column * WIDTH), int(centre_row * HEIGHT)
        half_width, half_height = int(radius * WIDTH), int(radius * HEIGHT)
        left, top = max(x - half_width, 0), max(y - half_height, 0)
        right, bottom = min(x + half_width, WIDTH), min(y + half_height, HEIGHT)
        parameters["box"] = left, top, right, bottom
        parameters["lam_adjusted"] = 1 - (right - left) * (bottom - top) / (WIDTH * HEIGHT)
    return transform.transform(image, parameters), transform.transform(label, parameters)


@pytest.mark.parametrize("each", ["batch", "sample"])
@pytest.mark.parametrize("layout", ["CHW", "HWC"])
def test_photos_are_mixed_as_torchvision_does(layout: Any, each: Any) -> None:
    """Each sample is mixed by its own numbers, or all samples by the first sample's numbers."""
    batch = batch_of(ROWS)
    given = batch if layout == "CHW" else batch | {"image": batch["image"].permute(0, 2, 3, 1)}
    found = dp.mix(given, num_classes=NUM_CLASSES, each=each, layout=layout)
    assert set(found) == {"image", "label"}
    for number, row in enumerate(batch["mix"].tolist()):
        image, label = mixed_by_torchvision(batch, row if each == "sample" else batch["mix"][0].tolist())
        mixed = found["image"][number] if layout == "CHW" else found["image"][number].permute(2, 0, 1)
        torch.testing.assert_close(mixed, image[number], atol=1e-6, rtol=0)
        torch.testing.assert_close(found["label"][number], label[number], atol=1e-6, rtol=0)


def test_shares_of_classes_may_be_given() -> None:
    """Labels that are no class ids: of several classes, or smoothed."""
    batch = batch_of(ROWS)
    shares = torch.nn.functional.one_hot(batch["label"], NUM_CLASSES).double()
    found = dp.mix(batch | {"label": shares}, num_classes=NUM_CLASSES)
    assert found["label"].dtype == torch.float64
    torch.testing.assert_close(found["label"].float(), dp.mix(batch, num_classes=NUM_CLASSES)["label"])
    with pytest.raises(ValueError, match="label has 7 classes, got num_classes=8"):
        dp.mix(batch | {"label": shares}, num_classes=8)


@pytest.mark.parametrize(
    ("name", "change", "options", "error", "text"),
    [
        ("image", lambda image: image.byte(), {}, TypeError, "image must be of floating point, got"),
        ("label", lambda label: label.float(), {}, TypeError, r"label must be int64 \[B\] or of floating point"),
        ("image", lambda image: image.permute(0, 2, 3, 1), {}, ValueError, "is not layout='CHW'; pass the layout of"),
        ("", None, {"layout": "HWC"}, ValueError, "which is not layout='HWC'; pass the layout of the graph"),
        ("", None, {"layout": "NCHW"}, ValueError, "layout must be one of CHW, HWC"),
        ("", None, {"num_classes": None}, ValueError, "num_classes must be given"),
        ("", None, {"each": "pixel"}, ValueError, "each must be one of batch, sample, got 'pixel'"),
        ("mix", None, {}, KeyError, r"no 'mix' \(found: image, label\); give the loader dp\.mixing\(graph\)"),
        ("label", None, {}, KeyError, r"no 'label' \(found: image, mix\)"),
    ],
)
def test_what_cannot_be_mixed_is_refused(name: str, change: Any, options: Any, error: Any, text: str) -> None:
    """Outputs of a wrong kind and missing outputs are refused."""
    batch = batch_of(ROWS)
    if name:
        value = batch.pop(name)
        batch |= {name: change(value)} if change else {}
    with pytest.raises(error, match=text):
        dp.mix(batch, **{"num_classes": NUM_CLASSES} | options)


def numbers_of(shards: Path, *, num_epochs: int, **options: Any) -> torch.Tensor:
    graph = dp.mixing(dp.classification_train(crop=8), **options)
    with dp.loader(shards, graph, batch_size=6, device="cpu", seed=1) as loader:
        return torch.cat([batch["mix"] for _ in range(num_epochs) for (batch,) in loader])


@pytest.mark.parametrize(("options", "kind"), [({"cutmix": None}, 0), ({"mixup": None}, 1)])
def test_one_kind_alone(small_shards: Path, options: Any, kind: int) -> None:
    assert (numbers_of(small_shards, num_epochs=1, **options)[:, 0] == kind).all()


def test_output_of_that_name_is_refused(small_shards: Path) -> None:
    graph = dp.mixing(dp.mixing(dp.classification_train(crop=8)))
    with pytest.raises(ValueError, match="mixing adds the output 'mix', which the graph has already"):
        dp.loader(small_shards, graph, batch_size=2, device="cpu")


@pytest.mark.gpu
def test_batch_on_a_gpu_is_mixed_there(gpu: None) -> None:
    batch = batch_of(ROWS)
    expected = dp.mix(batch, num_classes=NUM_CLASSES, each="sample")
    on_gpu = dp.mix({name: value.cuda() for name, value in batch.items()}, num_classes=NUM_CLASSES, each="sample")
    for name in ("image", "label"):
        assert on_gpu[name].is_cuda
        torch.testing.assert_close(on_gpu[name].cpu(), expected[name], atol=1e-6, rtol=0)
