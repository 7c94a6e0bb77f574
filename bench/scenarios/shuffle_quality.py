"""How well orders are shuffled: shards sorted by label in, how far each epoch's batches are from a uniform draw out.

A shuffle buffer mixes neighbours. On shards that were written class by class, as data sets usually are, its batches
hold a few classes each. The measure is the total variation distance between the classes of a batch and those of the
data set, half the sum of |share in the batch - share in the set|, averaged over an epoch's batches: 0 is perfect, and a
uniform shuffle has what chance gives. What is reported is the excess over that,
``(d - d_uniform) / (d_sorted - d_uniform)``: 0 for a uniform shuffle, 1 for reading in order. Beside it, how far a
sample travels from its place in the shards, as a share of what it does in a uniform shuffle, N / 3 places.
"""

import io
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from bench.reports.tables import format_rows
from dali_pipes.formats.manifest import Manifest
from dali_pipes.progress import progress
from dali_pipes.store.urls import ShardSet, resolve_shards
from prep.index import index_shards

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["ShuffleOptions", "format_shuffle", "run_shuffle", "total_variation"]

# As WebDataset's documentation and DALI's default have them.
WEBDATASET_BUFFER = 1000
DALI_INITIAL_FILL = 1024

Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class ShuffleOptions:
    """What is shuffled."""

    num_samples: int = 20_000
    num_shards: int = 20
    num_classes: int = 40
    batch_size: int = 256
    seeds: int = 3

    def __post_init__(self) -> None:
        """Refuse what makes no batches of several classes."""
        if not 2 <= self.num_classes <= self.num_samples:
            raise ValueError(f"num_classes must be in [2, num_samples], got {self.num_classes}")
        if not 1 <= self.num_shards <= self.num_samples:
            raise ValueError(f"num_shards must be in [1, num_samples], got {self.num_shards}")
        if not 1 <= self.batch_size <= self.num_samples or self.seeds < 1:
            raise ValueError(f"batch_size must be in [1, num_samples] and seeds positive, got {self}")


def total_variation(order: Int64s, labels: Int64s, *, batch_size: int) -> float:
    """The measure of one epoch.

    >>> labels = np.array([0, 0, 1, 1])
    >>> total_variation(np.array([0, 1, 2, 3]), labels, batch_size=2)
    0.5
    >>> total_variation(np.array([0, 2, 1, 3]), labels, batch_size=2)
    0.0
    """
    num_classes = int(labels.max()) + 1
    whole = order[: len(order) // batch_size * batch_size]
    share = np.bincount(labels, minlength=num_classes) / len(labels)
    counts = np.zeros((len(whole) // batch_size, num_classes))
    np.add.at(counts, (np.arange(len(whole)) // batch_size, labels[whole]), 1)
    return float(np.abs(counts / batch_size - share).sum(axis=1).mean() / 2)


def run_shuffle(options: ShuffleOptions) -> dict[str, Any]:
    """Write the shards, read an epoch of each order, and compare."""
    labels = np.arange(options.num_samples, dtype=np.int64) * options.num_classes // options.num_samples
    draw = np.random.default_rng(0)
    scattered = draw.permutation(options.num_samples)  # what dSort does to the samples, once
    records: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="dali-pipes-shuffle-") as name:
        by_label = _write(Path(name) / "sorted", np.arange(options.num_samples), labels, options)
        by_dsort = _write(Path(name) / "dsorted", scattered, labels, options)
        manifest = index_shards(by_label)
        window = manifest.total_bytes // 4
        orders: list[tuple[str, str, Callable[[int], Int64s]]] = [
            ("in order", "sorted", lambda seed: np.arange(options.num_samples)),
            ("uniform", "sorted", lambda seed: np.random.default_rng(seed).permutation(options.num_samples)),
            ("dali-pipes, shuffle_window='all'", "sorted", lambda seed: _ours(manifest, seed, "all")),
            ("dali-pipes, window of a quarter", "sorted", lambda seed: _ours(manifest, seed, window)),
            ("dali-pipes, window of a quarter", "dSorted", lambda seed: scattered[_ours(manifest, seed, window)]),
            (f"webdataset.shuffle({WEBDATASET_BUFFER})", "sorted", lambda seed: _webdataset(by_label, seed)),
            (f"webdataset.shuffle({WEBDATASET_BUFFER})", "dSorted", lambda seed: _webdataset(by_dsort, seed)),
            (f"DALI, initial_fill={DALI_INITIAL_FILL}", "sorted", lambda seed: _dali(by_label, seed)),
            (f"DALI, initial_fill={DALI_INITIAL_FILL}", "dSorted", lambda seed: _dali(by_dsort, seed)),
        ]
        for order_name, shards, read in progress(orders, what="read epochs", unit="order"):
            measured, travelled = [], []
            for seed in range(options.seeds):
                order = read(seed)
                if not np.array_equal(np.sort(order), np.arange(options.num_samples)):
                    raise RuntimeError(f"{order_name} did not give each sample once")
                measured.append(total_variation(order, labels, batch_size=options.batch_size))
                place = np.argsort(scattered) if shards == "dSorted" else np.arange(options.num_samples)
                distance = np.abs(place[order] - np.arange(options.num_samples)).mean()
                travelled.append(float(distance / (options.num_samples / 3)))
            records.append(
                {
                    "order": order_name,
                    "shards": shards,
                    "total_variation": float(np.mean(measured)),
                    "travelled": float(np.mean(travelled)),
                    "repeats": measured,
                }
            )
    in_order, uniform = records[0]["total_variation"], records[1]["total_variation"]
    for record in records:
        record["excess"] = (record["total_variation"] - uniform) / (in_order - uniform)
    return {"options": vars(options), "records": records}


def format_shuffle(report: dict[str, Any]) -> str:
    """A row an order."""
    rows = [["order", "shards", "distance of a batch", "excess", "travelled"]]
    rows += [
        [
            record["order"],
            record["shards"],
            f"{record['total_variation']:.4f}",
            f"{record['excess']:.3f}",
            f"{record['travelled']:.2f}",
        ]
        for record in report["records"]
    ]
    options = report["options"]
    return "\n".join(
        [
            format_rows(rows),
            "",
            f"{options['num_samples']:,} samples of {options['num_classes']} classes in "
            f"{options['num_shards']} shards, "
            f"batch {options['batch_size']}, mean of {options['seeds']} seeds; excess: 0 is a uniform shuffle, 1 is in "
            "order.",
        ]
    )


def _write(directory: Path, ordinals: Int64s, labels: Int64s, options: ShuffleOptions) -> ShardSet:
    """Shards whose samples are these, each with its own number as key and its class."""
    directory.mkdir()
    for shard, part in enumerate(np.array_split(ordinals, options.num_shards)):
        with tarfile.open(directory / f"s-{shard:06d}.tar", "w", format=tarfile.USTAR_FORMAT) as archive:
            for ordinal in part.tolist():
                for component, data in (("cls", str(labels[ordinal]).encode()), ("id", str(ordinal).encode())):
                    member = tarfile.TarInfo(f"{ordinal:08d}.{component}")
                    member.size = len(data)
                    archive.addfile(member, io.BytesIO(data))
    return resolve_shards(directory, endpoint=None)


def _ours(manifest: Manifest, seed: int, window: int | str) -> Int64s:
    from dali_pipes.order.plan import OrderInputs, Plan

    order = OrderInputs(seed=seed, shuffle_window=window)  # type: ignore[arg-type]
    plan = Plan(shard_bytes=manifest.shard_bytes, shard_samples=manifest.samples, order=order)
    return np.concatenate([step.ordinals for step in plan.steps(batch_size=1024)])


def _webdataset(shards: ShardSet, seed: int) -> Int64s:
    import random

    import webdataset as wds

    urls = [shards.store.locate(name) for name in shards.names]
    random.Random(seed).shuffle(urls)
    data = wds.WebDataset(urls, shardshuffle=False, empty_check=False).shuffle(
        WEBDATASET_BUFFER, rng=random.Random(seed)
    )
    return np.array([int(sample["id"]) for sample in data], np.int64)


def _indexes(shards: ShardSet) -> list[str]:
    """DALI's index of each shard, beside it."""
    from wds2idx import IndexCreator

    found = []
    for name in shards.names:
        path = f"{shards.store.locate(name)}.idx"
        if not Path(path).exists():
            with IndexCreator(shards.store.locate(name), path) as creator:
                creator.create_index()
        found.append(path)
    return found


def _dali(shards: ShardSet, seed: int) -> Int64s:
    from nvidia.dali import fn
    from nvidia.dali.pipeline import Pipeline

    pipeline = Pipeline(batch_size=100, num_threads=1, device_id=None)
    with pipeline:
        ids = fn.readers.webdataset(
            paths=[shards.store.locate(name) for name in shards.names],
            ext=["id"],
            index_paths=_indexes(shards),
            random_shuffle=True,
            initial_fill=DALI_INITIAL_FILL,
            seed=seed,
            name="reader",
        )
        pipeline.set_outputs(*(ids if isinstance(ids, list | tuple) else [ids]))
    pipeline.build()
    size = int(pipeline.reader_meta("reader")["epoch_size"])
    read: list[int] = []
    while len(read) < size:
        (batch,) = pipeline.run()
        read += [int(bytes(np.asarray(batch.at(row)))) for row in range(len(batch))]
    return np.array(read[:size], np.int64)
