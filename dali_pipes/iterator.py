"""The loader, which a training loop iterates epoch after epoch, and `loader`, the function that opens it.

It is what users and DALI's loops see of a `dali_pipes.delivery.Delivery`, which does the work.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NoReturn, ParamSpec, Self

import torch
from nvidia.dali.plugin.base_iterator import LastBatchPolicy
from nvidia.dali.plugin.pytorch import DALIGenericIterator

from dali_pipes.arguments import refuse_unknown
from dali_pipes.bad_samples import BadSample
from dali_pipes.data_set.find import Mixture
from dali_pipes.delivery import Delivery
from dali_pipes.epoch import LoaderParts
from dali_pipes.errors import printable
from dali_pipes.graph.dali_internals import ITERATOR_ATTRIBUTES, set_epoch_size
from dali_pipes.graph.definition import BatchDict, Graph
from dali_pipes.integrations.dali_iterator import DaliIterator
from dali_pipes.integrations.data_loader import DictBatches, EachIter, LoaderBatches, LoaderDataset, OutputNames
from dali_pipes.opening import GROUPS, LoaderArguments
from dali_pipes.options import BadSamples, Cache, Decode, Outputs, Select, Shards, Shuffle
from dali_pipes.order.plan import LastBatchPolicyName
from dali_pipes.store.urls import ShardUrls

if TYPE_CHECKING:
    from jax.sharding import Sharding
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from dali_pipes.integrations.jax import JaxBatches


_Arguments = ParamSpec("_Arguments")

# Arguments of others' data loaders, and what takes their places.
_INSTEAD = {
    "num_workers": "a loader has threads of its own: decode=dali_pipes.Decode(threads=), dali_pipes.Cache(fetchers=)",
    "prefetch_factor": "pass decode=dali_pipes.Decode(queue_depth=)",
    "pin_memory": "leave it out: batches are made on the loader's device",
    "drop_last": "pass last_batch_policy='DROP' for True, and nothing for False",
    "transform": "what it does belongs into the graph, the second argument: see dali_pipes.classification_train",
    "collate_fn": "the graph's outputs are batches: see loader.as_dataloader(outputs=) for tuples and other names",
    "shard_id": "leave it out: the loader finds its rank; or pass rank=",
    "num_shards": "leave it out: the loader finds the number of ranks; or pass world_size=",
    "num_threads": "pass decode=dali_pipes.Decode(threads=)",
    "prefetch_queue_depth": "pass decode=dali_pipes.Decode(queue_depth=)",
    **dict.fromkeys(("reader_name", "auto_reset", "size"), "pass it to loader.as_dali()"),
    "sampler": "pass shuffle= and select=dali_pipes.Select(...)",
} | {
    field.name: f"pass {group}=dali_pipes.{options.__name__}({field.name}=)"
    for group, options in (GROUPS | {"shuffle": Shuffle}).items()
    for field in dataclasses.fields(options)
}


class Loader(DALIGenericIterator):  # type: ignore[misc]
    """Batches of one data set, in the order that a seed fixes. Made by `dali_pipes.loader`; a context manager.

    Iterating gives ``[{name: tensor}]``, a list of one dict, as DALI's own iterators do. The dict holds the graph's
    outputs by name, on the loader's device, each of shape [batch, ...]. With ``Outputs(keys=True)`` it also has
    ``"key"``, a list of str, and with ``Outputs(valid=True)`` ``"valid"``, bool [batch].

    An epoch ends with `StopIteration`. After `break`, iterating again continues the same epoch, as in DALI; the first
    time, the log says so. After the end, iterating again, or `reset`, starts the next epoch. `reset` in mid-epoch gives
    up the rest of it. A loop that goes on after another one has taken batches is an error.

    On a GPU a batch belongs to the stream of its device that is torch's current one when the batch is taken: that
    stream waits until the batch is decoded, the host does not. Another stream that reads it must first wait for that
    one: ``other.wait_stream(torch.cuda.current_stream(device))``. A batch may be dropped at any time. Capture a CUDA
    graph with ``capture_error_mode="thread_local"``, because DALI's threads use the GPU in the meantime.
    """

    # The delivery has these values.

    epoch: int
    """The epoch that is iterated now or next; the first is 0."""
    num_samples: int
    """The number of samples of this epoch, over all ranks; it is exact before the first batch. With several slices it
    is that of the longest slice times the number of slices, and may differ in the next epoch, unless
    ``Select(epoch_samples=)`` fixes it."""
    classes: dict[int, str]
    """Class id, as batches have it, to name: the class table of the data set. Empty if it has none, and for a
    mixture with ``labels="raw"``, whose data sets may name an id in several ways."""
    num_batches_left: int
    """Batches of the epoch that are still to come; at 0, iterating again starts the next."""
    position: int
    """Samples of the epoch that are delivered, on all ranks together."""
    num_valid: int
    """The number of samples, from the front, in the last delivered batch that count: all, except those that ``FILL``
    repeats in the epoch's last step, and none if a rank has no sample left in a ``PARTIAL`` one. A sample that replaces
    a bad one counts, too."""
    substituted: tuple[int, ...]
    """Positions in the last delivered batch at which another sample replaces a bad one."""
    num_substituted: int
    """The number of such positions in all delivered batches."""
    bad_samples: list[BadSample]
    """The bad samples that this rank has seen since the loader was made, in the order in which it saw them."""
    data_wait_s: float
    """Seconds for which batches had to wait for their shards, since the loader was made."""
    is_open: bool
    """Whether the loader is opened; only one with ``rank="late"`` is not, until it is needed."""
    parts: LoaderParts
    """For this package's commands, not for users."""

    def __new__(cls, *given: object, **_: object) -> Self:
        if not given or not isinstance(given[0], Delivery):
            raise TypeError("a Loader is made by the function dali_pipes.loader(shards, graph, batch_size=...)")
        made: Self = super().__new__(cls)
        return made

    def __init__(self, delivery: Delivery) -> None:
        self.delivery = delivery
        self._token: object | None = None  # of a loop that has begun
        if delivery.is_open:
            self._set_attributes()

    def __getattr__(self, name: str) -> Any:
        # Frameworks look for attributes of other names before they start their process group; these must not open a
        # late loader.
        if name in _VALUES:
            return _VALUES[name](self.delivery)
        if name in ITERATOR_ATTRIBUTES:
            self._set_attributes()
            return vars(self)[name]
        advice = f": {_FACES}" if name in _OF_DATA_LOADERS else ""
        raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'{advice}")

    def _set_attributes(self) -> None:
        """Set what DALI's iterators have: loops that were written for them read it; nothing here depends on it."""
        parts = self.delivery.parts
        policy, world_size = LastBatchPolicy[parts.batching.last_batch_policy], parts.batching.process.world_size
        super().__init__(
            self.delivery.pipelines,
            parts.decode.output_names,
            size=-1,
            last_batch_policy=policy,
            prepare_first_batch=False,
        )
        rounded_up = 0 if policy == LastBatchPolicy.DROP else world_size - 1
        set_epoch_size(self, (self.num_samples + rounded_up) // world_size, policy)

    @property
    def name(self) -> str:
        """The loader's name in metrics, such as ``"train"``: set it. Empty: the lowest number that no open loader of
        the process has.
        """
        return self.delivery.counts.name

    @name.setter
    def name(self, name: str) -> None:
        self.delivery.counts.name = name

    def __repr__(self) -> str:
        return _description(self.delivery)

    def __len__(self) -> int:
        """The number of batches of this epoch, exact before the first one; after a resume still of the whole epoch."""
        return self.delivery.num_batches_of()

    def __iter__(self) -> "Loader":
        self.delivery.begin()
        self._token = None
        return self

    def __next__(self) -> list[BatchDict]:
        self._token = self.delivery.claim(self._token)
        # Made before the batch is counted: see Note [counted last] in `dali_pipes.delivery`.
        batches: list[BatchDict] = self.delivery.next_batch(_ListOfBatch.of, taker=self._token)
        return batches

    def __getitem__(self, index: object) -> NoReturn:
        """Refuse to be a data set, whose samples have numbers."""
        raise TypeError(f"a loader gives batches in its own order, and no sample {index!r}; {_FACES}")

    def stats(self) -> dict[str, float]:
        """Return the figures of this loader, which the page "Watch a job" lists: counters since it was made, and what
        holds now. Any thread may call it, also after `close`. It takes some 20 us.
        """
        return self.delivery.stats()

    def reset(self) -> None:
        """Give up the rest of this epoch and start the next one. Before an epoch's first batch this does nothing."""
        self.delivery.reset()

    def set_epoch(self, epoch: int, *, batch: int = 0) -> None:
        """Start the given epoch, and give up the rest of the current one. The batches before ``batch`` are not read.

        Raises:
            ValueError: If ``epoch`` is negative, or the epoch has fewer batches than ``batch``.
        """
        self.delivery.set_epoch(epoch, batch=batch)

    def state_dict(self, num_samples: int | None = None, from_beginning: bool = True) -> dict[str, Any]:
        """Return the position of the job, as plain values: delivered batches count, batches decoded ahead do not.

        It is the same on every rank after the same number of batches. After an error the batch that was lost does not
        count until the loop has the batch after it: a job that resumes from this state is given the lost batch again.
        After `close` it is the last position. See `dali_pipes.order.state.LoaderState`.

        Args:
            num_samples: Samples of this epoch, over all ranks, that the trainer has used. Trainers tell it that take
                batches ahead, such as Composer; ``None``: those of the delivered batches.
            from_beginning: Whether ``num_samples`` counts from the beginning of the epoch, or from its resume.

        Raises:
            ValueError: If ``num_samples`` is negative, or is given to a loader with buckets under
                ``last_batch_policy="FILL"``.
        """
        return self.delivery.state_dict(num_samples, from_beginning)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where ``state_dict`` was taken: the next batch begins with the exact next sample.

        Batch size and world size may differ from before. A job that is started again passes ``state=`` to
        `dali_pipes.loader` instead; then the start of the first epoch is not staged.

        Raises:
            StateError: If the state is of other shards or another order; the loader continues as before.
        """
        self.delivery.load_state_dict(state)

    def checkpoints(self) -> NoReturn:
        """Refuse: a loader's state takes the place of the checkpoints of DALI's iterators."""
        raise ValueError(
            "a loader has no checkpoints of DALI pipelines: save state_dict(), and pass it to "
            "dali_pipes.loader(state=) or load_state_dict()"
        )

    def close(self) -> None:
        """Stop the threads and free the cache share. Can be called twice; afterwards the loader cannot be iterated.

        If another thread is taking a batch, this waits until it has it, or has the error that it must not wait for
        shards any more.
        """
        self.delivery.close()

    def __enter__(self) -> "Loader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        self.delivery.__reduce_ex__(protocol)

    def as_dali(
        self,
        output_map: Sequence[str] | None = None,
        *,
        column_labels: bool = False,
        auto_reset: bool | str | None = False,
        reader_name: str | None = "Reader",
        size: int = -1,
        fill_last_batch: bool | None = None,
        last_batch_padded: bool | None = None,
        last_batch_policy: LastBatchPolicy | str | None = None,
        dynamic_shape: object = None,
        prepare_first_batch: bool = False,
    ) -> DaliIterator:
        """Give the batches to a loop that was written for ``DALIClassificationIterator`` or another DALI iterator.

        With ``output_map=["data", "label"], column_labels=True`` the loop runs unchanged. The arguments from
        ``reader_name`` on are those of DALI's iterators; they change nothing here, and must fit what the loader does.

        Args:
            output_map: New names of the graph's outputs, in their order; ``None``: the graph's own names.
            column_labels: Give ``"label"`` as [batch, 1] instead of [batch].
            auto_reset: Start the next epoch when one has ended, as DALI does.
            reader_name: What the attribute ``_reader_name`` is to be.
            size: -1, or the samples of this rank in an epoch.
            fill_last_batch: ``True`` if the loader was opened with ``FILL``, ``False`` if with ``PARTIAL``.
            last_batch_padded: ``True``: after ``FILL`` each epoch begins with its first sample.
            last_batch_policy: The one with which the loader was opened.
            dynamic_shape: Anything.
            prepare_first_batch: Anything.

        Raises:
            ValueError: If the names do not fit the graph's outputs, or there is no label; if an argument contradicts
                what the loader does.
        """
        return DaliIterator(self, locals())

    def as_dicts(self) -> DictBatches:
        """Give batches as plain dicts, without the list around each, as `as_dataloader` does."""
        return LoaderBatches(self.delivery, outputs=None, each_iter="next")

    def as_dataset(self) -> LoaderDataset:
        """Give the batches to torch's ``DataLoader(loader.as_dataset(), batch_size=None, num_workers=0)``, or to
        torchdata's ``StatefulDataLoader``, which resumes at the exact next batch. A new iteration is the next epoch, as
        of `as_dataloader`.
        """
        return LoaderDataset(self.as_dataloader())

    def as_dataloader(self, outputs: OutputNames = None, *, each_iter: EachIter = "next") -> LoaderBatches:
        """Give the batches to a trainer, as an object that it takes for a data loader and leaves alone.

        It has what trainers ask for: a length, ``set_epoch``, ``state_dict``, ``load_state_dict``, ``batch_size``,
        ``drop_last``, ``sampler``, ``dataset``. Do not give it to a function that prepares or splits data loaders.

        Args:
            outputs: ``None``: dicts by the graph's names. ``("image", "label")``: tuples in that order.
                ``{"pixel_values": "image", "labels": "label"}``: dicts with new names.
            each_iter: What a new iteration gives when batches of an epoch were delivered. ``"next"``: the next epoch.
                ``"rest"``: after `break` the rest of that epoch, as iterating the loader does. ``"same"``: that epoch
                again from its start, for validation. After ``load_state_dict`` or ``dali_pipes.loader(state=)`` the
                first iteration gives the rest of the state's epoch in any case.

        Raises:
            ValueError: If the loader gives no such output, or ``each_iter`` is none of these.
            RuntimeError: While iterating: if another iteration has taken batches of the loader since.
        """
        return LoaderBatches(self.delivery, outputs=outputs, each_iter=each_iter)

    def as_jax(
        self, outputs: OutputNames = None, *, sharding: "Sharding | None" = None, each_iter: EachIter = "next"
    ) -> "JaxBatches":
        """Give the batches to JAX: `as_dataloader` with a `jax.Array` in place of each tensor.

        Texts, such as keys, stay lists of str. An array is not copied if its device is the one on which the loader
        decodes; the batch's memory lives as long as the array. Without ``jax_enable_x64`` integers have 32 bits, labels
        too.

        Args:
            outputs: As in `as_dataloader`. Leave texts such as ``"key"`` out of what ``jax.jit`` takes.
            sharding: How the devices of all processes share the first axis of the arrays, the samples:
                ``NamedSharding(mesh, PartitionSpec("data"))``. Each array then holds the batches of all ranks, rank 0's
                first. The last batch must be as large as all others: ``FILL`` or ``DROP``. ``None``: each process has
                arrays of its own, on the loader's GPU, else on JAX's default device.
            each_iter: As in `as_dataloader`.

        Raises:
            ImportError: If JAX is not installed.
            TypeError: If ``sharding`` is not a `jax.sharding.Sharding`.
            ValueError: If the sharding does not fit the loader's rank, batch size or last-batch policy, or splits
                another axis; if the loader decodes on a GPU that JAX does not know. While iterating: if an integer
                needs more bits than JAX has. Else as in `as_dataloader`.
        """
        from dali_pipes.integrations.jax import JaxBatches

        return JaxBatches(self.delivery, outputs=outputs, sharding=sharding, each_iter=each_iter)


def _explained(function: Callable[_Arguments, Loader]) -> Callable[_Arguments, Loader]:
    """Say what to do about an argument that the function does not take."""
    known = list(inspect.signature(function).parameters)

    @functools.wraps(function)
    def explained(*args: _Arguments.args, **named: _Arguments.kwargs) -> Loader:
        refuse_unknown("dali_pipes.loader", named, known, instead=_INSTEAD)
        return function(*args, **named)

    return explained


@_explained
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
    rank: int | Literal["late"] | None = None,
    world_size: int | None = None,
    mesh: "DeviceMesh | ProcessGroup | None" = None,
    last_batch_policy: LastBatchPolicyName | Literal["fill", "drop", "partial"] | LastBatchPolicy = "PARTIAL",
    device: str | torch.device = "auto",
    endpoint: str | None = None,
) -> Loader:
    """Open a loader over shards in buckets or directories.

    Args:
        shards: ``"ais://pets/shuffled-{000000..000003}.tar"``, ``"ais://pets/shuffled-"``, a glob, a directory or a
            list; `Shards`, to read through an ETL; or a `Mixture` of several data sets. A prefix, a directory or a glob
            stands for the shards that their manifest lists, whatever the store lists; ``"ais://pets/shuffled-@3"`` for
            version 3 of the data set, otherwise the newest is read. Shards without an index
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
        rank: Number of this process among those that share the order. If rank, ``world_size`` and ``mesh`` are
            ``None``, they come from Accelerate's mesh, else from `torch.distributed`, else from `jax.distributed`, else
            from the variables of torchrun, Slurm or MPI; else this is the only process. The first batch is refused if
            another rank is found by then.
            ``"late"``: the loader is opened, and its rank found, when its length, its first batch or anything else of
            it is asked for. This is for frameworks that start the process group after the program has made its loaders.
        world_size: Number of processes that share the order. Leave it out if you leave out the rank.
        mesh: The mesh or process group of data parallelism, in place of ``rank`` and ``world_size``: a `DeviceMesh` of
            one dimension, such as ``mesh["dp"]``, or a group. Processes that differ in the other dimensions of the mesh
            alone, by tensor, pipeline or context parallelism, get the same batches.
        last_batch_policy: ``"PARTIAL"`` gives the last batch short, ``"FILL"`` fills it with the epoch's first samples,
            which are not ``valid``, ``"DROP"`` leaves it out. Lower case and DALI's `LastBatchPolicy` serve as well.
        device: ``"cpu"``; ``"cuda:1"``: that CUDA device; ``"gpu"`` or ``"cuda"``: the current CUDA device or, if the
            process has not set one, the device with the number that the launcher gave this process on its host;
            ``"auto"``: as ``"gpu"``, or the CPU if there is no CUDA device. A `torch.device` serves as well.
        endpoint: AIStore's proxy, or several of one cluster with commas between them. ``None``: ``AIS_ENDPOINT``; if
            that is not set, an embedded node is started for ``ais://``, and buckets of clouds (``s3://``, ``gs://``,
            ``az://``) are read without AIStore. ``"direct"``: as if nothing were set.

    Raises:
        DecodeError: While iterating: if a sample is bad, or too many are.
        DataError: If the shards differ from their index, or a sample lacks a component that the graph takes; if the ETL
            returns other bytes than when it was indexed; if the tuning file is missing or broken.
        StateError: If ``state`` is not a state, or is of other shards or another order. Nothing has been staged then.
        StoreError: If a shard of the manifest (see `Select.allow_missing`), the store or the ETL is missing, also while
            iterating; a `NoEtlError` if the cluster cannot run ETLs.
        CacheError: If two windows do not fit the cache. The error says how many bytes they need.
        WorkerProcessError: If this is a DataLoader's worker process.
        ValueError: If ``DROP`` leaves an epoch without a batch. While iterating: if the rank is not the one that the
            process group or the launcher gives by then, more processes than can have the same rank, or the ranks read
            different orders.

    The first batch's shards are staged while the graph is checked: a loader that is refused for its graph may have
    staged them in vain.
    """
    # The names stand here and in LoaderArguments, nowhere else.
    return Loader(Delivery(LoaderArguments(**locals())))


_FACES = (
    "a loader gives lists of one dict, as DALI's iterators do, and takes their place: see loader.as_dali(); give "
    "loader.as_dataloader() to a trainer and to what takes a data loader, and DataLoader(loader.as_dataset(), "
    "batch_size=None, num_workers=0) to what takes that alone"
)
_OF_DATA_LOADERS = {"max_batch_size", "dataset", "sampler", "batch_sampler", "collate_fn", "num_workers", "drop_last"}


class _ListOfBatch(list[Any]):
    """A list of one dict, which says what to do if it is taken for the dict."""

    @classmethod
    def of(cls, batch: dict[str, Any]) -> "_ListOfBatch":
        return cls([batch])

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, str):
            raise TypeError(
                f"a loader gives lists of one dict, as DALI's iterators do: batch[0][{index!r}]; loader.as_dicts() "
                "gives the dicts"
            )
        return super().__getitem__(index)


# The attributes that `Loader` annotates.
_VALUES: dict[str, Callable[[Delivery], Any]] = {
    "epoch": lambda delivery: delivery.current.number,
    "num_samples": lambda delivery: delivery.current.num_samples,
    "classes": lambda delivery: dict(delivery.parts.classes),
    "num_batches_left": lambda delivery: delivery.current.num_batches_left,
    "position": lambda delivery: delivery.current.position,
    "num_valid": lambda delivery: delivery.num_valid,
    "substituted": lambda delivery: delivery.substituted,
    "num_substituted": lambda delivery: delivery.counts.substituted,
    "bad_samples": lambda delivery: list(delivery.parts.seen.seen.values()),
    "data_wait_s": lambda delivery: delivery.counts.shard_wait.seconds(),
    "is_open": lambda delivery: delivery.is_open,
    "parts": lambda delivery: delivery.parts,
}


def _description(delivery: Delivery) -> str:
    """Describe a loader on a few lines, along the data path; it may be closed, or not opened yet."""
    arguments = delivery.arguments
    batches = f"of {arguments.batch_size} samples, {arguments.last_batch_policy}"
    lines = {"order": f"seed {arguments.seed}, {arguments.shuffle}", "batches": batches}
    if not delivery.is_open:
        head = f"{arguments.shards}{', closed' if delivery.is_closed else ''}, not opened"
        lines["device"] = arguments.device
    else:
        parts, epoch = delivery.parts, delivery.current
        manifest, process = parts.inputs.manifest, parts.batching.process
        head = f"{parts.source}{', closed' if delivery.is_closed else ''}"
        lines = {
            "data set": f"manifest {manifest.digest[:12]}, version {manifest.version}, {manifest.num_samples} samples "
            f"in {manifest.num_shards} shards, {len(parts.inputs.selection.excluded)} left out",
            "rank": f"{process.rank} of {process.world_size}, by {process.source}",
            **lines,
            "epoch": f"{epoch.number}, {epoch.position} of {epoch.num_samples} samples delivered, "
            f"{delivery.num_batches_of()} batches",
            "outputs": ", ".join([*parts.decode.output_names, *delivery.added_outputs]),
            "device": parts.decode.torch_device,
        }
    named = [f"  {name:<8}  {printable(text)}" for name, text in lines.items()]
    return "\n".join([f"Loader of {printable(head)}", *named])
