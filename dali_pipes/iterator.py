"""A loader: shard URLs and a graph in, batches out, epoch after epoch. What a training loop holds.

Who owns what: the loader owns the image, the stager's threads, the decode half, and one segment at a time. Everything
but the stager and DALI's own threads runs in the thread that iterates.
"""

import contextlib
import dataclasses
import logging
import operator
import os
import re
import weakref
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NoReturn

import torch
from nvidia.dali.plugin.base_iterator import LastBatchPolicy
from nvidia.dali.plugin.pytorch import DALIGenericIterator
from torch.utils.dlpack import from_dlpack

from dali_pipes.decode import DecodeHalf, Fed
from dali_pipes.errors import DataError, DecodeError, WorkerProcessError
from dali_pipes.feed import Feed
from dali_pipes.fetch import Stager
from dali_pipes.image import Image, check_room, choose_cache_dir, extent_starts
from dali_pipes.plan import LAST_BATCH_POLICIES, LastBatchPolicyName, OrderInputs, Plan, num_steps
from dali_pipes.samples import Labels, Samples, load_samples
from dali_pipes.seam import Graph
from prep.endpoint import cluster
from prep.manifest import Manifest, manifest_name
from prep.urls import ShardUrls, is_remote, resolve_shards

__all__ = ["Loader", "loader"]

_log = logging.getLogger(__name__)

Device = Literal["auto", "gpu", "cpu"]


class Loader(DALIGenericIterator):  # type: ignore[misc]
    """Batches of one data set, in the order that a seed fixes. Made by `loader`; a context manager.

    Iterating gives ``[{name: tensor}]``, a list of one dict as DALI's own iterators do: the graph's outputs by name, on
    the loader's device, each of shape [batch, ...]; with ``with_keys`` also ``"key"``, a list of str.

    An epoch ends with `StopIteration`. `break` and iterating again goes on with the same epoch, as DALI does; after the
    end, iterating again, or `reset`, starts the next. `reset` in mid-epoch gives the rest of it up.
    """

    def __init__(
        self,
        decode: DecodeHalf,
        *,
        samples: Samples,
        image: Image,
        stager: Stager,
        order: OrderInputs,
        last_batch_policy: LastBatchPolicyName,
        auto_reset: bool,
        with_keys: bool,
        resources: contextlib.ExitStack,
    ) -> None:
        self._decode, self._samples, self._image, self._stager = decode, samples, image, stager
        self._policy = last_batch_policy
        self._order = order
        self._with_keys = with_keys
        self._pid = os.getpid()
        self._prepared: Feed | None = None
        self._error: Exception | None = None
        self._running = False
        self._interrupted = False
        self._delivered = 0
        # What the graph asked for, in its order: looked up once.
        self._places = [samples.places(component) for component in decode.inputs.components]
        self.num_valid = 0
        """How many samples of the batch last delivered count; fewer than it holds only in a ``PARTIAL`` last batch."""
        super().__init__(
            [decode.pipeline],
            decode.output_names,
            size=-1,
            auto_reset=auto_reset,
            last_batch_policy=LastBatchPolicy[last_batch_policy],
            prepare_first_batch=False,
        )
        self._begin(self._make_feed(order.epoch), delivered=0)
        self._resources = resources.pop_all()  # from here on close() is what frees them
        self._closed = False

    @property
    def num_samples(self) -> int:
        """Samples of one epoch, exact before the first batch."""
        return self._feed.plan.num_samples

    @property
    def epoch(self) -> int:
        """The epoch that is being, or is about to be, iterated; the first is 0."""
        return self._feed.plan.order.epoch

    def __len__(self) -> int:
        """Batches of one epoch, exact before the first."""
        return self._num_batches

    def __iter__(self) -> "Loader":
        self._check_usable()
        if self._delivered == len(self):
            self._start_epoch(self.epoch + 1)
        return self

    def __next__(self) -> list[dict[str, Any]]:
        self._check_usable()
        if self._delivered == len(self):
            if self._auto_reset == "yes":
                self._start_epoch(self.epoch + 1)
            raise StopIteration
        if self._interrupted:
            self._recover()
        # Whatever leaves this method but by the two known ways may have left DALI with half of a batch's inputs: until
        # the end is reached, a Ctrl-C for instance, the pipeline is taken to be broken.
        self._interrupted = True
        if not self._running:
            self._decode.schedule()
            self._running = True
        try:
            batch, tensors = self._decode.take()
        except RuntimeError as exc:
            error = self._decode_error(exc)
            self._schedule_next(self._delivered + 1)
            self._delivered, self._interrupted = self._delivered + 1, False
            raise error from exc
        except StopIteration:
            # The feed ended early: what it could not read was kept, so that all before it was delivered first. The next
            # call tries again from here.
            error_kept, self._error = self._error, None
            assert error_kept is not None, "the plan has as many steps as len() says"
            raise error_kept from None
        self._schedule_next(self._delivered + 1)
        delivered: dict[str, Any] = {name: from_dlpack(tensor) for name, tensor in tensors.items()}
        if self._with_keys:
            delivered["key"] = batch.keys
        self.num_valid = batch.num_valid
        self._delivered, self._interrupted = self._delivered + 1, False
        return [delivered]

    def reset(self) -> None:
        """Start the next epoch, giving up the rest of this one. Before an epoch's first batch it does nothing."""
        self._check_usable()
        if self._delivered:
            self._start_epoch(self.epoch + 1)

    def set_epoch(self, epoch: int) -> None:
        """Start this epoch from its first sample; what is left of the current one is given up.

        Raises:
            ValueError: If ``epoch`` is negative.
        """
        self._check_usable()
        epoch = _integer("epoch", epoch)
        if epoch < 0:
            raise ValueError(f"epoch must not be negative, got {epoch}")
        self._start_epoch(epoch)

    def close(self) -> None:
        """Stop threads, free the image. Can be called twice; the loader cannot be iterated afterwards."""
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        with self._resources:  # closed last, whatever happens before
            self._feed.close()
            if self._prepared is not None:
                self._prepared.close()
            self._decode.close()
            self._pipes: list[object] = []

    def __enter__(self) -> "Loader":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        # Only a loader whose constructor came to its end has something to close; in a forked child it is not its own.
        if not getattr(self, "_closed", True) and os.getpid() == self._pid:
            self.close()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise WorkerProcessError(
            "a loader cannot be copied or sent to another process, such as a DataLoader worker: it has threads and "
            "buffers of its own; use it directly, or with DataLoader(num_workers=0)"
        )

    def _start_epoch(self, epoch: int) -> None:
        if self._interrupted:
            self._rebuild()
        elif self._running:
            self._decode.drain()
        self._feed.close()
        prepared, self._prepared = self._prepared, None
        if prepared is not None and prepared.plan.order.epoch != epoch:
            prepared.close()
            prepared = None
        self._begin(prepared or self._make_feed(epoch), delivered=0)

    def _recover(self) -> None:
        """Go on with the epoch where it was cut short: the next batch is the one after the last that was delivered."""
        self._rebuild()
        self._feed.close()
        feed = self._make_feed(self.epoch, start=self._delivered * self.batch_size)
        self._begin(feed, delivered=self._delivered)

    def _rebuild(self) -> None:
        self._decode.rebuild()
        self._pipes = [self._decode.pipeline]

    def _begin(self, feed: Feed, *, delivered: int) -> None:
        self._feed = feed
        self._num_batches = num_steps(
            feed.plan.num_samples, global_batch_size=self.batch_size, last_batch_policy=self._policy
        )
        self._running, self._interrupted, self._error, self._delivered = False, False, None, delivered
        # Weak: the decode half must not keep the loader, or nobody would close one that is dropped.
        next_fed = weakref.WeakMethod(self._next_fed)
        self._decode.feed = lambda: method() if (method := next_fed()) is not None else None

    def _make_feed(self, epoch: int, *, start: int = 0) -> Feed:
        manifest = self._samples.manifest
        order = dataclasses.replace(self._order, epoch=epoch)
        return Feed(
            Plan(shard_bytes=manifest.shard_bytes, shard_samples=manifest.samples, order=order),
            samples=self._samples,
            places=self._places,
            image=self._image,
            stager=self._stager,
            batch_size=self.batch_size,
            last_batch_policy=self._policy,
            start=start,
        )

    def _next_fed(self) -> Fed | None:
        """The next batch for the decode half; an error ends the feed and is raised when all before it is delivered."""
        try:
            read = self._feed.next()
            if read is None:
                return None
            batch, encoded = read
            return Fed(batch, encoded, self._decode.arrays(batch))
        except Exception as exc:  # noqa: BLE001 (handed on, whatever it is)
            self._error = exc
            return None

    def _schedule_next(self, delivered: int) -> None:
        """Decode another batch if the epoch has one: nothing is decoded past its end."""
        if delivered + len(self._decode.scheduled) < self._num_batches:
            self._decode.schedule()
        elif self._prepared is None and self._error is None:
            # All is read; while the last batches are decoded there is time to have the next epoch's reader ready.
            try:
                self._prepared = self._make_feed(self.epoch + 1)
                self._prepared.prepare()
            except Exception:  # noqa: BLE001 (raised again when that epoch is started)
                _log.debug("the next epoch's reader could not be prepared; it is made when it is wanted", exc_info=True)
                self._prepared = None

    def _decode_error(self, exc: RuntimeError) -> DecodeError:
        batch = self._decode.scheduled.popleft()
        reason = str(exc).partition("encountered:")[2].strip() or str(exc)
        reason = " ".join(reason.split("Current pipeline object is no longer valid")[0].split())
        # Where DALI names the sample at all, it is by the index line: path, offset and ordinal.
        if (named := re.search(rf"{re.escape(self._image.path)}:\d+:(\d+)", reason)) is not None:
            return DecodeError(f"{self._samples.name(int(named[1]))}: DALI cannot decode it: {reason}")
        among = ", ".join(batch.keys[:8]) + (", ..." if len(batch) > 8 else "")
        return DecodeError(f"DALI cannot decode one of the {len(batch)} samples {among}: {reason}")

    def _check_usable(self) -> None:
        if os.getpid() != self._pid:
            raise WorkerProcessError(
                f"this loader was made in process {self._pid} and is used in process {os.getpid()}, probably a "
                "DataLoader worker; it has threads of its own and needs no workers: use it directly, or with "
                "DataLoader(num_workers=0)"
            )
        if self._closed:
            raise ValueError("this loader is closed; make another")


def loader(
    shards: ShardUrls,
    graph: Graph,
    *,
    batch_size: int,
    seed: int = 0,
    shuffle: bool = True,
    last_batch_policy: str | LastBatchPolicy = "PARTIAL",
    device: Device = "auto",
    num_threads: int | None = None,
    with_keys: bool = False,
    labels: Labels = "raw",
    auto_reset: bool = False,
    prefetch_queue_depth: int = 2,
    cache_dir: str | Path | None = None,
    endpoint: str | None = None,
) -> Loader:
    """A loader over indexed shards.

    Args:
        shards: ``"ais://pets/shuffled-{000000..000003}.tar"``, ``"ais://pets/shuffled-"``, a glob, a directory or a
        list;
            they must have been indexed (``dali-pipes prep index``).
        graph: ``dali_pipes.segmentation(...)``, another of `dali_pipes.pipelines`, or a ``graph(components, random)``.
        batch_size: Samples a batch.
        seed: Fixes the order and every augmentation; each epoch has its own.
        shuffle: ``False`` reads in the manifest's order.
        last_batch_policy: ``"PARTIAL"`` gives the last batch short, ``"FILL"`` fills it with the epoch's first samples,
            ``"DROP"`` leaves it out.
        device: ``"gpu"``: the current CUDA device; ``"cpu"``; ``"auto"``: the GPU if there is one.
        num_threads: Decoding threads; ``None``: as many as the process may use cores.
        with_keys: Add ``"key"``, a list of str, to each batch.
        labels: ``"raw"``: class ids as ``cls`` holds them; ``"contiguous"``: from 0, by the manifest's class table.
        auto_reset: As DALI's: start the next epoch by itself when one has ended.
        prefetch_queue_depth: Batches decoded ahead.
        cache_dir: Where the image is kept while the loader lives: a local directory with room for all shards. ``None``:
            shared memory if they fit there twice, else the directory for temporary files.
        endpoint: AIStore's proxy. ``None``: ``AIS_ENDPOINT``; where that is not set, an embedded node is started.

    Raises:
        DataError: If the shards are not indexed, or a sample lacks a component that the graph takes.
        StoreError: If a shard or the store is not there.
        CacheError: If the shards do not fit the cache.
        WorkerProcessError: In a DataLoader's worker process.
    """
    policy = _policy_name(last_batch_policy)
    # An iterator can be read once, and it is looked at twice.
    shards = shards if isinstance(shards, str | Path) else list(shards)
    seed, batch_size = _integer("seed", seed), _integer("batch_size", batch_size)
    _check_arguments(batch_size=batch_size, num_threads=num_threads, device=device, labels=labels)
    if torch.utils.data.get_worker_info() is not None:
        raise WorkerProcessError(
            "a loader cannot be made in a DataLoader worker process: it has threads of its own, and a GPU cannot be "
            "used after a fork; make it in the main process and use it directly, or with DataLoader(num_workers=0)"
        )
    with contextlib.ExitStack() as resources:
        first = shards if isinstance(shards, str | Path) else next(iter(shards), "")
        if is_remote(first):
            embedded_dir = os.environ.get("DALI_PIPES_EMBEDDED_DIR")
            endpoint = resources.enter_context(
                cluster(
                    endpoint or os.environ.get("AIS_ENDPOINT") or None,
                    embedded_dir=Path(embedded_dir) if embedded_dir else None,
                )
            )
        resolved = resolve_shards(shards, endpoint=endpoint)
        name = manifest_name(resolved.prefix)
        where = resolved.store.locate(name)
        if resolved.store.size(name) is None:
            raise DataError(f"no manifest '{where}'; make it: dali-pipes prep index '{resolved.url}'")
        manifest = Manifest.from_bytes(resolved.store.read(name), where=where).select(resolved.names, where=where)
        if manifest.num_samples == 0:
            raise DataError(f"'{resolved.url}': {manifest.num_shards} shards hold no sample")
        samples = load_samples(resolved.store, manifest)
        decode = DecodeHalf(
            graph,
            places=samples.places,
            labels=lambda: samples.labels(labels),
            example=samples.example(),
            batch_size=batch_size,
            device_id=_device_id(device),
            num_threads=num_threads or len(os.sched_getaffinity(0)),
            prefetch_queue_depth=prefetch_queue_depth,
        )
        for component in decode.inputs.components.keys() | decode.inputs.photos:
            samples.check_photos(component, sized=component in decode.inputs.photos)
        if with_keys and "key" in decode.output_names:
            raise ValueError("with_keys adds 'key', which is an output of the graph already; rename that")
        num_bytes = int(extent_starts(manifest.shard_bytes)[-1])
        directory = Path(cache_dir) if cache_dir is not None else choose_cache_dir(num_bytes)
        check_room(directory, num_bytes)
        image = resources.enter_context(contextlib.closing(Image(manifest.shard_bytes, cache_dir=directory)))
        stager = resources.enter_context(contextlib.closing(Stager(resolved.store, manifest, image)))
        return Loader(
            decode,
            samples=samples,
            image=image,
            stager=stager,
            order=OrderInputs(seed=seed, shuffle=shuffle),
            last_batch_policy=policy,
            auto_reset=auto_reset,
            with_keys=with_keys,
            resources=resources,
        )


def _policy_name(policy: str | LastBatchPolicy) -> LastBatchPolicyName:
    name = policy.name if isinstance(policy, LastBatchPolicy) else policy
    if name not in LAST_BATCH_POLICIES:
        raise ValueError(f"last_batch_policy must be one of {', '.join(LAST_BATCH_POLICIES)}, got {name!r}")
    return name  # type: ignore[return-value]


def _integer(name: str, value: object) -> int:
    try:
        return operator.index(value)  # type: ignore[arg-type]  # refuses floats, which would give another order
    except TypeError:
        raise TypeError(f"{name} must be an integer, got {value!r}") from None


def _check_arguments(*, batch_size: int, num_threads: int | None, device: str, labels: str) -> None:
    if batch_size < 1:
        raise ValueError(f"batch_size must be positive, got {batch_size}")
    if num_threads is not None and num_threads < 1:
        raise ValueError(f"num_threads must be positive, got {num_threads}")
    if device not in ("auto", "gpu", "cpu"):
        raise ValueError(f"device must be one of auto, gpu, cpu, got {device!r}")
    if labels not in ("raw", "contiguous"):
        raise ValueError(f"labels must be one of raw, contiguous, got {labels!r}")


def _device_id(device: Device) -> int | None:
    """The CUDA device to decode on, ``None`` for the CPU."""
    if device == "cpu":
        return None
    if torch.cuda.is_available():
        return int(torch.cuda.current_device())
    if device == "gpu":
        raise ValueError("device='gpu', and torch finds no CUDA device; pass device='cpu' or 'auto'")
    _log.info("no CUDA device: decoding on the CPU")
    return None
