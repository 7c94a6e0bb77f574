"""Describe what a budget of tokens makes of a data set: how full batches are, and how far photos are scaled down."""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from dali_pipes.order.tokens import TokenBudget
from dali_pipes.store.shard_set import ShardSet
from prep.inspect.bucket_info import plan_shapes


@dataclass(frozen=True, kw_only=True)
class TokensInfo:
    """All batches of an epoch on one rank, for one budget, largest number of photos and window."""

    photo: str
    max_tokens: int
    batch_size: int
    window_bytes: int | str
    num_windows: int
    num_batches: int
    num_tokens: int
    """Patches of all photos."""
    fill: float
    """The share of the budgets of all batches that is used."""
    photos_per_batch: float
    num_limited: int
    """Batches with as many photos as ``batch_size`` allows: a larger one would fill them better."""
    num_scaled: int
    """Photos that are scaled down, because they have more patches than ``max_photo_tokens``."""
    tokens_if_padded: int
    """Tokens of a batch of the mean number of photos, if all were padded to the largest photo."""

    def as_json(self) -> dict[str, Any]:
        """All fields, with JSON's types."""
        return asdict(self)


def describe_tokens(
    shards: ShardSet, budget: TokenBudget, *, batch_size: int = 256, window_bytes: int | None = None
) -> TokensInfo:
    """Pack epoch 0 of seed 0 for one rank, and say how full the batches are.

    Args:
        shards: The shards.
        budget: The budget.
        batch_size: The largest number of photos in a batch.
        window_bytes: As of `dali_pipes.options.Shuffle`; ``None``: all shards are one window.

    Raises:
        DataError: If the column file has no heights and widths, or it is not clear which component is the photo.
        ValueError: If no sample is left.
    """
    planned = plan_shapes(shards, budget, group_size=batch_size, window_bytes=window_bytes)
    height, width = (side[planned.is_kept] for side in planned.sizes)
    tokens = budget.tokens(height, width)
    whole = (height // budget.patch).astype(np.int64) * (width // budget.patch)
    sizes = np.concatenate([groups.size for groups in planned.plan.pools])
    photos_per_batch = float(sizes.mean())
    return TokensInfo(
        photo=planned.photo,
        max_tokens=budget.max_tokens,
        batch_size=batch_size,
        window_bytes="all" if window_bytes is None else window_bytes,
        num_windows=len(planned.plan.pools),
        num_batches=len(sizes),
        num_tokens=int(tokens.sum()),
        fill=float(tokens.sum() / (budget.max_tokens * len(sizes))),
        photos_per_batch=photos_per_batch,
        num_limited=int((sizes == batch_size).sum()),
        num_scaled=int((whole > budget.max_photo_tokens).sum()),
        tokens_if_padded=round(photos_per_batch * int(tokens.max())),
    )
