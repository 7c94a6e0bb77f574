"""The arguments of a loader as one object, checked as far as neither a rank nor the shards are needed."""

import contextlib
import dataclasses
import functools
import inspect
import re
from collections.abc import Callable
from typing import Any, Literal, cast

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
from dali_pipes.reader.feed import Batching


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoaderArguments:
    """The arguments of `dali_pipes.loader`, whose docstring explains them.

    They are given as users write them, and checked and converted when the object is made: the types below are the ones
    that are kept.

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
    last_batch_policy: LastBatchPolicyName
    device: str
    endpoint: str | None

    def __post_init__(self) -> None:
        _check_graph(self.graph)
        for field, group in _GROUPS.items():
            if not isinstance(given := getattr(self, field), group):
                raise TypeError(f"{field} must be a dali_pipes.{group.__name__}, got {given!r}")
        convert: dict[str, Callable[[Any], Any]] = {
            "shards": lambda shards: shards if isinstance(shards, Shards | Mixture) else Shards(shards),
            "last_batch_policy": _policy_name,
            "batch_size": functools.partial(as_integer, "batch_size"),
            "seed": functools.partial(as_integer, "seed"),
            "shuffle": _as_shuffle,
            "device": _device_name,
            "state": lambda state: None if state is None else LoaderState.from_dict(state),
        }
        for field, converted in convert.items():
            object.__setattr__(self, field, converted(getattr(self, field)))
        if self.batch_size < 1:
            raise ValueError(f"batch_size must be positive, got {self.batch_size}")
        if self.state is not None:
            # A mixture's weights are known when its data sets are found: a single data set has none.
            weights = self.state.order.weights
            self.check_state(dataclasses.replace(self.order, weights=weights), manifest=self.state.manifest)
        if isinstance(self.rank, str) and self.rank != "late":
            raise ValueError(f"rank must be an integer, 'late' or None, got {self.rank!r}")
        if self.rank == "late" and self.world_size is not None:
            raise ValueError(
                f"rank='late' finds the world size, too; leave world_size out, got world_size={self.world_size!r}"
            )

    @functools.cached_property
    def order(self) -> OrderInputs:
        """The inputs of the order, without the weights of a mixture: these are known when its data sets are found."""
        return OrderInputs(
            seed=self.seed,
            shuffle=self.shuffle.enabled,
            shuffle_window=self.shuffle.window_bytes,
            ramp_up=self.shuffle.ramp_up,
            num_slices=self.shuffle.slices,
            epoch_samples=self.select.epoch_samples,
            shapes=self.select.buckets,
        )

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

    def check_state(self, order: OrderInputs, *, manifest: str, data: DataVersions = NO_VERSIONS) -> None:
        """Refuse a state of another order before the selection and the number of samples are known."""
        if (state := self.state) is not None:
            state.check(
                manifest=manifest,
                selection=state.selection,
                order=order,
                num_samples=state.delivered,
                data=data,
                group_size=state.group_size,
            )


_GROUPS = {"select": Select, "bad_samples": BadSamples, "cache": Cache, "decode": Decode, "outputs": Outputs}


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
        except TypeError as exc:
            raise TypeError(f"{expected}, got {graph!r}, which does not take two arguments") from exc


def _policy_name(policy: object) -> LastBatchPolicyName:
    name = policy.name if isinstance(policy, LastBatchPolicy) else policy
    if isinstance(name, str):
        name = name.upper()
    if name not in LAST_BATCH_POLICIES:
        raise ValueError(f"last_batch_policy must be one of {', '.join(LAST_BATCH_POLICIES)}, got {policy!r}")
    return cast("LastBatchPolicyName", name)


def _as_shuffle(shuffle: object) -> Shuffle:
    if isinstance(shuffle, Shuffle):
        return shuffle
    if not isinstance(shuffle, bool | np.bool_):
        raise TypeError(f"shuffle must be a bool or a dali_pipes.Shuffle, got {shuffle!r}")
    return Shuffle(enabled=bool(shuffle))


def _device_name(device: object) -> str:
    name = str(device) if isinstance(device, torch.device) else device
    if not isinstance(name, str) or not re.fullmatch(r"auto|cpu|gpu|cuda(:\d+)?", name):
        raise ValueError(f"device must be one of auto, cpu, gpu, cuda, cuda:N, got {device!r}")
    return name
