"""Open a loader: find the shards, check them against the graph, and place them in a cache."""

import contextlib
import dataclasses
import inspect
import logging
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from nvidia.dali.plugin.base_iterator import LastBatchPolicy

from dali_pipes.arguments import as_integer
from dali_pipes.bad_samples.policy import BadSamplesSeen
from dali_pipes.bad_samples.repair import Repair
from dali_pipes.cache.free_space import available_memory
from dali_pipes.cache.placement import extent_alignment
from dali_pipes.cache.share import CacheShare
from dali_pipes.data_set.data_set import DataSet
from dali_pipes.data_set.exclusions import excluded_ordinals
from dali_pipes.data_set.find import Mixture, find_shards
from dali_pipes.epoch import Feeds, LoaderParts, PlanInputs
from dali_pipes.errors import WorkerProcessError
from dali_pipes.fetch.stager import Stager
from dali_pipes.formats.photo_rules import PhotoRules
from dali_pipes.formats.quarantine import Quarantine
from dali_pipes.graph.decode import DecodePipeline
from dali_pipes.graph.definition import Graph
from dali_pipes.iterator import Loader
from dali_pipes.options import (
    BadSamples,
    Cache,
    Decode,
    Outputs,
    Select,
    Shards,
    Shuffle,
    names_new_form,
)
from dali_pipes.order.inputs import OrderInputs
from dali_pipes.order.passes import window_bytes
from dali_pipes.order.plan import BYTES_PER_SAMPLE, LAST_BATCH_POLICIES, LastBatchPolicyName
from dali_pipes.order.randomness import Int64s
from dali_pipes.order.selection import Selection
from dali_pipes.order.state import LoaderState
from dali_pipes.processes.ranks import Rank, find_rank, num_local_ranks
from dali_pipes.reader.batch import Batch
from dali_pipes.reader.batching import Batching
from dali_pipes.reader.buffers import Buffers, pinned_buffers
from dali_pipes.reader.opening import open_reader
from dali_pipes.reader.samples import Samples, StoredSamples
from dali_pipes.reader.shard_table import SampleRules
from dali_pipes.store.patience import Ahead, Patience, use_patience
from dali_pipes.store.urls import ShardUrls
from dali_pipes.tuning import Settings, choose_settings

_log = logging.getLogger(__name__)

# 13 GB of decoded pixels: more than a batch needs, and less than any machine with so much free memory has.
MAX_BATCH_PIXELS = 1 << 32
_LATER = (
    "the job can continue at the exact next sample once the cluster is back: pass its saved Loader.state_dict() as "
    "dali_pipes.loader(state=...)"
)


@names_new_form
def loader(
    shards: ShardUrls | Shards | Mixture,
    graph: Graph,
    *,
    batch_size: int,
    seed: int = 0,
    shuffle: bool | Shuffle = True,
    select: Select = Select(),  # noqa: B008 (frozen, as those below)
    bad_samples: BadSamples = BadSamples(),  # noqa: B008
    cache: Cache = Cache(),  # noqa: B008
    decode: Decode = Decode(),  # noqa: B008
    outputs: Outputs = Outputs(),  # noqa: B008
    state: Mapping[str, Any] | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    last_batch_policy: str | LastBatchPolicy = "PARTIAL",
    device: str = "auto",
    endpoint: str | None = None,
) -> Loader:
    """Open a loader over shards in buckets or directories.

    Args:
        shards: ``"ais://pets/shuffled-{000000..000003}.tar"``, ``"ais://pets/shuffled-"``, a glob, a directory or a
            list; `Shards`, to read through an ETL; or a `Mixture` of several data sets. A prefix, a directory or a glob
            stands for the shards that their manifest lists, whatever the store lists. Shards without an index
            (``dali-pipes prep index``) are indexed each time when a loader opens, which reads all of them.
        graph: ``dali_pipes.segmentation(...)``, another graph of `dali_pipes.graph.pipelines`, or your own function
            ``graph(components, random)``.
        batch_size: Samples in a batch, on this rank.
        seed: Fixes the order, and every augmentation that is drawn from the graph's second argument, for each epoch.
            It also seeds DALI's own random operators, but their numbers depend on the batches before.
        shuffle: ``True``: an exact global shuffle; all shards must fit the cache. ``False``: the manifest's order.
            `Shuffle`: windows for shards that do not fit, and slices for several nodes.
        select: Which samples an epoch has, and how often: see `Select`.
        bad_samples: What to do about samples that cannot be read or decoded: see `BadSamples`.
        cache: Where shards are staged: see `Cache`.
        decode: Threads, batches decoded ahead, the GPU's JPEG engines: see `Decode`.
        outputs: Keys and a validity mask beside the graph's outputs, and the kind of class ids: see `Outputs`.
        state: The result of `Loader.state_dict`, of a loader with the same order. The job continues at the exact next
            sample, with the batches that `Loader.load_state_dict` would give. The shards of this sample's
            batch are fetched first; the start of epoch 0 is not staged. Batch size and world size may differ. ``None``:
            from the start, so that one line serves both cases: ``state=checkpoint["loader"] if checkpoint else None``.
        rank: Number of this process among those that share the order. If rank and ``world_size`` are ``None``, they
            come from `torch.distributed`, else from the variables of torchrun, Slurm or MPI; else this is the only
            process.
        world_size: Number of processes that share the order.
        last_batch_policy: ``"PARTIAL"`` gives the last batch short, ``"FILL"`` fills it with the epoch's first samples,
            which are not ``valid``, ``"DROP"`` leaves it out. DALI's `LastBatchPolicy` serves as well.
        device: ``"cpu"``; ``"cuda:1"``: that CUDA device; ``"gpu"`` or ``"cuda"``: the current CUDA device or, if the
            process has not set one, the device with the number that the launcher gave this process on its host;
            ``"auto"``: as ``"gpu"``, or the CPU if there is no CUDA device.
        endpoint: AIStore's proxy, or several of one cluster with commas between them. ``None``: ``AIS_ENDPOINT``; if
            that is not set, an embedded node is started.

    Raises:
        DecodeError: While iterating: if a sample is bad, or too many are.
        DataError: If the shards differ from their index, or a sample lacks a component that the graph takes; if the ETL
            returns other bytes than when it was indexed; if the tuning file is missing or broken.
        StateError: If ``state`` is not a state, or is of other shards or another order. Nothing has been staged then.
        StoreError: If a shard of the manifest (see `Select.allow_missing`), the store or the ETL is missing, also while
            iterating; a `NoEtlError` if the cluster cannot run ETLs.
        CacheError: If two windows do not fit the cache; says how many bytes are needed.
        WorkerProcessError: If this is a DataLoader's worker process.

    The first batch's shards are staged while the graph is checked: a loader that is refused for its graph may have
    staged them in vain.
    """
    _check_types(graph, select=select, bad_samples=bad_samples, cache=cache, decode=decode, outputs=outputs)
    process = find_rank(rank=rank, world_size=world_size)
    batching = _batching(batch_size, process, last_batch_policy)
    order = _order_inputs(seed, shuffle, select, batching)
    _check_device(device)
    resumed = _early_checked(state, order)
    _refuse_workers()
    device_id = _device_id(device, process.local_rank)
    settings = choose_settings(decode, device_id=device_id)
    with contextlib.ExitStack() as resources:
        data_set = _open_data_set(shards, endpoint, cache, select, resources)
        order = dataclasses.replace(order, weights=data_set.weights)
        if resumed is not None:
            _check_state(resumed, order, manifest=data_set.manifest.digest)
        if outputs.labels == "contiguous":
            data_set.check_classes()
        rules = _sample_rules(data_set, select, bad_samples, decode, outputs)
        stored = StoredSamples(
            data_set.manifest,
            data_set.read_index,
            rules=rules,
            whole=data_set.whole,
            excluded=_excluded(data_set, select),
        )

        def open_pipeline(example: Batch) -> DecodePipeline:
            return DecodePipeline(
                graph,
                samples=stored,
                batch_size=batching.batch_size,
                seed=order.seed,
                device_id=device_id,
                example=example,
                max_batch_pixels=decode.max_batch_pixels or _batch_pixels(settings, bad_samples),
                **dataclasses.asdict(settings),
            )

        # With "skip" the graph decides which samples are left out.
        pipeline = open_pipeline(stored.example()) if select.missing == "skip" else None
        inputs = _plan_inputs(data_set, _select(data_set, stored, pipeline, select), order, resumed)
        # The first batch's shards are on their way while the graph waits for its example.
        example = resources.enter_context(Ahead(stored.example)) if pipeline is None else None
        share, stager = _open_cache(data_set, inputs, batching, cache, resources)
        buffers = Buffers() if device_id is None else pinned_buffers()
        reader = open_reader(share.path, kind=decode.reader, buffers=buffers)
        resources.callback(reader.close)
        components: list[str] = []  # filled when the graph is known
        feeds = Feeds(
            inputs,
            batching=batching,
            samples=Samples(data_set.manifest, lambda shard: share.index_extent(shard).read(), rules=rules),
            components=components,
            share=share,
            stager=stager,
            reader=reader,
            show_progress=cache.show_progress and process.rank == 0,
        )
        epoch, start = (order.epoch, 0) if resumed is None else (resumed.order.epoch, resumed.delivered)
        begun = feeds.begin(epoch, start=start)
        if example is not None:
            pipeline = open_pipeline(example.result())
        assert pipeline is not None
        components += pipeline.read_components
        stored = stored.without(inputs.selection.excluded)
        _check_graph(pipeline, stored, bad_samples, outputs)
        seen = BadSamplesSeen(bad_samples, quarantine=_open_quarantine(bad_samples, data_set, batching))
        repair = Repair(pipeline, stored=stored, seen=seen, read=_range_reader(data_set, share, stager))
        parts = LoaderParts(
            inputs=inputs,
            batching=batching,
            feeds=feeds,
            begun=begun,
            decode=pipeline,
            share=share,
            stager=stager,
            seen=seen,
            repair=repair,
            outputs=outputs,
            resources=resources,
        )
        return Loader(parts, is_resumed=resumed is not None)


def _check_types(graph: object, **groups: object) -> None:
    expected = "graph must be a function graph(components, random), such as dali_pipes.segmentation()"
    if not callable(graph):
        raise TypeError(f"{expected}, got {graph!r}")
    with contextlib.suppress(ValueError):  # a function of C may have no signature
        try:
            inspect.signature(graph).bind(None, None)
        except TypeError as exc:
            raise TypeError(f"{expected}, got {graph!r}, which does not take two arguments") from exc
    for (name, given), group in zip(groups.items(), (Select, BadSamples, Cache, Decode, Outputs), strict=True):
        if not isinstance(given, group):
            raise TypeError(f"{name} must be a dali_pipes.{group.__name__}, got {given!r}")


def _batching(batch_size: int, process: Rank, policy: str | LastBatchPolicy) -> Batching:
    name = policy.name if isinstance(policy, LastBatchPolicy) else policy
    if name not in LAST_BATCH_POLICIES:
        raise ValueError(f"last_batch_policy must be one of {', '.join(LAST_BATCH_POLICIES)}, got {name!r}")
    return Batching(
        batch_size=as_integer("batch_size", batch_size),
        process=process,
        last_batch_policy=cast("LastBatchPolicyName", name),
    )


def _order_inputs(seed: int, shuffle: bool | Shuffle, select: Select, batching: Batching) -> OrderInputs:
    if not isinstance(shuffle, Shuffle):
        if not isinstance(shuffle, bool | np.bool_):
            raise TypeError(f"shuffle must be a bool or a dali_pipes.Shuffle, got {shuffle!r}")
        shuffle = Shuffle(enabled=shuffle)
    batch_size, world_size = batching.batch_size, batching.process.world_size
    if batch_size < 1:
        raise ValueError(f"batch_size must be positive, got {batch_size}")
    if batching.global_batch_size % shuffle.slices:
        raise ValueError(
            f"slices must divide batch_size * world_size, got {shuffle.slices} and {batch_size} * {world_size}"
        )
    return OrderInputs(
        seed=as_integer("seed", seed),
        shuffle=shuffle.enabled,
        shuffle_window=shuffle.window_bytes,
        ramp_up=shuffle.ramp_up,
        num_slices=shuffle.slices,
        epoch_samples=select.epoch_samples,
    )


def _check_device(device: str) -> None:
    if not isinstance(device, str) or not re.fullmatch(r"auto|cpu|gpu|cuda(:\d+)?", device):
        raise ValueError(f"device must be one of auto, cpu, gpu, cuda, cuda:N, got {device!r}")


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


def _early_checked(state: Mapping[str, Any] | None, order: OrderInputs) -> LoaderState | None:
    """Read a state, and refuse it if its order is another, as far as that is known before the shards are found."""
    if state is None:
        return None
    resumed = LoaderState.from_dict(state)
    # A mixture's weights are known when its data sets are found: a single one has none.
    _check_state(resumed, dataclasses.replace(order, weights=resumed.order.weights), manifest=resumed.manifest)
    return resumed


def _check_state(state: LoaderState, order: OrderInputs, *, manifest: str) -> None:
    """Refuse a state before the selection and the number of samples are known."""
    state.check(
        manifest=manifest,
        selection=state.selection,
        order=order,
        num_samples=state.delivered,
        version=state.version,
    )


def _refuse_workers() -> None:
    if torch.utils.data.get_worker_info() is not None:
        raise WorkerProcessError(
            "a loader cannot be made in a DataLoader worker process: it has threads of its own, and a GPU cannot be "
            "used after a fork; make it in the main process and use it directly, or with DataLoader(num_workers=0)"
        )


def _open_data_set(
    shards: ShardUrls | Shards | Mixture,
    endpoint: str | None,
    cache: Cache,
    select: Select,
    resources: contextlib.ExitStack,
) -> DataSet:
    """Find the shards and their manifest; without one, index them."""
    embedded_dir = os.environ.get("DALI_PIPES_EMBEDDED_DIR")
    with use_patience(Patience(patience_s=cache.patience_s, start_s=cache.start_patience_s, advice=_LATER)):
        found = find_shards(
            shards,
            endpoint=endpoint or os.environ.get("AIS_ENDPOINT") or None,
            embedded_dir=Path(embedded_dir) if embedded_dir else None,
            resources=resources,
            allow_missing=select.allow_missing,
        )
    data_set = DataSet(found, alignment=extent_alignment(_directory(cache)))
    resources.callback(data_set.close)
    return data_set


def _open_cache(
    data_set: DataSet, inputs: PlanInputs, batching: Batching, cache: Cache, resources: contextlib.ExitStack
) -> tuple[CacheShare, Stager]:
    """Reserve this loader's part of the cache, and start the threads that stage shards."""
    share = data_set.open_share(
        reserved=inputs.reserved_bytes(data_set.extent_bytes, batching),
        is_windowed=window_bytes(inputs.order, data_set.manifest.shard_bytes) != "all",
        group=inputs.group,
        cache_dir=_directory(cache),
        cache_bytes=cache.max_bytes,
        verify=cache.verify,
    )
    resources.callback(share.close)
    stager = data_set.open_stager(share, num_fetchers=cache.fetchers)
    resources.callback(stager.close)
    return share, stager


def _excluded(data_set: DataSet, select: Select) -> Int64s:
    chosen = excluded_ordinals(data_set, exclude=select.exclude, where=select.where)
    if len(chosen.excluded):
        _log.info("%s", chosen.summary)
    return chosen.excluded


def _sample_rules(
    data_set: DataSet, select: Select, bad_samples: BadSamples, decode: Decode, outputs: Outputs
) -> SampleRules:
    return SampleRules(
        labels=outputs.labels,
        missing=select.missing,
        photos=PhotoRules(max_pixels=bad_samples.max_pixels, formats=tuple(decode.formats)),
        names_sets=data_set.set_names != ("",),
    )


def _plan_inputs(
    data_set: DataSet, selection: Selection, order: OrderInputs, resumed: LoaderState | None
) -> PlanInputs:
    """Gather what the plan of every epoch takes, and refuse what no plan can have, before a cache file is made."""
    inputs = PlanInputs(
        manifest=data_set.manifest,
        set_shards=data_set.set_shards,
        set_names=data_set.set_names,
        selection=selection,
        order=order,
    )
    if resumed is not None:
        inputs.check(resumed)
    elif len(inputs.set_names) > 1:
        inputs.plan(order.epoch)  # a data set of a mixture may have nothing left
    _check_memory(inputs)
    return inputs


def _select(data_set: DataSet, stored: StoredSamples, pipeline: DecodePipeline | None, select: Select) -> Selection:
    """Select the samples of an epoch: leave out excluded and incomplete ones, and oversample by class."""
    excluded = stored.excluded
    if pipeline is not None:
        lacking = excluded_ordinals(data_set, lacking=pipeline.taken_components)
        excluded = np.union1d(excluded, lacking.excluded)
        _log.info("%s", lacking.summary)
    labels = data_set.columns().labels if select.oversample else None
    return Selection(len(stored), excluded=excluded, labels=labels, oversample=select.oversample)


def _check_memory(inputs: PlanInputs) -> None:
    """Refuse an exact global shuffle for which memory is too small."""
    order, num_samples = inputs.order, inputs.selection.num_per_pass
    needed, available = BYTES_PER_SAMPLE * num_samples // order.num_slices, available_memory()
    if order.shuffle and order.shuffle_window == "all" and needed > available:
        raise ValueError(
            f"window_bytes='all' permutes {num_samples} samples at once, which takes {needed} bytes of memory, and "
            f"{available} are available; pass shuffle=Shuffle(window_bytes=...): on dSorted shards windows shuffle as "
            "well"
        )


def _batch_pixels(settings: Settings, bad_samples: BadSamples) -> int:
    """The default of `Decode.max_batch_pixels`."""
    # Decoded pixels are uint8 RGB. Beside the batches that are decoded ahead there is the one that is delivered.
    bytes_per_pixel = 3 * (settings.prefetch_queue_depth + 1)
    pixels = available_memory() // 2 // num_local_ranks() // bytes_per_pixel
    return max(bad_samples.max_pixels, min(pixels, MAX_BATCH_PIXELS))


def _check_graph(pipeline: DecodePipeline, stored: StoredSamples, bad_samples: BadSamples, outputs: Outputs) -> None:
    """Refuse samples that the graph cannot process, and added outputs whose names the graph uses."""
    for component in sorted(pipeline.inputs.photos):
        stored.check_sized(component)
    if bad_samples.on_error == "raise":
        for component in sorted({*pipeline.decoded_photos.components, *pipeline.inputs.photos}):
            stored.check_photos(component)
    for name, option, is_added in (("key", "keys", outputs.keys), ("valid", "valid", outputs.valid)):
        if is_added and name in pipeline.output_names:
            raise ValueError(
                f"Outputs({option}=True) adds '{name}', which is an output of the graph already; rename that"
            )


def _directory(cache: Cache) -> Path | None:
    return None if cache.directory is None else Path(cache.directory)


def _open_quarantine(bad_samples: BadSamples, data_set: DataSet, batching: Batching) -> Quarantine | None:
    if bad_samples.on_error == "raise":
        return None
    digest = data_set.manifest.digest
    path = str(bad_samples.quarantine or f"quarantine-{digest[:12]}-rank{{rank}}.tsv")
    path = path.replace("{rank}", str(batching.process.rank))
    return Quarantine(path, manifest=digest)


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
