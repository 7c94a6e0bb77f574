"""The order of a job, epoch after epoch, and a position in it, from which any machine resumes at the exact next sample.

The order depends on the manifest and the order's inputs only, so a state keeps neither batches nor shards. It counts
the samples that were delivered, over all ranks. Samples that were decoded ahead are decoded again.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, NamedTuple

from dali_pipes.arguments import as_integer
from dali_pipes.arrays import Int64s
from dali_pipes.errors import PipesError
from dali_pipes.formats.manifest import Manifest
from dali_pipes.order.inputs import Buckets, OrderInputs
from dali_pipes.order.passes import reserved_bytes
from dali_pipes.order.plan import Batching, Plan
from dali_pipes.order.selection import Selection
from dali_pipes.order.shaped import BucketGrouping, ShapedPlan

VERSION = 6
_KIND = "dali-pipes loader state"

# The inputs of the order that every state has, and the loader's options for them.
_ORDER_NAMES = [one.name for one in fields(OrderInputs) if one.name != "shapes"]
_OPTIONS = {
    "shuffle_window": " (shuffle=dali_pipes.Shuffle(window_bytes=...))",
    "num_slices": " (shuffle=dali_pipes.Shuffle(slices=...))",
    "epoch_samples": " (select=dali_pipes.Select(epoch_samples=...))",
    "weights": " (dali_pipes.Mixture(..., weights=...))",
    "shapes": " (select=dali_pipes.Select(buckets=...))",
}
NUM_PLANS_KEPT = 3


class StateError(PipesError):
    """A state belongs to another order, or is not a loader's state."""


class DataVersions(NamedTuple):
    """The versions of the data sets that a loader reads, in order, and their URLs, without a version, for errors."""

    numbers: Sequence[int]
    urls: Sequence[str]


@dataclass(frozen=True, kw_only=True)
class LoaderState:
    """A position in an order.

    Args:
        manifest: The manifest's digest.
        selection: The digest of the excluded samples, and of those that come more than once.
        order: The other inputs of the order, with the epoch.
        delivered: Samples of this epoch that were delivered to all ranks together.
        group_size: The largest number of samples in a group, if the order has groups: see
            `dali_pipes.order.shaped.ShapedPlan`.
        data_versions: The versions of the data sets, in order; empty if all are 1.
    """

    manifest: str
    selection: str
    order: OrderInputs
    delivered: int
    group_size: int | None = None
    data_versions: tuple[int, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON or `torch.save`.

        >>> LoaderState(manifest="ab", selection="cd", order=OrderInputs(seed=7, epoch=2), delivered=128).to_dict()
        ... # doctest: +NORMALIZE_WHITESPACE
        {'kind': 'dali-pipes loader state', 'version': 6, 'manifest': 'ab', 'selection': 'cd', 'seed': 7, 'epoch': 2,
         'shuffle': True, 'shuffle_window': 'all', 'num_slices': 1, 'epoch_samples': None, 'weights': None,
         'delivered': 128}
        """
        named = {"kind": _KIND, "version": VERSION, "manifest": self.manifest, "selection": self.selection}
        order: dict[str, Any] = {name: getattr(self.order, name) for name in _ORDER_NAMES}
        if self.order.weights is not None:
            order["weights"] = list(self.order.weights)
        if self.order.shapes is not None:
            order |= {"shapes": {"kind": "buckets", **asdict(self.order.shapes)}, "group_size": self.group_size}
        versions = {"data_versions": list(self.data_versions)} if self.data_versions else {}
        return {**named, **order, "delivered": self.delivered, **versions}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "LoaderState":
        """Return the state that `to_dict` was called for.

        Raises:
            StateError: If the values are not a state, are of another version, or are impossible.
        """
        if not isinstance(values, Mapping) or values.get("kind") != _KIND:
            is_dict = isinstance(values, Mapping)
            shown = f"a dict with the keys {list(values)[:5]}" if is_dict else repr(values)[:60]
            raise StateError(f"expected what state_dict() gave, got {shown}")
        if values.get("version") != VERSION:
            raise StateError(
                f"the state is of version {values.get('version')}, this dali-pipes reads version {VERSION}; continue "
                "with the dali-pipes that wrote it, or start the epoch anew"
            )
        try:
            inputs = {name: values[name] for name in _ORDER_NAMES}
            if inputs["weights"] is not None:
                inputs["weights"] = tuple(float(weight) for weight in inputs["weights"])
            if "shapes" in values:
                named = dict(values["shapes"])
                named.pop("kind", None)
                inputs["shapes"] = Buckets(**named)
            if as_integer("delivered", values["delivered"]) < 0:
                raise ValueError(f"delivered must not be negative, got {values['delivered']}")
            return cls(
                manifest=str(values["manifest"]),
                selection=str(values["selection"]),
                order=OrderInputs(**inputs),
                delivered=values["delivered"],
                group_size=as_integer("group_size", values["group_size"]) if "shapes" in values else None,
                data_versions=tuple([as_integer("data_versions", one) for one in values.get("data_versions", ())]),
            )
        except KeyError as exc:
            raise StateError(f"the state has no {exc}: it is not whole") from exc
        except (TypeError, ValueError, ArithmeticError) as exc:
            raise StateError(f"the state has impossible values: {exc}") from exc

    def check_order(self, order: OrderInputs) -> None:
        """Raise a `StateError` if an input of the order, except for the epoch, differs."""
        for name in (one.name for one in fields(OrderInputs) if one.name != "epoch"):
            theirs, ours = getattr(self.order, name), getattr(order, name)
            if theirs != ours:
                raise StateError(
                    f"the state has {name}={theirs!r}, this loader {name}={ours!r}; pass the state's"
                    f"{_OPTIONS.get(name, '')}"
                )


@dataclass(frozen=True, kw_only=True)
class PlanInputs:
    """The inputs of every epoch's plan."""

    manifest: Manifest
    set_shards: Sequence[int]
    """The number of shards of each data set; the data sets follow each other in the manifest."""
    set_names: Sequence[str]
    """The names of the data sets, for errors; one empty name if there is only one."""
    versions: DataVersions
    selection: Selection
    order: OrderInputs
    """Its epoch is the one that the loader starts with."""
    grouping: BucketGrouping | None = None
    """The bucket of each sample, if there are buckets."""
    _plans: dict[int, ShapedPlan] = field(default_factory=dict, init=False, repr=False, compare=False)

    def plan(self, epoch: int) -> Plan:
        """Plan one epoch."""
        if epoch in self._plans:
            return self._plans[epoch]
        inputs: dict[str, Any] = {
            "shard_bytes": self.manifest.shard_bytes,
            "shard_samples": self.manifest.samples,
            "order": replace(self.order, epoch=epoch),
            "set_shards": self.set_shards,
            "selection": self.selection,
            "set_names": self.set_names,
        }
        if self.grouping is None:
            return Plan(**inputs)
        # Its steps are known when all samples are grouped, so it is made once. Two are in use: this epoch's, the next.
        while len(self._plans) >= NUM_PLANS_KEPT:
            self._plans.pop(next(iter(self._plans)))
        self._plans[epoch] = ShapedPlan(grouping=self.grouping, **inputs)
        return self._plans[epoch]

    def reserved_bytes(self, extent_bytes: Int64s, batching: Batching) -> int:
        """Compute the bytes that a loader must be able to hold in any epoch; ``extent_bytes``: int64 [shards]."""
        return reserved_bytes(
            extent_bytes,
            self.manifest.shard_bytes,
            self.manifest.samples,
            order=self.order,
            global_batch_size=batching.global_batch_size,
            num_slices_read=len(batching.slices_read(self.order.num_slices)),
            set_shards=self.set_shards,
            selection=self.selection,
        )

    @property
    def group(self) -> int:
        """A number that is the same in all loaders that read the same shards in the same order: the ranks of a job."""
        inputs = (self.manifest.digest, tuple(self.set_shards), self.selection.digest, self.order)
        return int.from_bytes(hashlib.blake2b(repr(inputs).encode(), digest_size=8).digest(), "little")

    def compared(self, batching: Batching, *, epoch: int, start: int) -> dict[str, str]:
        """Name the values that must be the same on every rank, for the comparison before the first batch."""
        values = {
            "the manifest's digest": self.manifest.digest[:16],
            "the position in the epoch": str(start),
            "batch_size": str(batching.batch_size),
            "last_batch_policy": batching.last_batch_policy,
            "the selection of samples (dali_pipes.Select)": self.selection.digest[:16],
        }
        order = replace(self.order, epoch=epoch)
        return values | {one.name: str(getattr(order, one.name)) for one in fields(order)}

    def state(self, plan: Plan, delivered: int) -> LoaderState:
        """Make the state of a loader that has delivered this number of samples of an epoch's plan."""
        versions = tuple(self.versions.numbers)
        return LoaderState(
            manifest=self.manifest.digest,
            selection=self.selection.digest,
            order=plan.order,
            delivered=delivered,
            data_versions=versions if max(versions, default=1) > 1 else (),
            group_size=None if self.grouping is None else self.grouping.group_size,
        )

    def check(self, state: LoaderState) -> None:
        """Refuse a state of other shards or another order.

        Raises:
            StateError: Says what differs, and what to do.
        """
        ours = self.state(self.plan(state.order.epoch), state.delivered)
        if state.manifest != ours.manifest:
            theirs = state.data_versions or (1,) * len(self.versions.numbers)
            for number, wanted, url in zip(theirs, *self.versions, strict=False):
                if number != wanted:
                    raise StateError(
                        f"the state is of version {number} of '{url}', this loader reads version {wanted}; open "
                        f"'{url}@{number}' to go on at the exact next sample, or begin an epoch of version {wanted} "
                        "without the state (a state of another data set fits no version)"
                    )
            raise StateError(
                f"the state is of other shards: its manifest is {state.manifest[:12]}..., this loader's "
                f"{ours.manifest[:12]}...; name the shards that the job had, in the same order, as they were indexed "
                "then"
            )
        if state.selection != ours.selection:
            raise StateError(
                f"the state is of another selection of samples: its digest is {state.selection[:12]}..., this "
                f"loader's {ours.selection[:12]}...; pass the same "
                "select=dali_pipes.Select(exclude=, where=, missing=, oversample=)"
            )
        state.check_order(self.order)
        plan, delivered = self.plan(state.order.epoch), state.delivered
        if delivered > plan.num_samples:
            raise StateError(f"the state has {delivered} samples delivered, an epoch has {plan.num_samples}")
        if state.group_size != ours.group_size and 0 < delivered < plan.num_samples:
            raise StateError(
                f"the state is of epoch {state.order.epoch} with batch_size * world_size {state.group_size}, this "
                f"loader has {ours.group_size}, which groups the samples in other batches; pass a batch_size that "
                f"gives {state.group_size}, or start an epoch anew: loader.set_epoch(N)"
            )
        if delivered % self.order.num_slices or plan.last_edge(delivered) != delivered:
            raise StateError(
                f"the state has {delivered} samples delivered, and no step of epoch {state.order.epoch} ends there; it "
                "is not whole"
            )
