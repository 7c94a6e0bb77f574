"""The position of a job in its order, as a few plain values, from which any machine resumes at the exact next sample.

The order depends on the manifest and the order's inputs only, so the state keeps neither batches nor shards. It counts
the samples that were delivered, over all ranks. Samples that were decoded ahead are decoded again.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any, NamedTuple

from dali_pipes.errors import PipesError
from dali_pipes.order.inputs import OrderInputs
from dali_pipes.order.shapes import shapes_from_dict

VERSION = 5
_KIND = "dali-pipes loader state"

_ORDER_TYPES: dict[str, tuple[type, ...]] = {
    "seed": (int,),
    "epoch": (int,),
    "shuffle": (bool,),
    "shuffle_window": (int, str),
    "ramp_up": (bool,),
    "num_slices": (int,),
    "epoch_samples": (int, NoneType),
    "weights": (list, tuple, NoneType),
}
# The loader's options for these inputs of the order.
_OPTIONS = {
    "shuffle_window": "shuffle=dali_pipes.Shuffle(window_bytes=...)",
    "ramp_up": "shuffle=dali_pipes.Shuffle(ramp_up=...)",
    "num_slices": "shuffle=dali_pipes.Shuffle(slices=...)",
    "epoch_samples": "select=dali_pipes.Select(epoch_samples=...)",
    "weights": "dali_pipes.Mixture(..., weights=...)",
    "shapes": "select=dali_pipes.Select(buckets=...)",
}


class DataVersions(NamedTuple):
    """The versions of the data sets that a loader reads, in order, and their URLs, without a version, for errors."""

    numbers: Sequence[int]
    urls: Sequence[str]

    @property
    def stored(self) -> tuple[int, ...]:
        """What a state keeps of them."""
        return tuple(self.numbers) if max(self.numbers, default=1) > 1 else ()


NO_VERSIONS = DataVersions((), ())


class StateError(PipesError):
    """A state belongs to another order, or is not a loader's state."""


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

    def _check_data_versions(self, data: DataVersions) -> None:
        theirs = self.data_versions or (1,) * len(data.numbers)
        if len(theirs) != len(data.numbers):
            return  # other data sets
        for own, number, url in zip(theirs, data.numbers, data.urls, strict=True):
            if own != number:
                raise StateError(
                    f"the state is of version {own} of '{url}', this loader reads version {number}; "
                    f"open '{url}@{own}' to go on at the exact next sample, or begin an epoch of version {number} "
                    "without the state"
                )

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON or `torch.save`.

        >>> LoaderState(manifest="ab", selection="cd", order=OrderInputs(seed=7, epoch=2), delivered=128).to_dict()
        ... # doctest: +NORMALIZE_WHITESPACE
        {'kind': 'dali-pipes loader state', 'version': 5, 'manifest': 'ab', 'selection': 'cd', 'seed': 7, 'epoch': 2,
         'shuffle': True, 'shuffle_window': 'all', 'ramp_up': False, 'num_slices': 1, 'epoch_samples': None,
         'weights': None, 'delivered': 128}
        """
        order: dict[str, Any] = {name: getattr(self.order, name) for name in _ORDER_TYPES}
        if self.order.weights is not None:
            order["weights"] = list(self.order.weights)
        named = {"kind": _KIND, "version": VERSION, "manifest": self.manifest, "selection": self.selection}
        if self.order.shapes is not None:
            order |= {"shapes": self.order.shapes.to_dict(), "group_size": self.group_size}
        versions = {"data_versions": list(self.data_versions)} if self.data_versions else {}
        return {**named, **order, "delivered": self.delivered, **versions}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "LoaderState":
        """Return the state that `to_dict` was called for.

        Raises:
            StateError: If the values are not a state, are of another version, or are impossible.
        """
        if not isinstance(values, Mapping) or values.get("kind") != _KIND:
            raise StateError(f"expected what state_dict() gave, got {_shown(values)}")
        if values.get("version") != VERSION:
            raise StateError(
                f"the state is of version {values.get('version')}, this dali-pipes reads version {VERSION}; continue "
                "with the dali-pipes that wrote it, or start the epoch anew"
            )
        expected = {"manifest": (str,), "selection": (str,), **_ORDER_TYPES, "delivered": (int,)}
        is_shaped = "shapes" in values
        if is_shaped:
            expected |= {"shapes": (dict,), "group_size": (int,)}
        for name, types in expected.items():
            if name not in values:
                raise StateError(f"the state has no '{name}': it is not whole")
            value = values[name]
            if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
                raise StateError(f"the state's '{name}' must be {types[0].__name__}, got {value!r}")
        if values["delivered"] < 0:
            raise StateError(f"the state's 'delivered' must not be negative, got {values['delivered']}")
        inputs: dict[str, Any] = {name: values[name] for name in _ORDER_TYPES}
        try:
            if inputs["weights"] is not None:
                inputs["weights"] = tuple(float(weight) for weight in inputs["weights"])
            if is_shaped:
                inputs["shapes"] = shapes_from_dict(values["shapes"])
            order = OrderInputs(**inputs)
        except (TypeError, ValueError) as exc:
            raise StateError(f"the state has impossible values: {exc}") from exc
        names = ["manifest", "selection", "delivered", *(["group_size"] if is_shaped else [])]
        named = {name: values[name] for name in names}
        return cls(**named, order=order, data_versions=_data_versions(values))

    def check(
        self,
        *,
        manifest: str,
        selection: str,
        order: OrderInputs,
        num_samples: int,
        data: DataVersions = NO_VERSIONS,
        group_size: int | None = None,
    ) -> None:
        """Raise a `StateError` if anything but the epoch differs; its text says what differs, and what to do."""
        if self.manifest != manifest:
            self._check_data_versions(data)
            raise StateError(
                f"the state is of other shards: its manifest is {self.manifest[:12]}..., this loader's "
                f"{manifest[:12]}...; name the shards that the job had, in the same order, as they were indexed then"
            )
        if self.selection != selection:
            raise StateError(
                f"the state is of another selection of samples: its digest is {self.selection[:12]}..., this loader's "
                f"{selection[:12]}...; pass the same select=dali_pipes.Select(exclude=, where=, missing=, oversample=)"
            )
        for name in (name for name in [*_ORDER_TYPES, "shapes"] if name != "epoch"):
            theirs, ours = getattr(self.order, name), getattr(order, name)
            if theirs != ours:
                advice = f"pass the state's{f' ({_OPTIONS[name]})' if name in _OPTIONS else ''}"
                raise StateError(f"the state has {name}={theirs!r}, this loader {name}={ours!r}; {advice}")
        if self.delivered > num_samples:
            raise StateError(f"the state has {self.delivered} samples delivered, an epoch has {num_samples}")
        is_inside = 0 < self.delivered < num_samples
        if self.group_size != group_size and is_inside:
            raise StateError(
                f"the state is of epoch {self.order.epoch} with batch_size * world_size {self.group_size}, this loader "
                f"has {group_size}, which groups the samples in other batches; pass a batch_size that gives "
                f"{self.group_size}, or start an epoch anew: loader.set_epoch(N)"
            )
        if self.delivered % order.num_slices:
            raise StateError(
                f"the state has {self.delivered} samples delivered, expected a multiple of "
                f"num_slices={order.num_slices}"
            )


def _data_versions(values: Mapping[str, Any]) -> tuple[int, ...]:
    """The versions of the data sets in a state's values; states of data sets that never changed have none."""
    found = values.get("data_versions", [])
    if not isinstance(found, list | tuple) or any(type(number) is not int or number < 1 for number in found):
        raise StateError(f"the state's 'data_versions' must be whole numbers from 1, got {_shown(found)}")
    return tuple(found)


def _shown(values: object) -> str:
    return f"a dict with the keys {list(values)[:5]}" if isinstance(values, Mapping) else repr(values)[:60]
