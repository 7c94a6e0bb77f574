"""Open a loader: check its arguments, find the shards, check them against the graph, and place them in a cache."""

import contextlib
import dataclasses
import functools
import inspect
import logging
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from nvidia.dali.plugin.base_iterator import LastBatchPolicy

from dali_pipes.arguments import as_integer
from dali_pipes.bad_samples import BadSamplesSeen, Repair
from dali_pipes.cache.placement import available_memory, extent_alignment
from dali_pipes.cache.share import CacheShare
from dali_pipes.data_set.data_set import DataSet, photo_sizes
from dali_pipes.data_set.exclusions import excluded_ordinals
from dali_pipes.data_set.find import Mixture, NamedSets, find_shards, is_in_directories
from dali_pipes.epoch import LoaderEpochs, LoaderParts
from dali_pipes.errors import WorkerProcessError
from dali_pipes.fetch.samples import SomeSamples
from dali_pipes.fetch.stager import Stager
from dali_pipes.formats.photo_header import PhotoRules
from dali_pipes.formats.quarantine import Quarantine
from dali_pipes.graph.decode import DecodePipeline
from dali_pipes.graph.definition import Graph
from dali_pipes.metrics.counts import Counts, span
from dali_pipes.options import BadSamples, Cache, Decode, Outputs, Select, Shards, Shuffle
from dali_pipes.order.inputs import OrderInputs
from dali_pipes.order.passes import window_bytes
from dali_pipes.order.plan import BYTES_PER_SAMPLE, LAST_BATCH_POLICIES, Batching, LastBatchPolicyName, Plan
from dali_pipes.order.selection import Selection, union
from dali_pipes.order.shaped import BucketGrouping, ShapedPlan
from dali_pipes.order.state import LoaderState, PlanInputs
from dali_pipes.processes.ranks import Rank, num_local_ranks
from dali_pipes.reader.aio_reader import open_reader
from dali_pipes.reader.batch import Batch, SampleRules
from dali_pipes.reader.buffers import Buffers, pinned_buffers
from dali_pipes.reader.feed import Feed
from dali_pipes.reader.ranged import RangedReader
from dali_pipes.reader.samples import Samples, StoredSamples
from dali_pipes.store.patience import Patience, use_patience
from dali_pipes.store.shard_set import ShardSet
from dali_pipes.tuning import choose_settings

_log = logging.getLogger(__name__)

# 13 GB of decoded pixels: more than a batch needs, and less than any machine with so much free memory has.
MAX_BATCH_PIXELS = 1 << 32
_LATER = (
    "the job can continue at the exact next sample once the cluster is back: pass its saved Loader.state_dict() as "
    "dali_pipes.loader(state=...)"
)
GROUPS = {"select": Select, "bad_samples": BadSamples, "cache": Cache, "decode": Decode, "outputs": Outputs}


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoaderArguments:
    """The arguments of `dali_pipes.loader`, whose docstring explains them.

    They are given as users write them, and checked and converted as far as neither a rank nor the shards are needed.
    The types below are the ones that are kept.

    Raises:
        TypeError, ValueError: Names the first wrong argument.
        StateError: If ``state`` is not a state, or is of another order.
    """

    shards: Shards | Mixture
    graph: Graph
    batch_size: int
    seed: int
    shuffle: Shuffle
    select: Select
    bad_samples: BadSamples
    cache: Cache
    decode: Decode
    outputs: Outputs
    state: LoaderState | None
    rank: int | Literal["late"] | None
    world_size: int | None
    mesh: object
    last_batch_policy: LastBatchPolicyName
    device: str
    endpoint: str | None

    def __post_init__(self) -> None:
        _check_graph(self.graph)
        for name, group in GROUPS.items():
            if not isinstance(given := getattr(self, name), group):
                raise TypeError(f"{name} must be a dali_pipes.{group.__name__}, got {given!r}")
        convert: dict[str, Callable[[Any], Any]] = {
            "shards": lambda shards: shards if isinstance(shards, Shards | Mixture) else Shards(shards),
            "last_batch_policy": _policy_name,
            "batch_size": functools.partial(as_integer, "batch_size"),
            "seed": functools.partial(as_integer, "seed"),
            "shuffle": _as_shuffle,
            "device": str,
            "state": lambda state: None if state is None else LoaderState.from_dict(state),
        }
        for name, converted in convert.items():
            object.__setattr__(self, name, converted(getattr(self, name)))
        if self.batch_size < 1:
            raise ValueError(f"batch_size must be positive, got {self.batch_size}")
        if not re.fullmatch(r"auto|cpu|gpu|cuda(:\d+)?", self.device):
            raise ValueError(f"device must be one of auto, cpu, gpu, cuda, cuda:N, got {self.device!r}")
        if self.state is not None:
            # A mixture's weights are known when its data sets are found: a single data set has none.
            self.state.check_order(dataclasses.replace(self.order, weights=self.state.order.weights))
        if isinstance(self.rank, str) and self.rank != "late":
            raise ValueError(f"rank must be an integer, 'late' or None, got {self.rank!r}")
        if self.rank == "late" and self.world_size is not None:
            raise ValueError(
                f"rank='late' finds the world size, too; leave world_size out, got world_size={self.world_size!r}"
            )
        if self.mesh is not None and (self.rank, self.world_size) != (None, None):
            raise ValueError("mesh gives rank and world size; leave rank and world_size out")

    @functools.cached_property
    def order(self) -> OrderInputs:
        """The inputs of the order, without the weights of a mixture: these are known when its data sets are found."""
        return OrderInputs(
            seed=self.seed,
            shuffle=self.shuffle.enabled,
            shuffle_window=self.shuffle.window_bytes,
            num_slices=self.shuffle.slices,
            epoch_samples=self.select.epoch_samples,
            shapes=self.select.buckets,
        )

    def batching(self, process: Rank) -> Batching:
        """Deal batches to this rank.

        Raises:
            ValueError: If the samples of a step cannot be taken from all slices alike.
        """
        if self.batch_size * process.world_size % self.order.num_slices:
            raise ValueError(
                f"slices must divide batch_size * world_size, got {self.order.num_slices} and {self.batch_size} * "
                f"{process.world_size}"
            )
        return Batching(batch_size=self.batch_size, process=process, last_batch_policy=self.last_batch_policy)


def _check_graph(graph: object) -> None:
    expected = "graph must be a function graph(components, random), such as dali_pipes.segmentation()"
    if not callable(graph):
        raise TypeError(f"{expected}, got {graph!r}")
    with contextlib.suppress(ValueError):  # a function of C may have no signature
        signature = inspect.signature(graph)
        if signature.parameters and all(
            one.kind in (one.KEYWORD_ONLY, one.VAR_KEYWORD) for one in signature.parameters.values()
        ):
            name = getattr(graph, "__name__", "graph")
            raise TypeError(f"{expected}, got the function '{name}', which makes a graph; call it: {name}()")
        try:
            signature.bind(None, None)
            is_transform = isinstance(graph, torch.nn.Module)
        except TypeError:
            is_transform = True
        if is_transform:
            raise TypeError(
                f"{expected}, got {graph!r:.200}, which does not take these two; transforms of tensors go on batches, "
                "operators of a DALI pipeline into such a function: see docs/how-to/own-graph.md"
            )


def _policy_name(policy: object) -> LastBatchPolicyName:
    name = policy.name if isinstance(policy, LastBatchPolicy) else policy
    if isinstance(name, str):
        name = name.upper()
    if name not in LAST_BATCH_POLICIES:
        raise ValueError(f"last_batch_policy must be one of {', '.join(LAST_BATCH_POLICIES)}, got {policy!r}")
    return name  # type: ignore[return-value]


def _as_shuffle(shuffle: object) -> Shuffle:
    if isinstance(shuffle, Shuffle):
        return shuffle
    if not isinstance(shuffle, bool | np.bool_):
        raise TypeError(f"shuffle must be a bool or a dali_pipes.Shuffle, got {shuffle!r}")
    return Shuffle(enabled=bool(shuffle))


@span("open")
def open_parts(
    arguments: LoaderArguments, process: Rank, counts: Counts, resources: contextlib.ExitStack
) -> LoaderParts:
    """Open the parts of one rank's loader, which ``resources`` closes; raises what `dali_pipes.loader` raises."""
    refuse_workers()
    cache, state, batching = arguments.cache, arguments.state, arguments.batching(process)
    decode_options = _decode_options(arguments, process)
    directory = None if cache.directory is None else Path(cache.directory)
    data_set = DataSet(_find_shards(arguments, counts, resources), alignment=extent_alignment(directory))
    resources.callback(data_set.close)
    stored = _stored_samples(arguments, data_set)

    def open_pipeline(example: Batch | None = None) -> DecodePipeline:
        pipeline = DecodePipeline(
            arguments.graph,
            samples=stored,
            batch_size=batching.batch_size,
            seed=arguments.seed,
            example=example,
            **decode_options,
        )
        resources.callback(pipeline.close)  # if the loader opens, `Delivery.close` closes it before what it reads
        return pipeline

    # With "skip" the graph decides which samples are left out.
    pipeline = open_pipeline() if arguments.select.missing == "skip" else None
    inputs = _plan_inputs(arguments, data_set, stored, pipeline, batching)
    some = data_set.some_samples(inputs.selection.excluded)
    if some is not None:  # only what the graph reads is staged of them
        pipeline = pipeline or open_pipeline()
        some.components = list(pipeline.inputs.read)
    share, stager = _open_cache(data_set, inputs, batching, cache, directory, some, resources)
    device_id = decode_options["device_id"]
    buffers = Buffers() if device_id is None else pinned_buffers(device_id)
    reader = open_reader(share.path, kind=arguments.decode.reader, buffers=buffers)
    resources.callback(reader.close)
    components: list[str] = []  # filled when the graph is known
    samples = Samples(data_set.manifest, lambda shard: share.index_extent(shard).read(), rules=stored.rules)
    by_range = RangedReader(
        samples,
        components=components,
        read_index=data_set.read_index,
        read_ranges=data_set.read_ranges,
        buffers=buffers,
    )
    open_feed = functools.partial(
        Feed,
        samples=samples,
        components=components,
        share=share,
        stager=stager,
        reader=reader,
        by_range=None if data_set.manifest.etl else by_range,
        counts=counts,
        batching=batching,
        show_progress=cache.show_progress and process.rank == 0,
    )
    epochs = LoaderEpochs(inputs, batching=batching, share=share, counts=counts, open_feed=open_feed)
    epochs.begin(0 if state is None else state.order.epoch, start=0 if state is None else state.delivered)
    resources.callback(epochs.close)
    _check_length(epochs.current.feed.plan, batching)
    if pipeline is None:
        first = epochs.current.feed.example()
        pipeline = open_pipeline(example=stored.example() if first is None else stored.example_of(first))
    components += pipeline.inputs.read
    epochs.current.feed.prepare()
    stored = stored.without(inputs.selection.excluded)
    _check_samples(pipeline, stored, arguments)
    seen = BadSamplesSeen(arguments.bad_samples, quarantine=_quarantine(arguments.bad_samples, data_set, process))
    return LoaderParts(
        source=data_set.source,
        classes={} if data_set.is_mixture and arguments.outputs.labels == "raw" else stored.classes,
        inputs=inputs,
        batching=batching,
        epochs=epochs,
        decode=pipeline,
        share=share,
        stager=stager,
        seen=seen,
        repair=Repair(pipeline, stored=stored, seen=seen, read=_range_reader(data_set, share, stager)),
        counts=counts,
    )


def _decode_options(arguments: LoaderArguments, process: Rank) -> dict[str, Any]:
    """Choose the arguments of `DecodePipeline` that the machine decides: device, threads, batches ahead, memory."""
    device_id = _device_id(arguments.device, process.local_rank)
    settings = choose_settings(arguments.decode, device_id=device_id)
    max_batch_pixels = arguments.decode.max_batch_pixels
    if max_batch_pixels is None:
        # Decoded pixels are uint8 RGB. Beside the batches that are decoded ahead there is the one that is delivered.
        bytes_per_pixel = 3 * (settings.prefetch_queue_depth + 1)
        pixels = available_memory() // num_local_ranks() // bytes_per_pixel
        max_batch_pixels = max(arguments.bad_samples.max_pixels, min(pixels, MAX_BATCH_PIXELS))
    return {"device_id": device_id, "max_batch_pixels": max_batch_pixels, **dataclasses.asdict(settings)}


def _device_id(device: str, local_rank: int) -> int | None:
    """The CUDA device to decode on, ``None`` for the CPU."""
    if device == "cpu":
        return None
    if not torch.cuda.is_available():
        if device != "auto":
            raise ValueError(f"device='{device}', and torch finds no CUDA device; pass device='cpu' or 'auto'")
        _log.info("no CUDA device: decoding on the CPU")
        return None
    num_devices = torch.cuda.device_count()
    _, is_numbered, number = device.partition(":")
    if is_numbered:
        if int(number) >= num_devices:
            raise ValueError(f"device='{device}', and torch finds {num_devices} CUDA devices, from cuda:0")
        return int(number)
    current = int(torch.cuda.current_device())
    # Device 0 is current until the process sets another one, so the launcher's number is taken instead. If each process
    # sees only one device, there may be no device of that number, and device 0 is right.
    return local_rank if current == 0 and local_rank < num_devices else current


def refuse_workers() -> None:
    """Refuse to open a loader in a worker process of torch's ``DataLoader``."""
    if torch.utils.data.get_worker_info() is not None:
        raise WorkerProcessError(
            "a loader cannot be made in a DataLoader worker process: it has threads of its own, and a GPU cannot be "
            "used after a fork; make it in the main process and use it directly, or with DataLoader(num_workers=0)"
        )


def check_late(arguments: LoaderArguments) -> None:
    """Check what is known before a late loader is opened: the process, and shards in directories.

    Raises:
        StoreError, DataError: If such shards are not there.
        WorkerProcessError: If this is a DataLoader's worker process.
    """
    refuse_workers()
    if is_in_directories(arguments.shards):
        with contextlib.ExitStack() as resources:
            _find_shards(arguments, Counts(), resources)


def _find_shards(arguments: LoaderArguments, counts: Counts, resources: contextlib.ExitStack) -> ShardSet | NamedSets:
    """Find the shards and their manifest, if they have one; ``resources`` closes the embedded node."""
    cache = arguments.cache
    embedded_dir = os.environ.get("DALI_PIPES_EMBEDDED_DIR")
    patience = Patience(
        patience_s=cache.patience_s, start_s=cache.start_patience_s, advice=_LATER, on_retry=counts.add_retry
    )
    with use_patience(patience):
        return find_shards(
            arguments.shards,
            endpoint=arguments.endpoint or os.environ.get("AIS_ENDPOINT") or None,
            embedded_dir=Path(embedded_dir) if embedded_dir else None,
            resources=resources,
            allow_missing=arguments.select.allow_missing,
        )


def _stored_samples(arguments: LoaderArguments, data_set: DataSet) -> StoredSamples:
    """The samples as the store has them, without those that the user excludes."""
    select, outputs = arguments.select, arguments.outputs
    if outputs.labels == "contiguous":
        data_set.check_classes()
    photos = PhotoRules(max_pixels=arguments.bad_samples.max_pixels)
    names_sets = data_set.set_names != ("",)
    chosen = excluded_ordinals(data_set, exclude=select.exclude, where=select.where)
    if len(chosen.excluded):
        _log.info("%s", chosen.summary)
    return StoredSamples(
        data_set.manifest,
        data_set.read_index,
        rules=SampleRules(labels=outputs.labels, missing=select.missing, photos=photos, names_sets=names_sets),
        whole=data_set.whole,
        sets=data_set.component_counts,
        excluded=chosen.excluded,
        shape=None if select.buckets is None else tuple(select.buckets.shapes[0].tolist()),
    )


def _plan_inputs(
    arguments: LoaderArguments,
    data_set: DataSet,
    stored: StoredSamples,
    pipeline: DecodePipeline | None,
    batching: Batching,
) -> PlanInputs:
    """Gather what the plan of every epoch takes, and refuse what no plan can have, before a cache file is made."""
    select, excluded = arguments.select, stored.excluded
    order = dataclasses.replace(arguments.order, weights=data_set.weights)
    if pipeline is not None:
        lacking = excluded_ordinals(data_set, lacking=pipeline.taken_components)
        excluded = union(excluded, lacking.excluded)
        _log.info("%s", lacking.summary)
    labels = data_set.columns().labels if select.oversample else None
    grouping = None
    if (shapes := order.shapes) is not None:
        bucket = shapes.of(*photo_sizes(data_set, shapes.photo or stored.photo()))
        grouping = BucketGrouping(bucket, shapes=shapes.shapes, group_size=batching.global_batch_size)
    inputs = PlanInputs(
        manifest=data_set.manifest,
        set_shards=data_set.set_shards,
        set_names=data_set.set_names,
        versions=data_set.versions,
        selection=Selection(len(stored), excluded=excluded, labels=labels, oversample=select.oversample),
        order=order,
        grouping=grouping,
    )
    if arguments.state is not None:
        inputs.check(arguments.state)
    elif len(inputs.set_names) > 1:
        inputs.plan(order.epoch)  # a data set of a mixture may have nothing left, or windows although it has buckets
    num_samples = inputs.selection.num_per_pass
    needed, available = BYTES_PER_SAMPLE * num_samples // order.num_slices, available_memory()
    if order.shuffle and order.shuffle_window == "all" and needed > available:
        raise ValueError(
            f"window_bytes='all' permutes {num_samples} samples at once, which takes {needed} bytes of memory, and "
            f"{available} are available; pass shuffle=Shuffle(window_bytes=...): on dSorted shards windows shuffle as "
            "well"
        )
    return inputs


def _open_cache(
    data_set: DataSet,
    inputs: PlanInputs,
    batching: Batching,
    cache: Cache,
    directory: Path | None,
    some: SomeSamples | None,
    resources: contextlib.ExitStack,
) -> tuple[CacheShare, Stager]:
    """Reserve this loader's part of the cache, and start the threads that stage shards."""
    share = data_set.open_share(
        reserved=inputs.reserved_bytes(data_set.extent_bytes if some is None else some.extent_bytes, batching),
        is_windowed=window_bytes(inputs.order, data_set.manifest.shard_bytes) != "all",
        group=inputs.group,
        cache_dir=directory,
        cache_bytes=cache.max_bytes,
        verify=cache.verify,
        samples=some,
    )
    resources.callback(share.close)
    stager = data_set.open_stager(share, num_fetchers=cache.fetchers, samples=some)
    resources.callback(stager.close)
    return share, stager


def _check_length(plan: Plan, batching: Batching) -> None:
    """Refuse an epoch that ``DROP`` leaves without a batch, as DALI does: a loop over it would end without an error."""
    if batching.last_batch_policy != "DROP":
        return
    num_steps = plan.num_steps(batching)
    if not num_steps:
        which = ", grouped by window," if isinstance(plan, ShapedPlan) else ""
        raise ValueError(
            f"last_batch_policy='DROP' leaves an epoch of {plan.num_samples} samples{which} without a batch: one of "
            f"batch_size={batching.batch_size} on {batching.process.world_size} rank(s) takes "
            f"{batching.global_batch_size}; pass a smaller batch_size, or last_batch_policy='PARTIAL'"
        )
    if isinstance(plan, ShapedPlan) and (num_dropped := plan.num_samples - num_steps * batching.global_batch_size):
        _log.warning(
            "last_batch_policy='DROP' leaves %d of %d samples out of epoch %d, the last ones of each bucket in each "
            "window; samples of a rare bucket may never come: pass last_batch_policy='PARTIAL', a smaller batch_size, "
            "a larger window or fewer buckets (max_aspect, step)",
            num_dropped,
            plan.num_samples,
            plan.order.epoch,
        )


def _check_samples(pipeline: DecodePipeline, stored: StoredSamples, arguments: LoaderArguments) -> None:
    """Refuse samples that the graph cannot process, and added outputs whose names the graph uses."""
    for component in sorted(pipeline.inputs.photos):
        stored.check_sized(component)
    if arguments.bad_samples.on_error == "raise":
        for component in sorted({*pipeline.inputs.decoded.components, *pipeline.inputs.photos}):
            stored.check_photos(component)
    outputs = arguments.outputs
    if outputs.labels == "contiguous" and not pipeline.inputs.has_label:
        raise ValueError(
            "labels='contiguous' counts the class ids of the component 'cls' anew, and the graph takes no label; leave "
            "it out"
        )
    for name, option, is_added in (("key", "keys", outputs.keys), ("valid", "valid", outputs.valid)):
        if is_added and name in pipeline.output_names:
            raise ValueError(
                f"Outputs({option}=True) adds '{name}', which is an output of the graph already; rename that"
            )


def _quarantine(bad_samples: BadSamples, data_set: DataSet, process: Rank) -> Quarantine | None:
    if bad_samples.on_error == "raise":
        return None
    digest = data_set.manifest.digest
    path = str(bad_samples.quarantine or f"quarantine-{digest[:12]}-rank{{rank}}.tsv")
    return Quarantine(path.replace("{rank}", str(process.rank)), manifest=digest)


def _range_reader(data_set: DataSet, share: CacheShare, stager: Stager) -> Callable[[int, int, int], bytes]:
    """Make a function that reads bytes ``[start, start + size)`` of a shard, which may have left the cache."""

    def read(shard: int, start: int, size: int) -> bytes:
        # A resident shard is not requested again; through an ETL it would be transformed again.
        if stager.need_resident([shard]):
            try:
                return share.shard_extent(shard).read(start, size)
            finally:
                stager.done([shard])
        return data_set.read_range(shard, start=start, size=size)

    return read
