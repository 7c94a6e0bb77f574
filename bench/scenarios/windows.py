"""Time a loader whose data set is larger than its cache: shares of it that fit, and latencies of the server, in turns.

A turn opens the loader on an empty cache and draws a cold epoch, then the timed ones, the turn from one epoch to the
next included. With a cache of the whole data set nothing is fetched after the cold epoch; with less, every epoch
fetches every shard again. The order of the samples, and so the work of decoding, is the same in all turns: the shuffle
window is chosen for the smallest cache, which holds two of them. Nobody trains on the batches, so the decode half is as
fast as it ever is, and asks for data as fast as it ever will.

The server is a process on the same machine, and takes its cores from the loader: what it spends is measured beside.
"""

import dataclasses
import itertools
import shutil
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from bench.loaders import Device, available_cores
from bench.reports.report import Spread
from bench.reports.tables import format_rows
from bench.timing.object_server import ObjectServer
from bench.timing.processes import ProcessTree
from dali_pipes.cache.extents import EXTENT_ALIGNMENT, extent_starts
from dali_pipes.cache.free_space import file_system
from dali_pipes.cache.placement import extent_alignment
from dali_pipes.errors import DataError
from dali_pipes.order.plan import OrderInputs, reserved_bytes
from dali_pipes.progress import bar

if TYPE_CHECKING:
    from dali_pipes import Loader
    from dali_pipes.formats.manifest import Manifest
    from dali_pipes.store.base import Store
    from dali_pipes.store.urls import ShardSet
    from prep.sources.record import Source

__all__ = ["CacheWatch", "WindowsOptions", "fitting_window", "format_windows", "repeated_source", "run_windows"]

BUCKET = "dali-pipes-bench-windows"
PREFIX = "windows-"
MIB = 1 << 20
BLOCK = 512
"""Unit of ``st_blocks``, whatever the file system's own is."""
WATCH_S = 0.005
# Bytes a shard: no limit, the count of samples is one.
MAX_SHARD_BYTES = 1 << 50
FIGURES = ("samples_per_s", "data_wait", "server_cpu_share", "server_cores", "client_cores")


@dataclass(frozen=True, kw_only=True)
class WindowsOptions:
    """What is loaded, from what, how often."""

    samples: int = 10_000
    num_shards: int = 40
    """At most; fewer where the samples do not divide."""
    repeats: int = 3
    epochs: int = 1
    """Timed in each turn, after the cold one."""
    batch_size: int = 64
    num_threads: int = dataclasses.field(default_factory=available_cores)
    crop: int = 350
    seed: int = 7
    device: Device = "auto"
    ramp_up: bool = False
    fractions: Sequence[float] = (1.0, 0.2)
    """Of the data set, that the cache may hold."""
    latencies_ms: Sequence[float] = (0.0, 20.0)
    """Added to each request; an object's GET is two, the redirect and the bytes."""
    cache: Path = Path("/dev/shm")  # noqa: S108 (a directory of our own is made there)
    """Where images, and the server's objects, lie."""

    def __post_init__(self) -> None:
        for name in ("samples", "num_shards", "repeats", "epochs", "batch_size", "num_threads", "crop"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not self.fractions or not all(0 < fraction <= 1 for fraction in self.fractions):
            raise ValueError(f"fractions must be in (0, 1], got {_listed(self.fractions)}")
        if not self.latencies_ms or not all(0 <= latency < 60_000 for latency in self.latencies_ms):
            raise ValueError(f"latencies_ms must be in [0, 60000), got {_listed(self.latencies_ms)}")
        for name in ("fractions", "latencies_ms"):
            if len(set(getattr(self, name))) != len(getattr(self, name)):
                raise ValueError(f"{name} must not repeat, got {_listed(getattr(self, name))}")
        if not self.cache.is_dir():
            raise ValueError(f"--cache '{self.cache}': no such directory; name one with room for the data set twice")


@dataclass(frozen=True, kw_only=True)
class _Epochs:
    """One or more epochs, on average."""

    epoch_s: float
    data_wait_s: float
    client_cpu_s: float
    server_cpu_s: float


@dataclass(frozen=True, kw_only=True)
class _Turn:
    cold: _Epochs
    """From before the loader was constructed."""
    steady: _Epochs
    peak_cache_bytes: int
    longest_look_s: float
    """The longest time between two looks at the cache."""


class CacheWatch:
    """Looks at what a directory's images take, all the time, in a thread of its own; a context manager.

    What is counted are blocks that are allocated (``st_blocks``), of all files ``*.image`` below the directory. A
    disk's file system may have some of its own among them: ext4 one of 4 KiB for each 340 runs of an image's blocks.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.peak_bytes = 0
        self.longest_look_s = 0.0
        self.num_looks = 0

    def look(self) -> int:
        """Bytes that are allocated now."""
        total = 0
        for path in self._directory.rglob("*.image"):
            try:
                total += path.stat().st_blocks * BLOCK
            except FileNotFoundError:
                continue
        return total

    def _run(self) -> None:
        looked = time.perf_counter()
        while not self._stopped.wait(WATCH_S):
            self.peak_bytes = max(self.peak_bytes, self.look())
            now = time.perf_counter()
            self.longest_look_s, looked = max(self.longest_look_s, now - looked), now
            self.num_looks += 1

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stopped.set()
        self._thread.join()


def run_windows(options: WindowsOptions, *, shards: "ShardSet | None" = None) -> dict[str, Any]:
    """Make a data set, load it in every combination of cache and latency, ``repeats`` times in turns.

    Args:
        options: What to do.
        shards: Samples to repeat; the demo photos where ``None``.

    Returns:
        ``{"records": [{"cache_fraction", "latency_ms", "samples_per_s", "data_wait", "peak_cache_bytes",
        "cache_bytes", "server_cpu_share", "cold": {...}, "repeats": [...]}], ...}``, for JSON. ``data_wait`` is the
        share of the timed epochs' time in which the decode half waited for shards; ``server_cpu_share`` the server's
        part of the CPU time that it and the loader spent.

    Raises:
        CacheError: If the loader's cache does not take what it should.
        DataError: If an epoch does not deliver every sample once, or there is none.
        ValueError: If two windows of at least one shard do not fit the smallest cache.
    """
    from bench.environment import describe_environment
    from prep.sources.demo_photos import demo_photos

    source = demo_photos(show_progress=True) if shards is None else _read_source(shards)
    with ExitStack() as stack:
        prefix = f"{BUCKET}-"
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=prefix, dir=options.cache)))
        servers = {
            latency_ms: stack.enter_context(ObjectServer(folder / "server", latency_s=latency_ms / 1000))
            # The one that the data set is made through is not slowed.
            for latency_ms in dict.fromkeys((0.0, *options.latencies_ms))
        }
        manifest = _make_shards(source, servers[0.0].endpoint, options)
        alignment = extent_alignment(options.cache)
        total_bytes = int(extent_starts(manifest.shard_bytes, manifest.index_bytes, alignment=alignment)[-1])
        window_bytes = fitting_window(
            manifest,
            cache_bytes=int(total_bytes * min(options.fractions)),
            batch_size=options.batch_size,
            alignment=alignment,
        )
        turns: dict[tuple[float, float], list[_Turn]] = {
            pair: [] for pair in itertools.product(options.fractions, options.latencies_ms)
        }
        tree = ProcessTree(bystanders={server.pid for server in servers.values()})
        with bar(what="time windows", total=options.repeats * len(turns), unit="turn") as drawn:
            for _ in range(options.repeats):
                for (fraction, latency_ms), results in turns.items():
                    turn = _take_turn(
                        options,
                        cache_dir=folder / "cache",
                        cache_bytes=int(total_bytes * fraction),
                        window_bytes=window_bytes,
                        num_samples=manifest.num_samples,
                        server=servers[latency_ms],
                        tree=tree,
                    )
                    results.append(turn)
                    drawn.update(1)
    return {
        "records": [
            _record(fraction, latency_ms, results, cache_bytes=int(total_bytes * fraction), manifest=manifest)
            for (fraction, latency_ms), results in turns.items()
        ],
        "num_samples": manifest.num_samples,
        "num_shards": manifest.num_shards,
        "shard_bytes": manifest.total_bytes,
        "extent_bytes": total_bytes,
        "shuffle_window": window_bytes,
        "repeats": options.repeats,
        "source": source.name if shards is None else "given shards",
        "cache": file_system(options.cache),
        "options": {
            name: value for name, value in asdict(options).items() if name not in ("cache", "samples", "num_shards")
        },
        "environment": describe_environment(),
    }


def fitting_window(
    manifest: "Manifest", *, cache_bytes: int, batch_size: int, alignment: int = EXTENT_ALIGNMENT
) -> int:
    """The largest ``shuffle_window``, in bytes of shards, with which a loader takes a cache of ``cache_bytes``.

    Raises:
        ValueError: If not every shard fits into such a window.
    """
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
    # Windows of all shards would be no windows, and what they need is not more than all.
    if needed(int(manifest.total_bytes) // 2) <= cache_bytes:
        return max(largest, int(manifest.total_bytes) // 2)
    fits, too_large = largest, int(manifest.total_bytes) // 2
    while too_large - fits > 1:
        middle = (fits + too_large) // 2
        fits, too_large = (middle, too_large) if needed(middle) <= cache_bytes else (fits, middle)
    return fits


def repeated_source(source: "Source", *, num_samples: int) -> "Source":
    """``num_samples`` records: the source's again and again under the keys ``r0/KEY``, ``r1/KEY``, ...

    Raises:
        DataError: If there is no record.
    """
    if not source.records:
        raise DataError(f"'{source.name}' holds no sample to repeat")
    rounds = (divmod(number, len(source.records)) for number in range(num_samples))
    records = [
        dataclasses.replace(source.records[row], key=f"r{turn}/{source.records[row].key}") for turn, row in rounds
    ]
    return dataclasses.replace(source, records=records)


def _read_source(shards: "ShardSet") -> "Source":
    """The samples of shards, in memory."""
    from dali_pipes.data_set.indexing import parse_label, read_class_table
    from dali_pipes.formats.names import LABEL_COMPONENT
    from dali_pipes.formats.tar_reader import ArchiveReader
    from dali_pipes.progress import progress
    from prep.sources.record import Record, Source

    records: list[Record] = []
    for name in progress(shards.names, what="read shards", unit="shard"):
        samples: dict[str, dict[str, bytes]] = {}
        with shards.store.open(name) as stream:
            for member in ArchiveReader(stream, shard=shards.store.locate(name)):
                samples.setdefault(member.key, {})[member.component] = member.read()
        for key, components in samples.items():
            if LABEL_COMPONENT not in components:
                raise DataError(f"shard '{shards.store.locate(name)}', key '{key}': no component '{LABEL_COMPONENT}'")
            label = parse_label(components.pop(LABEL_COMPONENT), shard=name, key=key)
            records.append(Record(key=key, components=components, label=label))
    return Source(name=f"'{shards.url}'", records=records, classes=read_class_table(shards.store, shards.prefix) or {})


def _make_shards(source: "Source", endpoint: str, options: WindowsOptions) -> "Manifest":
    """Packed and indexed, in a bucket of the server."""
    from dali_pipes.store.ais import AisStore
    from dali_pipes.store.urls import resolve_shards
    from prep.index import index_shards
    from prep.pack.pack import pack

    store: Store = AisStore(endpoint, BUCKET)
    repeated = repeated_source(source, num_samples=options.samples)
    max_count = -(-options.samples // options.num_shards)
    # What the given shards hold was checked by who packed them.
    pack(
        repeated,
        store=store,
        prefix=PREFIX,
        max_count=max_count,
        max_bytes=MAX_SHARD_BYTES,
        on_bad="keep",
        show_progress=True,
    )
    return index_shards(resolve_shards(store.locate(PREFIX), endpoint=endpoint), show_progress=True)


def _take_turn(
    options: WindowsOptions,
    *,
    cache_dir: Path,
    cache_bytes: int,
    window_bytes: int,
    num_samples: int,
    server: ObjectServer,
    tree: ProcessTree,
) -> _Turn:
    """On an empty cache, which is empty again afterwards."""
    import dali_pipes as dp

    cache_dir.mkdir()
    try:
        with CacheWatch(cache_dir) as watch:
            meter = _Meter(server, tree)
            with dp.loader(
                f"ais://{BUCKET}/{PREFIX}",
                dp.segmentation(crop=options.crop),
                batch_size=options.batch_size,
                seed=options.seed,
                device=options.device,
                num_threads=options.num_threads,
                with_keys=True,
                cache_dir=cache_dir,
                cache_bytes=cache_bytes,
                shuffle_window=window_bytes,
                ramp_up=options.ramp_up,
                show_progress=False,
                endpoint=server.endpoint,
            ) as loader:
                _draw(loader, num_samples)
                cold = meter.read(loader.data_wait_s)
                for _ in range(options.epochs):
                    _draw(loader, num_samples)
                steady = meter.read(loader.data_wait_s, num_epochs=options.epochs)
        return _Turn(cold=cold, steady=steady, peak_cache_bytes=watch.peak_bytes, longest_look_s=watch.longest_look_s)
    finally:
        shutil.rmtree(cache_dir)


def _draw(loader: "Loader", num_samples: int) -> None:
    """An epoch, each batch touched; every sample comes once."""
    keys: list[str] = []
    for (batch,) in loader:
        # One value of each photo: enough to find a batch that is not there yet.
        batch["image"][:, 0, 0, 0].sum().item()
        keys += batch["key"]
    if len(keys) != num_samples or len(set(keys)) != num_samples:
        raise DataError(f"an epoch delivered {len(keys)} samples, {len(set(keys))} of them different, of {num_samples}")


class _Meter:
    """Wall and CPU time since it was last read, or made."""

    def __init__(self, server: ObjectServer, tree: ProcessTree) -> None:
        self._server, self._tree = server, tree
        self._wait_s = 0.0
        self._marks = self._now()

    def read(self, data_wait_s: float, *, num_epochs: int = 1) -> _Epochs:
        now = self._now()
        wall_s, client_s, server_s = (after - before for after, before in zip(now, self._marks, strict=True))
        waited_s = data_wait_s - self._wait_s
        self._marks, self._wait_s = now, data_wait_s
        return _Epochs(
            epoch_s=wall_s / num_epochs,
            data_wait_s=waited_s / num_epochs,
            client_cpu_s=client_s / num_epochs,
            server_cpu_s=server_s / num_epochs,
        )

    def _now(self) -> tuple[float, float, float]:
        return time.perf_counter(), self._tree.cpu_s(), self._server.cpu_s()


def _figures(epochs: _Epochs, num_samples: int) -> dict[str, float]:
    cpu_s = epochs.client_cpu_s + epochs.server_cpu_s
    return {
        "samples_per_s": num_samples / epochs.epoch_s,
        "data_wait": epochs.data_wait_s / epochs.epoch_s,
        # The kernel counts in ticks of 10 ms: an epoch may be shorter.
        "server_cpu_share": epochs.server_cpu_s / cpu_s if cpu_s else 0.0,
        "server_cores": epochs.server_cpu_s / epochs.epoch_s,
        "client_cores": epochs.client_cpu_s / epochs.epoch_s,
    }


def _record(
    fraction: float, latency_ms: float, turns: Sequence[_Turn], *, cache_bytes: int, manifest: "Manifest"
) -> dict[str, Any]:
    steady = [_figures(turn.steady, manifest.num_samples) for turn in turns]
    cold = [_figures(turn.cold, manifest.num_samples) for turn in turns]
    spreads = {name: Spread.of([figures[name] for figures in steady]) for name in FIGURES}
    peak = max(turn.peak_cache_bytes for turn in turns)
    return {
        "cache_fraction": fraction,
        "latency_ms": latency_ms,
        **{name: spread.median for name, spread in spreads.items()},
        "peak_cache_bytes": peak,
        "cache_bytes": cache_bytes,
        "is_within_cache": peak <= cache_bytes,
        "spread": {name: [spread.min, spread.max] for name, spread in spreads.items()},
        # The first epoch, on an empty cache, with the loader's construction.
        "cold": {name: Spread.of([figures[name] for figures in cold]).median for name in FIGURES},
        "repeats": [asdict(turn) for turn in turns],
    }


def format_windows(report: dict[str, Any]) -> str:
    """A row a combination, and below what the figures are of."""
    rows = [["cache", "latency ms", "samples/s", "data wait %", "cold: samples/s", "wait %"]]
    rows[0] += ["peak cache MiB", "of", "server's CPU %", "server cores"]
    for record in report["records"]:
        low, high = record["spread"]["samples_per_s"]
        least, most = record["spread"]["data_wait"]
        rows.append(
            [
                f"{record['cache_fraction']:g}",
                f"{record['latency_ms']:g}",
                f"{record['samples_per_s']:.0f} ({low:.0f}-{high:.0f})",
                f"{100 * record['data_wait']:.2f} ({100 * least:.2f}-{100 * most:.2f})",
                f"{record['cold']['samples_per_s']:.0f}",
                f"{100 * record['cold']['data_wait']:.2f}",
                f"{record['peak_cache_bytes'] / MIB:.1f}",
                f"{record['cache_bytes'] / MIB:.1f}{'' if record['is_within_cache'] else ' EXCEEDED'}",
                f"{100 * record['server_cpu_share']:.1f}",
                f"{record['server_cores']:.2f}",
            ]
        )
    longest_s = max(turn["longest_look_s"] for record in report["records"] for turn in record["repeats"])
    cores = report["environment"]["cpu"]["cores_available"]
    return "\n".join(
        [
            format_rows(rows),
            "",
            f"{report['num_samples']:,} samples in {report['num_shards']} shards of "
            f"{report['shard_bytes'] / MIB / report['num_shards']:.1f} MiB, shuffle window "
            f"{report['shuffle_window'] / MIB:.1f} MiB; median of {report['repeats']} turns (smallest to largest), "
            "each a cold epoch and then those of the figures.",
            f"Server and loader share {cores} cores; the cache was looked at every {1000 * WATCH_S:g} ms, at worst "
            f"after {1000 * longest_s:.0f} ms.",
        ]
    )


def _listed(values: Sequence[float]) -> str:
    return ",".join(f"{value:g}" for value in values) or "none"
