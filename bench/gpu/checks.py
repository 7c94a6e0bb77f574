"""Check a GPU before anything is timed: does the whole path run there, and how far are its pixels from the CPU's?

Nothing here sets a bound on photos. The differences of two decoders are measured as a distribution, from which a
tolerance can be chosen. Masks and labels hold ids, which must be equal.
"""

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from nvidia.dali import fn, types
from nvidia.dali.pipeline import Pipeline

import dali_pipes as dp
from bench.gpu.workload import GpuSetting, Workload
from dali_pipes.arrays import Int64s
from dali_pipes.errors import PipesError

UInt8s = npt.NDArray[np.uint8]
_BATCH = 32


class GpuOutputError(PipesError):
    """A loader gave wrong samples, or gave them on the wrong device."""


Way = Mapping[str, Any]
"""One way to decode a JPEG: arguments of DALI's decoder, those of `fn.decoders.image_slice` for a window."""


def differences(photos: Sequence[bytes], left: Way, right: Way) -> Int64s:
    """Compare two ways to decode JPEGs: how many values of a pixel's channel differ by 0, 1, ... 255, int64 [256]."""
    counts = np.zeros(256, np.int64)
    pairs = zip(_decoded(photos, left), _decoded(photos, right), strict=True)
    for number, (one, other) in enumerate(pairs):
        if one.shape != other.shape:
            raise GpuOutputError(f"photo {number}: {left} gives {list(one.shape)}, {right} gives {list(other.shape)}")
        apart = np.abs(one.astype(np.int16) - other)
        counts += np.bincount(apart.ravel(), minlength=256)
    return counts


def _decoded(photos: Sequence[bytes], way: Way) -> Iterable[UInt8s]:
    batches = iter([photos[start : start + _BATCH] for start in range(0, len(photos), _BATCH)])
    device_id = torch.cuda.current_device() if way["device"] == "mixed" else None
    pipeline = Pipeline(batch_size=_BATCH, num_threads=4, device_id=device_id, prefetch_queue_depth=1)
    with pipeline:
        encoded = fn.external_source(
            source=lambda: [np.frombuffer(data, np.uint8) for data in next(batches)],
            batch=True,
            dtype=types.UINT8,
            ndim=1,
        )
        decoder = fn.decoders.image_slice if "rel_start" in way else fn.decoders.image
        plain = {"jpeg_fancy_upsampling": False, "use_fast_idct": False, "adjust_orientation": False}
        pipeline.set_outputs(decoder(encoded, output_type=types.RGB, **{**plain, **way}))
    pipeline.build()
    for _ in range(math.ceil(len(photos) / _BATCH)):
        (outputs,) = pipeline.run()
        pixels = outputs.as_cpu() if device_id is not None else outputs
        for number in range(len(pixels)):
            yield np.asarray(pixels[number])


_CPU, _DEFAULT = {"device": "cpu"}, {"device": "mixed"}
_HYBRID, _ENGINES = {**_DEFAULT, "hw_decoder_load": 0.0}, {**_DEFAULT, "hw_decoder_load": 1.0}
_MIDDLE = {"rel_start": [0.25, 0.25], "rel_shape": [0.5, 0.5], "axes": (0, 1)}
Ways = tuple[Way, Way]
WAYS: Mapping[str, Ways] = {
    "hybrid": (_CPU, _HYBRID),
    "engines": (_CPU, _ENGINES),
    "default": (_CPU, _DEFAULT),
    "default, fancy upsampling": (_CPU, {**_DEFAULT, "jpeg_fancy_upsampling": True}),
    # Which of the two decodes a photo depends on its place in the batch.
    "engines, against hybrid": (_HYBRID, _ENGINES),
    "default, window": ({**_CPU, **_MIDDLE}, {**_DEFAULT, **_MIDDLE}),
}
CPU_WAYS: Ways = (_CPU, {**_CPU, "use_fast_idct": True})
"""Without a GPU the CPU's slow inverse transform is compared with its fast one: it shows that the comparison works."""
PATH_GRAPHS = ("classification_train", "classification_eval")
MASK_GRAPHS = ("segmentation", "segmentation, masks mixed")


def check_decoders(workload: Workload, setting: GpuSetting, *, ways: Ways) -> dict[str, Any]:
    """Compare the pixels of two ways to decode the photos, in grey levels of 255."""
    counts = differences(workload.stored.photos, *ways)
    total, largest = int(counts.sum()), int(counts.nonzero()[0].max())
    figures = {
        "equal_share": float(counts[0]) / total,
        "mean_difference": float((counts * np.arange(256)).sum()) / total,
        # The smallest difference that 99.99 % of the values do not exceed.
        "p9999_difference": int(np.searchsorted(np.cumsum(counts), 0.9999 * total - 1e-9)),
        "max_difference": largest,
    }
    return {"figures": figures, "counts": counts[: largest + 1].tolist()}


def _graph(workload: Workload, name: str) -> Any:
    photo, mask = workload.photo, workload.mask
    if name == "classification_train":
        return dp.classification_train(photo=photo)
    if name == "classification_eval":
        return dp.classification_eval(photo=photo, dtype="float16")
    return dp.segmentation(photo=photo, mask=mask, mask_device="mixed" if name.endswith("mixed") else "cpu")


def check_parity(workload: Workload, setting: GpuSetting, *, name: str) -> dict[str, Any]:
    """Compare the photos of a graph on the CPU and on the setting's device, over an epoch, in standard deviations.

    Masks and labels must be equal.
    """
    graph = _graph(workload, name)
    options: dict[str, Any] = {"batch_size": _BATCH, "shuffle": False, "outputs": dp.Outputs(keys=True)}
    total, equal, summed, largest = 0, 0, 0.0, 0.0
    with (
        workload.open_loader(graph, device="cpu", **options) as one,
        workload.open_loader(graph, device=setting.device, **options) as other,
    ):
        for (these,), (those,) in zip(one, other, strict=True):
            if these.pop("key") != those.pop("key"):
                raise GpuOutputError(f"graph '{name}': cpu and {setting.device} give different samples")
            for output, values in these.items():
                apart = (values.cpu().double() - those[output].cpu().double()).abs()
                if output == "image":
                    total, equal = total + apart.numel(), equal + int((apart == 0).sum())
                    summed, largest = summed + float(apart.sum()), max(largest, float(apart.max()))
                elif share := float((apart != 0).double().mean()):
                    raise GpuOutputError(
                        f"masks and labels must be equal on both devices, differ in {name}.{output} ({share:.2%} of "
                        "the values of a batch)"
                    )
    figures = {"equal_share": equal / total, "mean_difference": summed / total, "max_difference": largest}
    return {"figures": figures}


def check_graph(workload: Workload, setting: GpuSetting, *, name: str) -> dict[str, Any]:
    """Load an epoch of a graph with a real loader: every key comes once, with finite values on the device."""
    started, device = time.perf_counter(), "cuda" if setting.device == "gpu" else "cpu"
    keys: list[str] = []
    with workload.open_loader(
        _graph(workload, name),
        device=setting.device,
        batch_size=setting.batch_size,
        decode=dp.Decode(threads=setting.num_threads),
        outputs=dp.Outputs(keys=True),
    ) as loader:
        expected = loader.num_samples
        for (batch,) in loader:
            these = batch.pop("key")
            keys += these
            for output, values in batch.items():
                where = f"graph '{name}', output '{output}'"
                if values.device.type != device:
                    raise GpuOutputError(f"{where}: expected on {device}, found on {values.device}")
                if len(values) != len(these):
                    raise GpuOutputError(f"{where}: {len(values)} rows for {len(these)} keys")
                if values.is_floating_point() and not bool(torch.isfinite(values).all()):
                    raise GpuOutputError(f"{where}: not all values are finite")
    if not len(keys) == len(set(keys)) == expected:
        found = f"{len(keys)}, {len(set(keys))} of them different"
        raise GpuOutputError(f"graph '{name}': expected {expected} keys, each once; found {found}")
    return {"figures": {"checked": len(keys), "first_epoch_s": time.perf_counter() - started}}
