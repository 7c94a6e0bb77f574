"""What an order depends on beside the manifest and the selection: a seed, an epoch and a few choices, checked."""

import math
from dataclasses import dataclass
from typing import Literal

__all__ = ["OrderInputs"]


@dataclass(frozen=True, kw_only=True)
class OrderInputs:
    """All that the order depends on beside the manifest and the selection."""

    seed: int = 0
    epoch: int = 0
    shuffle: bool = True
    """``False``: the manifest's order; the seed and the windows are then without effect."""
    shuffle_window: int | Literal["all"] = "all"
    """Bytes of shards that are shuffled together; ``"all"``: the whole slice, an exact global shuffle. With several
    data sets it is each one's."""
    ramp_up: bool = False
    """Start with windows of 1, 2, 4, ... shards, so that the first batch waits for one shard only."""
    num_slices: int = 1
    """Nodes that each stage a share of the shards; each step takes as many samples from every slice."""
    epoch_samples: int | None = None
    """Samples of an epoch, over all ranks: the next epoch goes on where this one stopped, pass after pass. ``None``: an
    epoch is a pass."""
    weights: tuple[float, ...] | None = None
    """Each data set's share of an epoch, in proportion; only with several. ``None``: in proportion to their samples."""

    def __post_init__(self) -> None:
        if self.epoch < 0:
            raise ValueError(f"epoch must not be negative, got {self.epoch}")
        if self.num_slices < 1:
            raise ValueError(f"num_slices must be positive, got {self.num_slices}")
        if self.shuffle_window != "all" and not (isinstance(self.shuffle_window, int) and self.shuffle_window > 0):
            raise ValueError(f"shuffle_window must be 'all' or a positive number of bytes, got {self.shuffle_window!r}")
        if self.epoch_samples is not None:
            if self.epoch_samples < 1:
                raise ValueError(f"epoch_samples must be positive, got {self.epoch_samples}")
            if self.epoch_samples % self.num_slices:
                raise ValueError(
                    f"epoch_samples must be a multiple of num_slices, got {self.epoch_samples} and {self.num_slices}; "
                    f"pass {-(-self.epoch_samples // self.num_slices) * self.num_slices}"
                )
        if self.weights is not None and not (
            isinstance(self.weights, tuple) and all(math.isfinite(weight) and weight > 0 for weight in self.weights)
        ):
            raise ValueError(f"weights must be a tuple of positive numbers, got {self.weights!r}")
