"""Time a loader with caches of several sizes, which may be smaller than the data set, and with several latencies.

A turn opens the loader on an empty cache and draws a cold epoch, then the timed epochs. If the cache holds the whole
data set, nothing is fetched after the cold epoch; if it holds less, every epoch fetches every shard again. The order of
the samples is the same in all turns: the shuffle window is chosen for the smallest cache, which holds two windows. No
training step uses the batches. The server is a process on the same machine, so its CPU time is measured as well.
"""

import bisect
import itertools
import shutil
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bench.engine.options import ListOption, cache_option, option
from bench.engine.scenario import Measured, Rounds
from bench.scenarios.on_shards import ShardsScenario, touch, upload_repeated
from bench.tools.environment import available_cores
from bench.tools.folders import RunFolder
from bench.tools.processes import ProcessTree, cpu_s_of
from dali_pipes.cache.extents import EXTENT_ALIGNMENT, extent_starts
from dali_pipes.cache.placement import extent_alignment, file_system
from dali_pipes.errors import DataError
from dali_pipes.order.inputs import OrderInputs
from dali_pipes.order.passes import reserved_bytes
from dali_pipes.store.cluster import embedded_node

if TYPE_CHECKING:
    from dali_pipes import Loader
    from dali_pipes.formats.manifest import Manifest
    from dali_pipes.store.shard_set import ShardSet


BUCKET = "dali-pipes-bench-windows"
MIB = 1 << 20


class WindowsCell(NamedTuple):
    cache: float
    latency_ms: float


class WindowInputs(NamedTuple):
    """The data set, on one server for each latency."""

    names: Sequence[str]
    servers: Mapping[float, tuple[str, int]]
    """Latency in milliseconds -> endpoint and process."""
    directory: Path
    facts: dict[str, Any]
    """The record's description, with the bytes of a whole cache file, and of the shuffle window of all turns."""


@dataclass(frozen=True, kw_only=True)
class WindowsScenario(ShardsScenario[WindowInputs, WindowsCell, Measured]):
    """Load a data set through caches that hold all of it or a part, near and far from its server; print the waits.

    Reads --shards once. The timed loader reads a copy of the samples from a server of our own, which --latencies-ms
    slows down. Writes below --cache, and the file that --json names; what is below --cache is removed at the end.
    """

    kind = "windows"
    title = "time windows"

    shards: "ShardSet | None" = option(help="Samples to repeat.  [default: the demo photos]")
    repeats: int = option(3, help="Turns of each combination.")
    samples: int = option(10_000, help="Samples to load.")
    num_shards: int = option(40, help="Shards that they are packed into.")
    epochs: int = option(1, help="Epochs timed in each turn, after the cold one, which has its own figures.")
    fractions: Sequence[float] = option(
        "1.0,0.2", type=ListOption(float), help="Sizes of the cache, as fractions of the data set."
    )
    # The GET of an object is two requests, the redirect and the bytes.
    latencies_ms: Sequence[float] = option(
        "0,20", type=ListOption(float), help="Milliseconds added to each request, redirects included."
    )
    work: Path | None = cache_option("Where cache files lie; the server keeps the data set there too.")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, values, is_right, expected in (
            ("fractions", self.fractions, lambda value: 0 < value <= 1, "(0, 1]"),
            ("latencies_ms", self.latencies_ms, lambda value: 0 <= value < 60_000, "[0, 60000)"),
        ):
            if not values or len(set(values)) != len(values) or not all(map(is_right, values)):
                raise ValueError(f"{name} must be in {expected}, each once, got {values}")

    def prepare(self, folder: RunFolder, stack: ExitStack) -> WindowInputs:
        given, source = (self.shards, "given shards") if self.shards is not None else _demo_shards(folder.new())
        objects = folder.new()
        servers = {
            latency_ms: stack.enter_context(embedded_node.start(objects, latency_s=latency_ms / 1000))
            # The server without latency takes the uploads.
            for latency_ms in dict.fromkeys((0.0, *self.latencies_ms))
        }
        manifest = upload_repeated(
            given,
            servers[0.0].endpoint,
            BUCKET,
            folder=folder,
            num_shards=min(self.num_shards, self.samples),
            num_samples=self.samples,
        )
        alignment = extent_alignment(folder.parent)
        extent_bytes = int(extent_starts(manifest.shard_bytes, manifest.index_bytes, alignment=alignment)[-1])
        smallest = int(extent_bytes * min(self.fractions))
        facts = {
            "num_samples": manifest.num_samples,
            "num_shards": len(manifest.names),
            "shard_bytes": manifest.total_bytes,
            "extent_bytes": extent_bytes,
            "shuffle_window": fitting_window(manifest, smallest, batch_size=self.batch_size, alignment=alignment),
            "source": source,
        }
        processes = {latency_ms: (server.endpoint, server.pid) for latency_ms, server in servers.items()}
        return WindowInputs(manifest.names, processes, folder.new(), facts)

    def subjects(self, made: WindowInputs) -> Sequence[WindowsCell]:
        return [WindowsCell(*pair) for pair in itertools.product(self.fractions, self.latencies_ms)]

    def name_of(self, subject: WindowsCell) -> str:
        return f"a cache of {subject.cache:g} with {subject.latency_ms:g} ms"

    def measure(self, made: WindowInputs, subject: WindowsCell, number: int) -> Measured:
        """Load a cold epoch and the timed ones through an empty cache, which is removed afterwards."""
        endpoint, server_pid = made.servers[subject.latency_ms]
        tree, cache_dir, num_samples = ProcessTree(), made.directory / "cache", made.facts["num_samples"]

        def spent(loader: "Loader | None" = None) -> NDArray[np.float64]:
            """Seconds so far: wall time, the wait for data, CPU time of the loader and of the server."""
            wait_s = 0.0 if loader is None else loader.data_wait_s
            return np.array([time.perf_counter(), wait_s, tree.cpu_s(), cpu_s_of(server_pid)])

        cache_dir.mkdir()
        try:
            start = spent()
            with self.open_loader(
                [f"ais://{BUCKET}/{name}" for name in made.names],
                endpoint,
                cache_dir=cache_dir,
                cache_bytes=int(made.facts["extent_bytes"] * subject.cache),
                window_bytes=made.facts["shuffle_window"],
            ) as loader:
                _draw(loader, num_samples)
                cold_end = spent(loader)
                for _ in range(self.epochs):
                    _draw(loader, num_samples)
                end = spent(loader)
        finally:
            shutil.rmtree(cache_dir)
        cold_s, cold_wait_s, *_ = (cold_end - start).tolist()
        epoch_s, wait_s, client_s, server_s = ((end - cold_end) / self.epochs).tolist()
        figures = {
            "samples_per_s": num_samples / epoch_s,
            "data_wait": wait_s / epoch_s,
            "server_cores": server_s / epoch_s,
            "client_cores": client_s / epoch_s,
            "cold_samples_per_s": num_samples / cold_s,
            "cold_data_wait": cold_wait_s / cold_s,
        }
        return {"figures": figures}

    def data(self, made: WindowInputs) -> list[dict[str, Any]]:
        return [made.facts]

    def notes(self, made: WindowInputs, rounds: Rounds[WindowsCell, Measured]) -> list[str]:
        facts = made.facts
        shard_mib = facts["shard_bytes"] / MIB / len(made.names)
        return [
            f"{facts['num_samples']:,} samples in {len(made.names)} shards of {shard_mib:.1f} MiB, shuffle window "
            f"{facts['shuffle_window'] / MIB:.1f} MiB; a whole cache has {facts['extent_bytes'] / MIB:.1f} MiB, in "
            f"{file_system(made.directory)}.",
            "Each turn has a cold epoch, with the loader's opening, and then those of the figures. Server and loader "
            f"share {available_cores()} cores.",
        ]


def fitting_window(
    manifest: "Manifest", cache_bytes: int, *, batch_size: int, alignment: int = EXTENT_ALIGNMENT
) -> int:
    """The largest ``shuffle_window``, in bytes of shards, of which two fit a cache of ``cache_bytes``."""
    extent_bytes = np.diff(extent_starts(manifest.shard_bytes, manifest.index_bytes, alignment=alignment))
    largest = int(manifest.shard_bytes.max())

    def needed(window_bytes: int) -> int:
        order = OrderInputs(shuffle_window=window_bytes)
        return reserved_bytes(
            extent_bytes, manifest.shard_bytes, manifest.samples, order=order, global_batch_size=batch_size
        )

    if needed(largest) > cache_bytes:
        raise ValueError(
            f"a cache of {cache_bytes} bytes does not hold two windows of one shard, which take up to "
            f"{needed(largest)}; take more --num-shards, or larger --fractions"
        )
    # A larger window needs more. Two windows of half the bytes are the whole data set: no larger one is tried.
    half = max(largest, int(manifest.total_bytes) // 2)
    return largest + bisect.bisect_right(range(largest + 1, half + 1), cache_bytes, key=needed)


def _demo_shards(directory: Path) -> tuple["ShardSet", str]:
    from dali_pipes.store.local import LocalStore
    from dali_pipes.store.urls import resolve_shards
    from prep.pack.pack import PackJob, pack
    from prep.sources.demo_photos import demo_photos

    photos = demo_photos(show_progress=True)
    pack(photos, PackJob(store=LocalStore(directory), show_progress=True))
    return resolve_shards(directory, endpoint=None), photos.name


def _draw(loader: "Loader", num_samples: int) -> None:
    """Draw an epoch, touch each batch, and check that every sample comes once."""
    keys: list[str] = []
    for (batch,) in loader:
        touch(batch)
        keys += batch["key"]
    if len(keys) != num_samples or len(set(keys)) != num_samples:
        raise DataError(f"an epoch delivered {len(keys)} samples, {len(set(keys))} of them different, of {num_samples}")
