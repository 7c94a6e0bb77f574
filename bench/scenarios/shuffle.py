"""Measure how far the batches of an order are from a uniform draw, on shards that are sorted by label.

A shuffle buffer mixes neighbours. On shards that were written class by class, as data sets usually are, each of its
batches holds only a few classes. The measure is the total variation distance between the classes of a batch and those
of the data set: half the sum of |share in the batch - share in the set|, averaged over the batches of an epoch. 0 is
perfect; a uniform shuffle has the distance that chance gives. The report has the excess over that distance,
``(d - d_uniform) / (d_sorted - d_uniform)``: 0 for a uniform shuffle, 1 for reading in order. It also says how far a
sample travels from its place in the shards, as a share of the distance in a uniform shuffle, N / 3 places.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from bench.engine.options import at_least, option
from bench.engine.scenario import Rounds, Scenario
from bench.reports.tables import Columns, records_table
from bench.tools.folders import RunFolder
from bench.tools.repeat import write_shard
from dali_pipes.formats.manifest import Manifest
from dali_pipes.store.shard_set import ShardSet
from dali_pipes.store.urls import resolve_shards
from prep.index import index_shards

# From WebDataset's documentation, and DALI's default.
WEBDATASET_BUFFER = 1000
DALI_INITIAL_FILL = 1024
IN_ORDER, UNIFORM = "in order", "uniform"
OURS_ALL, OURS_QUARTER = "dali-pipes, shuffle_window='all'", "dali-pipes, window of a quarter"
WEBDATASET, DALI = f"webdataset.shuffle({WEBDATASET_BUFFER})", f"DALI, initial_fill={DALI_INITIAL_FILL}"

Int64s = npt.NDArray[np.int64]


class Order(NamedTuple):
    """An order of samples, and the shards that it reads."""

    name: str
    shards: str
    """``sorted`` by label, or ``dSorted``: each shard a random part of the data set."""


ORDERS = (
    Order(IN_ORDER, "sorted"),
    Order(UNIFORM, "sorted"),
    Order(OURS_ALL, "sorted"),
    *(Order(name, shards) for name in (OURS_QUARTER, WEBDATASET, DALI) for shards in ("sorted", "dSorted")),
)


class ShuffleInputs(NamedTuple):
    """The same samples in two orders."""

    shards: dict[str, ShardSet]
    manifest: Manifest
    labels: Int64s
    scattered: Int64s
    """The samples in the order that dSort gives them."""


@dataclass(frozen=True, kw_only=True)
class ShuffleScenario(Scenario[ShuffleInputs, Order, tuple[float, float]]):
    """Read shards that are sorted by label, shuffled by windows or by buffers; print how far from uniform they are.

    Writes its shards to a temporary directory, and nothing else but the file that --json names.
    """

    kind = "shuffle"
    title = "read epochs"

    num_samples: int = option(20_000, name="--samples", type=at_least(2), help="Samples to order.")
    num_shards: int = option(20, help="Shards that hold the samples.")
    num_classes: int = option(40, name="--classes", type=at_least(2), help="Classes of the samples.")
    batch_size: int = option(256, help="Samples a batch.")
    # Round s of the engine reads the epoch of seed s.
    repeats: int = option(3, name="--seeds", help="Epochs to average over.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 2 <= self.num_classes <= self.num_samples:
            raise ValueError(f"num_classes must be in [2, num_samples], got {self.num_classes}")
        for name in ("num_shards", "batch_size"):
            if getattr(self, name) > self.num_samples:
                raise ValueError(f"{name} must be in [1, num_samples], got {getattr(self, name)}")

    def prepare(self, folder: RunFolder, stack: ExitStack) -> ShuffleInputs:
        labels = np.arange(self.num_samples, dtype=np.int64) * self.num_classes // self.num_samples
        scattered = np.random.default_rng(0).permutation(self.num_samples)  # what dSort does to the samples, once
        shards = {
            name: _write(folder.new(), ordinals, labels, num_shards=self.num_shards)
            for name, ordinals in (("sorted", np.arange(self.num_samples)), ("dSorted", scattered))
        }
        for each in shards.values():
            _indexes(each)
        return ShuffleInputs(shards, index_shards(shards["sorted"]), labels, scattered)

    def subjects(self, made: ShuffleInputs) -> Sequence[Order]:
        return ORDERS

    def name_of(self, subject: Order) -> str:
        return f"{subject.name}, {subject.shards} shards"

    def measure(self, made: ShuffleInputs, subject: Order, number: int) -> tuple[float, float]:
        """Measure the distance of a batch from uniform, and how far a sample travels, in one epoch."""
        order = _read(made, subject, seed=number)
        places = np.arange(self.num_samples)
        if not np.array_equal(np.sort(order), places):
            raise RuntimeError("the order did not give each sample once")
        place_of = np.argsort(made.scattered) if subject.shards == "dSorted" else places
        travelled = float(np.abs(place_of[order] - places).mean() / (self.num_samples / 3))
        return total_variation(order, made.labels, batch_size=self.batch_size), travelled

    def report(self, made: ShuffleInputs, rounds: Rounds[Order, tuple[float, float]]) -> dict[str, Any]:
        """``{"records": [{"order", "shards", "total_variation", "excess", "travelled", ...}], "options": {...}}``."""
        records: list[dict[str, Any]] = [
            {
                "order": order.name,
                "shards": order.shards,
                "total_variation": fmean(distance for distance, _ in rounds.whole(order)),
                "travelled": fmean(travelled for _, travelled in rounds.whole(order)),
                "repeats": [distance for distance, _ in rounds.whole(order)],
            }
            for order in rounds.subjects
        ]
        in_order, uniform = records[0]["total_variation"], records[1]["total_variation"]
        for record in records:
            record["excess"] = (record["total_variation"] - uniform) / (in_order - uniform)
        names = ("num_samples", "num_shards", "num_classes", "batch_size")
        return {"options": {**{name: getattr(self, name) for name in names}, "seeds": self.repeats}, "records": records}

    @staticmethod
    def table(report: Any) -> str:
        """One row for each order."""
        columns: Columns = {
            "order": "order",
            "shards": "shards",
            "distance of a batch": lambda one: f"{one['total_variation']:.4f}",
            "excess": lambda one: f"{one['excess']:.3f}",
            "travelled": lambda one: f"{one['travelled']:.2f}",
        }
        options = report["options"]
        return (
            f"{records_table(report['records'], columns)}\n\n"
            f"{options['num_samples']:,} samples of {options['num_classes']} classes in {options['num_shards']} "
            f"shards, batch {options['batch_size']}, mean of {options['seeds']} seeds; excess: 0 is a uniform shuffle, "
            "1 is in order."
        )


def total_variation(order: Int64s, labels: Int64s, *, batch_size: int) -> float:
    """The mean distance of a batch's classes from those of the data set, in one epoch.

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


def _write(directory: Path, ordinals: Int64s, labels: Int64s, *, num_shards: int) -> ShardSet:
    """Write shards of these samples; the key of each is its ordinal, its components the class and the ordinal."""
    for shard, part in enumerate(np.array_split(ordinals, num_shards)):
        members = (
            (f"{ordinal:08d}.{component}", str(value).encode())
            for ordinal in part.tolist()
            for component, value in (("cls", labels[ordinal]), ("id", ordinal))
        )
        write_shard(directory / f"s-{shard:06d}.tar", members)
    return resolve_shards(directory, endpoint=None)


def _read(made: ShuffleInputs, order: Order, *, seed: int) -> Int64s:
    """The samples of one epoch in order, each as its place in the sorted shards."""
    num_samples, shards = len(made.labels), made.shards[order.shards]
    if order.name == IN_ORDER:
        return np.arange(num_samples)
    if order.name == UNIFORM:
        return np.random.default_rng(seed).permutation(num_samples)
    if order.name == WEBDATASET:
        return _webdataset(shards, seed)
    if order.name == DALI:
        return _dali(shards, seed)
    ours = _ours(made.manifest, seed, "all" if order.name == OURS_ALL else made.manifest.total_bytes // 4)
    return made.scattered[ours] if order.shards == "dSorted" else ours


def _ours(manifest: Manifest, seed: int, window: int | str) -> Int64s:
    from dali_pipes.order.inputs import OrderInputs
    from dali_pipes.order.plan import Plan

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
    """Make DALI's index of each shard, beside the shard."""
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
