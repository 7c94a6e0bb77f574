"""Open a loader: `dali_pipes.loader`. Beside it are its `arguments`, and the `parts` that they name."""

from collections.abc import Mapping
from typing import Any, Literal

import torch
from nvidia.dali.plugin.base_iterator import LastBatchPolicy

from dali_pipes.data_set.find import Mixture
from dali_pipes.delivery import Delivery
from dali_pipes.graph.definition import Graph
from dali_pipes.iterator import Loader
from dali_pipes.opening.arguments import LoaderArguments
from dali_pipes.options import BadSamples, Cache, Decode, Outputs, Select, Shards, Shuffle
from dali_pipes.order.plan import LastBatchPolicyName
from dali_pipes.store.urls import ShardUrls


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
        rank: Number of this process among those that share the order. If rank and ``world_size`` are ``None``, they
            come from `torch.distributed`, else from `jax.distributed`, else from the variables of torchrun, Slurm or
            MPI; else this is the only process. The first batch is refused if another rank is found by then.
            ``"late"``: the loader is opened, and its rank found, when its length, its first batch or anything else of
            it is asked for. This is for frameworks that start the process group after the program has made its loaders.
        world_size: Number of processes that share the order. Leave it out if you leave out the rank.
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
        CacheError: If two windows do not fit the cache; says how many bytes are needed.
        WorkerProcessError: If this is a DataLoader's worker process.
        ValueError: If ``DROP`` leaves an epoch without a batch. While iterating: if the rank is not the one that the
            process group or the launcher gives by then, two processes have the same rank, or the ranks read different
            orders.

    The first batch's shards are staged while the graph is checked: a loader that is refused for its graph may have
    staged them in vain.
    """
    # The names stand here and in LoaderArguments, nowhere else.
    return Loader(Delivery(LoaderArguments(**locals())))
