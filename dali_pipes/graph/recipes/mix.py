"""Mix the photos and the labels of a batch, on its device, by numbers that belong to its samples."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from dali_pipes.arguments import as_integer, as_number, check_choice
from dali_pipes.graph.definition import Graph
from dali_pipes.graph.inputs import Components
from dali_pipes.graph.pipelines import Layout
from dali_pipes.graph.random import GAMMA_UNIFORMS, Random, betas
from dali_pipes.reader.batch import Batch

if TYPE_CHECKING:
    from torch import Tensor

Each = Literal["batch", "sample"]

OUTPUT = "mix"
"""The output that `mixing` adds to a graph."""


def mixing(graph: Graph, *, mixup: float | None = 0.2, cutmix: float | None = 1.0) -> Graph:
    """Add to a graph the random numbers by which `mix` mixes its batches.

    All outputs of ``graph`` stay as they are.

    Outputs:
        mix: float32 [B, 4], on the loader's device: 1 for CutMix or 0 for MixUp; the share of the sample's own photo,
            drawn from Beta(alpha, alpha); row and column of CutMix's centre, as shares of height and width. They are
            functions of seed, epoch and sample, so a resumed job mixes the same.

    Args:
        graph: A graph with the outputs ``image`` and ``label``, such as ``dp.classification_train()``.
        mixup: alpha of MixUp; ``None``: no MixUp. Where both are given, each is as likely as the other.
        cutmix: alpha of CutMix; ``None``: no CutMix.

    Raises:
        TypeError: If an alpha is not a number.
        ValueError: If an alpha is not positive, if both are ``None``, or if the graph has an output ``mix``.
    """
    for name, alpha in (("mixup", mixup), ("cutmix", cutmix)):
        if alpha is not None and not 0 < as_number(name, alpha) < float("inf"):
            raise ValueError(f"{name} must be positive, got {alpha}")
    if mixup is None and cutmix is None:
        raise ValueError("mixup or cutmix must be a number, got None for both; without them pass the graph alone")
    cutmix_share = 0.0 if cutmix is None else 1.0 if mixup is None else 0.5

    def numbers(batch: Batch) -> npt.NDArray[np.float32]:
        drawn = batch.uniforms(f"{OUTPUT}/place", 3)
        is_cutmix = drawn[:, 0] < cutmix_share
        share = np.zeros(len(batch))
        for name, alpha, rows in (("mixup", mixup, ~is_cutmix), ("cutmix", cutmix, is_cutmix)):
            if alpha is not None:
                uniforms = batch.uniforms(f"{OUTPUT}/{name}", 2 * GAMMA_UNIFORMS)
                share = np.where(rows, betas(uniforms, alpha=alpha, beta=alpha), share)
        return np.stack([is_cutmix, share, drawn[:, 1], drawn[:, 2]], axis=1).astype(np.float32)

    def with_numbers(components: Components, random: Random) -> Mapping[str, Any]:
        outputs = graph(components, random)
        if OUTPUT in outputs:
            raise ValueError(f"mixing adds the output '{OUTPUT}', which the graph has already; rename the graph's own")
        return {**outputs, OUTPUT: components.array(numbers)}

    return with_numbers


def mix(
    batch: Mapping[str, Any], *, num_classes: int | None = None, each: Each = "batch", layout: Layout = "CHW"
) -> dict[str, Any]:
    """Mix each photo of a batch, and its label, with those of the sample before it.

    For the same numbers, the results are those of torchvision's ``v2.MixUp`` and ``v2.CutMix``. Nothing waits for a
    GPU.

    Args:
        batch: A batch of a loader whose graph is `mixing`'s: ``image``, of floating point, [B, C, H, W] or [B, H, W,
            C]; ``label``, int64 [B], or of floating point [B, classes]; ``mix``, float32 [B, 4].
        num_classes: The number of classes; needed for labels of int64, which must be in ``[0, num_classes)``: leave out
            samples without a label (``missing="skip"``).
        each: ``"batch"``: all samples are mixed by the numbers of the first one, as torchvision does. ``"sample"``:
            each sample is mixed by its own.
        layout: Of ``image``: ``"CHW"`` or ``"HWC"``.

    Returns:
        The batch without ``mix``, where ``image`` has the mixed photos, and ``label`` a share of each class: float32
        [B, num_classes], or of the labels' dtype.

    Raises:
        KeyError: If the batch has no output ``mix``, ``image`` or ``label``.
        TypeError: If ``image`` or ``label`` is of another dtype.
        ValueError: If ``num_classes`` is missing or is not the labels' own, or another argument is not one of these.
    """
    check_choice("each", each, Each)
    check_choice("layout", layout, Layout)
    if missing := [name for name in (OUTPUT, "image", "label") if name not in batch]:
        raise KeyError(
            f"the batch has no '{missing[0]}' (found: {', '.join(batch)}); give the loader dp.mixing(graph), with a "
            "graph of image and label"
        )
    image, shares = batch["image"], _class_shares(batch["label"], num_classes)
    if not image.is_floating_point():
        raise TypeError(f"image must be of floating point, got {image.dtype}; pass dtype='float32' to the graph")
    channels, last = image.shape[1], image.shape[3]
    if (layout == "CHW" and last == 3 != channels) or (layout == "HWC" and channels == 3 != last):
        raise ValueError(f"image is {list(image.shape)}, which is not layout={layout!r}; pass the layout of the graph")
    numbers = batch[OUTPUT].double()
    height, width = image.shape[2:] if layout == "CHW" else image.shape[1:3]
    weight, share = _weights(numbers[:1] if each == "batch" else numbers, height=height, width=width)
    weight = weight.unsqueeze(1 if layout == "CHW" else 3).to(image.dtype)
    mixed = {
        "image": image.roll(1, 0).lerp(image, weight),
        "label": shares.roll(1, 0).lerp(shares, share[:, None].to(shares.dtype)),
    }
    return {name: mixed.get(name, value) for name, value in batch.items() if name != OUTPUT}


def _class_shares(label: "Tensor", num_classes: int | None) -> "Tensor":
    from torch.nn.functional import one_hot

    if label.ndim == 2 and label.is_floating_point():
        if num_classes is not None and label.shape[1] != num_classes:
            raise ValueError(f"label has {label.shape[1]} classes, got num_classes={num_classes}")
        return label
    if label.ndim != 1 or label.is_floating_point():
        raise TypeError(
            f"label must be int64 [B] or of floating point [B, classes], got {label.dtype} {list(label.shape)}"
        )
    if num_classes is None:
        raise ValueError("num_classes must be given for labels of class ids")
    return one_hot(label, as_integer("num_classes", num_classes)).float()


def _weights(numbers: "Tensor", *, height: int, width: int) -> tuple["Tensor", "Tensor"]:
    """Compute the share of a sample's own photo, for each pixel, float64 [N, H, W], and of all of it, float64 [N].

    CutMix: S. Yun and others, "CutMix: Regularization Strategy to Train Strong Classifiers with Localizable Features",
    2019; the rectangle's sides are ``sqrt(1 - share)`` of the photo's, and it is cut at the photo's edges.
    """
    import torch

    is_cutmix, share, row, column = numbers.unbind(1)
    is_cutmix = is_cutmix > 0
    half = 0.5 * torch.sqrt(1 - share)
    inside, sides = [], []
    for centre, length in ((row, height), (column, width)):
        middle, reach = torch.floor(centre * length), torch.floor(half * length)
        first, last = (middle - reach).clamp(min=0), (middle + reach).clamp(max=length)
        places = torch.arange(length, device=numbers.device)
        inside.append((places >= first[:, None]) & (places < last[:, None]))  # [N, length]
        sides.append(last - first)
    is_other = inside[0][:, :, None] & inside[1][:, None, :]  # [N, H, W]
    weight = torch.where(is_cutmix[:, None, None], (~is_other).double(), share[:, None, None])
    return weight, torch.where(is_cutmix, 1 - sides[0] * sides[1] / (height * width), share)
