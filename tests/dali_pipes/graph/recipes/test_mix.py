"""MixUp and CutMix of a batch, against torchvision's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dali_pipes as dp
from tests.dali_pipes.graph.draws import distance
from tests.lazy import Lazy

torch, v2, mix = Lazy("torch"), Lazy("torchvision.transforms.v2"), Lazy("dali_pipes.graph.recipes.mix")

NUM_CLASSES = 7
HEIGHT, WIDTH = 12, 17
ROWS = [
    [0, 0.3, 0.1, 0.9],
    [0, 1.0, 0.0, 0.0],
    [0, 0.0, 0.5, 0.5],
    [1, 0.5, 0.5, 0.5],
    [1, 0.9, 0.01, 0.99],  # cut at an edge
    [1, 0.0, 0.5, 0.5],  # the whole photo, where its middle is the centre
    [1, 1.0, 0.3, 0.3],  # nothing
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


@pytest.mark.parametrize("row", ROWS)
def test_batch_is_mixed_as_torchvision_does(row: list[float]) -> None:
    """By the numbers of its first sample."""
    batch = batch_of([row, *ROWS[:4]])
    found = dp.mix(batch, num_classes=NUM_CLASSES)
    image, label = mixed_by_torchvision(batch, batch["mix"][0].tolist())
    torch.testing.assert_close(found["image"], image, atol=1e-6, rtol=0)
    torch.testing.assert_close(found["label"], label, atol=1e-6, rtol=0)
    assert set(found) == {"image", "label"}
    if row[0]:
        assert torch.equal(found["image"], image), "CutMix changes no value"


@pytest.mark.parametrize("layout", ["CHW", "HWC"])
def test_each_sample_is_mixed_by_its_own_numbers(layout: Any) -> None:
    batch = batch_of(ROWS)
    given = batch if layout == "CHW" else batch | {"image": batch["image"].permute(0, 2, 3, 1)}
    found = dp.mix(given, num_classes=NUM_CLASSES, each="sample", layout=layout)
    for number, row in enumerate(batch["mix"].tolist()):
        image, label = mixed_by_torchvision(batch, row)
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
    """Outputs of another kind, and those that are not there."""
    batch = batch_of(ROWS)
    if name:
        value = batch.pop(name)
        batch |= {name: change(value)} if change else {}
    with pytest.raises(error, match=text):
        dp.mix(batch, **{"num_classes": NUM_CLASSES} | options)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"mixup": 0}, "mixup must be positive, got 0"),
        ({"cutmix": -1}, "cutmix must be positive, got -1"),
        ({"mixup": None, "cutmix": None}, "mixup or cutmix must be a number"),
    ],
)
def test_alphas_out_of_range_are_refused(options: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        dp.mixing(dp.classification_train(), **options)


def numbers_of(shards: Path, *, num_epochs: int, **options: Any) -> torch.Tensor:
    graph = dp.mixing(dp.classification_train(crop=8), **options)
    with dp.loader(shards, graph, batch_size=6, device="cpu", seed=1) as loader:
        return torch.cat([batch["mix"] for _ in range(num_epochs) for (batch,) in loader])


def test_numbers_are_drawn_as_torchvision_draws_them(small_shards: Path) -> None:
    """Shares of both kinds, and the places of CutMix's rectangles."""
    numbers = numbers_of(small_shards, num_epochs=40, mixup=0.3, cutmix=0.8)
    is_cutmix = numbers[:, 0] > 0
    assert abs(is_cutmix.float().mean() - 0.5) < 4 / (2 * np.sqrt(len(numbers)))
    torch.manual_seed(8)
    shares = [v2.MixUp(alpha=0.3, num_classes=2).make_params([])["lam"] for _ in range(3000)]
    assert distance(numbers[~is_cutmix, 1], shares) < 2.2
    weight, own = mix._weights(numbers[is_cutmix].double(), height=HEIGHT, width=WIDTH)
    cutmix = v2.CutMix(alpha=0.8, num_classes=2)
    drawn = [cutmix.make_params([torch.zeros(1, 3, HEIGHT, WIDTH)]) for _ in range(3000)]
    assert distance(own, [one["lam_adjusted"] for one in drawn]) < 2.2
    torch.testing.assert_close(weight.mean(dim=(1, 2)), own)
    for dim, place in ((2, 1), (1, 0)):  # the first row and the first column of each rectangle
        starts = (1 - weight).amax(dim=dim).argmax(dim=1)[own < 1]
        assert distance(starts, [one["box"][place] for one in drawn if one["lam_adjusted"] < 1]) < 2.2


@pytest.mark.parametrize(("options", "kind"), [({"cutmix": None}, 0), ({"mixup": None}, 1)])
def test_one_kind_alone(small_shards: Path, options: Any, kind: int) -> None:
    assert (numbers_of(small_shards, num_epochs=1, **options)[:, 0] == kind).all()


def test_resumed_job_mixes_the_same(small_shards: Path) -> None:
    graph = dp.mixing(dp.classification_train(crop=16))
    options: dict[str, Any] = {"batch_size": 5, "device": "cpu", "seed": 4}
    with dp.loader(small_shards, graph, **options) as loader:
        next(loader)
        state = loader.state_dict()
        expected = [dp.mix(next(loader)[0], num_classes=6) for _ in range(3)]
    with dp.loader(small_shards, graph, **options) as loader:
        loader.load_state_dict(state)
        for one in expected:
            other = dp.mix(next(loader)[0], num_classes=6)
            assert torch.equal(one["image"], other["image"])
            assert torch.equal(one["label"], other["label"])
            torch.testing.assert_close(one["label"].sum(dim=1), torch.ones(5))


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
