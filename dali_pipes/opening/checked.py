"""Check a loader's arguments, as far as neither a rank nor the shards are needed."""

import contextlib
import dataclasses
import inspect
import re
from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import torch
from nvidia.dali.plugin.base_iterator import LastBatchPolicy

from dali_pipes.arguments import as_integer
from dali_pipes.data_set.find import Mixture
from dali_pipes.graph.definition import Graph
from dali_pipes.options import BadSamples, Cache, Decode, Outputs, Select, Shards, Shuffle
from dali_pipes.order.inputs import OrderInputs
from dali_pipes.order.plan import LAST_BATCH_POLICIES, LastBatchPolicyName
from dali_pipes.order.state import NO_VERSIONS, DataVersions, LoaderState
from dali_pipes.processes.ranks import Rank
from dali_pipes.reader.segments import Batching
from dali_pipes.store.urls import ShardUrls


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoaderArguments:
    """The arguments of `dali_pipes.loader`, checked and converted; its docstring explains them."""

    shards: Shards | Mixture
    graph: Graph
    batch_size: int
    order: OrderInputs
    """Without the weights of a mixture, which are known when its data sets are found."""
    select: Select
    bad_samples: BadSamples
    cache: Cache
    decode: Decode
    outputs: Outputs
    state: LoaderState | None
    last_batch_policy: LastBatchPolicyName
    device: str
    endpoint: str | None

    def batching(self, process: Rank) -> Batching:
        """Deal batches to this rank.

        Raises:
            ValueError: If the samples of a step cannot be taken from all slices alike.
        """
        batch_size, slices = self.batch_size, self.order.num_slices
        if batch_size * process.world_size % slices:
            raise ValueError(
                f"slices must divide batch_size * world_size, got {slices} and {batch_size} * {process.world_size}"
            )
        return Batching(batch_size=batch_size, process=process, last_batch_policy=self.last_batch_policy)


def check_arguments(
    *,
    shards: ShardUrls | Shards | Mixture,
    graph: Graph,
    batch_size: int,
    seed: int,
    shuffle: bool | Shuffle,
    select: Select,
    bad_samples: BadSamples,
    cache: Cache,
    decode: Decode,
    outputs: Outputs,
    state: Mapping[str, Any] | None,
    last_batch_policy: str | LastBatchPolicy,
    device: str | torch.device,
    endpoint: str | None,
) -> LoaderArguments:
    """Check the arguments of `dali_pipes.loader`.

    Raises:
        TypeError, ValueError: Names the first wrong argument.
        StateError: If ``state`` is not a state, or is of another order.
    """
    _check_types(graph, select=select, bad_samples=bad_samples, cache=cache, decode=decode, outputs=outputs)
    policy = _checked_policy(last_batch_policy)
    batch_size = as_integer("batch_size", batch_size)
    if batch_size < 1:
        raise ValueError(f"batch_size must be positive, got {batch_size}")
    order = _order_inputs(seed, shuffle, select)
    return LoaderArguments(
        shards=shards if isinstance(shards, Shards | Mixture) else Shards(shards),
        graph=graph,
        batch_size=batch_size,
        order=order,
        select=select,
        bad_samples=bad_samples,
        cache=cache,
        decode=decode,
        outputs=outputs,
        state=_early_checked(state, order),
        last_batch_policy=policy,
        device=_device_name(device),
        endpoint=endpoint,
    )


def _check_types(graph: object, **groups: object) -> None:
    expected = "graph must be a function graph(components, random), such as dali_pipes.segmentation()"
    if not callable(graph):
        raise TypeError(f"{expected}, got {graph!r}")
    with contextlib.suppress(ValueError):  # a function of C may have no signature
        signature = inspect.signature(graph)
        if signature.parameters and all(one.kind == one.KEYWORD_ONLY for one in signature.parameters.values()):
            name = getattr(graph, "__name__", "graph")
            raise TypeError(f"{expected}, got the function '{name}', which makes a graph; call it: {name}()")
        try:
            signature.bind(None, None)
        except TypeError as exc:
            raise TypeError(f"{expected}, got {graph!r}, which does not take two arguments") from exc
    for (name, given), group in zip(groups.items(), (Select, BadSamples, Cache, Decode, Outputs), strict=True):
        if not isinstance(given, group):
            raise TypeError(f"{name} must be a dali_pipes.{group.__name__}, got {given!r}")


def _checked_policy(policy: str | LastBatchPolicy) -> LastBatchPolicyName:
    name = policy.name if isinstance(policy, LastBatchPolicy) else policy
    if isinstance(name, str):
        name = name.upper()
    if name not in LAST_BATCH_POLICIES:
        raise ValueError(f"last_batch_policy must be one of {', '.join(LAST_BATCH_POLICIES)}, got {policy!r}")
    return cast("LastBatchPolicyName", name)


def _order_inputs(seed: int, shuffle: bool | Shuffle, select: Select) -> OrderInputs:
    if not isinstance(shuffle, Shuffle):
        if not isinstance(shuffle, bool | np.bool_):
            raise TypeError(f"shuffle must be a bool or a dali_pipes.Shuffle, got {shuffle!r}")
        shuffle = Shuffle(enabled=bool(shuffle))
    return OrderInputs(
        seed=as_integer("seed", seed),
        shuffle=shuffle.enabled,
        shuffle_window=shuffle.window_bytes,
        ramp_up=shuffle.ramp_up,
        num_slices=shuffle.slices,
        epoch_samples=select.epoch_samples,
        shapes=select.buckets,
    )


def _device_name(device: str | torch.device) -> str:
    name = str(device) if isinstance(device, torch.device) else device
    if not isinstance(name, str) or not re.fullmatch(r"auto|cpu|gpu|cuda(:\d+)?", name):
        raise ValueError(f"device must be one of auto, cpu, gpu, cuda, cuda:N, got {device!r}")
    return name


def _early_checked(state: Mapping[str, Any] | None, order: OrderInputs) -> LoaderState | None:
    """Read a state, and refuse it if its order is another, as far as that is known before the shards are found."""
    if state is None:
        return None
    resumed = LoaderState.from_dict(state)
    # A mixture's weights are known when its data sets are found: a single one has none.
    check_state(resumed, dataclasses.replace(order, weights=resumed.order.weights), manifest=resumed.manifest)
    return resumed


def check_state(state: LoaderState, order: OrderInputs, *, manifest: str, data: DataVersions = NO_VERSIONS) -> None:
    """Refuse a state before the selection and the number of samples are known."""
    state.check(
        manifest=manifest,
        selection=state.selection,
        order=order,
        num_samples=state.delivered,
        version=state.version,
        data=data,
        group_size=state.group_size,
    )
