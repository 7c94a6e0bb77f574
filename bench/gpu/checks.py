"""Check a GPU before anything is timed: does the whole path run there, and how far are its pixels from the CPU's?

Nothing here sets a bound. The differences of two decoders are measured as a distribution, from which a tolerance can be
chosen. Each check has steps, so that a run that ends early keeps those that are done.
"""

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from nvidia.dali import fn, types
from nvidia.dali.pipeline import Pipeline

import dali_pipes as dp
from bench.gpu.workload import Device, Workload
from dali_pipes.errors import PipesError

UInt8s = npt.NDArray[np.uint8]
Int64s = npt.NDArray[np.int64]
# The shares of all values for which the largest difference is reported.
_QUANTILES = (0.5, 0.9, 0.99, 0.999, 0.9999)
_BATCH = 32


class GpuOutputError(PipesError):
    """A loader gave wrong samples, or gave them on the wrong device."""


@dataclass(frozen=True, kw_only=True)
class DecodeWay:
    """One way to decode a JPEG."""

    device: Literal["mixed", "cpu"]
    hw_decoder_load: float = 0.65
    fancy_upsampling: bool = False
    fast_idct: bool = False
    window: bool = False
    """Decode only the middle of the photo, half its height and width."""

    def decoded(self, encoded: Any) -> Any:
        """Define the decoder in a pipeline."""
        arguments: dict[str, Any] = {
            "device": self.device,
            "output_type": types.RGB,
            "hw_decoder_load": self.hw_decoder_load,
            "jpeg_fancy_upsampling": self.fancy_upsampling,
            "use_fast_idct": self.fast_idct,
            "adjust_orientation": False,
        }
        if self.window:
            middle = {"rel_start": [0.25, 0.25], "rel_shape": [0.5, 0.5], "axes": (0, 1)}
            return fn.decoders.image_slice(encoded, **arguments, **middle)
        return fn.decoders.image(encoded, **arguments)


def differences(photos: Sequence[bytes], left: DecodeWay, right: DecodeWay) -> tuple[Int64s, list[int]]:
    """Compare the pixels of two ways to decode JPEG files.

    Returns:
        The number of values (of a pixel and a channel) that differ by 0, 1, ... 255, int64 [256]; and the largest
        difference of each photo.

    Raises:
        GpuOutputError: If the two ways give different sizes of a photo.
    """
    counts = np.zeros(256, np.int64)
    largest = []
    pairs = zip(_decoded(photos, left), _decoded(photos, right), strict=True)
    for number, (one, other) in enumerate(pairs):
        if one.shape != other.shape:
            raise GpuOutputError(f"photo {number}: {left} gives {list(one.shape)}, {right} gives {list(other.shape)}")
        apart = np.abs(one.astype(np.int16) - other)
        counts += np.bincount(apart.ravel(), minlength=256)
        largest.append(int(apart.max(initial=0)))
    return counts, largest


def _decoded(photos: Sequence[bytes], decode: DecodeWay) -> Iterable[UInt8s]:
    batches = iter([photos[start : start + _BATCH] for start in range(0, len(photos), _BATCH)])
    device_id = torch.cuda.current_device() if decode.device == "mixed" else None
    pipeline = Pipeline(batch_size=_BATCH, num_threads=4, device_id=device_id, prefetch_queue_depth=1)
    with pipeline:
        encoded = fn.external_source(
            source=lambda: [np.frombuffer(data, np.uint8) for data in next(batches)],
            batch=True,
            dtype=types.UINT8,
            ndim=1,
        )
        pipeline.set_outputs(decode.decoded(encoded))
    pipeline.build()
    for _ in range(math.ceil(len(photos) / _BATCH)):
        (outputs,) = pipeline.run()
        pixels = outputs.as_cpu() if device_id is not None else outputs
        for number in range(len(pixels)):
            yield np.asarray(pixels[number])


def describe(counts: Int64s, largest: Sequence[int]) -> dict[str, Any]:
    """Describe a distribution of differences, in grey levels of 255.

    >>> describe(np.array([6, 3, 1] + [0] * 253), [2, 1])["quantiles"]
    {'0.5': 0, '0.9': 1, '0.99': 2, '0.999': 2, '0.9999': 2}
    """
    total, largest_of_all = int(counts.sum()), max(largest)
    cumulated = np.cumsum(counts)
    return {
        "num_values": total,
        "equal_share": float(counts[0]) / total,
        "mean": float((counts * np.arange(256)).sum()) / total,
        "max": largest_of_all,
        # The smallest difference that this share of the values does not exceed.
        "quantiles": {f"{share}": int(np.searchsorted(cumulated, share * total - 1e-9)) for share in _QUANTILES},
        "counts": counts[: largest_of_all + 1].tolist(),
        "photo_max": {"median": float(np.median(largest)), "max": largest_of_all},
    }


_CPU = DecodeWay(device="cpu")
_HYBRID = DecodeWay(device="mixed", hw_decoder_load=0.0)
_ENGINES = DecodeWay(device="mixed", hw_decoder_load=1.0)
_WAYS = {
    "hybrid": (_CPU, _HYBRID),
    "engines": (_CPU, _ENGINES),
    "default": (_CPU, DecodeWay(device="mixed")),
    "default, fancy upsampling": (_CPU, DecodeWay(device="mixed", fancy_upsampling=True)),
    # Which of the two decodes a photo depends on its place in the batch.
    "engines, against hybrid": (_HYBRID, _ENGINES),
    "default, window": (DecodeWay(device="cpu", window=True), DecodeWay(device="mixed", window=True)),
}
_CPU_WAYS = {"cpu, fast idct": (_CPU, DecodeWay(device="cpu", fast_idct=True))}
"""Without a GPU the CPU's slow inverse transform is compared with its fast one: it shows that the comparison works."""


def check_steps(name: str, workload: Workload, *, device: Device) -> list[str]:
    """Return the steps of the check ``path`` or ``parity``."""
    if name == "path":
        return [*_path_graphs(workload)]
    ways = _WAYS if device == "gpu" else _CPU_WAYS
    return [*ways, *(f"graph {graph}" for graph in _parity_graphs(workload))]


def check_step(
    name: str, step: str, workload: Workload, *, device: Device, num_threads: int, batch_size: int
) -> dict[str, Any]:
    """Take one of `check_steps`; the result is a part of the record.

    Raises:
        GpuOutputError: If samples are missing or wrong.
    """
    if name == "path":
        return check_graph(workload, step, device=device, num_threads=num_threads, batch_size=batch_size)
    if step.startswith("graph "):
        return graph_differences(workload, step.removeprefix("graph "), "cpu", device)
    return describe(*differences(workload.stored.photos, *(_WAYS | _CPU_WAYS)[step]))


def check_report(
    name: str, workload: Workload, found: Mapping[str, dict[str, Any]], *, device: Device
) -> dict[str, Any]:
    """Return the record of a check from the results of its steps, by step."""
    if name == "path":
        return dict(found)
    graphs = {
        output: apart
        for step, outputs in found.items()
        if step.startswith("graph ")
        for output, apart in outputs.items()
    }
    report: dict[str, Any] = {
        "measured": device == "gpu",
        "num_photos": len(workload.stored.photos),
        "against": "cpu",
        "differences": {step: apart for step, apart in found.items() if not step.startswith("graph ")},
        "graphs": graphs,
    }
    if device == "cpu":
        report["reason"] = "parity of 'mixed' with 'cpu' needs a CUDA device, and no GPU is used"
    error = unequal_ids(graphs)
    return report if error is None else report | {"error": error}


def unequal_ids(graphs: Mapping[str, Mapping[str, float]]) -> str | None:
    """Name the masks and labels that differ in `graph_differences`: they hold ids, which must not be rounded.

    >>> unequal_ids({"segmentation.image": {"equal_share": 0.4}, "segmentation.mask": {"equal_share": 0.99}})
    'masks and labels must be equal on both devices, differ in segmentation.mask (1.00% of the values)'
    """
    wrong = [
        f"{name} ({1 - apart['equal_share']:.2%} of the values)"
        for name, apart in graphs.items()
        if name.endswith((".mask", ".label")) and apart["equal_share"] < 1
    ]
    return f"masks and labels must be equal on both devices, differ in {', '.join(wrong)}" if wrong else None


def _parity_graphs(workload: Workload) -> dict[str, Any]:
    graphs = {"classification_eval": dp.classification_eval(photo=workload.photo)}
    if workload.stored.masks:
        graphs["segmentation"] = dp.segmentation(photo=workload.photo, mask=workload.mask)
    return graphs


def graph_differences(workload: Workload, name: str, left: Device, right: Device) -> dict[str, dict[str, float]]:
    """Compare the outputs of a graph on two devices, over an epoch.

    Returns:
        ``GRAPH.OUTPUT`` -> share of equal values, mean and largest difference, in the output's own unit: standard
        deviations of a normalised photo, ids of a mask.

    Raises:
        GpuOutputError: If the devices give different samples.
    """
    graph = _parity_graphs(workload)[name]
    with _loader(workload, graph, left) as one, _loader(workload, graph, right) as other:
        sums: dict[str, tuple[int, int, float, float]] = {}
        for (these,), (those,) in zip(one, other, strict=True):
            if these.pop("key") != those.pop("key"):
                raise GpuOutputError(f"graph '{name}': {left} and {right} give different samples")
            for output, values in these.items():
                apart = (values.cpu().double() - those[output].cpu().double()).abs()
                total, equal, summed, largest = sums.get(output, (0, 0, 0.0, 0.0))
                sums[output] = (
                    total + apart.numel(),
                    equal + int((apart == 0).sum()),
                    summed + float(apart.sum()),
                    max(largest, float(apart.max())),
                )
    return {
        f"{name}.{output}": {"equal_share": equal / total, "mean": summed / total, "max": largest}
        for output, (total, equal, summed, largest) in sums.items()
    }


def _loader(workload: Workload, graph: Any, device: Device) -> Any:
    return workload.open_loader(graph, device=device, batch_size=_BATCH, shuffle=False, outputs=dp.Outputs(keys=True))


def _path_graphs(workload: Workload) -> dict[str, Any]:
    photo, mask = workload.photo, workload.mask
    graphs = {
        "classification_train": dp.classification_train(photo=photo),
        "classification_eval": dp.classification_eval(photo=photo, dtype="float16"),
    }
    if workload.stored.masks:
        graphs["segmentation"] = dp.segmentation(photo=photo, mask=mask)
        graphs["segmentation, masks mixed"] = dp.segmentation(photo=photo, mask=mask, mask_device="mixed")
    return graphs


def check_graph(workload: Workload, name: str, *, device: Device, num_threads: int, batch_size: int) -> dict[str, Any]:
    """Load an epoch of a graph with a real loader: every key comes once, with finite values on the device.

    Raises:
        GpuOutputError: If keys are missing or repeated, or a batch has a wrong device, length or value.
    """
    started = time.perf_counter()
    keys: list[str] = []
    with workload.open_loader(
        _path_graphs(workload)[name],
        device=device,
        batch_size=batch_size,
        decode=dp.Decode(threads=num_threads),
        outputs=dp.Outputs(keys=True),
    ) as loader:
        expected = loader.num_samples
        for (batch,) in loader:
            keys += batch["key"]
            _check_batch(name, batch, device=device)
    if not len(keys) == len(set(keys)) == expected:
        found = f"{len(keys)}, {len(set(keys))} of them different"
        raise GpuOutputError(f"graph '{name}': expected {expected} keys, each once; found {found}")
    return {"num_samples": len(keys), "epoch_s": round(time.perf_counter() - started, 3)}


def _check_batch(name: str, batch: dict[str, Any], *, device: str) -> None:
    expected = "cuda" if device == "gpu" else "cpu"
    for output, values in batch.items():
        if output == "key":
            continue
        if values.device.type != expected:
            raise GpuOutputError(f"graph '{name}', output '{output}': expected on {expected}, found on {values.device}")
        if len(values) != len(batch["key"]):
            raise GpuOutputError(f"graph '{name}', output '{output}': {len(values)} rows for {len(batch['key'])} keys")
        if values.is_floating_point() and not bool(torch.isfinite(values).all()):
            raise GpuOutputError(f"graph '{name}', output '{output}': not all values are finite")
