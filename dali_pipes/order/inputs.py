"""The checked inputs of an order besides the manifest and the selection: seed, epoch and a few options."""

import math
from dataclasses import dataclass
from typing import Literal

from dali_pipes.arguments import as_bool, as_integer, as_number
from dali_pipes.order.shapes import Buckets


@dataclass(frozen=True, kw_only=True)
class OrderInputs:
    """Everything that the order depends on beside the manifest and the selection."""

    seed: int = 0
    epoch: int = 0
    shuffle: bool = True
    """``False``: the manifest's order, which depends neither on the seed nor on the windows."""
    shuffle_window: int | Literal["all"] = "all"
    """Bytes of shards that are shuffled together; ``"all"``: the whole slice, an exact global shuffle. Each data set
    has its own windows."""
    ramp_up: bool = False
    """Begin with windows of 1, 2, 4, ... shards, so that the first batch waits for one shard only."""
    num_slices: int = 1
    """Parts of the shard list; each node stages one or more. Each step takes the same number of samples from every
    slice."""
    epoch_samples: int | None = None
    """Samples of an epoch, over all ranks. The next epoch continues where this one stopped, pass after pass. ``None``:
    an epoch is a pass."""
    weights: tuple[float, ...] | None = None
    """Proportions of several data sets in an epoch; ``None``: in proportion to their numbers of samples."""
    shapes: Buckets | None = None
    """How photos are grouped into batches; ``None``: batches have any photos, as the order gives them."""

    def __post_init__(self) -> None:
        for name in ("seed", "epoch", "num_slices"):
            object.__setattr__(self, name, as_integer(name, getattr(self, name)))
        for name in ("shuffle", "ramp_up"):
            object.__setattr__(self, name, as_bool(name, getattr(self, name)))
        window: object = self.shuffle_window
        if isinstance(window, str) and window != "all":
            raise ValueError(f"window_bytes must be 'all' or a positive number of bytes, got {window!r}")
        if window != "all":
            object.__setattr__(self, "shuffle_window", as_integer("window_bytes", self.shuffle_window))
        if self.epoch_samples is not None:
            object.__setattr__(self, "epoch_samples", as_integer("epoch_samples", self.epoch_samples))
        if self.weights is not None:
            if not isinstance(self.weights, tuple):
                raise TypeError(f"weights must be a tuple of numbers, got {self.weights!r}")
            object.__setattr__(self, "weights", tuple(as_number("a weight", weight) for weight in self.weights))
        if self.epoch < 0:
            raise ValueError(f"epoch must not be negative, got {self.epoch}")
        if self.num_slices < 1:
            raise ValueError(f"slices must be positive, got {self.num_slices}")
        if self.shuffle_window != "all" and self.shuffle_window < 1:
            raise ValueError(f"window_bytes must be 'all' or a positive number of bytes, got {self.shuffle_window!r}")
        if self.epoch_samples is not None:
            if self.epoch_samples < 1:
                raise ValueError(f"epoch_samples must be positive, got {self.epoch_samples}")
            if self.epoch_samples % self.num_slices:
                raise ValueError(
                    f"epoch_samples must be a multiple of slices, got {self.epoch_samples} and {self.num_slices}; "
                    f"pass {-(-self.epoch_samples // self.num_slices) * self.num_slices}"
                )
        if self.shapes is not None and self.num_slices > 1:
            raise ValueError(
                f"buckets need slices=1, got {self.num_slices}: each slice has other photos, so steps could not take "
                "as many groups from every slice; leave slices out, or Select(buckets=)"
            )
        if self.weights is not None and not all(math.isfinite(weight) and weight > 0 for weight in self.weights):
            raise ValueError(f"weights must be a tuple of positive numbers, got {self.weights!r}")
