"""Shards and loader names in, records out: compare first, then time, one loader at a time, repeats interleaved.

A repeat opens the loader, draws a first epoch (warm-up: its figures are kept apart, as ``first_epoch``), then one or
more that are the figure, the turn from one to the next included, and closes it. Nothing of one loader is alive while
another is timed: no thread, no worker process, no prefetched batch. Figures are of the steady state: DALI's shards are
staged in the first epoch, the others' are in the page cache after it or come from the bucket each epoch, as they do in
training.
"""

import math
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch

from bench.compare import Comparison, Reference, compare_epoch, tolerance_of
from bench.environment import describe_environment
from bench.loaders import Batch, Loader, LoaderOptions, LoaderSpec, open_loader
from bench.loaders.workers import endpoint_of
from bench.processes import ProcessTree
from bench.report import Spread
from prep.progress import bar

if TYPE_CHECKING:
    from prep.urls import ShardSet

__all__ = ["Repeat", "run_benchmark", "time_loader"]

MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Repeat:
    """One opening of one loader: its first epoch, then those that count."""

    num_samples: int
    """Of an epoch."""
    num_batches: int
    num_epochs: int
    """Timed; `epoch_s` and `epoch_cpu_s` are of one of them, on average."""
    time_to_first_batch_s: float
    """From before the loader was constructed to its first batch on the device."""
    first_epoch_s: float
    """From before the loader was constructed to the end of the first epoch."""
    first_epoch_cpu_s: float
    epoch_s: float
    epoch_cpu_s: float
    peak_rss_mib: float
    """Of this process and its workers, what they share counted for each; seen at the batches of the first epoch."""
    num_workers: int
    decode: str
    device: str


def run_benchmark(
    shards: "ShardSet",
    specs: Sequence[LoaderSpec],
    *,
    options: LoaderOptions,
    repeats: int = 3,
    epochs: int = 1,
    bystanders: Collection[int] = (),
) -> dict[str, Any]:
    """Compare, then time.

    Args:
        shards: What every loader reads.
        specs: The loaders, in the order of the table.
        options: What they share.
        repeats: Openings of each loader; the order is A B C A B C, so that a drift of the machine meets all alike.
        epochs: Epochs timed in each opening: more of them where one is short.
        bystanders: Processes below this one whose CPU is nobody's, such as an embedded AIS node.

    Returns:
        ``{"records": [one a loader], "environment": {...}}``, ready for JSON.

    Raises:
        OutputError: If a loader does not yield what the shards hold; nothing is timed then.
        ValueError: If there is no loader, one twice, or no repeat.
    """
    if not specs:
        raise ValueError("loaders must name at least one loader")
    if len(set(specs)) != len(specs):
        raise ValueError(f"loaders must not repeat, got {', '.join(spec.name for spec in specs)}")
    if repeats < 1:
        raise ValueError(f"repeats must be at least 1, got {repeats}")
    if epochs < 1:
        raise ValueError(f"epochs must be at least 1, got {epochs}")
    shard_bytes = sum(shards.store.size(name) or 0 for name in shards.names)
    comparisons = _compare(shards, specs, options=options)
    tree = ProcessTree(bystanders=bystanders)
    timed: list[list[Repeat]] = [[] for _ in specs]
    with bar(what="time loaders", total=repeats * len(specs), unit="run") as drawn:
        for _ in range(repeats):
            for spec, results in zip(specs, timed, strict=True):
                results.append(time_loader(spec.name, shards, options=spec.apply(options), epochs=epochs, tree=tree))
                drawn.update(1)
    records = [
        _record(spec, results, comparison=comparison, options=spec.apply(options), shard_bytes=shard_bytes)
        for spec, results, comparison in zip(specs, timed, comparisons, strict=True)
    ]
    environment = describe_environment()
    environment["options"] = {
        **asdict(options),
        "loaders": [spec.name if spec.decode is None else f"{spec.name}:{spec.decode}" for spec in specs],
        "repeats": repeats,
        "epochs": epochs,
        "num_shards": len(shards.names),
        "source": "local files" if endpoint_of(shards) is None else "AIStore",
    }
    return {"records": records, "environment": environment}


def time_loader(name: str, shards: "ShardSet", *, options: LoaderOptions, epochs: int = 1, tree: ProcessTree) -> Repeat:
    """Open a loader, draw a first epoch and those that are timed, close it."""
    peak_rss = 0
    first_batch_s = math.nan
    cpu_start, start = tree.cpu_s(), time.perf_counter()
    with open_loader(name, shards, options=options) as loader:
        for _ in _delivered(loader):
            if math.isnan(first_batch_s):
                first_batch_s = time.perf_counter() - start
            peak_rss = max(peak_rss, tree.rss_bytes())
        first_epoch_s, first_epoch_cpu_s = time.perf_counter() - start, tree.cpu_s() - cpu_start

        num_samples, num_batches = 0, 0
        cpu_start, start = tree.cpu_s(), time.perf_counter()
        for _ in range(epochs):
            for batch in _delivered(loader):
                num_samples += len(batch["key"])
                num_batches += 1
        epoch_s, epoch_cpu_s = (time.perf_counter() - start) / epochs, (tree.cpu_s() - cpu_start) / epochs
        assert num_samples % epochs == 0, "comparison found every sample once an epoch"
        return Repeat(
            num_samples=num_samples // epochs,
            num_batches=num_batches // epochs,
            num_epochs=epochs,
            time_to_first_batch_s=first_batch_s,
            first_epoch_s=first_epoch_s,
            first_epoch_cpu_s=first_epoch_cpu_s,
            epoch_s=epoch_s,
            epoch_cpu_s=epoch_cpu_s,
            peak_rss_mib=peak_rss / MIB,
            num_workers=loader.num_workers,
            decode=loader.decode,
            device=loader.device,
        )


def _delivered(loader: Loader) -> Iterator[Batch]:
    """An epoch's batches as a training step finds them: on its device, and touched; the device is idle at both ends."""
    _synchronise()
    for batch in loader.epoch():
        batch["image"] = batch["image"].to(loader.device, non_blocking=True)
        batch["trimap"] = batch["trimap"].to(loader.device, non_blocking=True)
        batch["label"] = batch["label"].to(loader.device, non_blocking=True)
        assert batch["image"].shape[0] == len(batch["key"])
        # One value of each photo, and all labels: enough to find a batch that is not there yet.
        batch["image"][:, 0, 0, 0].sum()
        batch["label"].sum()
        yield batch
    _synchronise()


def _synchronise() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _compare(shards: "ShardSet", specs: Sequence[LoaderSpec], *, options: LoaderOptions) -> list[Comparison]:
    comparisons = []
    with Reference.open(shards, options=options) as reference:
        for spec in specs:
            with open_loader(spec.name, shards, options=spec.apply(options)) as loader:
                tolerance = tolerance_of(decode=loader.decode, device=loader.device)
                show = f"compare {spec.name}"
                comparisons.append(
                    compare_epoch(loader.epoch(), reference, loader=spec.name, tolerance=tolerance, show=show)
                )
    return comparisons


def _record(
    spec: LoaderSpec,
    repeats: Sequence[Repeat],
    *,
    comparison: Comparison,
    options: LoaderOptions,
    shard_bytes: int,
) -> dict[str, Any]:
    last = repeats[-1]
    figures = {
        "samples_per_s": [repeat.num_samples / repeat.epoch_s for repeat in repeats],
        "mib_per_s": [shard_bytes / MIB / repeat.epoch_s for repeat in repeats],
        "cpu_ms_per_sample": [1000 * repeat.epoch_cpu_s / repeat.num_samples for repeat in repeats],
        "time_to_first_batch_s": [repeat.time_to_first_batch_s for repeat in repeats],
    }
    first_epoch = {
        "samples_per_s": [repeat.num_samples / repeat.first_epoch_s for repeat in repeats],
        "cpu_ms_per_sample": [1000 * repeat.first_epoch_cpu_s / repeat.num_samples for repeat in repeats],
    }
    spreads = {name: Spread.of(values) for name, values in figures.items()}
    return {
        "loader": spec.name,
        **{name: spread.median for name, spread in spreads.items()},
        "spread": {name: [spread.min, spread.max] for name, spread in spreads.items()},
        "batch_size": options.batch_size,
        "num_threads": options.num_threads,
        "num_workers": last.num_workers,
        "decode": last.decode,
        "device": last.device,
        "num_samples": last.num_samples,
        "num_batches": last.num_batches,
        "shard_bytes": shard_bytes,
        "peak_rss_mib": max(repeat.peak_rss_mib for repeat in repeats),
        # With construction, staging and the start of workers.
        "first_epoch": {name: Spread.of(values).median for name, values in first_epoch.items()},
        "outputs": comparison.to_json(),
        "repeats": [asdict(repeat) for repeat in repeats],
    }
