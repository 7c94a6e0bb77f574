"""Open a loader: shard URLs and a graph in, checked against the manifest, placed in a cache; a loader out."""

import contextlib
import dataclasses
import hashlib
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from nvidia.dali.plugin.base_iterator import LastBatchPolicy

from dali_pipes.bad_samples.policy import BadSamplePolicy, BadSamplesSeen, OnError
from dali_pipes.bad_samples.quarantine import Quarantine
from dali_pipes.bad_samples.repair import Repair
from dali_pipes.cache.free_space import available_memory
from dali_pipes.cache.placement import extent_alignment
from dali_pipes.data_set.data_set import Indexed, find_shards, open_share, open_stager
from dali_pipes.data_set.exclusions import Where, excluded_ordinals
from dali_pipes.data_set.mixture import Mixture
from dali_pipes.errors import WorkerProcessError
from dali_pipes.fetch.stager import NUM_FETCHERS
from dali_pipes.formats.manifest import Manifest
from dali_pipes.formats.photo_header import MAX_PIXELS
from dali_pipes.graph.decode import DecodePipeline
from dali_pipes.graph.inputs import Graph
from dali_pipes.iterator import LABEL_OUTPUT, Loader, as_integer
from dali_pipes.order.plan import (
    BYTES_PER_SAMPLE,
    LAST_BATCH_POLICIES,
    LastBatchPolicyName,
    OrderInputs,
    Plan,
    num_slices_read,
    reserved_bytes,
    window_bytes,
)
from dali_pipes.order.selection import Selection
from dali_pipes.order.state import LoaderState
from dali_pipes.ranks import find_rank
from dali_pipes.reader.samples import Labels, Missing, Samples
from dali_pipes.store.urls import ShardUrls
from dali_pipes.tuning import choose_settings

__all__ = ["loader"]

_log = logging.getLogger(__name__)

Device = Literal["auto", "gpu", "cpu"]


def loader(
    shards: ShardUrls | Mixture,
    graph: Graph,
    *,
    batch_size: int,
    exclude: str | Path | Iterable[str | Path] = (),
    where: Where | None = None,
    oversample: Mapping[int, float] | None = None,
    epoch_samples: int | None = None,
    seed: int = 0,
    shuffle: bool = True,
    shuffle_window: int | Literal["all"] = "all",
    ramp_up: bool = False,
    num_slices: int = 1,
    state: Mapping[str, Any] | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    local_rank: int | None = None,
    last_batch_policy: str | LastBatchPolicy = "PARTIAL",
    device: Device = "auto",
    num_threads: int | None = None,
    output_map: Sequence[str] | None = None,
    with_keys: bool = False,
    with_valid: bool = False,
    column_labels: bool = False,
    labels: Labels = "raw",
    missing: Missing = "error",
    on_error: OnError = "raise",
    max_bad: int = 100,
    max_pixels: int = MAX_PIXELS,
    quarantine: str | Path | None = None,
    auto_reset: bool = False,
    prefetch_queue_depth: int | None = None,
    hw_decoder_load: float | None = None,
    tuning: str | Path | None = None,
    cache_dir: str | Path | None = None,
    cache_bytes: int | None = None,
    num_fetchers: int = NUM_FETCHERS,
    show_progress: bool = True,
    endpoint: str | None = None,
    etl: str | None = None,
) -> Loader:
    """A loader over shards in buckets or directories.

    Args:
        shards: ``"ais://pets/shuffled-{000000..000003}.tar"``, ``"ais://pets/shuffled-"``, a glob, a directory or a
            list; or a `Mixture` of several data sets. Shards that were not indexed (``dali-pipes prep index``) are read
            once more for it, each time.
        graph: ``dali_pipes.segmentation(...)``, another of `dali_pipes.graph.pipelines`, or a
            ``graph(components, random)``.
        batch_size: Samples a batch, on this rank.
        exclude: Files that list samples to leave out: quarantines, or lists of a key a line; ``"/logs/bad-*.tsv"`` for
            all that there are. An input of the order.
        where: A predicate: called once with a `dali_pipes.formats.sample_columns.Columns`, it gives bool [samples], ``True`` for those that
            stay: ``lambda columns: columns.labels == 3``. An input of the order.
        oversample: Class id, as ``cls`` holds it, to how often its samples come: 2 for twice in an epoch, 0.5 for every
            other one, others in each epoch; see `dali_pipes.order.selection.Selection`. An input of the order.
        epoch_samples: Samples of an epoch over all ranks, of an endless stream: the next epoch goes on where this one
            stopped. ``None``: all samples once; of a mixture with weights as many as it takes to have all at least
            once. An input of the order.
        seed: Fixes the order and every augmentation that is drawn from a graph's second argument; each epoch has its
            own. DALI's own random operators are seeded by it, too, but what they draw depends on the batches before.
        shuffle: ``False`` reads in the manifest's order.
        shuffle_window: Bytes of shards that are shuffled together, and resident together: two windows must fit the
            cache. ``"all"``: an exact global shuffle, of shards that all fit. An input of the order.
        ramp_up: Start each epoch with windows of 1, 2, 4, ... shards, so that its first batch waits for one shard only.
            An input of the order.
        num_slices: Nodes that each stage a share of the shards; shorter shares repeat their first samples. An input of
            the order.
        state: What `Loader.state_dict` gave, of a loader of the same order: the job goes on at the exact next sample,
            with the batches that `Loader.load_state_dict` would give, and what the first of them names is fetched
            first; nothing of epoch 0 is. Batch size and world size may be others. ``None``: from the start, so that one
            line does for both: ``state=checkpoint["loader"] if checkpoint else None``.
        rank: Number of this process among those that share the order. ``None``, with ``world_size``: what
            `torch.distributed` says, else torchrun's, Slurm's or MPI's variables; else this is the only one.
        world_size: How many they are.
        local_rank: Number of this process on its host, found likewise: which CUDA device is taken where the process has
            not set one itself.
        last_batch_policy: ``"PARTIAL"`` gives the last batch short, ``"FILL"`` fills it with the epoch's first samples,
            ``"DROP"`` leaves it out.
        device: ``"gpu"``: the current CUDA device; ``"cpu"``; ``"auto"``: the GPU if there is one.
        num_threads: Decoding threads; ``None``: what the tuning file says, else as many as the process may use cores,
            or its share of those that the launcher lets all ranks of this host use.
        output_map: What batches call the graph's outputs, in their order, as DALI's iterators take it; ``None``: the
            graph's own names.
        with_keys: Add ``"key"``, a list of str, to each batch.
        with_valid: Add ``"valid"``, bool [batch], to each batch: ``False`` where another sample stands in for a bad
            one, and where a rank has nothing in a ``PARTIAL`` last step.
        column_labels: Give ``"label"`` as [batch, 1], as `DALIClassificationIterator` does, not as [batch]. With
            ``output_map=["data", "label"]`` a loop that was written for it runs unchanged.
        labels: ``"raw"``: class ids as ``cls`` holds them; ``"contiguous"``: from 0, by the manifest's class table.
        missing: What to do with a sample that lacks a component that the graph takes: ``"error"``: refuse the data set;
            ``"skip"``: leave the sample out; ``"empty"``: let it through, with no bytes, a photo of one black pixel, a
            class id of -1. ``components.present(name)`` tells a graph which.
        on_error: What to do with a sample that cannot be read: ``"raise"``: name shard, key, component and cause;
            ``"substitute"``: the nearest good sample before it in its batch stands in for it (after it, if there is
            none; in a batch of bad ones only, a neighbour in the shard, else in the next), so that batches keep their
            number and size; ``loader.substituted`` says where that was so.
        max_bad: So many different samples of this rank may be bad before it is an error.
        max_pixels: A photo of more is bad: it would take gigabytes to decode.
        quarantine: A file to write bad samples to, which ``exclude=`` takes; ``{rank}`` in its name is this rank's
            number. ``None``: ``quarantine-DIGEST-rank{rank}.tsv`` in the working directory, DIGEST being the
            manifest's. It is made with the first one, and only for ``on_error="substitute"``.
        auto_reset: As DALI's: start the next epoch by itself when one has ended.
        prefetch_queue_depth: Batches decoded ahead; ``None``: what the tuning file says, else 2.
        hw_decoder_load: Share of a batch's JPEGs that the GPU's JPEG engines are to decode, 0 to 1, in decoders of the
            graph that do not say themselves; ``None``: what the tuning file says, else DALI's own default.
        tuning: What ``dali-pipes tune`` wrote; ``None``: the file that ``DALI_PIPES_TUNING`` names, if any. What is
            given here as an argument comes first; a file of another machine is not used, which is told once.
        cache_dir: A local directory for the image, which is kept there for the next job and shared with all loaders on
            this node that name it. ``None``: shared memory if the shards fit there, else the directory for temporary
            files; shared as well, and removed with the last loader.
        cache_bytes: What all images in that directory may take. ``None``: half of what is free in memory, nine tenths
            of what is free on a disk; never more than the file system and the container's memory limit allow.
        num_fetchers: Shards in flight.
        show_progress: Draw a bar while the first window is staged, if stderr is a terminal; on rank 0 only.
        endpoint: AIStore's proxy. ``None``: ``AIS_ENDPOINT``; where that is not set, an embedded node is started.
        etl: Read every shard through this ETL, which runs in the cluster (``dali-pipes prep etl start``). Transformed
            shards are another data set than the stored ones: they are indexed on their own (``dali-pipes prep index URL
            --etl NAME``) and lie in another image; the transform must give the same bytes each time. For data sets of a
            mixture see `Mixture`.

    Raises:
        DecodeError: While iterating: if a sample is bad, or too many are.
        DataError: If the shards are not what their index says, or a sample lacks a component that the graph takes; if
            the ETL gives other bytes than when it was indexed; if the tuning file is not there, or is none.
        StateError: If ``state`` is of other shards or another order, or is none. Nothing has been staged then.
        StoreError: If a shard, the store or the ETL is not there, also while iterating; a `prep.etl.NoEtlError` where
            the cluster can have none.
        CacheError: If two windows do not fit the cache; says how many bytes are needed.
        WorkerProcessError: In a DataLoader's worker process.
    """
    policy = _policy_name(last_batch_policy)
    process = find_rank(rank=rank, world_size=world_size, local_rank=local_rank)
    # An iterator can be read once, and it is looked at twice.
    shards = shards if isinstance(shards, str | Path | Mixture) else list(shards)
    seed, batch_size = as_integer("seed", seed), as_integer("batch_size", batch_size)
    _check_arguments(
        batch_size=batch_size,
        num_threads=num_threads,
        device=device,
        labels=labels,
        missing=missing,
        world_size=process.world_size,
        num_slices=num_slices,
        num_fetchers=num_fetchers,
    )
    policy_bad = BadSamplePolicy(
        on_error=on_error, max_bad=as_integer("max_bad", max_bad), max_pixels=as_integer("max_pixels", max_pixels)
    )
    order = OrderInputs(
        seed=seed,
        shuffle=shuffle,
        shuffle_window=shuffle_window,
        ramp_up=ramp_up,
        num_slices=as_integer("num_slices", num_slices),
        epoch_samples=None if epoch_samples is None else as_integer("epoch_samples", epoch_samples),
    )
    # Refused as soon as it is known to be another's: by its order here, by its shards before the graph is built.
    resumed = None if state is None else LoaderState.from_dict(state)
    if resumed is not None:
        # A mixture's weights count when its data sets are found: one alone has none.
        _check_state(resumed, order=dataclasses.replace(order, weights=resumed.order.weights))
    if torch.utils.data.get_worker_info() is not None:
        raise WorkerProcessError(
            "a loader cannot be made in a DataLoader worker process: it has threads of its own, and a GPU cannot be "
            "used after a fork; make it in the main process and use it directly, or with DataLoader(num_workers=0)"
        )
    device_id = _device_id(device, process.local_rank)
    settings = choose_settings(
        tuning,
        device_id=device_id,
        num_threads=num_threads,
        prefetch_queue_depth=prefetch_queue_depth,
        hw_decoder_load=hw_decoder_load,
    )
    with contextlib.ExitStack() as resources:
        embedded_dir = os.environ.get("DALI_PIPES_EMBEDDED_DIR")
        found = find_shards(
            shards,
            endpoint=endpoint or os.environ.get("AIS_ENDPOINT") or None,
            embedded_dir=Path(embedded_dir) if embedded_dir else None,
            resources=resources,
            etl=etl,
        )
        directory = None if cache_dir is None else Path(cache_dir)
        indexed = Indexed(found, alignment=extent_alignment(directory))
        resources.callback(indexed.close)
        manifest = indexed.manifest
        order = dataclasses.replace(order, weights=indexed.weights)
        if resumed is not None:
            _check_state(resumed, manifest=manifest.digest, order=order)
        if labels == "contiguous":
            indexed.check_classes()
        samples = Samples(
            manifest,
            indexed.read_index,
            whole=indexed.whole,
            labels=labels,
            missing=missing,
            max_pixels=max_pixels,
        )
        # What is left out need have neither what the graph takes nor a photo that can be decoded.
        chosen = excluded_ordinals(indexed, exclude=exclude, where=where)
        samples.excluded = chosen.excluded
        if len(chosen.excluded):
            _log.info("%s", chosen.summary)
        decode = DecodePipeline(
            graph,
            samples=samples,
            batch_size=batch_size,
            device_id=device_id,
            num_threads=settings.num_threads,
            prefetch_queue_depth=settings.prefetch_queue_depth,
            hw_decoder_load=settings.hw_decoder_load,
            seed=seed,
        )
        selection = _select(indexed, samples, decode.taken_components, oversample)
        if resumed is not None:
            plan = Plan(
                shard_bytes=manifest.shard_bytes,
                shard_samples=manifest.samples,
                order=dataclasses.replace(order, epoch=resumed.order.epoch),
                set_shards=indexed.set_shards,
                selection=selection,
            )
            resumed.check(
                manifest=manifest.digest, selection=selection.digest, order=order, num_samples=plan.num_samples
            )
        _check_memory(order, selection.num_per_pass)
        for component in sorted(decode.inputs.photos):
            samples.check_sized(component)
        if on_error == "raise":
            for component in sorted({*decode.decoded_components, *decode.inputs.photos}):
                samples.check_photos(component)
        names = _names(decode.output_names, output_map, added={"key": with_keys, "valid": with_valid})
        if column_labels and LABEL_OUTPUT not in decode.output_names:
            raise ValueError(f"column_labels needs an output 'label', the graph gives {', '.join(decode.output_names)}")
        reserved = reserved_bytes(
            indexed.extent_bytes,
            manifest.shard_bytes,
            manifest.samples,
            order=order,
            global_batch_size=batch_size * process.world_size,
            num_slices_read=num_slices_read(
                order, batch_size=batch_size, rank=process.rank, world_size=process.world_size
            ),
            set_shards=indexed.set_shards,
            selection=selection,
        )
        share = open_share(
            indexed,
            reserved=reserved,
            is_windowed=window_bytes(order, manifest.shard_bytes) != "all",
            group=_group(indexed, order, selection),
            cache_dir=directory,
            cache_bytes=cache_bytes,
        )
        resources.callback(share.close)
        samples.read_index = lambda shard: share.index_extent(shard).read()
        stager = resources.enter_context(contextlib.closing(open_stager(indexed, share, num_fetchers=num_fetchers)))
        met = BadSamplesSeen(
            policy_bad,
            quarantine=_open_quarantine(quarantine, manifest, rank=process.rank) if on_error == "substitute" else None,
        )

        def read(shard: int, start: int, size: int) -> bytes:
            # What is resident need not be asked for again; through an ETL it would be transformed for it.
            if stager.need_resident([shard]):
                try:
                    return share.shard_extent(shard).read(start, size)
                finally:
                    stager.done([shard])
            return indexed.read_range(shard, start=start, size=size)

        repair = Repair(decode, samples=samples, met=met, read=read, read_index=indexed.read_index)
        return Loader(
            decode,
            samples=samples,
            share=share,
            stager=stager,
            repair=repair,
            met=met,
            selection=selection,
            set_shards=indexed.set_shards,
            order=order,
            state=resumed,
            process=process,
            last_batch_policy=policy,
            auto_reset=auto_reset,
            with_keys=with_keys,
            with_valid=with_valid,
            names=names,
            column_labels=column_labels,
            show_progress=show_progress and process.rank == 0,
            resources=resources,
        )


def _check_state(state: LoaderState, *, order: OrderInputs, manifest: str | None = None) -> None:
    """Refuse a state by what is known so far."""
    state.check(
        manifest=state.manifest if manifest is None else manifest,
        selection=state.selection,
        order=order,
        num_samples=state.delivered,
    )


def _group(indexed: Indexed, order: OrderInputs, selection: Selection) -> int:
    """A number for loaders that read the same shards in the same order: the ranks of one job."""
    inputs = (indexed.manifest.digest, tuple(indexed.set_shards), selection.digest, order)
    return int.from_bytes(hashlib.blake2b(repr(inputs).encode(), digest_size=8).digest(), "little")


def _select(
    indexed: Indexed, samples: Samples, taken: Sequence[str], oversample: Mapping[int, float] | None
) -> Selection:
    """What an epoch is made of; ``samples`` knows what is left out by name, and is told the rest."""
    excluded = samples.excluded
    if samples.missing == "skip":
        chosen = excluded_ordinals(indexed, lacking=taken)
        excluded = np.union1d(excluded, chosen.excluded)
        _log.info("%s", chosen.summary)
    labels = indexed.columns().labels if oversample else None
    selection = Selection(len(samples), excluded=excluded, labels=labels, oversample=oversample)
    samples.excluded = selection.excluded
    return selection


def _open_quarantine(path: str | Path | None, manifest: Manifest, *, rank: int) -> Quarantine:
    if path is None:
        path = f"quarantine-{manifest.digest[:12]}-rank{rank}.tsv"
    return Quarantine(Path(str(path).replace("{rank}", str(rank))), manifest=manifest.digest)


def _policy_name(policy: str | LastBatchPolicy) -> LastBatchPolicyName:
    name = policy.name if isinstance(policy, LastBatchPolicy) else policy
    if name not in LAST_BATCH_POLICIES:
        raise ValueError(f"last_batch_policy must be one of {', '.join(LAST_BATCH_POLICIES)}, got {name!r}")
    return name  # type: ignore[return-value]


def _check_arguments(
    *,
    batch_size: int,
    num_threads: int | None,
    device: str,
    labels: str,
    missing: str,
    world_size: int,
    num_slices: int,
    num_fetchers: int,
) -> None:
    if batch_size < 1:
        raise ValueError(f"batch_size must be positive, got {batch_size}")
    if num_threads is not None and num_threads < 1:
        raise ValueError(f"num_threads must be positive, got {num_threads}")
    if num_fetchers < 1:
        raise ValueError(f"num_fetchers must be positive, got {num_fetchers}")
    if device not in ("auto", "gpu", "cpu"):
        raise ValueError(f"device must be one of auto, gpu, cpu, got {device!r}")
    if labels not in ("raw", "contiguous"):
        raise ValueError(f"labels must be one of raw, contiguous, got {labels!r}")
    if missing not in ("error", "skip", "empty"):
        raise ValueError(f"missing must be one of error, skip, empty, got {missing!r}")
    if num_slices > 0 and batch_size * world_size % num_slices:
        raise ValueError(
            f"num_slices must divide batch_size * world_size, got {num_slices} and {batch_size} * {world_size}"
        )


def _names(outputs: Sequence[str], output_map: Sequence[str] | None, *, added: Mapping[str, bool]) -> list[str]:
    """What batches call the outputs."""
    names = list(outputs if output_map is None else output_map)
    if isinstance(output_map, str) or len(names) != len(outputs):
        raise ValueError(
            f"output_map must name the graph's {len(outputs)} outputs ({', '.join(outputs)}), got {output_map!r}"
        )
    if len(set(names)) != len(names):
        raise ValueError(f"output_map must not name an output twice, got {names}")
    for name, is_added in added.items():
        if is_added and name in names:
            option = {"key": "with_keys", "valid": "with_valid"}[name]
            raise ValueError(f"{option} adds '{name}', which is an output of the graph already; rename that")
    return names


def _check_memory(order: OrderInputs, num_samples: int) -> None:
    """Refuse to permute more samples at once than memory holds."""
    needed, available = BYTES_PER_SAMPLE * num_samples // order.num_slices, available_memory()
    if order.shuffle and order.shuffle_window == "all" and needed > available:
        raise ValueError(
            f"shuffle_window='all' permutes {num_samples} samples at once, which takes {needed} bytes of memory, and "
            f"{available} are available; pass shuffle_window=BYTES: on dSorted shards a window shuffles as well"
        )


def _device_id(device: Device, local_rank: int) -> int | None:
    """The CUDA device to decode on, ``None`` for the CPU."""
    if device == "cpu":
        return None
    if torch.cuda.is_available():
        current = int(torch.cuda.current_device())
        # The first device is every process's until it sets its own; where each sees one only, that is it.
        return local_rank if current == 0 and local_rank < torch.cuda.device_count() else current
    if device == "gpu":
        raise ValueError("device='gpu', and torch finds no CUDA device; pass device='cpu' or 'auto'")
    _log.info("no CUDA device: decoding on the CPU")
    return None
