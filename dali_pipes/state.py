"""Where a job stands in its order, as a few plain values: enough to go on at the exact next sample, elsewhere too.

The order is a function of the manifest and of the order's inputs, so nothing else is kept: neither batches nor shards.
What is counted is what was delivered, over all ranks; what was decoded ahead is decoded again.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from dali_pipes.plan import OrderInputs
from prep.errors import PipesError

__all__ = ["LoaderState", "StateError"]

VERSION = 1
_KIND = "dali-pipes loader state"


class StateError(PipesError):
    """A state belongs to another order, or is none."""


@dataclass(frozen=True, kw_only=True)
class LoaderState:
    """A position in an order.

    Args:
        manifest: The manifest's digest.
        excluded: The digest of the keys that are left out.
        order: All that the order depends on besides, with the epoch.
        delivered: Samples of this epoch that all ranks together were given.
    """

    manifest: str
    excluded: str
    order: OrderInputs
    delivered: int

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON or `torch.save`.

        >>> LoaderState(manifest="ab", excluded="cd", order=OrderInputs(seed=7, epoch=2), delivered=128).to_dict()
        ... # doctest: +NORMALIZE_WHITESPACE
        {'kind': 'dali-pipes loader state', 'version': 1, 'manifest': 'ab', 'excluded': 'cd', 'seed': 7, 'epoch': 2,
         'shuffle': True, 'shuffle_window': 'all', 'ramp_up': False, 'num_slices': 1, 'delivered': 128}
        """
        order = self.order
        return {
            "kind": _KIND,
            "version": VERSION,
            "manifest": self.manifest,
            "excluded": self.excluded,
            "seed": order.seed,
            "epoch": order.epoch,
            "shuffle": order.shuffle,
            "shuffle_window": order.shuffle_window,
            "ramp_up": order.ramp_up,
            "num_slices": order.num_slices,
            "delivered": self.delivered,
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "LoaderState":
        """What `to_dict` gave.

        Raises:
            StateError: If it is no state, one of another version, or one with values that cannot be.
        """
        if not isinstance(values, Mapping) or values.get("kind") != _KIND:
            raise StateError(f"expected what state_dict() gave, got {_shown(values)}")
        if values.get("version") != VERSION:
            raise StateError(
                f"the state is of version {values.get('version')}, this dali-pipes reads version {VERSION}; go on with "
                "the version that wrote it, or start the epoch anew"
            )
        expected: dict[str, tuple[type, ...]] = {
            "manifest": (str,),
            "excluded": (str,),
            "seed": (int,),
            "epoch": (int,),
            "shuffle": (bool,),
            "shuffle_window": (int, str),
            "ramp_up": (bool,),
            "num_slices": (int,),
            "delivered": (int,),
        }
        for name, types in expected.items():
            value = values.get(name)
            if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
                raise StateError(f"the state's '{name}' must be {types[0].__name__}, got {value!r}")
        if values["delivered"] < 0:
            raise StateError(f"the state's 'delivered' must not be negative, got {values['delivered']}")
        window: int | Literal["all"] = values["shuffle_window"]
        try:
            order = OrderInputs(
                seed=values["seed"],
                epoch=values["epoch"],
                shuffle=values["shuffle"],
                shuffle_window=window,
                ramp_up=values["ramp_up"],
                num_slices=values["num_slices"],
            )
        except ValueError as exc:
            raise StateError(f"the state cannot be: {exc}") from exc
        return cls(manifest=values["manifest"], excluded=values["excluded"], order=order, delivered=values["delivered"])

    def check(self, *, manifest: str, excluded: str, order: OrderInputs, num_samples: int) -> None:
        """Refuse to go on in another order than the state's. The epoch may be any.

        Raises:
            StateError: Names what differs, and what to do.
        """
        if self.manifest != manifest:
            raise StateError(
                f"the state is of other shards: its manifest is {self.manifest[:12]}..., this loader's "
                f"{manifest[:12]}...; name the shards that the job had, in the same order, as they were indexed then"
            )
        if self.excluded != excluded:
            raise StateError(
                f"the state is of another set of excluded keys: its digest is {self.excluded[:12]}..., this loader's "
                f"{excluded[:12]}...; pass the same exclude="
            )
        for name in ("seed", "shuffle", "shuffle_window", "ramp_up", "num_slices"):
            theirs, ours = getattr(self.order, name), getattr(order, name)
            if theirs != ours:
                raise StateError(f"the state has {name}={theirs!r}, this loader {name}={ours!r}; pass the state's")
        if self.delivered > num_samples:
            raise StateError(f"the state has {self.delivered} samples delivered, an epoch has {num_samples}")
        if self.delivered % order.num_slices:
            raise StateError(
                f"the state has {self.delivered} samples delivered, expected a multiple of "
                f"num_slices={order.num_slices}"
            )


def _shown(values: object) -> str:
    return f"a dict of {', '.join(map(str, list(values)[:5]))}" if isinstance(values, Mapping) else repr(values)[:60]
